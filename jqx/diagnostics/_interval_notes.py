"""Records of following intervals: overflows, primitives without a rule, sites."""

import dataclasses
import pathlib
from typing import Any

from .._compat import Eqn

_JQX = str(pathlib.Path(__file__).parents[1])
"""Folder of the code of jqx, which splits numbers into bytes and wraps around on purpose."""


@dataclasses.dataclass(frozen=True)
class Overflow:
    """An integer result that its dtype may not be able to hold.

    Attributes:
      primitive: the primitive that computes it.
      line: the source line that it was traced from.
      dtype: dtype of the result.
      low: the minimum of the result in exact arithmetic; minus infinity if an unbounded float
        becomes an integer.
      high: the maximum.
    """

    primitive: str
    line: str
    dtype: str
    low: int | float
    high: int | float


@dataclasses.dataclass
class Notes:
    """Collects findings; an equation that is followed several times has the union of its intervals.

    Attributes:
      overflows: overflows by equation.
      unknown: a source line for each primitive without a rule.
      sites: findings for each site that is reached, by address.
    """

    overflows: dict[int, Overflow] = dataclasses.field(default_factory=dict)
    unknown: dict[str, str] = dataclasses.field(default_factory=dict)
    sites: dict[tuple[int, ...], Any] = dataclasses.field(default_factory=dict)

    def overflow(self, eqn: Eqn, line: str, low: Any, high: Any) -> None:
        """Records that a result leaves the range of its dtype, except in the code of jqx itself."""
        if line.startswith(_JQX):
            return
        old = self.overflows.get(id(eqn))
        if old is not None:
            low, high = min(old.low, low), max(old.high, high)
        dtype = eqn.outvars[0].aval.dtype.name
        self.overflows[id(eqn)] = Overflow(eqn.primitive.name, line, dtype, low, high)
