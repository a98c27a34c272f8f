"""Scaling of channels, which leaves the function unchanged: SmoothQuant, AWQ, and equalization."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import called, check_fields, check_instance, flag, nothing, number, whole
from ..errors import fail
from ..numerics.lookup import format_of
from ..statistics.statistics import (
    Mean,
    ObservedSite,
    Observer,
    absmax,
    check_weight,
    hessian,
    mean_abs,
)
from ..table import Printed
from ..tensor.spec import QSpec
from ..transforms.algorithm import Chosen, Inapplicable
from ..transforms.arguments import check_function
from ..transforms.calibrate import arguments_of, calibrate_batches
from ..transforms.channel_map import ChannelMap
from ..transforms.plan import Plan
from ..transforms.quantize_params import quantize_weight
from ..transforms.stats import OnNonfinite
from .channels import (
    Array,
    Folds,
    Pair,
    Visit,
    at_most_one,
    channels_of,
    clips_of,
    components,
    followed_through,
    least,
    most,
    spread,
)
from .grids import Grids, every_site
from .interface import Few, algorithm
from .matrices import objective

# The common part of algorithms that scale channels: the pairs of a function, and statistics of
# channels.


# Pairs: channels that can be scaled in the weights before a site and in its own weight, so that
# the function does not change. They are found in the dataflow of any function.


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
        for name, reason in self.reasons.items():
            label = "kept at the site" if name in self.kept else "none"
            rows.append((name, "-", f"{label}: {reason}"))
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
        problem = "no weight of the plan has channels that can be scaled."
        detail = "; ".join(f"{name}: {reason}" for name, reason in [*self.reasons.items()][:4])
        fix = "leave this algorithm out; jqx.algorithms.find_pairs(f, plan)(params, x) lists all "
        fix += "sites."
        raise fail(function, problem, given=detail, fix=fix, error=Inapplicable)


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
    are scaled too. Such pairs are marked "clipped" in the table.
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
    """
    name = "algorithms.find_pairs"
    check_function(name, f)
    check_instance(name, "plan", plan, Plan, fix="call jqx.make_plan(f, policy)(params, x) first.")

    def found(*args: Any) -> Pairs:
        traced = every_site(name, f, plan, args)
        folds = Folds(traced.call_plan, followed_through(traced))
        return Pairs(*folds.pairs(), folds=folds)

    return found


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A function whose channels are scaled.

    Attributes:
      pairs: the channels that can be scaled.
      visits: the sites whose weight the plan quantizes, in each step: all of them, or those with
        channels that can be scaled.
      weights: their weights as floats, by leaf, flat.
      stats: what observers recorded of their operands.
      few_rows: the matrices that few rows reached.
    """

    pairs: Pairs
    visits: Sequence[Visit]
    weights: dict[int, Array]
    stats: dict[str, Any]
    few_rows: Few

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
        all_sites: bool = False,
        clipped: bool = False,
    ) -> "Scaled":
        """Finds the pairs of a function, and observes their sites on batches. With `all_sites`,
        observes all sites whose weight the plan quantizes; with `clipped`, also clipped pairs.
        """
        pairs = find_pairs(f, plan)(*arguments_of(plan, params, batches[0]))
        pairs = pairs if clipped else pairs.without_clips()
        folds = pairs.folds
        visits = [x for x in folds.visits if folds.weight(x) is not None]
        scalable = [x for x in visits if np.any(folds.inputs(x) > 0)]
        visits = visits if all_sites else scalable
        if not visits:
            pairs.refuse(function)
        stats = {}
        if observers:
            paths = {re.escape(folds.site(x).path): observers for x in visits}
            options: Any = {"progress": progress, "on_nonfinite": on_nonfinite}
            stats = calibrate_batches(f, plan, params, batches, observers=paths, **options)
        leaves = folds.leaves(params)
        weights = {
            x.leaf_index: np.asarray(leaves[x.leaf_index], np.float32).ravel() for x in visits
        }
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
        stats = self.stats[self.name(visit, observer)]
        return type(stats)(*(np.asarray(x)[visit.steps] for x in stats))

    def is_few(self, visit: Visit) -> Array:
        """Returns which matrices of a site only few rows reached, in its step: [*batch]."""
        *batch, channels = visit.inputs.shape
        is_few = self.few_rows.at(
            self.folds.site(visit), self.folds.key(visit), channels, visit.steps
        )
        return np.broadcast_to(is_few, batch)

    def share(self, visit: Visit) -> Array:
        """Returns the part of the rows that reaches each matrix of a site, [*batch], if means are
        taken over all rows, and not over those of an expert.
        """
        if visit.site.op == "ragged_dot":
            return np.ones(visit.inputs.shape[:-1])
        return self.few_rows.share(self.folds.site(visit), self.folds.key(visit), visit.steps)

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
        if not any(is_few.any() for _, is_few in sites):
            return
        is_known, is_beside = np.zeros((2, len(scale)), bool)
        for numbers, is_few in sites:
            is_known[numbers[~is_few]] = True
            is_beside[numbers[is_few]] = True
        for visit, (_, is_few) in zip(self.visits, sites, strict=True):
            is_known[self.folds.outputs(visit)[is_few]] = False
        set_of = scaled_together(len(scale), [numbers for numbers, _ in sites])
        for i in np.unique(set_of[is_beside]):
            members = (set_of == i) & is_known
            scale[members] *= range_kept(a[members], scale[members])
        scale[~is_known] = 1
        scale[0] = 1

    def per_channel(self, visit: Visit, x: Array) -> Array:
        """Returns a statistic of the channels of an operand, [*batch, channels]."""
        if visit.site.op == "ragged_dot":
            return x
        return channels_of(x, visit.shape, visit.observed_site)

    def largest_weight(self, visit: Visit) -> Array:
        """Returns the largest weight of each channel of a site, in magnitude."""
        return np.abs(self.weights[visit.leaf_index][visit.elements]).max(-2)

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
            by_leaf.setdefault(visit.leaf_index, []).append(i)
        for leaf, indices in by_leaf.items():
            visit_of_leaf, x = sites[indices[0]][0], self.weights[leaf].copy()
            for visit, numbers in (sites[i] for i in indices):
                x[visit.elements] *= scale[numbers][..., None, :]
            weight = self.folds.weight(visit_of_leaf)
            assert weight is not None
            weight_values = jnp.asarray(x.reshape(self.folds.shape(visit_of_leaf)))
            rounded = np.asarray(quantize_weight(weight_values, weight.spec).dequantize()).ravel()
            for i in indices:
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
    component = components(count, a, b)
    is_read = np.zeros(count, bool)
    is_read[a] = True
    which = np.unique(component[is_read], return_inverse=True)[1] + 1
    set_of = np.zeros(count, int)
    set_of[is_read] = which
    return set_of


# Scales that are applied at sites, for channels that no parameter before them can scale.


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
            divisors = self.scales.setdefault(
                self._folds.key(visit), np.ones((*loops, *scale.shape))
            )
            is_paired = least(visit, self._folds.inputs(visit)) > 0
            # A map holds float32: weights take the very factor that it applies.
            applied = np.asarray(1 / scale, np.float32).astype(np.float64)
            divisors[visit.steps] = np.where(is_paired, 1, 1 / applied)

    def of(self, visit: Visit) -> Array:
        """Returns the divisor of each channel of a site, [*batch, channels]."""
        key = self._folds.key(visit)
        if key not in self.scales:
            return np.ones(visit.inputs.shape)
        return spread(visit, self.scales[key][visit.steps])

    def maps(self) -> dict[str, ChannelMap]:
        """Returns the divisors as maps of sites."""
        return {
            key: ChannelMap(scale=jnp.asarray(1 / x, jnp.float32))
            for key, x in self.scales.items()
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
        for readers in read_together(scaled, observer, visits):
            channel_values = most(readers[0], np.zeros(readers[0].inputs.shape))
            channels = self.count + np.arange(channel_values.size).reshape(channel_values.shape)
            self._values.append((readers, channels))
            self._numbers |= {id(visit): channels for visit in readers}
            self.count += channel_values.size

    def numbers(self, visit: Visit) -> Array:
        """Returns the numbers of all channels of a site, [*batch, channels]."""
        paired = self._folds.inputs(visit)
        if id(visit) not in self._numbers:
            return paired
        is_paired = spread(visit, least(visit, paired) > 0)
        return np.where(is_paired, paired, spread(visit, self._numbers[id(visit)]))

    def kept(self, factors: Array) -> Kept:
        """Returns what is applied at sites for factors by number."""
        site_scales = Kept(self._folds)
        for visits, channels in self._values:
            site_scales.divide(visits, 1 / factors[channels])
        return site_scales


def read_together(scaled: Scaled, observer: Observer, visits: Iterable[Visit]) -> list[list[Visit]]:
    """Groups sites by the value that they read, in its step."""
    groups: dict[Any, list[Visit]] = {}
    for visit in visits:
        value = id(scaled.stats[scaled.name(visit, observer)]), visit.steps
        groups.setdefault(value, []).append(visit)
    return list(groups.values())


# SmoothQuant: divides large channels of activations, and multiplies the weights accordingly.


_LEAST = 1e-5
"""Magnitudes below it count as zero."""

_STATIC, _DYNAMIC = 0.85, 0.5

_LARGER, _SHARE = 2.0, 1e-5
"""By what factor a channel may be larger than in the batches, and in which share of later rows."""

_CLEAR = 0.3
"""Channels are scaled if less than this part of the errors is left: their geometric mean."""

_OBVIOUS = 0.03
"""A set of channels of which less than this part is left is scaled in any case."""

_TINY = 1e-12
"""Smaller parts count as this."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MeanSquare(Mean):
    """Sums the squares of the channels of an activation, as `mean` does their values."""

    def of(self, x: jax.Array) -> jax.Array:
        """Returns the values that are summed."""
        return jnp.square(x.astype(jnp.float32))

    def __str__(self) -> str:
        return "mean_square"


