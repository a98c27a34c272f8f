"""Sums over batches of what a site reads, as GPTQ needs them."""

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
    """Sums of products of inputs: once for sites that read the same ones one after another."""

    def __init__(self) -> None:
        self._last: tuple[list[Any], Any, Any] | None = None

    def sums(self, streams: list[Inputs], about: Any) -> Any:
        """Returns the sum of `x x^T` over batches, float64 [*batch, channels, channels], the drift
        from float inputs, where there are any, and how many rows there were, of each matrix.
        """
        kind, arrays = dataclasses.replace(about, path=""), jax.tree.leaves(streams)
        counts = any(is_counted(x) for stream in streams for batch in stream for x in batch)
        about = about if counts else kind  # one program for all sites that are alike
        if self._last is not None and kind == self._last[1] and _same(self._last[0], arrays):
            return self._last[2]
        self._last = None
        # Of one batch after another, so that no more than one is on the device.
        own, *floats = ((list(map(on_device, batch)) for batch in each) for each in streams)
        total, drift, rows = None, None, 0
        for x in own:
            seen = _observed(*x, about=about)
            total, rows = _added(total, seen.products), rows + np.asarray(seen.rows, np.float64)
            for exact in floats:
                both = _drift(next(exact)[0], *x, about=about)
                drift = Drift(*map(_added, drift or (None, None), both))
        # What nothing else holds is not kept for this.
        self._last = list(map(weakref.ref, arrays)), kind, (total, drift, rows)
        return self._last[2]


def _same(known: Sequence[Any], arrays: Sequence[Any]) -> bool:
    """Whether arrays are the very ones that are known."""
    return len(known) == len(arrays) and all(a() is b for a, b in zip(known, arrays, strict=True))


def _added(total: Array | None, part: jax.Array) -> Array:
    """Returns a sum with what one batch gives, in float64."""
    if total is None:
        return np.array(part, np.float64)
    total += np.asarray(part)
    return total


@partial(jax.jit, static_argnames="about")
def _observed(x: Any, sizes: Any = None, *, about: Any) -> HessianStats:
    return hessian.observe(value_of(x), _told(about, x, sizes))


@partial(jax.jit, static_argnames="about")
def _drift(exact: Any, x: Any, sizes: Any = None, *, about: Any) -> tuple[jax.Array, jax.Array]:
    """Returns what `Drift` holds, of one batch."""
    lost, site = value_of(exact) - value_of(x), _told(about, x, sizes)
    return gram(lost, value_of(x), site), gram(lost, lost, site)


def _told(about: ObservedSite, x: Any, sizes: Any) -> ObservedSite:
    """Returns what an observer is told of an operand, and of how much its rows count."""
    counts = count_operand("algorithms.gptq", about.path, x) if is_counted(x) else None
    return dataclasses.replace(about, sizes=value_of(sizes), weights=counts)
