"""Sums over batches of products of the inputs of a site, which GPTQ needs."""

import dataclasses
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from ..observers import ObservedSite, hessian
from ..observers._shared import HessianStats, gram
from ..transforms._shared import count_operand, is_counted, value_of
from ._matrices import Drift
from ._offload import on_device
from ._sequential import Inputs

Array = np.ndarray


class Sums:
    """Sums of products of inputs, computed once for consecutive sites with the same inputs."""

    def __init__(self) -> None:
        self._last: tuple[list[Any], Any, Any] | None = None

    def sums(self, streams: list[Inputs], about: Any) -> Any:
        """Returns the sum of `x x^T` over batches, float64 [*batch, channels, channels], the drift
        from float inputs, if there are any, and the number of rows, for each matrix.
        """
        kind, arrays = dataclasses.replace(about, path=""), jax.tree.leaves(streams)
        counts = any(is_counted(x) for stream in streams for batch in stream for x in batch)
        about = about if counts else kind  # one program for all equal sites
        if self._last is not None and kind == self._last[1] and _same(self._last[0], arrays):
            return self._last[2]
        self._last = None
        # Batch by batch, so that only one is on the device.
        own, *floats = ((list(map(on_device, batch)) for batch in each) for each in streams)
        total, drift, rows = None, None, 0
        for x in own:
            seen = _observed(*x, about=about)
            total, rows = _added(total, seen.products), rows + np.asarray(seen.rows, np.float64)
            for exact in floats:
                both = _drift(next(exact)[0], *x, about=about)
                drift = Drift(*map(_added, drift or (None, None), both))
        # Arrays that nothing else holds are not kept for this.
        self._last = list(map(weakref.ref, arrays)), kind, (total, drift, rows)
        return self._last[2]


def _same(known: Sequence[Any], arrays: Sequence[Any]) -> bool:
    """Whether arrays are the same objects as the known ones."""
    return len(known) == len(arrays) and all(a() is b for a, b in zip(known, arrays, strict=True))


def _added(total: Array | None, part: jax.Array) -> Array:
    """Adds the part of one batch to a sum, in float64."""
    if total is None:
        return np.array(part, np.float64)
    total += np.asarray(part)
    return total


@partial(jax.jit, static_argnames="about")
def _observed(x: Any, sizes: Any = None, *, about: Any) -> HessianStats:
    return hessian.observe(value_of(x), _with_rows(about, x, sizes))


@partial(jax.jit, static_argnames="about")
def _drift(exact: Any, x: Any, sizes: Any = None, *, about: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the contents of `Drift` for one batch."""
    lost, site = value_of(exact) - value_of(x), _with_rows(about, x, sizes)
    return gram(lost, value_of(x), site), gram(lost, lost, site)


def _with_rows(about: ObservedSite, x: Any, sizes: Any) -> ObservedSite:
    """Returns the site with sizes of groups and weights of rows, for observers."""
    counts = count_operand("algorithms.gptq", about.path, x) if is_counted(x) else None
    return dataclasses.replace(about, sizes=value_of(sizes), weights=counts)