@algorithm("smooth_quant", "pass options by name: jqx.algorithms.smooth_quant(strength=.8).")
@dataclasses.dataclass(frozen=True)
class smooth_quant:
    """Divides channels of activations by `a**strength / w**(1 - strength)`, and multiplies the
    weights by it. Here `a` is the largest magnitude of a channel over batches, and `w` that of its
    weights. This is an algorithm of `jqx.ptq` that changes weights, but not the function.

    The division is folded into the parameters that produce the channels, as `find_pairs` finds
    them. If channels have no pair, the division is done at the site at run time, if the plan
    quantizes the other operand of the weight. It is one product for all sites that read the value,
    and XLA fuses it with the quantization. The report, a `Pairs`, says where, and why. Use it for
    plans that quantize activations.

    Each channel then has the range that it had in the batches. With static scales, a channel that
    is larger in later inputs saturates, where without scaling it had room up to the largest of all
    channels. So let the batches vary as the inputs will.

    Without a `strength`, channels that have static scales are scaled only if that clearly helps:
    all of them, or those alone of which less than 0.03 of the error is left. The mean squared error
    of products is the sum of the errors of rounded weights, of rounded activations, and of
    activations that saturate, if each channel is twice as large as in the batches in one of 100,000
    rows. To scale all, less than 0.3 of it must be left, in the geometric mean over sets of
    channels that are read together. Language models have outliers in few channels, and pass. The
    convolutions that we measured do not, and are as with `nearest`. The report's `left` names their
    sites.

    Experts that fewer rows reach than they have channels do not decide scales: their own channels
    are unchanged, and `report.codes` names them.

    Attributes:
      strength: 0 makes the largest magnitudes of all channels equal in the weights, 1 in the
        activations. `None` is 0.85 or no scaling, as above, for channels that sites with static
        scales read, and 0.5 for others. (Measured in SmolLM2 and in all-MiniLM-L6-v2: static scales
        lose least from 0.8 to 0.9, dynamic ones from 0.5 to 0.7.)
      keep: whether scales may be applied at sites at run time. If not, channels without a pair are
        unchanged, and the function does no additional work at run time.
      weight: weights of the rows of the inputs, as in `jqx.observers.absmax`; rows of weight 0 are
        ignored.

    Raises:
      TypeError: `keep` is not a bool, or `weight` is not a function.
      ValueError: `strength` is out of range; at run time, nothing can be scaled.

    Source: Xiao et al., arXiv:2211.10438. The choice whether to scale is our own.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"]
      >>> p = {"up": jnp.eye(4) * jnp.array([1.0, 1.0, 1.0, 64.0]), "down": jnp.ones((4, 2))}
      >>> smooth = jqx.algorithms.smooth_quant(strength=0.5)
      >>> quantized = jqx.ptq(f, jqx.presets.w8a8(), smooth, progress=False)(p, [jnp.ones((1, 4))])
      >>> quantized.params["down"].dequantize()[:, 0].round(1)
      Array([1., 1., 1., 8.], dtype=float32)
    """

    strength: float | None = None
    keep: bool = True
    weight: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        strength = number(0, 1) | nothing()
        check_fields("algorithms.smooth_quant", self, strength=strength, keep=flag())
        check_weight("algorithms.smooth_quant", self.weight)

    def rewrite(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
        on_nonfinite: OnNonfinite = "error",
    ) -> Chosen:
        """Returns parameters with scaled channels, and the scales that are applied at sites."""
        largest, square = absmax(weight=self.weight), _MeanSquare(weight=self.weight)
        observers = (largest, square) if self.strength is None else (largest,)
        scaled = Scaled.of(
            "algorithms.smooth_quant",
            f,
            plan,
            params,
            list(batches),
            observers,
            progress,
            on_nonfinite,
            all_sites=self.keep,
        )
        visits = scaled.visits
        quantized = [x for x in visits if scaled.spec_of_operand(x) is not None]
        unpaired = Unpaired(scaled, largest, quantized if self.keep else ())
        if unpaired.count == 1:
            scaled.pairs.refuse("algorithms.smooth_quant")
        numbers = [unpaired.numbers(x) for x in visits]
        maxima = [scaled.per_channel(x, scaled.observed(x, largest).largest) for x in visits]
        a, w = np.zeros((2, unpaired.count))
        for x, site_maxima, visit in zip(numbers, maxima, visits, strict=True):
            np.maximum.at(a, x, site_maxima)
            np.maximum.at(w, x, scaled.largest_weight(visit))
        set_of = scaled_together(unpaired.count, numbers)
        sets = [int(set_of[x.max()]) for x in numbers]
        steps = [_step(scaled.spec_of_operand(x)) for x in visits]
        is_static = np.zeros(set_of.max() + 1, bool)
        is_static[[i for i, step in zip(sets, steps, strict=True) if step]] = True
        is_static[0] = False
        strength: Any = self.strength
        if strength is None:
            strength = np.where(is_static[set_of], _STATIC, _DYNAMIC)
        scale = _scale(strength, a, w)
        scaled.level(
            scale, a, [(x, scaled.is_few(y)) for x, y in zip(numbers, visits, strict=True)]
        )
        is_left = np.zeros_like(is_static)
        if self.strength is None:
            sites = [
                _StepSite.of(scaled, visit, numbers[i], maxima[i], steps[i], square)
                for i, visit in enumerate(visits)
                if is_static[sets[i]]
            ]
            is_left = _left(scaled, sites, scale, set_of, is_static)
            scale = np.where(is_left[set_of], 1, scale)
        names = [scaled.folds.name(x) for x in visits]
        is_scaled = ~is_left[sets]
        left = set(names) - {name for name, scales in zip(names, is_scaled, strict=True) if scales}
        site_scales = unpaired.kept(1 / scale)
        basis = partial(scaled.folds.folded, factors=1 / scale, site_scales=site_scales.of)
        maps = site_scales.maps()
        report = scaled.pairs.keeping(maps, left=left)
        return Chosen(basis(params), report, maps, basis, few=scaled.few_rows.why)


