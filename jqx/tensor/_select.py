"""Selection from QTensors, and joins along an axis, with the scale in step."""

import contextlib
import dataclasses
import math
from collections.abc import Container, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_instance, normalize_axes
from .._errors import fail
from ..calibrators import Groups
from ..numerics import format_of
from ..numerics._shared import bit_width
from ._layout import byte_of, check_view, depth_of, real_shape, shape_of_values, swap_axes
from ._order import check_same_axis, check_whole, permuted_axis, refuse
from ._views import (
    axis_groups,
    blocks_after,
    blocks_at,
    cut_axes,
    index_for,
    normal_index,
    repeated,
    reshaped,
)

T = TypeVar("T", bound=Any)
"""A QTensor; its own file imports this one."""


def index(q: T, key: Any) -> T:
    """Indexes a QTensor; see `QTensor.__getitem__`."""
    parts = _with_whole_axes(normal_index(key, q.shape), q.shape)
    last = [part for part in parts[-2:] if isinstance(part, slice)]
    if len(last) == 2 and _is_swapped(q, {i - 2 for i in (0, 1) if last[i] != slice(None)}):
        return swap_axes(index(swap_axes(q), (*parts[:-2], parts[-1], parts[-2])))
    check_view("QTensor.__getitem__", q, _keeps_last(parts, depth_of(q)))
    check_whole("QTensor.__getitem__", q, parts)
    for axis, part in cut_axes(parts, q.groups).items():
        q = _cut(q, axis, part)
        parts = _with_whole(parts, axis)
    groups = q.groups

    def entry(leaf: Any) -> Any:
        return leaf[index_for(parts, leaf, groups)]

    values, after = q.values[parts], q.map_parameters(entry)
    scale = after.scale
    shape = real_shape(values.shape, q.layout)
    sizes = list(Groups.of_scale(shape, scale.shape).sizes)
    for axis, size in blocks_after(parts, groups).items():
        if scale.shape[axis] not in (1, shape[axis]):
            sizes[axis] = size
    return dataclasses.replace(
        after,
        values=values,
        order=None if q.order is None else entry(q.order),
        blocks=Groups(shape, tuple(sizes)).blocks,
    )


def _cut(q: T, axis: int, part: slice) -> T:
    """Returns a slice of a QTensor along an axis in blocks, in the largest blocks that fit it."""
    places = np.arange(q.shape[axis], dtype=np.int32)[part]
    size, entries = blocks_at(places, q.groups.sizes[axis])
    values = q.values[(slice(None),) * axis + (part,)]
    sizes = [*q.groups.sizes]
    sizes[axis] = size
    groups = Groups(real_shape(values.shape, q.layout), tuple(sizes))
    after = q.map_parameters(
        lambda leaf: leaf if leaf.shape[axis] == 1 else repeated(leaf, axis, entries)
    )
    return dataclasses.replace(after, values=values, blocks=groups.blocks)


def _with_whole(parts: Sequence[Any], axis: int) -> tuple[Any, ...]:
    """Returns an index that takes an axis whole."""
    places = [i for i, part in enumerate(parts) if part is not None and part is not Ellipsis]
    return (*parts[: places[axis]], slice(None), *parts[places[axis] + 1 :])


def _is_swapped(q: Any, cut: Container[int]) -> bool:
    """Whether the last two axes are swapped, and parts can be taken of these axes."""
    return q.layout is not None and q.layout.swapped and q.layout.follows((), cut)


