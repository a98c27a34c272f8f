"""What a loop carries: arrays that its steps change, and weights that it hands on as they are."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ... import _compat
from .._weight import is_weight
from ._form import Runner


@dataclasses.dataclass(frozen=True)
class Carry:
    """The carried values of a loop; weights that no step changes are shared by all.

    Attributes:
      init: the values before the first step.
      shared: places of those weights.
      runner: makes arrays of all others.
    """

    init: Sequence[Any]
    shared: frozenset[int]
    runner: Runner

    @classmethod
    def of(cls, jaxpr: Any, consts: int, init: Sequence[Any], runner: Runner) -> "Carry":
        """Reads the body of a loop, whose carried operands come after `consts` others."""
        kept = unchanged(jaxpr, consts, len(init))
        return cls(init, frozenset(i for i in kept if is_weight(init[i])), runner)

    def start(self) -> list[Any]:
        """Returns what changes, before the first step."""
        return self.changing(self.init)

    def changing(self, state: Sequence[Any]) -> list[Any]:
        """Returns what changes, of all that is carried."""
        return [self.runner.dense(x) for i, x in enumerate(state) if i not in self.shared]

    def state(self, values: Sequence[Any]) -> list[Any]:
        """Returns all that is carried, given what changes."""
        rest = iter(values)
        return [x if i in self.shared else next(rest) for i, x in enumerate(self.init)]


def unchanged(jaxpr: Any, consts: int, count: int) -> list[int]:
    """Returns which carried values a loop hands on as they are."""
    body, _ = _compat.open_jaxpr(jaxpr)
    return [i for i in range(count) if body.outvars[i] is body.invars[consts + i]]
