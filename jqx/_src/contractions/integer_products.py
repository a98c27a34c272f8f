"""Two operands of integer formats: `sum (lhs - lhs_zero) * (rhs - rhs_zero)`, exact in int32."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export, lax

from ..checks import is_at_least
from ..errors import fail
from ..kernels.onednn import matrix_product
from ..numerics.exact import common_dtype
from ..numerics.lookup import format_of, name_of_qtype
from ..tensor.layout import Layout, is_flipped, to_int8
from ..tensor.qtensor import QTensor
from .blocks import sum_in_turn, sum_of_blocks, with_scales
from .formulation import CPU, ELSEWHERE, PLATFORMS, formulation
from .problem import Dimensions, HowTo, Product, max_products_in_int32, needs_shape, needs_transpose

# Integer codes as int8, the signed type that every backend multiplies fast.


def as_int8(q: QTensor) -> QTensor:
    """Returns the same real values with codes and zero points in int8.

    Codes of uint8 are shifted by -128. Compute limits on sums from the format before this call.
    """
    if q.layout is None and q.qtype == jnp.int8:
        return q
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


# Sums of products of int8 arrays in int32, with the sums of either operand that zero points need.
#
# There are several forms of one function. `plain` is the definition, and the best form for
# compilers for GPUs and TPUs. `shaped` brings operands into the shapes that XLA on CPU passes to
# its int8 library (measured on jaxlib 0.10.2): a left operand contracted along its last axes, two
# or more rows and columns, and no reduction of int8 outside of a product, which is 20 times
# slower than a product.


TALL = 512
"""From this number of rows on, one more row costs less in a separate product, without a copy of the
others.
"""

PARTS = 4
"""Parts of a contracted axis that is the first one, if there are few rows."""


class Products(NamedTuple):
    """Sums over the contracted axes, in int32, lined up with the result.

    Attributes:
      total: the sums of the products.
      left: the sums of the left operand; `None` if not requested.
      right: the sums of the right operand; `None` if not requested.
    """

    total: Any
    left: Any
    right: Any


def plain(
    lhs: jax.Array, rhs: jax.Array, dimensions: Dimensions, *, left: bool, right: bool
) -> Products:
    """Multiplies as written."""
    total = lax.dot_general(lhs, rhs, dimensions.numbers, preferred_element_type=jnp.int32)
    of_left = dimensions.lhs_to_output(_sum(lhs, dimensions.lhs_contracting)) if left else None
    of_right = dimensions.rhs_to_output(_sum(rhs, dimensions.rhs_contracting)) if right else None
    return Products(total, of_left, of_right)


def _sum(codes: jax.Array, axes: Sequence[int]) -> jax.Array:
    return jnp.sum(codes, axis=axes, keepdims=True, dtype=jnp.int32)


def shaped(
    lhs: jax.Array, rhs: jax.Array, dimensions: Dimensions, *, left: bool, right: bool
) -> Products:
    """Multiplies in the shapes that are fast on CPU; the result is that of `plain`."""
    if needs_transpose(dimensions) and not is_at_least(rhs.size, lhs.size):
        swapped = shaped(rhs, lhs, dimensions.swapped, left=right, right=left)
        total, of_right, of_left = (
            None if part is None else dimensions.swap_output(part) for part in swapped
        )
        return Products(total, of_left, of_right)
    rows = to_rows(lhs, dimensions)
    total, of_left, of_right = rows_product(
        rows, rhs, dimensions, left=left, right=right, transposed=needs_transpose(dimensions)
    )
    batch = rows.shape[: len(dimensions.lhs_batch)]
    free = tuple(lhs.shape[axis] for axis in dimensions.lhs_free)
    columns = tuple(rhs.shape[axis] for axis in dimensions.rhs_free)
    return Products(
        total.reshape(batch + free + columns),
        None if of_left is None else of_left.reshape(batch + free + (1,) * len(columns)),
        None if of_right is None else of_right.reshape(batch + (1,) * len(free) + columns),
    )


def by_onednn(
    lhs: jax.Array,
    rhs: jax.Array,
    dimensions: Dimensions,
    *,
    left: bool,
    right: bool,
    dtype: Any = jnp.int32,
) -> Products:
    """Multiplies by oneDNN; the result is that of `plain`, in `dtype` if no other sums are asked
    for.
    """
    d, dtype = dimensions, jnp.int32 if left or right else dtype
    batch = tuple(lhs.shape[axis] for axis in d.lhs_batch)
    free = tuple(lhs.shape[axis] for axis in d.lhs_free)
    columns = tuple(rhs.shape[axis] for axis in d.rhs_free)
    count = d.contracted_size(lhs)
    lead = (math.prod(batch),) * bool(batch)
    rows = to_rows(lhs, d).reshape(*lead, -1, count)
    in_rows = (*d.rhs_batch, *d.rhs_contracting, *d.rhs_free) != tuple(range(d.rhs_rank))
    weight = to_rows(rhs, d.swapped) if in_rows else rhs
    weight = weight.reshape(*lead, *((-1, count) if in_rows else (count, -1)))
    ones = _constant(rows, len(lead), 1, 1)
    multiply = functools.partial(matrix_product, dtype=dtype)
    of_left = multiply(rows, ones, in_rows=True) if left else None
    m, of_right = rows.shape[-2], None
    if right and not is_at_least(m, TALL):  # in one call
        sums = multiply(jnp.concatenate([rows, ones], axis=-2), weight, in_rows=in_rows)
        total, of_right = sums[..., :m, :], sums[..., m:, :]
    else:
        total = multiply(rows, weight, in_rows=in_rows)
        of_right = multiply(ones, weight, in_rows=in_rows) if right else None
    return Products(
        total.reshape(batch + free + columns),
        None if of_left is None else of_left.reshape(batch + free + (1,) * len(columns)),
        None if of_right is None else of_right.reshape(batch + (1,) * len(free) + columns),
    )


def fitting(
    lhs: jax.Array, rhs: jax.Array, dimensions: Dimensions, *, left: bool, right: bool
) -> Products:
    """Multiplies as written if that is fast on CPU, else in other shapes."""
    form = shaped if left or right or needs_shape(lhs, rhs, dimensions) else plain
    return form(lhs, rhs, dimensions, left=left, right=right)


def to_rows(x: jax.Array, dimensions: Dimensions) -> jax.Array:
    """Brings a left operand into the order (*batch, rows, *contracted), free axes merged."""
    order = (*dimensions.lhs_batch, *dimensions.lhs_free, *dimensions.lhs_contracting)
    batch = tuple(x.shape[axis] for axis in dimensions.lhs_batch)
    contracted = tuple(x.shape[axis] for axis in dimensions.lhs_contracting)
    return x.transpose(order).reshape(*batch, dimensions.rows(x), *contracted)


def rows_product(
    rows: jax.Array,
    rhs: jax.Array,
    dimensions: Dimensions,
    *,
    left: bool = False,
    right: bool = False,
    transposed: bool = False,
) -> Products:
    """Multiplies `(*batch, rows, *contracted)` by a right operand without changing its shape.

    Args:
      rows: int8, from `to_rows`.
      rhs: int8, with the axes of `dimensions`.
      dimensions: of the whole contraction; only the numbers of axes of the left operand are used.
      left: whether to sum the rows.
      right: whether to sum the right operand.
      transposed: whether the rows come from a transpose. XLA would undo it and leave the fast path;
        an extra row of zeros makes it a copy.

    Returns:
      Products of shapes (*batch, rows, *columns), with 1 for each of the columns in the sums of the
      left operand and for the rows in those of the right one.
    """
    row_axis = len(dimensions.lhs_batch)
    m = rows.shape[row_axis]
    # With few rows, an extra row of ones gives the sums of the right operand.
    ones_below = right and not is_at_least(m, TALL)
    tall = rows
    if ones_below or m == 1 or transposed:
        tall = jnp.concatenate([rows, _constant(rows, row_axis, 1, int(ones_below))], axis=row_axis)
    y = _multiply(tall, rhs, dimensions)
    of_left = _sums_of_rows(rows, row_axis, dimensions) if left else None
    of_right = None
    if ones_below:
        of_right = _between(y, row_axis, m, m + 1)
    elif right:
        of_ones = _multiply(_constant(rows, row_axis, 2, 1), rhs, dimensions)
        of_right = _between(of_ones, row_axis, 0, 1)
    return Products(_between(y, row_axis, 0, m), of_left, of_right)


def _constant(rows: jax.Array, row_axis: int, count: int, value: int) -> jax.Array:
    """Returns `count` rows in the shape of others, filled with one number."""
    return jnp.full((*rows.shape[:row_axis], count, *rows.shape[row_axis + 1 :]), value, jnp.int8)


def _between(y: jax.Array, axis: int, start: int, stop: int) -> jax.Array:
    return y[(slice(None),) * axis + (slice(start, stop),)]


def _sums_of_rows(rows: jax.Array, row_axis: int, dimensions: Dimensions) -> jax.Array:
    """Returns the sums of rows, of shape (*batch, rows, 1...), as a product with ones.

    XLA on CPU would store the operand of a sum (see `xla_cpu`). The rows are the right operand,
    because sums in a row are later read twice as fast as sums in a column.
    """
    axes, leads = tuple(range(row_axis + 1, rows.ndim)), tuple(range(row_axis))
    numbers = ((axes, axes), (leads, leads))
    unit_rows = _constant(rows, row_axis, 2, 1)
    sums = lax.dot_general(unit_rows, rows, numbers, preferred_element_type=jnp.int32)
    sums = sums[..., 0, :]
    return sums.reshape(*sums.shape, *(1,) * len(dimensions.rhs_free))


def _multiply(rows: jax.Array, rhs: jax.Array, dimensions: Dimensions) -> jax.Array:
    """Returns int32 of shape (*batch, rows, *columns); a single column is padded with zeros."""
    row_axis = len(dimensions.rhs_batch)
    contracting = tuple(range(row_axis + 1, rows.ndim))
    columns = tuple(rhs.shape[axis] for axis in dimensions.rhs_free)
    batch_axes, contracted_axes = dimensions.rhs_batch, dimensions.rhs_contracting
    padded = math.prod(columns) == 1
    if padded:
        rhs = to_rows(rhs, dimensions.swapped)
        zero_column = jnp.zeros((*rhs.shape[:row_axis], 1, *rhs.shape[row_axis + 1 :]), jnp.int8)
        rhs = jnp.concatenate([rhs, zero_column], axis=row_axis)
        batch_axes, contracted_axes = tuple(range(row_axis)), contracting
    is_short = not is_at_least(rows.shape[0], 17)
    if contracted_axes == (0,) and not batch_axes and is_short and rhs.shape[0] % PARTS == 0:
        return _in_parts(rows, rhs)
    numbers = ((contracting, contracted_axes), (tuple(range(row_axis)), batch_axes))
    y = lax.dot_general(rows, rhs, numbers, preferred_element_type=jnp.int32)
    return y[..., :1].reshape(*y.shape[:-1], *columns) if padded else y


def _in_parts(rows: jax.Array, rhs: jax.Array) -> jax.Array:
    """Multiplies parts of the contracted axis as a batch, in half the time of one product."""
    size = rhs.shape[0] // PARTS
    rows = rows.reshape(rows.shape[0], PARTS, size)
    rhs = rhs.reshape(PARTS, size, *rhs.shape[1:])
    numbers = (((2,), (1,)), ((1,), (0,)))
    y = lax.dot_general(rows, rhs, numbers, preferred_element_type=jnp.int32)
    return jnp.sum(y, axis=0, dtype=jnp.int32)


Multiply = Callable[..., Products]


def _is_shaped(case: Product) -> bool:
    """Whether XLA on CPU would not pass a large product to its int8 library as written."""
    is_large_product = case.are_bytes and case.is_large and case.block is None
    return is_large_product and (case.is_corrected or case.is_narrow)


def _widens_in_a_row(case: Product) -> bool:
    """Whether XLA on GPUs does not compile it: one row and 4-bit codes that the product widens."""
    return case.are_bytes and case.widens and case.is_narrow


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
    _is_shaped,
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
    _is_shaped,
    op="dot_general:int32",
)
def accumulator_shaped(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return accumulate(as_int8(lhs), as_int8(rhs), how.dimensions, shaped)


@formulation(
    "integers of more than 8 bits: split into int8 digits, whose products are exact",
    PLATFORMS,
    lambda case: not case.are_bytes,
)
def integer_digits(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    limit = max_products_in_int32(lhs, rhs)

    def compute(lhs: QTensor, rhs: QTensor, dimensions: Dimensions) -> jax.Array:
        exact = not is_at_least(dimensions.contracted_size(lhs), limit + 1)
        dtype = jnp.int32 if exact else _float_of(lhs, rhs)
        total = jnp.zeros((), dtype)
        for i, left in enumerate(digits_of(lhs)):
            for j, right in enumerate(digits_of(rhs)):
                for part in _split_for_int32(
                    left, right, dimensions, max_products_in_int32(left, right)
                ):
                    product = accumulate(*part, dimensions, plain).astype(dtype)
                    total = total + (
                        product << 8 * (i + j) if exact else product * dtype.type(256.0 ** (i + j))
                    )
        return with_scales(total.astype(_float_of(lhs, rhs)), lhs, rhs, dimensions)

    return sum_of_blocks(lhs, rhs, how.dimensions, compute, how.block)


INTEGERS = (
    integer_digits,
    integer_blocks,
    integer_shaped,
    dataclasses.replace(integer_shaped, platforms=ELSEWHERE, applies=_widens_in_a_row),
    integer,
)
"""Products of two operands of integers."""

SUMS_OF_INTEGERS = (
    accumulator_shaped,
    dataclasses.replace(accumulator_shaped, platforms=ELSEWHERE, applies=_widens_in_a_row),
    accumulator,
)
"""Their int32 sums, to be requantized."""


def in_fitting_shapes(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    """Multiplies without blocks in the shapes that are fast on CPU."""
    return _integer(lhs, rhs, how, fitting)


def in_onednn(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    """Multiplies without blocks by oneDNN, which rounds sums to float32 as it writes them."""
    dtype = jnp.float32 if _float_of(lhs, rhs) == jnp.float32 else jnp.int32
    return _integer(lhs, rhs, how, functools.partial(by_onednn, dtype=dtype))


def accumulate(lhs: QTensor, rhs: QTensor, dimensions: Dimensions, multiply: Multiply) -> jax.Array:
    """Returns the int32 contraction of int8 codes minus their zero points.

    The zero points are moved out of the inner loop by sums over the contracted axes:

        sum (l - a)(r - b) = sum l r  -  b (sum l - K a)  -  a sum r

    Intermediate terms may wrap around in int32; the total is right if it fits.
    """
    a, b = lhs.zero_point, rhs.zero_point
    a = None if a is None else dimensions.lhs_to_output(a.astype(jnp.int32))
    b = None if b is None else dimensions.rhs_to_output(b.astype(jnp.int32))
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
    if max(format_of(q.qtype).bits for q in (lhs, rhs)) > 16:
        names = f"{name_of_qtype(lhs.qtype)} x {name_of_qtype(rhs.qtype)}"
        problem = f"codes of 32 bits overflow the int32 accumulator: {names}."
        raise fail(function, problem, fix="quantize to int16 or int8, or dequantize an operand.")


def _integer(
    lhs: QTensor,
    rhs: QTensor,
    how: HowTo,
    multiply: Multiply,
    in_blocks: Callable[..., jax.Array] = sum_of_blocks,
) -> jax.Array:
    limit = max_products_in_int32(lhs, rhs)

    def compute(lhs: QTensor, rhs: QTensor, dimensions: Dimensions) -> jax.Array:
        parts = [
            accumulate(*part, dimensions, multiply).astype(_float_of(lhs, rhs))
            for part in _split_for_int32(lhs, rhs, dimensions, limit)
        ]
        return with_scales(functools.reduce(jnp.add, parts), lhs, rhs, dimensions)

    return in_blocks(as_int8(lhs), as_int8(rhs), how.dimensions, compute, how.block)


def _float_of(lhs: QTensor, rhs: QTensor) -> jnp.dtype:
    return common_dtype(lhs.real_scale().dtype, rhs.real_scale().dtype)


def _split_for_int32(
    lhs: QTensor, rhs: QTensor, dimensions: Dimensions, limit: int
) -> list[tuple[QTensor, QTensor]]:
    """Splits operands where an int32 sum could overflow: into parts of at most `limit` products,
    cut along contracted axes.
    """
    products = dimensions.contracted_size(lhs)
    if not is_at_least(products, limit + 1):
        return [(lhs, rhs)]
    if export.is_symbolic_dim(products):
        raise fail(
            "dot_general",
            "sums of a symbolic length may not fit an int32.",
            given=f"{products} products; {limit:,} fit for {name_of_qtype(lhs.qtype)} by "
            f"{name_of_qtype(rhs.qtype)}",
            fix='bound the size: jax.export.symbolic_shape("t", constraints=["t <= 4096"]).',
        )
    pairs = zip(dimensions.lhs_contracting, dimensions.rhs_contracting, strict=True)
    i, j = max(pairs, key=lambda pair: lhs.shape[pair[0]])
    n = lhs.shape[i]
    size = max(1, n * limit // products)
    parts = []
    for start in range(0, n, size):
        cut = (slice(start, start + size),)
        left, right = lhs[(slice(None),) * i + cut], rhs[(slice(None),) * j + cut]
        parts += _split_for_int32(left, right, dimensions, limit)
    return parts


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
