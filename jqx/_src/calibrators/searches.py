"""Calibrators that search a range: percentile, mse, hqq, and rules for 4-bit blocks."""

import abc
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import added, check_fields, flag, number, whole
from ..errors import fail
from ..numerics.blocks import Block
from ..numerics.exact import RoundMode, round_to_integer, saturating_sum
from ..numerics.lookup import E8M0, format_of
from ..numerics.qtype import Integer
from .calibrator import MAX_COUNT, Affine, Affinity, cover, look_at, poisoned
from .granularity import Groups
from .histogram import (
    EDGES,
    UPPER,
    FromHistogram,
    HistogramStats,
    Points,
    magnitudes,
    members,
    points_in,
    points_of,
    rows_of,
)
from .ranges import AbsMax

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

    def affine(self, stats: HistogramStats, spec: Affinity) -> Affine:
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

    def fit(self, x: jax.Array, spec: Affinity) -> Affine:
        """Returns the scale and zero point of the percentile of `x`, exactly."""
        observation = look_at(x, spec)
        if x.size == 0:
            return self.affine(self.observe(x, spec), spec)
        groups = spec.granularity.groups(x.shape)
        values = observation.values.astype(jnp.float32)
        if spec.symmetric:
            high = self._largest_kept(jnp.abs(values), groups, 1)
            low = -high
        else:
            high = self._largest_kept(values, groups, 2)
            low = -self._largest_kept(-values, groups, 2)
        return poisoned(cover(low, high, spec), observation.nans)

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
    def search(self, points: Points, spec: Affinity) -> Affine:
        """Returns the scale and zero point of least error for weighted values."""

    def affine(self, stats: HistogramStats, spec: Affinity) -> Affine:
        """Returns the scale and zero point of least expected error under the histogram."""
        return poisoned(self.search(points_in(stats), spec), stats.nans)

    def fit(self, x: jax.Array, spec: Affinity) -> Affine:
        """Returns the scale and zero point of least error for `x` itself."""
        return poisoned(self.search(points_of(x, spec), spec), look_at(x, spec).nans)


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

    def search(self, points: Points, spec: Affinity) -> Affine:
        """Returns the scale and zero point of least error for weighted values."""
        return searched(points, spec, self._factors(spec), self._cost)

    def _cost(self, error: jax.Array) -> jax.Array:
        return jnp.square(error) if self.norm == 2 else jnp.abs(error) ** self.norm

    def _factors(self, spec: Affinity) -> np.ndarray:
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
    points: Points, spec: Affinity, factors: np.ndarray, cost: Callable[[jax.Array], jax.Array]
) -> Affine:
    """Returns the affine of least error among the whole range and its products with the factors; a
    negative factor flips the range.
    """
    flips = bool(np.any(factors < 0))

    def affine(factor: jax.Array) -> Affine:
        size = jnp.abs(factor) if flips else factor
        scale, zero_point = cover(points.low * size, points.high * size, spec)
        return Affine(jnp.where(factor < 0, -scale, scale) if flips else scale, zero_point)

    def step(best: tuple[jax.Array, jax.Array], factor: jax.Array):
        error = points.loss(affine(factor), spec, cost)
        better = error < best[1]
        return (jnp.where(better, factor, best[0]), jnp.where(better, error, best[1])), None

    one = jnp.ones_like(points.low)
    start = one, points.loss(affine(one), spec, cost)
    (factor, _), _ = lax.scan(step, start, jnp.asarray(factors))
    return affine(factor)


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

    def search(self, points: Points, spec: Affinity) -> Affine:
        """Returns the scale and zero point of least lp error for weighted values."""
        return (self._solve_scale if spec.symmetric else self._solve_zero)(points, spec)

    def _solve_zero(self, points: Points, spec: Affinity) -> Affine:
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

        return affine(self._best(points, spec, initial.astype(jnp.float32), improve, affine))

    def _solve_scale(self, points: Points, spec: Affinity) -> Affine:
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
        return affine(self._best(points, spec, initial, improve, affine))

    def _best(self, points, spec, initial, improve, affine) -> jax.Array:
        """Iterates `improve` and returns the iterate whose affine has the least lp error."""

        def loss(parameter: jax.Array) -> jax.Array:
            return points.loss(affine(parameter), spec, lambda e: jnp.abs(e) ** self.p)

        def step(state, beta):
            parameter, best, least_error = state
            parameter = improve(parameter, beta)
            error = loss(parameter)
            better = error < least_error
            best = jnp.where(better, parameter, best)
            return (parameter, best, jnp.where(better, error, least_error)), None

        betas = np.float32(self.beta * self.kappa ** np.arange(self.iterations))
        (_, best, _), _ = lax.scan(step, (initial, initial, loss(initial)), jnp.asarray(betas))
        return best

    def _shrink(self, e: jax.Array, beta: jax.Array) -> jax.Array:
        """Generalised soft-thresholding, the proximal step of the lp error."""
        size = jnp.abs(e)
        return jnp.sign(e) * jnp.maximum(size - size ** (self.p - 1) / beta, jnp.zeros_like(size))

    def __str__(self) -> str:
        fields = (self.iterations, self.p, self.beta, self.kappa)
        return "hqq" if self == hqq else f"hqq{fields}"


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

    def scale_of(self, largest: jax.Array, spec: Affinity) -> Affine:
        """Returns the least scale at which the largest magnitude is in range."""
        affine, form = super().scale_of(largest, spec), format_of(spec.qtype)
        if not isinstance(form, Block) or form.scale_qtype != E8M0:
            return affine
        clips = largest > affine.scale.astype(jnp.float32) * jnp.float32(form.high)
        return super().scale_of(jnp.where(clips, 2 * largest, largest), spec)

    def __str__(self) -> str:
        return "ceil"


@dataclasses.dataclass(frozen=True)
class FourOverSix(FromPoints):
    """Maps the largest magnitude to 6 or to 4, whichever has the smaller squared error. For blocks
    of 4-bit floats whose scales are not powers of two, such as nvfp4.

    Raises:
      ValueError: on use, if the format is another one.
    """

    def search(self, points: Points, spec: Affinity) -> Affine:
        """Returns the scale of least error for weighted values."""
        form = format_of(spec.qtype)
        elements = form.elements if isinstance(form, Block) and form.two_level else None
        if elements is None or elements.high != 6:
            problem = f"{form.name} has other elements or scales than formats like nvfp4."
            fix = "use another calibrator for it, such as jqx.calibrators.mse."
            raise fail("calibrators.four_over_six", problem, fix=fix)
        return searched(points, spec, np.array([1.5], np.float32), jnp.square)

    def __str__(self) -> str:
        return "four_over_six"


ceil: Ceil = Ceil()
four_over_six: FourOverSix = FourOverSix()
