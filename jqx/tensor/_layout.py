"""The memory layout of the codes of a QTensor: packed, swapped, as int8 or uint4, for a kernel."""

import dataclasses
from collections.abc import Container, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._added import added
from .._errors import fail
from ..numerics import Block, Integer, QType, format_of
from ..numerics._shared import (
    is_signed,
    pack_bits,
    pack_neighbours,
    unpack_bits,
    unpack_neighbours,
)
from ._order import check_same_axis, permuted_axis

T = TypeVar("T", bound=Any)
"""A QTensor; its own file imports this one."""


KERNELS = ("tpu", "gpu", "cpu")
"""Platforms with kernels of jqx."""


class Packing(NamedTuple):
    """Packing of codes along one axis; see `jqx.numerics` for the order of the bits.

    Attributes:
      axis: the packed axis of the real array, counted from the last (-1).
      length: its length in codes.
    """

    axis: int
    length: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """A memory layout other than the default: one element of `storage` per code, in the order of
    the shape.

    Axes count from the last, so that the layout stays valid when a leading axis is mapped over or
    indexed.

    Attributes:
      packing: how codes of less than 8 bits are packed into bytes without gaps; `None` if they are
        not packed. For a kernel on CPU, the codes in a byte are neighbours along the axis.
      swapped: whether the last two axes of `values` are swapped; those of shape, scale and zero
        point are not.
      int8: whether integers of another dtype of 8 bits or fewer are stored as int8; uint8 codes
        are stored minus 128.
      uint4: whether codes of 4 bits or fewer that are not integers, such as nf4 and float4, are
        stored as uint4.
      kernel: `"tpu"`, `"gpu"` or `"cpu"` if a kernel of jqx reads the codes on that platform; else
        an empty string.
    """

    packing: Packing | None = None
    swapped: bool = False
    int8: bool = False
    uint4: bool = added(False)
    kernel: str = added("")

    @property
    def depth(self) -> int:
        """How many of the last axes the layout affects: 0 if it only changes the dtype."""
        packed = 0 if self.packing is None else -self.packing.axis
        return max(packed, 2 if self.swapped else 0)

    @property
    def stored_axis(self) -> int | None:
        """The packed axis of `values`, counted from the last."""
        if self.packing is None:
            return None
        return _other(self.packing.axis) if self.swapped else self.packing.axis

    def follows(self, moved: Container[int], cut: Container[int]) -> bool:
        """Whether views can keep it that move some axes, and take parts of others; both are counted
        from the last. Where two axes are swapped, parts are taken in the order of the values.
        """
        whole = self.transposed() if self.swapped else self
        fixed = [_other(axis) if self.swapped else axis for axis in range(-whole.depth, 0)]
        still = not any(axis in moved for axis in range(-self.depth, 0))
        return still and not any(axis in cut for axis in fixed)

    def transposed(self) -> "Layout":
        """Returns the layout of the same values under a shape whose last two axes are swapped."""
        packing = self.packing
        if packing is not None:
            packing = Packing(_other(packing.axis), packing.length)
        return dataclasses.replace(self, packing=packing, swapped=not self.swapped)

    def __str__(self) -> str:
        packed = [] if self.packing is None else [f"packed along axis {self.packing.axis}"]
        flags = {"swapped": self.swapped, "as int8": self.int8, "as uint4": self.uint4}
        flags[f"for a kernel on {self.kernel.upper()}"] = bool(self.kernel)
        return " and ".join(packed + [text for text, holds in flags.items() if holds])


def _other(axis: int) -> int:
    """Returns the place of an axis, counted from the last, after the last two are swapped."""
    return {-1: -2, -2: -1}.get(axis, axis)


def real_shape(shape: Sequence[int], layout: Layout | None) -> tuple[int, ...]:
    """Returns the shape of the real array whose `values` have this shape."""
    if layout is None:
        return tuple(shape)
    real = [*shape[:-2], *reversed(shape[-2:])] if layout.swapped else list(shape)
    if layout.packing is not None:
        real[layout.packing.axis] = layout.packing.length
    return tuple(real)


def values_dtype(layout: Layout | None, form: QType) -> jnp.dtype:
    """Returns the dtype of `values`."""
    if layout is not None and layout.packing is not None:
        return jnp.dtype(jnp.uint8)
    if layout is not None and layout.int8:
        return jnp.dtype(jnp.int8)
    if layout is not None and layout.uint4:
        return jnp.dtype(jnp.uint4)
    return form.storage


