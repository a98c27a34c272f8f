"""Products whose int32 sums are requantized by integer arithmetic, as in TFLite."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...kernels._shared import requantized_product_cpu
from ...numerics import format_of
from ...tensor import QTensor
from .._integers._fixed_point import FixedPointRounding
from .._integers._requantize import Requantization, lined_up, requantized
from .._what._product import Product
from ._formulation import CPU, PLATFORMS, Planner, formulation
from ._kernels_cpu import as_output, by_kernel, codes_of, constant, package_sums, plain_sums
from ._planner import SUMS
from ._scales import HowTo


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
        y = requantized_product_cpu(
            x,
            x_zero,
            w,
            w_zero,
            *(_of_columns(each, len(x)) for each in (multiplier, shift, bias, zero)),
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


def _of_columns(x: jax.Array | None, batch: int) -> Any:
    """Returns a parameter of columns as [B, N or 1]."""
    if x is None:
        return None
    return jnp.broadcast_to(x.astype(jnp.int32).reshape(1, -1), (batch, x.size))


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
