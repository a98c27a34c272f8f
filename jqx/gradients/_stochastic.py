"""Stochastic rounding: up or down, with probabilities that make it unbiased.

    Round(x) = floor(x) with probability 1 - (x - floor(x)), floor(x) + 1 with x - floor(x)

so that the expected value of Round(x) is x. The gradient treats the rounding as the identity.

Source: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, arXiv:1502.02551.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._checks import as_real, check_integer, normalize_axes
from ..numerics._shared import compute_dtype, divide
from ._grid import grid
from ._ste import clamp, straight_through


def stochastic_round(
    x: ArrayLike, key: jax.Array, *, shared_axes: int | Sequence[int] = ()
) -> jax.Array:
    """Rounds each element to one of its two neighbouring integers, without bias.

    Args:
      x: real array, any shape; float16, bfloat16, float32 or float64. 16-bit floats are computed in
        float32.
      key: a key from `jax.random.key(...)`, a new one for each call.
      shared_axes: axes of `x` along which all elements share one random number; `()` means that
        each element has its own.

    Returns:
      Integers in the shape and dtype of `x`. Elements that are integers do not change.

    Raises:
      TypeError: `x` is not floating point, or `shared_axes` does not hold integers.
      ValueError: an axis is out of range.

    Gradient: the cotangent, unchanged.
    NaN and infinities: unchanged.
    Source: Gupta et al. 2015, section 3. The probability is truncated to a multiple of `2**-32`
      (`2**-64` for float64), which is the only bias.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> keys = jax.random.split(jax.random.key(0), 10_000)
      >>> jax.vmap(jqx.gradients.stochastic_round, (None, 0))(0.3, keys).mean().round(1)
      Array(0.3, dtype=float32)
    """
    x = as_real("gradients.stochastic_round", "x", x)
    shared = normalize_axes(
        "gradients.stochastic_round", shared_axes, x.ndim, argument="shared_axes"
    )
    wide = x.astype(compute_dtype(x.dtype))
    # Exact for every finite float; x - floor(x) and x + u would round.
    toward_zero = jnp.trunc(wide)
    chance = jnp.abs(wide - toward_zero)
    shape = tuple(1 if axis in shared else size for axis, size in enumerate(x.shape))
    kind, bits = (jnp.uint64, 64) if wide.dtype == jnp.float64 else (jnp.uint32, 32)
    away = jax.random.bits(key, shape, kind) < (chance * 2.0**bits).astype(kind)
    rounded = toward_zero + jnp.where(away, jnp.sign(wide), jnp.zeros_like(wide))
    return straight_through(rounded.astype(x.dtype), x)


@dataclasses.dataclass(frozen=True)
class StochasticRounding:
    """Rounds to one of the two levels next to `x`, without bias; its gradient is that of `ste`.

    Attributes:
      shared_axes: axes of the operand along which all elements share one random number.
    """

    shared_axes: tuple[int, ...] = ()
    needs_key: ClassVar[bool] = True

    def __post_init__(self) -> None:
        axes = self.shared_axes
        axes = tuple(axes) if isinstance(axes, Sequence) else (axes,)
        checked = tuple(check_integer(type(self).__name__, "shared_axes", axis) for axis in axes)
        object.__setattr__(self, "shared_axes", checked)

    def surrogate(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, key: jax.Array | None
    ) -> jax.Array:
        """Returns `x` clamped, and rounded in steps of the quantizer; a NaN gets no gradient."""
        assert key is not None
        clamped = clamp(x, low, high)
        c, low, high = jax.lax.stop_gradient((clamped, low, high))
        origin, step = grid(low, high, levels)
        k = stochastic_round(divide(c - origin, step), key, shared_axes=self.shared_axes)
        return straight_through(jnp.clip(origin + k * step, low, high), clamped)


stochastic: StochasticRounding = StochasticRounding()
