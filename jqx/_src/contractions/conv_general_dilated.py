"""`conv_general_dilated` on arrays and QTensors."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from operator import index
from types import NoneType
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import DTypeLike

from .. import package_cpu
from ..checks import as_real, called, is_at_least
from ..compat_kernels import alone_or_in_parts
from ..errors import fail
from ..kernels.products_cpu import convolution_cpu
from ..numerics.exact import common_dtype, power_below
from ..numerics.lookup import E8M0
from ..tensor.layout import Layout
from ..tensor.qtensor import QTensor
from .blocks import (
    cut_of,
    joined,
    slice_along,
    slice_of,
    times_scales,
    with_own_scales,
    with_own_second_scales,
)
from .dot_general import Operand, as_operand, dot_general, result_dtype
from .formulation import CPU, ELSEWHERE, PLATFORMS, Family, Planner, formulation
from .integer_products import as_int8, check_splittable, digits_of
from .kernels import derived_as
from .plain import count_of, is_exact_in, numbers_of
from .problem import (
    Convolution,
    Window,
    can_leave_sum,
    check_no_offset_or_order,
    is_integer,
    max_products_in_int32,
    shares_scale,
)
from .requantize import Asked, Output, Requantization, as_asked, check_requantized, requantize


def window_of(
    lhs: Any,
    rhs: Any,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    groups: int,
    batch_groups: int,
    precision: lax.PrecisionLike,
) -> Window:
    """Reads the arguments of `lax.conv_general_dilated`."""
    axes = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    rank = lhs.ndim - 2
    holes, kernel_holes = (
        (1,) * rank if dilation is None else tuple(map(index, dilation))
        for dilation in (lhs_dilation, rhs_dilation)
    )
    if isinstance(padding, str):
        kernel = [rhs.shape[axis] for axis in axes.rhs_spec[2:]]
        reach = [(k - 1) * d + 1 if k else 0 for k, d in zip(kernel, kernel_holes, strict=True)]
        image = [lhs.shape[axis] for axis in axes.lhs_spec[2:]]
        padding = lax.padtype_to_pads(image, reach, strides, padding)
    pairs = tuple((index(low), index(high)) for low, high in padding)
    return Window(
        tuple(map(index, strides)),
        pairs,
        holes,
        kernel_holes,
        axes,
        index(groups),
        index(batch_groups),
        precision,
    )


def padded(codes: jax.Array, zero: jax.Array | None, window: Window) -> jax.Array:
    """Pads and dilates codes with the code of zero."""
    if not window.pads():
        return codes
    config = [(0, 0, 0)] * codes.ndim
    for axis, pair, step in zip(window.spatial, window.padding, window.lhs_dilation, strict=True):
        config[axis] = (*pair, step - 1)
    if zero is None or zero.size == 1:
        fill = jnp.zeros((), codes.dtype) if zero is None else zero.reshape(()).astype(codes.dtype)
        return lax.pad(codes, fill, config)
    inside = lax.pad(np.ones(codes.shape, bool), np.zeros((), bool), config)
    return jnp.where(inside, lax.pad(codes, jnp.zeros((), codes.dtype), config), zero)


OP = "conv_general_dilated"


@formulation(
    "integers: convolved as int8 into int32, exactly; padded with the zero point",
    PLATFORMS,
    lambda case: case.are_bytes,
    op=OP,
)
def conv_integer(lhs: QTensor, rhs: QTensor, window: Window) -> jax.Array:
    return _conv_integer(lhs, rhs, window, _native)


@formulation(
    "integers, each output of one input feature, on CPU: shifted products are summed in int32, "
    "some forty times as fast as XLA's convolution",
    CPU,
    lambda case: case.are_bytes and case.is_shifted,
    op=OP,
)
def conv_depthwise(lhs: QTensor, rhs: QTensor, window: Window) -> jax.Array:
    return _conv_integer(lhs, rhs, window, _shifted)


@formulation(
    "integers of more than 8 bits: split into int8 digits, each convolved exactly",
    PLATFORMS,
    lambda case: not case.are_bytes,
    op=OP,
)
def conv_digits(lhs: QTensor, rhs: QTensor, window: Window) -> jax.Array:
    return functools.reduce(
        jnp.add,
        [
            _conv_integer(left, right, window, _native) * 256.0 ** (i + j)
            for i, left in enumerate(digits_of(lhs))
            for j, right in enumerate(digits_of(rhs))
        ],
    )


@formulation(
    "integers whose sums are requantized by integers: int8 into int32, zero points corrected",
    PLATFORMS,
    lambda case: case.are_bytes,
    op=f"{OP}:int32",
)
def conv_accumulator(lhs: QTensor, rhs: QTensor, window: Window) -> jax.Array:
    return _native(as_int8(lhs), as_int8(rhs), window)


@formulation(
    "sums to be requantized, on CPU where `conv_depthwise` is the form of the convolution",
    CPU,
    lambda case: case.are_bytes and case.is_shifted,
    op=f"{OP}:int32",
)
def conv_accumulator_depthwise(lhs: QTensor, rhs: QTensor, window: Window) -> jax.Array:
    return _shifted(as_int8(lhs), as_int8(rhs), window)


@formulation(
    "an image of codes and a kernel of floats: the image is dequantized",
    PLATFORMS,
    lambda case: True,
    op=OP,
)
def conv_image(lhs: QTensor, kernel: jax.Array, window: Window) -> jax.Array:
    wide = common_dtype(lhs.dtype, kernel.dtype)
    return lax_conv(lhs.astype(wide).dequantize(), kernel.astype(wide), window, wide)


@formulation(
    "a float operand: the codes of the kernel are converted inside; scales come after",
    ELSEWHERE,
    lambda case: case.is_plain,
    op=OP,
)
def conv_convert(x: jax.Array, q: QTensor, window: Window) -> jax.Array:
    wide = common_dtype(x.dtype, q.dtype)
    q = with_own_scales(q.unpack(), (window.outputs,))
    dtype = x.dtype if is_exact_in(q, x.dtype) else wide
    # Codes are scaled to about the size of the real values, so that 16-bit sums are in range if the
    # results are. float16 is subnormal below 2**-14, but exact down to 2**-24.
    scale = q.real_scale().astype(wide)
    power = power_below(scale)
    power = jnp.clip(power, 2.0**-24, 2.0**8) if dtype == jnp.float16 else power
    kernel = (numbers_of(q, wide) * power).astype(dtype)
    y = _float_conv(x.astype(dtype), kernel, window, wide)
    return y * window.rhs_to_output(scale / power)


@formulation(
    "a float operand and a kernel with zero points or blocks: the kernel is dequantized",
    ELSEWHERE,
    lambda case: True,
    op=OP,
)
def conv_dequantize(x: jax.Array, q: QTensor, window: Window) -> jax.Array:
    wide = common_dtype(x.dtype, q.dtype)
    kernel = q.astype(wide).dequantize()
    if x.dtype != jnp.float16:
        return _float_conv(x, kernel.astype(x.dtype), window, wide)
    # Values out of the range of float16 are scaled into it, as far as sums allow.
    axes = window.summed[1]
    largest = jnp.max(jnp.abs(lax.stop_gradient(kernel)), axis=axes, keepdims=True, initial=0)
    power = power_below(largest)
    power = power / jnp.clip(power, 1 / 2.0 ** (window.products(q).bit_length() + 1), 2.0**14)
    y = _float_conv(x, (kernel / power).astype(x.dtype), window, wide)
    return y * window.rhs_to_output(power)


@formulation(
    "a float operand on CPU: the kernel is dequantized, some output features at a time",
    CPU,
    lambda case: True,
    op=OP,
)
def conv_tiles(x: jax.Array, q: QTensor, window: Window) -> jax.Array:
    wide = common_dtype(x.dtype, q.dtype)
    x, axis = x.astype(wide), window.outputs
    q = with_own_second_scales(with_own_scales(q, (axis,)), axis)
    if q.layout is not None and q.layout != Layout(q.layout.packing):
        q = q.unpack()
    n, feature_axis = q.shape[axis], window.axes.out_spec[1]
    count = count_of(q, x.size)

    @jax.checkpoint
    def compute(x: jax.Array, tile: QTensor) -> jax.Array:
        return _float_conv(x, tile.astype(wide).dequantize(), window, wide)

    if window.groups > 1 or window.batch_groups > 1 or not 1 < count <= n / 2:
        return compute(x, q)
    cut = cut_of(q, axis, count)
    if cut is None:  # packed so that it cannot be cut
        q = q.unpack()
        cut = cut_of(q, axis, count)
        assert cut is not None
    tail = compute(x, slice_along(q, axis, cut.full, n - cut.full)) if cut.full < n else None
    return joined(lambda i: compute(x, slice_of(q, cut, i)), cut, feature_axis, tail)


def _float_conv(x: jax.Array, kernel: jax.Array, window: Window, dtype: Any) -> jax.Array:
    """Returns the convolution of two arrays, with sums and result in a dtype."""
    if x.dtype != dtype and kernel.dtype == x.dtype:
        return lax_conv(x, kernel, window, None).astype(dtype)
    return lax_conv(x, kernel, window, dtype)


def lax_conv(x: Any, kernel: Any, window: Window, dtype: Any) -> jax.Array:
    """Returns the convolution of two arrays by lax."""
    return lax.conv_general_dilated(
        x,
        kernel,
        window.strides,
        window.padding,
        lhs_dilation=window.lhs_dilation,
        rhs_dilation=window.rhs_dilation,
        dimension_numbers=window.axes,
        feature_group_count=window.groups,
        batch_group_count=window.batch_groups,
        precision=window.precision,
        preferred_element_type=dtype,
    )


def _conv_integer(lhs: QTensor, rhs: QTensor, window: Window, accumulate: Any) -> jax.Array:
    limit = max_products_in_int32(lhs, rhs)
    own_axes = (window.batch, window.features) if window.is_depthwise(lhs) else (window.batch,)
    lhs = with_own_scales(as_int8(lhs), own_axes)
    rhs = with_own_scales(as_int8(rhs), (window.outputs,))
    wide = common_dtype(lhs.real_scale().dtype, rhs.real_scale().dtype)
    parts = []
    for left, right in channel_blocks(lhs, rhs, window):
        runs = [accumulate(left, run, window) for run in in_runs(right, window, limit)]
        y = functools.reduce(jnp.add, (run.astype(wide) for run in runs))
        scale = window.lhs_to_output(left.real_scale(), right.shape[window.outputs])
        parts.append(times_scales(y, scale, window.rhs_to_output(right.real_scale())))
    return functools.reduce(jnp.add, parts)


def channel_blocks(lhs: QTensor, rhs: QTensor, window: Window) -> list[tuple[QTensor, QTensor]]:
    """Returns operands cut along the input features where a scale changes."""
    n = rhs.shape[window.inputs]
    sizes = [
        q.groups.sizes[axis]
        for q, axis in ((lhs, window.features), (rhs, window.inputs))
        if q.groups.sizes[axis] < q.shape[axis] and not window.is_depthwise(lhs)
    ]
    size = math.gcd(*sizes) if sizes else n
    if size >= n:
        return [(lhs, rhs)]
    parts = []
    for start in range(0, n, size):
        cut = slice(start, start + size)
        left = lhs[(slice(None),) * window.features + (cut,)]
        parts.append((left, rhs[(slice(None),) * window.inputs + (cut,)]))
    return parts


def in_runs(rhs: QTensor, window: Window, limit: int) -> list[QTensor]:
    """Splits a kernel into kernels of at most `limit` products each, whose results add up to that
    of the whole. In each of them, all other codes are zero points.
    """
    products = window.products(rhs)
    if products <= limit:
        return [rhs]
    shape = [1 if axis == window.outputs else n for axis, n in enumerate(rhs.shape)]
    tap_numbers = np.arange(products, dtype=np.int32).reshape(shape)
    zero = jnp.zeros((1,) * rhs.ndim, jnp.int8) if rhs.zero_point is None else rhs.zero_point
    return [
        dataclasses.replace(rhs, values=jnp.where(tap_numbers // limit == i, rhs.values, zero))
        for i in range(math.ceil(products / limit))
    ]


def _native(lhs: QTensor, rhs: QTensor, window: Window) -> jax.Array:
    """Returns the int32 convolution of int8 codes minus their zero points."""
    a, b = lhs.zero_point, rhs.zero_point
    codes, inner = _under_window(lhs, rhs, window)
    total = _int8_conv(codes, rhs.values, inner)
    outputs = rhs.shape[window.outputs]
    if a is not None:
        a = window.lhs_to_output(a.astype(jnp.int32), outputs)
        total = total - a * _kernel_sums(rhs, window)
    if b is not None:
        shape = [n if axis == window.outputs else 1 for axis, n in enumerate(rhs.shape)]
        b = window.rhs_to_output(jnp.broadcast_to(b.astype(jnp.int32), shape))
        total = total - b * _window_sums(codes, rhs, inner)
    if a is not None and b is not None:
        total = total + jnp.int32(window.products(rhs)) * a * b
    return total


def _under_window(lhs: QTensor, rhs: QTensor, window: Window) -> tuple[jax.Array, Window]:
    """Returns the codes of an image and the window over them. The window itself pads them if that
    is as fast: if the padding is zero, and XLA on CPU still passes the sums to its int8 library.

    XLA does not use the library if there are more taps than pixels, because it then swaps image and
    kernel, or if the padding is as large as the reach of the window.
    """
    pixels = math.prod(lhs.shape[axis] for axis in window.spatial)
    taps = math.prod(rhs.shape[axis] for axis in window.taps)
    pads_little = all(
        min(pair) >= 0 and sum(pair) < reach
        for pair, reach in zip(window.padding, window.reach(rhs), strict=True)
    )
    plain = pads_little and all(n == 1 for n in window.lhs_dilation)
    if lhs.zero_point is None and plain and not is_at_least(taps, pixels + 1):
        return lhs.values, window
    return padded(lhs.values, lhs.zero_point, window), window.without_padding()


def _int8_conv(codes: jax.Array, kernel: jax.Array, window: Window) -> jax.Array:
    # XLA on CPU would fold padding into the window: see `xla_cpu`.
    codes, kernel = lax.optimization_barrier((codes, kernel))

    def as_floats(codes: jax.Array, kernel: jax.Array) -> jax.Array:
        # GPU libraries accumulate int8 products in int32, and return the sums as float32.
        return lax_conv(codes, kernel, window, jnp.float32).astype(jnp.int32)

    return lax.platform_dependent(
        codes,
        kernel,
        cuda=as_floats,
        rocm=as_floats,
        default=lambda codes, kernel: lax_conv(codes, kernel, window, jnp.int32),
    )


def _window_sums(codes: jax.Array, rhs: QTensor, window: Window) -> jax.Array:
    """Returns the sums of the codes under the kernel, for each output feature."""
    shape = list(rhs.shape)
    shape[window.outputs] = window.groups * window.batch_groups
    sums = _int8_conv(codes, jnp.ones(shape, jnp.int8), window)
    repeats = rhs.shape[window.outputs] // shape[window.outputs]
    return jnp.repeat(sums, repeats, axis=window.axes.out_spec[1])


def _kernel_sums(rhs: QTensor, window: Window) -> jax.Array:
    """Returns the sums of the codes of each output feature, lined up with the result. They are the
    convolution of an image of ones (see `xla_cpu`).
    """
    unit_steps = (1,) * len(window.strides)
    shape = [0] * rhs.ndim
    shape[window.batch] = window.batch_groups
    shape[window.features] = rhs.shape[window.inputs] * window.groups
    for axis, tap in zip(window.spatial, window.taps, strict=True):
        shape[axis] = rhs.shape[tap]
    inner = window.without_padding()._replace(strides=unit_steps, rhs_dilation=unit_steps)
    return _int8_conv(jnp.ones(shape, jnp.int8), rhs.values, inner)


def _shifted(lhs: QTensor, rhs: QTensor, window: Window) -> jax.Array:
    """Returns the result of `_native`, for a kernel with one input feature, as a sum over its taps
    of the tap times the shifted image.
    """
    codes = padded(lhs.values, lhs.zero_point, window)
    zero = None if lhs.zero_point is None else lhs.zero_point.astype(jnp.int32)
    products = [
        _under_tap(codes, zero, rhs, position, window) * _tap(rhs, position, window)
        for position in itertools.product(*(range(rhs.shape[axis]) for axis in window.taps))
    ]
    total = functools.reduce(jnp.add, products)
    to_source = dict(zip(window.axes.out_spec, window.axes.lhs_spec, strict=True))
    return total.transpose([to_source[axis] for axis in range(total.ndim)])


def _under_tap(
    codes: jax.Array,
    zero: jax.Array | None,
    rhs: QTensor,
    position: tuple[int, ...],
    window: Window,
) -> jax.Array:
    """Returns the pixels under one tap of the kernel, minus zero points, per output feature."""
    start, limit, strides = [0] * codes.ndim, list(codes.shape), [1] * codes.ndim
    for i, (axis, reach) in enumerate(zip(window.spatial, window.reach(rhs), strict=True)):
        start[axis] = position[i] * window.rhs_dilation[i]
        strides[axis] = window.strides[i]
        count = (codes.shape[axis] - reach) // strides[axis] + 1
        limit[axis] = start[axis] + (count - 1) * strides[axis] + 1
    part = lax.slice(codes, start, limit, strides).astype(jnp.int32)
    part = part if zero is None else part - zero
    repeats = rhs.shape[window.outputs] // codes.shape[window.features]
    return jnp.repeat(part, repeats, axis=window.features) if repeats > 1 else part


def _tap(rhs: QTensor, position: tuple[int, ...], window: Window) -> jax.Array:
    """Returns a tap minus its zero points, lined up with the features of the image."""
    fixed = {window.inputs: 0, **dict(zip(window.taps, position, strict=True))}
    tap = rhs.values[tuple(fixed.get(i, slice(None)) for i in range(rhs.ndim))].astype(jnp.int32)
    if rhs.zero_point is not None:
        tap = tap - rhs.zero_point.astype(jnp.int32).reshape(-1)
    shape = [tap.size if i == window.features else 1 for i in range(rhs.ndim)]
    return tap.reshape(shape)


# Convolutions by the package jqx-cpu, which are tried first on CPU if it is installed.
#
# If a compiler partitions a program over devices, and in exported functions outside of
# `jqx.kernels_in_exports`, the form without kernels is used.


FEWEST_OUTPUTS, FEWEST_PRODUCTS = 8, 16
"""Output features of a pixel, and products of a sum: with fewer, gathering the pixels takes longer
than the convolution of XLA. A depthwise convolution gathers nothing.
"""


def _are_bytes(case: Any) -> bool:
    x, q, window = case.lhs, case.rhs, case.how
    if not (package_cpu.is_installed() and case.are_bytes):
        return False
    if any(export.is_symbolic_dim(n) for n in (*x.shape, *q.shape)):
        return False
    of_image, of_kernel = window.summed
    depthwise = window.is_depthwise(x) and window.groups > 1
    large = q.shape[window.outputs] >= FEWEST_OUTPUTS and window.products(q) >= FEWEST_PRODUCTS
    return (
        (depthwise or large)
        and len(window.strides) in (1, 2)
        and all(n == 1 for n in window.lhs_dilation)
        and window.batch_groups == 1
        and shares_scale(x, of_image)
        and shares_scale(q, of_kernel)
        and x.scale.dtype in (E8M0, jnp.float32)
        and q.scale.dtype in (E8M0, jnp.float32)
        and window.products(q) <= max_products_in_int32(x, q)
    )


@formulation(
    "codes times codes of 8 bits, with one or two spatial axes, if jqx-cpu is installed: its "
    "kernel gathers the pixels under the window, multiplies them exactly, and scales the sums as "
    "it writes them",
    CPU,
    _are_bytes,
    op=OP,
)
def package_convolution(lhs: QTensor, rhs: QTensor, window: Window) -> jax.Array:
    form = conv_depthwise if Convolution(lhs, rhs, window).is_shifted else conv_integer
    plain = functools.partial(form.compute, window=window)
    kernel = functools.partial(_by_package, window=window, dtype=jnp.float32)
    return derived_as(functools.partial(alone_or_in_parts, kernel, plain), plain)(lhs, rhs)


@formulation(
    "sums to be requantized, where `package_convolution` is the form of the convolution",
    CPU,
    _are_bytes,
    op=f"{OP}:int32",
)
def package_convolution_sums(lhs: QTensor, rhs: QTensor, window: Window) -> jax.Array:
    convolve = _shifted if Convolution(lhs, rhs, window).is_shifted else _native

    def plain(lhs: QTensor, rhs: QTensor) -> jax.Array:
        return convolve(as_int8(lhs), as_int8(rhs), window)

    kernel = functools.partial(_by_package, window=window, dtype=jnp.int32)
    return alone_or_in_parts(kernel, plain, lhs, rhs)


def _by_package(lhs: QTensor, rhs: QTensor, window: Window, dtype: Any) -> jax.Array:
    """Runs the kernel of the package, for images NHWC and kernels HWIO."""
    lhs = with_own_scales(as_int8(lhs), (window.batch,))
    rhs = with_own_scales(as_int8(rhs), (window.outputs,))
    is_line = len(window.strides) == 1  # an image of one row
    batch, features, *spatial = window.axes.lhs_spec
    outputs, inputs, *taps = window.axes.rhs_spec
    images = jnp.transpose(lhs.values, (batch, *spatial, features))
    kernel = jnp.transpose(rhs.values, (*taps, inputs, outputs))
    strides, padding, dilation = window.strides, window.padding, window.rhs_dilation
    if is_line:
        images, kernel = jnp.expand_dims(images, 1), jnp.expand_dims(kernel, 0)
        strides, padding, dilation = (1, *strides), ((0, 0), *padding), (1, *dilation)
    y = convolution_cpu(
        images,
        *_parameters(lhs, dtype),
        kernel,
        *_parameters(rhs, dtype),
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=window.groups,
        dtype=dtype,
    )
    y = y.reshape(y.shape[0], *y.shape[2:]) if is_line else y
    batch, features, *spatial_axes = window.axes.out_spec
    order = [0] * y.ndim
    for source, axis in enumerate((batch, *spatial_axes, features)):
        order[axis] = source
    return y.transpose(order)


def _parameters(q: QTensor, dtype: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns scales, if the sums are to be scaled, and zero points, as rows or `None`."""
    scale = q.real_scale().astype(jnp.float32).reshape(1, -1) if dtype == jnp.float32 else None
    return scale, None if q.zero_point is None else q.zero_point.reshape(1, -1)


