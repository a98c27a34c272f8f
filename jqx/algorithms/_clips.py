"""Clips of channels: limits by a constant, as in ReLU6, and what replaces them at sites whose
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
    """Returns factors that are at most 1 for clipped values, so that the clip of the function is
    not too tight.

    The factors of all channels of tensors that share a factor are divided by one number. That does
    not change how weights with one scale round. If one of these channels has no factor, the others
    are limited one by one.
    """
    together = _together(folds)
    clipped = folds.is_clipped
    largest = np.ones(together.max() + 1)
    np.maximum.at(largest, together[clipped], factors[clipped])
    largest[together[0]] = 1
    found = factors / largest[together]
    return np.where(clipped, np.minimum(found, 1), found)


def _together(folds: Folds) -> Array:
    """Returns for each factor the set of factors of channels of the same tensors."""
    each = [
        x.ravel() for visit in folds.visits for x in (folds.inputs(visit), folds.outputs(visit))
    ]
    a = np.concatenate([np.unique(x) for x in each if x.size])
    b = np.concatenate([np.full(len(np.unique(x)), x.max()) for x in each if x.size])
    return components(folds.count, a, b)


def clips_of(folds: Folds, factors: Array) -> dict[str, ChannelMap]:
    """Returns the clips of sites whose channels are scaled by factors, by key."""
    found: dict[str, Array] = {}
    for visit in folds.visits:
        limits, own = folds.limits(visit), factors[folds.inputs(visit)]
        clips = np.where((own == 1) | np.isinf(limits), np.inf, limits * own)
        if np.isfinite(clips).any():
            clips = most(visit, clips)
            loops = tuple(loop.length for loop in visit.site.loops)
            whole = found.setdefault(folds.key(visit), np.full((*loops, *clips.shape), np.inf))
            whole[visit.steps] = clips
    return {key: ChannelMap(clip=jnp.asarray(x, jnp.float32)) for key, x in found.items()}
