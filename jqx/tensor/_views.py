"""What happens to a scale when its values are indexed or reshaped.

A parameter (a scale or zero point) has the rank of its values; along each axis it has one entry,
one for each index, or one for each block. It may itself be a QTensor.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._checks import as_signed, is_at_least
from .._errors import fail
from ..calibrators import Groups


def normal_index(index: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """Returns an index with its ellipsis expanded: for each axis an int, a slice or an int32 array,
    with `None` in between. A boolean mask becomes the indices of its true elements. An ellipsis
    that stands for no axis stays, because it separates the arrays on either side.
    """
    parts = [_part(part) for part in (index if isinstance(index, tuple) else (index,))]
    widths = [0 if p is None or p is Ellipsis else p.ndim if _is_mask(p) else 1 for p in parts]
    dots = [i for i, part in enumerate(parts) if part is Ellipsis]
    rest = len(shape) - sum(widths)
    if rest < 0 or len(dots) > 1:
        raise fail(
            "QTensor.__getitem__",
            "the index does not fit.",
            given=f"{sum(widths)} indices and {len(dots)} ellipses for shape {tuple(shape)}",
            expected=f"at most {len(shape)} indices and one ellipsis",
            fix="drop the extra indices.",
            error=IndexError,
        )
    at = dots[0] if dots else len(parts)
    fill = [slice(None)] * rest or ([Ellipsis] if dots else [])
    spelt, axis = [], 0
    for part in [*parts[:at], *fill, *parts[at + 1 :]]:
        if _is_mask(part):
            axes = zip(part.shape, shape[axis : axis + part.ndim], strict=True)
            _check_axis_index(all(m in (0, n) for m, n in axes), part, axis, shape)
            spelt += [place.astype(np.int32) for place in np.nonzero(part)]
            axis += part.ndim
            continue
        if isinstance(part, int):
            _check_axis_index(-shape[axis] <= part < shape[axis], part, axis, shape)
        elif hasattr(part, "size") and part.size:
            _check_axis_index(is_at_least(shape[axis], 1), "of an array", axis, shape)
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
        _check_slice(part)
        return part
    if isinstance(part, (int, np.integer)) and not isinstance(part, bool):
        return int(part)
    array: Any = _as_array(part) if isinstance(part, list) else part
    dtype = getattr(array, "dtype", np.dtype(object))
    if jnp.issubdtype(dtype, jnp.integer):
        plain = isinstance(array, np.ndarray) and array.ndim == 0
        return int(array) if plain else array
    if jnp.issubdtype(dtype, jnp.bool_) and array.ndim and _compat.is_concrete(array):
        return np.asarray(array)
    raise fail(
        "QTensor.__getitem__",
        "the index has an unsupported type.",
        given=f"an index of type {type(part).__name__} and dtype {dtype}",
        expected="integers, slices, None, ..., integer arrays, and masks with known values",
        fix="index q.values and q.scale yourself, or q.dequantize()[index].",
        error=TypeError,
    )


def _in_int32(places: Any, n: Any) -> Any:
    """Returns indices of an axis of size `n` as int32. Those out of bounds take the first or the
    last element, as in JAX.
    """
    if np.can_cast(places.dtype, np.int32) or not isinstance(n, int):
        return places.astype(np.int32)
    if isinstance(places, np.ndarray):
        low = -n if places.dtype.kind == "i" else 0
        return np.clip(places, low, max(n - 1, 0)).astype(np.int32)
    return jnp.clip(as_signed(places, n), -n, n - 1).astype(np.int32)


def _as_array(part: list[Any]) -> Any:
    """Returns a list as an array; an empty list becomes integers, as in NumPy."""
    try:
        array = np.asarray(part)
    except (TypeError, ValueError):  # ragged, or of traced values
        return part
    return array if array.size else array.astype(np.int32)


def _check_slice(part: slice) -> None:
    try:
        part.indices(0)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise fail(
            "QTensor.__getitem__",
            "a slice has an invalid start, stop or step.",
            given=", ".join(type(end).__name__ for end in (part.start, part.stop, part.step))
            if kind is TypeError
            else "a step of 0",
            expected="None, or integers that are known when the function is traced",
            fix="for a start that is traced, use jqx.dynamic_slice.",
            error=kind,
        ) from None


def _is_mask(part: Any) -> bool:
    return isinstance(part, np.ndarray) and part.dtype == bool


def _check_axis_index(holds: bool, part: Any, axis: int, shape: Sequence[int]) -> None:
    if holds:
        return
    n = shape[axis]
    what = f"a mask of shape {part.shape}" if _is_mask(part) else f"the index {part}"
    raise fail(
        "QTensor.__getitem__",
        f"{what} is out of range for axis {axis}.",
        given=f"shape {tuple(shape)}",
        expected="a mask of the shape of the axes it stands for"
        if _is_mask(part)
        else f"an index in [{-n}, {n - 1}]",
        fix="index within the shape.",
        error=IndexError,
    )


def cut_axes(parts: Sequence[Any], groups: Groups) -> dict[int, slice]:
    """Returns the blocked axes of which a slice of the index takes other than whole blocks in their
    order, and the slices.
    """
    cut = {}
    for axis, part in enumerate(
        part for part in parts if part is not None and part is not Ellipsis
    ):
        if isinstance(part, slice) and groups.is_blocked(axis):
            start, stop, step = part.indices(groups.shape[axis])
            if start % groups.sizes[axis] or step != 1 or stop <= start:
                cut[axis] = part
    return cut


def blocks_at(places: np.ndarray, size: int) -> tuple[int, np.ndarray]:
    """Returns the largest block size for elements taken from `places` of an axis with blocks of a
    size, and the old block of each new one. The last one may be smaller.
    """
    blocks = places // size
    borders = np.flatnonzero(np.diff(blocks)) + 1
    size = math.gcd(*borders.tolist()) or max(len(places), 1)
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
        own = m == n
        axis += 1
        if isinstance(part, slice):
            if m == 1:
                index.append(slice(None))
            elif own:
                index.append(part)
            else:
                start, stop, _ = part.indices(n)
                index.append(slice(start // b, -(-stop // b)))
        elif isinstance(part, int):
            index.append(0 if m == 1 else part % n // (1 if own else b))
        elif m == 1:
            index.append(np.zeros((1,) * part.ndim, np.int32) if part.ndim else 0)
        elif own:
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
    together = not advanced or advanced[-1] - advanced[0] + 1 == len(advanced)
    at, axis, sizes = (0 if together else rank), 0, {}
    for i, part in enumerate(parts):
        if together and advanced and i == advanced[0]:
            at += rank
        if isinstance(part, slice):
            sizes[at] = groups.sizes[axis]
        at += part is None or isinstance(part, slice)
        axis += part is not None and part is not Ellipsis
    return sizes


def repeated(parameter: Any, axis: int, places: np.ndarray) -> Any:
    """Returns a parameter with the entries of its blocks at `places` along an axis."""
    if isinstance(parameter, jax.Array):
        return jnp.take(parameter, places, axis=axis, mode="clip")
    return parameter.take(places, axis)


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
    after, finer = [1] * len(new), [*sizes]
    for sources, targets in axis_groups(old, new):
        if len(sources) == len(targets) == 1:
            after[targets[0]] = sizes[sources[0]]
            continue
        lengths, wanted = [old[i] for i in sources], [new[j] for j in targets]
        run = _run(tuple((old[i], sizes[i]) for i in sources))
        if all(sizes[i] == old[i] for i in sources):
            spread = wanted
        elif run is not None:
            spread, before = _spread_both(run, wanted, lengths)
            for i, size in zip(sources, before, strict=True):
                finer[i] = size
        else:
            raise fail(
                "QTensor.reshape",
                f"the scale cannot follow: axes {sources} become {targets}, and only some of "
                "them have their own scale.",
                given=f"shape {tuple(old)}, scale {groups.scale_shape}, new shape {tuple(new)}",
                expected="axes that merge or split to all have their own scale or none, or "
                "blocks along the last of them",
                fix="reshape before quantizing, or quantize with a coarser granularity.",
            )
        for j, size in zip(targets, spread, strict=True):
            after[j] = size
    return Groups(old, tuple(finer)), Groups(tuple(new), tuple(after))


def _run(axes: Sequence[tuple[int, int]]) -> int | None:
    """Returns the length of the runs on which a scale over (size, block) axes is constant, or
    `None` if some of the axes share a scale and others do not.
    """
    run, whole = 1, True
    for n, b in reversed(axes):
        if whole:
            if b == 0:
                return None
            run, whole = run * math.gcd(b, n), b == n
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
    both = ((_spread(part, new), _spread(part, old)) for part in parts)
    return next((a, b) for a, b in both if a is not None and b is not None)


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
