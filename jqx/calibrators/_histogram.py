"""Histogram statistics: counts in bins whose edges are the same for every array.

The bins come from the bit pattern of float32: the exponent and the top 6 bits of the mantissa::

    [2**e * (1 + k/64), 2**e * (1 + (k + 1)/64)),    e = -40 ... 23,    k = 0 ... 63

for either sign, so a bin is 0.8 to 1.6 % wide at any magnitude. One bin at zero holds magnitudes
below 2**-40. One bin at each end holds magnitudes of 2**24 or more, infinity included. No range is
chosen beforehand and nothing is re-binned, so statistics merge by adding counts: exactly, in any
order. Counts are uint32 and saturate. The extremes are stored exactly next to the counts.

Bins by exponent and leading bits are from HdrHistogram. That such bins merge exactly is the point
of Masson et al., "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error
Guarantees", arXiv:1908.10693.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._calibrator import (
    Affinity,
    Calibrator,
    added_counts,
    look_at,
    nothing_seen,
    saturating_add,
    serializable,
)
from ._rows import rows_of

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


@serializable
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


class FromHistogram(Calibrator):
    """Observes a histogram; a subclass computes the scale."""

    def empty(self, shape: Sequence[int]) -> HistogramStats:
        """Returns counts of 0 and the empty range."""
        none = jnp.full(tuple(shape), jnp.inf, jnp.float32)
        counts = jnp.zeros((*shape, LENGTH), jnp.uint32)
        return HistogramStats(counts, none, -none, *nothing_seen(shape))

    def observe(self, x: jax.Array, spec: Affinity) -> HistogramStats:
        """Returns the histogram of the elements that share a scale."""
        seen, groups = look_at(x, spec), spec.granularity.groups(x.shape)
        rows = rows_of(x.astype(jnp.float32), groups, jnp.nan)
        counts = tally(bin_of(rows), LENGTH)
        return HistogramStats(counts, *extremes(rows), seen.nans, seen.observed)

    def merge(self, a: HistogramStats, b: HistogramStats) -> HistogramStats:
        """Returns the sums of the counts, and the wider range."""
        return HistogramStats(
            saturating_add(a.counts, b.counts),
            jnp.minimum(a.low, b.low),
            jnp.maximum(a.high, b.high),
            *added_counts(a, b),
        )


def bin_of(x: jax.Array) -> jax.Array:
    """Returns the bin of each float32 value; for a NaN `LENGTH`, which is not a bin."""
    pattern = lax.bitcast_convert_type(jnp.abs(x), jnp.int32) >> _SHIFT
    place = lax.clamp(jnp.int32(0), pattern - (_FIRST - 1), jnp.int32(ZERO))
    return jnp.where(jnp.isnan(x), LENGTH, jnp.where(x < 0, ZERO - place, ZERO + place))


def tally(places: jax.Array, length: int) -> jax.Array:
    """Counts places in `[0, length)` along the last axis, uint32; others are ignored."""
    rows = places.reshape(-1, places.shape[-1]) if places.size else places.reshape(0, 1)
    shape = places.shape[:-1]
    counts = jnp.zeros((int(np.prod(shape)), length), jnp.uint32)
    if places.size:
        row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        counts = counts.at[row, rows].add(jnp.uint32(1), mode="drop")
    return counts.reshape(*shape, length)


def extremes(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the smallest and largest value of each row without NaN; (inf, -inf) if empty."""
    none = jnp.isnan(rows)
    inf = jnp.full_like(rows, jnp.inf)
    low = jnp.min(jnp.where(none, inf, rows), axis=-1, initial=jnp.inf)
    return low, jnp.max(jnp.where(none, -inf, rows), axis=-1, initial=-jnp.inf)


def magnitudes(counts: jax.Array) -> jax.Array:
    """Returns the counts of magnitudes: first the bin at zero, then both signs together."""
    positive, negative = counts[..., ZERO:], jnp.flip(counts[..., : ZERO + 1], -1)
    return saturating_add(positive, negative.at[..., 0].set(0))
