"""`conv_general_dilated` on arrays and QTensors."""

import contextlib
from collections.abc import Sequence
from types import NoneType
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..checks import as_real, called
from ..errors import fail
from ..numerics.exact import common_dtype
from ..tensor.qtensor import QTensor
from .conv import (
    Convolution,
    Window,
    check_ranks,
    conv_accumulator,
    conv_accumulator_depthwise,
    conv_convert,
    conv_depthwise,
    conv_dequantize,
    conv_digits,
    conv_image,
    conv_integer,
    conv_tiles,
    package_convolution,
    package_convolution_sums,
    window_of,
)
from .dimensions import check_bare
from .dot_general import Operand, as_operand, dot_general, is_empty, result_dtype
from .exact import check_splittable
from .formulation import ELSEWHERE, Planner, formulation
from .problem import can_leave_sum, is_integer, shares_scale
from .requantize import Asked, Output, Requantization, as_asked, check_requantized, requantize

NAME = "conv_general_dilated"


@formulation(
    "integers and a kernel of one tap, if jqx-cpu convolves on CPU: on other platforms, the "
    "features are contracted as a matrix product",
    ELSEWHERE,
    lambda case: case.are_bytes and _is_dot(case.rhs, case.how),
    op=NAME,
)
def conv_dot(lhs: QTensor, rhs: QTensor, window: Window) -> jax.Array:
    return _as_dot(lhs, rhs, window, common_dtype(lhs.dtype, rhs.dtype))


CONVOLUTIONS = Planner(
    NAME,
    conv_image,
    conv_digits,
    package_convolution,
    conv_dot,
    conv_depthwise,
    conv_integer,
    conv_tiles,
    conv_convert,
    conv_dequantize,
)

SUMS = Planner(
    f"{NAME}:int32", package_convolution_sums, conv_accumulator_depthwise, conv_accumulator
)


