"""The planner: the formulations of a product, in the order in which they are tried.

The planner decides by shapes and formats only, so that a traced function is the same on every
platform; if platforms differ, the choice is made when the function is lowered. Each formulation
defines in its own file when it applies; this file only defines the order.
"""

import dataclasses
import math
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..checks import is_at_least
from ..kernels.products_cpu import requantized_product_cpu
from ..numerics.exact import bit_width, common_dtype
from ..numerics.lookup import format_of
from ..numerics.minifloats import Minifloat
from ..tensor.layout import is_flipped
from ..tensor.qtensor import QTensor
from .blocks import Block, HowTo
from .dimensions import Dimensions
from .exact import (
    ACCUMULATOR,
    Operands,
    accumulator,
    accumulator_shaped,
    check_splittable,
    integer,
    integer_blocks,
    integer_digits,
    integer_shaped,
    is_byte,
    largest,
    needs_shape,
)
from .formulation import CPU, ELSEWHERE, PLATFORMS, Choice, Planner, formulation
from .kernels import (
    float8_groups,
    float8_groups_in_tiles,
    kernel_gpu,
    kernel_of_codes_gpu,
    kernel_of_codes_tpu,
    kernel_tpu,
)
from .kernels_cpu import (
    as_output,
    by_kernel,
    codes_of,
    constant,
    package_batches,
    package_codes,
    package_decoded,
    package_floats,
    package_groups,
    package_sums,
    plain_sums,
)
from .plain import (
    block_digits,
    convert,
    convert_row,
    convert_wide,
    dequantize,
    digits,
    float8,
    float8_tiles,
    tiles,
)
from .requantize import FixedPointRounding, Requantization, lined_up, requantized

# A contraction as the planner sees it: two operands, by their shapes and formats only.


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

    @property
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


def _widens_in_a_row(case: Product) -> bool:
    # XLA on GPUs does not compile a product of one row with 4-bit codes that it must widen.
    return case.are_bytes and case.widens and case.is_narrow


PRODUCTS = Planner(
    "dot_general",
    package_codes,
    package_batches,
    package_floats,
    package_groups,
    package_decoded,
    kernel_tpu,
    kernel_gpu,
    kernel_of_codes_tpu,
    kernel_of_codes_gpu,
    float8_groups_in_tiles,
    float8_groups,
    integer_digits,
    integer_blocks,
    integer_shaped,
    dataclasses.replace(integer_shaped, platforms=ELSEWHERE, applies=_widens_in_a_row),
    integer,
    float8_tiles,
    float8,
    convert_wide,
    digits,
    block_digits,
    tiles,
    dequantize,
    convert_row,
    convert,
)

SUMS = Planner(
    "dot_general:int32",
    package_sums,
    accumulator_shaped,
    dataclasses.replace(accumulator_shaped, platforms=ELSEWHERE, applies=_widens_in_a_row),
    accumulator,
)


def plan(case: Product) -> Choice | None:
    """Returns how to contract a right QTensor with an array or another QTensor; `None` for two
    QTensors of which one must be dequantized first.
    """
    if case.are_integers and not case.are_bytes:
        check_splittable("dot_general", case.lhs, case.rhs)
    return PRODUCTS.choose(case)


# Products whose int32 sums are requantized by integer arithmetic, as in TFLite.


class Requantized(NamedTuple):
    """Two operands to contract and the requantization, as the planner sees them.

    Attributes:
      lhs: a QTensor of integers.
      rhs: a QTensor of integers.
      how: which axes are contracted.
      output: the requantization of the sums.
    """

    lhs: QTensor
    rhs: QTensor
    how: HowTo
    output: Requantization


def _is_for_package(case: Requantized) -> bool:
    choice = SUMS.choose(Product(case.lhs, case.rhs, case.how))
    if choice is None or choice.cpu is not package_sums:
        return False
    dimensions = case.how.dimensions
    shape = dimensions.result_shape(case.lhs.shape, case.rhs.shape)
    arrays = [x for x in lined_up(case.output, shape) if x is not None]
    of_columns = all(math.prod(x.shape[:-1]) == 1 for x in arrays)
    return of_columns and format_of(case.output.qtype).storage in (jnp.int8, jnp.uint8)


@formulation(
    "codes times codes of 8 bits if jqx-cpu is installed, requantized for each column: its kernel "
    "writes the codes of the result, not the sums",
    CPU,
    _is_for_package,
    op="dot_general:requantized",
    finds=True,
)
def package_requantized(lhs: QTensor, rhs: QTensor, output: Requantization, how: HowTo) -> Any:
    def kernel(lhs: QTensor, output: Requantization, rhs: QTensor, *stack: jax.Array) -> jax.Array:
        x, x_zero, w, w_zero, step = codes_of(lhs, rhs, how, *stack)
        shape = how.dimensions.result_shape(lhs.shape, rhs.shape)
        assert output.low is not None and output.high is not None  # every Requantization has them
        multiplier, shift, _, zero, bias = lined_up(output, shape)

        def of_columns(parameter: jax.Array | None) -> Any:  # as [B, N or 1]
            if parameter is None:
                return None
            row = parameter.astype(jnp.int32).reshape(1, -1)
            return jnp.broadcast_to(row, (len(x), row.size))

        y = requantized_product_cpu(
            x,
            x_zero,
            w,
            w_zero,
            *map(of_columns, (multiplier, shift, bias, zero)),
            low=output.low,
            high=output.high,
            is_single=output.rounding is FixedPointRounding.SINGLE,
            dtype=format_of(output.qtype).storage,
            step=step,
        )
        return as_output(y, lhs, how)

    def plain(lhs: QTensor, output: Requantization, rhs: QTensor) -> jax.Array:
        return requantized(plain_sums(lhs, rhs, how), output)

    return by_kernel(kernel, plain, *constant(lhs, output, rhs))


@formulation(
    "sums to be requantized: by integers, after the product",
    PLATFORMS,
    lambda case: True,
    op="dot_general:requantized",
    tells_parts=True,
    finds=True,
)
def sums_requantized(lhs: QTensor, rhs: QTensor, output: Requantization, how: HowTo) -> Any:
    return requantized(SUMS.compute(Product(lhs, rhs, how)), output)


REQUANTIZED = Planner("dot_general:requantized", package_requantized, sums_requantized)
