"""Arithmetic that XLA must not rearrange: each step rounds once, as written.

XLA (measured on jaxlib 0.10.2, CPU) rewrites `x / s` with a broadcast `s` to `x * (1 / s)`,
contracts `a * b + c` to a fused multiply-add, and drops a rounding to a 16-bit float that is
widened again. Each breaks the last bit of a specified result. The forms that survive live here and
nowhere else; `tests/numerics/test_exact.py` fails when a new XLA undoes one.

Subnormals are the exception: XLA on CPU flushes float32 subnormals to zero, and nothing cheap
  undoes it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ._formats import bit_width, integer_range, is_signed


def compute_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype to compute in: float64 for float64, float32 for all smaller floats."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """`x / divisor`, a true division; `divisor` broadcasts to the shape of `x`.

    The barrier stands behind the broadcast: before it, XLA still sees a broadcast divisor and
    multiplies by its reciprocal. The select ties the divisor to `x`, or vmap over `x` alone would
    move the barrier before a broadcast again; it changes no quotient, as one of NaN is NaN. Neither
    costs a temporary; the division fuses as before.
    """
    tied = jnp.where(jnp.isnan(x), x, jnp.broadcast_to(divisor, x.shape))
    return x / lax.optimization_barrier(tied)


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """`a * b + c` with the product rounded before the sum: no fused multiply-add.

    The select between product and sum is what keeps LLVM from contracting them; it changes no
    value.
    """
    product = a * b
    product = jnp.where(jnp.isnan(product), jnp.asarray(jnp.nan, product.dtype), product)
    return product + c


def narrow(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds `x` once, to nearest even, to `dtype`, whatever reads the result.

    Without the barrier XLA drops the rounding where the caller widens the result again.
    """
    if x.dtype == dtype:
        return x
    return lax.optimization_barrier(x.astype(dtype))


def saturating_sum(r: jax.Array, zero_point: jax.Array | None, qtype: DTypeLike) -> jax.Array:
    """Returns `r + zero_point`, exact, saturated to `qtype`; NaN gives 0.

    Args:
      r: integers held as float32 or float64, any magnitude, infinity and NaN included.
      zero_point: of dtype `qtype`, broadcasting to the shape of `r`; `None` means zero.
      qtype: integer dtype of up to 32 bits.
    """
    if bit_width(qtype) == 32 and r.dtype == jnp.float32:
        return _saturating_sum_in_halves(r, zero_point, qtype)
    low, high = integer_range(qtype)
    if zero_point is not None:
        # Exact wherever it does not saturate: |r + zero_point| is below 2**24 (2**53) there.
        wide_zero_point = zero_point.astype(jnp.int32 if is_signed(qtype) else jnp.uint32)
        r = r + wide_zero_point.astype(r.dtype)
    r = jnp.where(
        jnp.isnan(r),
        jnp.zeros_like(r),
        lax.clamp(jnp.asarray(low, r.dtype), r, jnp.asarray(high, r.dtype)),
    )
    if bit_width(qtype) < 8:
        # XLA on CPU converts float32 to int8 in vectors, but to int4 and int2 one value at a time.
        r = r.astype(jnp.int8)
    return r.astype(qtype)


def _saturating_sum_in_halves(
    r: jax.Array, zero_point: jax.Array | None, qtype: DTypeLike
) -> jax.Array:
    """`saturating_sum` for float32 and 32-bit codes: the sum is carried in two 16-bit halves.

    float32 holds neither the sum (24 bits) nor the bound 2**31 - 1, and int64 is not to be had.
    """
    low, high = integer_range(qtype)
    r = lax.clamp(jnp.float32(-(2.0**33)), r, jnp.float32(2.0**33))
    nan = jnp.isnan(r)
    r = jnp.where(nan, jnp.float32(0), r)
    r_high = jnp.floor(r * jnp.float32(2.0**-16))  # a power of two: exact, fused or not
    r_low = (r - r_high * jnp.float32(65536)).astype(jnp.int32)
    if zero_point is None:
        upper, lower = r_high.astype(jnp.int32), r_low
    else:
        z_high, z_low = _halves(zero_point)
        upper, lower = r_high.astype(jnp.int32) + z_high, r_low + z_low
    upper = upper + (lower >> 16)
    total = (upper << 16) | (lower & 0xFFFF)
    total = lax.bitcast_convert_type(total, jnp.dtype(qtype))
    total = jnp.where(upper > high >> 16, jnp.asarray(high, qtype), total)
    total = jnp.where(upper < low >> 16, jnp.asarray(low, qtype), total)
    return jnp.where(nan, jnp.zeros_like(total), total)


def _halves(codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits integers into int32 `(high, low)`: `high * 65536 + low`, low in [0, 65536)."""
    if is_signed(codes.dtype):
        wide = codes.astype(jnp.int32)
        return wide >> 16, wide & 0xFFFF
    wide = codes.astype(jnp.uint32)
    return (wide >> 16).astype(jnp.int32), (wide & 0xFFFF).astype(jnp.int32)


def difference(q: jax.Array, zero_point: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """Returns `q - zero_point`, an exact integer difference rounded once to `dtype`.

    Args:
      q: integers of up to 32 bits, any shape.
      zero_point: integers of up to 32 bits, broadcasting to the shape of `q`; `None` means zero.
      dtype: float16, bfloat16, float32 or float64.

    Returns:
      The rounded difference, held in `compute_dtype(dtype)`.
    """
    dtype, wide = jnp.dtype(dtype), compute_dtype(dtype)
    operands = (q,) if zero_point is None else (q, zero_point)
    if wide == jnp.float64:
        widened = [_widen(v).astype(wide) for v in operands]
        return widened[0] if zero_point is None else widened[0] - widened[1]
    if max(bit_width(v.dtype) for v in operands) <= 16:
        widened = [v.astype(jnp.int32) for v in operands]
        d = (widened[0] if zero_point is None else widened[0] - widened[1]).astype(wide)
        return _round_integers(d, dtype) if max(bit_width(v.dtype) for v in operands) == 16 else d
    upper, lower = _halves(q)
    if zero_point is not None:
        z_high, z_low = _halves(zero_point)
        upper, lower = upper - z_high, lower - z_low
        upper, lower = upper + (lower >> 16), lower & 0xFFFF
    if dtype == jnp.bfloat16:
        # Rounding to float32 and then to bfloat16 would round twice. Fold the low bits into one
        # sticky bit (round to odd), so that the value has at most 24 bits and is rounded once.
        odd = (upper << 7) | (lower >> 9) | ((lower & 511) != 0).astype(jnp.int32)
        folded = odd.astype(jnp.float32) * jnp.float32(512)
        exact = upper.astype(jnp.float32) * jnp.float32(65536) + lower.astype(jnp.float32)
        return _round_integers(jnp.where(jnp.abs(exact) < 2.0**24, exact, folded), dtype)
    # The product with 65536 is exact, so the sum rounds once, fused or not.
    d = upper.astype(jnp.float32) * jnp.float32(65536) + lower.astype(jnp.float32)
    return _round_integers(d, dtype)


def _widen(codes: jax.Array) -> jax.Array:
    return codes.astype(jnp.int32 if is_signed(codes.dtype) else jnp.uint32)


def _round_integers(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds float32 integers to the precision of `dtype`; integers are never subnormal."""
    if dtype == jnp.float32:
        return x
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=int(info.nexp), mantissa_bits=int(info.nmant))
