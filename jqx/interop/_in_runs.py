"""Rows of bytes in runs, so that temporary data stays in the cache and needs little memory."""

from collections.abc import Iterator

_AT_ONCE = 2**17
"""Bytes in a run."""


def in_runs(rows: int, width: int) -> Iterator[slice]:
    """Yields runs of rows of `width` bytes each, which together cover all rows."""
    step = max(1, _AT_ONCE // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
