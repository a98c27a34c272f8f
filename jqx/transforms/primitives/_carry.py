"""The carried values of a loop: those that steps change, and unchanged quantized arrays."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ... import _compat
from ...tensor._shared import alone
from .._counted import Counted, Lost, value_of
from .._weight import is_coded
from ._form import Runner


@dataclasses.dataclass(frozen=True)
class Carry:
    """The carried values of a loop. Quantized values that no step changes are shared by all steps.

    Attributes:
      init: the values before the first step; each keeps its format.
      shared: indices of the shared values.
      runner: converts the values that a step has changed to that format.
    """

    init: Sequence[Any]
    shared: frozenset[int]
    runner: Runner

    @classmethod
    def of(cls, jaxpr: Any, consts: int, init: Sequence[Any], runner: Runner) -> "Carry":
        """Reads the body of a loop, whose carried operands come after `consts` others."""
        kept = unchanged(jaxpr, consts, len(init))
        init = [runner.carried(alone(x)) for x in init]
        return cls(init, frozenset(i for i in kept if is_coded(init[i])), runner)

    def start(self) -> list[Any]:
        """Returns the values that change, before the first step."""
        return [x for i, x in enumerate(self.init) if i not in self.shared]

    def changing(self, state: Sequence[Any]) -> list[Any]:
        """Returns the values that change, out of all carried values."""
        found = []
        for i, (x, init) in enumerate(zip(state, self.init, strict=True)):
            try:
                found += [] if i in self.shared else [self.runner.like(x, init)]
            except Lost as lost:
                lost.place = i
                raise
        return found

    def state(self, values: Sequence[Any]) -> list[Any]:
        """Returns all carried values, given those that change."""
        rest = iter(values)
        return [x if i in self.shared else next(rest) for i, x in enumerate(self.init)]


def settled(carry: Carry, loop: Callable[[Carry], Any]) -> Any:
    """Runs a loop. If the counts of a carried value are unknown after a step, they are unknown in
    all steps, and the loop is traced again.
    """
    while True:
        try:
            return loop(carry)
        except Lost as lost:
            init = list(carry.init)
            init[lost.place] = Counted(value_of(init[lost.place]), None, lost.why)
            carry = dataclasses.replace(carry, init=init)


def unchanged(jaxpr: Any, consts: int, count: int) -> list[int]:
    """Returns which carried values a loop passes on unchanged."""
    body, _ = _compat.open_jaxpr(jaxpr)
    return [i for i in range(count) if body.outvars[i] is body.invars[consts + i]]
