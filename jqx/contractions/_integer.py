"""Exact integer contraction: codes in, `sum (lhs - lhs_zero) * (rhs - rhs_zero)` out, in int32."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import require_that
from ..numerics import bit_width, format_of, is_signed, name_of_qtype
from ..tensor import QTensor
from ._dimensions import Dimensions


def to_signed(codes: jax.Array) -> tuple[jax.Array, int]:
    """Returns codes as int8 (int32 where they need more bits), and what was subtracted from them.

    One common signed type is what every backend multiplies fast; unsigned bytes are shifted by 128,
    which flips their top bit.
    """
    if bit_width(codes.dtype) > 8:
        return codes.astype(jnp.int32), 0
    if is_signed(codes.dtype) or bit_width(codes.dtype) < 8:
        return codes.astype(jnp.int8), 0
    return lax.bitcast_convert_type(codes ^ jnp.uint8(128), jnp.int8), 128


def integer_dot(lhs: QTensor, rhs: QTensor, dimensions: Dimensions) -> jax.Array:
    """Returns the int32 contraction of the codes, each less its zero point, exactly.

    The zero points leave the inner loop: with the sums over the contracted axes,

        sum (l - a)(r - b) = sum l r  -  b sum l  -  a sum r  +  K a b

    Intermediate terms may wrap around in int32; the total does not (checked), so it is exact.
    """
    check_accumulator(lhs, rhs, dimensions.contracted_size(lhs))
    left, left_shift = to_signed(lhs.codes)
    right, right_shift = to_signed(rhs.codes)
    if left.dtype != right.dtype:
        left, right = left.astype(jnp.int32), right.astype(jnp.int32)
    total = lax.dot_general(left, right, dimensions.numbers, preferred_element_type=jnp.int32)
    a = _offset(lhs.zero_point, left_shift, dimensions.lhs_to_output)
    b = _offset(rhs.zero_point, right_shift, dimensions.rhs_to_output)
    if b is not None:
        total = total - b * dimensions.lhs_to_output(_sum(left, dimensions.lhs_contracting))
    if a is not None:
        total = total - a * dimensions.rhs_to_output(_sum(right, dimensions.rhs_contracting))
    if a is not None and b is not None:
        total = total + jnp.int32(dimensions.contracted_size(lhs)) * a * b
    return total


def check_accumulator(lhs: QTensor, rhs: QTensor, contracted: int) -> None:
    """Raises where `contracted` products of extreme codes do not fit an int32 accumulator."""
    limit = (2**31 - 1) // (_largest(lhs) * _largest(rhs))
    require_that(
        contracted <= limit,
        error=ValueError,
        function="dot_general",
        problem="the int32 accumulator can overflow.",
        given=f"{name_of_qtype(lhs.qtype)} x {name_of_qtype(rhs.qtype)} over {contracted} products",
        expected=f"at most {limit} products of these formats",
        mend="split the contracted axis, use narrower formats, or dequantize an operand.",
    )


def _largest(q: QTensor) -> int:
    form = format_of(q.qtype)
    low, high = int(form.low), int(form.high)
    return max(-low, high) if q.zero_point is None else high - low


def _sum(codes: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sum(codes, axis=axes, keepdims=True, dtype=jnp.int32)


def _offset(zero: jax.Array | None, shift: int, to_output) -> jax.Array | None:
    """The zero point of shifted codes, at its place in the output; `None` where it is zero."""
    if zero is None:
        return None if shift == 0 else jnp.int32(-shift)
    return to_output(zero.astype(jnp.int32) - np.int32(shift))
