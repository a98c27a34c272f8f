"""The four-part error message: what is wrong, what was given, what was expected, how to mend it."""


def message(function: str, problem: str, *, given: str, expected: str, mend: str) -> str:
    """Returns the text of an error that `jqx.<function>` raises.

    Shapes, dtypes and paths belong in it; array contents and traced values never do.
    """
    return (
        f"jqx.{function}: {problem}\n"
        f"  given:    {given}\n"
        f"  expected: {expected}\n"
        f"  to mend:  {mend}"
    )
