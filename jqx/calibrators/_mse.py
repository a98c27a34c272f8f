"""The least mean squared error: the range that minimises `mean(|x - dequantize(quantize(x))|**2)`,
or another power of the error.

Searched over a grid of factors that shrink the whole range,

    [f * low, f * high],    f = 1 ... least,    low, high = -m, m if symmetric, else the extremes

with the rounding, saturation and zero point of the format itself. Source: Choukroun et al.,
"Low-bit Quantization of Neural Networks for Efficient Inference", arXiv:1902.06822, for the
criterion; the search over a grid is ours. The power 2.4 is from the reference code of GPTQ (Frantar
et al., arXiv:2210.17323).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._added import added
from .._checks import check_instance
from ..numerics import Block, Integer, format_of
from ..numerics._shared import E8M0
from ._arguments import check_count, check_number
from ._calibrator import Affine, Affinity, look_at, poisoned
from ._cover import cover
from ._histogram import FromHistogram, HistogramStats
from ._points import Points, points_in, points_of


@dataclasses.dataclass(frozen=True)
class Mse(FromHistogram):
    """Searches the range of least mean squared error.

    `fit` measures the error on the array itself. Up to the rounding of a float32 sum it is never
    worse than `absmax` (`minmax` if asymmetric), because the factor 1 is a candidate and wins ties.
    For observed statistics it minimises the expected error under the histogram, with four points a
    bin. The search rounds to nearest even, whatever the spec says.

    The MX rule rounds scales, which are powers of two, down. So for such formats a factor of 2 is
    tried as well. An infinity makes the scale infinite.

    Attributes:
      candidates: number of factors that are tried, evenly spaced.
      least: the smallest factor, above 0 and at most 1.
      norm: the power of the error, from 1 to 16. 2 is the squared error; a larger power, such as
        the 2.4 that is common with GPTQ, clips less.
      signed: whether negative scales, which flip the range, are tried too. Integers have one more
        code below 0 than above, so the end with the larger magnitude can use it: in int4 a step is
        smaller by an eighth. For weights; some kernels of other libraries reject such scales.

    Raises:
      TypeError: if a field is not a number, or `signed` is not a bool.
      ValueError: if a field is out of range.
    """

    candidates: int = 100
    least: float = 0.1
    norm: float = added(2.0)
    signed: bool = added(False)

    def __post_init__(self) -> None:
        name = "calibrators.Mse"
        object.__setattr__(self, "candidates", check_count(name, "candidates", self.candidates, 1))
        least = check_number(
            name, "least", self.least, lambda v: 0 < v <= 1, "above 0 and at most 1"
        )
        object.__setattr__(self, "least", least)
        norm = check_number(name, "norm", self.norm, lambda v: 1 <= v <= 16, "from 1 to 16")
        object.__setattr__(self, "norm", norm)
        fix = "pass signed=True or signed=False."
        check_instance(name, "signed", self.signed, bool, fix=fix)

    def affine(self, stats: HistogramStats, spec: Affinity) -> Affine:
        """Returns the scale and zero point of least expected error under the histogram."""
        return poisoned(self._search(points_in(stats), spec), stats.nans)

    def fit(self, x: jax.Array, spec: Affinity) -> Affine:
        """Returns the scale and zero point of least error for `x` itself."""
        return poisoned(self._search(points_of(x, spec), spec), look_at(x, spec).nans)

    def _search(self, points: Points, spec: Affinity) -> Affine:
        return searched(points, spec, self._factors(spec), self._cost)

    def _cost(self, error: jax.Array) -> jax.Array:
        return jnp.square(error) if self.norm == 2 else jnp.abs(error) ** self.norm

    def _factors(self, spec: Affinity) -> np.ndarray:
        """All factors but 1, float32."""
        shrinking = np.linspace(1, self.least, self.candidates)[1:]
        form = format_of(spec.qtype)
        rounds_down = isinstance(form, Block) and form.scale_qtype == E8M0
        found = np.append(shrinking, [2.0] * rounds_down)
        if self.signed and isinstance(form, Integer) and spec.symmetric and -form.low > form.high:
            found = np.append(found, form.high / -form.low)
            found = np.concatenate([found, -found, [-1.0]])
        return found.astype(np.float32)

    def __str__(self) -> str:
        power = f", norm={self.norm}" if self.norm != 2 else ""
        power += ", signed" if self.signed else ""
        return "mse" if self == mse else f"mse({self.candidates}, {self.least}{power})"


def searched(
    points: Points,
    spec: Affinity,
    factors: np.ndarray,
    cost: Callable[[jax.Array], jax.Array],
) -> Affine:
    """Returns the affine of least error among the whole range and its products with the factors; a
    negative factor flips the range.
    """
    low, high, turns = points.low, points.high, bool(np.any(factors < 0))

    def affine(factor: jax.Array) -> Affine:
        if not turns:
            return cover(low * factor, high * factor, spec)
        size = jnp.abs(factor)
        scale, zero_point = cover(low * size, high * size, spec)
        return Affine(jnp.where(factor < 0, -scale, scale), zero_point)

    def step(best: tuple[jax.Array, jax.Array], factor: jax.Array):
        error = points.loss(affine(factor), spec, cost)
        better = error < best[1]
        return (jnp.where(better, factor, best[0]), jnp.where(better, error, best[1])), None

    one = jnp.ones_like(low)
    start = one, points.loss(affine(one), spec, cost)
    (factor, _), _ = lax.scan(step, start, jnp.asarray(factors))
    return affine(factor)


mse: Mse = Mse()
