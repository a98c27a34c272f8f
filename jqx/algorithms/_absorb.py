"""Bias absorption: moves the least value of a channel to the result of the site that reads it,
which reduces the range of the channel.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..observers import ObservedSite, Observer
from ..transforms import ChannelMap
from ._channels import Visit
from ._labels import Array
from ._operands import most
from ._scaled import Scaled


class LeastStats(NamedTuple):
    """The least value of each channel, float32, of the rank of the operand; infinity if empty."""

    least: jax.Array


@dataclasses.dataclass(frozen=True)
class Least(Observer):
    """Records the least value of each channel of an activation that a weight is multiplied by."""

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> LeastStats:
        reduced = site.reduced(len(operand.shape))
        shape = [1 if axis in reduced else n for axis, n in enumerate(operand.shape)]
        return LeastStats(jnp.full(shape, jnp.inf, jnp.float32))

    def observe(self, x: jax.Array, site: ObservedSite) -> LeastStats:
        axes = site.reduced(x.ndim)
        return LeastStats(x.astype(jnp.float32).min(axes, keepdims=True, initial=jnp.inf))

    def merge(self, a: LeastStats, b: LeastStats) -> LeastStats:
        return LeastStats(jnp.minimum(a.least, b.least))


def absorbed(
    scaled: Scaled, params: Any, factors: Array, clips: dict[str, ChannelMap]
) -> dict[str, ChannelMap]:
    """Returns maps that subtract the least value from channels, if it is above 0, clip the rest,
    and add the missing part to results.

    Args:
      scaled: has the least values of all sites, as they were before channels were scaled.
      params: the scaled parameters.
      factors: the factors of channels, by number.
      clips: the clips of scaled channels, by key.
    """
    folds, leaves = scaled.folds, scaled.folds.leaves(params)
    taken: dict[str, Array] = {}
    given: dict[str, Array] = {}
    for visit in scaled.visits:
        if not absorbs(scaled, visit):
            continue
        (least,) = scaled.observed(visit, Least())
        least = scaled.per_channel(visit, np.where(np.isfinite(least), np.maximum(least, 0), 0))
        least = least * factors[folds.inputs(visit)]
        if not np.any(least):
            continue
        w = np.asarray(leaves[visit.place], np.float64).ravel()[visit.elements]
        missing = np.sum(w * least[..., None, :], axis=-1)
        missing = missing.ravel() if visit.about.patches is not None else missing
        loops = tuple(loop.length for loop in visit.site.loops)
        ends = (
            (taken, folds.key(visit), most(visit, least)),
            (given, visit.site.output_key, missing),
        )
        for found, key, x in ends:
            found.setdefault(key, np.zeros((*loops, *x.shape)))[visit.steps] = x
    maps = dict(clips)
    for key, x in taken.items():
        clip = clips[key].clip if key in clips else None
        shift = jnp.asarray(-x, jnp.float32)
        maps[key] = ChannelMap(shift=shift, clip=None if clip is None else clip + shift)
    shifts = {key: ChannelMap(shift=jnp.asarray(x, jnp.float32)) for key, x in given.items()}
    return maps | shifts


def absorbs(scaled: Scaled, visit: Visit) -> bool:
    """Whether a site has a quantized operand that may be shifted: no padding with zeros."""
    if visit.site.op == "ragged_dot" or scaled.spec_of_operand(visit) is None:
        return False
    patches = visit.about.patches
    if patches is None:
        return True
    is_padded = any(n > 0 for ends in patches.padding for n in ends)
    return not is_padded and all(n == 1 for n in patches.lhs_dilation)