@dataclasses.dataclass(frozen=True)
class _StepSite:
    """A weight in one step of the scans around its site, with statistics of its inputs.

    Attributes:
      visit: the site.
      numbers: numbers of the factors of its channels, [*batch, channels].
      largest: the largest magnitude of each channel of the inputs, likewise.
      squares: their mean squares, likewise; 0 for a matrix that few rows reached.
      weights: the sum of squares of the weights of each channel, likewise.
      step: the step of a static scale of the inputs, relative to their largest magnitude; 0 if
        there is no such scale.
    """

    visit: Visit
    numbers: Array
    largest: Array
    squares: Array
    weights: Array
    step: float

    @classmethod
    def of(
        cls,
        scaled: Scaled,
        visit: Visit,
        numbers: Array,
        largest: Array,
        step: float,
        square: Observer,
    ) -> "_StepSite":
        stats, is_known = scaled.observed(visit, square), ~scaled.is_few(visit)[..., None]
        mean = stats.total / np.maximum(np.asarray(stats.rows, np.float64), 1)
        squares = scaled.per_channel(visit, mean) / scaled.share(visit)[..., None]
        w = scaled.weights[visit.leaf_index][visit.elements]
        weights = np.einsum("...oj,...oj->...j", w, w)
        return cls(visit, numbers, largest, is_known * squares, is_known * weights, step)

    def lost(self, rounding: Array, scale: Array) -> float:
        """Returns the mean squared error of the product of a row, summed over its elements.

        Args:
          rounding: by what rounding changes the scaled weights, [*batch, rows, channels].
          scale: the divisors of the channels of the inputs, by number.
        """
        s = scale[self.numbers]
        of_weights = self.squares / s**2 * np.einsum("...oj,...oj->...j", rounding, rounding)
        if not self.step:
            return float(np.sum(of_weights))
        reach = np.max(self.largest / s)
        rounded = (self.step * reach * s) ** 2 / 12
        cut = np.maximum(_LARGER * self.largest - reach * s, 0) ** 2
        return float(np.sum(of_weights + self.weights * (rounded + _SHARE * cut)))


