"""The common part of algorithms that scale channels: the pairs of a function, and statistics of
channels.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..observers import Observer
from ..tensor import QSpec
from ..transforms import Plan, calibrate_batches
from ..transforms._shared import OnNonfinite, arguments_of, quantize_weight
from ._channels import Visit
from ._few import Few
from ._folds import Folds
from ._label_rules import channels_of
from ._labels import Array
from ._pairs import Pairs, find_pairs
from ._scipy import components


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A function whose channels are scaled.

    Attributes:
      pairs: the channels that can be scaled.
      visits: the sites whose weight the plan quantizes, in each step: all of them, or those with
        channels that can be scaled.
      weights: their weights as floats, by leaf, flat.
      stats: what observers recorded of their operands.
      few: the matrices that few rows reached.
    """

    pairs: Pairs
    visits: Sequence[Visit]
    weights: dict[int, Array]
    stats: dict[str, Any]
    few: Few

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
        return cls(pairs, visits, weights, dict(stats), Few(stats))

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

    def is_few(self, visit: Visit) -> Array:
        """Returns which matrices of a site only few rows reached, in its step: [*batch]."""
        *batch, channels = visit.inputs.shape
        found = self.few.at(self.folds.site(visit), self.folds.key(visit), channels, visit.steps)
        return np.broadcast_to(found, batch)

    def share(self, visit: Visit) -> Array:
        """Returns the part of the rows that reaches each matrix of a site, [*batch], if means are
        taken over all rows, and not over those of an expert.
        """
        if visit.site.op == "ragged_dot":
            return np.ones(visit.inputs.shape[:-1])
        return self.few.share(self.folds.site(visit), self.folds.key(visit), visit.steps)

    def level(self, scale: Array, a: Array, sites: Sequence[tuple[Array, Array]]) -> None:
        """Sets scales to 1 that only matrices read that few rows reached, or that belong to results
        of such a matrix, as all that a `ragged_dot` returns. Other scales that are read together
        with these are multiplied by one number, so that the largest input stays the same: a static
        scale then covers few rows as well as without scales.

        Args:
          scale: the scales of channels, by number.
          a: the largest magnitudes of their inputs, likewise.
          sites: for each visit the numbers of its channels, [*batch, channels], and which of its
            matrices few rows reached, [*batch].
        """
        if not any(few.any() for _, few in sites):
            return
        is_known, is_beside = np.zeros((2, len(scale)), bool)
        for numbers, few in sites:
            is_known[numbers[~few]] = True
            is_beside[numbers[few]] = True
        for visit, (_, few) in zip(self.visits, sites, strict=True):
            is_known[self.folds.outputs(visit)[few]] = False
        together = scaled_together(len(scale), [numbers for numbers, _ in sites])
        for i in np.unique(together[is_beside]):
            own = (together == i) & is_known
            scale[own] *= range_kept(a[own], scale[own])
        scale[~is_known] = 1
        scale[0] = 1

    def per_channel(self, visit: Visit, x: Array) -> Array:
        """Returns a statistic of the channels of an operand, [*batch, channels]."""
        if visit.site.op == "ragged_dot":
            return x
        return channels_of(x, visit.shape, visit.about)

    def largest_weight(self, visit: Visit) -> Array:
        """Returns the largest weight of each channel of a site, in magnitude."""
        return np.abs(self.weights[visit.place][visit.elements]).max(-2)

    def rounded(
        self, sites: Sequence[tuple[Visit, Array]], scale: Array
    ) -> Iterator[tuple[int, Array, Array]]:
        """Yields weights with scaled channels, and these rounded, [*batch, rows, channels], with
        the place of their site among those given. One leaf of the parameters at a time is copied.

        Args:
          sites: visits, and the numbers of their channels.
          scale: the scales of channels, by number.
        """
        by_leaf: dict[int, list[int]] = {}
        for i, (visit, _) in enumerate(sites):
            by_leaf.setdefault(visit.place, []).append(i)
        for leaf, own in by_leaf.items():
            first, x = sites[own[0]][0], self.weights[leaf].copy()
            for visit, numbers in (sites[i] for i in own):
                x[visit.elements] *= scale[numbers][..., None, :]
            weight = self.folds.weight(first)
            assert weight is not None
            whole = jnp.asarray(x.reshape(self.folds.shape(first)))
            rounded = np.asarray(quantize_weight(whole, weight.spec).dequantize()).ravel()
            for i in own:
                elements = sites[i][0].elements
                yield i, x[elements], rounded[elements]


def range_kept(a: Array, scale: Array) -> float:
    """Returns by what to multiply scales of channels so that the largest of `a`, the magnitudes of
    their inputs, stays the same.
    """
    return float((a / scale).max() / a.max()) if a.any() else 1.0


def scaled_together(count: int, numbers: Sequence[Array]) -> Array:
    """Returns for each factor the set of factors that the same sites read; 0 for factors that no
    site reads, and for number 0.
    """
    a = np.concatenate([x[x > 0] for x in numbers])
    b = np.concatenate([np.full(int(np.sum(x > 0)), x.max()) for x in numbers])
    found = components(count, a, b)
    is_read = np.zeros(count, bool)
    is_read[a] = True
    which = np.unique(found[is_read], return_inverse=True)[1] + 1
    together = np.zeros(count, int)
    together[is_read] = which
    return together
