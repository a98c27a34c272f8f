"""The planner: from operands and dimensions to the formulation, for CPU and for other platforms.

Decided by shapes and formats alone, so that a traced function is the same on every platform; where
CPU and the others differ, the choice between the two is made when the function is lowered.
"""

from typing import Any

import jax.numpy as jnp

from .._checks import is_at_least
from ..numerics import Minifloat, format_of
from ..numerics._shared import bit_width, common_dtype
from ..tensor import QTensor
from ..tensor._shared import is_flipped
from ._blocks import find_block
from ._bytes import ACCUMULATOR, is_byte, is_integer, largest
from ._convert import FEW_ROWS, convert, convert_row, convert_wide, dequantize, float8
from ._digits import block_digits, digits
from ._dimensions import Dimensions
from ._formulation import Choice, Formulation
from ._integer import (
    accumulator,
    accumulator_shaped,
    check_splittable,
    integer,
    integer_blocks,
    integer_digits,
    integer_shaped,
)
from ._products import needs_shape
from ._tiles import float8_tiles, tiles

SMALL = 2**14
"""Elements of an operand below which its conversion costs less than avoiding it."""

SHARE = 8
"""Elements of a block for each row, from which the results of single blocks are small beside it."""


def plan(lhs: Any, rhs: QTensor, dimensions: Dimensions) -> Choice | None:
    """Returns how to contract a right QTensor with an array or another QTensor; `None` for two
    QTensors of which one must become an array first.
    """
    if not isinstance(lhs, QTensor):
        return _beside_floats(lhs, rhs, dimensions)
    if is_integer(lhs) and is_integer(rhs):
        return _integers(lhs, rhs, dimensions)
    if _is_float8(lhs) and _is_float8(rhs) and find_block(lhs, rhs, dimensions) is None:
        if _is_large(lhs, rhs):
            return Choice(float8_tiles, float8)
    return None


def _integers(lhs: QTensor, rhs: QTensor, dimensions: Dimensions) -> Choice:
    if not (is_byte(lhs) and is_byte(rhs)):
        check_splittable("dot_general", lhs, rhs)
        return Choice(integer_digits, integer_digits)
    corrected = any(q.zero_point is not None or is_flipped(format_of(q.qtype)) for q in (lhs, rhs))
    narrow = needs_shape(lhs, rhs, dimensions)
    large = _is_large(lhs, rhs)
    # Of one row, XLA on GPUs does not compile a product of 4-bit codes that are widened in it.
    widened = any(bit_width(q.values.dtype) < 8 for q in (lhs, rhs))
    on_cpu = integer
    if large and find_block(lhs, rhs, dimensions) is not None:
        on_cpu = integer_blocks
    elif large and (corrected or narrow):
        on_cpu = integer_shaped
    return Choice(on_cpu, integer_shaped if widened and narrow else integer)


def plan_accumulator(lhs: QTensor, rhs: QTensor, dimensions: Dimensions) -> Choice:
    """Returns how to sum the products of two QTensors of bytes without their scales."""
    choice = _integers(lhs, rhs, dimensions)
    return Choice(
        *(accumulator_shaped if form == integer_shaped else accumulator for form in choice)
    )


def _beside_floats(x: Any, q: QTensor, dimensions: Dimensions) -> Choice:
    block = find_block(x, q, dimensions)
    rows = dimensions.rows(x)
    many = is_at_least(rows, FEW_ROWS + 1)
    elsewhere = convert
    if block is not None and many:
        elsewhere = dequantize
    elif block is not None and rows == 1 and dimensions.lhs_free:
        elsewhere = convert_row
    if not _is_large(q) or x.size == 0:
        return Choice(convert_wide, convert)
    return Choice(_on_cpu(x, q, dimensions, block, rows), elsewhere)


def _on_cpu(x: Any, q: QTensor, dimensions: Dimensions, block: Any, rows: int) -> Formulation:
    if not is_byte(q) or common_dtype(x.dtype, q.dtype) == jnp.float64:
        return tiles
    summed = dimensions.contracted_size(x) if block is None else block.size
    if summed > ACCUMULATOR // (128 * largest(q)):
        return tiles
    if block is None:
        return tiles if is_at_least(rows, FEW_ROWS + 1) else digits
    first = dimensions.rhs_contracting == (0,) and not dimensions.rhs_batch
    whole = q.shape[0] % block.size == 0
    few = not is_at_least(rows * SHARE, block.size + 1)
    return block_digits if first and whole and few else tiles


def _is_large(*operands: Any) -> bool:
    return any(is_at_least(x.size, SMALL) for x in operands)


def _is_float8(q: QTensor) -> bool:
    form = format_of(q.qtype)
    return (
        isinstance(form, Minifloat)
        and form.bits == 8
        and jnp.issubdtype(q.values.dtype, jnp.floating)
    )