def _step(spec: QSpec | None) -> float:
    """Returns the step of a static scale, relative to the largest magnitude; 0 for other specs."""
    return 0.0 if spec is None or spec.dynamic else 2 / (format_of(spec.qtype).levels - 1)


def _left(
    scaled: Scaled, sites: Sequence[_StepSite], scale: Array, set_of: Array, is_static: Array
) -> Array:
    """Returns which sets of channels are not scaled, because nothing would clearly be gained."""

    def lost(scale: Array) -> Array:
        errors = np.zeros(len(is_static))
        for i, w, rounded in scaled.rounded([(x.visit, x.numbers) for x in sites], scale):
            errors[set_of[sites[i].numbers.max()]] += sites[i].lost(rounded - w, scale)
        return errors

    error_before, error_after = lost(np.ones_like(scale)), lost(scale)
    part = np.where(error_before > 0, error_after / np.where(error_before > 0, error_before, 1), 1)
    of_sets = np.log(np.maximum(part[is_static & (error_before > 0)], _TINY))
    if of_sets.sum() < len(of_sets) * np.log(_CLEAR):
        return np.zeros_like(is_static)
    return is_static & (part >= _OBVIOUS)


def _scale(strength: Any, a: Array, w: Array) -> Array:
    """Returns the divisors of channels; 1 for number 0 and for channels without statistics."""
    is_known = (a > _LEAST) & (w > _LEAST)
    is_known[0] = False
    a, w = np.where(is_known, a, 1), np.where(is_known, w, 1)
    return a**strength / w ** (1 - strength)


# AWQ: scales up the weights of channels with large activations, and clips the ranges of weights.
# Both minimize the error of the products.


_NO_LESS = 1e-4
_LEAST_RANGE = 0.5
"""The smallest part of a range that is tried."""


@dataclasses.dataclass(frozen=True)
class ScaledTogether:
    """Weights that were scaled with one ratio.

    Attributes:
      sites: their names, with the steps of the surrounding scans.
      ratio: the best exponent of the activations; 0 leaves the weights unchanged.
      duo: whether the weights were divided by their own magnitude.
      before: the squared error of the products with rounding to nearest, per input.
      after: the same after scaling.
      kept: whether part of the scale is applied at the sites at run time, because no parameter
        before them can take it.
    """

    sites: tuple[str, ...]
    ratio: float
    duo: bool
    before: float
    after: float
    kept: bool = False


class AwqReport(Printed, tuple[ScaledTogether, ...]):
    """One entry for each set of weights that was scaled together. Prints as a table."""

    def __str__(self) -> str:
        lines = [
            f"{'ratio':>6} {'duo':>4} {'run time':>8} {'error before':>12} {'after':>10}  sites"
        ]
        lines += [
            f"{x.ratio:6.2f} {'yes' if x.duo else 'no':>4} {'yes' if x.kept else 'no':>8} "
            f"{x.before:12.4g} {x.after:10.4g}  {', '.join(x.sites)}"
            for x in self
        ]
        return "\n".join(lines)


