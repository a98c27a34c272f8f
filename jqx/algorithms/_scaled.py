"""The common part of algorithms that scale channels: the pairs of a function, and statistics of
channels.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..observers import Observer
from ..tensor import QSpec
from ..transforms import Plan, calibrate_batches
from ..transforms._shared import OnNonfinite, arguments_of
from ._channels import Visit
from ._folds import Folds
from ._label_rules import channels_of
from ._labels import Array
from ._pairs import Pairs, find_pairs


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A function whose channels are scaled.

    Attributes:
      pairs: the channels that can be scaled.
      visits: the sites whose weight the plan quantizes, in each step: all of them, or those with
        channels that can be scaled.
      weights: their weights as floats, by leaf, flat.
      stats: what observers recorded of their operands.
    """

    pairs: Pairs
    visits: Sequence[Visit]
    weights: dict[int, Array]
    stats: dict[str, Any]

    @classmethod
    def of(
        cls,
        function: str,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Sequence[Any],
        observers: tuple[Observer, ...],
        progress: bool,
        on_nonfinite: OnNonfinite,
        every: bool = False,
        clipped: bool = False,
    ) -> "Scaled":
        """Finds the pairs of a function, and observes their sites on batches. With `every`,
        observes all sites whose weight the plan quantizes; with `clipped`, also clipped pairs.
        """
        pairs = find_pairs(f, plan)(*arguments_of(plan, params, batches[0]))
        pairs = pairs if clipped else pairs.without_clips()
        folds = pairs.folds
        visits = [x for x in folds.visits if folds.weight(x) is not None]
        scalable = [x for x in visits if np.any(folds.inputs(x) > 0)]
        visits = visits if every else scalable
        if not visits:
            pairs.refuse(function)
        stats = {}
        if observers:
            paths = {re.escape(folds.site(x).path): observers for x in visits}
            options: Any = {"progress": progress, "on_nonfinite": on_nonfinite}
            stats = calibrate_batches(f, plan, params, batches, observers=paths, **options)
        leaves = folds.leaves(params)
        weights = {x.place: np.asarray(leaves[x.place], np.float32).ravel() for x in visits}
        return cls(pairs, visits, weights, dict(stats))

    @property
    def folds(self) -> Folds:
        """Which element takes which factor."""
        return self.pairs.folds

    def name(self, visit: Visit, observer: Observer) -> str:
        """Returns the key of the statistics of the operand of a site."""
        return f"{self.folds.key(visit)}@{observer}"

    def spec_of_operand(self, visit: Visit) -> QSpec | None:
        """Returns how the plan quantizes the other operand of a site."""
        return next(x.spec for x in self.folds.site(visit).operands if x.path is None)

    def observed(self, visit: Visit, observer: Observer) -> Any:
        """Returns what an observer recorded of the operand of a site, in its step."""
        found = self.stats[self.name(visit, observer)]
        return type(found)(*(np.asarray(x)[visit.steps] for x in found))

    def per_channel(self, visit: Visit, x: Array) -> Array:
        """Returns a statistic of the channels of an operand, [*batch, channels]."""
        if visit.site.op == "ragged_dot":
            return x
        return channels_of(x, visit.shape, visit.about)

    def largest_weights(self) -> Array:
        """Returns the largest weight of each channel, in magnitude, by number."""
        folds = self.folds
        return folds.largest((folds.inputs(x), self.largest_weight(x)) for x in self.visits)

    def largest_weight(self, visit: Visit) -> Array:
        """Returns the largest weight of each channel of a site, in magnitude."""
        return np.abs(self.weights[visit.place][visit.elements]).max(-2)
