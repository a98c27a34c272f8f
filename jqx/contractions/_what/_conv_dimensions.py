"""The axes and the window of a `lax.conv_general_dilated`."""

import math
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._errors import fail
from ._axes import OperandAxes


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
      rhs_dilation: likewise.
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
        each = (self.strides, self.padding, self.lhs_dilation, self.rhs_dilation)
        steps = (*self.strides, *self.lhs_dilation, *self.rhs_dilation)
        groups = self.groups, self.batch_groups
        if any(len(entries) != len(taps) for entries in each) or min((*steps, *groups)) < 1:
            return None
        grouped = features == inputs * self.groups and min(groups) == 1
        if not grouped or outputs % max(groups) or batch % self.batch_groups:
            return None
        sizes = []
        for n, tap, stride, (low, high), hole, apart in zip(pixels, taps, *each, strict=True):
            span = _dilated(n, hole) + low + high
            if span < 0:
                return None
            sizes.append(max(0, (span - _dilated(tap, apart)) // stride + 1))
        shape = [0] * len(lhs)
        for axis, n in zip(self.axes.out_spec, (batch // groups[1], outputs, *sizes), strict=True):
            shape[axis] = n
        return tuple(shape)

    def is_depthwise(self, lhs: Any) -> bool:
        """Whether each output feature reads one input feature."""
        return self.groups == lhs.shape[self.features] and self.batch_groups == 1

    def is_dot(self, kernel: Any) -> bool:
        """Whether the convolution is a matrix product of features."""
        plain = all(pair == (0, 0) for pair in self.padding)
        dilated = any(n != 1 for n in self.lhs_dilation)
        one = all(kernel.shape[axis] == 1 for axis in self.taps)
        return one and plain and not dilated and self.groups == self.batch_groups == 1

    def pads(self) -> bool:
        """Whether zeros are added around or between the elements of the left operand."""
        return any(pair != (0, 0) for pair in self.padding) or any(
            n != 1 for n in self.lhs_dilation
        )

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
    if not lhs.ndim == rhs.ndim >= 2:
        raise fail(
            "conv_general_dilated",
            "the operands have different ranks, or less than two axes.",
            given=f"lhs.shape == {lhs.shape}, rhs.shape == {rhs.shape}",
            expected="operands of rank 2 + the number of spatial axes",
            fix="reshape an operand.",
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
    holes, apart = (
        (1,) * rank if dilation is None else tuple(map(index, dilation))
        for dilation in (lhs_dilation, rhs_dilation)
    )
    if isinstance(padding, str):
        kernel = [rhs.shape[axis] for axis in axes.rhs_spec[2:]]
        reach = [(k - 1) * d + 1 if k else 0 for k, d in zip(kernel, apart, strict=True)]
        image = [lhs.shape[axis] for axis in axes.lhs_spec[2:]]
        padding = lax.padtype_to_pads(image, reach, strides, padding)
    pairs = tuple((index(low), index(high)) for low, high in padding)
    return Window(
        tuple(map(index, strides)),
        pairs,
        holes,
        apart,
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
