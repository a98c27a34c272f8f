"""The memory layout of the codes of a QTensor: packed, swapped, as int8 or uint4, for a kernel; and
transposes of QTensors, which may change nothing but the layout.
"""

import dataclasses
import math
from collections.abc import Container, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import added, check_real, shown, whole
from ..errors import fail
from ..numerics.blocks import Block
from ..numerics.exact import is_signed
from ..numerics.lookup import E8M0, format_of
from ..numerics.packing import (
    pack_bits,
    pack_neighbours,
    packed_length,
    unpack_bits,
    unpack_neighbours,
)
from ..numerics.qtype import Integer, QType
from ..ops.affine import check_zero_point as check_has_zero_point

# The order of a QTensor with a permuted axis: which axis that is, and which views it forbids.


def permuted_axis(order: Any) -> int | None:
    """Returns the axis that an order permutes, counted from the last: the last axis along which
    its size is not 1; `None` if there is none.
    """
    rank = len(order.shape)
    return next((axis - rank for axis in reversed(range(rank)) if order.shape[axis] != 1), None)


def check_order(q: Any) -> None:
    """Checks the dtype and the shape of `order`."""
    is_int32, shape = q.order.dtype == jnp.int32, tuple(q.order.shape)
    if not is_int32 or not broadcasts(shape, q.shape):
        problem = f"`order` does not fit `values`: {q.order.dtype.name}{list(shape)} for {q.shape}."
        fix = "pass int32 of the rank of values, with size 1 along axes that share the order."
        raise fail("QTensor", problem, fix=fix, error=ValueError if is_int32 else TypeError)


def inverse_of(order: jax.Array) -> jax.Array:
    """Returns the index in `values` of each element of the real array."""
    axis = permuted_axis(order)
    assert axis is not None
    return jnp.argsort(order, axis=axis).astype(jnp.int32)


def taken(x: jax.Array, indices: jax.Array, axis: int) -> jax.Array:
    """Returns the elements of an array at `indices` along an axis. `indices` has the rank of the
    array, and size 1 along axes that share them.
    """
    if indices.size == indices.shape[axis]:
        return jnp.take(x, indices.reshape(-1), axis=axis, mode="clip")
    return jnp.take_along_axis(x, indices, axis=axis, mode="clip")


def check_whole(function: str, q: Any, parts: Sequence[Any]) -> None:
    """Checks that an index takes the permuted axis whole."""
    if q.order is not None:
        axis = permuted_axis(q.order)
        assert axis is not None
        part = [part for part in parts if part is not None and part is not Ellipsis][axis]
        if not isinstance(part, slice) or part != slice(None):
            refuse(function, q, "an index that takes it whole")


def check_kept(function: str, q: Any, axis: int) -> None:
    """Checks that an axis of which a part is taken is not permuted."""
    if q.order is not None and permuted_axis(q.order) == axis % q.ndim - q.ndim:
        refuse(function, q, "indices of another axis")


def check_same_axis(function: str, q: Any, order: Any, axis: int) -> None:
    """Checks that a view that moved the permuted axis to `axis` kept the axes with their own orders
    before it.
    """
    if permuted_axis(order) != axis:
        refuse(function, q, "axes with their own orders before it")


def refuse(function: str, q: Any, expected: str) -> NoReturn:
    """Raises, because a view or a contraction would need the permuted axis in order."""
    axis = permuted_axis(q.order)
    problem = f"axis {axis} of the array is permuted, and cannot be cut, joined or reshaped."
    fix = f"use {expected}, or q.dequantize(); or do it before the array is quantized."
    raise fail(function, problem, given=repr(q), fix=fix)


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
        stored = self.transposed() if self.swapped else self
        fixed = [_other(axis) if self.swapped else axis for axis in range(-stored.depth, 0)]
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
    if form.bits >= 8:
        problem = f"codes of {form.name} already fill their bytes."
        raise fail(function, problem, fix="leave it unpacked.")
    if not isinstance(axis, (int, np.integer)) or not -rank <= axis < rank:
        problem = f"the axis to pack along does not exist: axis {axis!r} for rank {rank}."
        fix = f"pass an axis of [{-rank}, {rank - 1}]." if rank else "pack an array with axes."
        raise fail(function, problem, fix=fix)
    return int(axis) % rank