@algorithm("awq", "pass options by name, such as jqx.algorithms.awq(steps=20).")
@dataclasses.dataclass(frozen=True)
class awq:
    """Scales channels of weights by `a**ratio / w**(1 - ratio)`, and divides their inputs by it.

    Here `a` is the mean magnitude of the inputs of a channel, and `w` that of its weights, relative
    to their group. This is an algorithm of `jqx.ptq` that changes weights. The function does not
    change, apart from clipping. The ratio is the one with the least squared error of the products
    of all sites that read the channels together; unchanged weights are one of the candidates. Then
    ranges of weights are clipped, by the same error.

    The division is folded into the parameters that produce the channels, as `find_pairs` finds
    them. If channels have no pair, the division is done at the site at run time, if that reduces
    the error. It is one product for all sites that read the value, and XLA fuses it with the
    producer of the value, or with its quantization.

    Experts that fewer rows reach than they have channels do not decide scales: their own channels
    and ranges are unchanged, and `report.codes` names them.

    Attributes:
      steps: number of ratios that are tried, from 0 to 1, and of parts of a range, from all of it
        to a half.
      duo: whether to try each ratio also without `w`.
      clip: whether ranges are clipped.
      keep: whether scales may be applied at sites at run time. If not, channels without a pair are
        unchanged, and the function does no additional work at run time.
      weight: weights of the rows of the inputs, as in `jqx.observers.hessian`.

    Raises:
      TypeError: an option has the wrong type.
      ValueError: `steps` is less than 2; at run time, nothing can be scaled.

    Source: Lin et al., arXiv:2306.00978. This implementation uses the error of each product, from
    the Hessian of its inputs; the paper uses the error of a block.

    Example:
      >>> import jqx
      >>> jqx.algorithms.awq(clip=False).steps
      20
    """

    steps: int = 20
    duo: bool = True
    clip: bool = True
    keep: bool = True
    weight: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_fields("algorithms.awq", self, steps=whole(2), duo=flag(), clip=flag(), keep=flag())
        check_weight("algorithms.awq", self.weight)

    def rewrite(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
        on_nonfinite: OnNonfinite = "error",
    ) -> Chosen:
        """Returns the parameters with scaled channels and clipped ranges, and the maps that are
        applied at sites.
        """
        observers = tuple(x(weight=self.weight) for x in (hessian, mean_abs, absmax))
        scaled = Scaled.of(
            "algorithms.awq",
            f,
            plan,
            params,
            list(batches),
            observers,
            progress,
            on_nonfinite,
            all_sites=self.clip or self.keep,
        )
        unpaired = Unpaired(scaled, observers[1], scaled.visits if self.keep else ())
        relative = _relative(scaled)
        sites = [
            _ErrorSite.of(
                scaled, visit, observers, relative[visit.leaf_index], unpaired.numbers(visit)
            )
            for visit in scaled.visits
        ]
        factors, report = self._scales(scaled, sites, unpaired.count)
        site_scales = unpaired.kept(factors)
        basis = partial(scaled.folds.folded, factors=factors, site_scales=site_scales.of)
        params = basis(params)
        if self.clip:
            params = self._clipped(scaled, sites, params, factors)
        return Chosen(params, report, site_scales.maps(), basis, few=scaled.few_rows.why)

    def _scales(
        self, scaled: Scaled, sites: Sequence["_ErrorSite"], count: int
    ) -> tuple[Array, AwqReport]:
        """Returns the factors with the least error, by number."""
        a, w = _means(count, sites, "inputs"), _means(count, sites, "weights")
        set_of = scaled_together(count, [site.numbers for site in sites])
        read = [(site.numbers, site.is_few) for site in sites]
        largest = np.zeros(count)
        for site in sites:
            np.maximum.at(largest, site.numbers[~site.is_few], site.largest[~site.is_few])
        best = initial_error = np.full(set_of.max() + 1, np.inf)
        ratios, duos = np.zeros(len(best)), np.zeros(len(best), bool)
        factors = np.ones(count)
        duo_options = (False, True) if self.duo else (True,)
        tried = [(i / (self.steps - 1), duo) for duo in duo_options for i in range(1, self.steps)]
        for ratio, duo in [(0.0, False), *tried]:  # unchanged weights first
            scale = a**ratio / (w ** (1 - ratio) + _NO_LESS if duo else 1)
            scale = _centred(scale, set_of)
            scaled.level(scale, largest, read)
            error = np.zeros(len(best))
            for i, _, q in scaled.rounded([(x.visit, x.numbers) for x in sites], scale):
                where = set_of[sites[i].numbers.max()]
                error[where] += sites[i].lost(q / scale[sites[i].numbers][..., None, :])
            if not ratio:
                initial_error = error
            better = error < best
            best = np.where(better, error, best)
            ratios, duos = np.where(better, ratio, ratios), np.where(better, duo, duos)
            factors = np.where(better[set_of], 1 / scale, factors)
        factors[0] = 1
        names = [[] for _ in best]
        rows, at_run_time = np.ones(len(best)), np.zeros(len(best), bool)
        for site in sites:
            where = set_of[site.numbers.max()]
            names[where].append(f"{site.name}{list(site.visit.steps) or ''}")
            rows[where] = max(site.rows, 1)
            without_pair = site.numbers[site.numbers >= scaled.folds.count]
            at_run_time[where] |= np.any(factors[without_pair] != 1)
        entries = [
            ScaledTogether(
                tuple(names[i]),
                float(ratios[i]),
                bool(duos[i]),
                float(initial_error[i] / rows[i]),
                float(best[i] / rows[i]),
                bool(at_run_time[i]),
            )
            for i in range(1, len(best))
        ]
        return factors, AwqReport(entries)

    def _clipped(
        self, scaled: Scaled, sites: Sequence["_ErrorSite"], params: Any, factors: Array
    ) -> Any:
        """Returns parameters with clipped groups, where clipping reduces the error."""
        leaves = scaled.folds.leaves(params)
        site_of_leaf = {site.visit.leaf_index: site for site in sites}
        for leaf_index, one_site in site_of_leaf.items():
            leaf_sites = [site for site in sites if site.visit.leaf_index == leaf_index]
            grids = Grids.of({"": leaves[leaf_index]}, {"": one_site.spec})
            values = np.asarray(leaves[leaf_index], np.float32).ravel()
            label = grids.label(np.arange(values.size, dtype=np.int32))
            low, high = np.zeros((2, len(grids.scale)), np.float32)
            np.minimum.at(low, label, values)
            np.maximum.at(high, label, values)
            best, part = np.full(len(low), np.inf), np.ones(len(low), np.float32)
            for step in range(self.steps):
                share = np.float32(1 - step / self.steps * (1 - _LEAST_RANGE))
                cut = np.clip(values, (low * share)[label], (high * share)[label])
                q = quantize_weight(jnp.asarray(cut.reshape(one_site.shape)), one_site.spec)
                change = np.asarray(q.dequantize()).ravel() - values
                error = np.zeros(len(low))
                for site in leaf_sites:
                    site.add_error(error, change, label, factors)
                better = error < best
                best, part = np.where(better, error, best), np.where(better, share, part)
            cut = np.clip(values, (low * part)[label], (high * part)[label])
            leaves[leaf_index] = jnp.asarray(cut.reshape(one_site.shape), leaves[leaf_index].dtype)
        return scaled.folds.with_leaves(params, leaves)


