"""What the transforms do at a primitive that holds functions: how they look into it and run it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..._compat import Eqn
from .._origin import Address, Origin

Records = dict[str, Any]
"""What sites recorded, by key."""


class Finder(Protocol):
    """How planning looks for contractions inside an equation."""

    @property
    def here(self) -> Address: ...

    def enter(
        self, jaxpr: Any, known: Sequence[Origin | None], part: Address = ()
    ) -> list[Origin | None]:
        """Looks into a function whose operands are known; returns what is known of its results."""
        ...

    def leave(self, jaxpr: Any, reason: str) -> None:
        """Lists the contractions of a function that stays in float."""
        ...


class Runner(Protocol):
    """How evaluation runs the functions inside an equation.

    `given` is what sites read beside their operands: scales, and a random key; a pytree.
    """

    @property
    def given(self) -> Any: ...

    @property
    def differentiable(self) -> bool:
        """Whether derivative rules of the user are kept."""
        ...

    def run(
        self, jaxpr: Any, args: Sequence[Any], part: Address = (), given: Any = None
    ) -> tuple[list[Any], Records]:
        """Evaluates a function; returns its results and what its sites recorded."""
        ...

    def split(self, length: int) -> tuple[Any, Any]:
        """Returns what each step of this scan is given, stacked, and what all are given alike."""
        ...

    def join(self, step: Any, shared: Any) -> Any:
        """Returns what one step is given."""
        ...

    def numbered(self, given: Any, step: Any) -> Any:
        """Returns what the step of a loop is given: random numbers of its own."""
        ...

    def unseen(self) -> Records:
        """Returns the records of no evaluation, of sites whose records this equation merges."""
        ...

    def merge(self, a: Records, b: Records) -> Records:
        """Returns the records of two evaluations together."""
        ...

    @property
    def is_counting(self) -> bool:
        """Whether it is followed how much the rows of a batch count."""
        ...

    def carried(self, x: Any) -> Any:
        """Returns a value in the form in which a loop carries it."""
        ...

    def common(self, forms: Sequence[Any]) -> Any:
        """Returns the form that results of several branches can have."""
        ...

    def dense(self, x: Any) -> Any:
        """Returns a value that must be an array here; raises, or dequantizes, where it is not."""
        ...

    def like(self, x: Any, other: Any) -> Any:
        """Returns a value in the form of another: an array, or quantized to the same format."""
        ...


@dataclasses.dataclass(frozen=True)
class Form:
    """How one primitive that holds functions is looked into and evaluated.

    Attributes:
      track: finds what is inside; returns what is known of the results.
      apply: evaluates it; returns the results and what sites recorded.
    """

    track: Callable[[Eqn, Sequence[Origin | None], Finder], Sequence[Origin | None]]
    apply: Callable[[Eqn, Sequence[Any], Runner], tuple[list[Any], Records]]


def looks_into(body: str) -> Callable[..., Sequence[Origin | None]]:
    """Returns the `track` of a primitive with one function, of its own operands and results, in the
    parameter `body`.
    """

    def track(eqn: Eqn, known: Sequence[Origin | None], finder: Finder) -> list[Origin | None]:
        return finder.enter(eqn.params[body], known)

    return track


def as_function(runner: Runner, jaxpr: Any) -> Callable[..., tuple[list[Any], Records]]:
    """Returns a function that evaluates a body, of what it is given and of its operands."""

    def run(given: Any, *args: Any) -> tuple[list[Any], Records]:
        return runner.run(jaxpr, args, given=given)

    return run
