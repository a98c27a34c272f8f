"""Lookups and updates in ONNX, whose starts are clamped as `lax` clamps them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import export, lax

from .. import compat
from ..compat import Eqn
from .graph import Graph, Operand
from .primitives import dtype_of, refuse, rule, scalar, where


def _start(g: Graph, start: Operand, most: Any) -> str:
    """Returns a start of a slice, int64 [1], between 0 and a size."""
    index = g.add("Reshape", g.cast(start, np.int64), g.ints(1))
    return g.add("Min", g.add("Max", index, g.ints(0)), g.size(most))


@rule("dynamic_slice")
def _dynamic_slice(g: Graph, eqn: Eqn, x: Operand, *starts: Operand) -> str:
    sizes, shape = eqn.params["slice_sizes"], eqn.invars[0].aval.shape
    pairs = zip(starts, shape, sizes, strict=True)
    places = [g.ints(0) if n is m or n == m else _start(g, x, n - m) for x, n, m in pairs]
    return g.name(_part(g, x, places, shape, sizes))


@rule("dynamic_update_slice")
def _dynamic_update_slice(g: Graph, eqn: Eqn, x: Operand, update: Operand, *starts: Operand) -> str:
    shape, sizes = (atom.aval.shape for atom in eqn.invars[:2])
    return overwritten(g, x, update, starts, shape, sizes)


def overwritten(
    g: Graph,
    x: Operand,
    update: Operand,
    starts: Sequence[Operand],
    shape: Sequence[Any],
    sizes: Sequence[Any],
) -> str:
    """Returns `x` of a shape, with an update of other sizes written to it."""

    def updated(x: Operand, axes: list[int]) -> Operand:
        """Returns `x` with the update, which has the size of `x` but along some axes."""
        if not axes:
            return update
        axis, *others = axes
        n, size = shape[axis], sizes[axis]
        start = _start(g, starts[axis], n - size)
        end = g.add("Add", start, g.size(size))
        middle = updated(g.slice(x, axis, start, end) if others else x, others)
        parts = g.slice(x, axis, 0, start), middle, g.slice(x, axis, end, n)
        return g.add("Concat", *parts, axis=axis)

    axes = [i for i, (n, m) in enumerate(zip(shape, sizes, strict=True)) if n is not m and n != m]
    return g.name(updated(x, axes))


def _is_one_window(numbers: Any, starts_shape: Sequence[Any]) -> bool:
    """Whether a lookup or an update is of one window, which slices are."""
    return len(starts_shape) == 1 and not numbers.operand_batching_dims


def _one_window(
    g: Graph, axes: Sequence[int], starts: Operand, shape: Sequence[Any], sizes: Sequence[Any]
) -> tuple[list[Operand], Operand]:
    """Returns where a window starts, clamped, along each axis of an array; and whether it lies
    inside as it was.
    """
    places: list[Operand] = [g.ints(0)] * len(shape)
    inside: Operand = np.asarray(True)
    for i, axis in enumerate(axes):
        start = g.cast(g.slice(starts, 0, i, i + 1), np.int64)
        places[axis] = _start(g, start, shape[axis] - sizes[axis])
        is_same = g.add("Squeeze", g.add("Equal", start, places[axis]))
        inside = is_same if isinstance(inside, np.ndarray) else g.add("And", inside, is_same)
    return places, inside


def _part(
    g: Graph, x: Operand, places: Sequence[Operand], shape: Sequence[Any], sizes: Sequence[Any]
) -> Operand:
    """Returns a window of an array."""
    for axis, (place, n, size) in enumerate(zip(places, shape, sizes, strict=True)):
        if size is not n and size != n:
            x = g.slice(x, axis, g.name(place), g.add("Add", place, g.size(size)))
    return x


def _places(
    g: Graph,
    numbers: Any,
    starts: Operand,
    starts_shape: Sequence[int],
    operand_shape: Sequence[int],
    sizes: Sequence[int],
) -> tuple[str, str, list[int]]:
    """Returns the index of each element of all windows, int64 [*batch, *window, rank]; whether each
    window lies inside, bool [*batch, 1...]; and the sizes of the batch.
    """
    if isinstance(numbers, lax.GatherDimensionNumbers):
        mapped, start_batching = numbers.start_index_map, numbers.start_indices_batching_dims
    else:
        mapped = numbers.scatter_dims_to_operand_dims
        start_batching = numbers.scatter_indices_batching_dims
    batching = numbers.operand_batching_dims
    batch, rank = list(starts_shape[:-1]), len(operand_shape)
    starts = g.cast(starts, np.int64)
    highs = g.ints(*(operand_shape[d] - sizes[d] for d in mapped))
    if mapped:
        clamped = g.add("Min", g.add("Max", starts, g.ints(0)), highs)
        same = g.cast(g.add("Equal", starts, clamped), np.int32)
        inside = g.cast(g.add("ReduceMin", same, g.ints(-1), keepdims=0), np.bool_)
    else:
        clamped, inside = starts, g.name(np.ones(batch, np.bool_))
    inside = g.add("Reshape", inside, g.ints(*batch, *[1] * rank))
    columns = []
    for d in range(rank):
        window = np.arange(sizes[d], dtype=np.int64)
        column: Operand = window.reshape(
            [1] * len(batch) + [-1 if i == d else 1 for i in range(rank)]
        )
        if d in mapped:
            start = g.slice(clamped, len(batch), list(mapped).index(d), list(mapped).index(d) + 1)
            start = g.add("Reshape", start, g.ints(*batch, *[1] * rank))
            column = g.add("Add", column, start)
        elif d in batching:
            axis = start_batching[list(batching).index(d)]
            index = np.arange(batch[axis], dtype=np.int64)
            column = index.reshape([-1 if i == axis else 1 for i in range(len(batch))] + [1] * rank)
        full = g.add("Expand", column, g.ints(*batch, *sizes))
        columns.append(g.add("Reshape", full, g.ints(*batch, *sizes, 1)))
    index = g.add("Concat", *columns, axis=-1) if rank > 1 else columns[0]
    return index, inside, batch


@rule("gather")
def gather(g: Graph, eqn: Eqn, x: Operand, starts: Operand) -> str:
    """Rows of an axis by `Gather`; anything else by the index of each element."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, starts_shape = (atom.aval.shape for atom in eqn.invars)
    if (axis := row_axis(eqn)) is not None:
        index = row_index(g, eqn, starts, axis)
        return filled(g, eqn, g.add("Gather", x, index.clamped, axis=axis), index.inside)
    if _is_one_window(numbers, starts_shape):
        places, inside = _one_window(g, numbers.start_index_map, starts, shape, sizes)
        values = _part(g, x, places, shape, sizes)
        return filled(g, eqn, g.reshape(values, eqn.outvars[0].aval.shape), inside)
    if any(map(export.is_symbolic_dim, (*shape, *starts_shape))):
        raise refuse(eqn, "of several windows with open sizes has no form in ONNX")
    index, inside, batch = _places(g, numbers, starts, starts_shape, shape, sizes)
    values = filled(g, eqn, g.add("GatherND", x, index), inside)
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [n for d, n in enumerate(sizes) if d not in dropped]
    values = g.add("Reshape", values, g.ints(*batch, *kept))
    rank, offsets = len(batch) + len(kept), list(numbers.offset_dims)
    batch_axes = [i for i in range(rank) if i not in offsets]
    order = [0] * rank
    for source, target in enumerate([*batch_axes, *offsets]):
        order[target] = source
    return g.transpose(values, order)


