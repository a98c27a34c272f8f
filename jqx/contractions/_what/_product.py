"""A contraction as planning sees it: two operands, by their shapes and formats alone."""

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
"""Elements of an operand below which its conversion costs less than avoiding it."""

FEW_ROWS = 8
"""Up to here the results of single blocks weigh less than the converted operand would, and three
digits of the rows cost CPUs without matrix units less than the conversion.
"""

SHARE = 8
"""Elements of a block for each row, from which the results of single blocks are small beside it."""


@dataclasses.dataclass(frozen=True)
class Product:
    """Two operands to contract, of which the right one is a QTensor.

    Attributes:
      lhs: an array, or a QTensor.
      rhs: a QTensor.
      how: which axes are contracted, and where scales are in blocks.
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
        """Where a scale changes along a contracted axis."""
        return self.how.block

    @cached_property
    def rows(self) -> Any:
        """How many elements the free axes of the left operand have."""
        return self.dimensions.rows(self.lhs)

    @property
    def has_many_rows(self) -> bool:
        """Whether rows are too many for what is done for each of a few."""
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
        """Whether both operands are QTensors of 8-bit floats, without blocks, of some size."""
        both = _is_float8(self.lhs) and _is_float8(self.rhs)
        return both and self.block is None and self.is_large

    @property
    def is_large(self) -> bool:
        """Whether a QTensor is worth the care that its conversion takes."""
        tensors = [self.rhs] if self.is_beside_floats else [self.lhs, self.rhs]
        return any(is_at_least(q.size, SMALL) for q in tensors) and self.lhs.size != 0

    @property
    def is_corrected(self) -> bool:
        """Whether sums of an operand are needed, for zero points of the other."""
        return any(
            q.zero_point is not None or is_flipped(format_of(q.qtype)) for q in (self.lhs, self.rhs)
        )

    @property
    def is_narrow(self) -> bool:
        """Whether it has one row or column, or a left operand that is not in order."""
        return needs_shape(self.lhs, self.rhs, self.dimensions)

    @property
    def widens(self) -> bool:
        """Whether codes of fewer than 8 bits are widened in the product."""
        return any(bit_width(q.values.dtype) < 8 for q in (self.lhs, self.rhs))

    @property
    def fits_digits(self) -> bool:
        """Whether int32 holds the sums of an array's int8 digits with the codes beside it."""
        x, q = self.lhs, self.rhs
        if not is_byte(q) or common_dtype(x.dtype, q.dtype) == jnp.float64:
            return False
        block = self.block
        summed = self.dimensions.contracted_size(x) if block is None else block.size
        return summed <= ACCUMULATOR // (128 * largest(q))

    @property
    def has_few_rows_for_blocks(self) -> bool:
        """Whether the results of single blocks, of an axis that is the first, are small."""
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
