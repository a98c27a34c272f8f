"""What happens to a scale when its values are indexed or reshaped: pure functions of shapes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._errors import message


def basic_index(index: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """Returns a basic index with its ellipsis spelt out: one entry per axis, and `None`s."""
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(
        int(part) if isinstance(part, np.ndarray) and _is_integer_scalar(part) else part
        for part in parts
    )
    for part in parts:
        scalar = _is_integer_scalar(part)
        plain = isinstance(part, (int, np.integer, slice)) and not isinstance(part, bool)
        if not (plain or part is None or part is Ellipsis or scalar):
            raise TypeError(
                message(
                    "QTensor.__getitem__",
                    "only basic indices are supported.",
                    given=f"an index of type {type(part).__name__}",
                    expected="integers, slices, None and ...",
                    mend="index q.values and q.scale yourself, or q.dequantize()[index].",
                )
            )
    used = sum(part is not None and part is not Ellipsis for part in parts)
    dots = sum(part is Ellipsis for part in parts)
    if used > len(shape) or dots > 1:
        raise IndexError(
            message(
                "QTensor.__getitem__",
                "the index does not fit.",
                given=f"{used} indices and {dots} ellipses for shape {tuple(shape)}",
                expected=f"at most {len(shape)} indices and one ellipsis",
                mend="drop the surplus.",
            )
        )
    fill = (slice(None),) * (len(shape) - used)
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    return (*parts[:at], *fill, *parts[at + 1 :])


def _is_integer_scalar(part: Any) -> bool:
    return getattr(part, "ndim", None) == 0 and np.issubdtype(part.dtype, np.integer)


def index_for(parts: Sequence[Any], leaf: Sequence[int], full: Sequence[int]) -> tuple[Any, ...]:
    """Returns the index of a scale in step with that of its values.

    Along an axis that shares one scale, an integer takes that scale and a slice keeps it.
    """
    index, axis = [], 0
    for part in parts:
        if part is None:
            index.append(None)
            continue
        shared = leaf[axis] != full[axis]
        if isinstance(part, (int, np.integer)) and not -full[axis] <= part < full[axis]:
            raise IndexError(
                message(
                    "QTensor.__getitem__",
                    f"index {part} is out of range for axis {axis}.",
                    given=f"shape {tuple(full)}",
                    expected=f"an index in [{-full[axis]}, {full[axis] - 1}]",
                    mend="index within the shape.",
                )
            )
        if shared and isinstance(part, slice):
            part = slice(None)
        elif shared:
            part = 0
        index.append(part)
        axis += 1
    return tuple(index)


def axis_groups(
    old: Sequence[int], new: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Splits a reshape into the smallest groups of axes with equal products: `[(old, new), ...]`.

    Axes of size 1 stand in groups of their own.
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


def reshaped(leaf: Sequence[int], old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of a scale after its values went from shape `old` to shape `new`."""
    shape = [1] * len(new)
    for sources, targets in axis_groups(old, new):
        if all(leaf[i] == 1 for i in sources):
            continue
        if any(leaf[i] != old[i] for i in sources):
            raise ValueError(
                message(
                    "QTensor.reshape",
                    f"the scale cannot follow: axes {sources} become {targets}, and only some of "
                    "them have their own scale.",
                    given=f"shape {tuple(old)}, scale {tuple(leaf)}, new shape {tuple(new)}",
                    expected="axes that merge or split to be scaled alike",
                    mend="reshape before quantizing, or quantize with a coarser granularity.",
                )
            )
        for j in targets:
            shape[j] = new[j]
    return tuple(shape)
