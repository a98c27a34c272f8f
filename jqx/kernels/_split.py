"""Numbers as sums of bfloat16, which matrix units multiply without loss."""

import jax
import jax.numpy as jnp
from jax import lax

EXACT = 3
"""Numbers of bfloat16 that have all bits of one of float32."""


def split(x: jax.Array, parts: int) -> list[jax.Array]:
    """Returns bfloat16 numbers whose sum is `x`: one is rounded, three are exact.

    Bits are cut off, since XLA leaves out roundings that are taken back.
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
