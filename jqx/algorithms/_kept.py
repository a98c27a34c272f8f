"""Scales that are applied at sites, for channels that no parameter before them can scale."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..observers import Observer
from ..transforms import ChannelMap
from ._channels import Visit
from ._folds import Folds
from ._labels import Array
from ._operands import least, most, spread
from ._scaled import Scaled


class Kept:
    """The divisors of operands at their sites, by key: `[*loops, *batch, channels]` on their own
    axes. All taps of a kernel share one number, and so do all experts.
    """

    def __init__(self, folds: Folds):
        self._folds = folds
        self.scales: dict[str, Array] = {}

    def divide(self, visits: Iterable[Visit], scale: Array) -> None:
        """Divides the operand of some sites by a scale of its channels, for channels without a
        pair.
        """
        for visit in visits:
            loops = tuple(loop.length for loop in visit.site.loops)
            found = self.scales.setdefault(self._folds.key(visit), np.ones((*loops, *scale.shape)))
            is_paired = least(visit, self._folds.inputs(visit)) > 0
            # A map holds float32: weights take the very factor that it applies.
            applied = np.asarray(1 / scale, np.float32).astype(np.float64)
            found[visit.steps] = np.where(is_paired, 1, 1 / applied)

    def of(self, visit: Visit) -> Array:
        """Returns the divisor of each channel of a site, [*batch, channels]."""
        key = self._folds.key(visit)
        if key not in self.scales:
            return np.ones(visit.inputs.shape)
        return spread(visit, self.scales[key][visit.steps])

    def maps(self) -> dict[str, ChannelMap]:
        """Returns the divisors as maps of sites."""
        found = self.scales.items()
        return {
            key: ChannelMap(scale=jnp.asarray(1 / x, jnp.float32))
            for key, x in found
            if np.any(x != 1)
        }


class Unpaired:
    """Numbers of factors for channels without a pair, after those of pairs: one for each channel of
    each value that sites read.
    """

    def __init__(self, scaled: Scaled, observer: Observer, visits: Sequence[Visit]):
        self._folds, self.count = scaled.folds, scaled.folds.count
        self._values: list[tuple[list[Visit], Array]] = []
        self._numbers: dict[int, Array] = {}
        for each in read_together(scaled, observer, visits):
            own = most(each[0], np.zeros(each[0].inputs.shape))
            channels = self.count + np.arange(own.size).reshape(own.shape)
            self._values.append((each, channels))
            self._numbers |= {id(visit): channels for visit in each}
            self.count += own.size

    def numbers(self, visit: Visit) -> Array:
        """Returns the numbers of all channels of a site, [*batch, channels]."""
        paired = self._folds.inputs(visit)
        if id(visit) not in self._numbers:
            return paired
        is_paired = spread(visit, least(visit, paired) > 0)
        return np.where(is_paired, paired, spread(visit, self._numbers[id(visit)]))

    def kept(self, factors: Array) -> Kept:
        """Returns what is applied at sites for factors by number."""
        kept = Kept(self._folds)
        for visits, channels in self._values:
            kept.divide(visits, 1 / factors[channels])
        return kept


def read_together(scaled: Scaled, observer: Observer, visits: Iterable[Visit]) -> list[list[Visit]]:
    """Groups sites by the value that they read, in its step."""
    together: dict[Any, list[Visit]] = {}
    for visit in visits:
        value = id(scaled.stats[scaled.name(visit, observer)]), visit.steps
        together.setdefault(value, []).append(visit)
    return list(together.values())
