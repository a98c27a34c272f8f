"""Products of floats and codes in floating point, in the form that GPU and TPU compilers fuse.

The codes are converted inside the product, and the scales are applied after it (one fused kernel).
A product of a bfloat16 operand with an int8 operand would be computed in float32.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax

from ..checks import is_at_least
from ..numerics.blocks import Block
from ..numerics.exact import common_dtype, divide, power_below
from ..numerics.lookup import format_of
from ..numerics.minifloats import Minifloat
from ..numerics.qtype import Integer
from ..ops.affine import affine_dequantize
from ..tensor.qtensor import QTensor
from .blocks import in_slices, sum_of_blocks, with_own_scales, with_scales
from .formulation import CPU, ELSEWHERE, formulation
from .integer_products import as_int8, rows_product, to_rows
from .problem import Dimensions, HowTo, needs_shape


@formulation(
    "a float operand: the codes are converted inside the product; scales come after",
    ELSEWHERE,
    lambda case: True,
)
def convert(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    def compute(x: jax.Array, q: QTensor, dimensions: Dimensions) -> jax.Array:
        return with_scales(float_product(x, q, dimensions, how.precision), x, q, dimensions)

    return sum_of_blocks(x, q.unpack(), how.dimensions, compute, how.block)


@formulation(
    "one row of floats and scales in blocks, on GPUs and TPUs: a row of zeros is added, because "
    "for a single row XLA would copy the weight to memory in float32",
    ELSEWHERE,
    lambda case: (
        case.is_large
        and case.block is not None
        and case.rows == 1
        and bool(case.dimensions.lhs_free)
    ),
)
def convert_row(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    dimensions = how.dimensions
    below = dimensions.lhs_free[0]
    y = convert.compute(jnp.concatenate([x, jnp.zeros_like(x)], axis=below), q, how)
    return lax.slice_in_dim(y, 0, 1, axis=len(dimensions.lhs_batch))


@formulation(
    "floats and a small operand on CPU, which does not multiply 16-bit floats in every layout: "
    "both are converted to float32, and codes are multiplied by the power of two of their scale",
    CPU,
    lambda case: not case.is_large,
)
def convert_wide(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    wide = common_dtype(x.dtype, q.dtype)

    def compute(x: jax.Array, q: QTensor, dimensions: Dimensions) -> jax.Array:
        numbers = numbers_of(q, wide)
        if q.zero_point is not None:
            numbers = numbers - q.zero_point.astype(wide)
        power, remainder = split_power(q.real_scale().astype(wide))
        y = _dot(x, numbers * power, dimensions, how.precision, wide)
        return y * dimensions.rhs_to_output(remainder)

    return sum_of_blocks(x.astype(wide), q.unpack(), how.dimensions, compute, how.block)


def _dequantize(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    wide = common_dtype(x.dtype, q.dtype)
    return _dot(x, real_of(q, wide).astype(x.dtype), how.dimensions, how.precision, wide)


@formulation(
    "a float operand with many rows, and scales in blocks: the codes are scaled in float32 and "
    "rounded to the dtype of the operand, once for all rows",
    ELSEWHERE,
    lambda case: case.is_large and case.block is not None and case.has_many_rows,
    linear=_dequantize,
    rounds=False,
)
def dequantize(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    wide, axes = common_dtype(x.dtype, q.dtype), how.dimensions.rhs_contracting
    real = q.astype(wide).dequantize()
    if x.dtype != jnp.float16:
        return _dot(x, real.astype(x.dtype), how.dimensions, how.precision, wide)
    # Scaled into the range of float16: each column that float32 sums has values of about 1.
    largest = jnp.max(jnp.abs(lax.stop_gradient(real)), axis=axes, keepdims=True, initial=0)
    power = power_below(largest)
    y = _dot(x, (real / power).astype(x.dtype), how.dimensions, how.precision, wide)
    return y * how.dimensions.rhs_to_output(power)


@formulation(
    "two operands of 8-bit floats: multiplied as they are; scales come after",
    ELSEWHERE,
    lambda case: True,
)
def float8(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    wide = common_dtype(lhs.dtype, rhs.dtype)
    y = _dot(lhs.values, rhs.values, how.dimensions, how.precision, wide)
    return with_scales(y, lhs, rhs, how.dimensions)


def split_power(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits a scale into a power of two and the rest. The power multiplies the codes, which stay
    exact, so that sums are about as large as results. The rest is applied after the sum.
    """
    power = power_below(scale)
    return power, scale / power


