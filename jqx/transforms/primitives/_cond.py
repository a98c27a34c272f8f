"""`cond` and `switch`: each branch is searched; a branch that is not taken records nothing.

A result that one branch returns quantized has the same format in all branches.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from ..._compat import Eqn
from .._origin import Origin
from .._weight import is_coded
from ._form import Finder, Form, Records, Runner


def _track(eqn: Eqn, known: Sequence[Origin | None], finder: Finder) -> Sequence[Origin | None]:
    for i, branch in enumerate(eqn.params["branches"]):
        finder.enter(branch, known[1:], (i,))
    return [None] * len(eqn.outvars)


def _apply(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    index, *rest = runner.dense(operands[0]), *operands[1:]

    def take(place: int, branch: Any, given: Any, *args: Any) -> tuple[list[Any], Records]:
        results, records = runner.run(branch, args, (place,), given)
        return results, runner.unseen() | records

    branches: list[Callable[..., Any]] = [
        partial(take, i, branch) for i, branch in enumerate(eqn.params["branches"])
    ]
    if runner.is_counting or any(map(is_coded, rest)):
        forms = [jax.eval_shape(branch, runner.given, *rest)[0] for branch in branches]
        each = zip(*forms, strict=True)
        common = [runner.common(results) for results in each]
        branches = [partial(_as_common, branch, common, runner) for branch in branches]
    return lax.switch(index, branches, runner.given, *rest)


def _as_common(
    branch: Callable[..., Any], common: Sequence[Any], runner: Runner, *args: Any
) -> tuple[list[Any], Records]:
    """Evaluates a branch and converts its results to the common formats of all branches."""
    results, records = branch(*args)
    return [runner.like(x, form) for x, form in zip(results, common, strict=True)], records


COND = {"cond": Form(_track, _apply)}
