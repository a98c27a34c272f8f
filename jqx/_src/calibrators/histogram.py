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

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..gradients.estimators import ste
from ..numerics.exact import RoundMode
from ..ops.affine import affine_fake_quantize
from .calibrator import (
    Affine,
    Affinity,
    Calibrator,
    added_counts,
    look_at,
    nothing_seen,
    saturating_add,
    serializable,
)
from .granularity import Groups

# Rows of the elements that share a scale, for sorting, counting or searching scale by scale.


def rows_of(x: jax.Array, groups: Groups, fill: float) -> jax.Array:
    """Returns one row per scale, `(*scale_shape, elements)`; the row of a tail is padded."""
    x, axes = groups.split(x, fill), groups.axes
    length = math.prod(x.shape[axis] for axis in axes)
    x = jnp.moveaxis(x, axes, range(-len(axes), 0))
    return x.reshape(*groups.scale_shape, length)


def members(groups: Groups) -> jax.Array:
    """Returns the number of elements that share each scale, uint32, in the shape of the scale."""
    rank = len(groups.shape)
    total = jnp.ones((1,) * rank, jnp.uint32)
    axes = zip(groups.shape, groups.sizes, groups.scale_shape, strict=True)
    for axis, (n, b, m) in enumerate(axes):
        sizes = np.full(m, b, np.uint32)
        sizes[-1:] = n - (m - 1) * b
        total = total * sizes.reshape([m if i == axis else 1 for i in range(rank)])
    return total


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
        low = jnp.full(tuple(shape), jnp.inf, jnp.float32)
        counts = jnp.zeros((*shape, LENGTH), jnp.uint32)
        return HistogramStats(counts, low, -low, *nothing_seen(shape))

    def observe(self, x: jax.Array, spec: Affinity) -> HistogramStats:
        """Returns the histogram of the elements that share a scale."""
        observation, groups = look_at(x, spec), spec.granularity.groups(x.shape)
        rows = rows_of(x.astype(jnp.float32), groups, jnp.nan)
        counts = tally(bin_of(rows), LENGTH)
        return HistogramStats(counts, *extremes(rows), observation.nans, observation.observed)

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
    index = lax.clamp(jnp.int32(0), pattern - (_FIRST - 1), jnp.int32(ZERO))
    return jnp.where(jnp.isnan(x), LENGTH, jnp.where(x < 0, ZERO - index, ZERO + index))


def tally(bins: jax.Array, length: int) -> jax.Array:
    """Counts places in `[0, length)` along the last axis, uint32; others are ignored."""
    rows = bins.reshape(-1, bins.shape[-1]) if bins.size else bins.reshape(0, 1)
    shape = bins.shape[:-1]
    counts = jnp.zeros((int(np.prod(shape)), length), jnp.uint32)
    if bins.size:
        row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        counts = counts.at[row, rows].add(jnp.uint32(1), mode="drop")
    return counts.reshape(*shape, length)


def extremes(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the smallest and largest value of each row without NaN; (inf, -inf) if empty."""
    nan = jnp.isnan(rows)
    inf = jnp.full_like(rows, jnp.inf)
    low = jnp.min(jnp.where(nan, inf, rows), axis=-1, initial=jnp.inf)
    return low, jnp.max(jnp.where(nan, -inf, rows), axis=-1, initial=-jnp.inf)


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
        self, affine: Affine, spec: Affinity, penalty: Callable[[jax.Array], jax.Array]
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


def points_of(x: jax.Array, spec: Affinity) -> Points:
    """Returns every value of an array."""
    rows = rows_of(x.astype(jnp.float32), spec.granularity.groups(x.shape), jnp.nan)
    return _points(rows, None, *extremes(rows))


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
    return _points(values, weights, stats.low, stats.high)


def _points(
    values: jax.Array, weights: jax.Array | None, low: jax.Array, high: jax.Array
) -> Points:
    zero = jnp.zeros_like(low)
    return Points(values, weights, jnp.minimum(low, zero), jnp.maximum(high, zero))


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
