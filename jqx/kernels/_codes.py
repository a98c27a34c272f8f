"""Conversion of codes and scales to numbers in registers, shared by kernels of all platforms."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..numerics._shared import E8M0

Table = tuple[float, ...] | None
"""The table of numbers of codes of 4 bits or fewer; `None` if a code is itself the number."""


def numbers(codes: jax.Array, table: Table) -> jax.Array:
    """Returns the numbers of codes, float32."""
    if table is None:
        # They have 8 bits or fewer; the integer unit uses int32 for all of them.
        wide = codes if jnp.issubdtype(codes.dtype, jnp.floating) else codes.astype(jnp.int32)
        return wide.astype(jnp.float32)
    return _looked_up(codes.astype(jnp.int32), table)


def _looked_up(codes: jax.Array, table: Sequence[float]) -> jax.Array:
    """Returns entries of a table by a tree of selects, with one level for each bit."""
    count = 1 << (len(table) - 1).bit_length()
    entries = [jnp.float32(table[min(i, len(table) - 1)]) for i in range(count)]
    bit = 0
    while len(entries) > 1:
        is_set = (codes >> jnp.int32(bit)) & jnp.int32(1) == jnp.int32(1)
        pairs = zip(entries[::2], entries[1::2], strict=True)
        entries = [jnp.where(is_set, high, low) for low, high in pairs]
        bit += 1
    return entries[0]


def scales(scale: jax.Array) -> jax.Array:
    """Returns scales as float32; uint8 are the exponents of powers of two, as in E8M0."""
    if scale.dtype == E8M0:
        scale = lax.bitcast_convert_type(scale, jnp.uint8)
    if scale.dtype != jnp.uint8:
        return scale.astype(jnp.float32)
    code = scale.astype(jnp.int32)
    # 2**-127 is a subnormal float32, and 255 is NaN.
    bits = jnp.where(code == 255, 0x7FC00000, jnp.where(code == 0, 1 << 22, code << 23))
    return lax.bitcast_convert_type(bits, jnp.float32)
