"""The levels of a uniform quantizer, computed from its bounds."""

import jax
import jax.numpy as jnp

from ..numerics._shared import divide


def grid(low: jax.Array, high: jax.Array, levels: int) -> tuple[jax.Array, jax.Array]:
    """Returns `origin` and `step`: the levels are `origin + k * step` for integers `k`.

    The origin is zero where zero is a level, and `low` elsewhere. Zero is then exact, and a tie
    goes to the even multiple of the scale, as in `round(x / scale)`. If the bounds are multiples
    of a scale, `step` equals that scale up to one rounding. Where the range is empty, `step` is 1.

    Args:
      low: float32 or float64, any shape.
      high: shape and dtype of `low`.
      levels: number of levels, 2 or more.
    """
    step = divide(high - low, jnp.asarray(levels - 1, low.dtype))
    step = jnp.where(step > 0, step, jnp.ones_like(step))
    far = jnp.where(-low > high, low, high)
    count, exact = jnp.round(divide(far, step)), divide(low, step)
    # The bounds and the step have one rounding error each, so `low` may differ from a multiple of
    # the step by this much.
    slack = 4 * levels * float(jnp.finfo(low.dtype).eps)
    whole = (jnp.abs(exact - jnp.round(exact)) <= slack) & (high > low)
    step = jnp.where(whole & (count != 0), divide(far, count), step)
    return jnp.where(whole, jnp.zeros_like(low), low), step


def rounding_error(x: jax.Array, low: jax.Array, high: jax.Array, levels: int) -> jax.Array:
    """Returns nearest level minus `x`, in steps: `round(v) - v`; 0 where `x` is not finite."""
    origin, step = grid(low, high, levels)
    v = divide(x - origin, step)
    error = jnp.round(v) - v
    return jnp.where(jnp.isfinite(error), error, jnp.zeros_like(error))
