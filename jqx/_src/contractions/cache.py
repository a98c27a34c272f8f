"""Reads and writes at places that are known only at run time: `take` (embedding lookups), slices,
gather and scatter, as caches of keys and values need them.

A write replaces a scale if it overwrites all elements that share it. Otherwise the scale stays, and
the written elements are quantized with it.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import ArrayLike

from ..checks import as_integers, as_real, as_signed, called, normalize_axes
from ..errors import fail
from ..numerics.exact import bit_width
from ..numerics.lookup import format_of
from ..numerics.qtype import Integer
from ..statistics.calibrators import Affine, absmax, minmax
from ..statistics.granularity import Groups, per_block, per_tensor
from ..tensor.layout import check_dtypes, check_kept, lay_out, swap_axes
from ..tensor.qtensor import QTensor
from ..tensor.spec import QSpec
from ..tensor.views import refine
from .dot_general import Operand, as_operand
from .problem import check_no_offset_or_order

MODES = (None, "fill", "clip", "wrap")


@called("take")
def take(
    operand: Operand,
    indices: ArrayLike,
    axis: int | None = None,
    *,
    mode: str | None = None,
    fill_value: float | None = None,
) -> jax.Array:
    """Takes indices along an axis of an array or QTensor, as `jax.numpy.take`.

    Codes, scales and zero points are gathered, and the gathered elements are dequantized. Packed
    codes are also unpacked after the gather, unless `axis` is the packed axis or `None`. The result
    equals `jax.numpy.take(operand.dequantize(), ...)`, bit for bit.

    Args:
      operand: array or QTensor, any shape.
      indices: integers, any shape; negative ones count from the end, but are out of bounds for
        `mode="clip"`.
      axis: the axis to take from; `None` takes from the flattened array.
      mode: the result of an index out of bounds: `"fill"` (or `None`) gives `fill_value`, `"clip"`
        the nearest element, and `"wrap"` the element at the index modulo the length.
      fill_value: a number, for `mode="fill"`; `None` means NaN.

    Returns:
      Array of the dtype of `operand`, its shape with `axis` replaced by the shape of `indices`.

    Raises:
      ValueError: `axis` is out of range, `mode` is unknown, or `fill_value` is given for a mode
        without a fill value.
      TypeError: `indices` are not integers.
      IndexError: indices are taken from an axis of length 0.

    Gradient: JAX differentiates it with respect to the scale; codes have no gradient.
    NaN and infinities: NaN out of bounds, unless `fill_value` says otherwise; scales as in
      `QTensor.dequantize`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> table = jnp.array([[1.0, 127.0], [-254.0, 2.0], [3.0, -381.0]])
      >>> q = jqx.QTensor.quantize(table, jqx.QSpec(jnp.int8, jqx.per_axis(0)))
      >>> jqx.take(q, jnp.array([2, 0]), axis=0)
      Array([[   3., -381.],
             [   1.,  127.]], dtype=float32)
    """
    _check_mode(mode, fill_value)
    if not isinstance(operand, QTensor):
        return jnp.take(operand, indices, axis=axis, mode=mode, fill_value=fill_value)
    q = as_operand(operand)
    if axis is not None:
        (axis,) = normalize_axes("take", axis, q.ndim, argument="axis")
    n = q.size if axis is None else q.shape[axis]
    indices = as_integers("take", "indices", _wrapped(indices, n) if mode == "wrap" else indices)
    if n == 0 and indices.size != 0:
        problem = f"there is nothing to take from an axis of length 0, in shape {q.shape}."
        raise fail("take", problem, fix="take from another axis.", error=IndexError)
    positions, inside = _places(indices, n, mode)
    rows = _elements(q, positions) if axis is None else _rows(q, positions, axis)
    if inside is None:
        return rows
    fill = jnp.asarray(math.nan if fill_value is None else fill_value, q.dtype)
    lead = axis or 0
    trail = rows.ndim - lead - indices.ndim
    return jnp.where(inside.reshape((1,) * lead + indices.shape + (1,) * trail), rows, fill)


def take_along(q: Any, index: jax.Array, axis: int) -> Any:
    """Takes places, a vector of indices in range, along an axis of an array or QTensor whose codes
    are not packed along it.
    """
    if not isinstance(q, QTensor):
        return jnp.take(q, index, axis=axis, mode="clip")
    swapped = q.layout is not None and q.layout.swapped and axis >= q.ndim - 2
    stored_axis = 2 * q.ndim - 3 - axis if swapped else axis
    groups, order = q.groups, q.order
    if order is not None:
        check_kept("take", q, axis)
        order = order if order.shape[axis] == 1 else take_along(order, index, axis)
    taken = q.map_parameters(lambda leaf: take_entries(leaf, index, axis, groups))
    # `blocks` stays valid for other axes; along this axis, entries are shared or per element.
    return dataclasses.replace(taken, values=take_along(q.values, index, stored_axis), order=order)


def take_entries(parameter: Any, positions: jax.Array, axis: int, groups: Groups) -> Any:
    """Takes the entries of a scale or zero point for the elements at `positions`; a shared entry
    does not change.
    """
    if parameter.shape[axis] == 1:
        return parameter
    return take_along(parameter, positions // groups.sizes[axis], axis)


def _rows(q: QTensor, positions: jax.Array, axis: int) -> jax.Array:
    """Returns the elements at places along an axis, dequantized."""
    packing = None if q.layout is None else q.layout.packing
    if packing is not None and packing.axis + q.ndim == axis:
        q = q.unpack()
    if any(map(export.is_symbolic_dim, positions.shape[1:])):  # JAX may not be able to flatten them
        return jax.vmap(lambda vector: _rows(q, vector, axis), out_axes=axis)(positions)
    # Places are flattened to one axis, so that the layout, which counts from the last, stays valid.
    rows = take_along(q, positions.reshape(-1), axis).dequantize()
    return rows.reshape(*q.shape[:axis], *positions.shape, *q.shape[axis + 1 :])


def _elements(q: QTensor, positions: jax.Array) -> jax.Array:
    """Returns the elements at places of the flattened array, dequantized.

    It indexes by coordinates, because most scales could not follow a flattening.
    """
    q = q.unpack() if q.ndim else q[None]
    return q[jnp.unravel_index(positions, q.shape)].dequantize()


def _wrapped(indices: Any, n: Any) -> Any:
    """Returns NumPy's integers modulo the length, before JAX makes 32 bits of 64."""
    is_numpy = isinstance(indices, np.ndarray) and jnp.issubdtype(indices.dtype, jnp.integer)
    return indices % n if is_numpy and isinstance(n, int) and n else indices