def _with_whole_axes(parts: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
    """Returns an index with `:` for every slice that takes an axis as it is."""
    lengths = iter(shape)
    spelt = []
    for part in parts:
        if part is not None and part is not Ellipsis:
            n = next(lengths)
            if isinstance(part, slice) and part != slice(None) and part.indices(n) == (0, n, 1):
                part = slice(None)
        spelt.append(part)
    return tuple(spelt)


def _keeps_last(parts: Sequence[Any], depth: int) -> bool:
    """Whether an index takes the last axes whole, and leaves them the last."""
    axes = [part for part in parts if part is not Ellipsis]
    last = axes[len(axes) - depth :]
    return all(isinstance(part, slice) and part == slice(None) for part in last)


def split(q: T, indices_or_sections: int | Sequence[int], axis: int) -> list[T]:
    """Splits a QTensor along an axis; see `QTensor.split`."""
    (axis,) = normalize_axes("QTensor.split", axis, q.ndim, argument="axis")
    n = q.shape[axis]
    if isinstance(indices_or_sections, (int, np.integer)):
        sections = int(indices_or_sections)
        if not (sections > 0 and n % sections == 0):
            raise fail(
                "QTensor.split",
                "the axis cannot be split into equal parts.",
                given=f"{sections} sections of axis {axis} of shape {q.shape}",
                expected=f"a number that divides {n}",
                fix="pass the places to split at, as a list.",
            )
        ends = [n // sections * i for i in range(1, sections)]
    else:
        ends = [int(i) for i in indices_or_sections]
    places = zip([0, *ends], [*ends, n], strict=True)
    return [q[(slice(None),) * axis + (slice(a, b),)] for a, b in places]


def refine(q: T, axis: int, size: int = 1) -> T:
    """Returns the same array in smaller blocks along an axis; `size` divides the block size."""
    n, sizes = q.shape[axis], list(q.groups.sizes)
    places = np.arange(0, n, size, dtype=np.int32) // max(sizes[axis], 1)
    sizes[axis] = size
    blocks = Groups(q.shape, tuple(sizes)).blocks
    finer = q.map_parameters(lambda leaf: repeated(leaf, axis, places))
    return dataclasses.replace(finer, blocks=blocks)


def sliceable(q: T, axis: int) -> T:
    """Returns the same array with an entry for each index along an axis in every leaf, so that a
    scan can step over that axis.
    """
    n = q.shape[axis]
    q = refine(q, axis) if q.scale.shape[axis] != n else q

    def each(leaf: Any) -> Any:
        leaf = repeated(leaf, axis, np.zeros(n, np.int32)) if leaf.shape[axis] != n else leaf
        return sliceable(leaf, axis) if hasattr(leaf, "qtype") else leaf

    if q.order is not None and axis >= permuted_axis(q.order) % q.ndim:
        refuse("scan", q, "steps over an axis before it")
    order = None if q.order is None else each(q.order)
    return dataclasses.replace(q.map_parameters(each), order=order)


def reshape(q: T, shape: tuple[int, ...]) -> T:
    """Reshapes a QTensor; see `QTensor.reshape`."""
    values = jnp.reshape(q.values, shape_of_values("QTensor.reshape", q, shape))
    before, after = reshaped(q.groups, real_shape(values.shape, q.layout))
    for axis, (size, old) in enumerate(zip(before.sizes, q.groups.sizes, strict=True)):
        q = refine(q, axis, size) if size != old else q

    def parameter(leaf: Any) -> Any:
        if hasattr(leaf, "qtype"):
            return _reshape_scale(_as_many(leaf, q.scale.shape), after.scale_shape)
        return jnp.broadcast_to(leaf, q.scale.shape).reshape(after.scale_shape)

    return dataclasses.replace(
        q.map_parameters(parameter),
        values=values,
        order=_reshape_order(q, after.shape),
        blocks=after.blocks,
    )


def _as_many(q: T, shape: tuple[int, ...]) -> T:
    """Returns a nested parameter with as many entries as the scale has."""
    for axis, (n, m) in enumerate(zip(q.shape, shape, strict=True)):
        q = repeated(q, axis, np.zeros(m, np.int32)) if n != m else q
    return q


def _reshape_order(q: Any, shape: tuple[int, ...]) -> Any:
    """Reshapes an order, where the permuted axis stays as it is."""
    if q.order is None:
        return None
    axis = permuted_axis(q.order) % q.ndim
    groups = axis_groups(q.shape, shape)
    target = next((new for old, new in groups if old == (axis,)), ())
    if len(target) != 1:
        refuse("QTensor.reshape", q, "a reshape that does not change it")
    own = Groups.of_scale(q.shape, q.order.shape)
    sizes = reshaped(own, shape)[1].scale_shape
    if any(m not in (1, n) for m, n in zip(sizes, shape, strict=True)):
        refuse("QTensor.reshape", q, "a reshape that keeps the axes with their own orders")
    order = q.order.reshape(sizes)
    check_same_axis("QTensor.reshape", q, order, target[0] - len(shape))
    return order


def _reshape_scale(scale: Any, shape: tuple[int, ...]) -> Any:
    """Reshapes a scale. If it is quantized and its own scales cannot follow, each of its entries
    gets its own scale.
    """
    if hasattr(scale, "qtype"):
        with contextlib.suppress(ValueError):
            return scale.reshape(shape)
        for axis in range(scale.ndim):
            scale = sliceable(scale, axis)
    return scale.reshape(shape)


def concatenate(function: str, tensors: Sequence[T], axis: int) -> T:
    """Joins QTensors of one format along an axis; see `QTensor.concatenate`."""
    axis, first = _check_joinable(function, tensors, axis), tensors[0]
    if axis >= first.ndim - 2 and _is_swapped(first, {axis - first.ndim}):
        other = 2 * first.ndim - 3 - axis
        return swap_axes(concatenate(function, list(map(swap_axes, tensors)), other))
    check_view(function, first, axis < first.ndim - depth_of(first))
    tensors = [q for q in tensors if q.shape[axis]]  # empty tensors add no scale
    if not tensors:
        return first
    order = _joined_orders(function, tensors, axis)
    tensors, block = _in_step(_alike_elsewhere(_with_scales_alike(tensors), axis), axis)
    values = _joined([q.values for q in tensors], axis)
    sizes = list(tensors[0].groups.sizes)
    sizes[axis] = block
    return dataclasses.replace(
        first,
        values=values,
        scale=_joined_scales(function, [q.scale for q in tensors], axis),
        zero_point=_joined_zero_points(tensors, axis),
        offset=_joined_offsets(function, tensors, axis),
        order=order,
        blocks=Groups(real_shape(values.shape, first.layout), tuple(sizes)).blocks,
    )


def _check_joinable(function: str, tensors: Sequence[Any], axis: int) -> int:
    """Checks that tensors can be joined along an axis, and returns it, counted from the front."""
    if not len(tensors) > 0:
        raise fail(
            function,
            "there is nothing to join.",
            given="no tensors",
            expected="one QTensor or more",
            fix="pass a list of QTensors.",
        )
    first = tensors[0]
    for q in tensors:
        _check_alike(function, q, first)
    (axis,) = normalize_axes(function, axis, first.ndim, argument="axis")
    return axis


def _check_alike(function: str, q: Any, first: Any) -> None:
    """Checks that a tensor has the format and the layout of another."""
    check_instance(function, "tensors", q, type(first), fix="pass a list of QTensors.")
    if (q.qtype, q.dtype) != (first.qtype, first.dtype):
        raise fail(
            function,
            "the tensors have different formats.",
            given=f"{first!r} and {q!r}",
            expected="one qtype and one dtype",
            fix="dequantize them, or quantize them to the same format.",
            error=TypeError,
        )
    if q.layout != first.layout:
        raise fail(
            function,
            "the tensors have different layouts.",
            given=f"{first!r} and {q!r}",
            expected="one layout",
            fix="call q.unpack() on each of them first.",
            error=TypeError,
        )


def _in_step(tensors: list[T], axis: int) -> tuple[list[T], int]:
    """Returns tensors whose blocks have one size after the join, and that size. The tensors do not
    change if only the last one ends with a shorter block; else they get smaller blocks.
    """
    *others, last = tensors
    size = tensors[0].groups.sizes[axis]
    whole = all(q.groups.sizes[axis] == size and q.shape[axis] % size == 0 for q in others)
    short = last.groups.sizes[axis] < size and last.scale.shape[axis] == 1
    if whole and (last.groups.sizes[axis] == size or short):
        return tensors, size
    size = math.gcd(*(q.groups.sizes[axis] for q in tensors), *(q.shape[axis] for q in others))
    return [refine(q, axis, size) for q in tensors], size


def _joined(codes: Sequence[jax.Array], axis: int) -> jax.Array:
    """Joins codes. Integers of less than 8 bits are joined as bytes, because XLA on CPU (jaxlib
    0.10.2) aborts the process when it joins 2-bit integers.
    """
    dtype = codes[0].dtype
    if not jnp.issubdtype(dtype, jnp.integer) or bit_width(dtype) >= 8:
        return jnp.concatenate(codes, axis)
    return jnp.concatenate([array.astype(byte_of(dtype)) for array in codes], axis).astype(dtype)


def _alike_elsewhere(tensors: Sequence[T], axis: int) -> list[T]:
    """Gives all tensors the same blocks along each other axis."""
    found = list(tensors)
    for other in range(tensors[0].ndim):
        sizes = {q.groups.sizes[other] for q in found}
        if other != axis and len(sizes) > 1:
            found = [refine(q, other, math.gcd(*sizes)) for q in found]
    return found


def _with_scales_alike(tensors: Sequence[T]) -> list[T]:
    """Converts scales of different dtypes or formats to floats of one dtype."""
    kinds = {(q.scale.dtype, getattr(q.scale, "qtype", None)) for q in tensors}
    if len(kinds) == 1:
        return list(tensors)
    scales = [q.real_scale() for q in tensors]
    dtype = jnp.result_type(*scales)
    return [
        dataclasses.replace(q, scale=scale.astype(dtype))
        for q, scale in zip(tensors, scales, strict=True)
    ]


def _joined_scales(function: str, scales: Sequence[Any], axis: int) -> Any:
    """Joins scales, arrays or QTensors."""
    if hasattr(scales[0], "qtype"):
        return concatenate(function, scales, axis)
    return jnp.concatenate(scales, axis)


def _joined_zero_points(tensors: Sequence[Any], axis: int) -> jax.Array | None:
    """Joins zero points. If only some tensors have them, the others get zeros."""
    if all(q.zero_point is None for q in tensors):
        return None
    return _joined([_zero_point_of(q) for q in tensors], axis)


def _joined_offsets(function: str, tensors: Sequence[Any], axis: int) -> Any:
    """Joins offsets. If only some tensors have them, the others get zeros."""
    offsets = [q.offset for q in tensors]
    if all(offset is None for offset in offsets):
        return None
    if all(hasattr(offset, "qtype") for offset in offsets):
        whole = [_as_many(q.offset, q.scale.shape) for q in tensors]
        with contextlib.suppress(TypeError):
            return concatenate(function, whole, axis)
    known = [q.real_offset() for q in tensors]
    dtype = jnp.result_type(*[offset for offset in known if offset is not None])
    return jnp.concatenate(
        [
            jnp.zeros(q.scale.shape, dtype)
            if offset is None
            else jnp.broadcast_to(offset.astype(dtype), q.scale.shape)
            for q, offset in zip(tensors, known, strict=True)
        ],
        axis,
    )


def _joined_orders(function: str, tensors: Sequence[Any], axis: int) -> jax.Array | None:
    """Joins orders of arrays that are stacked along an axis before the permuted one."""
    ordered = [q for q in tensors if q.order is not None]
    if not ordered:
        return None
    first = ordered[0]
    place = permuted_axis(first.order) % first.ndim
    alike = len(ordered) == len(tensors) and axis < place
    alike = alike and all(
        q.order.shape[axis] == q.shape[axis] and permuted_axis(q.order) % q.ndim == place
        for q in tensors
    )
    if not alike:
        refuse(function, first, "arrays that are stacked along an axis before it, all permuted")
    return jnp.concatenate([q.order for q in tensors], axis)


def _zero_point_of(q: Any) -> jax.Array:
    if q.zero_point is None:
        return jnp.zeros(q.scale.shape, format_of(q.qtype).storage)
    return jnp.broadcast_to(q.zero_point, q.scale.shape)
