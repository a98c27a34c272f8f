"""`dot_general` on arrays and QTensors."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import ArrayLike, DTypeLike

from .. import package_cpu
from ..checks import as_dtype, as_real, called, check_real, is_at_least
from ..errors import fail
from ..numerics.exact import common_dtype
from ..tensor.layout import check_dtypes
from ..tensor.qtensor import QTensor
from .formulation import (
    CPU,
    PLATFORMS,
    Choice,
    Family,
    Planner,
    formulation,
    formulation_of_kernels,
)
from .integer_products import INTEGERS, SUMS_OF_INTEGERS, check_splittable
from .kernels import KERNELS, as_activation, multiplies_codes, products
from .kernels_cpu import (
    PACKAGE,
    float_onednn,
    integer_onednn,
    package_quantizing,
    package_sums,
    plain_float,
)
from .plain import FLOAT8_PRODUCTS, FLOAT_PRODUCTS, TILES
from .problem import (
    Dimensions,
    HowTo,
    Pending,
    Product,
    can_leave_sum,
    has_no_offset_or_order,
    in_order,
    of_offset,
)
from .requantize import (
    Asked,
    Output,
    Requantization,
    as_asked,
    check_requantized,
    requantize,
)
from .scaled import SCALED_PRODUCTS, are_blocks


@formulation(
    "two operands in MX or NVFP4 blocks on CPU: the smaller one is dequantized first, or the left "
    "one if it is not much larger than the other arrays",
    CPU,
    lambda case: True,
    is_composite=True,
)
def dequantize_smaller(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return _with_smaller_dequantized(lhs, rhs, how.dimensions, how.precision, how.dtype)


PRODUCTS = Planner(
    "dot_general",
    Family(lambda case: package_cpu.is_installed(), PACKAGE),
    Family(lambda case: case.rhs.layout is not None, KERNELS),
    Family(lambda case: case.are_integers, (integer_onednn, *INTEGERS)),
    Family(lambda case: case.are_float8, FLOAT8_PRODUCTS),
    Family(are_blocks, (*SCALED_PRODUCTS, dequantize_smaller)),
    Family(lambda case: case.is_beside_floats, FLOAT_PRODUCTS),
)
FLOATS = Planner(
    "dot_general:float",
    float_onednn,
    formulation(
        "two batches of float matrices, elsewhere: as JAX multiplies them",
        PLATFORMS,
        lambda case: True,
        op="dot_general:float",
    )(plain_float),
)
SUMS = Planner("dot_general:int32", package_sums, *SUMS_OF_INTEGERS)


def plan(case: Product) -> Choice | None:
    """Returns how to contract a right QTensor with an array or another QTensor; `None` for two
    QTensors of which one must be dequantized first.
    """
    if case.are_integers and not case.are_bytes:
        check_splittable("dot_general", case.lhs, case.rhs)
    return PRODUCTS.choose(case)


def float_product(lhs: jax.Array, rhs: jax.Array, how: HowTo) -> jax.Array | None:
    """Returns the product of two float arrays that are left in float beside quantized ones; `None`
    if they are multiplied as JAX does on every platform.
    """
    choice = FLOATS.choose(Product(lhs, rhs, how))
    assert choice is not None  # the last one is for every case
    return None if {*choice} == {FLOATS.formulations[-1]} else choice.compute(lhs, rhs, how)


Operand = ArrayLike | QTensor


@overload
def dot_general(
    lhs: Operand,
    rhs: Operand,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    output: None = None,
) -> jax.Array: ...
@overload
def dot_general(
    lhs: Operand,
    rhs: Operand,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    output: Asked,
) -> QTensor: ...
@called("dot_general")
def dot_general(
    lhs: Operand,
    rhs: Operand,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    output: Output = None,
) -> Any:
    """Contracts two operands; both may be quantized. Otherwise it is `jax.lax.dot_general`.

    Two QTensors of integer formats are multiplied as integers. The int32 accumulator is exact; zero
    points are corrected with sums over the contracted axes, and the scales are applied after the
    sum, in float32. A sum that may overflow int32 is split, and the exact parts are added in
    float32. (With 8 bits, this is beyond 131,071 products of int8 by int8, or 33,025 of uint8 by
    uint8 with zero points. Codes of 16 bits are multiplied as 8-bit digits.)

    With one QTensor (weight-only quantization), the result is that of its real values, with the
    accuracy of a float32 sum. On CPU, codes are never converted to floats all at once. On other
    platforms, a separate kernel converts them only for scales in blocks and many rows. Float
    formats and codebooks are computed in this way on either side. If scales are in blocks along a
    contracted axis, each block is contracted separately, and the products are summed in float32.

    Two arrays are passed to `lax.dot_general`. How a contraction is computed depends on shapes,
    formats and platform; `jqx.formulations` shows it.

    Args:
      lhs: array or QTensor. A scale must not vary along a contracted axis, except in blocks.
      rhs: array or QTensor, with the same restriction.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`.
      precision: as in `jax.lax.dot_general`, for contractions of floats; integer arithmetic is
        exact. With jqx-cpu and integers laid out for its kernels, the fastest one, `"default"`,
        rounds float rows to 16 bits relative to the largest element of each row. In functions that
        `jqx.convert` returns, `jax.default_matmul_precision("bfloat16")` has the same effect.
      preferred_element_type: floating point dtype of the result; `None` takes the promoted dtype of
        the operands.
      output: how to quantize the result: a `QSpec` or a scheme such as `"int8"`, whose calibrator
        finds the scale; a pair of one of these and an `Affine`; or a `Requantization`, which
        multiplies the int32 sums of two integer operands by fixed-point factors, as TFLite does
        (the factors include the scales of the operands, which are not used). `None` returns floats.

    Returns:
      Array of `preferred_element_type`, or a `QTensor` if `output` is given. Its axes are the batch
      axes, the free axes of `lhs`, and the free axes of `rhs`.

    Raises:
      ValueError: a scale varies along a contracted axis, or both operands are integers and one has
        codes of 32 bits.
      TypeError: one operand is a QTensor and the other an integer array; or
        `preferred_element_type` is an integer dtype; or `output` needs int32 sums that the operands
        do not have; and errors of `lax.dot_general`, if shapes or dimension numbers do not fit.

    Gradient: JAX differentiates it with respect to float operands and scales; codes have no
      gradient.
    NaN and infinities: IEEE arithmetic on scales and float operands, with one exception. On CPU
      with integer codes, a row of a float operand (all its contracted elements) that holds an
      infinity gives NaN, unless jqx-cpu multiplies more than 6 rows of bfloat16 as such. On other
      platforms, sums of float32 or bfloat16 with codes, without scales, must fit float32.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> w = jqx.QTensor.quantize(jnp.eye(2) * 3.0, jqx.QSpec(jnp.int8, jqx.per_axis(1)))
      >>> jqx.dot_general(jnp.ones((1, 2)), w, (((1,), (0,)), ((), ())))
      Array([[3., 3.]], dtype=float32)
    """
    left, right = as_operand(lhs), as_operand(rhs)
    floats = not any([isinstance(x, (QTensor, Pending)) for x in (left, right)])
    if floats and not isinstance(output, Requantization):
        y = lax.dot_general(
            left,
            right,
            dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
        return as_asked("dot_general", y, output)
    dimensions = Dimensions.of(dimension_numbers, left.ndim, right.ndim)
    hint = "; or contract it with an array by jqx.einsum, which multiplies the scale into the array"
    check_operand("dot_general", "lhs", left, dimensions.lhs_contracting, hint)
    check_operand("dot_general", "rhs", right, dimensions.rhs_contracting, hint)
    dtype = result_dtype("dot_general", left, right, preferred_element_type)
    if not dimensions.fits(left.shape, right.shape):
        shape_of_result(left, right, dimensions)  # raises
    if isinstance(output, Requantization):
        summed = dimensions.lhs_contracting, dimensions.rhs_contracting
        products = dimensions.contracted_size(left)
        check_requantized("dot_general", left, right, summed, products, preferred_element_type)
        left, right, dimensions = as_stored(left, right, dimensions)
        case = Product(left, right, HowTo.of(left, right, dimensions))
        return requantize(SUMS.compute(case), output)
    y = contract(left, right, dimensions, precision, dtype).astype(dtype)
    return y if output is None else as_asked("dot_general", y, output)


def result_dtype(function: str, left: Any, right: Any, preferred: DTypeLike | None) -> jnp.dtype:
    """Returns the float dtype of a result: the preferred one, or the promoted one of operands."""
    if preferred is None:
        return jnp.promote_types(left.dtype, right.dtype)
    return as_float_dtype(function, preferred)


def as_float_dtype(function: str, dtype: DTypeLike) -> jnp.dtype:
    """Returns `preferred_element_type` as a dtype, after checking that it is a float dtype."""
    dtype = as_dtype(function, "preferred_element_type", dtype)
    check_real(function, "`preferred_element_type`", dtype)
    return dtype


def contract(
    left: Any,
    right: Any,
    dimensions: Dimensions,
    precision: lax.PrecisionLike,
    dtype: Any = None,
) -> jax.Array:
    """Contracts two operands, at least one of them a QTensor. The result has the float dtype of the
    computation, or `dtype` if a kernel rounds to it.
    """
    if 0 in left.shape or 0 in right.shape:  # all sums, if any, are empty
        return jnp.zeros(shape_of_result(left, right, dimensions))
    if isinstance(left, Pending):
        return _contract_pending(left, right, dimensions, precision, dtype)
    if isinstance(right, Pending):
        y = _contract_pending(right, left, dimensions.swapped, precision, dtype)
        return dimensions.swap_output(y)
    if has_no_offset_or_order(left) and has_no_offset_or_order(right):
        return _contract_codes(left, right, dimensions, precision, dtype)
    return _contract_with_offset_or_order(left, right, dimensions, precision, dtype)


def _contract_with_offset_or_order(
    left: Any, right: Any, dimensions: Dimensions, precision: lax.PrecisionLike, dtype: Any
) -> jax.Array:
    """Contracts two operands of which one has an offset or a permuted axis."""
    left, right = in_order(left, right, dimensions)
    if isinstance(left, QTensor) and isinstance(right, QTensor):
        # An offset of the smaller operand, the activation, is not worth separate sums.
        if _is_smaller(left, right) and left.offset is not None:
            left = left.dequantize()
        elif not _is_smaller(left, right) and right.offset is not None:
            right = right.dequantize()
    has_offset = any(isinstance(x, QTensor) and x.offset is not None for x in (left, right))
    dtype = None if has_offset else dtype
    left_codes, right_codes = (
        x.without_offset if isinstance(x, QTensor) else x for x in (left, right)
    )
    y = _contract_codes(left_codes, right_codes, dimensions, precision, dtype)
    if isinstance(right, QTensor) and right.offset is not None:
        return y + of_offset(left, right, dimensions).astype(y.dtype)
    if isinstance(left, QTensor) and left.offset is not None:
        term = of_offset(right, left, dimensions.swapped)
        return y + dimensions.swap_output(term).astype(y.dtype)
    return y


def _contract_codes(
    left: Any, right: Any, dimensions: Dimensions, precision: lax.PrecisionLike, dtype: Any
) -> jax.Array:
    """Contracts two operands without offsets and permuted axes."""
    left, right, dimensions = as_stored(left, right, dimensions)
    if isinstance(left, QTensor) and isinstance(right, QTensor):
        y = _computed(left, right, dimensions, precision, dtype)
        if y is None:
            y = _with_smaller_dequantized(left, right, dimensions, precision, dtype)
        return y
    is_swapped = not isinstance(right, QTensor)
    if is_swapped:
        y = _computed(right, left, dimensions.swapped, precision, dtype)
    else:
        y = _computed(left, right, dimensions, precision, dtype)
    assert y is not None
    return dimensions.swap_output(y) if is_swapped else y


def _with_smaller_dequantized(
    left: QTensor, right: QTensor, dimensions: Dimensions, precision: lax.PrecisionLike, dtype: Any
) -> jax.Array:
    """Contracts two operands that are not both integers. The smaller one is dequantized first; the
    left one also where that takes not much more memory than the other arrays: an activation of many
    rows.
    """
    wide = common_dtype(left.dtype, right.dtype)
    if _is_smaller(left, right) or _is_modest(left, right, dimensions):
        real = as_activation(left, right, wide), right
    else:
        real = left, as_activation(right, left, wide)
    return _contract_codes(*real, dimensions, precision, dtype)


def _computed(
    lhs: Any, rhs: QTensor, dimensions: Dimensions, precision: lax.PrecisionLike, dtype: Any
) -> jax.Array | None:
    """Computes a product by its plan; `None` if an operand must be dequantized first."""
    how = HowTo.of(lhs, rhs, dimensions, precision)
    if dtype is not None and rhs.layout is not None and rhs.layout.kernel:
        how = how._replace(dtype=jnp.dtype(dtype))
    case = Product(lhs, rhs, how)
    choice = plan(case)
    return None if choice is None else choice.compute(lhs, rhs, case.how)


def _contract_pending(
    rows: Pending, q: QTensor, dimensions: Dimensions, precision: lax.PrecisionLike, dtype: Any
) -> jax.Array:
    """Contracts an array that is still to be quantized with a weight."""
    if q.offset is not None or q.order is not None:
        return contract(rows.quantized(), q, dimensions, precision)
    _, q, dimensions = as_stored(rows, q, dimensions)
    how = HowTo.of(rows.codes, q, dimensions, precision)._replace(dtype=dtype)
    return QUANTIZED.compute(Product(rows, q, how))


@formulation(
    "a float operand to be quantized, and a weight that no kernel reads here: the operand is "
    "quantized first",
    PLATFORMS,
    lambda case: True,
    op="dot_general:quantized",
)
def quantize_first(lhs: Pending, rhs: QTensor, how: HowTo) -> jax.Array:
    return contract(lhs.quantized(), rhs, how.dimensions, how.precision, how.dtype)


def _quantizes(target: str, case: Product) -> bool:
    """Whether the kernel of a target quantizes rows and multiplies their codes."""
    rows: Pending = case.lhs
    is_suited = rows.suits(target, case.rows)
    return is_suited and multiplies_codes(target, rows.codes, case.rhs, case.how)


@formulation_of_kernels(
    "a float operand to be quantized, and a weight that is laid out for a kernel: the kernel "
    "quantizes the operand, and multiplies codes",
    _quantizes,
    op="dot_general:quantized",
)
def kernel_quantizing(target: str, lhs: Pending, rhs: QTensor, how: HowTo) -> jax.Array:
    return products(target, lhs, rhs, how, plain=quantize_first.compute)


QUANTIZED = Planner("dot_general:quantized", *kernel_quantizing, package_quantizing, quantize_first)
"""Products of an array that is still to be quantized."""


def _is_smaller(left: Any, right: Any) -> bool:
    """Whether the left operand is the smaller one; a symbolic size counts as an activation."""
    if export.is_symbolic_dim(right.size):
        return export.is_symbolic_dim(left.size)
    return is_at_least(right.size, left.size)


def _is_modest(left: QTensor, right: QTensor, dimensions: Dimensions) -> bool:
    """Whether the left operand has at most `TILES` times the numbers of the right one, or of the
    result.
    """
    if any(map(export.is_symbolic_dim, (left.size, right.size))):
        return False
    result = left.size // max(dimensions.contracted_size(left), 1) * dimensions.columns(right)
    return left.size <= TILES * max(right.size, result)


def as_stored(left: Any, right: Any, dimensions: Dimensions) -> tuple[Any, Any, Dimensions]:
    """Returns operands with their axes in memory order, and the dimensions for that order."""
    if getattr(left, "layout", None) is None and getattr(right, "layout", None) is None:
        return left, right, dimensions
    left, left_axes = _stored(left, dimensions.lhs_free)
    right, right_axes = _stored(right, dimensions.rhs_free)
    return left, right, dimensions.renamed(left_axes, right_axes)


def _stored(x: Any, free: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
    """Returns an operand with its axes in memory order, and the new place of each axis. It is
    unpacked if the memory order would swap free axes, because the result has their order.
    """
    order = tuple(range(x.ndim))
    if isinstance(x, QTensor) and {*order[-2:]} <= {*free}:
        x = x.unpack()
    if isinstance(x, QTensor) and x.layout is not None and x.layout.swapped:
        return x.in_memory_order, (*order[:-2], order[-1], order[-2])
    return x, order


def as_operand(x: Operand) -> Any:
    """Returns a QTensor unchanged, and anything else as an array."""
    if isinstance(x, Pending):
        return x
    if isinstance(x, QTensor):
        check_dtypes("QTensor", x)
        return x
    return jnp.asarray(x)


def shape_of_result(left: Any, right: Any, dimensions: Dimensions) -> tuple[Any, ...]:
    """Returns the shape of the result; `lax.dot_general` raises if shapes do not fit."""
    if dimensions.fits(left.shape, right.shape):
        return dimensions.result_shape(left.shape, right.shape)
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (left, right)]
    return jax.eval_shape(lambda a, b: lax.dot_general(a, b, dimensions.numbers), *shapes).shape


def check_operand(
    function: str, name: str, operand: Any, contracting: tuple[int, ...], hint: str = ""
) -> None:
    """Checks that an array is real, and that the scale of a QTensor can leave the sum."""
    if isinstance(operand, Pending):
        return
    if not isinstance(operand, QTensor):
        as_real(function, name, operand)
    elif not can_leave_sum(operand.groups, contracting):
        kept_axes = [str(axis) for axis in range(operand.ndim) if axis not in contracting]
        granularity = f"per_axis({', '.join(kept_axes)})" if kept_axes else "per_tensor()"
        raise fail(
            function,
            f"the scale of `{name}` varies along a contracted axis, so it cannot leave the sum.",
            given=f"shape {operand.shape}, scale {operand.scale.shape}, contracted {contracting}",
            fix=f"quantize with jqx.{granularity}, or in blocks along it{hint}.",
        )


# `matmul` on arrays and QTensors.


@overload
def matmul(
    lhs: Operand,
    rhs: Operand,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    output: None = None,
) -> jax.Array: ...
@overload
def matmul(
    lhs: Operand,
    rhs: Operand,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    output: Asked,
) -> QTensor: ...
@called("matmul")
def matmul(
    lhs: Operand,
    rhs: Operand,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    output: Output = None,
) -> Any:
    """Multiplies matrices; both may be quantized. Otherwise it is `jax.numpy.matmul`.

    Args:
      lhs: array or QTensor of one axis or more; contracted along its last axis.
      rhs: array or QTensor of one axis or more; contracted along its second last, or only axis.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of the result; `None` takes the promoted dtype of the operands.
      output: how to quantize the result, as in `jqx.dot_general`.

    Returns:
      Array, or a QTensor if `output` is given; leading axes broadcast as in `jax.numpy.matmul`.

    Raises:
      ValueError: as in `dot_general`; an operand has no axes; leading axes do not broadcast.

    Gradient: as in `dot_general`.
    NaN and infinities: as in `dot_general`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> w = jqx.QTensor.quantize(jnp.eye(2) * 3.0, jqx.QSpec(jnp.int8))
      >>> jnp.ones((4, 2)) @ w == jqx.matmul(jnp.ones((4, 2)), w)
      Array([[ True,  True],
             [ True,  True],
             [ True,  True],
             [ True,  True]], dtype=bool)
    """
    left, right = as_operand(lhs), as_operand(rhs)
    options: dict[str, Any] = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }
    if not isinstance(left, QTensor) and not isinstance(right, QTensor) and output is None:
        return jnp.matmul(left, right, **options)
    options["output"] = output
    if not left.ndim or not right.ndim:
        problem = f"an operand has no axis to contract: shapes {left.shape} and {right.shape}."
        fix = "give it an axis, or multiply by the scalar before quantizing."
        raise fail("matmul", problem, fix=fix)
    if right.ndim <= 2:
        return dot_general(left, right, (((left.ndim - 1,), (0,)), ((), ())), **options)
    if left.ndim > 1:
        try:
            batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        except ValueError:
            problem = f"the leading axes of shapes {left.shape} and {right.shape} do not broadcast."
            fix = "reshape an operand, or contract with jqx.dot_general."
            raise fail("matmul", problem, fix=fix) from None
        left, right = _broadcast_leading(left, batch), _broadcast_leading(right, batch)
    axes = tuple(range(right.ndim - 2)) if left.ndim > 1 else ()
    numbers = (((left.ndim - 1,), (right.ndim - 2,)), (axes, axes))
    return dot_general(left, right, numbers, **options)


# The class is below this file, which has the product that its operators call.
QTensor.__matmul__ = matmul  # type: ignore[method-assign]
QTensor.__rmatmul__ = lambda self, x: matmul(x, self)  # type: ignore[method-assign]


def _broadcast_leading(x: Any, batch: tuple[int, ...]) -> Any:
    """Broadcasts all axes except the last two to `batch`; a shared scale stays shared."""
    shape = (*batch, *x.shape[-2:])
    return x.broadcast_to(shape) if isinstance(x, QTensor) else jnp.broadcast_to(x, shape)


# The backward pass of a product of arrays, in a dtype of choice.


def dot_gradients(
    lhs: jax.Array,
    rhs: jax.Array,
    numbers: lax.DotDimensionNumbers,
    cotangent: jax.Array,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of both operands, as float32 or wider.

    Operands are rounded to `dtype`, and products are summed in float32 or wider. (On CPU, a product
    with a bfloat16 result would be computed in float32 throughout.)
    """
    wide = jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
    d = Dimensions.of(numbers, lhs.ndim, rhs.ndim)
    batch, lefts = len(d.lhs_batch), len(d.lhs_free)
    ahead = tuple(range(batch))
    left = tuple(range(batch, batch + lefts))
    right = tuple(range(batch + lefts, cotangent.ndim))
    x, w, g = lhs.astype(dtype), rhs.astype(dtype), cotangent.astype(dtype)
    # Free axes keep their order; contracted axes have the order of the left operand.
    of_lhs = [*d.lhs_batch, *d.lhs_free, *_in_order(d.lhs_contracting, d.rhs_contracting)]
    of_rhs = [*d.rhs_batch, *_in_order(d.rhs_contracting, d.lhs_contracting), *d.rhs_free]
    dx = _product(g, w, ((right, d.rhs_free), (ahead, d.rhs_batch)), of_lhs, wide)
    dw = _product(x, g, ((d.lhs_free, left), (d.lhs_batch, ahead)), of_rhs, wide)
    return dx, dw


def _product(
    lhs: jax.Array,
    rhs: jax.Array,
    numbers: lax.DotDimensionNumbers,
    axes: Sequence[int],
    dtype: DTypeLike,
) -> jax.Array:
    """Returns a product whose axes are those of the result at the places in `axes`."""
    order = tuple(axes.index(axis) for axis in range(len(axes)))

    def plain(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        y = lax.dot_general(lhs, rhs, numbers, preferred_element_type=dtype)
        return jnp.transpose(y, order)

    if lhs.dtype.itemsize != 2:
        return plain(lhs, rhs)
    in_rows = partial(rows_product, numbers=numbers, order=order, dtype=dtype)
    return lax.platform_dependent(lhs, rhs, cpu=in_rows, default=plain)


def rows_product(
    lhs: jax.Array,
    rhs: jax.Array,
    numbers: lax.DotDimensionNumbers,
    order: Sequence[int],
    dtype: DTypeLike,
) -> jax.Array:
    """Returns a transposed product of 16-bit floats, of matrices whose last axes are contracted.

    XLA on CPU makes one product of a product and transposes around it, and most of these it cannot
    run on 16-bit floats. So barriers keep them apart, and a single row, which under `vmap` would be
    one axis of many, has a row of zeros below.
    """
    d = Dimensions.of(numbers, lhs.ndim, rhs.ndim)
    batch = len(d.lhs_batch)
    left = _transposed(lhs, (*d.lhs_batch, *d.lhs_free, *d.lhs_contracting))
    right = _transposed(rhs, (*d.rhs_batch, *d.rhs_free, *d.rhs_contracting))
    ahead, m = left.shape[:batch], left.shape[batch : batch + len(d.lhs_free)]
    n = right.shape[batch : batch + len(d.rhs_free)]
    k = math.prod(left.shape[batch + len(m) :])
    left, right = (x.reshape(*ahead, math.prod(sizes), k) for x, sizes in ((left, m), (right, n)))
    if is_row := math.prod(m) == 1:
        left = jnp.concatenate([left, jnp.zeros_like(left)], batch)
    axes = tuple(range(batch))
    inner = (batch + 1,)
    y = lax.dot_general(left, right, ((inner, inner), (axes, axes)), preferred_element_type=dtype)
    y = lax.slice_in_dim(y, 0, 1, axis=batch) if is_row else y
    return _transposed(y.reshape(*ahead, *m, *n), order)


def _transposed(x: jax.Array, order: Sequence[int]) -> jax.Array:
    """Returns a transpose that is not merged with what is before it or after it."""
    if list(order) == list(range(x.ndim)):
        return x
    return lax.optimization_barrier(jnp.transpose(lax.optimization_barrier(x), order))


def _in_order(axes: Sequence[int], partners: Sequence[int]) -> list[int]:
    """Returns axes in the order of their partners."""
    return [axis for _, axis in sorted(zip(partners, axes, strict=True))]
