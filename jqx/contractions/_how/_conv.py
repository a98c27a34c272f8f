"""The formulations of convolutions of arrays and QTensors."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._checks import is_at_least
from ...numerics._shared import common_dtype, power_below
from ...tensor import QTensor
from ...tensor._shared import Layout
from .._integers._bytes import as_int8, longest
from .._integers._integer import digits_of
from .._what._conv_dimensions import Window, padded
from ._blocks import with_own_scales
from ._convert import is_exact_in, numbers_of
from ._formulation import CPU, ELSEWHERE, PLATFORMS, formulation
from ._scales import times_scales
from ._slices import cut_of, in_order, slice_along, slice_of, with_own_second_scales
from ._tiles import count_of

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
    lambda case: case.are_integers and not case.are_bytes,
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
    lambda case: not isinstance(case.rhs, QTensor),
    op=OP,
)
def conv_image(lhs: QTensor, kernel: jax.Array, window: Window) -> jax.Array:
    wide = common_dtype(lhs.dtype, kernel.dtype)
    return lax_conv(lhs.astype(wide).dequantize(), kernel.astype(wide), window, wide)


@formulation(
    "a float operand: the codes of the kernel are converted inside; scales come after",
    ELSEWHERE,
    lambda case: case.is_beside_floats and case.is_plain,
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
    lambda case: case.is_beside_floats,
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
    lambda case: case.is_beside_floats,
    op=OP,
)
def conv_tiles(x: jax.Array, q: QTensor, window: Window) -> jax.Array:
    wide = common_dtype(x.dtype, q.dtype)
    x, axis = x.astype(wide), window.outputs
    q = with_own_second_scales(with_own_scales(q, (axis,)), axis)
    if q.layout is not None and q.layout != Layout(q.layout.packing):
        q = q.unpack()
    n, at = q.shape[axis], window.axes.out_spec[1]
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
    body = lambda carry, i: (carry, compute(x, slice_of(q, cut, i)))  # noqa: E731
    y = in_order(lax.scan(body, None, jnp.arange(cut.number))[1], cut, at)
    full = y.shape[at]
    if full == n:
        return y
    rest = compute(x, slice_along(q, axis, full, n - full))
    return jnp.concatenate([y, rest], axis=at)


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
    limit = longest(lhs, rhs)
    own = (window.batch, window.features) if window.is_depthwise(lhs) else (window.batch,)
    lhs = with_own_scales(as_int8(lhs), own)
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
    place = np.arange(products, dtype=np.int32).reshape(shape)
    zero = jnp.zeros((1,) * rhs.ndim, jnp.int8) if rhs.zero_point is None else rhs.zero_point
    return [
        dataclasses.replace(rhs, values=jnp.where(place // limit == i, rhs.values, zero))
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
        b = window.rhs_to_output(jnp.broadcast_to(b.astype(jnp.int32), _per_output(rhs, window)))
        total = total - b * _window_sums(codes, rhs, inner)
    if a is not None and b is not None:
        total = total + jnp.int32(window.products(rhs)) * a * b
    return total


def _per_output(rhs: QTensor, window: Window) -> tuple[int, ...]:
    return tuple(n if i == window.outputs else 1 for i, n in enumerate(rhs.shape))


def _under_window(lhs: QTensor, rhs: QTensor, window: Window) -> tuple[jax.Array, Window]:
    """Returns the codes of an image and the window over them. The window itself pads them if that
    is as fast: if the padding is zero, and XLA on CPU still passes the sums to its int8 library.

    XLA does not use the library if there are more taps than pixels, because it then swaps image and
    kernel, or if the padding is as large as the reach of the window.
    """
    pixels = math.prod(lhs.shape[axis] for axis in window.spatial)
    taps = math.prod(rhs.shape[axis] for axis in window.taps)
    few = all(
        min(pair) >= 0 and sum(pair) < reach
        for pair, reach in zip(window.padding, window.reach(rhs), strict=True)
    )
    plain = few and all(n == 1 for n in window.lhs_dilation)
    if lhs.zero_point is None and plain and not is_at_least(taps, pixels + 1):
        return lhs.values, window
    return padded(lhs.values, lhs.zero_point, window), window.without_padding()


def _int8_conv(codes: jax.Array, kernel: jax.Array, window: Window) -> jax.Array:
    # XLA on CPU would fold padding into the window: see `_xla_cpu`.
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
    times = rhs.shape[window.outputs] // shape[window.outputs]
    return jnp.repeat(sums, times, axis=window.axes.out_spec[1])


def _kernel_sums(rhs: QTensor, window: Window) -> jax.Array:
    """Returns the sums of the codes of each output feature, lined up with the result. They are the
    convolution of an image of ones (see `_xla_cpu`).
    """
    ones = (1,) * len(window.strides)
    shape = [0] * rhs.ndim
    shape[window.batch] = window.batch_groups
    shape[window.features] = rhs.shape[window.inputs] * window.groups
    for axis, tap in zip(window.spatial, window.taps, strict=True):
        shape[axis] = rhs.shape[tap]
    inner = window.without_padding()._replace(strides=ones, rhs_dilation=ones)
    return _int8_conv(jnp.ones(shape, jnp.int8), rhs.values, inner)


def _shifted(lhs: QTensor, rhs: QTensor, window: Window) -> jax.Array:
    """Returns the result of `_native`, for a kernel with one input feature, as a sum over its taps
    of the tap times the shifted image.
    """
    codes = padded(lhs.values, lhs.zero_point, window)
    zero = None if lhs.zero_point is None else lhs.zero_point.astype(jnp.int32)
    products = [
        _under_tap(codes, zero, rhs, place, window) * _tap(rhs, place, window)
        for place in itertools.product(*(range(rhs.shape[axis]) for axis in window.taps))
    ]
    total = functools.reduce(jnp.add, products)
    to_source = dict(zip(window.axes.out_spec, window.axes.lhs_spec, strict=True))
    return total.transpose([to_source[axis] for axis in range(total.ndim)])


def _under_tap(
    codes: jax.Array,
    zero: jax.Array | None,
    rhs: QTensor,
    place: tuple[int, ...],
    window: Window,
) -> jax.Array:
    """Returns the pixels under one tap of the kernel, minus zero points, per output feature."""
    start, limit, strides = [0] * codes.ndim, list(codes.shape), [1] * codes.ndim
    for i, (axis, reach) in enumerate(zip(window.spatial, window.reach(rhs), strict=True)):
        start[axis] = place[i] * window.rhs_dilation[i]
        strides[axis] = window.strides[i]
        count = (codes.shape[axis] - reach) // strides[axis] + 1
        limit[axis] = start[axis] + (count - 1) * strides[axis] + 1
    part = lax.slice(codes, start, limit, strides).astype(jnp.int32)
    part = part if zero is None else part - zero
    times = rhs.shape[window.outputs] // codes.shape[window.features]
    return jnp.repeat(part, times, axis=window.features) if times > 1 else part


def _tap(rhs: QTensor, place: tuple[int, ...], window: Window) -> jax.Array:
    """Returns a tap minus its zero points, lined up with the features of the image."""
    at = {window.inputs: 0, **dict(zip(window.taps, place, strict=True))}
    tap = rhs.values[tuple(at.get(i, slice(None)) for i in range(rhs.ndim))].astype(jnp.int32)
    if rhs.zero_point is not None:
        tap = tap - rhs.zero_point.astype(jnp.int32).reshape(-1)
    shape = [tap.size if i == window.features else 1 for i in range(rhs.ndim)]
    return tap.reshape(shape)
