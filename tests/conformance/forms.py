"""The ways in which every stored case is evaluated: each must give the same bits."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from ..arrays import on_device

FORMS = (
    pytest.param("eager", marks=pytest.mark.slow),
    "jit",
    pytest.param("jit_constants", marks=pytest.mark.slow),
    pytest.param("vmap", marks=pytest.mark.slow),
)
X64 = os.environ.get("JAX_ENABLE_X64") == "1"


TOGETHER = 24
"""Cases of one compiled program: a program costs far more than what it computes."""

Operands = Sequence[Any]


def evaluate(
    form: str, functions: Sequence[Callable[..., Any]], operands: Sequence[Operands]
) -> list[list[Any]]:
    """Evaluates each function of its operands in one form; `vmap` maps two copies of each."""
    found = []
    for i in range(0, len(functions), TOGETHER):
        found += _together(form, functions[i : i + TOGETHER], operands[i : i + TOGETHER])
    return found


def _together(
    form: str, functions: Sequence[Callable[..., Any]], operands: Sequence[Operands]
) -> list[list[Any]]:
    operands = [[None if a is None else on_device(a) for a in arrays] for arrays in operands]

    def each(operands: Sequence[Operands]) -> list[Any]:
        return [f(*arrays) for f, arrays in zip(functions, operands, strict=True)]

    match form:
        case "eager":
            return [[result] for result in each(operands)]
        case "jit":
            return [[result] for result in jax.jit(each)(operands)]
        case "jit_constants":
            return [[result] for result in jax.jit(lambda: each(operands))()]
        case "vmap":
            stacked = jax.tree.map(lambda a: np.stack([a, a]), operands)
            return [list(result) for result in jax.jit(jax.vmap(each))(stacked)]
    raise AssertionError(form)


def selected(cases: list, is_float64: Callable[[dict], bool]) -> list:
    """Keeps the float64 cases where x64 is on, and all others where it is off."""
    kept = [(case, arrays) for case, arrays in cases if is_float64(case) == X64]
    assert kept
    return kept
