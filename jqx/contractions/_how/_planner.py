"""The planner: the formulations of a product, in the order in which they are tried.

The planner decides by shapes and formats only, so that a traced function is the same on every
platform; if platforms differ, the choice is made when the function is lowered. Each formulation
defines in its own file when it applies; this file only defines the order.
"""

import dataclasses

from .._integers._integer import (
    accumulator,
    accumulator_shaped,
    check_splittable,
    integer,
    integer_blocks,
    integer_digits,
    integer_shaped,
)
from .._what._product import Product
from ._convert import convert, convert_row, convert_wide, dequantize, float8
from ._digits import block_digits, digits
from ._formulation import ELSEWHERE, Choice, Planner
from ._kernels import kernel_gpu, kernel_tpu
from ._kernels_cpu import package_batches, package_codes, package_sums
from ._kernels_cpu_groups import package_decoded, package_floats, package_groups
from ._kernels_of_codes import (
    float8_groups,
    float8_groups_in_tiles,
    kernel_of_codes_gpu,
    kernel_of_codes_tpu,
)
from ._tiles import float8_tiles, tiles


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