def depth_of(q: Any) -> int:
    """Returns how many of the last axes the layout of a QTensor affects."""
    return 0 if q.layout is None else q.layout.depth


def check_view(function: str, q: Any, is_whole: bool) -> None:
    """Checks that a view does not change the axes that the layout of a QTensor affects."""
    depth = depth_of(q)
    if not is_whole and depth:
        fix = f"call q.unpack() first, or leave axes {list(range(-depth, 0))} whole."
        raise fail(function, f"the codes are {q.layout}.", given=repr(q), fix=fix)


def pack(q: T, axis: int) -> T:
    """Packs a QTensor in the default layout; see `QTensor.pack`."""
    form = format_of(q.qtype)
    if q.layout is not None:
        problem = f"the codes are {q.layout}."
        raise fail("QTensor.pack", problem, given=repr(q), fix="call q.unpack() first.")
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
    """Permutes the axes of values, scale, zero point and offset; see `QTensor.transpose`. No scale
    is computed: `resolve_weights` in `transforms/make_plan.py` decides along which axes it varies.
    """
    n = q.ndim
    if q.layout is not None and order[-2:] == (n - 1, n - 2):
        q, order = swap_axes(q), (*order[:-2], n - 2, n - 1)
        if order == tuple(range(n)):
            return q
    depth = depth_of(q)
    check_view("QTensor.transpose", q, order[n - depth :] == tuple(range(n - depth, n)))
    _check_transposition(q, order)
    return q.map_leaves(lambda leaf: leaf.transpose(order), q.blocks)


def _check_transposition(q: Any, order: tuple[int, ...]) -> None:
    """Checks that the permuted axis of a tensor stays the last axis with an order."""
    axis = None if q.order is None else permuted_axis(q.order)
    if q.order is not None and axis is not None:
        moved = [q.order.shape[i] for i in order]
        moved_axis = order.index(axis % q.ndim) - q.ndim
        check_same_axis("QTensor.transpose", q, jax.ShapeDtypeStruct(moved, np.int32), moved_axis)


def swap_axes(q: T) -> T:
    """Swaps the last two axes of the shape, without moving the values."""
    axes = (*range(q.ndim - 2), q.ndim - 1, q.ndim - 2)
    _check_transposition(q, axes)
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


# Checks of the fields of a QTensor: the dtypes of the leaves, and shapes that fit each other.


def check_leaves(q: Any) -> None:
    """Checks that the leaves are arrays, of the right dtypes."""
    for name in ("values", "scale", "zero_point", "offset", "order"):
        leaf = getattr(q, name)
        if not hasattr(leaf, "shape") and (leaf is not None or name in ("values", "scale")):
            problem = f"`{name}` is not an array, but an object of type {type(leaf).__name__}."
            raise fail("QTensor", problem, fix=f"pass jnp.asarray({name}).", error=TypeError)
    if q.zero_point is not None:
        check_has_zero_point("QTensor", format_of(q.qtype))
    check_dtypes("QTensor", q)


_CHANGED = (
    " If jax.tree.map, an optimizer or a moving average changed the codes: apply it to float "
    "parameters, or let it skip QTensors with is_leaf=lambda x: isinstance(x, jqx.QTensor)."
)


def check_dtypes(function: str, q: Any, where: str = "") -> None:
    """Checks that the leaves have the dtypes of codes and scales, wherever a QTensor is used: a map
    over the leaves of a tree may have changed them. A leaf without a dtype passes.
    """
    for part in ("scale", "offset"):
        leaf = getattr(q, part)
        if hasattr(leaf, "qtype"):
            check_dtypes(function, leaf, where)
        elif hasattr(leaf, "dtype") and (part == "offset" or leaf.dtype != E8M0):
            check_real(function, f"`{part}` element type{where}", leaf.dtype)
    name = wrong_codes(q)
    if name is not None:
        form = format_of(q.qtype)
        dtype = values_dtype(q.layout, form) if name == "values" else form.storage
        problem = f"`{name}`{where} does not hold codes of `qtype`: {name}.dtype == "
        problem += f"{getattr(q, name).dtype.name}, not {dtype.name}, the codes of {form.name}."
        fix = f"convert {name}, or pass the qtype of its codes.{_CHANGED}"
        raise fail(function, problem, fix=fix, error=TypeError)


