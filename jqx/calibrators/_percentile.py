"""A percentile: the range leaves out a given share of the values, the largest ones.

Of `n` values, `c = floor(n * (100 - percent) / 100)` may be clipped:

    symmetric:   T = the (n - c)-th smallest magnitude, range [-T, T]
    asymmetric:  low and high = the (k + 1)-th smallest and largest value, k = floor(c / 2)

so at most `c` values are outside. `T` is NumPy's `percentile(|x|, percent,
method="inverted_cdf")`: a value that occurs, not one between two.

Source: McKinstry et al., "Discovering Low-Precision Networks Close to Full-Precision Networks for
Efficient Embedded Inference", arXiv:1809.04191; the definition of ranks is ours.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._arguments import check_number
from ._calibrator import Affine, Affinity, look_at, poisoned
from ._cover import cover
from ._groups import Groups
from ._histogram import EDGES, UPPER, FromHistogram, HistogramStats, magnitudes
from ._rows import members, rows_of

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
        value = check_number(
            "calibrators.Percentile",
            "percent",
            self.percent,
            lambda v: 0 < round(v, 4) and v <= 100,
            "at least 0.0001 and at most 100",
        )
        object.__setattr__(self, "percent", round(value, 4))

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
        seen = look_at(x, spec)
        if x.size == 0:
            return self.affine(self.observe(x, spec), spec)
        groups = spec.granularity.groups(x.shape)
        values = seen.values.astype(jnp.float32)
        if spec.symmetric:
            high = self._largest_kept(jnp.abs(values), groups, 1)
            low = -high
        else:
            high = self._largest_kept(values, groups, 2)
            low = -self._largest_kept(-values, groups, 2)
        return poisoned(cover(low, high, spec), seen.nans)

    def _largest_kept(self, x: jax.Array, groups: Groups, ends: int) -> jax.Array:
        """Returns the largest value of each row that is not clipped."""
        most = groups.per_scale * self._share // _MILLION // ends
        largest, _ = lax.top_k(rows_of(x, groups, -jnp.inf), most + 1)
        clipped = self._clipped(members(groups), ends).astype(jnp.int32)  # fewer in a tail
        return jnp.take_along_axis(largest, clipped[..., None], axis=-1)[..., 0]

    @property
    def _share(self) -> int:
        """The share that may be clipped, in millionths."""
        return round((100 - self.percent) * 10_000)

    def _clipped(self, n: jax.Array, ends: int) -> jax.Array:
        """Returns `floor(n * share / ends)`, exactly, in uint32."""
        high, low = divmod(self._share, 1000)
        whole, rest = n // _MILLION, n % _MILLION
        clipped = whole * jnp.uint32(self._share) + (rest * high + rest * low // 1000) // 1000
        return clipped // ends

    def _limit(self, counts: jax.Array, edges: np.ndarray, ends: int) -> jax.Array:
        """Returns the upper edge of the bin with the largest value that is not clipped."""
        n = jnp.sum(counts.astype(jnp.float32), axis=-1, keepdims=True)
        halvings = jnp.ceil(jnp.log2(jnp.maximum(n, 1) / 2.0**31)).astype(jnp.int32)
        counts = counts >> jnp.maximum(halvings, 0).astype(jnp.uint32)
        beyond = lax.cumsum(counts, axis=counts.ndim - 1, reverse=True)  # in this bin or further
        clipped = self._clipped(beyond[..., :1], ends)
        place = jnp.sum((beyond > clipped).astype(jnp.int32), axis=-1) - 1
        limit = jnp.take(edges, place, mode="clip")
        return jnp.where(clipped[..., 0] == 0, jnp.full_like(limit, jnp.inf), limit)

    def __str__(self) -> str:
        return f"percentile({self.percent})"


percentile: Percentile = Percentile()
