"""Pairs: channels that can be scaled in the weights before a site and in its own weight, so that
the function does not change. They are found in the dataflow of any function.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from .._calls import called
from .._checks import check_instance
from .._errors import fail
from .._table import Printed
from ..transforms import ChannelMap, Plan
from ..transforms._shared import Inapplicable, check_function
from ._channels import followed_through
from ._clips import clips_of
from ._every import every_site
from ._folds import Folds, Pair

_HEAD = "sites", "channels", "scaled with"


@dataclasses.dataclass(frozen=True)
class Pairs(Printed):
    """The pairs of a function, as `find_pairs` returns them. Prints as a table.

    Attributes:
      pairs: one for each set of weights that are scaled together.
      reasons: why other sites of the plan are in no pair, by name.
      kept: names of sites where an algorithm applies scales of channels without a pair.
      left: names of sites whose channels an algorithm left as they were.
      folds: which element takes which factor.
    """

    pairs: tuple[Pair, ...]
    reasons: Mapping[str, str]
    kept: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    folds: Folds = dataclasses.field(repr=False, compare=False, kw_only=True)

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __str__(self) -> str:
        rows = [
            (
                ", ".join(x.after),
                str(x.channels),
                " + ".join(x.before)
                + ", clipped" * x.clipped
                + ", left" * self.left.issuperset(x.after),
            )
            for x in self
        ]
        for name, why in self.reasons.items():
            what = "kept at the site" if name in self.kept else "none"
            rows.append((name, "-", f"{what}: {why}"))
        width = max(len(row[0]) for row in rows) if rows else 0
        lines = [f"{a:{width}}  {b:>8}  {c}" for a, b, c in (_HEAD, *rows)]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])

    def keeping(self, keys: Iterable[str], left: Iterable[str]) -> "Pairs":
        """Returns a copy that lists the sites of these operands as keeping scales, and the sites of
        these names as left.
        """
        names = frozenset(key.rsplit(":", 1)[0] for key in keys)
        return dataclasses.replace(self, kept=names, left=frozenset(left))

    def without_clips(self) -> "Pairs":
        """Returns a copy without clipped pairs."""
        folds = self.folds.without_clips()
        return Pairs(*folds.pairs(), folds=folds) if self.folds.is_clipped.any() else self

    def refuse(self, function: str) -> NoReturn:
        """Raises an error that says why there is nothing to scale."""
        raise fail(
            function,
            "no weight of the plan has channels that can be scaled.",
            given="; ".join(f"{name}: {why}" for name, why in [*self.reasons.items()][:4]),
            expected="a site after a norm, or after another weight and operations that commute "
            "scales",
            fix="leave this algorithm out; jqx.algorithms.find_pairs(f, plan)(params, x) "
            "lists all sites.",
            error=Inapplicable,
        )

    def fold(self, params: Any, scales: Mapping[str, Any]) -> Any:
        """Returns parameters of the same function whose sites get operands divided by scales.

        Args:
          params: the parameters that the pairs were found with, or others of the same shapes, in
            float; a tuple if there are several positions.
          scales: scales of some sites, by the key of the operand that is not a weight: positive
            numbers `[*loops, *batch, channels]`, with channels as in `jqx.observers.absmax`.

        Raises:
          ValueError: a key is unknown, a scale has the wrong shape or is not positive, a channel
            without a pair has a scale, sites that share a channel have different scales, or a
            channel is clipped, which needs `fold_with_maps`.
        """
        factors = self.folds.factors("algorithms.find_pairs", scales)
        clips = clips_of(self.folds, factors)
        if clips:
            raise fail(
                "algorithms.find_pairs",
                "parameters alone cannot take `scales`: a constant clips some channels.",
                given=f"scales other than 1 of channels of {', '.join(sorted(clips)[:4])}",
                expected="scales of pairs that are not clipped",
                fix="call params, maps = pairs.fold_with_maps(params, scales), and "
                "jqx.map_channels(f, plan, maps)(params, x).",
            )
        return self.folds.folded(params, factors)

    def fold_with_maps(
        self, params: Any, scales: Mapping[str, Any]
    ) -> tuple[Any, dict[str, ChannelMap]]:
        """Returns parameters whose sites get operands divided by scales, and maps. Supports clipped
        pairs: `jqx.map_channels(f, plan, maps)` of the new parameters is `f` of the old ones.

        The clip of the function stays in place. Channels that are divided by `s` are clipped at
        their sites to `limit / s`, so `s` must be at least 1.

        Args:
          params: as in `fold`.
          scales: as in `fold`; at least 1 for clipped channels. A common factor of all channels of
            a pair does not change how its weights round, so any scales can be brought to that.

        Raises:
          ValueError: as in `fold`, or a clipped channel is divided by less than 1.
        """
        factors = self.folds.factors("algorithms.find_pairs", scales)
        least = 1 / np.max(factors, where=self.folds.is_clipped, initial=1.0)
        if least != 1:
            raise fail(
                "algorithms.find_pairs",
                "a clipped channel is divided by less than 1.",
                given=f"{least:.6g}",
                expected="1 or more: the clip of the function stays, and would be too tight",
                fix="multiply all scales of the pair by one number.",
            )
        return self.folds.folded(params, factors), clips_of(self.folds, factors)


@called("algorithms.find_pairs", "call it in two steps: find_pairs(f, plan)(params, x).")
def find_pairs(f: Callable[..., Any], plan: Plan) -> Callable[..., Pairs]:
    """Finds which channels of a function can be scaled, and what must be scaled with them.

    A site multiplies an operand by a weight and sums over channels. The product does not change if
    each channel of the operand is divided by a positive number, and the rows of the weight are
    multiplied by it. The division can be folded into what produces the operand: the output axis of
    a weight before it, a bias, the gain of a norm, or a table. That requires that all operations in
    between commute with a factor for each channel. These do: views, sums if all their terms are
    scaled, products with values that have no factor, ReLU, and attention's weighted sums of values,
    where heads that share keys and values share factors. These do not: a nonlinear function, a norm
    over the channels, a result of the function, or another use of a weight. Scans are followed step
    by step.

    A ReLU that is clipped by positive constants, such as ReLU6, commutes with scales if its clips
    are scaled too. Such pairs are marked "clipped" in the table, and need `Pairs.fold_with_maps`.
    Between the clip and the sites only views, maxima and choices are allowed: a mean, or a sum with
    another value, is not clipped even if its terms are.

    No architecture is registered: pairs are found in the traced function.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`; all sites of the function are considered, quantized or not.

    Returns:
      A function of the arguments of `f` that returns `Pairs`.

    Raises:
      TypeError: `f` is not a function or `plan` is not a plan.
      ValueError: the plan was made for another function.

    Source: uses of such scales: Nagel et al., arXiv:1906.04721; Xiao et al., arXiv:2211.10438;
    Lin et al., arXiv:2306.00978.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda p, x: jax.nn.relu(x @ p["up"] + p["bias"]) @ p["down"]
      >>> p = {"up": jnp.ones((2, 3)), "bias": jnp.ones(3), "down": jnp.ones((3, 2))}
      >>> plan = jqx.make_plan(f, jqx.presets.w8a16())(p, jnp.ones((1, 2)))
      >>> pairs = jqx.algorithms.find_pairs(f, plan)(p, jnp.ones((1, 2)))
      >>> print(pairs)
      sites             channels  scaled with
      ---------------------------------------------------
      down:dot_general         3  up:dot_general + bias
      up:dot_general           -  none: it is an argument
      >>> folded = pairs.fold(p, {"down:dot_general:lhs": jnp.array([2.0, 4.0, 8.0])})
      >>> folded["bias"]
      Array([0.5  , 0.25 , 0.125], dtype=float32)
      >>> f(folded, jnp.ones((1, 2))) == f(p, jnp.ones((1, 2)))
      Array([[ True,  True]], dtype=bool)
    """
    name = "algorithms.find_pairs"
    check_function(name, f)
    check_instance(name, "plan", plan, Plan, fix="call jqx.make_plan(f, policy)(params, x) first.")

    def found(*args: Any) -> Pairs:
        own, *rest = every_site(name, f, plan, args)
        folds = Folds(own, followed_through(*rest))
        return Pairs(*folds.pairs(), folds=folds)

    return found