def _places(indices: jax.Array, n: int, mode: str | None) -> tuple[jax.Array, jax.Array | None]:
    """Returns indices in `[0, n)`, and, for a mode that fills, which of them were in bounds."""
    if mode == "wrap":
        wide = indices if indices.dtype.itemsize >= 4 else as_signed(indices, n)
        return as_signed(wide % n, n), None
    indices = as_signed(indices, n)
    if mode == "clip":
        return jnp.clip(indices, 0, n - 1), None
    indices = jnp.where(indices < 0, indices + n, indices)
    return jnp.clip(indices, 0, n - 1), (indices >= 0) & (indices < n)


def _check_mode(mode: str | None, fill_value: float | None) -> None:
    if mode not in MODES:
        fix = f"pass one of {', '.join(map(repr, MODES))}."
        raise fail("take", f"`mode` is unknown: {mode!r}.", fix=fix)
    if fill_value is not None and mode not in (None, "fill"):
        raise fail(
            "take", f"`fill_value` has no effect with mode={mode!r}.", fix="drop one of the two."
        )


# The place, in codes, scales and zero points, of a slice whose start is known at run time.


class Window(NamedTuple):
    """The place of a slice: clamped starts (integers if they are known), and sizes."""

    starts: tuple[Any, ...]
    sizes: tuple[int, ...]


def window_of(function: str, q: QTensor, starts: Any, sizes: Sequence[int]) -> Window:
    """Returns the window, after checking that it fits and takes the axes of the layout whole."""
    check_dtypes(function, q)
    starts = tuple(starts) if isinstance(starts, Sequence) or np.ndim(starts) == 1 else (starts,)
    sizes = tuple(map(int, sizes))
    if not len(starts) == len(sizes) == q.ndim or any(
        not 0 <= size <= n for size, n in zip(sizes, q.shape, strict=True)
    ):
        raise fail(
            function,
            f"the slice does not fit: {len(starts)} starts and sizes {sizes}, for shape {q.shape}.",
            fix="pass a start and a size for every axis.",
        )
    clamped = [
        _clamped(function, start, n, size)
        for start, n, size in zip(starts, q.shape, sizes, strict=True)
    ]
    depth = 0 if q.layout is None else q.layout.depth
    if sizes[q.ndim - depth :] != q.shape[q.ndim - depth :]:
        problem = f"the slice cuts an axis along which the codes are {q.layout}."
        fix = "call q.unpack() first."
        raise fail(function, problem, given=f"sizes {sizes} for {q!r}", fix=fix)
    return Window(tuple(clamped), sizes)