@formulation(
    "integers and a kernel of one tap, if jqx-cpu convolves on CPU: on other platforms, the "
    "features are contracted as a matrix product",
    ELSEWHERE,
    lambda case: case.are_bytes and case.how.is_dot(case.rhs),
    op=OP,
)
def conv_dot(lhs: QTensor, rhs: QTensor, window: Window) -> jax.Array:
    return _as_dot(lhs, rhs, window, common_dtype(lhs.dtype, rhs.dtype))


CONVOLUTIONS = Planner(
    OP,
    Family(
        lambda case: case.are_integers,
        (conv_digits, package_convolution, conv_dot, conv_depthwise, conv_integer),
    ),
    Family(lambda case: case.is_beside_floats, (conv_tiles, conv_convert, conv_dequantize)),
    conv_image,
)

SUMS = Planner(
    f"{OP}:int32", package_convolution_sums, conv_accumulator_depthwise, conv_accumulator
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
    check_no_offset_or_order("conv_general_dilated", left, right)
    floats = not any(isinstance(x, QTensor) for x in (left, right))
    if floats and not isinstance(output, Requantization):
        y = lax.conv_general_dilated(left, right, *arguments, preferred_element_type)
        return as_asked(OP, y, output)
    if left.ndim != right.ndim or left.ndim < 2:
        problem = "the operands have different ranks, or less than two axes: "
        problem += f"{left.shape}, {right.shape}."
        raise fail(OP, problem, fix="reshape an operand to rank 2 + the number of spatial axes.")
    for name, entries in (("lhs_dilation", lhs_dilation), ("rhs_dilation", rhs_dilation)):
        if entries is not None and len(entries) != left.ndim - 2:
            problem = f"`{name}` has {len(entries)} entries, for {left.ndim - 2} spatial axes."
            raise fail(OP, problem, fix="pass one entry for each spatial axis.")
    window, result = _window_and_result(left, right, arguments)
    for name, x in (("lhs", left), ("rhs", right)):
        if not isinstance(x, QTensor):
            as_real(OP, name, x)
    dtype = result_dtype(OP, left, right, preferred_element_type)
    if is_integer(left) and is_integer(right):
        check_splittable(OP, left, right)
        of_image, of_kernel = window.summed
        _check_scale("lhs", left, of_image, window.is_depthwise(left))
        _check_scale("rhs", right, of_kernel, False)
        _check_blocks(left, right, window)
    left = left.unpack() if isinstance(left, QTensor) else left
    if isinstance(output, Requantization):
        right = right.unpack() if isinstance(right, QTensor) else right
        products = window.products(right)
        check_requantized(OP, left, right, window.summed, products, preferred_element_type)
        return requantize(SUMS.compute(Convolution(left, right, window)), output)
    is_empty = any(0 in x.shape for x in (result, left, right))
    y = jnp.zeros(result.shape) if is_empty else _convolve(left, right, window, dtype)
    y = y.astype(dtype)
    assert y.shape == result.shape
    return as_asked(OP, y, output)


def _convolve(left: Any, right: Any, window: Window, dtype: Any) -> jax.Array:
    if not isinstance(right, QTensor):
        return CONVOLUTIONS.compute(Convolution(left, right, window))
    wide = common_dtype(left.dtype, right.dtype)
    if isinstance(left, QTensor) and not (is_integer(left) and is_integer(right)):
        left = left.astype(wide).dequantize()
    as_dot = window.is_dot(right)
    if as_dot or isinstance(left, QTensor):
        right = right.unpack()  # otherwise it is unpacked during the conversion
    case = Convolution(left, right, window)
    if as_dot and not package_convolution.applies(case):
        return _as_dot(left, right, window, wide)
    narrow = not isinstance(left, QTensor) and left.dtype == jnp.float16
    if narrow and dtype != jnp.float16:
        left = left.astype(wide)  # float16 sums would overflow where the result does not
    return CONVOLUTIONS.compute(Convolution(left, right, window))


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
            OP,
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
            OP,
            "a scale varies along features or a batch that are in groups.",
            given=f"feature_group_count={window.groups}, batch_group_count={window.batch_groups}",
            fix="quantize the kernel with per_axis of its output features, and the image "
            "per_tensor().",
        )
