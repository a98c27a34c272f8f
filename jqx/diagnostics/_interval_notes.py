"""What is noted while intervals are followed: overflows, primitives without a rule, sites."""

import dataclasses
import pathlib
from typing import Any

from .._compat import Eqn

_JQX = str(pathlib.Path(__file__).parents[1])
"""Where the code of jqx lies, which takes bytes of numbers, and wraps around, on purpose."""


@dataclasses.dataclass(frozen=True)
class Overflow:
    """An integer result that its dtype may not hold.

    Attributes:
      primitive: what computes it.
      line: the line of code that it was traced from.
      dtype: of the result.
      low: the least that the result may be in exact arithmetic; minus infinity where a float
        without bounds becomes an integer.
      high: the most.
    """

    primitive: str
    line: str
    dtype: str
    low: int | float
    high: int | float


@dataclasses.dataclass
class Notes:
    """Gathers what is found; of an equation that is met several times, the hull.

    Attributes:
      overflows: by equation.
      unknown: a line of code for each primitive without a rule.
      sites: what is known of each site that is reached, by address.
    """

    overflows: dict[int, Overflow] = dataclasses.field(default_factory=dict)
    unknown: dict[str, str] = dataclasses.field(default_factory=dict)
    sites: dict[tuple[int, ...], Any] = dataclasses.field(default_factory=dict)

    def overflow(self, eqn: Eqn, line: str, low: Any, high: Any) -> None:
        """Notes that a result leaves the range of its dtype, but where jqx itself computes it."""
        if line.startswith(_JQX):
            return
        old = self.overflows.get(id(eqn))
        if old is not None:
            low, high = min(old.low, low), max(old.high, high)
        dtype = eqn.outvars[0].aval.dtype.name
        self.overflows[id(eqn)] = Overflow(eqn.primitive.name, line, dtype, low, high)
