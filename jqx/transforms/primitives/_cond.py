"""`cond` and `switch`: each branch is looked into; what a branch not taken records is nothing."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax import lax

from ..._compat import Eqn
from .._origin import Origin
from ._form import Finder, Form, Records, Runner


def _track(eqn: Eqn, known: Sequence[Origin | None], finder: Finder) -> Sequence[Origin | None]:
    for i, branch in enumerate(eqn.params["branches"]):
        finder.enter(branch, known[1:], (i,))
    return [None] * len(eqn.outvars)


def _apply(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    index, *rest = operands

    def take(place: int, branch: Any, given: Any, *args: Any) -> tuple[list[Any], Records]:
        results, records = runner.run(branch, args, (place,), given)
        return [runner.dense(x) for x in results], runner.unseen() | records

    branches: list[Callable[..., Any]] = [
        partial(take, i, branch) for i, branch in enumerate(eqn.params["branches"])
    ]
    return lax.switch(index, branches, runner.given, *rest)


COND = {"cond": Form(_track, _apply)}
