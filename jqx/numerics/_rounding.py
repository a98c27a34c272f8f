"""The nine round modes of nGraph, each exact for every finite float."""

import enum

import jax
import jax.numpy as jnp
from jax import lax


class RoundMode(enum.Enum):
    """How a real number is rounded to an integer; the value is the attribute string of nGraph.

    =======================  =============================  ===  ====  ====  ===  ====
    mode                     rule                           2.5  -2.5  -3.5  2.4  -2.6
    =======================  =============================  ===  ====  ====  ===  ====
    NEAREST_TOWARD_INFINITY  nearest, ties away from zero     3    -3    -4    2    -3
    NEAREST_TOWARD_ZERO      nearest, ties toward zero        2    -2    -3    2    -3
    NEAREST_UPWARD           nearest, ties to +infinity       3    -2    -3    2    -3
    NEAREST_DOWNWARD         nearest, ties to -infinity       2    -3    -4    2    -3
    NEAREST_TOWARD_EVEN      nearest, ties to even            2    -2    -4    2    -3
    TOWARD_INFINITY          away from zero                   3    -3    -4    3    -3
    TOWARD_ZERO              truncate                         2    -2    -3    2    -2
    UP                       ceiling                          3    -2    -3    3    -2
    DOWN                     floor                            2    -3    -4    2    -3
    =======================  =============================  ===  ====  ====  ===  ====
    """

    NEAREST_TOWARD_INFINITY = "ROUND_NEAREST_TOWARD_INFINITY"
    NEAREST_TOWARD_ZERO = "ROUND_NEAREST_TOWARD_ZERO"
    NEAREST_UPWARD = "ROUND_NEAREST_UPWARD"
    NEAREST_DOWNWARD = "ROUND_NEAREST_DOWNWARD"
    NEAREST_TOWARD_EVEN = "ROUND_NEAREST_TOWARD_EVEN"
    TOWARD_INFINITY = "ROUND_TOWARD_INFINITY"
    TOWARD_ZERO = "ROUND_TOWARD_ZERO"
    UP = "ROUND_UP"
    DOWN = "ROUND_DOWN"


def round_to_integer(x: jax.Array, mode: RoundMode) -> jax.Array:
    """Rounds float32 or float64 values to integers of the same dtype; NaN and infinity stay.

    `floor(x + 0.5)` would be wrong: the sum rounds 0.49999997 up to 1 and is off by one for odd
    values above 2**23. The differences that are compared here are exact wherever it matters:
    `x - floor(x)` is at least 0.5 only if its exact value is; so is `ceil(x) - x`, for ties
    downward; and `x - trunc(x)` is exact for every float.
    """
    half, one = jnp.asarray(0.5, x.dtype), jnp.asarray(1, x.dtype)
    match mode:
        case RoundMode.NEAREST_TOWARD_EVEN:
            return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
        case RoundMode.NEAREST_TOWARD_INFINITY:
            return lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO)
        case RoundMode.NEAREST_TOWARD_ZERO:
            t = jnp.trunc(x)
            return jnp.where(jnp.abs(x - t) > half, t + jnp.copysign(one, x), t)
        case RoundMode.NEAREST_UPWARD:
            below = lax.floor(x)
            return jnp.where(x - below >= half, below + one, below)
        case RoundMode.NEAREST_DOWNWARD:
            above = lax.ceil(x)
            return jnp.where(above - x >= half, above - one, above)
        case RoundMode.TOWARD_INFINITY:
            return jnp.where(x < 0, lax.floor(x), lax.ceil(x))
        case RoundMode.TOWARD_ZERO:
            return jnp.trunc(x)
        case RoundMode.UP:
            return lax.ceil(x)
        case RoundMode.DOWN:
            return lax.floor(x)