def wrong_codes(q: Any) -> str | None:
    """Returns the name of a leaf whose dtype is not that of codes; `None` if there is none."""
    values, zero_point = getattr(q.values, "dtype", None), getattr(q.zero_point, "dtype", None)
    if values is None and zero_point is None:
        return None
    form = format_of(q.qtype)
    if values is not None and values != values_dtype(q.layout, form):
        return "values"
    has_codes = zero_point is None or zero_point == form.storage
    return None if has_codes else "zero_point"


_SIZE = whole(1, math.inf)


def check_blocks(blocks: Any) -> None:
    """Checks that `blocks` is a tuple of triples of positive integers."""
    if not isinstance(blocks, tuple) or not all(
        isinstance(block, tuple)
        and len(block) == 3
        and all(_SIZE.is_kind(n) and _SIZE.holds(n) for n in block)
        for block in blocks
    ):
        problem = f"`blocks` does not describe block sizes: {shown(blocks)}."
        fix = "leave it out, or pass (length, number of blocks, size), as in ((100, 4, 32),)."
        raise fail("QTensor", problem, fix=fix)


def check_layout(q: Any) -> None:
    """Checks that `layout` is a layout, and that the format allows it."""
    layout, form = q.layout, format_of(q.qtype)
    if layout is None:
        return
    if not (
        isinstance(layout, Layout)
        and isinstance(layout.packing, Packing | None)
        and all(type(number) is int for number in layout.packing or ())
        and all(isinstance(x, bool) for x in (layout.swapped, layout.int8, layout.uint4))
        and layout.kernel in ("", *KERNELS)
    ):
        text = repr(layout) if isinstance(layout, Layout) else type(layout).__name__
        fix = "leave it out, or pass a Layout; QTensor.pack and QTensor.pack_for set it."
        raise fail("QTensor", f"`layout` is not a layout: {text}.", fix=fix, error=TypeError)
    packed = layout.packing is not None
    if (
        packed + layout.int8 + layout.uint4 > 1
        or (packed and form.bits >= 8)
        or (layout.int8 and not has_int8_layout(form))
        or (layout.uint4 and not has_uint4_layout(form))
    ):
        raise fail(
            "QTensor",
            f"codes of {form.name} cannot have this layout: {layout!r}.",
            fix="pack formats of less than 8 bits; int8 is for integers of up to 8 bits other than "
            "int8, and uint4 for other codes of up to 4 bits.",
        )


