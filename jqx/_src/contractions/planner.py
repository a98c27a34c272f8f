"""The planner: the formulations of a product, in the order in which they are tried.

The planner decides by shapes and formats only, so that a traced function is the same on every
platform; if platforms differ, the choice is made when the function is lowered. Each formulation
defines in its own file when it applies; this file only defines the order.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..kernels.products_cpu import requantized_product_cpu
from ..numerics.lookup import format_of
from ..tensor.qtensor import QTensor
from .exact import (
    accumulator,
    accumulator_shaped,
    check_splittable,
    integer,
    integer_blocks,
    integer_digits,
    integer_shaped,
)
from .formulation import CPU, ELSEWHERE, PLATFORMS, Choice, Planner, formulation
from .kernels import float8_groups, float8_groups_in_tiles, kernel, kernel_of_codes
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
from .problem import HowTo, Product
from .requantize import FixedPointRounding, Requantization, lined_up, requantized


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
    *kernel,
    *kernel_of_codes,
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