@dataclasses.dataclass(frozen=True)
class _ErrorSite:
    """A weight in one step of the scans around its site, with statistics of its inputs.

    Attributes:
      name: name of the site.
      visit: the site.
      spec: how its weight is rounded.
      shape: shape of the weight, over all steps.
      elements: the numbers of its elements, [*batch, rows, channels].
      numbers: numbers of the factors of its channels, [*batch, channels]; 0 if there is none.
      w: its values, [*batch, rows, channels].
      products: the sum of products of its inputs, [*batch, channels, channels]; 0 for a matrix
        that few rows reached.
      inputs: the mean magnitude of each channel over the rows that reach a matrix,
        [*batch, channels].
      largest: the largest magnitude, likewise.
      weights: the mean magnitude of the weight, relative to the largest of its group, likewise.
      rows: number of inputs.
      is_few: which of the matrices only few rows reached, [*batch].
    """

    name: str
    visit: Visit
    spec: QSpec
    shape: tuple[int, ...]
    elements: Array
    numbers: Array
    w: Array
    products: Array
    inputs: Array
    largest: Array
    weights: Array
    rows: float
    is_few: Array

    @classmethod
    def of(
        cls, scaled: Scaled, visit: Visit, observers: Any, relative: Array, numbers: Array
    ) -> "_ErrorSite":
        folds = scaled.folds
        weight = folds.weight(visit)
        assert weight is not None
        sums, means, maxima = (scaled.observed(visit, x) for x in observers)
        elements, is_few = visit.elements, scaled.is_few(visit)
        rows = np.maximum(np.asarray(means.rows, np.float64), 1)
        return cls(
            folds.name(visit),
            visit,
            weight.spec,
            folds.shape(visit),
            elements,
            numbers,
            scaled.weights[visit.leaf_index][elements],
            np.where(is_few[..., None, None], 0, np.asarray(sums.products, np.float32)),
            scaled.per_channel(visit, means.total / rows) / scaled.share(visit)[..., None],
            scaled.per_channel(visit, maxima.largest),
            relative[elements].mean(-2),
            float(np.max(sums.rows)),
            is_few,
        )

    def lost(self, rounded: Array) -> float:
        """Returns the squared error of the product, summed over the inputs."""
        difference = (rounded - self.w).astype(np.float32)
        matrices = zip(
            difference.reshape(-1, *difference.shape[-2:]),
            self.products.reshape(-1, *self.products.shape[-2:]),
            strict=True,
        )
        return float(sum(objective(x, gram).sum() for x, gram in matrices))

    def add_error(self, error: Array, difference: Array, label: Array, factors: Array) -> None:
        """Adds the squared error that each group contributes to the product, by the label of the
        group. Inputs are multiplied by their factors.
        """
        scaling = factors[self.numbers]
        products = self.products * (scaling[..., :, None] * scaling[..., None, :]).astype(
            np.float32
        )
        elements = self.elements
        count = elements.shape[-1]
        for element_ids, gram in zip(
            elements.reshape(-1, *elements.shape[-2:]),
            products.reshape(-1, count, count),
            strict=True,
        ):
            groups = label[element_ids]
            starts = np.flatnonzero(np.any(np.diff(groups, axis=1, prepend=-1) != 0, axis=0))
            for start, stop in zip(starts, [*starts[1:], count], strict=True):
                x = difference[element_ids[:, start:stop]]
                np.add.at(error, groups[:, start], objective(x, gram[start:stop, start:stop]))


