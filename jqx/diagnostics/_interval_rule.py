"""What a rule is: from the intervals of the operands of an equation, those of its results.

A rule gives the ends of a result in exact arithmetic; rounding, and whether an integer dtype holds
them, is for the caller.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .._compat import Eqn
from ._intervals import Bounds, Interval, limits

Result = Bounds | Interval | list[Interval]
Rule = Callable[[Eqn, Sequence[Interval]], Result]
"""From an equation and the intervals of its operands: ends to be rounded, or whole intervals."""


def dtype_of(eqn: Eqn) -> Any:
    """Returns the dtype of the first result."""
    return eqn.outvars[0].aval.dtype


def any_of(eqn: Eqn, xs: Sequence[Interval]) -> list[Interval]:
    """Anything that the dtype holds: all that can be said of random bits."""
    return [Interval(*limits(v.aval.dtype)) for v in eqn.outvars]