def byte_of(dtype: jnp.dtype) -> jnp.dtype:
    """Returns int8 for a signed dtype and uint8 for an unsigned one."""
    return jnp.dtype(jnp.int8 if is_signed(dtype) else jnp.uint8)


def has_int8_layout(form: QType) -> bool:
    """Whether a layout may store codes as int8: integers of 8 bits or fewer in another dtype."""
    element = form.elements if isinstance(form, Block) else form
    return isinstance(element, Integer) and form.bits <= 8 and form.storage != jnp.int8


def has_uint4_layout(form: QType) -> bool:
    """Whether a layout may store codes as uint4: 4 bits or fewer, not integers (nf4, float4)."""
    element = form.elements if isinstance(form, Block) else form
    return form.bits <= 4 and not isinstance(element, Integer)


def to_int8(codes: jax.Array, form: QType) -> jax.Array:
    """Returns codes, or zero points, of integers of 8 bits or fewer as int8: uint8 minus 128,
    which flips the top bit.
    """
    return _flipped(codes, jnp.int8) if is_flipped(form) else codes.astype(jnp.int8)


def is_flipped(form: QType) -> bool:
    """Whether int8 holds the codes of a format only after subtracting 128 (uint8)."""
    return form.bits == 8 and form.storage == jnp.uint8


def _from_int8(values: jax.Array, form: QType) -> jax.Array:
    """Returns codes that are stored as int8, one per byte."""
    dtype = byte_of(form.storage)
    return _flipped(values, dtype) if is_flipped(form) else values.astype(dtype)


