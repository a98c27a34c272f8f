"""Which factor each element of the parameters takes when channels are scaled."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._errors import fail
from ..transforms import Plan
from ._channels import Follower, Visit
from ._labels import FIXED, Array, narrowed
from ._named import Named


@dataclasses.dataclass(frozen=True)
class Pair:
    """Weights that are scaled together.

    Attributes:
      before: what produces the channels: paths of gains, biases and tables, names of sites.
      after: names of the sites that sum over the channels.
      channels: number of factors, over all steps of scans.
      clipped: whether a constant limits the inputs of a site, such as the 6 of ReLU6. Then sites
        need a clip for each channel.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    channels: int
    clipped: bool = False


class Folds(Named):
    """Which factors the parameters of a function can take.

    Attributes:
      visits: the sites whose weight no other operation uses, one for each step of the scans around
        them.
      numbers: for each label the number of its factor; 0 if the factor is 1.
      count: number of factors, including number 0.
      is_clipped: by number, whether values with that factor are clipped somewhere. Then the factor
        is at most 1.
    """

    def __init__(self, plan: Plan, follower: Follower):
        super().__init__(plan, follower.names)
        self.visits: list[Visit] = follower.visits
        self._refused: list[Visit] = follower.refused
        self.numbers: Array
        self.numbers, self._why = follower.labels.solved()
        self.count: int = int(self.numbers.max(initial=0)) + 1
        every = np.arange(len(self.numbers))
        self._limits = follower.labels.limits(every)
        self.is_clipped: Array = np.zeros(self.count, bool)
        self.is_clipped[self.numbers[np.isfinite(self._limits)]] = True
        self.is_clipped[0] = False
        self._shapes = follower.shapes
        self._made = {
            place: narrowed(labels.reshape(follower.shapes[place]))
            for place, labels in follower.made.items()
        }

    def inputs(self, visit: Visit) -> Array:
        """Returns the numbers of the factors of the channels of a site, [*batch, channels]."""
        return self._numbers(visit.inputs)

    def outputs(self, visit: Visit) -> Array:
        """Returns the numbers of the factors of the rows of a site, [*batch, rows]."""
        return self._numbers(visit.outputs)

    def limits(self, visit: Visit) -> Array:
        """Returns the upper limits of the channels of a site, [*batch, channels]; infinity for
        channels that have no factor or are not clipped.
        """
        limits = self._limits[np.maximum(visit.inputs, FIXED)]
        return np.where(self.inputs(visit) > 0, limits, np.inf)

    def without_clips(self) -> "Folds":
        """Returns a copy without factors for clipped values."""
        found = copy.copy(self)
        is_clipped = self.is_clipped[self.numbers]
        labels = np.flatnonzero(is_clipped).tolist()
        found._why = {**self._why, **dict.fromkeys(labels, "it is clipped by a constant")}
        found.numbers = np.where(is_clipped, 0, self.numbers)
        found.is_clipped = np.zeros_like(self.is_clipped)
        return found

    def _numbers(self, labels: Array) -> Array:
        return np.where(labels > FIXED, self.numbers[labels], 0)

    def shape(self, visit: Visit) -> tuple[int, ...]:
        """Returns the shape of the weight of a site."""
        return self._shapes[visit.place]

    def largest(self, found: Iterable[tuple[Array, Array]]) -> Array:
        """Returns the largest value for each number, from pairs of numbers and values; 0 for
        numbers without values.
        """
        most = np.zeros(self.count)
        for numbers, values in found:
            np.maximum.at(most, numbers.ravel(), np.broadcast_to(values, numbers.shape).ravel())
        return most

    def why(self, visit: Visit) -> str:
        """Returns why some channels of a site have no factor."""
        fixed = visit.inputs[self.inputs(visit) == 0]
        found = (self._why.get(int(label)) for label in np.unique(fixed) if label > FIXED)
        return next(filter(None, found), visit.why or "nothing before it can be scaled")

    def pairs(self) -> tuple[tuple[Pair, ...], dict[str, str]]:
        """Returns what is scaled together, by names, and why other sites of the plan are not."""
        before: dict[int, dict[str, None]] = {}
        after: dict[int, dict[str, None]] = {}

        def add(to: dict[int, dict[str, None]], labels: Array, name: str) -> None:
            for number in np.unique(self.numbers[labels[labels > FIXED]]):
                to.setdefault(int(number), {})[name] = None

        for visit in self.visits:
            add(after, visit.inputs, self.name(visit))
            add(before, visit.outputs, self.name(visit))
        for place, labels in self._made.items():
            add(before, labels, self.names[place])
        found: dict[tuple[tuple[str, ...], tuple[str, ...], bool], int] = {}
        for number, consumers in after.items():
            if number and number in before:
                key = tuple(before[number]), tuple(consumers), bool(self.is_clipped[number])
                found[key] = found.get(key, 0) + 1
        every = [*self.visits, *self._refused]
        why = {self.name(visit): self.why(visit) for visit in reversed(every)}
        paired = {name for _, consumers, _ in found for name in consumers}
        reasons = {
            site.name: why.get(site.name, "its weight has another use, or is not a plain matrix")
            for site in self.sites
            if site.name not in paired
        }
        pairs = [Pair(*key[:2], count, key[2]) for key, count in found.items()]
        return tuple(pairs), reasons

    def folded(
        self, params: Any, factors: Array, kept: Callable[[Visit], Array] | None = None
    ) -> Any:
        """Returns parameters scaled by factors. Values between them are scaled; the results of the
        function are unchanged. Computed in float64, rounded once.

        Args:
          params: the parameters.
          factors: the factors, by number.
          kept: the divisors that are applied at the site, [*batch, channels].
        """
        given, found = self.leaves(params), {}

        def float64(place: int) -> Array:
            if place not in found:
                found[place] = np.array(given[place], np.float64)
            return found[place]

        for visit in self.visits:
            rows, channels = factors[self.outputs(visit)], factors[self.inputs(visit)]
            channels = channels / (kept(visit) if kept else 1)
            if np.any(rows != 1) or np.any(channels != 1):
                by = rows[..., :, None] / channels[..., None, :]
                float64(visit.place).reshape(-1)[visit.elements] *= by
        for place, labels in self._made.items():
            by = factors[self._numbers(labels)]
            if np.any(by != 1):
                float64(place)[...] *= by
        for place, x in found.items():
            given[place] = jnp.asarray(x, given[place].dtype)
        return self.with_leaves(params, given)

    def factors(self, function: str, scales: Mapping[str, Any]) -> Array:
        """Returns factors by number from the divisors of operands, after checking these."""
        keys = {self.key(visit): visit.site for visit in self.visits}
        unknown = sorted(set(scales) - set(keys))
        if unknown:
            raise fail(
                function,
                "`scales` has keys of operands that cannot be scaled or do not exist.",
                given=", ".join(map(repr, unknown[:4])),
                expected=f"some of {', '.join(map(repr, list(keys)[:4]))}",
                fix="print jqx.algorithms.find_pairs(f, plan)(params, x): it shows the reasons.",
            )
        found, given_by = np.ones(self.count), [""] * self.count
        for visit in self.visits:
            key = self.key(visit)
            if key not in scales:
                continue
            own = np.asarray(scales[key], np.float64)
            shape = (*(loop.length for loop in visit.site.loops), *visit.inputs.shape)
            if not (own.shape == shape and bool(np.all((own > 0) & np.isfinite(own)))):
                raise fail(
                    function,
                    f"`scales[{key!r}]` does not fit.",
                    given=f"shape {own.shape}, from {own.min(initial=np.inf):.4g} to "
                    f"{own.max(initial=-np.inf):.4g}",
                    expected=f"positive numbers of shape {shape}, as jqx.observers.absmax has "
                    f"channels",
                    fix="pass the divisor of each channel of that operand, 1 for no change.",
                )
            numbers, by = self.inputs(visit), 1 / own[visit.steps]
            if not bool(np.all(by[numbers == 0] == 1)):
                raise fail(
                    function,
                    f"not all channels of {self.name(visit)} can be scaled.",
                    given=f"{int(np.sum((numbers == 0) & (by != 1)))} channels with a scale, of "
                    f"{numbers.size}, at step {visit.steps}: {self.why(visit)}",
                    expected="1 where a channel cannot be scaled",
                    fix="set the scales of these channels to 1.",
                )
            for number, factor in zip(numbers.ravel().tolist(), by.ravel().tolist(), strict=True):
                known = given_by[number]
                if number != 0 and known and not abs(found[number] / factor - 1) < 1e-6:
                    raise fail(
                        function,
                        "`scales` contradict each other.",
                        given=f"{1 / found[number]:.6g} of {known!r} and {1 / factor:.6g} of "
                        f"{key!r}",
                        expected="one scale for a channel that several sites read, or that is "
                        "repeated",
                        fix="use one scale for all of them, for example the largest.",
                    )
                if number:
                    found[number], given_by[number] = factor, key
        return found
