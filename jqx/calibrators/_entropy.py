"""The least Kullback-Leibler divergence between the values and their quantized distribution.

Let `H` be a histogram of magnitudes in `bins` equal bins of width `w`. For every `i`::

    P = H[0:i], with the counts of all bins from i on added to P[i - 1]
    Q = H[0:i] in `levels` runs, each run spread evenly over its bins that are not empty
    divergence = sum(P * log(P / Q)), both normalised to 1

The range is `[-T, T]` with `T = i * w` for the `i` of least divergence. Source: Migacz, "8-bit
Inference with TensorRT", GTC 2017. Deviations: zeros are left out, because every scale represents
them exactly and their mass would dominate. `T` is the edge `i * w` and not `(i + 0.5) * w`, so that
the range is that of `absmax` if nothing is clipped. `i = bins` is a candidate.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..numerics import QType, format_of
from ..numerics._shared import RoundMode
from ._arguments import check_count
from ._calibrator import Affine, Affinity, look_at, poisoned
from ._cover import cover
from ._histogram import EDGES, FromHistogram, HistogramStats, extremes, magnitudes, tally
from ._rows import rows_of


@dataclasses.dataclass(frozen=True)
class Entropy(FromHistogram):
    """Searches the threshold of least Kullback-Leibler divergence, for all magnitudes together.

    For a given array the histogram is counted in equal bins, as in the source. Observed statistics
    have bins that are 0.8 to 1.6 % wide. Each of these spreads its count over the equal bins in
    proportion to the overlap (the topmost bin over its part below the maximum).

    `levels` is the number of non-negative numbers of the format, which is half of all numbers: 128
    for int8. For integers the runs are equal. For other formats a run is the set of bins that round
    to the same number. In an asymmetric spec the threshold clips both ends:
    `[max(low, -T), min(high, T)]`. A format with more levels than bins is not clipped. An infinity
    makes the scale infinite.

    Thresholds start at `levels` bins, and at a sixteenth of the largest magnitude (128 of 2048, as
    in the source). Many values are needed to fill a histogram: for a few hundred, prefer `mse`.

    Attributes:
      bins: number of equal bins.
      stride: step between the thresholds that are tried, in bins; the last bin is always tried.

    Raises:
      TypeError: if a field is not an integer.
      ValueError: if a field is below 1.
    """

    bins: int = 2048
    stride: int = 8

    def __post_init__(self) -> None:
        for field in ("bins", "stride"):
            value = check_count("calibrators.Entropy", field, getattr(self, field), 1)
            object.__setattr__(self, field, value)

    def affine(self, stats: HistogramStats, spec: Affinity) -> Affine:
        """Returns the scale and zero point for the threshold of the observed histogram."""
        largest = jnp.maximum(jnp.maximum(stats.high, -stats.low), jnp.zeros_like(stats.low))
        counts = magnitudes(stats.counts)[..., 1:].astype(jnp.float32)
        length = counts.shape[-1]
        flat = jax.vmap(self._in_equal_bins)(counts.reshape(-1, length), largest.reshape(-1))
        counts = flat.reshape(*largest.shape, self.bins)
        found = self._clip(counts, stats.low, stats.high, largest, spec)
        return poisoned(found, stats.nans)

    def fit(self, x: jax.Array, spec: Affinity) -> Affine:
        """Returns the scale and zero point for the threshold of `x` itself."""
        rows = rows_of(x.astype(jnp.float32), spec.granularity.groups(x.shape), jnp.nan)
        low, high = extremes(rows)
        largest = jnp.maximum(jnp.maximum(high, -low), jnp.zeros_like(low))
        place = jnp.floor(jnp.abs(rows) / largest[..., None] * self.bins)
        place = jnp.minimum(place, jnp.float32(self.bins - 1)).astype(jnp.int32)
        place = jnp.where(jnp.isnan(rows) | (rows == 0), self.bins, place)
        counts = tally(place, self.bins).astype(jnp.float32)
        return poisoned(self._clip(counts, low, high, largest, spec), look_at(x, spec).nans)

    def _in_equal_bins(self, counts: jax.Array, largest: jax.Array) -> jax.Array:
        """Spreads the counts of one histogram of magnitudes over equal bins up to `largest`."""
        edges = jnp.minimum(np.append(EDGES, np.float32(np.inf)), largest)
        # Summed from the top, where counts are small and matter most.
        beyond = jnp.append(lax.cumsum(counts, reverse=True), jnp.float32(0))
        ends = np.arange(self.bins, dtype=np.float32) / np.float32(self.bins) * largest
        kept = jnp.append(jnp.interp(ends, edges, beyond), jnp.float32(0))
        return kept[:-1] - kept[1:]

    def _clip(
        self,
        counts: jax.Array,
        low: jax.Array,
        high: jax.Array,
        largest: jax.Array,
        spec: Affinity,
    ) -> Affine:
        form = format_of(spec.qtype)
        flat = counts.reshape(-1, self.bins)
        kept = jax.vmap(lambda one: self._least_divergent(one, form))(flat).reshape(low.shape)
        limit = largest * (kept.astype(jnp.float32) / self.bins)
        return cover(jnp.maximum(low, -limit), jnp.minimum(high, limit), spec)

    def _least_divergent(self, counts: jax.Array, form: QType) -> jax.Array:
        """Returns how many bins of one histogram to keep; all of them if no fewer are better."""
        first = min(max((form.levels + 1) // 2, self.bins // 16), self.bins)
        kept = np.append(np.arange(first, self.bins, self.stride), self.bins).astype(np.int32)
        found = lax.map(lambda i: self._divergence(counts, i, form), jnp.asarray(kept[::-1].copy()))
        found = jnp.where(jnp.isnan(found), jnp.full_like(found, jnp.inf), found)
        return jnp.asarray(kept[::-1].copy())[jnp.argmin(found)]

    def _divergence(self, counts: jax.Array, kept: jax.Array, form: QType) -> jax.Array:
        """Returns the divergence for the first `kept` bins."""
        place = jnp.arange(self.bins, dtype=jnp.int32)
        inside = jnp.where(place < kept, counts, jnp.zeros_like(counts))
        outside = jnp.sum(counts - inside)
        p = jnp.where(place == kept - 1, inside + outside, inside)
        run = self._runs(place, kept, form)
        full = (inside > 0).astype(jnp.float32)
        zeros = jnp.zeros_like(counts)
        mass, width = zeros.at[run].add(inside), zeros.at[run].add(full)
        q = full * mass[run] / jnp.maximum(width[run], 1)
        p, q = p / jnp.sum(p), q / jnp.sum(q)
        terms = jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, jnp.ones_like(p)) / q), zeros)
        return jnp.sum(terms)

    def _runs(self, place: jax.Array, kept: jax.Array, form: QType) -> jax.Array:
        """Returns for each bin the number of its run: the bins that become one number."""
        if form.uniform:
            levels = (form.levels + 1) // 2
            run = place * levels // kept if levels * self.bins < 2**31 else place
            return jnp.minimum(run, self.bins - 1)
        middle = (place.astype(jnp.float32) + 0.5) / kept.astype(jnp.float32)
        number = form.round(middle * jnp.float32(form.high), RoundMode.NEAREST_TOWARD_EVEN)
        return jnp.cumsum(jnp.diff(number, prepend=number[:1]) != 0, dtype=jnp.int32)

    def __str__(self) -> str:
        return "entropy" if self == entropy else f"entropy({self.bins}, {self.stride})"


entropy: Entropy = Entropy()
