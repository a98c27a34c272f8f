"""Half-quadratic optimisation of the lp error, p < 1, on which outliers have little influence.

    minimise  sum(|e|**p),  e = x / scale - (q - zero),  q = clip(round(x / scale + zero))

by the splitting of HQQ, for `beta` growing by `kappa` in each iteration:

    w = sign(e) * max(|e| - |e|**(p - 1) / beta, 0)
    asymmetric:  zero = mean(q - (x / scale - w)), at the scale of `minmax`
    symmetric:   scale = scale * sum((x / scale - w) * q) / sum(q**2), starting from `absmax`

Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023,
https://mobiusml.github.io/hqq_blog/. Deviations: errors are in units of the scale, so that the
result scales with `x`. Zero points are integers, so each iterate is rounded, and the iterate with
the least lp error is kept, the start included. Symmetric formats have no zero point. Their scale is
optimised instead, by least squares for the numbers `q`; this is our extension.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..numerics import format_of, round_to_integer
from ..numerics._shared import RoundMode, saturating_sum
from ._arguments import check_count, check_number
from ._calibrator import Affine, Affinity, look_at, poisoned
from ._cover import cover
from ._histogram import FromHistogram, HistogramStats
from ._points import Points, points_in, points_of

_NEAREST = RoundMode.NEAREST_TOWARD_EVEN


@dataclasses.dataclass(frozen=True)
class Hqq(FromHistogram):
    """Optimises the zero point (symmetric: the scale) for the least lp error.

    The zero point is an integer, as everywhere in jqx. In the published HQQ it is a float offset of
    the codes.

    `fit` measures the error on the array itself and is never worse than `minmax` (symmetric:
    `absmax`). For observed statistics the same is done on four points for each bin of the
    histogram. An infinity makes the scale infinite.

    Attributes:
      iterations: number of iterations; there is no early stop.
      p: power of the error, above 0 and at most 1.
      beta: initial weight of the quadratic term, above 0.
      kappa: growth factor of `beta` in each iteration, 1 or more.

    Raises:
      TypeError: if a field is not a number.
      ValueError: if a field is out of range.
    """

    iterations: int = 20
    p: float = 0.7
    beta: float = 10.0
    kappa: float = 1.01

    def __post_init__(self) -> None:
        name = "calibrators.Hqq"
        object.__setattr__(self, "iterations", check_count(name, "iterations", self.iterations, 1))
        for field, holds, expected in (
            ("p", lambda v: 0 < v <= 1, "above 0 and at most 1"),
            ("beta", lambda v: v > 0, "above 0"),
            ("kappa", lambda v: v >= 1, "1 or more"),
        ):
            value = check_number(name, field, getattr(self, field), holds, expected)
            object.__setattr__(self, field, value)

    def affine(self, stats: HistogramStats, spec: Affinity) -> Affine:
        """Returns the scale and zero point of least lp error under the histogram."""
        return poisoned(self._solve(points_in(stats), spec), stats.nans)

    def fit(self, x: jax.Array, spec: Affinity) -> Affine:
        """Returns the scale and zero point of least lp error for `x` itself."""
        return poisoned(self._solve(points_of(x, spec), spec), look_at(x, spec).nans)

    def _solve(self, points: Points, spec: Affinity) -> Affine:
        solve = self._solve_scale if spec.symmetric else self._solve_zero
        return solve(points, spec)

    def _solve_zero(self, points: Points, spec: Affinity) -> Affine:
        form = format_of(spec.qtype)
        low, high = int(form.low), int(form.high)
        scale, first = cover(points.low, points.high, spec)
        assert first is not None
        y = points.values / scale[..., None]
        count = points.sum(jnp.ones_like(y))
        count = jnp.maximum(count, jnp.ones_like(count))

        def affine(zero: jax.Array) -> Affine:
            rounded = round_to_integer(zero, _NEAREST)
            return Affine(scale, saturating_sum(rounded, None, low, high, form.storage))

        def improve(zero: jax.Array, beta: jax.Array) -> jax.Array:
            offset = zero[..., None]
            q = form.round(y + offset, _NEAREST)
            w = self._shrink(y - (q - offset), beta)
            return points.sum(q - (y - w)) / count

        return affine(self._best(points, spec, first.astype(jnp.float32), improve, affine))

    def _solve_scale(self, points: Points, spec: Affinity) -> Affine:
        form = format_of(spec.qtype)
        high = jnp.float32(form.high)

        def affine(largest: jax.Array) -> Affine:
            return cover(-largest, largest, spec)

        def improve(largest: jax.Array, beta: jax.Array) -> jax.Array:
            scale = jnp.where(largest > 0, largest / high, jnp.ones_like(largest))
            y = points.values / scale[..., None]
            q = form.round(y, _NEAREST)
            w = self._shrink(y - q, beta)
            along, square = points.sum((y - w) * q), points.sum(q * q)
            usable = (along > 0) & (square > 0)
            ratio = along / jnp.where(usable, square, jnp.ones_like(square))
            return jnp.where(usable, largest * ratio, largest)

        first = jnp.maximum(points.high, -points.low)
        return affine(self._best(points, spec, first, improve, affine))

    def _best(self, points, spec, first, improve, affine) -> jax.Array:
        """Iterates `improve` and returns the iterate whose affine has the least lp error."""

        def loss(parameter: jax.Array) -> jax.Array:
            return points.loss(affine(parameter), spec, lambda e: jnp.abs(e) ** self.p)

        def step(state, beta):
            parameter, best, least = state
            parameter = improve(parameter, beta)
            error = loss(parameter)
            better = error < least
            best, least = jnp.where(better, parameter, best), jnp.where(better, error, least)
            return (parameter, best, least), None

        betas = np.float32(self.beta * self.kappa ** np.arange(self.iterations))
        (_, best, _), _ = lax.scan(step, (first, first, loss(first)), jnp.asarray(betas))
        return best

    def _shrink(self, e: jax.Array, beta: jax.Array) -> jax.Array:
        """Generalised soft-thresholding, the proximal step of the lp error."""
        size = jnp.abs(e)
        return jnp.sign(e) * jnp.maximum(size - size ** (self.p - 1) / beta, jnp.zeros_like(size))

    def __str__(self) -> str:
        fields = (self.iterations, self.p, self.beta, self.kappa)
        return "hqq" if self == hqq else f"hqq{fields}"


hqq: Hqq = Hqq()
