"""Two operands of integer formats: `sum (lhs - lhs_zero) * (rhs - rhs_zero)`, exact in int32."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from ..._checks import is_at_least
from ..._errors import fail
from ...numerics import format_of
from ...numerics._shared import common_dtype, name_of_qtype
from ...tensor import QTensor
from .._how._blocks import sum_in_turn, sum_of_blocks
from .._how._formulation import CPU, PLATFORMS, formulation
from .._how._scales import HowTo, with_scales
from .._what._dimensions import Dimensions
from ._bytes import as_int8, longest, planes
from ._products import Products, fitting, plain, shaped

Multiply = Callable[..., Products]


@formulation(
    "integers: multiplied as int8 into int32, exactly; zero points and scales come after",
    PLATFORMS,
    lambda case: case.are_bytes,
)
def integer(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return _integer(lhs, rhs, how, plain)


@formulation(
    "integers with one row or column, zero points, or a contracted axis that is not last: on CPU "
    "(on other platforms for one row and codes of 4 bits) a row is added, which keeps the product "
    "on the int8 library and sums columns for zero points",
    CPU,
    lambda case: _is_shaped(case),
)
def integer_shaped(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return _integer(lhs, rhs, how, shaped)


@formulation(
    "integers with scales in blocks: on CPU, where products of a batch leave the int8 library, one "
    "block after another",
    CPU,
    lambda case: case.are_bytes and case.is_large and case.block is not None,
)
def integer_blocks(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return _integer(lhs, rhs, how, fitting, sum_in_turn)


@formulation(
    "integers whose sums are requantized by integers: int8 into int32, zero points corrected",
    PLATFORMS,
    lambda case: case.are_bytes,
    op="dot_general:int32",
)
def accumulator(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return accumulate(as_int8(lhs), as_int8(rhs), how.dimensions, plain)


@formulation(
    "sums to be requantized, where `integer_shaped` is the form of the product",
    CPU,
    lambda case: _is_shaped(case),
    op="dot_general:int32",
)
def accumulator_shaped(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return accumulate(as_int8(lhs), as_int8(rhs), how.dimensions, shaped)


@formulation(
    "integers of more than 8 bits: split into int8 digits, whose products are exact",
    PLATFORMS,
    lambda case: case.are_integers and not case.are_bytes,
)
def integer_digits(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    limit = longest(lhs, rhs)

    def compute(lhs: QTensor, rhs: QTensor, dimensions: Dimensions) -> jax.Array:
        exact = not is_at_least(dimensions.contracted_size(lhs), limit + 1)
        dtype = jnp.int32 if exact else _float_of(lhs, rhs)
        total = jnp.zeros((), dtype)
        for i, left in enumerate(digits_of(lhs)):
            for j, right in enumerate(digits_of(rhs)):
                for part in _runs(left, right, dimensions, longest(left, right)):
                    product = accumulate(*part, dimensions, plain).astype(dtype)
                    total = total + (
                        product << 8 * (i + j) if exact else product * dtype.type(256.0 ** (i + j))
                    )
        return with_scales(total.astype(_float_of(lhs, rhs)), lhs, rhs, dimensions)

    return sum_of_blocks(lhs, rhs, how.dimensions, compute, how.block)


def in_fitting_shapes(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    """Multiplies without blocks in the shapes that are fast on CPU."""
    return _integer(lhs, rhs, how, fitting)


def _is_shaped(case: Any) -> bool:
    """Whether XLA on CPU would not pass a large product to its int8 library as written."""
    whole = case.are_bytes and case.is_large and case.block is None
    return whole and (case.is_corrected or case.is_narrow)


def accumulate(lhs: QTensor, rhs: QTensor, dimensions: Dimensions, multiply: Multiply) -> jax.Array:
    """Returns the int32 contraction of int8 codes minus their zero points.

    The zero points are moved out of the inner loop by sums over the contracted axes:

        sum (l - a)(r - b) = sum l r  -  b (sum l - K a)  -  a sum r

    Intermediate terms may wrap around in int32; the total is right if it fits.
    """
    a, b = _zero(lhs, dimensions.lhs_to_output), _zero(rhs, dimensions.rhs_to_output)
    total, left, right = multiply(
        lhs.values, rhs.values, dimensions, left=b is not None, right=a is not None
    )
    if a is not None and b is not None:
        left = left - jnp.int32(dimensions.contracted_size(lhs)) * a
    if b is not None:
        total = total - b * left
    if a is not None:
        total = total - a * right
    return total


def check_splittable(function: str, lhs: QTensor, rhs: QTensor) -> None:
    """Raises if codes are too wide even for a split into digits."""
    for q in (lhs, rhs):
        if not format_of(q.qtype).bits <= 16:
            raise fail(
                function,
                "codes of 32 bits overflow the int32 accumulator.",
                given=f"{name_of_qtype(lhs.qtype)} x {name_of_qtype(rhs.qtype)}",
                expected="integer formats of 16 bits or fewer",
                fix="quantize to int16 or int8, or dequantize an operand.",
            )


def _integer(
    lhs: QTensor,
    rhs: QTensor,
    how: HowTo,
    multiply: Multiply,
    in_blocks: Callable[..., jax.Array] = sum_of_blocks,
) -> jax.Array:
    limit = longest(lhs, rhs)

    def compute(lhs: QTensor, rhs: QTensor, dimensions: Dimensions) -> jax.Array:
        parts = [
            accumulate(*part, dimensions, multiply).astype(_float_of(lhs, rhs))
            for part in _runs(lhs, rhs, dimensions, limit)
        ]
        return with_scales(functools.reduce(jnp.add, parts), lhs, rhs, dimensions)

    return in_blocks(as_int8(lhs), as_int8(rhs), how.dimensions, compute, how.block)


def _float_of(lhs: QTensor, rhs: QTensor) -> jnp.dtype:
    return common_dtype(lhs.real_scale().dtype, rhs.real_scale().dtype)


def _runs(
    lhs: QTensor, rhs: QTensor, dimensions: Dimensions, limit: int
) -> Iterator[tuple[QTensor, QTensor]]:
    """Yields operands with at most `limit` products per sum, cut along contracted axes."""
    products = dimensions.contracted_size(lhs)
    if not is_at_least(products, limit + 1):
        yield lhs, rhs
        return
    if export.is_symbolic_dim(products):
        raise fail(
            "dot_general",
            "sums of a symbolic length may not fit an int32.",
            given=f"sums of {products} products of {name_of_qtype(lhs.qtype)} by "
            f"{name_of_qtype(rhs.qtype)}",
            expected=f"a length known to be {limit:,} at most",
            fix='bound the size: jax.export.symbolic_shape("t", constraints=["t <= 4096"]).',
        )
    pairs = zip(dimensions.lhs_contracting, dimensions.rhs_contracting, strict=True)
    i, j = max(pairs, key=lambda pair: lhs.shape[pair[0]])
    n = lhs.shape[i]
    size = max(1, n * limit // products)
    for start in range(0, n, size):
        yield from _runs(_cut(lhs, i, start, size), _cut(rhs, j, start, size), dimensions, limit)


def _cut(q: QTensor, axis: int, start: int, size: int) -> QTensor:
    return q[(slice(None),) * axis + (slice(start, start + size),)]


def digits_of(q: QTensor) -> list[QTensor]:
    """Returns codes minus their zero points as int8 tensors, the digits to the base 256."""
    form = format_of(q.qtype)
    low, high = int(form.low), int(form.high)
    differences = q.codes.astype(jnp.int32)
    if q.zero_point is not None:
        groups = q.groups
        zero = groups.split_scale(q.zero_point.astype(jnp.int32))
        differences = groups.join(groups.split(differences) - zero)
        low, high = low - high, high - low
    count = 1
    while not -128 * (256**count - 1) <= 255 * low <= 255 * high <= 127 * (256**count - 1):
        count += 1
    return [
        dataclasses.replace(q, values=digit, zero_point=None, qtype=jnp.int8, layout=None)
        for digit in planes(differences)[:count]
    ]


def _zero(q: QTensor, to_output: Callable[[jax.Array], jax.Array]) -> jax.Array | None:
    return None if q.zero_point is None else to_output(q.zero_point.astype(jnp.int32))
