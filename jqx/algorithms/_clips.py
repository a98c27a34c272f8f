"""Clips of channels: what a constant limits, as ReLU6 does, and what takes its place at sites where
channels are scaled.
"""

import jax.numpy as jnp
import numpy as np

from ..transforms import ChannelMap
from ._folds import Folds
from ._labels import Array
from ._operands import most
from ._scipy import components


def at_most_one(folds: Folds, factors: Array) -> Array:
    """Returns factors that are 1 at most where values are clipped, so that the clip of the function
    is not too tight: those of all channels of the tensors that share some are divided by one
    number, which leaves how weights with one scale round as it is. Where one of these channels has
    no factor, the others are limited one by one.
    """
    together = _together(folds)
    clipped = folds.is_clipped
    largest = np.ones(together.max() + 1)
    np.maximum.at(largest, together[clipped], factors[clipped])
    largest[together[0]] = 1
    found = factors / largest[together]
    return np.where(clipped, np.minimum(found, 1), found)


def _together(folds: Folds) -> Array:
    """Returns of each number which of those that are channels of the same tensors it is of."""
    each = [x.ravel() for met in folds.met for x in (folds.inputs(met), folds.outputs(met))]
    a = np.concatenate([np.unique(x) for x in each if x.size])
    b = np.concatenate([np.full(len(np.unique(x)), x.max()) for x in each if x.size])
    return components(folds.count, a, b)


def clips_of(folds: Folds, factors: Array) -> dict[str, ChannelMap]:
    """Returns what clips the channels of sites whose values are scaled by factors, by key."""
    found: dict[str, Array] = {}
    for met in folds.met:
        limits, own = folds.limits(met), factors[folds.inputs(met)]
        clips = np.where((own == 1) | np.isinf(limits), np.inf, limits * own)
        if np.isfinite(clips).any():
            clips = most(met, clips)
            loops = tuple(loop.length for loop in met.site.loops)
            whole = found.setdefault(folds.key(met), np.full((*loops, *clips.shape), np.inf))
            whole[met.steps] = clips
    return {key: ChannelMap(clip=jnp.asarray(x, jnp.float32)) for key, x in found.items()}
