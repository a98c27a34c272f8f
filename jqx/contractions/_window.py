"""The place, in codes, scales and zero points, of a slice whose start is known at run time."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_integers, as_signed
from .._errors import fail
from ..calibrators import Affine, Groups
from ..tensor import QTensor
from ..tensor._shared import check_dtypes, check_kept
from ._take import take_entries


class Window(NamedTuple):
    """The place of a slice: clamped starts (integers if they are known), and sizes."""

    starts: tuple[Any, ...]
    sizes: tuple[int, ...]


def window_of(function: str, q: QTensor, starts: Any, sizes: Sequence[int]) -> Window:
    """Returns the window, after checking that it fits and takes the axes of the layout whole."""
    check_dtypes(function, q)
    starts = tuple(starts) if isinstance(starts, Sequence) or np.ndim(starts) == 1 else (starts,)
    sizes = tuple(map(int, sizes))
    if not (
        len(starts) == len(sizes) == q.ndim
        and all(0 <= size <= n for size, n in zip(sizes, q.shape, strict=True))
    ):
        raise fail(
            function,
            "the slice does not fit.",
            given=f"{len(starts)} starts, and sizes {sizes}, for shape {q.shape}",
            expected=f"{q.ndim} starts and {q.ndim} sizes, each at most the size of its axis",
            fix="pass a start and a size for every axis.",
        )
    found = [
        _clamped(function, start, n, size)
        for start, n, size in zip(starts, q.shape, sizes, strict=True)
    ]
    depth = 0 if q.layout is None else q.layout.depth
    if sizes[q.ndim - depth :] != q.shape[q.ndim - depth :]:
        raise fail(
            function,
            f"the slice cuts an axis along which the codes are {q.layout}.",
            given=f"sizes {sizes} for {q!r}",
            expected=f"the whole of axes {list(range(-depth, 0))}",
            fix="call q.unpack() first.",
        )
    return Window(tuple(found), sizes)


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
    if not (start.shape == () and jnp.issubdtype(start.dtype, jnp.integer)):
        raise fail(
            function,
            "a start is not an integer.",
            given=f"a start of shape {start.shape} and dtype {start.dtype.name}",
            expected="an integer for each axis",
            fix="pass a tuple of integers or of integer scalars.",
            error=TypeError,
        )
    if size == n:
        return 0
    start = as_signed(start, n)
    return jnp.clip(jnp.where(start < 0, start + n, start), 0, n - size).astype(jnp.int32)


def is_on_blocks(window: Window, axis: int, n: int, b: int) -> bool:
    """Whether a window is known to start and end at borders of blocks."""
    start, size = window.starts[axis], window.sizes[axis]
    known = isinstance(start, int) and start % b == 0 and size > 0
    return known and (size % b == 0 or start + size == n)


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
        whole = m == 1 or window.sizes[axis] == groups.shape[axis]
        b = groups.sizes[axis]
        starts.append(0 if whole else window.starts[axis] // b)
        sizes.append(m if whole else -(-window.sizes[axis] // b))
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
        places = window.starts[axis] + jnp.arange(size, dtype=jnp.int32)
        parameter = take_entries(parameter, places, axis, groups)
        groups = Groups(_put(groups.shape, axis, size), _put(groups.sizes, axis, 1))
    return _slice(parameter, *place_of_entries(parameter.shape, groups, window))


def _slice(parameter: Any, starts: Sequence[Any], sizes: Sequence[int]) -> Any:
    if isinstance(parameter, QTensor):
        return sliced(parameter, Window(tuple(starts), tuple(sizes)))
    return lax.dynamic_slice(parameter, starts, sizes)


def _put(items: tuple[Any, ...], axis: int, item: Any) -> tuple[Any, ...]:
    return (*items[:axis], item, *items[axis + 1 :])
