"""The smallest and the largest value: the range clips nothing observed, and is no wider."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..ops import affine_from_range
from ._calibrator import Affine, Affinity, none, one, reduced_axes


class MinMaxStats(NamedTuple):
    """The extremes per scale (float32) and the number of arrays observed (int32)."""

    low: jax.Array
    high: jax.Array
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class MinMax:
    """Covers `[min(low, 0), max(high, 0)]`; a NaN poisons its own scale alone."""

    def empty(self, shape: Sequence[int]) -> MinMaxStats:
        """Returns the empty range, `[inf, -inf]`, and count 0."""
        high = jnp.full(tuple(shape), -jnp.inf, jnp.float32)
        return MinMaxStats(-high, high, none())

    def observe(self, x: jax.Array, spec: Affinity) -> MinMaxStats:
        """Returns the extremes along the axes that share a scale."""
        axes = reduced_axes(x, spec)
        low = jnp.min(x, axis=axes, keepdims=True, initial=jnp.inf)
        high = jnp.max(x, axis=axes, keepdims=True, initial=-jnp.inf)
        return MinMaxStats(low.astype(jnp.float32), high.astype(jnp.float32), one())

    def merge(self, a: MinMaxStats, b: MinMaxStats) -> MinMaxStats:
        """Returns the wider range and the sum of the counts."""
        return MinMaxStats(
            jnp.minimum(a.low, b.low), jnp.maximum(a.high, b.high), a.observed + b.observed
        )

    def observed(self, stats: MinMaxStats) -> jax.Array:
        """Returns how many arrays were observed."""
        return stats.observed

    def affine(self, stats: MinMaxStats, spec: Affinity) -> Affine:
        """Returns the scale and zero point that cover the range, zero included."""
        zero = jnp.zeros_like(stats.low)
        low, high = jnp.minimum(stats.low, zero), jnp.maximum(stats.high, zero)
        return Affine(*affine_from_range(low, high, qtype=spec.qtype, symmetric=spec.symmetric))

    def __str__(self) -> str:
        return "minmax"


minmax = MinMax()
