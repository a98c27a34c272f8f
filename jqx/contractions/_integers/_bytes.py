"""Integer codes as int8, the signed type that every backend multiplies fast."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...numerics import Integer, format_of
from ...tensor import QTensor
from ...tensor._shared import Layout, is_flipped, to_int8

ACCUMULATOR = 2**31 - 1
"""The largest sum that an int32 holds."""


def is_integer(x: Any) -> bool:
    """Whether an operand is a QTensor of an integer format."""
    return isinstance(x, QTensor) and isinstance(format_of(x.qtype), Integer)


def is_byte(x: Any) -> bool:
    """Whether an operand is a QTensor of an integer format of 8 bits or fewer."""
    return is_integer(x) and format_of(x.qtype).bits <= 8


def largest(q: QTensor) -> int:
    """Returns the largest magnitude of a code minus its zero point."""
    form = format_of(q.qtype)
    low, high = int(form.low), int(form.high)
    return max(-low, high) if q.zero_point is None else high - low


def longest(lhs: QTensor, rhs: QTensor) -> int:
    """Returns how many products of extreme codes, minus their zero points, an int32 sum holds."""
    return ACCUMULATOR // (largest(lhs) * largest(rhs))


def as_int8(q: QTensor) -> QTensor:
    """Returns the same real values with codes and zero points in int8.

    Codes of uint8 are shifted by -128. Compute limits on sums from the format before this call.
    """
    form, zero = format_of(q.qtype), q.zero_point
    if zero is not None:
        zero = to_int8(zero, form)
    elif is_flipped(form):
        zero = jnp.full((1,) * q.ndim, -128, jnp.int8)
    is_stored = q.layout in (Layout(int8=True), Layout(int8=True, kernel="cpu"))
    values = q.values if is_stored else to_int8(q.codes, form)
    return dataclasses.replace(q, values=values, zero_point=zero, qtype=jnp.int8, layout=None)


def planes(codes: jax.Array) -> list[jax.Array]:
    """Splits int32 numbers into four int8 digits to the base 256, the lowest first.

    The sum of the digits, each times its power of 256, is the number modulo 2**32.
    """
    digits = []
    for _ in range(4):
        digit = codes.astype(jnp.int8)  # the low byte, in [-128, 127]
        digits.append(digit)
        codes = (codes - digit.astype(jnp.int32)) >> 8
    return digits