def _relative(scaled: Scaled) -> dict[int, Array]:
    """Returns the magnitudes of weights, relative to the largest that shares their scale: by leaf,
    flat.
    """
    magnitudes = {}
    for visit in scaled.visits:
        weight, leaf_index = scaled.folds.weight(visit), visit.leaf_index
        if leaf_index not in magnitudes and weight is not None:
            x = scaled.weights[leaf_index]
            grids = Grids.of({"": x.reshape(scaled.folds.shape(visit))}, {"": weight.spec})
            label, size = grids.label(np.arange(x.size, dtype=np.int32)), np.abs(x)
            largest = np.zeros(len(grids.scale), np.float32)
            np.maximum.at(largest, label, size)
            magnitudes[leaf_index] = size / (largest[label] + np.float32(1e-6))
    return magnitudes


def _means(count: int, sites: Sequence[_ErrorSite], field: str) -> Array:
    """Returns the mean of a statistic over the channels of each number; 1 if there are none."""
    total, counts = np.zeros(count), np.zeros(count)
    for site in sites:
        numbers = site.numbers[~site.is_few]
        np.add.at(total, numbers, getattr(site, field)[~site.is_few])
        np.add.at(counts, numbers, 1)
    return np.maximum(np.where(counts > 0, total / np.maximum(counts, 1), 1), _NO_LESS)


def _centred(scale: Array, set_of: Array) -> Array:
    """Returns scales, normalized so that the least and the largest of each set multiply to 1."""
    low, high = np.full(set_of.max() + 1, np.inf), np.zeros(set_of.max() + 1)
    scale = np.maximum(np.broadcast_to(scale, set_of.shape), _NO_LESS)
    np.minimum.at(low, set_of, scale)
    np.maximum.at(high, set_of, scale)
    middle = np.where(high > 0, np.sqrt(np.where(np.isfinite(low), low, 1) * high), 1)
    return np.where(set_of > 0, scale / middle[set_of], 1)


# Cross-layer equalization: gives the channels of consecutive weights the same range.


# Bias absorption: moves the least value of a channel to the result of the site that reads it,
# which reduces the range of the channel.


class LeastStats(NamedTuple):
    """The least value of each channel, float32, of the rank of the operand; infinity if empty."""

    minimum: jax.Array


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
        return LeastStats(jnp.minimum(a.minimum, b.minimum))


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
    added: dict[str, Array] = {}
    for visit in scaled.visits:
        if not absorbs(scaled, visit):
            continue
        (minimum,) = scaled.observed(visit, Least())
        minimum = scaled.per_channel(
            visit, np.where(np.isfinite(minimum), np.maximum(minimum, 0), 0)
        )
        minimum = minimum * factors[folds.inputs(visit)]
        if not np.any(minimum):
            continue
        w = np.asarray(leaves[visit.leaf_index], np.float64).ravel()[visit.elements]
        missing = np.sum(w * minimum[..., None, :], axis=-1)
        missing = missing.ravel() if visit.observed_site.patches is not None else missing
        loops = tuple(loop.length for loop in visit.site.loops)
        ends = (
            (taken, folds.key(visit), most(visit, minimum)),
            (added, visit.site.output_key, missing),
        )
        for shifts_of_key, key, x in ends:
            shifts_of_key.setdefault(key, np.zeros((*loops, *x.shape)))[visit.steps] = x
    maps = dict(clips)
    for key, x in taken.items():
        clip = clips[key].clip if key in clips else None
        shift = jnp.asarray(-x, jnp.float32)
        maps[key] = ChannelMap(shift=shift, clip=None if clip is None else clip + shift)
    shifts = {key: ChannelMap(shift=jnp.asarray(x, jnp.float32)) for key, x in added.items()}
    return maps | shifts


def absorbs(scaled: Scaled, visit: Visit) -> bool:
    """Whether a site has a quantized operand that may be shifted: no padding with zeros."""
    if visit.site.op == "ragged_dot" or scaled.spec_of_operand(visit) is None:
        return False
    patches = visit.observed_site.patches
    if patches is None:
        return True
    is_padded = any(n > 0 for ends in patches.padding for n in ends)
    return not is_padded and all(n == 1 for n in patches.lhs_dilation)


_STILL = 1e-3
_MOST = 100


