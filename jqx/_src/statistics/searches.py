"""Calibrators that search a range: percentile, mse, hqq, and rules for 4-bit blocks.

For an array they search among its values. As a statistic they count values in bins whose edges are
the same for every array. The bins come from the bit pattern of float32: the exponent and the top 6
bits of the mantissa::

    [2**e * (1 + k/64), 2**e * (1 + (k + 1)/64)),    e = -40 ... 23,    k = 0 ... 63

for either sign, so a bin is 0.8 to 1.6 % wide at any magnitude. One bin at zero holds magnitudes
below 2**-40. One bin at each end holds magnitudes of 2**24 or more, infinity included. No range is
chosen beforehand and nothing is re-binned, so statistics merge by adding counts: exactly, in any
order. Counts are uint32 and saturate. The extremes are stored exactly next to the counts.

Bins by exponent and leading bits are from HdrHistogram. That such bins merge exactly is the point
of Masson et al., "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error
Guarantees", arXiv:1908.10693.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import added, check_fields, flag, number, whole
from ..errors import fail
from ..gradients.estimators import ste
from ..numerics.blocks import Block
from ..numerics.exact import RoundMode, divide, round_to_integer, saturating_sum
from ..numerics.lookup import E8M0, format_of
from ..numerics.qtype import Integer
from ..ops.affine import affine_fake_quantize
from .calibrators import (
    MAX_COUNT,
    AbsMax,
    Affine,
    Ready,
    absmax,
    cover,
    fit_of,
    poisoned,
    without_nan,
)
from .granularity import Groups, members, rows_of
from .statistics import saturating_add, serializable

if TYPE_CHECKING:
    from jqx import QSpec

_SHIFT = 23 - 6  # leaves 6 bits of the mantissa
_FIRST = (127 - 40) << 6  # the pattern of 2**-40
_BINS = (24 + 40) << 6
_PATTERNS = np.arange(_FIRST, _FIRST + _BINS + 1, dtype=np.int32) << _SHIFT
EDGES = _PATTERNS.view(np.float32)
"""Edges of the bins of magnitudes, increasing: 2**-40 ... 2**24; one bin is below, one above."""

ZERO = _BINS + 1
"""Index of the bin at zero; magnitudes with index `k` are in `ZERO + k` or `ZERO - k`."""

LENGTH = 2 * ZERO + 1

UPPER = np.concatenate([-EDGES[::-1], EDGES, np.asarray([np.inf], np.float32)])
"""The upper edge of each bin; the lower ones are `-UPPER[::-1]`."""


@serializable("calibrators")
class HistogramStats(NamedTuple):
    """Statistics of the values that share a scale.

    Attributes:
      counts: uint32, the shape of the scale followed by an axis of bins, the most negative first.
      low: the smallest value, float32; infinity if there is none.
      high: the largest value, float32; minus infinity if there is none.
      nans: NaN values per scale, int32.
      observed: number of arrays, int32.
    """

    counts: jax.Array
    low: jax.Array
    high: jax.Array
    nans: jax.Array
    observed: jax.Array


class FromHistogram(Ready):
    """Observes a histogram; a subclass computes the scale."""

    stats: ClassVar[Any] = HistogramStats

    def empty(self, shape: Sequence[int]) -> HistogramStats:
        """Returns counts of 0 and the empty range."""
        return super().empty(shape)._replace(counts=jnp.zeros((*shape, LENGTH), jnp.uint32))

    def observe(self, x: jax.Array, spec: "QSpec") -> HistogramStats:
        """Returns the histogram of the elements that share a scale."""
        groups, x = spec.granularity.groups(x.shape), x.astype(jnp.float32)
        low, high, nans = groups.extremes(x)
        counts = _tally(bin_of(rows_of(x, groups, jnp.nan)))
        return HistogramStats(counts, low, high, nans, jnp.int32(x.size > 0))


def bin_of(x: jax.Array) -> jax.Array:
    """Returns the bin of each float32 value; for a NaN `LENGTH`, which is not a bin."""
    pattern = lax.bitcast_convert_type(jnp.abs(x), jnp.int32) >> _SHIFT
    index = lax.clamp(jnp.int32(0), pattern - (_FIRST - 1), jnp.int32(ZERO))
    return jnp.where(jnp.isnan(x), LENGTH, jnp.where(x < 0, ZERO - index, ZERO + index))


def _tally(bins: jax.Array) -> jax.Array:
    """Counts bins along the last axis, uint32; `LENGTH`, which is not a bin, is not counted."""
    shape = bins.shape[:-1]
    rows = bins.reshape(math.prod(shape), bins.shape[-1])
    row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    counts = jnp.zeros((len(rows), LENGTH), jnp.uint32)
    return counts.at[row, rows].add(jnp.uint32(1), mode="drop").reshape(*shape, LENGTH)


def magnitudes(counts: jax.Array) -> jax.Array:
    """Returns the counts of magnitudes: first the bin at zero, then both signs together."""
    positive, negative = counts[..., ZERO:], jnp.flip(counts[..., : ZERO + 1], -1)
    return saturating_add(positive, negative.at[..., 0].set(0))


# Weighted points, from an array or from a histogram, on which a search measures errors.


_PER_BIN = 4


class Points(NamedTuple):
    """Values that share a scale, along the last axis.

    Attributes:
      values: float32, the shape of the scale and one axis; NaN where there is no value.
      weights: how often each occurs, float32, up to a common factor; `None` means once.
      low: the smallest value, or zero, of the shape of the scale.
      high: the largest value, or zero.
    """

    values: jax.Array
    weights: jax.Array | None
    low: jax.Array
    high: jax.Array

    @property
    def unit(self) -> jax.Array:
        """The largest magnitude, the unit of errors, so that no power of an error overflows."""
        unit = jnp.maximum(self.high, -self.low)
        return jnp.where((unit > 0) & jnp.isfinite(unit), unit, jnp.ones_like(unit))

    def sum(self, terms: jax.Array) -> jax.Array:
        """Returns the weighted sum of a term for each value."""
        if self.weights is not None:
            terms = terms * self.weights
        return jnp.sum(jnp.where(jnp.isnan(self.values), jnp.zeros_like(terms), terms), axis=-1)

    def loss(
        self, affine: Affine, spec: "QSpec", penalty: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """Returns the sum of `penalty(error / unit)` over the errors of quantizing the values."""
        scale, zero = affine
        real = affine_fake_quantize(
            self.values,
            scale[..., None],
            None if zero is None else zero[..., None],
            qtype=spec.qtype,
            round_mode=RoundMode.NEAREST_TOWARD_EVEN,
            gradient=ste,
            numerics=spec.numerics,
        )
        return self.sum(penalty((self.values - real) / self.unit[..., None]))


def points_of(x: jax.Array, spec: "QSpec") -> Points:
    """Returns every value of an array."""
    groups, x = spec.granularity.groups(x.shape), x.astype(jnp.float32)
    low, high, _ = groups.extremes(x)
    rows = rows_of(x, groups, jnp.nan)
    return Points(rows, None, jnp.minimum(low, 0), jnp.maximum(high, 0))


def points_in(stats: HistogramStats) -> Points:
    """Returns four points for each bin of a histogram, moved into the range that was seen.

    The points are evenly spaced and shifted from bin to bin by the golden ratio, so that together
    they fall on no grid: the bins may be wider than a step of the quantizer. The bins at either end
    stand for the extreme values, and the bin at zero for zero.
    """
    shape = (1,) * stats.low.ndim
    low, high = stats.low[..., None], stats.high[..., None]
    values = jnp.minimum(jnp.maximum(_NODES.reshape(*shape, -1), low), high)
    weights = jnp.repeat(stats.counts.astype(jnp.float32), _PER_BIN, axis=-1)
    return Points(values, weights, jnp.minimum(stats.low, 0), jnp.maximum(stats.high, 0))


def _nodes() -> np.ndarray:
    """Returns the points of every bin, float32, `_PER_BIN` for each."""
    golden = (5**0.5 - 1) / 2
    shift = (np.arange(1, ZERO)[:, None] * golden) % 1
    low, high = (edges[:, None].astype(np.float64) for edges in (EDGES[:-1], EDGES[1:]))
    inner = low + (high - low) * (np.arange(_PER_BIN) + shift) / _PER_BIN
    end = np.full((1, _PER_BIN), np.inf)
    above = np.concatenate([inner, end])
    nodes = np.concatenate([-above[::-1], np.zeros((1, _PER_BIN)), above])
    return nodes.astype(np.float32).reshape(-1)


_NODES = _nodes()


# A percentile: the range leaves out a given share of the values, the largest ones.
#
# Of `n` values, `c = floor(n * (100 - percent) / 100)` may be clipped:
#
#     symmetric:   T = the (n - c)-th smallest magnitude, range [-T, T]
#     asymmetric:  low and high = the (k + 1)-th smallest and largest value, k = floor(c / 2)
#
# so at most `c` values are outside. `T` is NumPy's `percentile(|x|, percent,
# method="inverted_cdf")`: a value that occurs, not one between two.
#
# Source: McKinstry et al., "Discovering Low-Precision Networks Close to Full-Precision Networks for
# Efficient Embedded Inference", arXiv:1809.04191; the definition of ranks is ours.


_MILLION = 1_000_000


@dataclasses.dataclass(frozen=True)
class Percentile(FromHistogram):
    """Clips `100 - percent` percent of the values, split between both ends if asymmetric.

    `fit` selects by rank and is exact. For observed statistics the limit is the outer edge of the
    bin that holds it. So it is at most 1.6 % too wide, and never beyond the extremes. Ranks are
    exact for up to 2**31 values. For more, the counts are halved until they fit.

    Infinities count as values: those beyond the limit are clipped. If the limit itself is infinite,
    the scale is infinite.

    Attributes:
      percent: above 0 and at most 100, to four decimals.

    Raises:
      TypeError: if `percent` is not a number.
      ValueError: if `percent` is out of range.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> spec = jqx.QSpec(jnp.int8, calibrator=jqx.calibrators.Percentile(75))
      >>> jqx.QTensor.quantize(jnp.array([1.0, -127.0, 3.0, 9999.0]), spec).values
      Array([   1, -127,    3,  127], dtype=int8)
    """

    percent: float = 99.9

    def __post_init__(self) -> None:
        check_fields("calibrators.Percentile", self, percent=number(1e-4, 100))
        object.__setattr__(self, "percent", round(self.percent, 4))

    def affine(self, stats: HistogramStats, spec: "QSpec") -> Affine:
        """Returns the scale and zero point of the percentile, accurate to a bin."""
        if spec.symmetric:
            largest = jnp.maximum(stats.high, -stats.low)
            edges = np.append(EDGES, np.float32(np.inf))
            limit = jnp.minimum(self._limit(magnitudes(stats.counts), edges, 1), largest)
            low, high = -limit, limit
        else:
            high = jnp.minimum(self._limit(stats.counts, UPPER, 2), stats.high)
            low = -jnp.minimum(self._limit(jnp.flip(stats.counts, -1), UPPER, 2), -stats.low)
        return poisoned(cover(low, high, spec), stats.nans)

    def fit(self, x: jax.Array, spec: "QSpec") -> Affine:
        """Returns the scale and zero point of the percentile of `x`, exactly."""
        if x.size == 0:
            return super().fit(x, spec)
        groups = spec.granularity.groups(x.shape)
        values, nans = without_nan(x.astype(jnp.float32), groups)
        if spec.symmetric:
            high = self._largest_kept(jnp.abs(values), groups, 1)
            low = -high
        else:
            high = self._largest_kept(values, groups, 2)
            low = -self._largest_kept(-values, groups, 2)
        return poisoned(cover(low, high, spec), nans)

    def _largest_kept(self, x: jax.Array, groups: Groups, ends: int) -> jax.Array:
        """Returns the largest value of each row that is not clipped."""
        max_clipped = groups.per_scale * self._share // _MILLION // ends
        largest, _ = lax.top_k(rows_of(x, groups, -jnp.inf), max_clipped + 1)
        clipped = self._clipped(members(groups), ends).astype(jnp.int32)  # fewer in a tail
        return jnp.take_along_axis(largest, clipped[..., None], axis=-1)[..., 0]

    @property
    def _share(self) -> int:
        """The share that may be clipped, in millionths."""
        return round((100 - self.percent) * 10_000)

    def _clipped(self, n: jax.Array, ends: int) -> jax.Array:
        """Returns `floor(n * share / ends)`, exactly, in uint32."""
        high, low = divmod(self._share, 1000)
        millions, remainder = n // _MILLION, n % _MILLION
        clipped = (remainder * high + remainder * low // 1000) // 1000
        return (millions * jnp.uint32(self._share) + clipped) // ends

    def _limit(self, counts: jax.Array, edges: np.ndarray, ends: int) -> jax.Array:
        """Returns the upper edge of the bin with the largest value that is not clipped."""
        n = jnp.sum(counts.astype(jnp.float32), axis=-1, keepdims=True)
        halvings = jnp.ceil(jnp.log2(jnp.maximum(n, 1) / 2.0**31)).astype(jnp.int32)
        counts = counts >> jnp.maximum(halvings, 0).astype(jnp.uint32)
        beyond = lax.cumsum(counts, axis=counts.ndim - 1, reverse=True)  # in this bin or further
        clipped = self._clipped(beyond[..., :1], ends)
        index = jnp.sum((beyond > clipped).astype(jnp.int32), axis=-1) - 1
        limit = jnp.take(edges, index, mode="clip")
        return jnp.where(clipped[..., 0] == 0, jnp.full_like(limit, jnp.inf), limit)

    def __str__(self) -> str:
        return f"percentile({self.percent})"


percentile: Percentile = Percentile()


class FromPoints(FromHistogram):
    """Searches the scale of least error for the values of an array, or of a histogram."""

    @abc.abstractmethod
    def search(self, points: Points, spec: "QSpec") -> Affine:
        """Returns the scale and zero point of least error for weighted values."""

    def affine(self, stats: HistogramStats, spec: "QSpec") -> Affine:
        """Returns the scale and zero point of least expected error under the histogram."""
        return poisoned(self.search(points_in(stats), spec), stats.nans)

    def fit(self, x: jax.Array, spec: "QSpec") -> Affine:
        """Returns the scale and zero point of least error for `x` itself."""
        nans = spec.granularity.groups(x.shape).count(jnp.isnan(x))
        return poisoned(self.search(points_of(x, spec), spec), nans)


# The least mean squared error: the range that minimises `mean(|x - dequantize(quantize(x))|**2)`,
# or another power of the error.
#
# Searched over a grid of factors that shrink the whole range,
#
#     [f * low, f * high],    f = 1 ... least,    low, high = -m, m if symmetric, else the extremes
#
# with the rounding, saturation and zero point of the format itself. Source: Choukroun et al., "Low-
# bit Quantization of Neural Networks for Efficient Inference", arXiv:1902.06822, for the criterion;
# the search over a grid is ours. The power 2.4 is from the reference code of GPTQ (Frantar et al.,
# arXiv:2210.17323).


@dataclasses.dataclass(frozen=True)
class Mse(FromPoints):
    """Searches the range of least mean squared error.

    `fit` measures the error on the array itself. Up to the rounding of a float32 sum it is never
    worse than `absmax` (`minmax` if asymmetric), because the factor 1 is a candidate and wins ties.
    For observed statistics it minimises the expected error under the histogram, with four points a
    bin. The search rounds to nearest even, whatever the spec says.

    The MX rule rounds scales, which are powers of two, down. So for such formats a factor of 2 is
    tried as well. An infinity makes the scale infinite.

    Attributes:
      candidates: number of factors that are tried, evenly spaced.
      least: the smallest factor, above 0 and at most 1.
      norm: the power of the error, from 1 to 16. 2 is the squared error; a larger power, such as
        the 2.4 that is common with GPTQ, clips less.
      signed: whether negative scales, which flip the range, are tried too. Integers have one more
        code below 0 than above, so the end with the larger magnitude can use it: in int4 a step is
        smaller by an eighth. For weights; some kernels of other libraries reject such scales.

    Raises:
      TypeError: if a field is not a number, or `signed` is not a bool.
      ValueError: if a field is out of range.
    """

    candidates: int = 100
    least: float = 0.1
    norm: float = added(2.0)
    signed: bool = added(False)

    def __post_init__(self) -> None:
        check_fields(
            "calibrators.Mse",
            self,
            candidates=whole(1, MAX_COUNT),
            least=number(0, 1, above=True),
            norm=number(1, 16),
            signed=flag(),
        )

    def search(self, points: Points, spec: "QSpec") -> Affine:
        """Returns the scale and zero point of least error for weighted values."""
        return searched(points, spec, self._factors(spec), self._cost)

    def _cost(self, error: jax.Array) -> jax.Array:
        return jnp.square(error) if self.norm == 2 else jnp.abs(error) ** self.norm

    def _factors(self, spec: "QSpec") -> np.ndarray:
        """All factors but 1, float32."""
        shrinking = np.linspace(1, self.least, self.candidates)[1:]
        form = format_of(spec.qtype)
        rounds_down = isinstance(form, Block) and form.scale_qtype == E8M0
        factors = np.append(shrinking, [2.0] * rounds_down)
        if self.signed and isinstance(form, Integer) and spec.symmetric and -form.low > form.high:
            factors = np.append(factors, form.high / -form.low)
            factors = np.concatenate([factors, -factors, [-1.0]])
        return factors.astype(np.float32)

    def __str__(self) -> str:
        power = f", norm={self.norm}" if self.norm != 2 else ""
        power += ", signed" if self.signed else ""
        return "mse" if self == mse else f"mse({self.candidates}, {self.least}{power})"


def searched(
    points: Points, spec: "QSpec", factors: np.ndarray, cost: Callable[[jax.Array], jax.Array]
) -> Affine:
    """Returns the affine of least error among the whole range and its products with the factors; a
    negative factor flips the range.
    """
    flips = bool(np.any(factors < 0))

    def affine(factor: jax.Array) -> Affine:
        size = jnp.abs(factor) if flips else factor
        scale, zero_point = cover(points.low * size, points.high * size, spec)
        return Affine(jnp.where(factor < 0, -scale, scale) if flips else scale, zero_point)

    one = jnp.ones_like(points.low)
    return best(points, spec, cost, affine, one, lambda _, factor: one * factor, factors)


def best(
    points: Points,
    spec: "QSpec",
    cost: Callable[[jax.Array], jax.Array],
    affine: Callable[[jax.Array], Affine],
    start: jax.Array,
    advance: Callable[[jax.Array, jax.Array], jax.Array],
    steps: np.ndarray,
) -> Affine:
    """Returns the affine of least error among those of a parameter: `start`, and what `advance`
    makes of it in each of the steps. The first of equal errors wins.
    """

    def step(state: tuple[jax.Array, ...], value: jax.Array):
        parameter, best, least = state
        parameter = advance(parameter, value)
        error = points.loss(affine(parameter), spec, cost)
        better = error < least
        best = jnp.where(better, parameter, best)
        return (parameter, best, jnp.where(better, error, least)), None

    first = start, start, points.loss(affine(start), spec, cost)
    (_, parameter, _), _ = lax.scan(step, first, jnp.asarray(steps))
    return affine(parameter)


mse: Mse = Mse()


# Half-quadratic optimisation of the lp error, p < 1, on which outliers have little influence.
#
#     minimise  sum(|e|**p),  e = x / scale - (q - zero),  q = clip(round(x / scale + zero))
#
# by the splitting of HQQ, for `beta` growing by `kappa` in each iteration:
#
#     w = sign(e) * max(|e| - |e|**(p - 1) / beta, 0)
#     asymmetric:  zero = mean(q - (x / scale - w)), at the scale of `minmax`
#     symmetric:   scale = scale * sum((x / scale - w) * q) / sum(q**2), starting from `absmax`
#
# Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023,
# https://mobiusml.github.io/hqq_blog/. Deviations: errors are in units of the scale, so that the
# result scales with `x`. Zero points are integers, so each iterate is rounded, and the iterate with
# the least lp error is kept, the start included. Symmetric formats have no zero point. Their scale
# is optimised instead, by least squares for the numbers `q`; this is our extension.


_NEAREST = RoundMode.NEAREST_TOWARD_EVEN


@dataclasses.dataclass(frozen=True)
class Hqq(FromPoints):
    """Optimises the zero point (symmetric: the scale) for the least lp error.

    The zero point is an integer, as everywhere in jqx. In the published HQQ it is a float offset of
    the codes.

    `fit` measures the error on the array itself and is never worse than `minmax` (symmetric:
    `absmax`). For observed statistics the same is done on four points for each bin of the
    histogram. An infinity makes the scale infinite.

    Attributes:
      iterations: number of iterations; there is no early stop.
      p: power of the error, above 0 and at most 1.
      beta: initial weight of the quadratic term, above 0.
      kappa: growth factor of `beta` in each iteration, 1 or more.

    Raises:
      TypeError: if a field is not a number.
      ValueError: if a field is out of range.
    """

    iterations: int = 20
    p: float = 0.7
    beta: float = 10.0
    kappa: float = 1.01

    def __post_init__(self) -> None:
        check_fields(
            "calibrators.Hqq",
            self,
            iterations=whole(1, MAX_COUNT),
            p=number(0, 1, above=True),
            beta=number(0, above=True),
            kappa=number(1),
        )

    def search(self, points: Points, spec: "QSpec") -> Affine:
        """Returns the scale and zero point of least lp error for weighted values."""
        return (self._solve_scale if spec.symmetric else self._solve_zero)(points, spec)

    def _solve_zero(self, points: Points, spec: "QSpec") -> Affine:
        form = format_of(spec.qtype)
        low, high = int(form.low), int(form.high)
        scale, initial = cover(points.low, points.high, spec)
        assert initial is not None
        y = points.values / scale[..., None]
        count = points.sum(jnp.ones_like(y))
        count = jnp.maximum(count, jnp.ones_like(count))

        def affine(zero: jax.Array) -> Affine:
            rounded = round_to_integer(zero, _NEAREST)
            return Affine(scale, saturating_sum(rounded, None, low, high, form.storage))

        def improve(zero: jax.Array, beta: jax.Array) -> jax.Array:
            offset = zero[..., None]
            q = form.round(y + offset, _NEAREST)
            w = self._shrink(y - (q - offset), beta)
            return points.sum(q - (y - w)) / count

        return self._best(points, spec, initial.astype(jnp.float32), improve, affine)

    def _solve_scale(self, points: Points, spec: "QSpec") -> Affine:
        form = format_of(spec.qtype)
        high = jnp.float32(form.high)

        def affine(largest: jax.Array) -> Affine:
            return cover(-largest, largest, spec)

        def improve(largest: jax.Array, beta: jax.Array) -> jax.Array:
            scale = jnp.where(largest > 0, largest / high, jnp.ones_like(largest))
            y = points.values / scale[..., None]
            q = form.round(y, _NEAREST)
            w = self._shrink(y - q, beta)
            along, square = points.sum((y - w) * q), points.sum(q * q)
            usable = (along > 0) & (square > 0)
            ratio = along / jnp.where(usable, square, jnp.ones_like(square))
            return jnp.where(usable, largest * ratio, largest)

        initial = jnp.maximum(points.high, -points.low)
        return self._best(points, spec, initial, improve, affine)

    def _best(self, points, spec, initial, improve, affine) -> Affine:
        """Returns the affine of least lp error among the iterates of `improve`."""
        betas = np.asarray(self.beta * self.kappa ** np.arange(self.iterations), np.float32)
        cost = lambda error: jnp.abs(error) ** self.p  # noqa: E731
        return best(points, spec, cost, affine, initial, improve, betas)

    def _shrink(self, e: jax.Array, beta: jax.Array) -> jax.Array:
        """Generalised soft-thresholding, the proximal step of the lp error."""
        size = jnp.abs(e)
        return jnp.sign(e) * jnp.maximum(size - size ** (self.p - 1) / beta, jnp.zeros_like(size))


hqq: Hqq = Hqq()


# Rules for the scales of blocks of 4-bit floats, MXFP4 and NVFP4.
#
# MX rounds the power of two down, so that a largest magnitude of up to 8 / 6 of the largest number
# is clipped; `Ceil` rounds it up. NVFP4 maps the largest magnitude to 6, and has no number between
# 4 and 6; `FourOverSix` maps it to 4 if that loses less.
#
# Sources: OCP Microscaling Formats (MX) Specification 1.0, section 6.3, for the rule itself; Mishra
# et al., "Recipes for Pre-training LLMs with MXFP8", arXiv:2506.08027, for rounding up; Cook et
# al., "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling",
# arXiv:2512.02010.


@dataclasses.dataclass(frozen=True)
class Ceil(AbsMax):
    """Takes the least scale that clips nothing: a power of two for formats with such scales, as MX
    has them, and the scale of `absmax` for all others.
    """

    def cover(self, low: jax.Array, high: jax.Array, spec: "QSpec") -> Affine:
        """Returns the least scale at which the range is in that of the format."""
        affine, form = super().cover(low, high, spec), format_of(spec.qtype)
        if not isinstance(form, Block) or form.scale_qtype != E8M0:
            return affine
        clips = high > affine.scale.astype(jnp.float32) * jnp.float32(form.high)
        low, high = (jnp.where(clips, 2 * limit, limit) for limit in (low, high))
        return super().cover(low, high, spec)


def second_scale(scale: jax.Array, spec: "QSpec") -> jax.Array:
    """Returns the scale of the scales of a format with two levels; it broadcasts to them. A block
    whose scale is NaN must not make the scales of all other blocks NaN.
    """
    finite = jnp.where(jnp.isnan(scale), jnp.zeros_like(scale), scale)
    form = format_of(spec.qtype)
    assert isinstance(form, Block)
    of_scales = dataclasses.replace(
        spec,
        qtype=form.scale_qtype,
        granularity=spec.of_second_scale(scale.ndim),
        calibrator=absmax,
        stacked=(),
    )
    return fit_of(absmax, finite, of_scales).scale


@dataclasses.dataclass(frozen=True)
class FourOverSix(FromPoints):
    """Maps the largest magnitude to 6 or to 4, whichever has the smaller squared error with scales
    in their own format. For blocks of 4-bit floats whose scales are not powers of two, such as
    nvfp4.

    Raises:
      ValueError: on use, if the format is another one.
    """

    def search(self, points: Points, spec: "QSpec") -> Affine:
        """Returns the scale of least error for weighted values."""
        form = format_of(spec.qtype)
        if not isinstance(form, Block) or not form.two_level or form.elements.high != 6:
            problem = f"{form.name} has other elements or scales than formats like nvfp4."
            fix = "use another calibrator for it, such as jqx.calibrators.mse."
            raise fail("calibrators.four_over_six", problem, fix=fix)
        six, four = (cover(f * points.low, f * points.high, spec).scale for f in (1, 1.5))
        scale = jnp.where(self._takes(four, six, points, spec), four, six)
        # The largest of the scales decides how all are rounded. It keeps its choice, and the others
        # are compared as they will be.
        second = second_scale(scale, spec)
        shared = tuple(i for i, n in enumerate(second.shape) if n == 1)
        largest = jnp.max(scale, shared, keepdims=True)
        scale_form = format_of(form.scale_qtype)
        rounded = [scale_form.round(divide(x, second), _NEAREST) * second for x in (four, six)]
        takes_four = self._takes(rounded[0], rounded[1], points, spec) & (four <= largest)
        return Affine(jnp.where(scale == largest, scale, jnp.where(takes_four, four, six)), None)

    def _takes(self, four: jax.Array, six: jax.Array, points: Points, spec: "QSpec") -> jax.Array:
        """Returns where `four` loses less than `six`, by more than sums are rounded: a block with
        few values other than 0 often has the same values under both.
        """
        ours, other = (points.loss(Affine(x, None), spec, jnp.square) for x in (four, six))
        return ours < (1 - 2.0**-12) * other

    def __str__(self) -> str:
        return "four_over_six"


ceil: Ceil = Ceil()
four_over_six: FourOverSix = FourOverSix()
