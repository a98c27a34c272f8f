"""The largest magnitude: the range is symmetric and clips nothing that was observed."""

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
    look_at,
    nothing_seen,
    poisoned,
    serializable,
)
from ._cover import cover


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
        seen = look_at(x, spec)
        groups = spec.granularity.groups(x.shape)
        largest = groups.largest_magnitude(seen.values)
        return AbsMaxStats(largest.astype(jnp.float32), seen.nans, seen.observed)

    def merge(self, a: AbsMaxStats, b: AbsMaxStats) -> AbsMaxStats:
        """Returns the larger magnitudes and the sums of the counts."""
        largest = jnp.maximum(a.largest, b.largest)
        return AbsMaxStats(largest, *added_counts(a, b))

    def affine(self, stats: AbsMaxStats, spec: Affinity) -> Affine:
        """Returns the scale that maps the largest magnitude to the largest number."""
        return poisoned(cover(-stats.largest, stats.largest, spec), stats.nans)

    def fit(self, x: jax.Array, spec: Affinity) -> Affine:
        """Returns the scale for one array in one pass; the largest magnitude of a NaN is NaN."""
        largest = spec.granularity.groups(x.shape).largest_magnitude(x).astype(jnp.float32)
        return cover(-largest, largest, spec)

    def __str__(self) -> str:
        return "absmax"


absmax: AbsMax = AbsMax()
