"""What algorithms that change parameters must leave as it is, and what changes of channels make."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jqx._src.algorithms.channels import clips_of
from jqx.algorithms import gptq


def assert_near(results: Any, exact: Any, share: float = 1e-5) -> None:
    """Asserts that float32 results are those of another program, to a share of the largest number
    of each.
    """
    for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(exact), strict=True):
        assert np.abs(x - y).max() <= share * np.abs(y).max()


def divided(pairs: Any, params: Any, scales: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Parameters of the same function whose sites get operands divided by scales, and the maps that
    clip these: scales [*loops, *batch, channels] by the key of an operand.
    """
    folds = pairs.folds
    factors = np.ones(folds.count)
    for visit in folds.visits:
        if folds.key(visit) in scales:
            scale = np.asarray(scales[folds.key(visit)], np.float64)
            factors[folds.inputs(visit)] = 1 / scale[visit.steps]
    factors[0] = 1
    return folds.folded(params, factors), clips_of(folds, factors)


class Interruption(Exception):
    """Ends a run."""


def interrupt_gptq(monkeypatch: Any, count: int) -> tuple[list[list[str]], list[int]]:
    """Makes GPTQ raise an `Interruption` after so many calls of `solve`. Returns the names of the
    matrices of each call, and a list whose one element is that number.
    """
    calls: list[list[str]] = []
    limit, solve = [count], gptq.solve

    def until(self: Any, matrices: Any, *args: Any) -> Any:
        if len(calls) == limit[0]:
            raise Interruption
        calls.append([matrix.name for matrix in matrices])
        return solve(self, matrices, *args)

    monkeypatch.setattr(gptq, "solve", until)
    return calls, limit
