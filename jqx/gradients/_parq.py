"""PARQ: the proximal map of a piecewise-affine regularizer, a rounding with a slope.

Between two neighbouring levels at distance d, with the midpoint m and the inverse slope r:

    prox(x) = m + clip((x - m) / r, -d/2, d/2)

flat at the levels and steep between them; r = 1 is the identity and r = 0 the rounding. Training
takes r from 1 to 0. The gradient is taken at prox(x) and applied to x (the paper's AProx), which is
the straight-through rule.

Source: Jin et al., "PARQ: Piecewise-Affine Regularized Quantization", ICML 2025, arXiv:2503.15748.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._checks import as_like, as_real, check_instance
from .._errors import fail
from ..numerics._shared import compute_dtype, divide
from ._grid import grid
from ._ste import clamp, straight_through


def proximal_round(x: ArrayLike, inverse_slope: ArrayLike) -> jax.Array:
    """Moves each element toward the nearest integer; rounds it if `inverse_slope` is 0.

    Args:
      x: real array, any shape; float16, bfloat16, float32 or float64. 16-bit floats are computed in
        float32.
      inverse_slope: number in `[0, 1]`, broadcast to the shape of `x`. It may be traced, so that a
        schedule does not recompile.

    Returns:
      Array of the shape and dtype of `x`. Elements halfway between two integers stay as they are
      (if `inverse_slope` is 0, they are rounded to even).

    Raises:
      TypeError: `x` is not floating point.

    Gradient: `x` gets the cotangent unchanged; `inverse_slope` gets none.
    NaN and infinities: unchanged.
    Source: PARQ, proximal map for levels that are the integers.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.gradients.proximal_round(jnp.array([0.125, 0.375, 0.5, 0.625]), 0.5)
      Array([0.  , 0.25, 0.5 , 0.75], dtype=float32)
    """
    x = as_real("gradients.proximal_round", "x", x)
    wide = x.astype(compute_dtype(x.dtype))
    r = as_like("gradients.proximal_round", "inverse_slope", inverse_slope, wide.dtype)
    r = r.astype(wide.dtype)
    nearest = jnp.round(wide)
    error = wide - nearest
    # The formula relative to the nearest level: the remaining error, which is 0 near the level.
    gained = (0.5 - jnp.abs(error)) * (1 - r) / r
    left = jnp.where(r > 0, jnp.maximum(jnp.abs(error) - gained, 0), jnp.zeros_like(error))
    moved = nearest + jnp.sign(error) * left
    moved = jnp.where(jnp.isfinite(wide), moved, wide)
    return straight_through(moved.astype(x.dtype), x)


@dataclasses.dataclass(frozen=True)
class Parq:
    """Moves `x` toward its level with a slope; its gradient is that of `ste`. See `parq`.

    Attributes:
      inverse_slope: 1 leaves `x` as it is inside the range, 0 rounds it. Each new value recompiles;
        for a schedule within one program see `proximal_round`.
    """

    inverse_slope: float
    needs_key: ClassVar[bool] = False

    def __post_init__(self) -> None:
        fix = "pass a number that falls from 1 to 0 in training, such as inverse_slope=0.5."
        check_instance("gradients.parq", "inverse_slope", self.inverse_slope, (int, float), fix=fix)
        if not 0 <= self.inverse_slope <= 1:
            raise fail(
                "gradients.parq",
                "`inverse_slope` is out of range.",
                given=f"inverse_slope == {self.inverse_slope}",
                expected="0 <= inverse_slope <= 1",
                fix=fix,
            )

    def surrogate(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, key: jax.Array | None
    ) -> jax.Array:
        """Returns `x` clamped and moved toward its level; a NaN gets no gradient."""
        clamped = clamp(x, low, high)
        c, low, high = jax.lax.stop_gradient((clamped, low, high))
        origin, step = grid(low, high, levels)
        moved = proximal_round(divide(c - origin, step), self.inverse_slope)
        return straight_through(jnp.clip(origin + moved * step, low, high), clamped)


def parq(inverse_slope: float) -> Parq:
    """Returns an estimator that moves `x` toward its level with a slope.

    Its gradient is that of `ste`.

    Args:
      inverse_slope: 1 leaves `x` as it is inside the range, 0 rounds it. Each new value recompiles;
        for a schedule within one program see `proximal_round`.

    Raises:
      TypeError: `inverse_slope` is not a number.
      ValueError: it is not in `[0, 1]`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> x = jnp.array([0.125, 0.375, 0.5, 0.625])
      >>> jqx.quantize_dequantize(x, 1.0, qtype=jnp.int8, gradient=jqx.gradients.parq(0.5))
      Array([0.  , 0.25, 0.5 , 0.75], dtype=float32)
    """
    return Parq(inverse_slope)
