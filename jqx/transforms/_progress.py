"""Bars that show how far something is, on standard error: where that is a terminal, and where tqdm
is installed (of the extra `examples`).
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def progress_bar(what: str, unit: str, items: Iterable[Any] | None = None, **options: Any) -> Any:
    """Returns a bar of tqdm, which shows nothing where there is no terminal; `None` without tqdm.

    Args:
      what: is done.
      unit: is counted.
      items: to go through; `None` where `update` of the bar counts.
      **options: of tqdm, such as `total`.
    """
    if importlib.util.find_spec("tqdm") is None:
        return None
    bar = importlib.import_module("tqdm").tqdm
    return bar(items, desc=what, unit=unit, disable=None, **options)


@contextlib.contextmanager
def advancing(
    what: str, unit: str, total: int | None, progress: bool, **options: Any
) -> Iterator[Callable[..., Any]]:
    """Shows a bar where that is asked for, as long as the context lasts; yields what moves it on,
    by one or by a number.
    """
    bar = progress_bar(what, unit, total=total, **options) if progress else None
    try:
        yield _nothing if bar is None else bar.update
    finally:
        if bar is not None:
            bar.close()


def with_bar(what: str, unit: str, items: Collection[T], progress: bool = True) -> Iterator[T]:
    """Yields items, with a bar from one second on: of what is mostly done sooner."""
    with advancing(what, unit, len(items), progress, delay=1) as advance:
        for item in items:
            yield item
            advance()


def _nothing(by: int = 1) -> None:
    pass


def tell(bar: Any, text: str) -> None:
    """Writes a line above a bar, where there is one that shows."""
    if bar is not None and not bar.disable:
        bar.write(text, file=sys.stderr)