def sliced(q: QTensor, window: Window) -> QTensor:
    """Returns the window of a QTensor."""
    values, order = lax.dynamic_slice(q.values, *place_of_values(q, window)), q.order
    if order is not None:
        for axis, (n, size) in enumerate(zip(q.shape, window.sizes, strict=True)):
            if size != n:
                check_kept("dynamic_slice", q, axis)
        order = _slice(
            order, *place_of_entries(order.shape, Groups(q.shape, (1,) * q.ndim), window)
        )
    blocks = groups_in(q.groups, window).blocks
    return dataclasses.replace(
        q.map_parameters(lambda leaf: parameter_in(leaf, q.groups, window)),
        values=values,
        order=order,
        blocks=blocks,
    )


def _clamped(function: str, start: Any, n: int, size: int) -> Any:
    """Returns a start as `lax.dynamic_slice` interprets it."""
    if isinstance(start, (int, np.integer)) and not isinstance(start, bool):
        return min(max(int(start) + n if start < 0 else int(start), 0), n - size)
    start = as_integers(function, "start_indices", start)
    if start.shape:
        problem = f"a start is not one integer, but has the shape {start.shape}."
        raise fail(function, problem, fix="pass a tuple of integers.", error=TypeError)
    if size == n:
        return 0
    start = as_signed(start, n)
    return jnp.clip(jnp.where(start < 0, start + n, start), 0, n - size).astype(jnp.int32)


def is_on_blocks(window: Window, axis: int, n: int, b: int) -> bool:
    """Whether a window is known to start and end at borders of blocks."""
    start, size = window.starts[axis], window.sizes[axis]
    starts_block = isinstance(start, int) and start % b == 0 and size > 0
    return starts_block and (size % b == 0 or start + size == n)


def groups_in(groups: Groups, window: Window) -> Groups:
    """Returns which elements of a window share a scale."""
    sizes = []
    for axis, (n, b) in enumerate(zip(groups.shape, groups.sizes, strict=True)):
        blocked = 1 < b < n and window.sizes[axis] != n
        cut = blocked and not is_on_blocks(window, axis, n, b)
        sizes.append(1 if cut or b == 1 else min(b, window.sizes[axis]))
    return Groups(window.sizes, tuple(sizes))


def place_of_values(q: QTensor, window: Window) -> tuple[list[Any], list[int]]:
    """Returns the starts and sizes of a window of codes, in their layout."""
    lead = q.ndim - (0 if q.layout is None else q.layout.depth)
    starts = [*window.starts[:lead], *(0,) * (q.ndim - lead)]
    return _alike(starts), [*window.sizes[:lead], *q.values.shape[lead:]]