def row_axis(eqn: Eqn) -> int | None:
    """Returns the axis of which a gather takes whole rows as `Gather` does; else `None`."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, starts_shape = (atom.aval.shape for atom in eqn.invars)
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return None
    (axis,) = numbers.start_index_map
    if numbers.collapsed_slice_dims != (axis,) or starts_shape[-1] != 1:
        return None
    others = [i for i in range(len(shape)) if i != axis]
    if any(sizes[i] != shape[i] for i in others):
        return None
    batch = len(starts_shape) - 1
    expected = (*range(axis), *range(axis + batch, len(shape) - 1 + batch))
    return axis if tuple(numbers.offset_dims) == expected else None


class Rows(NamedTuple):
    """Which rows a gather takes: their indices within the axis, and whether they were inside."""

    clamped: str
    inside: str


def row_index(g: Graph, eqn: Eqn, starts: Operand, axis: int) -> Rows:
    """Returns the rows of a gather along an axis; `inside` broadcasts to its result."""
    shape, starts_shape = (atom.aval.shape for atom in eqn.invars)
    index = g.reshape(g.cast(starts, np.int64), starts_shape[:-1])
    first, last = np.asarray(0, np.int64), shape[axis] - 1
    is_open = export.is_symbolic_dim(last)
    last = g.add("Squeeze", g.size(last)) if is_open else np.asarray(last, np.int64)
    clamped = g.add("Min", g.add("Max", index, first), last)
    aligned = [1] * axis + list(starts_shape[:-1]) + [1] * (len(shape) - axis - 1)
    return Rows(clamped, g.reshape(g.add("Equal", index, clamped), aligned))


def filled(g: Graph, eqn: Eqn, values: str, inside: str) -> str:
    """Returns the values of a gather, and what its mode gives outside of the array."""
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return values
    return where(g, inside, values, _fill(eqn), dtype_of(eqn))


def _fill(eqn: Eqn) -> np.ndarray:
    """Returns what a gather gives outside of the array: NaN, or the number of JAX for a dtype."""
    dtype, value = dtype_of(eqn), eqn.params.get("fill_value")
    if value is None and np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        value = limits.min or limits.max
    elif value is None:
        value = dtype == np.bool_ or np.nan
    return np.asarray(value, dtype)


@rule("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(g: Graph, eqn: Eqn, x: Operand, starts: Operand, updates: Operand) -> str:
    p, name = eqn.params, eqn.primitive.name.replace("-", "_")
    combine, _ = compat.open_jaxpr(p["update_jaxpr"])
    if name == "scatter" and getattr(combine, "eqns", None):
        raise refuse(eqn, "with a function of the elements has no form in ONNX")
    numbers, mode = p["dimension_numbers"], p["mode"]
    shape, starts_shape, updates_shape = (atom.aval.shape for atom in eqn.invars)
    windows = list(numbers.update_window_dims)
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    iterator = iter(updates_shape[d] for d in windows)
    sizes = [1 if d in dropped else next(iterator) for d in range(len(shape))]
    drops = mode in (lax.GatherScatterMode.FILL_OR_DROP, None)
    if _is_one_window(numbers, starts_shape):
        axes = numbers.scatter_dims_to_operand_dims
        places, inside = _one_window(g, axes, starts, shape, sizes)
        new: Operand = g.reshape(updates, sizes)
        if name != "scatter":
            old = _part(g, x, places, shape, sizes)
            op = {"add": "Add", "mul": "Mul", "min": "Min", "max": "Max"}[name.split("_")[1]]
            new = g.add(op, old, new)
        result = overwritten(g, x, new, places, shape, sizes)
        return where(g, inside, result, x, dtype_of(eqn)) if drops else result
    if any(map(export.is_symbolic_dim, (*shape, *starts_shape, *updates_shape))):
        raise refuse(eqn, "of several windows with open sizes has no form in ONNX")
    index, inside, batch = _places(g, numbers, starts, starts_shape, shape, sizes)
    order = [d for d in range(len(updates_shape)) if d not in windows] + windows
    values = g.add("Reshape", g.transpose(updates, order), g.ints(*batch, *sizes))
    reduction = "none" if name == "scatter" else name.removeprefix("scatter_")

    def put(x: Operand, values: Operand, reduction: str) -> str:
        """Returns `x` with the updates; those outside go to one more element, which is dropped."""
        if not drops:
            return g.add("ScatterND", x, index, values, reduction=reduction)
        count = math.prod(shape)
        strides = g.ints(*(math.prod(shape[d + 1 :]) for d in range(len(shape))))
        place = g.add("ReduceSum", g.add("Mul", index, strides), g.ints(-1), keepdims=0)
        place = g.add("Where", inside, place, np.asarray(count, np.int64))
        flat, updates = (g.add("Reshape", a, g.ints(-1)) for a in (x, values))
        flat = g.add("Concat", flat, g.add("Slice", updates, *map(g.ints, (0, 1, 0))), axis=0)
        place = g.add("Reshape", place, g.ints(-1, 1))
        flat = g.add("ScatterND", flat, place, updates, reduction=reduction)
        return g.reshape(g.slice(flat, 0, 0, count), shape)

    result = put(x, values, reduction)
    if reduction in ("min", "max") and jnp.issubdtype(dtype_of(eqn), jnp.floating):
        # Runtimes pass over NaN.
        old, new = (g.cast(g.add("IsNaN", a), np.int32) for a in (x, values))
        has_nan = g.cast(put(old, new, "max"), np.bool_)
        result = g.add("Where", has_nan, scalar(eqn, np.nan), result)
    return result
