"""The smallest and the largest value: the tightest range that clips no observed value."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._calibrator import (
    Affine,
    Affinity,
    Calibrator,
    added_counts,
    nothing_seen,
    poisoned,
    serializable,
)
from ._cover import cover


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