def check_shapes(q: Any) -> None:
    """Checks that the shapes of the leaves fit each other."""
    if q.layout is not None:
        _check_layout_shape(q, q.layout)
    shape, scale = q.shape, q.scale.shape
    block_counts = {(n, m) for n, m, size in q.blocks if size > 0 and m == -(-n // size)}
    fits = len(scale) == len(shape) and all(
        m in (1, n) or (n, m) in block_counts or (m > 0 and n % m == 0)
        for n, m in zip(shape, scale, strict=True)
    )
    if not fits:
        blocks = f", blocks == {q.blocks}" if q.blocks else ""
        facts = f"scale.shape == {scale}, values.shape == {shape}{blocks}"
        fix = "pass for each axis 1, the size of values, or a number of blocks that divides it."
        raise fail("QTensor", "`scale` does not fit `values`.", given=facts, fix=fix)
    for name in ("zero_point", "offset"):
        if getattr(q, name) is not None:
            check_zero_point("QTensor", getattr(q, name), q.scale, name)
    if q.order is not None:
        check_order(q)


def _check_layout_shape(q: Any, layout: Layout) -> None:
    """Checks that `values` have the axes that their layout changes."""
    shape, problem, fix = q.values.shape, "", ""
    if len(shape) < 2 and layout.swapped:
        problem = "`values` do not have two axes to be swapped."
        fix = "map tensors with a layout over leading axes only, or call q.unpack() first."
    elif layout.packing is not None:
        axis, stored = layout.packing.axis, layout.stored_axis
        count = packed_length(layout.packing.length, format_of(q.qtype).bits)
        if not -len(shape) <= axis < 0 or shape[stored] != count:
            problem = f"`values` do not have the packed shape: {count} bytes along axis {stored}."
            fix = "make packed tensors with QTensor.pack."
    if problem:
        facts = f"values.shape == {shape}, layout == {layout!r}"
        raise fail("QTensor", problem, given=facts, fix=fix)


def broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether `shape` has the rank of `full`, and each dim is 1 or that of `full`."""
    return len(shape) == len(full) and all(m in (1, n) for m, n in zip(shape, full, strict=True))


def check_zero_point(
    function: str, zero_point: jax.Array, scale: Any, name: str = "zero_point"
) -> None:
    """Checks that a zero point, or an offset, broadcasts to its scale."""
    if not broadcasts(zero_point.shape, scale.shape):
        facts = f"{name}.shape == {zero_point.shape}, scale.shape == {scale.shape}"
        fix = f"reshape {name}: scale's size along the axes they share, 1 elsewhere."
        raise fail(function, f"`{name}` does not fit `scale`.", given=facts, fix=fix)


def refuse_as_array(function: str, problem: str, x: Any, fix: str) -> NoReturn:
    """Raises, because the caller must choose between the codes and the real array."""
    raise fail(function, problem, given=repr(x), fix=fix, error=TypeError)


# Checks that the codes of a QTensor are in the range of its format, which storage may exceed.


def check_codes(function: str, q: Any, where: str) -> None:
    """Checks the codes and zero points of a concrete QTensor, and those of a nested scale.

    Args:
      function: the caller, for messages.
      q: a QTensor of NumPy arrays, or of JAX arrays outside of transformations.
      where: its path, for messages.

    Raises:
      TypeError: codes have another dtype.
      ValueError: a code or a zero point is out of the range of the format, such as 100 in an int3.
    """
    check_dtypes(function, q, f" of {where!r}")
    form = format_of(q.qtype)
    if form.code_range is not None:
        codes = _integers(q, form)
        if codes is not None:
            _check_range(function, f"{where}.values", codes, form)
        if q.zero_point is not None:
            _check_range(function, f"{where}.zero_point", q.zero_point, form)
    for name in ("scale", "offset"):
        if hasattr(getattr(q, name), "qtype"):
            check_codes(function, getattr(q, name), f"{where}.{name}")
    if q.order is not None:
        _check_order(function, q, f"{where}.order")


def _check_order(function: str, q: Any, name: str) -> None:
    """Checks that an order is a permutation."""
    axis = permuted_axis(q.order)
    if axis is None or not q.order.size:
        return
    indices = np.sort(np.moveaxis(np.asarray(q.order), axis, -1), axis=-1)
    if not np.array_equal(indices, np.broadcast_to(np.arange(q.shape[axis]), indices.shape)):
        problem = f"the tensor {name!r} is not a permutation of 0 to {q.shape[axis] - 1}."
        facts = f"numbers from {int(indices.min())} to {int(indices.max())}"
        fix = "quantize the array again: its order is damaged."
        raise fail(function, problem, given=facts, fix=fix)


def _integers(q: Any, form: Any) -> Any:
    """Returns the codes, or `None` if every bit pattern is a code of the format."""
    low, high = form.code_range
    if q.layout is None:
        return q.values
    if q.layout.packing is not None:
        return None if high - low + 1 == 2**form.bits else q.codes
    return None if q.layout.int8 and is_flipped(form) else q.values


def _check_range(function: str, name: str, codes: Any, form: Any) -> None:
    """Checks that codes are in the range of their format."""
    low, high = form.code_range
    info = jnp.iinfo(codes.dtype)
    if codes.size == 0 or (low <= int(info.min) and int(info.max) <= high):
        return
    smallest, largest = int(np.min(codes)), int(np.max(codes))
    if smallest < low or largest > high:
        problem = f"the tensor {name!r} holds numbers that are not codes of {form.name}."
        facts = f"numbers from {smallest} to {largest}, where codes are from {low} to {high}"
        fix = "quantize the array again: its codes are damaged, or of another format."
        raise fail(function, problem, given=facts, fix=fix)
