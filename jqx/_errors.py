"""The message in four parts of errors and warnings: the problem, what was given, what was expected,
and the fix.
"""

import contextlib
import sys
import types
import warnings
from collections.abc import Iterable, Iterator

_NOT_THE_USER = ("jqx", "jax", "flax", "contextlib", "functools")
"""Modules whose frames are between a warning and the line of the user."""


def message(function: str, problem: str, *, given: str, expected: str, mend: str) -> str:
    """Returns the text of an error that `jqx.<function>` raises.

    Shapes, dtypes and paths belong in it, but never array contents or traced values.
    """
    return (
        f"jqx.{function}: {problem}\n"
        f"  given:    {given}\n"
        f"  expected: {expected}\n"
        f"  to mend:  {mend}"
    )


def some(names: Iterable[str], most: int = 4) -> str:
    """Returns the first few of many names as text, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more or "none"


@contextlib.contextmanager
def nesting(function: str) -> Iterator[None]:
    """Raises a ValueError in four parts if nested containers exceed Python's stack."""
    try:
        yield
    except RecursionError:
        text = message(
            function,
            "containers are nested too deeply.",
            given="more nested containers than Python's stack holds",
            expected=f"a few hundred at most (the recursion limit is {sys.getrecursionlimit()})",
            mend="keep the tree flatter, or raise the limit with sys.setrecursionlimit.",
        )
        raise ValueError(text) from None


def warn(text: str) -> None:
    """Warns with the text of `message`, at the line of the user's program that led to it."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and _root(frame) in _NOT_THE_USER:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


def _root(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
