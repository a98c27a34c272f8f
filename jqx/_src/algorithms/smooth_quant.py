"""SmoothQuant: divides large channels of activations, and multiplies the weights accordingly."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import check_fields, flag, nothing, number
from ..numerics.lookup import format_of
from ..statistics.statistics import Mean, Observer, absmax, check_weight
from ..tensor.spec import QSpec
from ..transforms.algorithm import Chosen
from ..transforms.plan import Plan
from ..transforms.stats import OnNonfinite
from .chain import algorithm
from .channels import Visit
from .labels import Array
from .scaled import Scaled, Unpaired, scaled_together

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
                _Site.of(scaled, visit, numbers[i], maxima[i], steps[i], square)
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
class _Site:
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
    ) -> "_Site":
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
    scaled: Scaled, sites: Sequence[_Site], scale: Array, set_of: Array, is_static: Array
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