def _flipped(codes: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(codes, dtype) ^ jnp.array(-128, jnp.int8).astype(dtype)


def packed_axis(function: str, form: QType, axis: int, rank: int) -> int:
    """Returns the axis to pack along, counted from the first, after checking that it exists."""
    if not form.bits < 8:
        raise fail(
            function,
            f"codes of {form.name} already fill their bytes.",
            given=f"{form.bits} bits",
            expected="a format of 7 bits or less",
            fix="leave it unpacked.",
        )
    if not (isinstance(axis, (int, np.integer)) and -rank <= axis < rank):
        raise fail(
            function,
            "the axis to pack along does not exist.",
            given=f"axis {axis!r} for rank {rank}",
            expected=f"an axis in [{-rank}, {rank - 1}]"
            if rank
            else "an array of one axis or more",
            fix="name an axis of the array.",
        )
    return int(axis) % rank


def depth_of(q: Any) -> int:
    """Returns how many of the last axes the layout of a QTensor affects."""
    return 0 if q.layout is None else q.layout.depth


def check_view(function: str, q: Any, whole: bool) -> None:
    """Checks that a view does not change the axes that the layout of a QTensor affects."""
    depth = depth_of(q)
    if not whole and depth:
        raise fail(
            function,
            f"the codes are {q.layout}.",
            given=repr(q),
            expected=f"the default layout, or a view that leaves axes {list(range(-depth, 0))} "
            f"whole",
            fix="call q.unpack() first.",
        )


def pack(q: T, axis: int) -> T:
    """Packs a QTensor in the default layout; see `QTensor.pack`."""
    form = format_of(q.qtype)
    if q.layout is not None:
        raise fail(
            "QTensor.pack",
            f"the codes are {q.layout}.",
            given=repr(q),
            expected="codes in the default layout",
            fix="call q.unpack() first.",
        )
    axis = packed_axis("QTensor.pack", form, axis, q.ndim)
    packing = Packing(axis - q.ndim, q.shape[axis])
    return dataclasses.replace(q, values=_packed(q, axis), layout=Layout(packing))


@partial(jax.jit, static_argnums=1, inline=True)
def _packed(q: Any, axis: int) -> jax.Array:
    form = format_of(q.qtype)
    return pack_bits(form.to_bits(q.values), form.bits, axis)


def codes_of(q: Any) -> jax.Array:
    """Returns the codes in the order of the shape; see `QTensor.codes`."""
    return q.values if q.layout is None else _codes_of(q)


@partial(jax.jit, inline=True)
def _codes_of(q: Any) -> jax.Array:
    codes, layout = q.values, q.layout
    if layout.packing is not None or layout.uint4:
        codes = format_of(q.qtype).widen_bits(_bits(q))
    elif layout.int8:
        codes = _from_int8(codes, format_of(q.qtype))
    return _swap_last(codes) if layout.swapped else codes


def unpack(q: T) -> T:
    """Returns a QTensor in the default layout; see `QTensor.unpack`."""
    if q.layout is None:
        return q
    return dataclasses.replace(q, values=_unpacked(q), layout=None)


@partial(jax.jit, inline=True)
def _unpacked(q: Any) -> jax.Array:
    values, layout, form = q.values, q.layout, format_of(q.qtype)
    if layout.packing is not None or layout.uint4:
        values = form.from_bits(_bits(q))
    elif layout.int8:
        values = _from_int8(values, form).astype(form.storage)
    return _swap_last(values) if layout.swapped else values


def lay_out(q: T, layout: Layout) -> T:
    """Returns the same array with another layout, or itself if it already has that layout."""
    if (q.layout or Layout()) == layout:
        return q
    if isinstance(q.values, jax.ShapeDtypeStruct):
        return jax.eval_shape(partial(lay_out, layout=layout), q)
    return dataclasses.replace(q, values=_laid_out(q, layout), layout=layout)


@partial(jax.jit, static_argnums=1, inline=True)
def _laid_out(q: Any, layout: Layout) -> jax.Array:
    form = format_of(q.qtype)
    if layout.int8:
        codes = to_int8(q.codes, form)
    elif layout.uint4:
        codes = form.to_bits(q.codes).astype(jnp.uint4)
    elif layout.packing is not None:
        codes = form.to_bits(q.unpack().values)
    else:
        codes = q.unpack().values
    codes = _swap_last(codes) if layout.swapped else codes
    if layout.stored_axis is None:
        return codes
    pack = pack_neighbours if layout.kernel == "cpu" else pack_bits
    return pack(codes, form.bits, layout.stored_axis + codes.ndim)


def transpose(q: T, order: tuple[int, ...]) -> T:
    """Permutes the axes; see `QTensor.transpose`."""
    n = q.ndim
    if q.layout is not None and order[-2:] == (n - 1, n - 2):
        q, order = swap_axes(q), (*order[:-2], n - 2, n - 1)
        if order == tuple(range(n)):
            return q
    depth = depth_of(q)
    check_view("QTensor.transpose", q, order[n - depth :] == tuple(range(n - depth, n)))
    _check_order(q, order)
    return q.map_leaves(lambda leaf: leaf.transpose(order), q.blocks)


def _check_order(q: Any, order: tuple[int, ...]) -> None:
    """Checks that the permuted axis of a tensor stays the last axis with an order."""
    axis = None if q.order is None else permuted_axis(q.order)
    if q.order is not None and axis is not None:
        moved = [q.order.shape[i] for i in order]
        after = order.index(axis % q.ndim) - q.ndim
        check_same_axis("QTensor.transpose", q, jax.ShapeDtypeStruct(moved, np.int32), after)


def swap_axes(q: T) -> T:
    """Swaps the last two axes of the shape, without moving the values."""
    axes = (*range(q.ndim - 2), q.ndim - 1, q.ndim - 2)
    _check_order(q, axes)
    return dataclasses.replace(
        q.map_parameters(lambda leaf: leaf.transpose(axes)),
        order=None if q.order is None else q.order.transpose(axes),
        layout=(q.layout or Layout()).transposed(),
    )


def shape_of_values(function: str, q: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of `values` in a view of `shape` that keeps the axes of the layout."""
    depth = depth_of(q)
    lead = len(shape) - depth
    check_view(function, q, tuple(shape[max(lead, 0) :]) == q.shape[q.ndim - depth :])
    return (*shape[:lead], *q.values.shape[q.ndim - depth :])


def _bits(q: Any) -> jax.Array:
    """Returns codes of few bits as bits, one code per byte, in the order of the values."""
    if q.layout.packing is None:
        return q.values.astype(jnp.uint8)
    axis, bits = q.layout.stored_axis + q.values.ndim, format_of(q.qtype).bits
    if q.layout.kernel == "cpu":
        return unpack_neighbours(q.values, bits, axis)
    return unpack_bits(q.values, bits, axis, q.layout.packing.length)


def _swap_last(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)
