"""A product as jqx sees it: two operands, which axes are contracted, which scales are in blocks.

    y[b, m, n] = sum_g s[b, m, g] t[b, g, n] sum_{k in g} (x[b, m, k] - z[b, m, g])
                                                          (w[b, k, n] - u[b, g, n])

Rows `x` have scales `s` and zero points `z`, columns `w` have `t` and `u`. An array has the scale 1
and no zero point; `g` are the blocks of contracted elements in which no scale changes, often a
single one. Every formulation computes this, with the inner sum exact if both operands are integers.

What computes a product is chosen from shapes, formats and layouts, never from values. An operand is
an array, a QTensor, or an array that is still to be quantized (`Pending`).
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..checks import is_at_least
from ..numerics.blocks import Block as BlockFormat
from ..numerics.exact import RoundMode, bit_width, common_dtype
from ..numerics.lookup import format_of
from ..numerics.minifloats import Minifloat
from ..numerics.qtype import Integer
from ..numerics.runtimes import ngraph
from ..statistics.calibrators import Affine
from ..statistics.granularity import Groups
from ..tensor.grid import fit
from ..tensor.layout import is_flipped
from ..tensor.qtensor import QTensor
from ..tensor.spec import QSpec
from ..tensor.targets import kernel_of
from .dimensions import Dimensions

# Operands: arrays, QTensors, and arrays that are still to be quantized.


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


FEW_PENDING = 64
"""Up to this number of rows, a kernel quantizes them, on a GPU again for each tile of columns. More
rows are quantized first. On CPU, sites that read the same array then share its codes, which matters
more than the cost of a separate call when there are many rows.
"""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("x", "scale"), meta_fields=("spec",)
)
@dataclasses.dataclass(frozen=True)
class Pending:
    """An array that is quantized by the contraction that reads it: a kernel may do both at once.

    Attributes:
      x: the array.
      scale: its scale, the same on every platform.
      spec: how it is quantized, symmetric and with an absolute granularity.
    """

    x: jax.Array
    scale: jax.Array
    spec: QSpec

    @classmethod
    def of(cls, x: jax.Array, spec: QSpec, affine: Affine | None) -> "Pending":
        """Returns an array to be quantized with a scale, which the calibrator finds if it is not
        given.
        """
        return cls(x, fit(x, spec).scale if affine is None else affine[0], spec)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.x.shape

    @property
    def ndim(self) -> int:
        """The rank of the array."""
        return self.x.ndim

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.x.dtype

    def quantized(self) -> QTensor:
        """Returns the array as a QTensor."""
        return QTensor.quantize(self.x, self.spec, Affine(self.scale))

    @cached_property
    def codes(self) -> QTensor:
        """The quantized array, as shapes and dtypes only."""
        return jax.eval_shape(Pending.quantized, self)

    def suits(self, target: str, rows: Any) -> bool:
        """Whether the kernels for a target compute exactly these codes, and quantize so many rows:
        those for TPUs quantize any number.
        """
        spec = self.spec
        few = target == "tpu" or rows <= FEW_PENDING
        return few and spec.numerics == ngraph and spec.rounding is RoundMode.NEAREST_TOWARD_EVEN


def may_wait(spec: QSpec, weight: Any) -> bool:
    """Whether kernels exist that quantize an array by a spec and multiply it by such a weight."""
    is_block = isinstance(format_of(spec.qtype), BlockFormat)
    return bool(kernel_of(weight)) and spec.symmetric and not is_block


def settled(x: Any) -> Any:
    """Returns an array that is still to be quantized as a QTensor; anything else unchanged."""
    return x.quantized() if isinstance(x, Pending) else x


# Scales in blocks along a contracted axis, and the static arguments of a product.


class Block(NamedTuple):
    """A contracted pair of axes whose scales are in blocks.

    Attributes:
      lhs: the axis of the left operand.
      rhs: the axis of the right operand.
      size: elements of a block in which no scale changes.
      dimensions: the dimensions of the whole contraction.
    """

    lhs: int
    rhs: int
    size: int
    dimensions: Dimensions


def find_block(lhs: Any, rhs: Any, dimensions: Dimensions) -> Block | None:
    """Returns the first contracted pair of axes along which a scale changes."""
    pairs = zip(dimensions.lhs_contracting, dimensions.rhs_contracting, strict=True)
    for i, j in pairs:
        n = lhs.shape[i]
        if n != rhs.shape[j]:
            continue  # the contraction itself raises
        size = math.gcd(
            *(block_size(x, axis) for x, axis in ((lhs, i), (rhs, j)) if block_size(x, axis) < n)
        )
        if size:
            return Block(i, j, size, dimensions)
    return None


def block_size(x: Any, axis: int) -> int:
    """Returns how many neighbours along an axis share a scale; all of an array do."""
    return x.groups.sizes[axis] if isinstance(x, QTensor) else x.shape[axis]


def can_leave_sum(groups: Groups, contracted: Iterable[int]) -> bool:
    """Whether elements that are summed share scales, instead of each having its own."""
    axes = tuple(contracted)
    shared = math.prod(groups.sizes[axis] for axis in axes)
    summed = math.prod(groups.shape[axis] for axis in axes)
    return is_at_least(shared, 2) or not is_at_least(summed, 2)


def shares_scale(q: QTensor, axes: Iterable[int]) -> bool:
    """Whether the elements along the axes share one scale."""
    return all(q.scale.shape[axis] == 1 for axis in axes)


class HowTo(NamedTuple):
    """The static arguments of a contraction.

    Attributes:
      dimensions: which axes are contracted.
      precision: of float products.
      block: the blocks of a scale that changes along a contracted axis; `None` if scales can leave
        the sum.
      dtype: the dtype to which a kernel may round the result; `None` leaves it to the caller.
    """

    dimensions: Dimensions
    precision: lax.PrecisionLike = None
    block: Block | None = None
    dtype: Any = None

    @classmethod
    def of(
        cls, lhs: Any, rhs: Any, dimensions: Dimensions, precision: lax.PrecisionLike = None
    ) -> "HowTo":
        """Returns the static arguments of the contraction of two operands."""
        return cls(dimensions, precision, find_block(lhs, rhs, dimensions))


def needs_transpose(dimensions: Dimensions) -> bool:
    """Whether the left operand is not in the order: batch axes, free axes, contracted axes."""
    order = (*dimensions.lhs_batch, *dimensions.lhs_free, *dimensions.lhs_contracting)
    return order != tuple(range(dimensions.lhs_rank))


def needs_shape(lhs: Any, rhs: Any, dimensions: Dimensions) -> bool:
    """Whether a product leaves the fast path of XLA on CPU as written."""
    narrow = dimensions.rows(lhs) == 1 or dimensions.columns(rhs) == 1
    return narrow or needs_transpose(dimensions)


# The product of an operand with a QTensor, and what the choice of a formulation depends on.


@dataclasses.dataclass(frozen=True)
class Operands:
    """Two operands of a contraction, as the planner sees them: arrays or QTensors."""

    lhs: Any
    rhs: Any

    @property
    def are_integers(self) -> bool:
        """Whether both operands are QTensors of integers."""
        return is_integer(self.lhs) and is_integer(self.rhs)

    @property
    def are_bytes(self) -> bool:
        """Whether both operands are QTensors of integers of 8 bits or fewer."""
        return is_byte(self.lhs) and is_byte(self.rhs)


SMALL = 2**14
"""Below this number of elements, the conversion of an operand costs less than avoiding it."""

FEW_ROWS = 8
"""Up to this number of rows, the results of single blocks are smaller than the converted operand,
and on CPUs without matrix units, three digits of the rows cost less than the conversion.
"""

SHARE = 8
"""With this number of elements of a block per row, the results of single blocks are small."""


@dataclasses.dataclass(frozen=True)
class Product(Operands):
    """Two operands to contract; the right one is a QTensor.

    Attributes:
      lhs: an array, or a QTensor.
      rhs: a QTensor.
      how: which axes are contracted, and which scales are in blocks.
    """

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

    @cached_property
    def has_many_rows(self) -> bool:
        """Whether there are too many rows for the methods for few rows."""
        return is_at_least(self.rows, FEW_ROWS + 1)

    @property
    def is_beside_floats(self) -> bool:
        """Whether the left operand is an array."""
        return not isinstance(self.lhs, QTensor)

    @property
    def are_float8(self) -> bool:
        """Whether both operands are QTensors of 8-bit floats, without blocks, and large."""
        are_codes = _is_float8(self.lhs) and _is_float8(self.rhs)
        return are_codes and self.block is None and self.is_large

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
        is_first_axis = dimensions.rhs_contracting == (0,) and not dimensions.rhs_batch
        has_no_tail = q.shape[0] % block.size == 0
        return is_first_axis and has_no_tail and not is_at_least(self.rows * SHARE, block.size + 1)


def _is_float8(q: Any) -> bool:
    if not isinstance(q, QTensor):
        return False
    form = format_of(q.qtype)
    return (
        isinstance(form, Minifloat)
        and form.bits == 8
        and jnp.issubdtype(q.values.dtype, jnp.floating)
    )