@algorithm("equalize", "pass options by name: jqx.algorithms.equalize(steps=20).")
@dataclasses.dataclass(frozen=True)
class equalize:
    """Scales channels between weights so that each has the same range in the weight that produces
    it and in those that read it, `sqrt(r1 r2)` for ranges `r1` and `r2`: an algorithm of `jqx.ptq`
    that changes weights, but not the function.

    Use it for plans with one scale for all channels of a weight. It needs no data, except for
    absorption.

    Channels after a ReLU that is clipped by constants, such as ReLU6, are scaled together with
    their clips. These are applied at the sites that read them (`jqx.Quantized.maps`), as a minimum
    for each channel that XLA fuses with the ReLU. The clip of the function stays, so factors of
    such channels must be at most 1. To get there, all factors of a weight are divided by one
    number, which does not matter if the weight has one scale.

    If the plan quantizes the other operand of a weight, the least value of a channel over batches
    is subtracted from it, if it is above 0, and its product with the weight is added to the result
    (bias absorption). A smaller range has a smaller step. This is exact for all values, unless a
    convolution pads with zeros. Such sites are left out, and so is `ragged_dot`.

    With one scale for each channel of a weight nothing is gained, and activations with one static
    scale lose. (Measured in EfficientNet-Lite0: agreement falls from 85.6 to 75.0 %.)

    Channels that come from a gain or a table are unchanged, because these are not quantized. The
    report is a `Pairs`.

    Attributes:
      steps: maximum number of passes over all pairs. It stops when no factor changes by more than a
        thousandth.
      absorb: whether least values are absorbed. In EfficientNet-Lite0, with 8 bits and one scale
        for each weight and activation, that raises agreement from 69.2 to 76.0 %.

    Raises:
      TypeError: `absorb` is not a bool.
      ValueError: `steps` is not a positive integer; at run time, nothing can be scaled.

    Source: Nagel et al., arXiv:1906.04721, sections 4.1 and 4.2, but with measured least values.
    The paper replaces ReLU6 by ReLU.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"]
      >>> p = {"up": jnp.full((2, 2), 9.0), "down": jnp.ones((2, 2))}
      >>> quantize = jqx.ptq(f, jqx.presets.w8a16(), jqx.algorithms.equalize(), progress=False)
      >>> quantized = quantize(p, [jnp.ones((1, 2))])
      >>> [float(x.dequantize()[0, 0].round(2)) for x in quantized.params.values()]
      [3.0, 3.0]
    """

    steps: int = _MOST
    absorb: bool = True

    def __post_init__(self) -> None:
        check_fields("algorithms.equalize", self, steps=whole(1), absorb=flag())

    def rewrite(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
        on_nonfinite: OnNonfinite = "error",
    ) -> Chosen:
        """Returns the parameters with scaled channels, and the maps that are applied at sites."""
        is_quantized = any(x.path is None and x.spec for s in plan.sites for x in s.operands)
        absorbs = self.absorb and is_quantized
        scaled = Scaled.of(
            "algorithms.equalize",
            f,
            plan,
            params,
            list(batches) if absorbs else [next(iter(batches))],
            (Least(),) if absorbs else (),
            progress,
            on_nonfinite,
            all_sites=absorbs,
            clipped=True,
        )
        folds = scaled.folds
        leaves = folds.leaves(params)
        visits = [x for x in folds.visits if folds.weight(x) is not None]
        flat = {
            x.leaf_index: np.abs(np.asarray(leaves[x.leaf_index], np.float64)).ravel()
            for x in visits
        }
        sizes = [flat[x.leaf_index][x.elements] for x in visits]
        inputs, outputs = [folds.inputs(x) for x in visits], [folds.outputs(x) for x in visits]
        factors = np.ones(folds.count)

        sites = list(zip(inputs, outputs, sizes, strict=True))

        def ranges(group: Array) -> tuple[Array, Array]:
            """Returns the ranges of a group's channels in weights that produce and read them."""
            touched = [x for x in sites if np.isin(x[0], group).any() or np.isin(x[1], group).any()]
            current = [
                x * factors[o][..., :, None] / factors[i][..., None, :] for i, o, x in touched
            ]
            read = folds.largest(
                (i, x.max(-2)) for (i, _, _), x in zip(touched, current, strict=True)
            )
            produced = folds.largest(
                (o, x.max(-1)) for (_, o, _), x in zip(touched, current, strict=True)
            )
            return produced, read

        groups = _groups(folds.count, inputs)
        for _ in range(self.steps):
            previous = factors.copy()
            for group in groups:
                produced, read = ranges(group)
                group = group[(produced[group] > 0) & (read[group] > 0)]
                factors[group] *= np.sqrt(read[group] / produced[group])
            if np.max(np.abs(np.log(factors / previous))) < _STILL:
                break
        factors = at_most_one(folds, factors)
        basis, maps = partial(folds.folded, factors=factors), clips_of(folds, factors)
        params = basis(params)
        if absorbs:
            maps = absorbed(scaled, params, factors, maps)
        if folds.count == 1 and not maps:
            scaled.pairs.refuse("algorithms.equalize")
        return Chosen(params, scaled.pairs, maps, basis)


def _groups(count: int, inputs: list[Array]) -> list[Array]:
    """Returns the numbers of factors, grouped by the first site that reads them."""
    left, groups = np.ones(count, bool), []
    left[0] = False
    for numbers in inputs:
        members = np.unique(numbers[left[numbers]])
        left[members] = False
        if members.size:
            groups.append(members)
    return groups
