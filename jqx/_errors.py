"""The four-part error message: the problem, what was given, what was expected, and the fix."""

import contextlib
import sys
from collections.abc import Iterator


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
