"""Arithmetic that XLA must not rearrange: each step rounds once, as written.

XLA (measured on jaxlib 0.10.2 and 0.12.0.1, CPU) rewrites `x / s` with a broadcast `s` to
`x * (1 / s)`, contracts `a * b + c` to a fused multiply-add, and drops a rounding to a 16-bit float
that is widened again. Each of these changes the last bit of a specified result. All expressions
that XLA keeps as written are in this file; `tests/numerics/test_exact.py` fails if a new version of
XLA rewrites one of them.

Subnormals are the exception: XLA on CPU flushes float32 subnormals to zero, and there is no cheap
way to avoid it.
"""

import enum

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..compat import broadcast_like


def compute_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype to compute in: float64 for float64, float32 for all smaller floats."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def widen(x: jax.Array) -> jax.Array:
    """Returns `x` in `compute_dtype`, after the rounding to its own dtype.

    Without the barrier, XLA would pass on the unrounded value of a 16-bit `x` that is computed in
    the same jit.
    """
    wide = compute_dtype(x.dtype)
    return x if x.dtype == wide else lax.optimization_barrier(x).astype(wide)


def common_dtype(a: DTypeLike, b: DTypeLike) -> jnp.dtype:
    """Returns the dtype to compute in with operands of two float dtypes."""
    return jnp.dtype(jnp.float64 if jnp.float64 in (a, b) else jnp.float32)


def divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """`x / divisor`, a true division; `divisor` broadcasts to the shape of `x`.

    XLA multiplies by the reciprocal of a broadcast or constant divisor. A select that XLA cannot
    resolve hides the divisor. Its other branch is `x`, so that vmap over `x` alone does not leave a
    broadcast either. The barrier applies to one boolean only, because XLA for CPU (jaxlib 0.12)
    keeps barriers until after fusion, and writes their operands to memory.
    """
    never = lax.optimization_barrier(np.zeros((), bool))
    return x / lax.select(never, x, broadcast_like(divisor, x))


def divide_by_steps(k: jax.Array, steps: int) -> jax.Array:
    """`k / steps`, a true division, for integers `k` in `[0, steps]` (or NaN).

    Up to 1023 steps it is computed as `k * high + k * low`, where `high + low` is the reciprocal
    and `high` its first 14 bits. `k * high` is exact, so the sum rounds once, fused or not. The
    error of `low` is less than the distance of any quotient from a tie (tested for all of them).
    """
    if k.dtype != jnp.float32 or steps >= 1024:
        return divide(k, jnp.asarray(np.asarray(steps, k.dtype)))
    high, low = split_reciprocal(steps)
    return k * jnp.asarray(high) + k * jnp.asarray(low)


def split_reciprocal(steps: int) -> tuple[np.float32, np.float32]:
    """Returns `1 / steps` as a float32 of 14 significant bits and the float32 nearest the rest."""
    mantissa, exponent = np.frexp(1 / steps)
    high = np.ldexp(np.floor(np.ldexp(mantissa, 14)), exponent - 14)
    return np.float32(high), np.float32(1 / steps - high)


