"""Pairs: what can be scaled in the weights before a site, channel by channel, and taken back in its
own weight, so that the function stays as it is. Found in the dataflow of any function.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from .._calls import called
from .._checks import check_instance, require_that
from .._errors import message
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
      reasons: for each site of the plan that is in none why it is not, by name.
      kept: names of the sites where an algorithm has kept scales of channels without a pair.
      folds: which element takes which factor.
    """

    pairs: tuple[Pair, ...]
    reasons: Mapping[str, str]
    kept: frozenset[str] = frozenset()
    folds: Folds = dataclasses.field(repr=False, compare=False, kw_only=True)

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __str__(self) -> str:
        rows = [
            (", ".join(x.after), str(x.channels), " + ".join(x.before) + ", clipped" * x.clipped)
            for x in self
        ]
        for name, why in self.reasons.items():
            what = "kept at the site" if name in self.kept else "none"
            rows.append((name, "-", f"{what}: {why}"))
        width = max(len(row[0]) for row in rows) if rows else 0
        lines = [f"{a:{width}}  {b:>8}  {c}" for a, b, c in (_HEAD, *rows)]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])

    def keeping(self, keys: Iterable[str]) -> "Pairs":
        """Returns the same, of which scales are kept at the sites of these operands."""
        names = frozenset(key.rsplit(":", 1)[0] for key in keys)
        return dataclasses.replace(self, kept=names)

    def without_clips(self) -> "Pairs":
        """Returns the same without the pairs that are clipped."""
        folds = self.folds.without_clips()
        return Pairs(*folds.pairs(), folds=folds) if self.folds.is_clipped.any() else self

    def refuse(self, function: str) -> NoReturn:
        """Raises where there is nothing to scale, and says why."""
        raise Inapplicable(
            message(
                function,
                "no weight of the plan has channels that can be scaled.",
                given="; ".join(f"{name}: {why}" for name, why in [*self.reasons.items()][:4]),
                expected="a site behind a norm, or behind another weight and what commutes with "
                "scales",
                mend="leave this algorithm out; jqx.algorithms.find_pairs(f, plan)(params, x) "
                "tells of all sites.",
            )
        )

    def fold(self, params: Any, scales: Mapping[str, Any]) -> Any:
        """Returns parameters of the same function whose sites see operands divided by scales.

        Args:
          params: the parameters that the pairs were found with, or others of their shapes, in
            float; a tuple where there are several positions of them.
          scales: of some sites, by the key of the operand that is no weight: positive numbers
            `[*loops, *batch, channels]`, as `jqx.observers.absmax` has channels.

        Raises:
          ValueError: a key is unknown, a scale has another shape or is not positive, a channel that
            has no pair has one, sites that share a channel have different ones, or a channel is
            clipped, which takes `fold_with_maps`.
        """
        factors = self.folds.factors("algorithms.find_pairs", scales)
        clips = clips_of(self.folds, factors)
        require_that(
            not clips,
            error=ValueError,
            function="algorithms.find_pairs",
            problem="parameters alone cannot take `scales`: channels are clipped by a constant.",
            given=f"scales other than 1 of channels of {', '.join(sorted(clips)[:4])}",
            expected="scales of pairs that are not clipped",
            mend="call params, maps = pairs.fold_with_maps(params, scales), and "
            "jqx.map_channels(f, plan, maps)(params, x).",
        )
        return self.folds.folded(params, factors)

    def fold_with_maps(
        self, params: Any, scales: Mapping[str, Any]
    ) -> tuple[Any, dict[str, ChannelMap]]:
        """Returns parameters whose sites see operands divided by scales, and the maps with which
        the function is the same, of pairs that are clipped too: `jqx.map_channels(f, plan, maps)`
        of these parameters is `f` of the old ones.

        The clip of the function stays where it is. Of channels that are divided by `s`, the clip at
        their sites is `limit / s`; so `s` is 1 or more.

        Args:
          params: as in `fold`.
          scales: as in `fold`; 1 or more where channels are clipped. One factor for all channels of
            a pair changes nothing in how its weights round, so any scales can be made such.

        Raises:
          ValueError: as in `fold`, or a clipped channel is divided by less than 1.
        """
        factors = self.folds.factors("algorithms.find_pairs", scales)
        least = 1 / np.max(factors, where=self.folds.is_clipped, initial=1.0)
        require_that(
            least == 1,
            error=ValueError,
            function="algorithms.find_pairs",
            problem="a clipped channel is divided by less than 1.",
            given=f"{least:.6g}",
            expected="1 or more: the clip of the function stays, and would be too tight",
            mend="multiply all scales of the pair by one number.",
        )
        return self.folds.folded(params, factors), clips_of(self.folds, factors)


@called("algorithms.find_pairs", "call it in two steps: find_pairs(f, plan)(params, x).")
def find_pairs(f: Callable[..., Any], plan: Plan) -> Callable[..., Pairs]:
    """Finds which channels of a function can be scaled, and what must be scaled with them.

    A site multiplies an operand by a weight and sums over channels. Where the operand is divided by
    a positive number for each channel, and the rows of the weight are multiplied by it, the product
    is the same. What made the operand can take the division: the output axis of a weight before
    it, a bias, the gain of a norm, a table. It can where all on the way commutes with a factor per
    channel: views, sums of which all members take part, products with what has no factor, ReLU,
    attention's weighted sums of values, of which heads that share keys and values share factors.
    It cannot where a nonlinear function is on the way, a norm over the channels, a result of the
    function, or another use of a weight. Scans are gone through step by step.

    A ReLU that is clipped by positive constants, such as ReLU6, commutes with scales whose clips
    are scaled too: such pairs are "clipped" in the table, and take `Pairs.fold_with_maps`. From the
    clip to the sites there may be views, maxima and choices alone: a mean, or a sum with something
    else, is not clipped where its members are.

    Nothing is registered by architecture: pairs are found in the traced function.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`; all sites of the function take part, quantized or not.

    Returns:
      A function of the arguments of `f` that returns `Pairs`.

    Raises:
      TypeError: `f` is no function or `plan` no plan.
      ValueError: the plan was made for another function.

    Source: what such scales are for: Nagel et al., arXiv:1906.04721; Xiao et al., arXiv:2211.10438;
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
    check_instance(name, "plan", plan, Plan, mend="call jqx.make_plan(f, policy)(params, x) first.")

    def found(*args: Any) -> Pairs:
        own, *rest = every_site(name, f, plan, args)
        folds = Folds(own, followed_through(*rest))
        return Pairs(*folds.pairs(), folds=folds)

    return found