@overload
def conv_general_dilated(
    lhs: Operand,
    rhs: Operand,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    output: None = None,
) -> jax.Array: ...
@overload
def conv_general_dilated(
    lhs: Operand,
    rhs: Operand,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    output: Asked,
) -> QTensor: ...
@called("conv_general_dilated")
def conv_general_dilated(
    lhs: Operand,
    rhs: Operand,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    output: Output = None,
) -> Any:
    """Convolves an image with a kernel; both may be quantized. Otherwise it is
    `jax.lax.conv_general_dilated`.

    Two QTensors of integers are convolved as integers. The int32 sums are exact (on GPUs, whose
    libraries return them as float32, if they are below 2**24). Zero points are corrected, and the
    scales are applied after the sum. Parts of longer sums, and sums of the int8 digits of 16-bit
    codes, are added in float32. Padding and the holes of `lhs_dilation` represent real zeros, so
    they are filled with the zero point. With a float image, a quantized kernel is dequantized on
    CPU, some output features at a time. The image is dequantized if the kernel is an array, or if
    the two formats are not both integers. On other platforms, sums with an image of 16-bit floats
    are rounded to its dtype, and so are the real values of a kernel with zero points or blocks. Two
    arrays are passed to lax.

    Args:
      lhs: image, array or QTensor of rank `2 + spatial axes`. If image and kernel are both
        integers, the scale of the image may vary along the batch axis, and along the features in
        blocks; if each output reads one feature (depthwise), it may vary with each feature.
      rhs: kernel, array or QTensor of the same rank. Its scale may vary along the output features,
        and along the input features in blocks.
      window_strides: one for each spatial axis.
      padding: "SAME", "SAME_LOWER", "VALID", or (low, high) for each spatial axis; may be negative.
      lhs_dilation: one for each spatial axis; for a transposed convolution, its strides.
      rhs_dilation: one for each spatial axis (atrous convolution).
      dimension_numbers: as in lax, such as `("NHWC", "HWIO", "NHWC")`.
      feature_group_count: how many groups the features are in.
      batch_group_count: how many groups the batch is in.
      precision: of float products.
      preferred_element_type: floating point dtype of the result; `None` takes the promoted dtype of
        the operands.
      output: how to quantize the result, as in `jqx.dot_general`.

    Returns:
      Array of `preferred_element_type`, or a QTensor if `output` is given.

    Raises:
      ValueError: a scale varies along an axis that is summed, except in blocks; there are blocks
        along features in groups; both operands are integers and one has codes of 32 bits; shapes
        do not fit; an operand has an offset, or a permuted axis.
      TypeError: one operand is a QTensor and the other an integer array; and errors of lax.

    Gradient: JAX differentiates it with respect to float operands and scales; codes have no
      gradient.
    NaN and infinities: IEEE arithmetic on scales and float operands.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> kernel = jqx.QTensor.quantize(jnp.ones((3, 3, 1, 2)), jqx.QSpec(jnp.int8))
      >>> axes = ("NHWC", "HWIO", "NHWC")
      >>> y = jqx.conv_general_dilated(
      ...     jnp.ones((1, 4, 4, 1)), kernel, (1, 1), "SAME", dimension_numbers=axes
      ... )
      >>> y[0, :, :, 0]
      Array([[4., 6., 6., 4.],
             [6., 9., 9., 6.],
             [6., 9., 9., 6.],
             [4., 6., 6., 4.]], dtype=float32)
    """
    left, right = as_operand(lhs), as_operand(rhs)
    arguments = (
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
        precision,
    )
    check_bare("conv_general_dilated", left, right)
    floats = not any(isinstance(x, QTensor) for x in (left, right))
    if floats and not isinstance(output, Requantization):
        y = lax.conv_general_dilated(left, right, *arguments, preferred_element_type)
        return as_asked(NAME, y, output)
    check_ranks(left, right)
    _check_lengths(left.ndim - 2, lhs_dilation=lhs_dilation, rhs_dilation=rhs_dilation)
    window, result = _window_and_result(left, right, arguments)
    for name, x in (("lhs", left), ("rhs", right)):
        if not isinstance(x, QTensor):
            as_real(NAME, name, x)
    dtype = result_dtype(NAME, left, right, preferred_element_type)
    if is_integer(left) and is_integer(right):
        check_splittable(NAME, left, right)
        of_image, of_kernel = window.summed
        _check_scale("lhs", left, of_image, window.is_depthwise(left))
        _check_scale("rhs", right, of_kernel, False)
        _check_blocks(left, right, window)
    left = left.unpack() if isinstance(left, QTensor) else left
    if isinstance(output, Requantization):
        right = right.unpack() if isinstance(right, QTensor) else right
        products = window.products(right)
        check_requantized(NAME, left, right, window.summed, products, preferred_element_type)
        return requantize(SUMS.compute(Convolution(left, right, window)), output)
    empty = is_empty(result) or is_empty(left) or is_empty(right)
    y = jnp.zeros(result.shape) if empty else _convolve(left, right, window, dtype)
    y = y.astype(dtype)
    assert y.shape == result.shape
    return as_asked(NAME, y, output)


def _convolve(left: Any, right: Any, window: Window, dtype: Any) -> jax.Array:
    if not isinstance(right, QTensor):
        return CONVOLUTIONS.compute(Convolution(left, right, window))
    wide = common_dtype(left.dtype, right.dtype)
    if isinstance(left, QTensor) and not (is_integer(left) and is_integer(right)):
        left = left.astype(wide).dequantize()
    as_dot = _is_dot(right, window)
    if as_dot or isinstance(left, QTensor):
        right = right.unpack()  # otherwise it is unpacked during the conversion
    case = Convolution(left, right, window)
    if as_dot and not package_convolution.applies(case):
        return _as_dot(left, right, window, wide)
    narrow = not isinstance(left, QTensor) and left.dtype == jnp.float16
    if narrow and dtype != jnp.float16:
        left = left.astype(wide)  # float16 sums would overflow where the result does not
    return CONVOLUTIONS.compute(Convolution(left, right, window))


