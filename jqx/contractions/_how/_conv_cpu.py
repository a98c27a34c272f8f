"""Convolutions by the package jqx-cpu, which are tried first on CPU if it is installed.

If a compiler partitions a program over devices, and in exported functions outside of
`jqx.kernels_in_exports`, the form without kernels is used.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from ... import _package_cpu
from ..._compat_kernels import alone_or_in_parts
from ...kernels._shared import convolution_cpu
from ...numerics._shared import E8M0
from ...tensor import QTensor
from .._integers._bytes import as_int8, longest
from .._what._conv_dimensions import Window
from .._what._convolution import Convolution
from ._blocks import shares_scale, with_own_scales
from ._conv import OP, conv_accumulator, conv_accumulator_depthwise, conv_depthwise, conv_integer
from ._formulation import CPU, formulation
from ._kernels_of_codes import derived_as

FEWEST_OUTPUTS, FEWEST_PRODUCTS = 8, 16
"""Output features of a pixel, and products of a sum: with fewer, gathering the pixels takes longer
than the convolution of XLA. A depthwise convolution gathers nothing.
"""


def _are_bytes(case: Any) -> bool:
    x, q, window = case.lhs, case.rhs, case.how
    if not (_package_cpu.is_installed() and case.are_bytes):
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
    def kernel(lhs: QTensor, rhs: QTensor) -> jax.Array:
        return _by_package(lhs, rhs, window, jnp.float32)

    def plain(lhs: QTensor, rhs: QTensor) -> jax.Array:
        shifted = Convolution(lhs, rhs, window).is_shifted
        return (conv_depthwise if shifted else conv_integer).compute(lhs, rhs, window)

    return derived_as(functools.partial(alone_or_in_parts, kernel, plain), plain)(lhs, rhs)


@formulation(
    "sums to be requantized, where `package_convolution` is the form of the convolution",
    CPU,
    _are_bytes,
    op=f"{OP}:int32",
)
def package_convolution_sums(lhs: QTensor, rhs: QTensor, window: Window) -> jax.Array:
    def kernel(lhs: QTensor, rhs: QTensor) -> jax.Array:
        return _by_package(lhs, rhs, window, jnp.int32)

    def plain(lhs: QTensor, rhs: QTensor) -> jax.Array:
        shifted = Convolution(lhs, rhs, window).is_shifted
        form = conv_accumulator_depthwise if shifted else conv_accumulator
        return form.compute(lhs, rhs, window)

    return alone_or_in_parts(kernel, plain, lhs, rhs)


def _by_package(lhs: QTensor, rhs: QTensor, window: Window, dtype: Any) -> jax.Array:
    """Runs the kernel of the package, for images NHWC and kernels HWIO."""
    lhs = with_own_scales(as_int8(lhs), (window.batch,))
    rhs = with_own_scales(as_int8(rhs), (window.outputs,))
    line = len(window.strides) == 1  # an image of one row
    batch, features, *spatial = window.axes.lhs_spec
    outputs, inputs, *taps = window.axes.rhs_spec
    images = _with_row(jnp.transpose(lhs.values, (batch, *spatial, features)), line, 1)
    kernel = _with_row(jnp.transpose(rhs.values, (*taps, inputs, outputs)), line, 0)
    y = convolution_cpu(
        images,
        *_parameters(lhs, dtype),
        kernel,
        *_parameters(rhs, dtype),
        strides=_of_two(window.strides, line, 1),
        padding=_of_two(window.padding, line, (0, 0)),
        dilation=_of_two(window.rhs_dilation, line, 1),
        groups=window.groups,
        dtype=dtype,
    )
    y = y.reshape(y.shape[0], *y.shape[2:]) if line else y
    batch, features, *places = window.axes.out_spec
    order = [0] * y.ndim
    for source, axis in enumerate((batch, *places, features)):
        order[axis] = source
    return y.transpose(order)


def _with_row(x: jax.Array, line: bool, axis: int) -> jax.Array:
    return jnp.expand_dims(x, axis) if line else x


def _of_two(each: Sequence[Any], line: bool, plain: Any) -> tuple[Any, ...]:
    return (plain, *each) if line else tuple(each)


def _parameters(q: QTensor, dtype: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns scales, if the sums are to be scaled, and zero points, as rows or `None`."""
    scale = q.real_scale().astype(jnp.float32).reshape(1, -1) if dtype == jnp.float32 else None
    return scale, None if q.zero_point is None else q.zero_point.reshape(1, -1)
