"""Products of floats and codes in floating point, in the form that GPU and TPU compilers fuse.

The codes are converted inside the product, and the scales are applied after it (one fused kernel).
A product of a bfloat16 operand with an int8 operand would be computed in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...numerics import Block, Integer, Minifloat, format_of
from ...numerics._shared import common_dtype, power_below
from ...ops._shared import affine_dequantize
from ...tensor import QTensor
from .._what._dimensions import Dimensions
from ._blocks import sum_of_blocks
from ._formulation import CPU, ELSEWHERE, formulation
from ._scales import HowTo, with_scales


@formulation(
    "a float operand: the codes are converted inside the product; scales come after",
    ELSEWHERE,
    lambda case: case.is_beside_floats,
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
        case.is_beside_floats
        and case.is_large
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
    lambda case: case.is_beside_floats and not case.is_large,
)
def convert_wide(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    wide = common_dtype(x.dtype, q.dtype)

    def compute(x: jax.Array, q: QTensor, dimensions: Dimensions) -> jax.Array:
        numbers = numbers_of(q, wide)
        if q.zero_point is not None:
            numbers = numbers - q.zero_point.astype(wide)
        power, rest = split_power(q.real_scale().astype(wide))
        y = _dot(x, numbers * power, dimensions, how.precision, wide)
        return y * dimensions.rhs_to_output(rest)

    return sum_of_blocks(x.astype(wide), q.unpack(), how.dimensions, compute, how.block)


def _dequantize(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    wide = common_dtype(x.dtype, q.dtype)
    return _dot(x, real_of(q, wide).astype(x.dtype), how.dimensions, how.precision, wide)


@formulation(
    "a float operand with many rows, and scales in blocks: the codes are scaled in float32 and "
    "rounded to the dtype of the operand, once for all rows",
    ELSEWHERE,
    lambda case: (
        case.is_beside_floats and case.is_large and case.block is not None and case.has_many_rows
    ),
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
    lambda case: case.are_float8,
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
