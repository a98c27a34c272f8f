"""Integer codes as int8: one common signed type is what every backend multiplies fast."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..numerics import Integer, bit_width, format_of, is_signed
from ..tensor import QTensor

ACCUMULATOR = 2**31 - 1
"""The largest sum that an int32 holds."""


def is_integer(x: Any) -> bool:
    """Whether an operand is a QTensor of an integer format."""
    return isinstance(x, QTensor) and isinstance(format_of(x.qtype), Integer)


def is_byte(x: Any) -> bool:
    """Whether an operand is a QTensor of an integer format of 8 bits or fewer."""
    return is_integer(x) and format_of(x.qtype).bits <= 8


def largest(q: QTensor) -> int:
    """Returns the largest magnitude of a code less its zero point."""
    form = format_of(q.qtype)
    low, high = int(form.low), int(form.high)
    return max(-low, high) if q.zero_point is None else high - low


def longest(lhs: QTensor, rhs: QTensor) -> int:
    """Returns how many products of extreme codes, each less its zero point, an int32 holds."""
    return ACCUMULATOR // (largest(lhs) * largest(rhs))


def as_int8(q: QTensor) -> QTensor:
    """Returns the same real values with codes and zero points in int8.

    Unsigned bytes are shifted by 128, which flips their top bit. Every format of 8 bits or fewer
    has an int8 form; limits on sums must be taken from the format before.
    """
    codes, zero = q.codes, q.zero_point
    if is_signed(codes.dtype) or bit_width(codes.dtype) < 8 or format_of(q.qtype).bits < 8:
        codes = codes.astype(jnp.int8)
        zero = None if zero is None else zero.astype(jnp.int8)
    else:
        codes = _shifted(codes)
        zero = jnp.full((1,) * q.ndim, -128, jnp.int8) if zero is None else _shifted(zero)
    return dataclasses.replace(q, values=codes, zero_point=zero, qtype=jnp.int8, layout=None)


def _shifted(codes: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(codes ^ jnp.uint8(128), jnp.int8)


def planes(codes: jax.Array) -> list[jax.Array]:
    """Splits int32 numbers into int8 digits to the base 256, the lowest first.

    Four digits: their sum, each times its power of 256, is the number modulo 2**32.
    """
    digits = []
    for _ in range(4):
        digit = codes.astype(jnp.int8)  # the low byte, in [-128, 127]
        digits.append(digit)
        codes = (codes - digit.astype(jnp.int32)) >> 8
    return digits
