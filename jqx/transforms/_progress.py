"""Progress bars on standard error, if that is a terminal and tqdm is installed (in the extra
`examples`).
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def progress_bar(what: str, unit: str, items: Iterable[Any] | None = None, **options: Any) -> Any:
    """Returns a bar of tqdm, which shows nothing without a terminal; `None` without tqdm.

    Args:
      what: description of the work.
      unit: the unit that is counted.
      items: items to iterate over; `None` if the caller calls `update` of the bar.
      **options: options of tqdm, such as `total`.
    """
    if importlib.util.find_spec("tqdm") is None:
        return None
    bar = importlib.import_module("tqdm").tqdm
    return bar(items, desc=what, unit=unit, disable=None, **options)


@contextlib.contextmanager
def advancing(
    what: str, unit: str, total: int | None, progress: bool, **options: Any
) -> Iterator[Callable[..., Any]]:
    """Shows a bar, if `progress`, as long as the context lasts; yields the function that advances
    it, by one or by a number.
    """
    bar = progress_bar(what, unit, total=total, **options) if progress else None
    try:
        yield _nothing if bar is None else bar.update
    finally:
        if bar is not None:
            bar.close()


def with_bar(what: str, unit: str, items: Collection[T], progress: bool = True) -> Iterator[T]:
    """Yields items, with a bar that appears only after one second, since most work is shorter."""
    with advancing(what, unit, len(items), progress, delay=1) as advance:
        for item in items:
            yield item
            advance()


def _nothing(by: int = 1) -> None:
    pass


def tell(bar: Any, text: str) -> None:
    """Writes a line above a bar, if the bar is visible."""
    if bar is not None and not bar.disable:
        bar.write(text, file=sys.stderr)