def float_product(
    x: jax.Array, q: QTensor, dimensions: Dimensions, precision: lax.PrecisionLike
) -> jax.Array:
    """Contracts a float array with the numbers of codes minus zero points, without the scale.

    A zero point is corrected after the product, as a multiple of the sums of the array.
    """
    wide = common_dtype(x.dtype, q.dtype)
    numbers = numbers_of(q, x.dtype if is_exact_in(q, x.dtype) else wide)
    x = x.astype(numbers.dtype)
    y = _dot(x, numbers, dimensions, precision, wide)
    if q.zero_point is not None:
        sums = jnp.sum(x, axis=dimensions.lhs_contracting, keepdims=True, dtype=wide)
        zero = dimensions.rhs_to_output(q.zero_point).astype(wide)
        y = y - zero * dimensions.lhs_to_output(sums)
    return y


def _dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dimensions: Dimensions,
    precision: lax.PrecisionLike,
    dtype: Any,
) -> jax.Array:
    return lax.dot_general(
        lhs, rhs, dimensions.numbers, precision=precision, preferred_element_type=dtype
    )


def numbers_of(q: QTensor, dtype: Any) -> jax.Array:
    """Returns the numbers of unpacked codes, without scale and zero point, in a float dtype."""
    form = format_of(q.qtype)
    direct = isinstance(form, Integer) or jnp.issubdtype(q.values.dtype, jnp.floating)
    if direct and getattr(form, "unit", 1.0) == 1.0:
        return q.codes.astype(dtype)
    return form.decode(q.codes).astype(dtype)


def real_of(q: QTensor, dtype: Any) -> jax.Array:
    """Returns the real values, linear in the scale, also if the scale is a tangent."""
    groups, scale = q.groups, q.real_scale().astype(dtype)
    numbers = affine_dequantize(
        groups.split(q.codes),
        jnp.ones((), dtype),
        None if q.zero_point is None else groups.split_scale(q.zero_point),
        qtype=q.qtype,
        dtype=dtype,
    )
    return groups.join(numbers * groups.split_scale(scale))


def is_exact_in(q: QTensor, dtype: Any) -> bool:
    """Whether a float dtype represents every number of the format exactly, without scales."""
    form = format_of(q.qtype)
    if isinstance(form, Block):
        form = form.elements if form.unit == 1.0 else form
    if isinstance(form, Integer):
        return form.bits <= 8 or (form.bits <= 16 and jnp.finfo(dtype).nmant >= 23)
    if not isinstance(form, Minifloat):
        return False
    info = jnp.finfo(dtype)
    smallest = 2.0 ** (1 - form.bias - form.mantissa_bits)
    in_range = form.high <= float(info.max) and smallest >= float(info.smallest_normal)
    return form.mantissa_bits <= info.nmant and in_range


# Conversion of codes to floats one tile at a time, without a float copy of all of them.


TILE = 2**20
"""Elements of a tile, which fits in the cache."""

TILES = 8
"""The minimum number of tiles, unless larger tiles are no larger than the other arrays."""


