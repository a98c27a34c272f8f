"""A contraction as the planner sees it: two operands, by their shapes and formats only."""

import dataclasses
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from ..._checks import is_at_least
from ...numerics import Minifloat, format_of
from ...numerics._shared import bit_width, common_dtype
from ...tensor import QTensor
from ...tensor._shared import is_flipped
from .._how._blocks import Block
from .._how._scales import HowTo
from .._integers._bytes import ACCUMULATOR, is_byte, is_integer, largest
from .._integers._products import needs_shape
from ._dimensions import Dimensions

SMALL = 2**14
"""Below this number of elements, the conversion of an operand costs less than avoiding it."""

FEW_ROWS = 8
"""Up to this number of rows, the results of single blocks are smaller than the converted operand,
and on CPUs without matrix units, three digits of the rows cost less than the conversion.
"""

SHARE = 8
"""With this number of elements of a block per row, the results of single blocks are small."""


@dataclasses.dataclass(frozen=True)
class Product:
    """Two operands to contract; the right one is a QTensor.

    Attributes:
      lhs: an array, or a QTensor.
      rhs: a QTensor.
      how: which axes are contracted, and which scales are in blocks.
    """

    lhs: Any
    rhs: QTensor
    how: HowTo

    @property
    def dimensions(self) -> Dimensions:
        """The axes: contracted, batch and free ones."""
        return self.how.dimensions

    @property
    def block(self) -> Block | None:
        """The blocks of a scale that changes along a contracted axis, or `None`."""
        return self.how.block

    @cached_property
    def rows(self) -> Any:
        """How many elements the free axes of the left operand have."""
        return self.dimensions.rows(self.lhs)

    @property
    def has_many_rows(self) -> bool:
        """Whether there are too many rows for the methods for few rows."""
        return is_at_least(self.rows, FEW_ROWS + 1)

    @property
    def is_beside_floats(self) -> bool:
        """Whether the left operand is an array."""
        return not isinstance(self.lhs, QTensor)

    @property
    def are_integers(self) -> bool:
        """Whether both operands are QTensors of integers."""
        return is_integer(self.lhs) and is_integer(self.rhs)

    @property
    def are_bytes(self) -> bool:
        """Whether both operands are QTensors of integers of 8 bits or fewer."""
        return is_byte(self.lhs) and is_byte(self.rhs)

    @property
    def are_float8(self) -> bool:
        """Whether both operands are QTensors of 8-bit floats, without blocks, and large."""
        both = _is_float8(self.lhs) and _is_float8(self.rhs)
        return both and self.block is None and self.is_large

    @property
    def is_large(self) -> bool:
        """Whether a QTensor is so large that avoiding its conversion pays off."""
        tensors = [self.rhs] if self.is_beside_floats else [self.lhs, self.rhs]
        return any(is_at_least(q.size, SMALL) for q in tensors) and self.lhs.size != 0

    @property
    def is_corrected(self) -> bool:
        """Whether sums of an operand are needed for the zero points of the other one."""
        return any(
            q.zero_point is not None or is_flipped(format_of(q.qtype)) for q in (self.lhs, self.rhs)
        )

    @property
    def is_narrow(self) -> bool:
        """Whether it has one row or column, or a left operand that must be transposed."""
        return needs_shape(self.lhs, self.rhs, self.dimensions)

    @property
    def widens(self) -> bool:
        """Whether codes of fewer than 8 bits are widened in the product."""
        return any(bit_width(q.values.dtype) < 8 for q in (self.lhs, self.rhs))

    @property
    def fits_digits(self) -> bool:
        """Whether int32 holds the sums of products of codes with the int8 digits of an array."""
        x, q = self.lhs, self.rhs
        if not is_byte(q) or common_dtype(x.dtype, q.dtype) == jnp.float64:
            return False
        block = self.block
        summed = self.dimensions.contracted_size(x) if block is None else block.size
        return not is_at_least(summed, ACCUMULATOR // (128 * largest(q)) + 1)

    @property
    def has_few_rows_for_blocks(self) -> bool:
        """Whether the results of single blocks along the first axis are small."""
        block, q, dimensions = self.block, self.rhs, self.dimensions
        if block is None:
            return False
        first = dimensions.rhs_contracting == (0,) and not dimensions.rhs_batch
        whole = q.shape[0] % block.size == 0
        return first and whole and not is_at_least(self.rows * SHARE, block.size + 1)


def _is_float8(q: Any) -> bool:
    if not isinstance(q, QTensor):
        return False
    form = format_of(q.qtype)
    return (
        isinstance(form, Minifloat)
        and form.bits == 8
        and jnp.issubdtype(q.values.dtype, jnp.floating)
    )
