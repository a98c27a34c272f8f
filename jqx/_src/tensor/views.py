"""What happens to a scale when its values are indexed or reshaped (transposed: `layout.py`).

A parameter (a scale or zero point) has the rank of its values; along each axis it has one entry,
one for each index, or one for each block. It may itself be a QTensor.
"""

import contextlib
import dataclasses
import math
from collections.abc import Container, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..checks import as_signed, check_instance, is_at_least, normalize_axes, shown
from ..errors import fail
from ..numerics.exact import bit_width
from ..numerics.lookup import format_of
from ..statistics.granularity import Groups
from .layout import (
    byte_of,
    check_same_axis,
    check_view,
    check_whole,
    depth_of,
    permuted_axis,
    real_shape,
    refuse,
    shape_of_values,
    swap_axes,
)

_GETITEM = "QTensor.__getitem__"


def normal_index(index: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """Returns an index with its ellipsis expanded: for each axis an int, a slice or an int32 array,
    with `None` in between. A boolean mask becomes the indices of its true elements. An ellipsis
    that stands for no axis stays, because it separates the arrays on either side.
    """
    parts = [_part(part) for part in (index if isinstance(index, tuple) else (index,))]
    widths = [0 if p is None or p is Ellipsis else p.ndim if _is_mask(p) else 1 for p in parts]
    dots = [i for i, part in enumerate(parts) if part is Ellipsis]
    free_axes = len(shape) - sum(widths)
    if free_axes < 0 or len(dots) > 1:
        problem = "the index does not fit."
        facts = f"{sum(widths)} indices and {len(dots)} ellipses for shape {tuple(shape)}"
        fix = f"pass at most {len(shape)} indices and one ellipsis."
        raise fail(_GETITEM, problem, given=facts, fix=fix, error=IndexError)
    dots_index = dots[0] if dots else len(parts)
    fill = [slice(None)] * free_axes or ([Ellipsis] if dots else [])
    spelt, axis = [], 0
    for part in [*parts[:dots_index], *fill, *parts[dots_index + 1 :]]:
        if _is_mask(part):
            axes = zip(part.shape, shape[axis : axis + part.ndim], strict=True)
            if not all(m in (0, n) for m, n in axes):
                raise _out_of_range(f"a mask of shape {part.shape}", axis, shape)
            spelt += [indices.astype(np.int32) for indices in np.nonzero(part)]
            axis += part.ndim
            continue
        if isinstance(part, int) and not -shape[axis] <= part < shape[axis]:
            raise _out_of_range(f"the index {part}", axis, shape)
        if getattr(part, "size", 0) and not is_at_least(shape[axis], 1):
            raise _out_of_range("the index of an array", axis, shape)
        spelt.append(_in_int32(part, shape[axis]) if hasattr(part, "dtype") else part)
        axis += not (part is None or part is Ellipsis)
    return tuple(spelt)


def _part(part: Any) -> Any:
    """Returns one entry of an index as an int, a slice, an int32 array, a NumPy mask, `None` or
    `...`.
    """
    if part is None or part is Ellipsis:
        return part
    if isinstance(part, slice):
        try:
            part.indices(0)
        except (TypeError, ValueError) as error:
            ends = ", ".join(map(shown, (part.start, part.stop, part.step)))
            problem = f"a slice has an invalid start, stop or step: {ends}."
            fix = "pass known integers or None; for a start that is traced, use jqx.dynamic_slice."
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise fail(_GETITEM, problem, fix=fix, error=kind) from None
        return part
    if isinstance(part, (int, np.integer)) and not isinstance(part, bool):
        return int(part)
    array: Any = _as_array(part) if isinstance(part, list) else part
    dtype = getattr(array, "dtype", np.dtype(object))
    if jnp.issubdtype(dtype, jnp.integer):
        plain = isinstance(array, np.ndarray) and array.ndim == 0
        return int(array) if plain else array
    if jnp.issubdtype(dtype, jnp.bool_) and array.ndim and compat.is_concrete(array):
        return np.asarray(array)
    problem = "the index is not an integer, slice, None, ..., integer array, or known mask."
    facts = f"an index of type {type(part).__name__} and dtype {dtype}"
    fix = "index q.values and q.scale yourself, or q.dequantize()[index]."
    raise fail(_GETITEM, problem, given=facts, fix=fix, error=TypeError)


def _in_int32(indices: Any, n: Any) -> Any:
    """Returns indices of an axis of size `n` as int32. Those out of bounds take the first or the
    last element, as in JAX.
    """
    if np.can_cast(indices.dtype, np.int32) or not isinstance(n, int):
        return indices.astype(np.int32)
    if isinstance(indices, np.ndarray):
        low = -n if indices.dtype.kind == "i" else 0
        return np.clip(indices, low, max(n - 1, 0)).astype(np.int32)
    return jnp.clip(as_signed(indices, n), -n, n - 1).astype(np.int32)


def _as_array(part: list[Any]) -> Any:
    """Returns a list as an array; an empty list becomes integers, as in NumPy."""
    try:
        array = np.asarray(part)
    except (TypeError, ValueError):  # ragged, or of traced values
        return part
    return array if array.size else array.astype(np.int32)


def _is_mask(part: Any) -> bool:
    return isinstance(part, np.ndarray) and part.dtype == bool


def _out_of_range(part: str, axis: int, shape: Sequence[int]) -> Exception:
    n, problem = shape[axis], f"{part} is out of range for axis {axis} of shape {tuple(shape)}."
    fix = f"pass an index in [{-n}, {n - 1}], or a mask of the shape of its axes."
    return fail(_GETITEM, problem, fix=fix, error=IndexError)


def cut_axes(parts: Sequence[Any], groups: Groups) -> dict[int, slice]:
    """Returns the blocked axes of which a slice of the index takes other than whole blocks in their
    order, and the slices.
    """
    cut = {}
    of_axes = (part for part in parts if part is not None and part is not Ellipsis)
    for axis, part in enumerate(of_axes):
        if isinstance(part, slice) and groups.is_blocked(axis):
            start, stop, step = part.indices(groups.shape[axis])
            if start % groups.sizes[axis] or step != 1 or stop <= start:
                cut[axis] = part
    return cut


def blocks_at(indices: np.ndarray, size: int) -> tuple[int, np.ndarray]:
    """Returns the largest block size for elements taken from `indices` of an axis with blocks of a
    size, and the old block of each new one. The last one may be smaller.
    """
    blocks = indices // size
    borders = np.flatnonzero(np.diff(blocks)) + 1
    size = math.gcd(*borders.tolist()) or max(len(indices), 1)
    return size, blocks[::size]


def index_for(parts: Sequence[Any], parameter: Any, groups: Groups) -> tuple[Any, ...]:
    """Returns the index of a parameter in step with that of its values.

    Along an axis that shares one entry, an integer takes that entry and a slice keeps it; along
    blocks, an index finds its block.
    """
    index, axis = [], 0
    for part in parts:
        if part is None or part is Ellipsis:
            index.append(part)
            continue
        n, m, b = groups.shape[axis], parameter.shape[axis], groups.sizes[axis]
        is_elementwise = m == n
        axis += 1
        if isinstance(part, slice):
            if m == 1:
                index.append(slice(None))
            elif is_elementwise:
                index.append(part)
            else:
                start, stop, _ = part.indices(n)
                index.append(slice(start // b, -(-stop // b)))
        elif isinstance(part, int):
            index.append(0 if m == 1 else part % n // (1 if is_elementwise else b))
        elif m == 1:
            index.append(np.zeros((1,) * part.ndim, np.int32) if part.ndim else 0)
        elif is_elementwise:
            index.append(part)
        else:
            inside = jnp.clip(jnp.where(part < 0, part + n, part), 0, max(n - 1, 0))
            index.append(inside // b)
    return tuple(index)


def blocks_after(parts: Sequence[Any], groups: Groups) -> dict[int, int]:
    """Returns the block size along each axis of an indexed array that a slice keeps in blocks."""
    plain = (type(None), type(Ellipsis), slice)
    advanced = [i for i, part in enumerate(parts) if not isinstance(part, plain)]
    arrays = [part for part in parts if getattr(part, "ndim", 0) > 0]
    rank = len(np.broadcast_shapes(*(part.shape for part in arrays))) if arrays else 0
    is_adjacent = not advanced or advanced[-1] - advanced[0] + 1 == len(advanced)
    new_axis, axis, sizes = (0 if is_adjacent else rank), 0, {}
    for i, part in enumerate(parts):
        if is_adjacent and advanced and i == advanced[0]:
            new_axis += rank
        if isinstance(part, slice):
            sizes[new_axis] = groups.sizes[axis]
        new_axis += part is None or isinstance(part, slice)
        axis += part is not None and part is not Ellipsis
    return sizes


def repeated(parameter: Any, axis: int, indices: np.ndarray) -> Any:
    """Returns a parameter with the entries of its blocks at `indices` along an axis."""
    if isinstance(parameter, jax.Array):
        return jnp.take(parameter, indices, axis=axis, mode="clip")
    return parameter.take(indices, axis)


def axis_groups(
    old: Sequence[int], new: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Splits a reshape into the smallest groups of axes with equal products: `[(old, new), ...]`.

    Axes of size 1 are in no group.
    """
    olds = [i for i, n in enumerate(old) if n != 1]
    news = [i for i, n in enumerate(new) if n != 1]
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    while i < len(olds) or j < len(news):
        if i == len(olds) or j == len(news):  # only where a size is 0: one group holds it all
            return [(tuple(olds), tuple(news))]
        a, b = [olds[i]], [news[j]]
        n, m = old[olds[i]], new[news[j]]
        while n != m:
            if n < m and i + 1 < len(olds):
                i += 1
                a.append(olds[i])
                n *= old[olds[i]]
            elif n > m and j + 1 < len(news):
                j += 1
                b.append(news[j])
                m *= new[news[j]]
            else:
                return [(tuple(olds), tuple(news))]
        groups.append((tuple(a), tuple(b)))
        i, j = i + 1, j + 1
    return groups


def reshaped(groups: Groups, new: Sequence[int]) -> tuple[Groups, Groups]:
    """Returns which elements share a scale before and after their array is reshaped: the same, or,
    where blocks do not fit the new axes, smaller blocks.

    Axes that merge or split are read as one run of elements, with the last axis varying fastest. A
    scale can follow if it is constant on blocks of that run.
    """
    old, sizes = groups.shape, groups.sizes
    new_sizes, finer = [1] * len(new), [*sizes]
    for sources, targets in axis_groups(old, new):
        if len(sources) == len(targets) == 1:
            new_sizes[targets[0]] = sizes[sources[0]]
            continue
        lengths, target_lengths = [old[i] for i in sources], [new[j] for j in targets]
        run = _run(tuple((old[i], sizes[i]) for i in sources))
        if all(sizes[i] == old[i] for i in sources):
            spread = target_lengths
        elif run is not None:
            spread, old_sizes = _spread_both(run, target_lengths, lengths)
            for i, size in zip(sources, old_sizes, strict=True):
                finer[i] = size
        else:
            problem = f"the scale cannot follow: only some of axes {sources}, now {targets}, have "
            problem += "one."
            facts = f"shape {tuple(old)}, scale {groups.scale_shape}, new shape {tuple(new)}"
            fix = "reshape before quantizing, or quantize with a coarser granularity."
            raise fail("QTensor.reshape", problem, given=facts, fix=fix)
        for j, size in zip(targets, spread, strict=True):
            new_sizes[j] = size
    return Groups(old, tuple(finer)), Groups(tuple(new), tuple(new_sizes))


def _run(axes: Sequence[tuple[int, int]]) -> int | None:
    """Returns the length of the runs on which a scale over (size, block) axes is constant, or
    `None` if some of the axes share a scale and others do not.
    """
    run, is_shared = 1, True
    for n, b in reversed(axes):
        if is_shared:
            if b == 0:
                return None
            run, is_shared = run * math.gcd(b, n), b == n
        elif b != 1:
            return None
    return run


def _spread_both(
    run: int, new: Sequence[int], old: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Returns block sizes for the axes of two shapes, for the longest part of a run that both can
    hold.
    """
    parts = (part for part in range(run, 0, -1) if run % part == 0)
    pairs = ((_spread(part, new), _spread(part, old)) for part in parts)
    return next((a, b) for a, b in pairs if a is not None and b is not None)


def _spread(run: int, shape: Sequence[int]) -> list[int] | None:
    """Returns block sizes for the axes of `shape` whose product is a run; last axes fill first.
    `None` if there are none.
    """
    sizes = []
    for n in reversed(shape):
        size = math.gcd(n, run)
        if size != min(n, run):
            return None
        sizes.append(size)
        run //= size
    return sizes[::-1]


# Selection from QTensors, and joins along an axis, with the scale in step.


T = TypeVar("T", bound=Any)
"""A QTensor; its own file imports this one."""


def index(q: T, key: Any) -> T:
    """Indexes a QTensor; see `QTensor.__getitem__`."""
    parts = _with_whole_axes(normal_index(key, q.shape), q.shape)
    last_slices = [part for part in parts[-2:] if isinstance(part, slice)]
    if len(last_slices) == 2 and _is_swapped(
        q, {i - 2 for i in (0, 1) if last_slices[i] != slice(None)}
    ):
        return swap_axes(index(swap_axes(q), (*parts[:-2], parts[-1], parts[-2])))
    check_view("QTensor.__getitem__", q, _keeps_last(parts, depth_of(q)))
    check_whole("QTensor.__getitem__", q, parts)
    for axis, part in cut_axes(parts, q.groups).items():
        q = _cut(q, axis, part)
        parts = _with_whole(parts, axis)
    groups = q.groups

    def entry(leaf: Any) -> Any:
        return leaf[index_for(parts, leaf, groups)]

    values, parameters = q.values[parts], q.map_parameters(entry)
    scale = parameters.scale
    shape = real_shape(values.shape, q.layout)
    sizes = list(Groups.of_scale(shape, scale.shape).sizes)
    for axis, size in blocks_after(parts, groups).items():
        if scale.shape[axis] not in (1, shape[axis]):
            sizes[axis] = size
    return dataclasses.replace(
        parameters,
        values=values,
        order=None if q.order is None else entry(q.order),
        blocks=Groups(shape, tuple(sizes)).blocks,
    )


def _cut(q: T, axis: int, part: slice) -> T:
    """Returns a slice of a QTensor along an axis in blocks, in the largest blocks that fit it."""
    indices = np.arange(q.shape[axis], dtype=np.int32)[part]
    size, entries = blocks_at(indices, q.groups.sizes[axis])
    values = q.values[(slice(None),) * axis + (part,)]
    sizes = [*q.groups.sizes]
    sizes[axis] = size
    groups = Groups(real_shape(values.shape, q.layout), tuple(sizes))
    parameters = q.map_parameters(
        lambda leaf: leaf if leaf.shape[axis] == 1 else repeated(leaf, axis, entries)
    )
    return dataclasses.replace(parameters, values=values, blocks=groups.blocks)


def _with_whole(parts: Sequence[Any], axis: int) -> tuple[Any, ...]:
    """Returns an index that takes an axis whole."""
    part_indices = [i for i, part in enumerate(parts) if part is not None and part is not Ellipsis]
    return (*parts[: part_indices[axis]], slice(None), *parts[part_indices[axis] + 1 :])


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
    last_parts = axes[len(axes) - depth :]
    return all(isinstance(part, slice) and part == slice(None) for part in last_parts)


def split(q: T, indices_or_sections: int | Sequence[int], axis: int) -> list[T]:
    """Splits a QTensor along an axis; see `QTensor.split`."""
    (axis,) = normalize_axes("QTensor.split", axis, q.ndim, argument="axis")
    n = q.shape[axis]
    if isinstance(indices_or_sections, (int, np.integer)):
        sections = int(indices_or_sections)
        if sections < 1 or n % sections != 0:
            problem = f"axis {axis} of shape {q.shape} has no {sections} sections: not equal parts."
            fix = f"pass a number that divides {n}, or a list of the indices to split at."
            raise fail("QTensor.split", problem, fix=fix)
        ends = [n // sections * i for i in range(1, sections)]
    else:
        ends = [int(i) for i in indices_or_sections]
    bounds = zip([0, *ends], [*ends, n], strict=True)
    return [q[(slice(None),) * axis + (slice(a, b),)] for a, b in bounds]


def refine(q: T, axis: int, size: int = 1) -> T:
    """Returns the same array in smaller blocks along an axis; `size` divides the block size."""
    n, sizes = q.shape[axis], list(q.groups.sizes)
    block_ids = np.arange(0, n, size, dtype=np.int32) // max(sizes[axis], 1)
    sizes[axis] = size
    blocks = Groups(q.shape, tuple(sizes)).blocks
    finer = q.map_parameters(lambda leaf: repeated(leaf, axis, block_ids))
    return dataclasses.replace(finer, blocks=blocks)


def sliceable(q: T, axis: int) -> T:
    """Returns the same array with an entry for each index along an axis in every leaf, so that a
    scan can step over that axis.
    """
    n = q.shape[axis]
    q = refine(q, axis) if q.scale.shape[axis] != n else q

    def with_axis(leaf: Any) -> Any:
        leaf = repeated(leaf, axis, np.zeros(n, np.int32)) if leaf.shape[axis] != n else leaf
        return sliceable(leaf, axis) if hasattr(leaf, "qtype") else leaf

    if q.order is not None and axis >= permuted_axis(q.order) % q.ndim:
        refuse("scan", q, "steps over an axis before it")
    order = None if q.order is None else with_axis(q.order)
    return dataclasses.replace(q.map_parameters(with_axis), order=order)


def reshape(q: T, shape: tuple[int, ...]) -> T:
    """Reshapes a QTensor; see `QTensor.reshape`."""
    values = jnp.reshape(q.values, shape_of_values("QTensor.reshape", q, shape))
    old_groups, new_groups = reshaped(q.groups, real_shape(values.shape, q.layout))
    for axis, (size, old) in enumerate(zip(old_groups.sizes, q.groups.sizes, strict=True)):
        q = refine(q, axis, size) if size != old else q

    def parameter(leaf: Any) -> Any:
        if hasattr(leaf, "qtype"):
            return _reshape_scale(_as_many(leaf, q.scale.shape), new_groups.scale_shape)
        return jnp.broadcast_to(leaf, q.scale.shape).reshape(new_groups.scale_shape)

    return dataclasses.replace(
        q.map_parameters(parameter),
        values=values,
        order=_reshape_order(q, new_groups.shape),
        blocks=new_groups.blocks,
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
    order_groups = Groups.of_scale(q.shape, q.order.shape)
    sizes = reshaped(order_groups, shape)[1].scale_shape
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
    axis, head = _check_joinable(function, tensors, axis), tensors[0]
    if axis >= head.ndim - 2 and _is_swapped(head, {axis - head.ndim}):
        other_axis = 2 * head.ndim - 3 - axis
        return swap_axes(concatenate(function, list(map(swap_axes, tensors)), other_axis))
    check_view(function, head, axis < head.ndim - depth_of(head))
    tensors = [q for q in tensors if q.shape[axis]]  # empty tensors add no scale
    if not tensors:
        return head
    order = _joined_orders(function, tensors, axis)
    tensors, block = _in_step(_alike_elsewhere(_with_scales_alike(tensors), axis), axis)
    values, scales = _joined([q.values for q in tensors], axis), [q.scale for q in tensors]
    sizes = list(tensors[0].groups.sizes)
    sizes[axis] = block
    return dataclasses.replace(
        head,
        values=values,
        scale=concatenate(function, scales, axis)
        if hasattr(scales[0], "qtype")
        else jnp.concatenate(scales, axis),
        zero_point=_joined_zero_points(tensors, axis),
        offset=_joined_offsets(function, tensors, axis),
        order=order,
        blocks=Groups(real_shape(values.shape, head.layout), tuple(sizes)).blocks,
    )


def _check_joinable(function: str, tensors: Sequence[Any], axis: int) -> int:
    """Checks that tensors have one format and layout, and returns the axis from the front."""
    if not tensors:
        raise fail(function, "there is nothing to join.", fix="pass a list of one QTensor or more.")
    head = tensors[0]
    for q in tensors:
        check_instance(function, "tensors", q, type(head), fix="pass a list of QTensors.")
        has_format = (q.qtype, q.dtype) == (head.qtype, head.dtype)
        if not has_format or q.layout != head.layout:
            problem = f"the tensors have different {'layouts' if has_format else 'formats'}."
            fix = "call q.unpack() on each of them first, or quantize them to one format."
            facts = f"{head!r} and {q!r}"
            raise fail(function, problem, given=facts, fix=fix, error=TypeError)
    return normalize_axes(function, axis, head.ndim, argument="axis")[0]


def _in_step(tensors: list[T], axis: int) -> tuple[list[T], int]:
    """Returns tensors whose blocks have one size after the join, and that size. The tensors do not
    change if only the last one ends with a shorter block; else they get smaller blocks.
    """
    *others, tail = tensors
    size = tensors[0].groups.sizes[axis]
    has_whole_blocks = all(
        q.groups.sizes[axis] == size and q.shape[axis] % size == 0 for q in others
    )
    short = tail.groups.sizes[axis] < size and tail.scale.shape[axis] == 1
    if has_whole_blocks and (tail.groups.sizes[axis] == size or short):
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
    aligned = list(tensors)
    for other_axis in range(tensors[0].ndim):
        sizes = {q.groups.sizes[other_axis] for q in aligned}
        if other_axis != axis and len(sizes) > 1:
            aligned = [refine(q, other_axis, math.gcd(*sizes)) for q in aligned]
    return aligned


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


def _joined_zero_points(tensors: Sequence[Any], axis: int) -> jax.Array | None:
    """Joins zero points. If only some tensors have them, the others get zeros."""
    if all(q.zero_point is None for q in tensors):
        return None
    zero = jnp.zeros((1,) * tensors[0].ndim, format_of(tensors[0].qtype).storage)
    pairs = [(zero if q.zero_point is None else q.zero_point, q.scale.shape) for q in tensors]
    return _joined([jnp.broadcast_to(x, shape) for x, shape in pairs], axis)


def _joined_offsets(function: str, tensors: Sequence[Any], axis: int) -> Any:
    """Joins offsets. If only some tensors have them, the others get zeros."""
    offsets = [q.offset for q in tensors]
    if all(offset is None for offset in offsets):
        return None
    if all(hasattr(offset, "qtype") for offset in offsets):
        expanded = [_as_many(q.offset, q.scale.shape) for q in tensors]
        with contextlib.suppress(TypeError):
            return concatenate(function, expanded, axis)
    offsets = [q.real_offset() for q in tensors]
    dtype = jnp.result_type(*[offset for offset in offsets if offset is not None])
    zero = jnp.zeros((1,) * tensors[0].ndim, dtype)
    pairs = zip(offsets, tensors, strict=True)
    real = [(zero if x is None else x.astype(dtype), q.scale.shape) for x, q in pairs]
    return jnp.concatenate([jnp.broadcast_to(x, shape) for x, shape in real], axis)


def _joined_orders(function: str, tensors: Sequence[Any], axis: int) -> jax.Array | None:
    """Joins orders of arrays that are stacked along an axis before the permuted one."""
    ordered = [q for q in tensors if q.order is not None]
    if not ordered:
        return None
    head = ordered[0]
    order_axis = permuted_axis(head.order) % head.ndim
    alike = len(ordered) == len(tensors) and axis < order_axis
    alike = alike and all(
        q.order.shape[axis] == q.shape[axis] and permuted_axis(q.order) % q.ndim == order_axis
        for q in tensors
    )
    if not alike:
        refuse(function, head, "arrays that are stacked along an axis before it, all permuted")
    return jnp.concatenate([q.order for q in tensors], axis)