def place_of_entries(
    entries: Sequence[int], groups: Groups, window: Window
) -> tuple[list[Any], list[int]]:
    """Returns the starts and sizes of a window of scales or zero points; it cuts no block."""
    starts, sizes = [], []
    for axis, m in enumerate(entries):
        is_full = m == 1 or window.sizes[axis] == groups.shape[axis]
        b = groups.sizes[axis]
        starts.append(0 if is_full else window.starts[axis] // b)
        sizes.append(m if is_full else -(-window.sizes[axis] // b))
    return _alike(starts), sizes


def _alike(starts: Sequence[Any]) -> list[Any]:
    """Returns starts of one dtype, which `lax` requires."""
    return [np.int32(start) if isinstance(start, int) else start for start in starts]


def affine_in(q: QTensor, window: Window) -> Affine:
    """Returns the scale and zero point of a window."""
    zero = q.zero_point
    return Affine(
        parameter_in(q.scale, q.groups, window),
        None if zero is None else parameter_in(zero, q.groups, window),
    )


def parameter_in(parameter: Any, groups: Groups, window: Window) -> Any:
    """Returns the part of a scale, zero point or offset that belongs to a window."""
    for axis, (n, b) in enumerate(zip(groups.shape, groups.sizes, strict=True)):
        size = window.sizes[axis]
        if not 1 < b < n or size == n or is_on_blocks(window, axis, n, b):
            continue
        indices = window.starts[axis] + jnp.arange(size, dtype=jnp.int32)
        parameter = take_entries(parameter, indices, axis, groups)
        groups = Groups(_put(groups.shape, axis, size), _put(groups.sizes, axis, 1))
    return _slice(parameter, *place_of_entries(parameter.shape, groups, window))


def _slice(parameter: Any, starts: Sequence[Any], sizes: Sequence[int]) -> Any:
    if isinstance(parameter, QTensor):
        return sliced(parameter, Window(tuple(starts), tuple(sizes)))
    return lax.dynamic_slice(parameter, starts, sizes)


def _put(items: tuple[Any, ...], axis: int, item: Any) -> tuple[Any, ...]:
    return (*items[:axis], item, *items[axis + 1 :])


@overload
def dynamic_slice(operand: QTensor, start_indices: Any, slice_sizes: Sequence[int]) -> QTensor: ...
@overload
def dynamic_slice(
    operand: ArrayLike, start_indices: Any, slice_sizes: Sequence[int]
) -> jax.Array: ...
@called("dynamic_slice")
def dynamic_slice(
    operand: Operand, start_indices: Any, slice_sizes: Sequence[int]
) -> jax.Array | QTensor:
    """Returns a slice whose start is a run-time value, as `jax.lax.dynamic_slice`.

    `dynamic_slice(q, ...).dequantize()` equals `dynamic_slice(q.dequantize(), ...)`. Along an axis
    with blocks, a slice whose start is a Python integer has the largest blocks that fit it;
    otherwise each of its elements gets its own scale.

    Args:
      operand: array or QTensor, any shape.
      start_indices: an integer for each axis, or a vector of them; negative integers count from
        the end. They are clamped so that the slice fits.
      slice_sizes: the shape of the slice.

    Returns:
      An array or a QTensor, like `operand`, of shape `slice_sizes`.

    Raises:
      ValueError: starts or sizes do not fit the shape, or the slice cuts an axis along which codes
        are packed or swapped.
      TypeError: a start is not an integer.

    Gradient: JAX differentiates it with respect to the scale; codes have no gradient.
    NaN and infinities: kept; nothing is computed.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> x = jnp.array([[1.0, 2.0], [3.0, 127.0], [5.0, 6.0]])
      >>> q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8))
      >>> jqx.dynamic_slice(q, (jnp.int32(7), 0), (1, 2)).dequantize()
      Array([[5., 6.]], dtype=float32)
    """
    if not isinstance(operand, QTensor):
        return lax.dynamic_slice(jnp.asarray(operand), start_indices, slice_sizes)
    layout, sizes = operand.layout, tuple(slice_sizes)
    if layout is not None and layout.swapped and len(sizes) == operand.ndim:
        cut = {i - len(sizes) for i, n in enumerate(sizes) if n != operand.shape[i]}
        if layout.follows((), cut):
            turned = [[*x[:-2], *reversed(x[-2:])] for x in (tuple(start_indices), sizes)]
            return swap_axes(dynamic_slice(swap_axes(operand), *turned))
    window = window_of("dynamic_slice", operand, start_indices, slice_sizes)
    are_known = [isinstance(start, int) for start in window.starts]
    if any(are_known):
        parts = [
            slice(start, start + n) if is_known else slice(None)
            for start, n, is_known in zip(*window, are_known, strict=True)
        ]
        operand = operand[tuple(parts)]
        pairs = zip(window.starts, are_known, strict=True)
        window = window._replace(starts=tuple(0 if is_known else x for x, is_known in pairs))
    return sliced(operand, window)


@overload
def dynamic_update_slice(operand: QTensor, update: Operand, start_indices: Any) -> QTensor: ...
@overload
def dynamic_update_slice(
    operand: ArrayLike, update: ArrayLike, start_indices: Any
) -> jax.Array: ...
@called("dynamic_update_slice")
def dynamic_update_slice(
    operand: Operand, update: Operand, start_indices: Any
) -> jax.Array | QTensor:
    """Returns `operand` with an overwritten slice whose start is a run-time value, as
    `jax.lax.dynamic_update_slice`.

    An array is quantized to the format of the QTensor it is written to. If the slice holds all
    elements that share a scale (a token in a cache with one scale per token, or whole blocks), new
    scales are computed from the array: from the largest magnitude, or with zero points from the
    range. If elements outside of the slice share a scale with it (one scale for the whole cache),
    scales and zero points do not change, and the array is quantized with them; calibrate them
    beforehand. A QTensor is written with its own scales, which is possible only in the first case;
    pass a QTensor to find the scales in another way.

    Args:
      operand: array or QTensor, any shape. If it is donated to a jit, it is updated in place.
      update: array of floats, or QTensor of the format, dtype and granularity of `operand` (or a
        coarser one); its shape is that of the slice.
      start_indices: as in `jqx.dynamic_slice`. Along an axis with blocks that is not overwritten as
        a whole, a Python integer at the border of a block; the slice must also end at a border. If
        the start is known only at run time, give the blocks their own axis:
        `q.reshape(..., n // b, b, ...)`.

    Returns:
      An array or a QTensor, like `operand`, of its shape, dtypes and layout.

    Raises:
      ValueError: starts or shapes do not fit; the slice cuts a block, or an axis along which codes
        are packed or swapped; `update` is a QTensor with scales that `operand` cannot hold.
      TypeError: a start is not an integer; `update` is a QTensor of another format or dtype, or
        `operand` is not a QTensor.

    Gradient: JAX differentiates it with respect to scales; codes have no gradient.
    NaN and infinities: a NaN in the array makes its new scale NaN; else as in `jqx.quantize`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> cache = jqx.QTensor.zeros((4, 2), jqx.QSpec(jnp.int8, jqx.per_axis(0)))
      >>> cache = jqx.dynamic_update_slice(cache, jnp.array([[1.0, 254.0]]), (jnp.int32(1), 0))
      >>> cache.dequantize()
      Array([[  0.,   0.],
             [  0., 254.],
             [  0.,   0.],
             [  0.,   0.]], dtype=float32)
    """
    function = "dynamic_update_slice"
    if not isinstance(operand, QTensor):
        if isinstance(update, QTensor):
            problem = f"a QTensor cannot be written to an array: update {update!r}."
            fix = "pass update.dequantize(), or start from jqx.QTensor.zeros(shape, spec)."
            raise fail(function, problem, fix=fix, error=TypeError)
        return lax.dynamic_update_slice(jnp.asarray(operand), jnp.asarray(update), start_indices)
    check_no_offset_or_order(function, operand, update)
    update = update if isinstance(update, QTensor) else as_real(function, "update", update)
    window = window_of(function, operand, start_indices, update.shape)
    if 0 in window.sizes:
        return operand
    _check_blocks(operand, window)
    if isinstance(update, QTensor):
        return _written(operand, _matched(operand, update, window), window)
    return _written(operand, _quantized(operand, update, window), window)


def _check_blocks(q: QTensor, window: Window) -> None:
    groups = q.groups
    for axis, (n, b) in enumerate(zip(groups.shape, groups.sizes, strict=True)):
        blocked = 1 < b < n and window.sizes[axis] != n
        if blocked and not is_on_blocks(window, axis, n, b):
            start = window.starts[axis]
            start = start if isinstance(start, int) else "known only at run time"
            raise fail(
                "dynamic_update_slice",
                f"the slice may cut a block along axis {axis}.",
                given=f"size {window.sizes[axis]}, start {start}, blocks of {b}",
                fix=f"give the blocks their own axis, q.reshape(..., {n // b}, {b}, ...); or pass "
                "a Python integer as start, and whole blocks.",
            )


def _shared_axes(q: QTensor, window: Window) -> list[int]:
    """Returns the axes along which elements inside and outside of the window share a scale."""
    return [
        axis
        for axis, (size, n) in enumerate(zip(window.sizes, q.shape, strict=True))
        if size < n and q.scale.shape[axis] == 1
    ]


def spec_like(q: QTensor, groups: Groups) -> QSpec:
    """Returns the spec to quantize an array with its own groups to the format of a QTensor: from
    the largest magnitude, or with zero points from the range.
    """
    form = format_of(q.qtype)
    unsigned = isinstance(form, Integer) and not form.signed
    symmetric = q.zero_point is None and not unsigned
    sizes = {axis: max(b, 1) for axis, b in enumerate(groups.sizes)}
    granularity = per_block(sizes, tail=True) if sizes else per_tensor()
    return QSpec(q.qtype, granularity, symmetric, absmax if symmetric else minmax)


def _quantized(q: QTensor, x: jax.Array, window: Window) -> QTensor:
    """Quantizes the array to be written, with new scales or with those that it shares."""
    old, spec = affine_in(q, window), spec_like(q, groups_in(q.groups, window))
    affine = old
    if not _shared_axes(q, window):
        new = spec.calibrator.fit(x, spec)
        check_zero_points(q, new.zero_point, old.zero_point)
        affine = Affine(_kept_as(new.scale, old.scale), new.zero_point)
    packing = None if q.layout is None else q.layout.packing
    pack = None if packing is None else packing.axis + q.ndim
    return QTensor.quantize(x, spec, affine, pack=pack)


def _kept_as(scale: Any, old: Any) -> Any:
    """Returns a scale in the float dtype or the quantized format of the scale it replaces."""
    if isinstance(old, QTensor):
        scale = scale.astype(old.dtype)
        inner: Any = old.scale
        return QTensor.quantize(scale, QSpec(old.qtype), Affine(inner))
    return scale.astype(old.dtype)


def _matched(q: QTensor, update: QTensor, window: Window) -> QTensor:
    """Returns the update with as many scales and zero points as the window of the operand has."""
    _check_format(q, update)
    shared = _shared_axes(q, window)
    nested = isinstance(q.scale, QTensor)
    if shared or nested:
        raise fail(
            "dynamic_update_slice",
            "scales of `operand` are shared with elements that are not overwritten"
            + (f", along axes {shared}." if shared else ": they are quantized, with one scale."),
            given=f"update {update!r} for operand {q!r}",
            fix="pass the array itself, or update.dequantize().",
        )
    target = groups_in(q.groups, window)
    for axis, (n, b) in enumerate(zip(target.shape, target.sizes, strict=True)):
        size = update.groups.sizes[axis]
        if size != b and not (b > 0 and size > b and (size % b == 0 or size == n)):
            raise fail(
                "dynamic_update_slice",
                f"`operand` has fewer scales than `update` along axis {axis}.",
                given=f"update {update!r} for operand {q!r}, one scale for {b} elements",
                fix="quantize update with the granularity of operand, or pass the array itself.",
            )
        update = update if size == b else refine(update, axis, b)
    zero_point: Any = update.zero_point
    if q.zero_point is not None and zero_point is None:
        zero_point = jnp.zeros(update.scale.shape, q.zero_point.dtype)
    old = affine_in(q, window).zero_point
    check_zero_points(q, zero_point, old)
    if old is not None:
        zero_point = jnp.broadcast_to(zero_point, old.shape)
    return dataclasses.replace(update, zero_point=zero_point)


def _check_format(q: QTensor, update: QTensor) -> None:
    def kinds(x: QTensor) -> tuple[Any, ...]:
        return x.qtype, x.dtype, x.scale.dtype, getattr(x.scale, "qtype", None)

    if kinds(q) != kinds(update):
        problem = f"`operand` and `update` have different formats: {q!r} and {update!r}."
        fix = "quantize update to the format of operand, or pass update.dequantize()."
        raise fail("dynamic_update_slice", problem, fix=fix, error=TypeError)


def check_zero_points(q: QTensor, new: Any, old: Any) -> None:
    """Checks that the operand has a place for each zero point to be written."""
    if new is not None and (
        old is None or any(m not in (1, n) for m, n in zip(new.shape, old.shape, strict=True))
    ):
        problem = f"`operand` has no place for the zero points of shape {new.shape}: {q!r}."
        fix = "start from jqx.QTensor.zeros(shape, spec) with the spec of update."
        raise fail("dynamic_update_slice", problem, fix=fix)


def _written(q: QTensor, update: QTensor, window: Window) -> QTensor:
    """Writes codes, scales and zero points of the same granularity and format."""

    def write(parameter: Any, new: Any) -> Any:
        if isinstance(parameter, QTensor):  # its own scale is shared, and does not change
            values = write(parameter.values, new.values)
            return dataclasses.replace(parameter, values=values)
        starts, _ = place_of_entries(parameter.shape, q.groups, window)
        return lax.dynamic_update_slice(parameter, new, starts)

    starts, _ = place_of_values(q, window)
    return dataclasses.replace(
        q,
        values=lax.dynamic_update_slice(q.values, values_as(update, q), starts),
        scale=write(q.scale, update.scale),
        zero_point=None if q.zero_point is None else write(q.zero_point, update.zero_point),
    )


def values_as(update: QTensor, q: QTensor) -> jax.Array:
    """Returns the codes of `update` in the layout of another QTensor."""
    if update.layout == q.layout:
        return update.values
    plain = update.unpack()
    return plain.values if q.layout is None else lay_out(plain, q.layout).values


# `lax.gather` and `lax.scatter` on QTensors: scales are read and written in step with values.
#
# Along an axis that shares one scale there is one entry, with index 0. Along an axis with blocks, a
# slice must take the whole axis.


FILL = lax.GatherScatterMode.FILL_OR_DROP


def gathered(q: QTensor, indices: jax.Array, **options: Any) -> QTensor | None:
    """Returns the result of `lax.gather`, still quantized; `None` if the scale cannot follow.

    Elements out of bounds are NaN if NaN is the fill value.
    """
    sizes, numbers = options["slice_sizes"], options["dimension_numbers"]
    indexed, fill = numbers.start_index_map, options.pop("fill_value", None)
    fills = options["mode"] == FILL
    fills_nan = fill is None or (isinstance(fill, float) and np.isnan(fill))
    q = q.unpack()
    for axis in (*numbers.operand_batching_dims, *(indexed if fills else ())):
        q = refine(q, axis) if q.scale.shape[axis] != q.shape[axis] else q
    entries = _entries(q.groups, sizes)
    nested = isinstance(q.scale, QTensor) or isinstance(q.offset, QTensor)
    if nested or q.order is not None or entries is None or (fills and not fills_nan):
        return None
    shared = [axis for axis in indexed if q.scale.shape[axis] == 1 != q.shape[axis]]
    entry_indices = _on_entries(indices, indexed, shared)

    def take(parameter: jax.Array) -> jax.Array:
        full = jnp.broadcast_to(parameter, q.scale.shape)
        return lax.gather(full, entry_indices, **{**options, "slice_sizes": entries})

    values = lax.gather(q.values, indices, fill_value=0 if fills else None, **options)
    return dataclasses.replace(q.map_parameters(take), values=values)


def scattered(q: QTensor, indices: jax.Array, updates: jax.Array, **options: Any) -> QTensor | None:
    """Returns a QTensor with windows overwritten by `lax.scatter`; `None` if the scale cannot
    follow.

    The written elements are quantized with new scales if a window holds all elements that share a
    scale, or with the scale of the whole tensor if it has only one.
    """
    numbers, original, q = options["dimension_numbers"], q, q.unpack()
    if isinstance(q.scale, QTensor) or q.offset is not None or q.order is not None:
        return None
    single_axes = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window_axes = [axis for axis in range(q.ndim) if axis not in single_axes]
    window, groups = [1] * q.ndim, [1] * updates.ndim
    for axis, update_axis in zip(window_axes, numbers.update_window_dims, strict=True):
        window[axis] = updates.shape[update_axis]
        groups[update_axis] = min(q.groups.sizes[axis], updates.shape[update_axis])
    shared = [i for i, (m, n) in enumerate(zip(q.scale.shape, q.shape, strict=True)) if m == 1 != n]
    is_per_tensor = len(shared) == sum(n != 1 for n in q.shape)
    cut = any(window[axis] != q.shape[axis] for axis in shared)
    if _entries(q.groups, window) is None or (cut and not is_per_tensor):
        return None
    if is_per_tensor:
        spec = spec_like(q, Groups(updates.shape, updates.shape))
        new = QTensor.quantize(updates.astype(q.dtype), spec, _reshaped(q, updates.ndim))
        written = q
    else:
        new = QTensor.quantize(
            updates.astype(q.dtype), spec_like(q, Groups(updates.shape, tuple(groups)))
        )
        entry_indices = _on_entries(indices, numbers.scatter_dims_to_operand_dims, shared)

        def put(parameter: Any, entry: Any) -> Any:
            target = jnp.broadcast_to(parameter, q.scale.shape)
            return lax.scatter(target, entry_indices, entry.astype(target.dtype), **options)

        if new.zero_point is not None and (
            q.zero_point is None or q.zero_point.shape != q.scale.shape
        ):
            return None
        zero_point = None if q.zero_point is None else put(q.zero_point, new.zero_point)
        written = dataclasses.replace(q, scale=put(q.scale, new.scale), zero_point=zero_point)
    codes = _in_bytes(q.values, indices, new.values, options)
    written = dataclasses.replace(written, values=codes)
    return dataclasses.replace(written, values=values_as(written, original), layout=original.layout)


def _reshaped(q: QTensor, rank: int) -> Affine:
    """Returns the single scale of a tensor for an array of another rank."""
    shape, zero = (1,) * rank, q.zero_point
    return Affine(q.real_scale().reshape(shape), None if zero is None else zero.reshape(shape))


def _in_bytes(x: jax.Array, indices: jax.Array, updates: jax.Array, options: Any) -> jax.Array:
    """Scatters codes; integers of less than 8 bits are scattered as bytes."""
    dtype = x.dtype
    if not jnp.issubdtype(dtype, jnp.integer) or bit_width(dtype) >= 8:
        return lax.scatter(x, indices, updates, **options)
    wide = jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
    written = lax.scatter(x.astype(wide), indices, updates.astype(wide), **options)
    return written.astype(dtype)


def _entries(groups: Groups, sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the size of a slice of the scale; `None` if the slice of the values cuts blocks."""
    entry_sizes = []
    for n, b, m, size in zip(groups.shape, groups.sizes, groups.scale_shape, sizes, strict=True):
        if m not in (1, n) and size != n:
            return None
        entry_sizes.append(size if m == n and b == 1 else m)
    return tuple(entry_sizes)


def _on_entries(indices: jax.Array, axes: Sequence[int], shared: Sequence[int]) -> jax.Array:
    """Returns the indices of the entries of the scale: 0 along axes that share one."""
    has_entries = np.array([axis not in shared for axis in axes])
    lined_up = has_entries.reshape((1,) * (indices.ndim - 1) + (-1,))
    return jnp.where(lined_up, indices, jnp.zeros_like(indices))


# Quantized arrays in the format of others: quantized from floats, or selected by element.


def quantized_like(q: QTensor, x: jax.Array) -> QTensor:
    """Quantizes an array of the shape of a QTensor to its format, dtypes and layout, with new
    scales.
    """
    check_no_offset_or_order("select", q, context=", so nothing can be quantized to its format")
    new = QTensor.quantize(x.astype(q.dtype), spec_like(q, q.groups))
    scale: Any = new.scale
    if not isinstance(scale, QTensor):
        scale = scale.astype(q.scale.dtype)
    zero_point = new.zero_point
    check_zero_points(q, zero_point, q.zero_point)
    if zero_point is not None and q.zero_point is not None:
        zero_point = jnp.broadcast_to(zero_point, q.zero_point.shape)
    return dataclasses.replace(q, values=values_as(new, q), scale=scale, zero_point=zero_point)


def is_like(q: Any, template: Any) -> bool:
    """Whether two values have the same format, shape, granularity and layout."""

    def kind(x: Any) -> Any:
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(x)], jax.tree.structure(x)

    return kind(q) == kind(template)


def select(which: jax.Array, *cases: QTensor | jax.Array) -> QTensor | None:
    """Returns `lax.select_n(which, *cases)` of the real values, in the format of the QTensors among
    the cases; `None` if their formats differ.

    Elements that share a scale keep the scale and their codes if they come from one case, or from
    cases with the same scale; elements of an array are quantized with that scale. Otherwise they
    are quantized together with a new scale, as are elements that come from an array only.
    """
    base = next(case for case in cases if isinstance(case, QTensor))
    tensors = {i: case for i, case in enumerate(cases) if isinstance(case, QTensor)}
    if not all(is_like(base, case) for case in tensors.values()):
        return None
    if which.ndim == 0:
        filled = [x if isinstance(x, QTensor) else quantized_like(base, x) for x in cases]
        return jax.tree.map(lambda *leaves: lax.select_n(which, *leaves), *filled)
    if isinstance(base.scale, QTensor) or base.offset is not None or base.order is not None:
        return None
    real = [x.dequantize() if isinstance(x, QTensor) else x.astype(base.dtype) for x in cases]
    selected = lax.select_n(which, *real)
    groups, index = base.groups, which.astype(jnp.int32)
    fresh = quantized_like(base, selected)
    lowest, highest = groups.reduce(jnp.min, index, len(cases)), groups.reduce(jnp.max, index, 0)
    several = lowest != highest
    grid = (fresh.scale, fresh.zero_point)
    grid = _where(several & _all([_same(x, base) for x in tensors.values()]), _grid(base), grid)
    for i, case in tensors.items():
        grid = _where(~several & (lowest == i), _grid(case), grid)
    new = QTensor.quantize(selected, spec_like(base, groups), Affine(*grid))
    values, shape = new.values, groups.split(index).shape
    for i, case in tensors.items():
        keeps_codes = groups.split_scale(_same(case, new))
        taken = groups.join(jnp.broadcast_to(keeps_codes, shape)) & (index == i)
        values = jnp.where(taken, case.unpack().values, values)
    new = dataclasses.replace(new, values=values)
    return dataclasses.replace(new, values=values_as(new, base), layout=base.layout)


def _grid(q: QTensor) -> tuple[Any, Any]:
    return q.scale, q.zero_point


def _where(mask: jax.Array, x: Any, y: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(mask, a, b), x, y)


def _all(masks: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.logical_and, masks)


def _same(q: QTensor, reference: QTensor) -> jax.Array:
    """Returns where two tensors have the same scale and zero point."""
    leaf_pairs = zip(jax.tree.leaves(_grid(q)), jax.tree.leaves(_grid(reference)), strict=True)
    return _all([a == b for a, b in leaf_pairs])
