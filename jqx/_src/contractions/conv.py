"""The formulations of convolutions of arrays and QTensors."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from .. import package_cpu
from ..checks import is_at_least
from ..compat_kernels import alone_or_in_parts
from ..errors import fail
from ..kernels.products_cpu import convolution_cpu
from ..numerics.exact import common_dtype, power_below
from ..numerics.lookup import E8M0
from ..tensor.layout import Layout
from ..tensor.qtensor import QTensor
from .blocks import (
    cut_of,
    in_order,
    slice_along,
    slice_of,
    times_scales,
    with_own_scales,
    with_own_second_scales,
)
from .dimensions import OperandAxes
from .exact import as_int8, digits_of
from .formulation import CPU, ELSEWHERE, PLATFORMS, formulation
from .kernels import derived_as
from .plain import count_of, is_exact_in, numbers_of
from .problem import Operands, longest, shares_scale

# The axes and the window of a `lax.conv_general_dilated`.


def conv_axes(numbers: lax.ConvDimensionNumbers) -> tuple[OperandAxes, OperandAxes]:
    """Returns the roles of the axes of an image and a kernel."""
    image, kernel = numbers.lhs_spec, numbers.rhs_spec
    return (
        OperandAxes(tuple(image[1:]), tuple(image[:1])),
        OperandAxes(tuple(kernel[1:]), tuple(kernel[:1])),
    )


class Window(NamedTuple):
    """The static arguments of a convolution, normalised.

    Attributes:
      strides: one for each spatial axis.
      padding: (low, high) for each spatial axis.
      lhs_dilation: one for each spatial axis.
      rhs_dilation: one for each spatial axis.
      axes: the dimension numbers of the operands and the result.
      groups: feature groups.
      batch_groups: batch groups.
      precision: of float products.
    """

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    axes: lax.ConvDimensionNumbers
    groups: int = 1
    batch_groups: int = 1
    precision: lax.PrecisionLike = None

    @property
    def batch(self) -> int:
        """The batch axis of the left operand."""
        return self.axes.lhs_spec[0]

    @property
    def features(self) -> int:
        """The feature axis of the left operand."""
        return self.axes.lhs_spec[1]

    @property
    def outputs(self) -> int:
        """The axis of output features of the kernel."""
        return self.axes.rhs_spec[0]

    @property
    def inputs(self) -> int:
        """The axis of input features of the kernel, those of one group."""
        return self.axes.rhs_spec[1]

    @property
    def taps(self) -> tuple[int, ...]:
        """The spatial axes of the kernel."""
        return tuple(self.axes.rhs_spec[2:])

    @property
    def spatial(self) -> tuple[int, ...]:
        """The spatial axes of the left operand."""
        return tuple(self.axes.lhs_spec[2:])

    @property
    def summed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of image and kernel that are summed over: features, then spatial ones."""
        image, kernel = conv_axes(self.axes)
        return image.contracted, kernel.contracted

    def products(self, kernel: Any) -> int:
        """Returns the number of products that are summed for each element of the result."""
        return math.prod(kernel.shape[axis] for axis in self.summed[1])

    def reach(self, kernel: Any) -> list[int]:
        """Returns how many pixels the kernel spans along each spatial axis."""
        pairs = zip(self.taps, self.rhs_dilation, strict=True)
        return [(kernel.shape[axis] - 1) * n + 1 for axis, n in pairs]

    def result_shape(self, lhs: Sequence[int], rhs: Sequence[int]) -> tuple[int, ...] | None:
        """Returns the shape of the result for operands of the same rank; `None` if lax rejects
        them, or if a size is symbolic.
        """
        if not all(isinstance(n, int) for n in (*lhs, *rhs)):
            return None
        batch, features, *pixels = (lhs[axis] for axis in self.axes.lhs_spec)
        outputs, inputs, *taps = (rhs[axis] for axis in self.axes.rhs_spec)
        per_axis = (self.strides, self.padding, self.lhs_dilation, self.rhs_dilation)
        steps = (*self.strides, *self.lhs_dilation, *self.rhs_dilation)
        groups = self.groups, self.batch_groups
        if any(len(entries) != len(taps) for entries in per_axis) or min((*steps, *groups)) < 1:
            return None
        grouped = features == inputs * self.groups and min(groups) == 1
        if not grouped or outputs % max(groups) or batch % self.batch_groups:
            return None
        sizes = []
        for n, tap, stride, (low, high), hole, gap in zip(pixels, taps, *per_axis, strict=True):
            span = _dilated(n, hole) + low + high
            if span < 0:
                return None
            sizes.append(max(0, (span - _dilated(tap, gap)) // stride + 1))
        shape = [0] * len(lhs)
        for axis, n in zip(self.axes.out_spec, (batch // groups[1], outputs, *sizes), strict=True):
            shape[axis] = n
        return tuple(shape)

    def is_depthwise(self, lhs: Any) -> bool:
        """Whether each output feature reads one input feature."""
        return self.groups == lhs.shape[self.features] and self.batch_groups == 1

    def is_dot(self, kernel: Any) -> bool:
        """Whether the convolution is a matrix product of features."""
        is_single_tap = all(kernel.shape[axis] == 1 for axis in self.taps)
        return is_single_tap and not self.pads() and self.groups == self.batch_groups == 1

    def pads(self) -> bool:
        """Whether zeros are added around or between the elements of the left operand."""
        return {(0, 0), *self.padding} != {(0, 0)} or {1, *self.lhs_dilation} != {1}

    def without_padding(self) -> "Window":
        """The window over a left operand that is already padded and dilated."""
        rank = len(self.strides)
        return self._replace(padding=((0, 0),) * rank, lhs_dilation=(1,) * rank)

    def pad_config(self, rank: int) -> list[tuple[int, int, int]]:
        """The padding of the left operand as `lax.pad` takes it."""
        config = [(0, 0, 0)] * rank
        for axis, (low, high), step in zip(
            self.spatial, self.padding, self.lhs_dilation, strict=True
        ):
            config[axis] = (low, high, step - 1)
        return config

    def lhs_to_output(self, x: jax.Array, outputs: int) -> jax.Array:
        """Lines a parameter of the left operand up with the result. The entry of a feature is
        repeated for all outputs of that feature.
        """
        batch, features = x.shape[self.batch], x.shape[self.features]
        x = (
            x.reshape(batch, features)
            if self.batch < self.features
            else x.reshape(features, batch).T
        )
        if features > 1:
            x = jnp.repeat(x, outputs // features, axis=1)
        return self._place(x)

    def rhs_to_output(self, x: jax.Array) -> jax.Array:
        """Lines a parameter of the kernel with one entry for each output up with the result."""
        return self._place(x.reshape(1, -1))

    def _place(self, x: jax.Array) -> jax.Array:
        batch, features, *_ = self.axes.out_spec
        shape = [1] * len(self.axes.out_spec)
        shape[batch], shape[features] = x.shape
        return (x if batch < features else x.T).reshape(shape)


def _dilated(n: int, step: int) -> int:
    """Returns the length of an axis with `step - 1` places between its elements."""
    return (n - 1) * step + 1 if n else 0


def check_ranks(lhs: Any, rhs: Any) -> None:
    if lhs.ndim != rhs.ndim or lhs.ndim < 2:
        raise fail(
            "conv_general_dilated",
            f"the operands have different ranks, or less than two axes: {lhs.shape}, {rhs.shape}.",
            fix="reshape an operand to rank 2 + the number of spatial axes.",
        )


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
    config = window.pad_config(codes.ndim)
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
    _, parts = lax.scan(
        lambda carry, i: (carry, compute(x, slice_of(q, cut, i))), None, jnp.arange(cut.number)
    )
    y = in_order(parts, cut, feature_axis)
    full = y.shape[feature_axis]
    if full == n:
        return y
    tail = compute(x, slice_along(q, axis, full, n - full))
    return jnp.concatenate([y, tail], axis=feature_axis)


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


# A convolution as the planner sees it: image, kernel and window, by shapes and formats only.


MOST_TAPS = 64
"""Up to this number of taps, a depthwise convolution is unrolled, with one product per tap."""


@dataclasses.dataclass(frozen=True)
class Convolution(Operands):
    """An image and a kernel; at least one is a QTensor.

    Attributes:
      lhs: the image, an array or a QTensor.
      rhs: the kernel, an array or a QTensor.
      how: the window.
    """

    how: Window

    @property
    def is_beside_floats(self) -> bool:
        """Whether the kernel is a QTensor and the image an array."""
        return isinstance(self.rhs, QTensor) and not isinstance(self.lhs, QTensor)

    @property
    def is_shifted(self) -> bool:
        """Whether the convolution is depthwise, with few enough taps to be unrolled."""
        taps = math.prod(self.rhs.shape[axis] for axis in self.how.taps)
        return self.how.is_depthwise(self.lhs) and taps <= MOST_TAPS

    @property
    def is_plain(self) -> bool:
        """Whether the kernel has no zero points, and scales that can be applied after the sum."""
        return self.rhs.zero_point is None and shares_scale(self.rhs, self.how.summed[1])


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
        and window.products(q) <= longest(x, q)
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
    shifted = Convolution(lhs, rhs, window).is_shifted
    form = conv_depthwise if shifted else conv_integer
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
    shifted = Convolution(lhs, rhs, window).is_shifted
    form = conv_accumulator_depthwise if shifted else conv_accumulator
    plain = functools.partial(form.compute, window=window)
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
