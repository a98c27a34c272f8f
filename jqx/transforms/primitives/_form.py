"""How the transforms search and run the functions that a primitive holds."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..._compat import Eqn
from .._origin import Address, Origin

Records = dict[str, Any]
"""Records of sites, by key."""


class Finder(Protocol):
    """How planning finds contractions inside an equation."""

    @property
    def here(self) -> Address: ...

    def enter(
        self, jaxpr: Any, known: Sequence[Origin | None], part: Address = ()
    ) -> list[Origin | None]:
        """Searches a function with operands of known origins; returns those of its results."""
        ...

    def leave(self, jaxpr: Any, reason: str) -> None:
        """Lists the contractions of a function that stays in float."""
        ...


class Runner(Protocol):
    """How evaluation runs the functions inside an equation.

    `given` is what sites read in addition to their operands: scales and a random key; a pytree.
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
        """Evaluates a function; returns its results and the records of its sites."""
        ...

    def split(self, length: int) -> tuple[Any, Any]:
        """Returns the stacked inputs of the steps of this scan, and the inputs shared by all."""
        ...

    def join(self, step: Any, shared: Any) -> Any:
        """Returns the inputs of one step."""
        ...

    def numbered(self, given: Any, step: Any) -> Any:
        """Returns the inputs of a step of a loop, with its own random numbers."""
        ...

    def unseen(self) -> Records:
        """Returns empty records of the sites whose records this equation merges."""
        ...

    def merge(self, a: Records, b: Records) -> Records:
        """Returns the merged records of two evaluations."""
        ...

    @property
    def is_counting(self) -> bool:
        """Whether the counts of the rows of a batch are tracked."""
        ...

    def carried(self, x: Any) -> Any:
        """Returns a value in the form in which a loop carries it."""
        ...

    def common(self, forms: Sequence[Any]) -> Any:
        """Returns the form that results of several branches can have."""
        ...

    def dense(self, x: Any) -> Any:
        """Returns a value that must be an array here; raises, or dequantizes, if it is not."""
        ...

    def like(self, x: Any, other: Any) -> Any:
        """Returns a value in the form of another: an array, or quantized to the same format."""
        ...


@dataclasses.dataclass(frozen=True)
class Form:
    """How a primitive that holds functions is searched and evaluated.

    Attributes:
      track: finds what is inside; returns the origins of the results.
      apply: evaluates it; returns the results and the records of sites.
    """

    track: Callable[[Eqn, Sequence[Origin | None], Finder], Sequence[Origin | None]]
    apply: Callable[[Eqn, Sequence[Any], Runner], tuple[list[Any], Records]]


def looks_into(body: str) -> Callable[..., Sequence[Origin | None]]:
    """Returns the `track` of a primitive with one function in the parameter `body`, which has the
    same operands and results.
    """

    def track(eqn: Eqn, known: Sequence[Origin | None], finder: Finder) -> list[Origin | None]:
        return finder.enter(eqn.params[body], known)

    return track


def as_function(runner: Runner, jaxpr: Any) -> Callable[..., tuple[list[Any], Records]]:
    """Returns a function of what sites are given and of operands that evaluates a body."""

    def run(given: Any, *args: Any) -> tuple[list[Any], Records]:
        return runner.run(jaxpr, args, given=given)

    return run
