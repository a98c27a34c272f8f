"""`while`: weights among its constants, or carried unchanged, are shared by its steps. Other
carried values keep their format.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._compat import Eqn
from .._origin import Origin
from ._carry import Carry, settled, unchanged
from ._form import Finder, Form, Records, Runner


def _track(eqn: Eqn, known: Sequence[Origin | None], finder: Finder) -> Sequence[Origin | None]:
    at, first = _places(eqn)
    count = len(eqn.outvars)
    carried = unchanged(eqn.params["body_jaxpr"], first - at, count)
    state = [known[first + i] if i in carried else None for i in range(count)]
    finder.leave(eqn.params["cond_jaxpr"], "it is in the condition of a while loop")
    finder.enter(eqn.params["body_jaxpr"], [*known[at:first], *state])
    return state


def _apply(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    at, first = _places(eqn)
    for_condition, for_body = operands[:at], operands[at:first]

    def loop(carry: Carry) -> tuple[list[Any], Records]:
        def goes_on(before: Any) -> Any:
            (result,), _ = runner.run(condition, [*for_condition, *carry.state(before[1])], (-1,))
            return runner.dense(result)

        def step(before: Any) -> Any:
            i, values, seen = before
            given = runner.numbered(runner.given, i)
            results, records = runner.run(body, [*for_body, *carry.state(values)], given=given)
            return i + 1, carry.changing(results), runner.merge(seen, records)

        start = jnp.uint32(0), carry.start(), runner.unseen()
        _, values, seen = lax.while_loop(goes_on, step, start)
        return carry.state(values), seen

    return settled(Carry.of(body, first - at, operands[first:], runner), loop)


def _places(eqn: Eqn) -> tuple[int, int]:
    """Returns the indices of the first constant of the body and of the first carried operand."""
    at = eqn.params["cond_nconsts"]
    return at, at + eqn.params["body_nconsts"]


WHILE = {"while": Form(_track, _apply)}