@formulation(
    "a float operand on CPU, which stores converted codes in memory: converted a tile at a time",
    CPU,
    lambda case: True,
)
def tiles(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    # Sums of products with float16 never overflow float32.
    return _in_tiles(x, q, how, look=x.dtype != jnp.float16)


def tangent_tiles(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    """The same as `tiles`, but linear in either operand: it does not depend on magnitudes."""
    return _in_tiles(x, q, how)


@formulation(
    "two operands of 8-bit floats on CPU: as bfloat16, which represents them, a tile at a time",
    CPU,
    lambda case: True,
)
def float8_tiles(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    unit_scale = jnp.ones((1,) * rhs.ndim, jnp.float32)
    codes = dataclasses.replace(rhs, scale=unit_scale, blocks=())
    y = _in_tiles(numbers_of(lhs, jnp.bfloat16), codes, how)
    return with_scales(y, lhs, rhs, how.dimensions)


def _in_tiles(x: jax.Array, q: QTensor, how: HowTo, look: bool = False) -> jax.Array:
    """Contracts one tile at a time. `look` keeps sums of codes in range by powers of two, which
    multiply the smaller operand: very large rows, or the codes.
    """
    dimensions = how.dimensions
    wide = common_dtype(x.dtype, q.dtype)
    if x.dtype.itemsize == 2 and needs_shape(x, q, dimensions):
        x = x.astype(wide)  # XLA on CPU multiplies 16-bit floats only in some layouts
    scale_after = how.block is None and q.zero_point is None and is_exact_in(q, x.dtype)
    q = with_own_scales(q, dimensions.rhs_kept)
    look = look and scale_after
    by_rows = look and is_at_least(q.size, x.size)
    back = None
    if by_rows:
        x, back = _near_one(x, dimensions)

    def compute(x: jax.Array, tile: QTensor) -> jax.Array:
        if scale_after:
            real = format_of(tile.qtype).decode(tile.codes).astype(x.dtype)
        else:
            real, x = real_of(tile, wide), x.astype(wide)
        scale = tile.real_scale().astype(wide)
        if look and not by_rows:
            power, scale = split_power(scale)
            real = real * power.astype(x.dtype)
        y = _dot(x, real, dimensions, how.precision, wide)
        return y * dimensions.rhs_to_output(scale) if scale_after else y

    result = x.size // dimensions.contracted_size(x) * dimensions.columns(q)
    y = in_slices(x, q, dimensions, count_of(q, x.size, result), compute)
    return y if back is None else y * back.astype(wide)


def _near_one(x: jax.Array, dimensions: Dimensions) -> tuple[jax.Array, jax.Array]:
    """Returns an array with very large rows scaled down by a power of two, so that their sums with
    codes fit float32, and the inverse factor of the results, lined up with them.
    """
    size = jnp.abs(lax.stop_gradient(x))
    largest = jnp.max(size, axis=dimensions.lhs_contracting, keepdims=True, initial=0)
    is_far, unit = largest > 2.0**80, jnp.ones((), x.dtype)
    back = dimensions.lhs_to_output(jnp.where(is_far, unit * 2.0**40, unit))
    return x * jnp.where(is_far, unit * 2.0**-40, unit), back


def count_of(q: QTensor, *others: Any) -> int:
    """Returns the number of tiles for the conversion of codes, given the sizes of other arrays.

    It is small if those arrays are large, because each tile reads all of them. A symbolic size
    counts as small, and codes of a symbolic size are not cut.
    """
    if export.is_symbolic_dim(q.size):
        return 1
    sizes = [size for size in others if not export.is_symbolic_dim(size)]
    count = max(TILES, math.ceil(q.size / TILE))
    return min(count, math.ceil(q.size / max([1, *sizes])))


# A float operand as three int8 digits: fixed point, relative to the largest of each row.
#
#     x  ~  step * (d0 * 256**2 + d1 * 256 + d2),   |error| <= step / 2,   step = max |x| / 8355000
#
# The error is 2**-24 of the largest magnitude: half the last place of a float32. So a product of
# floats with int8 codes becomes a product of int8 with three times the rows, which is exact except
# for that rounding. On CPU and with few rows, this is faster than converting the codes to float32.
#
# Cf. the split of floats for integer units in H. Ootomo, K. Ozaki, R. Yokota, "DGEMM on Integer
# Matrix Multiplication Unit", arXiv:2306.11975.


DIGITS = 3
TOP = 8355000
"""A little less than 127 * (256**2 + 256 + 1), the largest number of three digits."""

TINY = 2.0**-100
"""Rows with a smaller largest magnitude use this one: a smaller step would be subnormal."""

HELD = 2**24
"""Bytes of sums that are in memory at once."""

COPIES = 8
"""Number of slices in which codes of another dtype are copied to int8."""


@formulation(
    "few float rows and integers on CPU: the rows are split into three int8 digits, so that the "
    "codes are multiplied as they are, without a float copy",
    CPU,
    lambda case: case.fits_digits and case.block is None and not case.has_many_rows,
    linear=tangent_tiles,
)
def digits(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    dimensions = how.dimensions
    row_axis = len(dimensions.lhs_batch)

    def compute(rows: jax.Array, power: jax.Array, tile: QTensor) -> jax.Array:
        tile = as_int8(tile)
        total, left, _ = rows_product(
            rows, tile.values, dimensions, left=tile.zero_point is not None
        )
        if tile.zero_point is not None:
            total = total - _beside(tile.zero_point.astype(jnp.int32), dimensions) * left
        return join(total, row_axis, power) * _beside(
            tile.real_scale().astype(jnp.float32), dimensions
        )

    return _by_digits(x, q, dimensions, dimensions.contracted_size(x), compute)


@formulation(
    "few float rows and integers in blocks on CPU: as digits, with several blocks in one product "
    "whose rows are zero outside of their block",
    CPU,
    lambda case: case.fits_digits and case.has_few_rows_for_blocks,
    linear=tangent_tiles,
)
def block_digits(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    block = how.block
    assert block is not None

    def compute(rows: jax.Array, power: jax.Array, tile: QTensor) -> jax.Array:
        tile = as_int8(tile)
        columns, count = tile.shape[1:], tile.shape[0] // block.size
        blocks_per_run = _together(rows.shape[0], count)
        diagonal = _block_diagonal(rows, count, block.size, blocks_per_run)
        codes = tile.values.reshape(count // blocks_per_run, blocks_per_run * block.size, -1)
        numbers = (((2,), (1,)), ((0,), (0,)))
        y = lax.dot_general(diagonal, codes, numbers, preferred_element_type=jnp.int32)
        y = y.reshape(count, rows.shape[0], -1)
        if tile.zero_point is not None:
            sums = jnp.sum(rows.reshape(-1, count, block.size), axis=2, dtype=jnp.int32).T
            y = y - _flat(tile.zero_point.astype(jnp.int32), columns)[:, None] * sums[:, :, None]
        z = join(y, 1, power) * _flat(tile.real_scale().astype(jnp.float32), columns)[:, None]
        # On CPU, a product with ones sums blocks three times as fast as a sum.
        unit_rows = jnp.ones((2, count), z.dtype)
        y = (unit_rows @ z.reshape(count, -1))[0].reshape(z.shape[1:])
        return y.reshape(-1, *columns)

    return _by_digits(x, q, how.dimensions, block.size, compute)


def _by_digits(
    x: jax.Array,
    q: QTensor,
    dimensions: Dimensions,
    summed: int,
    compute: Callable[[jax.Array, jax.Array, QTensor], jax.Array],
) -> jax.Array:
    """Returns the product of an array and codes, by its digits and the codes in slices.

    Args:
      x: floats.
      q: integers.
      dimensions: of the product.
      summed: how many products an int32 sum has.
      compute: multiplies digits of rows, with the powers of two of their steps, by a slice.
    """
    row_axis = len(dimensions.lhs_batch)
    rows, step = split(to_rows(x.astype(jnp.float32), dimensions), row_axis)
    power, remainder = _split_steps(step)
    q = with_own_scales(q, dimensions.rhs_kept)
    of_rows = Dimensions(
        rows.ndim,
        dimensions.rhs_rank,
        tuple(range(row_axis + 1, rows.ndim)),
        dimensions.rhs_contracting,
        tuple(range(row_axis)),
        dimensions.rhs_batch,
    )
    count = _slices(q, dimensions.columns(q) * rows.size // summed)
    y = in_slices(rows, q, of_rows, count, lambda rows, tile: compute(rows, power, tile))
    y = y * remainder.reshape(*remainder.shape, *(1,) * (y.ndim - remainder.ndim))
    free = [x.shape[axis] for axis in dimensions.lhs_free]
    return y.reshape(*y.shape[:row_axis], *free, *y.shape[row_axis + 1 :])


def split(rows: jax.Array, row_axis: int) -> tuple[jax.Array, jax.Array]:
    """Splits float32 rows `(*batch, rows, *contracted)`, where `row_axis` axes are batch axes.

    Returns:
      The digits, int8 of shape `(*batch, 3 * rows, *contracted)`, with the highest digits of all
      rows first; and the steps, float32 of shape `(*batch, rows)`. The step of a row with a NaN or
      an infinity is NaN.
    """
    axes = tuple(range(row_axis + 1, rows.ndim))
    largest = jnp.max(jnp.abs(rows), axis=axes, keepdims=True, initial=0.0)
    finite = jnp.all(jnp.isfinite(rows), axis=axes, keepdims=True)
    step = jnp.maximum(jnp.where(finite, largest, 0.0), TINY) / TOP
    fixed = jnp.round(divide(jnp.where(finite, rows, 0.0), step)).astype(jnp.int32)
    low = fixed.astype(jnp.int8)
    fixed = (fixed - low.astype(jnp.int32)) >> 8
    middle = fixed.astype(jnp.int8)
    high = ((fixed - middle.astype(jnp.int32)) >> 8).astype(jnp.int8)
    step = jnp.where(finite, step, jnp.nan).reshape(rows.shape[: row_axis + 1])
    return jnp.concatenate([high, middle, low], axis=row_axis), step


def _split_steps(step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits the steps of rows into two factors. The first multiplies sums of digits before the
    scale: it is the power of two of a small step, so that a large scale multiplies small sums. A
    batch shares it, because slices may run along a batch axis.
    """
    power = jnp.where(step < 1, power_below(step), jnp.ones_like(step))
    power = jnp.max(power, axis=tuple(range(step.ndim - 1)), keepdims=True, initial=0)
    # The barrier keeps XLA from computing them again for each of the sums.
    return lax.optimization_barrier((power, step / power))


def join(total: jax.Array, row_axis: int, power: jax.Array) -> jax.Array:
    """Joins the int32 sums of the digits of each row, along axis `row_axis`, in float32, times a
    power of two per row, of shape `(*batch, rows)` with batch axes of size 1.
    """
    parts = total.reshape(*total.shape[:row_axis], DIGITS, -1, *total.shape[row_axis + 1 :])
    high, middle, low = (
        lax.index_in_dim(parts, i, row_axis, keepdims=False).astype(jnp.float32)
        for i in range(DIGITS)
    )
    lead, trail = row_axis + 1 - power.ndim, low.ndim - row_axis - 1
    power = power.reshape((1,) * lead + power.shape + (1,) * trail)
    return (high * (65536.0 * power) + middle * (256.0 * power)) + low * power


def _beside(parameter: jax.Array, dimensions: Dimensions) -> jax.Array:
    """Lines a parameter of the right operand up with `(*batch, rows, *columns)`."""
    order = (*dimensions.rhs_batch, *dimensions.rhs_free, *dimensions.rhs_contracting)
    row_axis = len(dimensions.rhs_batch)
    shape = [parameter.shape[axis] for axis in order[: row_axis + len(dimensions.rhs_free)]]
    return parameter.transpose(order).reshape(*shape[:row_axis], 1, *shape[row_axis:])


def _slices(q: QTensor, sums: int) -> int:
    """Returns the number of slices of a product, which bounds the int32 sums in memory, and the
    copies of codes that must become int8. A symbolic number of sums counts as many.
    """
    copies = 1 if q.values.dtype == jnp.int8 else COPIES
    by_memory = COPIES if export.is_symbolic_dim(sums) else math.ceil(4 * sums / HELD)
    return max(copies, by_memory)


def _together(rows: int, count: int) -> int:
    """Returns how many blocks share a product, so that its rows fill a matrix unit."""
    return next(
        n for n in (4, 2, 1) if n == 1 or (count % n == 0 and not is_at_least(n * rows, 49))
    )


def _block_diagonal(rows: jax.Array, count: int, size: int, blocks: int) -> jax.Array:
    """Returns, for each run of blocks, rows that are zero outside of their block:
    `[run, block * rows, elements of the run]`.
    """
    parts = rows.reshape(-1, count // blocks, 1, blocks, size)
    identity = jnp.eye(blocks, dtype=jnp.int8)[None, None, :, :, None]
    diagonal = (parts * identity).transpose(1, 2, 0, 3, 4)
    return diagonal.reshape(count // blocks, blocks * rows.shape[0], blocks * size)


def _flat(parameter: jax.Array, columns: tuple[int, ...]) -> jax.Array:
    """Brings a parameter with blocks along its first axis to `[blocks, columns]`."""
    return jnp.broadcast_to(parameter, (parameter.shape[0], *columns)).reshape(len(parameter), -1)


FLOAT8_PRODUCTS = (float8_tiles, float8)
"""Products of two operands of 8-bit floats."""

FLOAT_PRODUCTS = (convert_wide, digits, block_digits, tiles, dequantize, convert_row, convert)
"""Products of floats and codes."""
