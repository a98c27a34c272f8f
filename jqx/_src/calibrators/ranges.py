"""Calibrators whose range is given or read off a few sums: absmax, minmax, fixed, rms."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..checks import check_fields, number
from ..errors import fail
from .calibrator import (
    Affine,
    Affinity,
    Calibrator,
    added_counts,
    cover,
    look_at,
    nothing_seen,
    poisoned,
    serializable,
)
from .histogram import members


@serializable
class AbsMaxStats(NamedTuple):
    """The largest magnitude (float32) and NaN values per scale, and arrays observed (int32)."""

    largest: jax.Array
    nans: jax.Array
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class AbsMax(Calibrator):
    """Covers `[-m, m]`, `m` the largest magnitude observed."""

    def empty(self, shape: Sequence[int]) -> AbsMaxStats:
        """Returns magnitude 0 and counts of 0."""
        return AbsMaxStats(jnp.zeros(tuple(shape), jnp.float32), *nothing_seen(shape))

    def observe(self, x: jax.Array, spec: Affinity) -> AbsMaxStats:
        """Returns the largest magnitude of the elements that share a scale."""
        observation = look_at(x, spec)
        groups = spec.granularity.groups(x.shape)
        largest = groups.largest_magnitude(observation.values)
        return AbsMaxStats(largest.astype(jnp.float32), observation.nans, observation.observed)

    def merge(self, a: AbsMaxStats, b: AbsMaxStats) -> AbsMaxStats:
        """Returns the larger magnitudes and the sums of the counts."""
        largest = jnp.maximum(a.largest, b.largest)
        return AbsMaxStats(largest, *added_counts(a, b))

    def affine(self, stats: AbsMaxStats, spec: Affinity) -> Affine:
        """Returns the scale that maps the largest magnitude to the largest number."""
        return poisoned(self.scale_of(stats.largest, spec), stats.nans)

    def fit(self, x: jax.Array, spec: Affinity) -> Affine:
        """Returns the scale for one array in one pass; the largest magnitude of a NaN is NaN."""
        largest = spec.granularity.groups(x.shape).largest_magnitude(x).astype(jnp.float32)
        return self.scale_of(largest, spec)

    def scale_of(self, largest: jax.Array, spec: Affinity) -> Affine:
        """Returns the scale that covers `[-largest, largest]`."""
        return cover(-largest, largest, spec)

    def __str__(self) -> str:
        return "absmax"


absmax: AbsMax = AbsMax()


# The smallest and the largest value: the tightest range that clips no observed value.


@serializable
class MinMaxStats(NamedTuple):
    """The extremes per scale (float32), NaN values per scale and arrays observed (int32)."""

    low: jax.Array
    high: jax.Array
    nans: jax.Array
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class MinMax(Calibrator):
    """Covers `[min(low, 0), max(high, 0)]`, `low` and `high` the extremes observed."""

    def empty(self, shape: Sequence[int]) -> MinMaxStats:
        """Returns the empty range, `[inf, -inf]`, and counts of 0."""
        high = jnp.full(tuple(shape), -jnp.inf, jnp.float32)
        return MinMaxStats(-high, high, *nothing_seen(shape))

    def observe(self, x: jax.Array, spec: Affinity) -> MinMaxStats:
        """Returns the extremes of the elements that share a scale."""
        low, high, nans = spec.granularity.groups(x.shape).extremes(x)
        extremes = low.astype(jnp.float32), high.astype(jnp.float32)
        return MinMaxStats(*extremes, nans, jnp.int32(x.size > 0))

    def merge(self, a: MinMaxStats, b: MinMaxStats) -> MinMaxStats:
        """Returns the wider range and the sums of the counts."""
        extremes = jnp.minimum(a.low, b.low), jnp.maximum(a.high, b.high)
        return MinMaxStats(*extremes, *added_counts(a, b))

    def affine(self, stats: MinMaxStats, spec: Affinity) -> Affine:
        """Returns the scale and zero point that cover the range, zero included."""
        return poisoned(cover(stats.low, stats.high, spec), stats.nans)

    def __str__(self) -> str:
        return "minmax"


minmax: MinMax = MinMax()


# A range that is given, so that no data is needed.
#
# Example: activations after a sigmoid are in `[0, 1]`, whatever the input.


@serializable
class FixedStats(NamedTuple):
    """NaN values per scale and arrays observed (int32); nothing else is needed."""

    nans: jax.Array
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class Fixed(Calibrator):
    """The calibrator that `fixed` returns."""

    low: float
    high: float

    def __post_init__(self) -> None:
        any_size = number(float(jnp.finfo(jnp.float32).min))
        fix = "pass two finite numbers, which float32 can hold."
        check_fields("calibrators.fixed", self, fix, low=any_size, high=any_size)
        if self.low >= self.high:
            problem = f"the range is empty: low {self.low} is not below high {self.high}."
            raise fail("calibrators.fixed", problem, fix="swap them, or widen the range.")

    def empty(self, shape: Sequence[int]) -> FixedStats:
        """Returns counts of 0."""
        return FixedStats(*nothing_seen(shape))

    def observe(self, x: jax.Array, spec: Affinity) -> FixedStats:
        """Returns how many NaN values there are."""
        observation = look_at(x, spec)
        return FixedStats(observation.nans, observation.observed)

    def merge(self, a: FixedStats, b: FixedStats) -> FixedStats:
        """Returns the sums of the counts."""
        return FixedStats(*added_counts(a, b))

    def observed(self, stats: FixedStats) -> jax.Array:
        """Returns how many arrays were observed, at least 1, because none is needed."""
        return jnp.maximum(stats.observed, 1)

    def affine(self, stats: FixedStats, spec: Affinity) -> Affine:
        """Returns the scale and zero point of the given range."""
        low, high = (jnp.full(stats.nans.shape, v, jnp.float32) for v in (self.low, self.high))
        return poisoned(cover(low, high, spec), stats.nans)

    def __str__(self) -> str:
        return f"fixed({self.low}, {self.high})"


def fixed(low: float, high: float) -> Fixed:
    """Returns a calibrator that covers `[min(low, 0), max(high, 0)]`, or `[-m, m]` with the larger
    magnitude if the spec is symmetric.

    Values outside of the range saturate, infinities too. No array needs to be observed, so a scale
    can be computed without calibration.

    Args:
      low: the smallest value of the range.
      high: the largest value of the range.

    Raises:
      TypeError: if a limit is not a number.
      ValueError: if a limit is not finite, or `low` is not below `high`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> spec = jqx.QSpec(jnp.int8, calibrator=jqx.calibrators.fixed(0, 127))
      >>> jqx.QTensor.quantize(jnp.array([0.3, 200.0]), spec).values
      Array([  0, 127], dtype=int8)
    """
    return Fixed(low, high)


# A multiple of the root mean square: `[-r, r]`, `r = multiplier * sqrt(mean(x**2))`.
#
# For a normal distribution the mean squared error is least at about 2.5 for 4 bits and 4 for 8
# bits: Banner et al., "Post training 4-bit quantization of convolutional networks for rapid-
# deployment", arXiv:1810.05723.


@serializable
class RmsStats(NamedTuple):
    """Sum of squares and number of values per scale (float32), NaN values, arrays observed (int32).

    Float sums round: merging in another order may change the last bits.
    """

    squares: jax.Array
    elements: jax.Array
    nans: jax.Array
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class Rms(Calibrator):
    """The calibrator that `rms` returns."""

    multiplier: float

    def __post_init__(self) -> None:
        fix = "pass for example 2.5 for 4 bits, or 4 for 8 bits."
        check_fields("calibrators.rms", self, fix, multiplier=number(0, above=True))

    def empty(self, shape: Sequence[int]) -> RmsStats:
        """Returns sums of 0."""
        zero = jnp.zeros(tuple(shape), jnp.float32)
        return RmsStats(zero, zero, *nothing_seen(shape))

    def observe(self, x: jax.Array, spec: Affinity) -> RmsStats:
        """Returns the sum of squares of the elements that share a scale."""
        observation = look_at(x, spec)
        groups = spec.granularity.groups(x.shape)
        squares = groups.reduce(jnp.sum, jnp.square(observation.values.astype(jnp.float32)), 0)
        count = members(groups).astype(jnp.float32) - observation.nans.astype(jnp.float32)
        return RmsStats(squares, count, observation.nans, observation.observed)

    def merge(self, a: RmsStats, b: RmsStats) -> RmsStats:
        """Returns the sums, each rounded to float32 once."""
        return RmsStats(a.squares + b.squares, a.elements + b.elements, *added_counts(a, b))

    def affine(self, stats: RmsStats, spec: Affinity) -> Affine:
        """Returns the scale that covers the multiple of the root mean square."""
        count = jnp.maximum(stats.elements, jnp.ones_like(stats.elements))
        r = jnp.sqrt(stats.squares / count) * jnp.float32(self.multiplier)
        return poisoned(cover(-r, r, spec), stats.nans)

    def __str__(self) -> str:
        return f"rms({self.multiplier})"


def rms(multiplier: float) -> Rms:
    """Returns a calibrator that covers `[-r, r]`, `r` a multiple of the root mean square of all
    values.

    The mean is exact for magnitudes between 2**-63 and 2**63. Squares of smaller ones are zero.
    Squares of larger ones are infinite, and so is the scale. An infinity makes the scale infinite.

    Args:
      multiplier: above 0.

    Raises:
      TypeError: if `multiplier` is not a number.
      ValueError: if `multiplier` is not finite, or not above 0.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> spec = jqx.QSpec(jnp.int8, calibrator=jqx.calibrators.rms(127.0))
      >>> jqx.QTensor.quantize(jnp.array([1.0, -1.0, 1.0]), spec).scale
      Array([1.], dtype=float32)
    """
    return Rms(multiplier)
