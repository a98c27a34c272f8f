"""Numbers as sums of bfloat16, which matrix units multiply without loss."""

import jax
import jax.numpy as jnp
from jax import lax

EXACT = 3
"""The number of bfloat16 terms that represent a float32 exactly."""


def split(x: jax.Array, parts: int) -> list[jax.Array]:
    """Returns bfloat16 numbers whose sum is `x`: one is rounded, three are exact.

    Bits are truncated, because XLA removes a rounding that is followed by a widening.
    """
    if parts == 1:
        return [x.astype(jnp.bfloat16)]
    found, left = [], x.astype(jnp.float32)
    for _ in range(parts):
        bits = lax.bitcast_convert_type(left, jnp.int32) & jnp.int32(-(1 << 16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        found.append(part.astype(jnp.bfloat16))
        left = left - part
    return found
