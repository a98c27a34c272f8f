"""Scaling of channels by their activations: SmoothQuant and AWQ."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import check_fields, flag, nothing, number, whole
from ..numerics.lookup import format_of
from ..statistics.statistics import (
    Mean,
    Observer,
    absmax,
    check_weight,
    hessian,
    mean_abs,
)
from ..table import Printed
from ..tensor.spec import QSpec
from ..transforms.algorithm import AlgorithmResult
from ..transforms.plan import Plan
from ..transforms.quantize_params import quantize_weight
from ..transforms.stats import OnNonfinite
from .channels import Visit
from .grids import Grids
from .interface import algorithm
from .labels import Array
from .matrices import objective
from .scaling import Scaled, Unpaired, scaled_together

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


def smoothing(a: Array, w: Array, strength: Any) -> Array:
    """Returns the divisors of channels, `s = a**strength / w**(1 - strength)`, equation 4 of the
    paper; 1 for number 0 and for channels without statistics.

    Args:
      a: the largest magnitude of each channel of the activations, [channels].
      w: that of its weights.
      strength: the exponent, a number or one for each channel.
    """
    is_known = (a > _LEAST) & (w > _LEAST)
    is_known[0] = False
    a, w = np.where(is_known, a, 1), np.where(is_known, w, 1)
    return a**strength / w ** (1 - strength)


# Both minimize the error of the products.


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
      runtime_scales: whether scales may be applied at sites at run time. If not, channels without a
        pair are unchanged, and the function does no additional work at run time.
      weight: weights of the rows of the inputs, as in `jqx.extend.absmax`; rows of weight 0 are
        ignored.

    Raises:
      TypeError: `runtime_scales` is not a bool, or `weight` is not a function.
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
    runtime_scales: bool = True
    weight: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        strength = number(0, 1) | nothing()
        check_fields("algorithms.smooth_quant", self, strength=strength, runtime_scales=flag())
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
    ) -> AlgorithmResult:
        """Returns parameters with scaled channels, and the scales that are applied at sites."""
        largest, square = absmax(weight=self.weight), _MeanSquare(weight=self.weight)
        observers = (largest, square) if self.strength is None else (largest,)
        name, how = "algorithms.smooth_quant", {"progress": progress, "on_nonfinite": on_nonfinite}
        batches, all_sites = list(batches), self.runtime_scales
        scaled = Scaled.of(name, f, plan, params, batches, observers, how, all_sites=all_sites)
        visits = scaled.visits
        quantized = [x for x in visits if scaled.spec_of_operand(x) is not None]
        unpaired = Unpaired(scaled, largest, quantized if self.runtime_scales else ())
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
        scale = smoothing(a, w, strength)
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
        return AlgorithmResult(basis(params), report, maps, basis, few=scaled.few_rows.why)


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


_NO_LESS = 1e-4
_LEAST_RANGE = 0.5
"""The smallest part of a range that is tried."""


@dataclasses.dataclass(frozen=True)
class ScaledTogether:
    """Weights that were scaled with one ratio.

    Attributes:
      sites: their names, with the steps of the surrounding scans.
      ratio: the best exponent of the activations; 0 leaves the weights unchanged.
      duo_scaling: whether the weights were divided by their own magnitude.
      before: the squared error of the products with rounding to nearest, per input.
      after: the same after scaling.
      kept: whether part of the scale is applied at the sites at run time, because no parameter
        before them can take it.
    """

    sites: tuple[str, ...]
    ratio: float
    duo_scaling: bool
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
            f"{x.ratio:6.2f} {'yes' if x.duo_scaling else 'no':>4} {'yes' if x.kept else 'no':>8} "
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
      duo_scaling: whether to try each ratio also without `w`.
      clip: whether ranges are clipped.
      runtime_scales: whether scales may be applied at sites at run time. If not, channels without a
        pair are unchanged, and the function does no additional work at run time.
      weight: weights of the rows of the inputs, as in `jqx.extend.hessian`.

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
    duo_scaling: bool = True
    clip: bool = True
    runtime_scales: bool = True
    weight: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_fields(
            "algorithms.awq",
            self,
            steps=whole(2),
            duo_scaling=flag(),
            clip=flag(),
            runtime_scales=flag(),
        )
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
    ) -> AlgorithmResult:
        """Returns the parameters with scaled channels and clipped ranges, and the maps that are
        applied at sites.
        """
        observers = tuple(x(weight=self.weight) for x in (hessian, mean_abs, absmax))
        name, how = "algorithms.awq", {"progress": progress, "on_nonfinite": on_nonfinite}
        batches, all_sites = list(batches), self.clip or self.runtime_scales
        scaled = Scaled.of(name, f, plan, params, batches, observers, how, all_sites=all_sites)
        unpaired = Unpaired(scaled, observers[1], scaled.visits if self.runtime_scales else ())
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
        return AlgorithmResult(params, report, site_scales.maps(), basis, few=scaled.few_rows.why)

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
        duo_options = (False, True) if self.duo_scaling else (True,)
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
            names[where].append(f"{scaled.folds.name(site.visit)}{list(site.visit.steps) or ''}")
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
        visit_of_leaf = {site.visit.leaf_index: site.visit for site in sites}
        for leaf_index, visit in visit_of_leaf.items():
            leaf_sites = [site for site in sites if site.visit.leaf_index == leaf_index]
            weight, shape = scaled.folds.weight(visit), scaled.folds.shape(visit)
            assert weight is not None
            grids = Grids.of({"": leaves[leaf_index]}, {"": weight.spec})
            values = np.asarray(leaves[leaf_index], np.float32).ravel()
            label = grids.label(np.arange(values.size, dtype=np.int32))
            low, high = np.zeros((2, len(grids.scale)), np.float32)
            np.minimum.at(low, label, values)
            np.maximum.at(high, label, values)
            best, part = np.full(len(low), np.inf), np.ones(len(low), np.float32)
            for step in range(self.steps):
                share = np.float32(1 - step / self.steps * (1 - _LEAST_RANGE))
                cut = np.clip(values, (low * share)[label], (high * share)[label])
                q = quantize_weight(jnp.asarray(cut.reshape(shape)), weight.spec)
                change = np.asarray(q.dequantize()).ravel() - values
                error = np.zeros(len(low))
                for site in leaf_sites:
                    site.add_error(error, change, label, factors)
                better = error < best
                best, part = np.where(better, error, best), np.where(better, share, part)
            cut = np.clip(values, (low * part)[label], (high * part)[label])
            leaves[leaf_index] = jnp.asarray(cut.reshape(shape), leaves[leaf_index].dtype)
        return scaled.folds.with_leaves(params, leaves)


@dataclasses.dataclass(frozen=True)
class _ErrorSite:
    """A weight in one step of the scans around its site, with statistics of its inputs.

    Attributes:
      visit: the site.
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

    visit: Visit
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
        sums, means, maxima = (scaled.observed(visit, x) for x in observers)
        elements, is_few = visit.elements, scaled.is_few(visit)
        rows = np.maximum(np.asarray(means.rows, np.float64), 1)
        return cls(
            visit,
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
        elements = self.visit.elements
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
