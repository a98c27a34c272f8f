"""The message of errors and warnings, in up to four parts: the problem, what was given, what is
expected, and the fix.
"""

import contextlib
import sys
import types
import warnings
from collections.abc import Iterable, Iterator

_NOT_THE_USER = ("jqx", "jax", "flax", "contextlib", "functools")
"""Modules whose frames are between a warning and the line of the user."""


def message(
    function: str, problem: str, *, given: str = "", expected: str = "", fix: str = ""
) -> str:
    """Returns the text of an error that `jqx.<function>` raises, or of a warning: what is wrong
    with which argument, what was given, what is expected, and how to fix it. Parts that another
    part already says are left out.

    Shapes, dtypes and paths belong in it, but never array contents or traced values.
    """
    parts = {"given:   ": given, "expected:": expected, "fix:     ": fix}
    lines = [f"  {label} {text}" for label, text in parts.items() if text]
    return "\n".join([f"jqx.{function}: {problem}", *lines])


def fail(
    function: str,
    problem: str,
    *,
    given: str = "",
    expected: str = "",
    fix: str = "",
    error: type[Exception] = ValueError,
) -> Exception:
    """Returns the error to raise, with the text of `message`. Write `raise fail(...)` below the
    `if` that finds the problem, so that the text is made only then.
    """
    return error(message(function, problem, given=given, expected=expected, fix=fix))


def some(names: Iterable[str], limit: int = 4) -> str:
    """Returns the first few of many names as text, and how many more there are."""
    names = list(names)
    suffix = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + suffix or "none"


@contextlib.contextmanager
def nesting(function: str) -> Iterator[None]:
    """Raises a ValueError in four parts if nested containers exceed Python's stack."""
    try:
        yield
    except RecursionError:
        limit = sys.getrecursionlimit()
        raise fail(
            function,
            f"containers are nested more deeply than Python's stack (recursion limit {limit}).",
            fix="keep the tree flatter, or raise the limit with sys.setrecursionlimit.",
        ) from None


def warn(text: str) -> None:
    """Warns with the text of `message`, at the line of the user's program that led to it."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and _root(frame) in _NOT_THE_USER:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


def _root(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