def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a * b`, rounded before it is used, so that a following sum is not a fused multiply-add.

    The select between product and sum keeps LLVM from contracting them. It only changes the sign of
    a zero. (A select on `isnan` does not always work: for codes times a constant, LLVM proves that
    they are not NaN, and removes it.)
    """
    product = a * b
    return jnp.where(product == 0, jnp.zeros_like(product), product)


def narrow(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds `x` once, to nearest even, to `dtype`.

    Without the barrier, XLA drops the rounding if the caller widens the result again.
    """
    if x.dtype == dtype:
        return x
    return lax.optimization_barrier(x.astype(dtype))


def saturating_sum(
    r: jax.Array, zero_point: jax.Array | None, low: int, high: int, dtype: DTypeLike
) -> jax.Array:
    """Returns `r + zero_point`, exact, saturated to `[low, high]`; NaN gives 0.

    Args:
      r: integers as float32 or float64, of any magnitude, including infinity and NaN.
      zero_point: integer dtype, broadcast to the shape of `r`; `None` means zero.
      low: the smallest code.
      high: the largest code.
      dtype: integer dtype of the result, of up to 32 bits; holds `low` and `high`.
    """
    if not holds_codes(r.dtype, dtype):
        total = _saturating_sum_in_halves(r, zero_point, dtype)
        return jnp.clip(total, jnp.asarray(low, dtype), jnp.asarray(high, dtype))
    r = saturating_float_sum(r, zero_point, low, high)
    if bit_width(dtype) == 32:
        return r.astype(dtype)
    # 1.5 * 2**23 + r holds r in its low bits for |r| < 2**22. It avoids the checks of a conversion.
    shifted = r.astype(jnp.float32) + jnp.float32(1.5 * 2**23)
    codes = lax.bitcast_convert_type(shifted, jnp.int32)
    # XLA on CPU vectorizes the conversion of integers to int8, but not to int4 and int2.
    return (codes.astype(jnp.int8) if bit_width(dtype) < 8 else codes).astype(dtype)


def bit_width(dtype: DTypeLike) -> int:
    """Returns the number of bits of an integer dtype."""
    return int(jnp.iinfo(dtype).bits)


def is_signed(dtype: DTypeLike) -> bool:
    """Whether an integer dtype has negative values."""
    return int(jnp.iinfo(dtype).min) < 0


def holds_codes(dtype: DTypeLike, codes: DTypeLike) -> bool:
    """Whether a float dtype represents every value of an integer dtype, and every difference of two
    values, exactly.
    """
    return bit_width(codes) < 32 or jnp.dtype(dtype) == jnp.float64


def saturating_float_sum(
    r: jax.Array, zero_point: jax.Array | None, low: int, high: int
) -> jax.Array:
    """`saturating_sum` in the dtype of `r`, which must represent the codes; zero is positive."""
    smallest, largest = (jnp.asarray(bound, r.dtype) for bound in (low, high))
    if zero_point is not None:
        # Exact wherever it does not saturate: |r + zero_point| is below 2**24 (2**53) there.
        r = r + _widen(zero_point).astype(r.dtype)
    r = lax.clamp(smallest, r, largest)
    return jnp.where(jnp.abs(r) > 0, r, jnp.zeros_like(r))  # NaN and -0 become +0


def _saturating_sum_in_halves(
    r: jax.Array, zero_point: jax.Array | None, dtype: DTypeLike
) -> jax.Array:
    """`saturating_sum` for float32 and all 32-bit codes: the sum is computed in two 16-bit halves.

    float32 (24 bits) represents neither the sum nor the bound 2**31 - 1, and int64 is not enabled
    in JAX by default.
    """
    info = jnp.iinfo(dtype)
    low, high = int(info.min), int(info.max)
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
    total = lax.bitcast_convert_type(total, jnp.dtype(dtype))
    total = jnp.where(upper > high >> 16, jnp.asarray(high, dtype), total)
    total = jnp.where(upper < low >> 16, jnp.asarray(low, dtype), total)
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
      The rounded difference, in `compute_dtype(dtype)`.
    """
    dtype, wide = jnp.dtype(dtype), compute_dtype(dtype)
    operands = (q,) if zero_point is None else (q, zero_point)
    if all(holds_codes(wide, operand.dtype) for operand in operands):
        q = _widen(q).astype(wide)
        return float_difference(q, zero_point, dtype)
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


def float_difference(codes: jax.Array, zero_point: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """`difference` for codes in `compute_dtype(dtype)`, which must represent them exactly."""
    if zero_point is not None:
        codes = codes - _widen(zero_point).astype(codes.dtype)
    return _round_integers(codes, jnp.dtype(dtype))


def _widen(codes: jax.Array) -> jax.Array:
    return codes.astype(jnp.int32 if is_signed(codes.dtype) else jnp.uint32)


def _round_integers(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds integers to the precision of `dtype`; integers are never subnormal."""
    if dtype == x.dtype:
        return x
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=int(info.nexp), mantissa_bits=int(info.nmant))


# Powers of two, read from and written to the bits of floats: exact, unlike log2 and exp2.


_INTEGER = {"float32": (np.int32, 23, 127), "float64": (np.int64, 52, 1023)}


def exponent_of(x: jax.Array) -> jax.Array:
    """Returns `floor(log2(abs(x)))` as int32, for float32 or float64.

    Zero and subnormals give the smallest exponent of a normal number minus 1; infinity and NaN give
    the largest exponent plus 1.
    """
    integer, mantissa_bits, bias = _INTEGER[x.dtype.name]
    bits = lax.bitcast_convert_type(x, integer)
    field = lax.shift_right_logical(bits << 1, jnp.asarray(mantissa_bits + 1, integer))
    return field.astype(jnp.int32) - bias


def power_of_two(exponent: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns `2**exponent` for int32 exponents of normal numbers of `dtype`."""
    integer, mantissa_bits, bias = _INTEGER[jnp.dtype(dtype).name]
    return lax.bitcast_convert_type((exponent.astype(integer) + bias) << mantissa_bits, dtype)


def power_below(x: jax.Array) -> jax.Array:
    """Returns the largest power of two that is at most `abs(x)`, for float32 or float64. The result
    and its reciprocal are normal numbers. Differentiation treats it as a constant.
    """
    _, _, bias = _INTEGER[x.dtype.name]
    exponent = jnp.clip(exponent_of(lax.stop_gradient(x)), 1 - bias, bias - 1)
    return power_of_two(exponent, x.dtype)


def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns `x * 2**exponent` for int32 exponents in [-252, 254]; exact except for a subnormal
    result.

    It uses two factors: 2**-127 (and so 1 / 2**127) is not a normal float32, and XLA flushes
    subnormal numbers to zero.
    """
    half = exponent >> 1
    return x * power_of_two(half, x.dtype) * power_of_two(exponent - half, x.dtype)


def step_of(
    x: jax.Array, mantissa_bits: int, least: int, largest: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the spacing, at `x`, of floats with `mantissa_bits`, and its reciprocal.

    The exponent of `x` is clamped to `[least, largest]`; below `least`, floats are evenly spaced.
    """
    integer, bits, bias = _INTEGER[x.dtype.name]
    field = lax.bitcast_convert_type(x, integer) & integer(2 * bias + 1 << bits)
    low, high = (integer(exponent + bias << bits) for exponent in (least, largest))
    field = lax.clamp(low, field, high)
    step = field - integer(mantissa_bits << bits)
    twice = integer(2 * bias << bits - 1) * integer(2)  # wraps around; the difference wraps back
    return (
        lax.bitcast_convert_type(step, x.dtype),
        lax.bitcast_convert_type(twice - step, x.dtype),
    )


# The nine round modes of nGraph, each exact for every finite float.


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
