"""The largest magnitude: the range is symmetric and clips nothing that was observed."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..ops import affine_from_range
from ._calibrator import Affine, Affinity, none, one, reduced_axes


class AbsMaxStats(NamedTuple):
    """The largest magnitude per scale (float32) and the number of arrays observed (int32)."""

    largest: jax.Array
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class AbsMax:
    """Covers `[-m, m]`, `m` the largest magnitude observed; a NaN poisons its own scale alone."""

    def empty(self, shape: Sequence[int]) -> AbsMaxStats:
        """Returns magnitude 0 and count 0."""
        return AbsMaxStats(jnp.zeros(tuple(shape), jnp.float32), none())

    def observe(self, x: jax.Array, spec: Affinity) -> AbsMaxStats:
        """Returns the largest magnitude along the axes that share a scale."""
        axes = reduced_axes(x, spec)
        largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0)
        return AbsMaxStats(largest.astype(jnp.float32), one())

    def merge(self, a: AbsMaxStats, b: AbsMaxStats) -> AbsMaxStats:
        """Returns the larger magnitudes and the sum of the counts."""
        return AbsMaxStats(jnp.maximum(a.largest, b.largest), a.observed + b.observed)

    def observed(self, stats: AbsMaxStats) -> jax.Array:
        """Returns how many arrays were observed."""
        return stats.observed

    def affine(self, stats: AbsMaxStats, spec: Affinity) -> Affine:
        """Returns the scale that maps the largest magnitude to the largest code."""
        m = stats.largest
        return Affine(*affine_from_range(-m, m, qtype=spec.qtype, symmetric=spec.symmetric))

    def __str__(self) -> str:
        return "absmax"


absmax = AbsMax()
