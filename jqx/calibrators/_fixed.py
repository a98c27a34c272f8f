"""A range that is given, so that no data is needed.

Example: activations after a sigmoid are in `[0, 1]`, whatever the input.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._errors import fail
from ._arguments import check_number
from ._calibrator import (
    Affine,
    Affinity,
    Calibrator,
    added_counts,
    look_at,
    nothing_seen,
    poisoned,
    serializable,
)
from ._cover import cover


@serializable
class FixedStats(NamedTuple):
    """NaN values per scale and arrays observed (int32); nothing else is needed."""

    nans: jax.Array
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class Fixed(Calibrator):
    """Covers `[min(low, 0), max(high, 0)]`, or `[-m, m]` with the larger magnitude if symmetric.

    Values outside of the range saturate, infinities too. `observed` is 1 even if nothing was seen,
    so that a scale can be computed without calibration.

    Attributes:
      low: the smallest value of the range.
      high: the largest value of the range.

    Raises:
      TypeError: if a limit is not a number.
      ValueError: if a limit is not finite, or `low` is not below `high`.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        for field in ("low", "high"):
            value = check_number(
                "calibrators.fixed", field, getattr(self, field), lambda _: True, "of any size"
            )
            object.__setattr__(self, field, value)
        if not self.low < self.high:
            raise fail(
                "calibrators.fixed",
                "the range is empty.",
                given=f"low == {self.low}, high == {self.high}",
                expected="low < high",
                fix="swap them, or widen the range.",
            )

    def empty(self, shape: Sequence[int]) -> FixedStats:
        """Returns counts of 0."""
        return FixedStats(*nothing_seen(shape))

    def observe(self, x: jax.Array, spec: Affinity) -> FixedStats:
        """Returns how many NaN values there are."""
        seen = look_at(x, spec)
        return FixedStats(seen.nans, seen.observed)

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
    """Returns a calibrator with a given range; see `Fixed`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> spec = jqx.QSpec(jnp.int8, calibrator=jqx.calibrators.fixed(0, 127))
      >>> jqx.QTensor.quantize(jnp.array([0.3, 200.0]), spec).values
      Array([  0, 127], dtype=int8)
    """
    return Fixed(low, high)
