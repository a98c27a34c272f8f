"""Sums over batches of products of the inputs of a site, which GPTQ needs."""

import dataclasses
import weakref
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..observers import ObservedSite, hessian
from ..observers._shared import HessianStats, flags, gram, without_nonfinite
from ..transforms._shared import (
    check_finite,
    count_operand,
    is_counted,
    value_of,
    warn_left_out,
)
from ._few import reached
from ._matrices import Drift, counted
from ._offload import on_device
from ._sequential import Inputs

Array = np.ndarray


class Sums:
    """Sums of products of inputs, computed once for consecutive sites with the same inputs.

    Attributes:
      function: the name of the algorithm, for errors.
      ignores: whether rows are left out that are not finite.
      left_out: the flags of such rows, by the name of the site.
      batches: the indices of batches that have some.
    """

    def __init__(self, function: str, ignores: bool, every: bool) -> None:
        self.function, self.ignores, self._shape = function, ignores, () if every else None
        self.left_out: dict[str, Array] = {}
        self.batches: dict[int, None] = {}
        self._last: tuple[list[Any], Any, Any] | None = None

    def sums(self, streams: list[Inputs], about: Any, name: str, batches: Sequence[int]) -> Any:
        """Returns the sum of `x x^T` over batches, float64 [*batch, channels, channels], the drift
        from float inputs, if there are any, and for each matrix the number of rows that reach it,
        the number of rows at the site, and the sum of `|x|^4`. `name` is that of the site in its
        step; `batches` are the indices of the batches.
        """
        kind, arrays = dataclasses.replace(about, path=""), jax.tree.leaves(streams)
        counts = any(is_counted(x) for stream in streams for batch in stream for x in batch)
        about = about if counts else kind  # one program for all equal sites
        if self._last is not None and kind == self._last[1] and _same(self._last[0], arrays):
            return self._last[2]
        self._last = None
        # Batch by batch, so that only one is on the device.
        each, *floats = ((list(map(on_device, batch)) for batch in each) for each in streams)
        total, drift, rows = None, None, (0, 0, 0)
        for place, x in zip(batches, each, strict=True):
            exact = [next(stream)[0] for stream in floats]
            options: Any = {"about": about, "ignores": self.ignores, "shape": self._shape}
            seen, both, flags = _observed(exact, *x, **options)
            flags = np.asarray(flags)
            self._look(flags, name, place)
            own = np.asarray(seen.rows, np.float64)
            own = np.broadcast_to(own, seen.products.shape[:-2])
            own = *counted(own, reached(flags, about.op)), np.asarray(seen.fourth, np.float64)
            total, rows = _added(total, seen.products), tuple(map(np.add, rows, own))
            if both is not None:
                drift = Drift(*map(_added, drift or (None, None), both))
        # Arrays that nothing else holds are not kept for this.
        self._last = list(map(weakref.ref, arrays)), kind, (total, drift, rows)
        return self._last[2]

    def _look(self, flags: Array, name: str, batch: int) -> None:
        """Raises if rows of a batch are not finite, or notes them if they are left out."""
        if not flags[..., :2].any():
            return
        if not self.ignores:
            check_finite(self.function, {name: flags}, batch)
        self.left_out[name] = self.left_out.get(name, 0) + flags
        self.batches[batch] = None

    def warn(self) -> None:
        """Warns of rows that were left out."""
        warn_left_out(self.function, self.left_out, sorted(self.batches))


def _same(known: Sequence[Any], arrays: Sequence[Any]) -> bool:
    """Whether arrays are the same objects as the known ones."""
    return len(known) == len(arrays) and all(a() is b for a, b in zip(known, arrays, strict=True))


def _added(total: Array | None, part: jax.Array) -> Array:
    """Adds the part of one batch to a sum, in float64."""
    if total is None:
        return np.array(part, np.float64)
    total += np.asarray(part)
    return total


@partial(jax.jit, static_argnames=("about", "ignores", "shape"))
def _observed(
    exact: list[Any], x: Any, sizes: Any = None, *, about: Any, ignores: bool, shape: Any
) -> tuple[HessianStats, tuple[jax.Array, jax.Array] | None, jax.Array]:
    """Returns the sums of one batch, the contents of its `Drift` if there is a float input, and
    flags of both inputs.
    """
    site = _with_rows(about, x, sizes, shape)
    values = [value_of(z) for z in (x, *exact)]
    found = reduce(jnp.maximum, (flags.observe(z, site) for z in values))
    if ignores:
        for z in exact:  # rows of the float function that do not count
            if is_counted(z) and z.is_known:
                other = count_operand("algorithms.gptq", about.path, z, shape)
                own = jnp.ones_like(other) if site.weights is None else site.weights
                site = dataclasses.replace(site, weights=jnp.minimum(own, other))
        for i, z in enumerate(values):
            values[i], site = without_nonfinite(z, site)
    own, drift = values[0], None
    if exact:
        lost = values[1] - own
        drift = gram(lost, own, site), gram(lost, lost, site)
    return hessian.observe(own, site), drift, found


def _with_rows(about: ObservedSite, x: Any, sizes: Any, shape: Any) -> ObservedSite:
    """Returns the site with sizes of groups and weights of rows, for observers."""
    counts = count_operand("algorithms.gptq", about.path, x, shape) if is_counted(x) else None
    return dataclasses.replace(about, sizes=value_of(sizes), weights=counts)
