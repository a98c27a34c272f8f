"""Weighted points, from an array or from a histogram, on which a search measures errors."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..gradients import ste
from ..numerics._shared import RoundMode
from ..ops._shared import affine_fake_quantize
from ._calibrator import Affine, Affinity
from ._histogram import EDGES, ZERO, HistogramStats, extremes
from ._rows import rows_of

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
    whole = np.concatenate([-above[::-1], np.zeros((1, _PER_BIN)), above])
    return whole.astype(np.float32).reshape(-1)


_NODES = _nodes()