def _is_dot(right: QTensor, window: Window) -> bool:
    return window.is_dot(right) and can_leave_sum(right.groups, (window.inputs,))


def _as_dot(left: Any, right: QTensor, window: Window, dtype: Any) -> jax.Array:
    """A kernel of one tap: the features are contracted as a matrix product."""
    steps = [slice(None)] * left.ndim
    for axis, stride in zip(window.spatial, window.strides, strict=True):
        steps[axis] = slice(None, None, stride)
    left = left[tuple(steps)] if any(s != 1 for s in window.strides) else left
    matrix = right.transpose((window.inputs, window.outputs, *window.taps))
    matrix = matrix.reshape(matrix.shape[:2])
    numbers = (((window.features,), (0,)), ((), ()))
    y = dot_general(left, matrix, numbers, precision=window.precision, preferred_element_type=dtype)
    # The result has the axes of the image except its features, followed by the outputs.
    image = [axis for axis in range(left.ndim) if axis != window.features]
    order = [0] * y.ndim
    for to, source in zip(window.axes.out_spec, window.axes.lhs_spec, strict=True):
        order[to] = y.ndim - 1 if source == window.features else image.index(source)
    return y.transpose(order)


def _check_lengths(axes: int, **arguments: Sequence[Any] | None) -> None:
    for argument, entries in arguments.items():
        if entries is not None and len(entries) != axes:
            problem = f"`{argument}` has {len(entries)} entries, for {axes} spatial axes."
            raise fail(NAME, problem, fix="pass one entry for each spatial axis.")


def _window_and_result(left: Any, right: Any, arguments: Sequence[Any]) -> tuple[Window, Any]:
    """Returns the window, and a ShapeDtypeStruct with the shape of the result. Unless shapes and
    arguments are clearly right, lax checks them as they were given.
    """
    _, padding, lhs_dilation, *_, precision = arguments
    as_lax_says = isinstance(padding, str) and lhs_dilation is not None
    if not as_lax_says and isinstance(precision, (lax.Precision, NoneType)):
        with contextlib.suppress(Exception):  # lax below raises a better error
            window = window_of(left, right, *arguments)
            shape = window.result_shape(left.shape, right.shape)
            if shape is not None:
                return window, jax.ShapeDtypeStruct(shape, jnp.float32)
    floats = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (left, right)]
    result = jax.eval_shape(lambda a, b: lax.conv_general_dilated(a, b, *arguments), *floats)
    return window_of(left, right, *arguments), result


def _check_scale(name: str, x: QTensor, summed: tuple[int, ...], each_feature: bool) -> None:
    """Checks that the scale of an integer operand can leave the sum."""
    features, *taps = summed
    fits = can_leave_sum(x.groups, (features,)) or each_feature
    if not fits or not shares_scale(x, taps):
        raise fail(
            NAME,
            f"the scale of `{name}` varies along an axis that is summed.",
            given=f"{name}.shape == {x.shape}, scale {x.scale.shape}, summed axes {summed}",
            fix="quantize a kernel with per_axis of its output features, an image with "
            "per_tensor() or per_axis of its batch.",
        )


def _check_blocks(left: QTensor, right: QTensor, window: Window) -> None:
    features = left.scale.shape[window.features], right.scale.shape[window.inputs]
    cuts_features = features != (1, 1) and not window.is_depthwise(left)
    cuts_batch = window.batch_groups > 1 and left.scale.shape[window.batch] != 1
    if (cuts_features and max(window.groups, window.batch_groups) > 1) or cuts_batch:
        raise fail(
            NAME,
            "a scale varies along features or a batch that are in groups.",
            given=f"feature_group_count={window.groups}, batch_group_count={window.batch_groups}",
            fix="quantize the kernel with per_axis of its output features, and the image "
            "per_tensor().",
        )
