"""Scales that are kept at sites: of channels that nothing before them can take the scale of."""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from ..transforms import ChannelMap
from ._channels import Met
from ._folds import Folds
from ._labels import Array


class Kept:
    """What operands are divided by at their sites, by key: `[*loops, *batch, channels]` of their
    own axes, one number for all taps of a kernel, and for all experts.
    """

    def __init__(self, folds: Folds):
        self._folds = folds
        self.scales: dict[str, Array] = {}

    def divide(self, mets: Iterable[Met], scale: Array) -> None:
        """Divides the operand that some sites read by a scale of its channels, where these have no
        pair.
        """
        for met in mets:
            loops = tuple(loop.length for loop in met.site.loops)
            found = self.scales.setdefault(self._folds.key(met), np.ones((*loops, *scale.shape)))
            is_paired = least(met, self._folds.inputs(met)) > 0
            found[met.steps] = np.where(is_paired, 1, scale)

    def of(self, met: Met) -> Array:
        """Returns what each channel of a site is divided by, [*batch, channels]."""
        key = self._folds.key(met)
        if key not in self.scales:
            return np.ones(met.inputs.shape)
        own = self.scales[key][met.steps]
        if met.about.patches is not None:
            taps = int(np.prod(met.about.patches.kernel))
            return np.repeat(own, taps).reshape(met.inputs.shape)
        return np.broadcast_to(own, met.inputs.shape)

    def maps(self) -> dict[str, ChannelMap]:
        """Returns them as maps of sites."""
        found = self.scales.items()
        return {
            key: ChannelMap(scale=jnp.asarray(1 / x, jnp.float32))
            for key, x in found
            if np.any(x != 1)
        }


def most(met: Met, x: Array) -> Array:
    """Returns the largest of what each channel of a site has, by channel of its operand."""
    if met.about.patches is not None:
        taps = int(np.prod(met.about.patches.kernel))
        return x.reshape(-1, taps).max(-1)
    return x.max(0) if met.site.op == "ragged_dot" else x


def least(met: Met, x: Array) -> Array:
    """Returns the least, likewise."""
    return -most(met, -x)
