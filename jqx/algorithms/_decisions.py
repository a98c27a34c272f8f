"""Integers that a function makes of floats, such as the expert that a token goes to. A function
that runs beside another takes those of that: what stands at one place is of one token in both.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from .._compat import Eqn
from ..transforms import Plan
from ..transforms._shared import FORMS, Address, followed, is_counted, value_of


class Decisions:
    """Evaluates equations, and tells what they decide; or takes what is decided already.

    Attributes:
      plan: the plan.
      made: of each equation that decides, its results, and the order in which a sort puts rows.
    """

    def __init__(self, plan: Plan, known: Sequence[Any] | None = None):
        self.plan, self.made = plan, []
        self._known = None if known is None else iter(known)

    def evaluate(self, eqn: Eqn, operands: list[Any]) -> list[Any]:
        """Returns the results of an equation."""
        if not _decides_inside(eqn):
            return followed(self.plan, eqn, operands)
        if not _decides(eqn):
            return self._inside(eqn, operands)
        if self._known is not None:
            return self._taken(eqn, operands, next(self._known))
        results, order = followed(self.plan, eqn, operands), None
        if eqn.primitive.name == "sort":
            values, params = [value_of(x) for x in operands], eqn.params
            places = jax.lax.broadcasted_iota(jnp.int32, values[0].shape, params["dimension"])
            order = eqn.primitive.bind(*values, places, **params)[-1]
        self.made.append((results, order))
        return results

    def _inside(self, eqn: Eqn, operands: list[Any]) -> list[Any]:
        """Evaluates the equations of the function inside of one."""
        body, consts = _compat.open_jaxpr(body_of(eqn))
        env = dict(zip((*body.constvars, *body.invars), (*consts, *operands), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if _compat.is_literal(atom) else env[atom]

        for inner in body.eqns:
            results = self.evaluate(inner, list(map(read, inner.invars)))
            env.update(zip(inner.outvars, results, strict=True))
        return list(map(read, body.outvars))

    def _taken(self, eqn: Eqn, operands: list[Any], decided: Any) -> list[Any]:
        """Returns integers as they are decided, and floats of these operands, in the same order."""
        first, order = decided
        axis = eqn.params.get("dimension", -1)
        if eqn.primitive.name == "top_k":
            axis, order = eqn.params.get("axis", -1), value_of(first[1])
        results = list(first)
        for i, x in enumerate(first):
            if _is_integer(value_of(x)):
                continue
            moved = jnp.take_along_axis(value_of(operands[i]), order, axis)
            results[i] = replace(x, value=moved) if is_counted(x) else moved
        return results


def _is_integer(x: Any) -> bool:
    """Whether something may be the number of a row; codes of 8 bits and less are values."""
    return jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits > 8


def _decides(eqn: Eqn) -> bool:
    """Whether an equation makes integers of something else; of its other results it is known how
    they follow from these.
    """
    kinds = [_is_integer(x.aval) for x in eqn.outvars]
    of_others = not all(_is_integer(x.aval) for x in eqn.invars)
    known = all(kinds) or eqn.primitive.name in ("sort", "top_k")
    return of_others and known and (any(kinds) or len(eqn.outvars) > 1)


def _decides_inside(eqn: Eqn) -> bool:
    """Whether an equation decides, or one of the function does that it runs once."""
    if _decides(eqn):
        return True
    name = eqn.primitive.name
    if name not in FORMS or name in ("scan", "while", "cond", "shard_map"):
        return False
    return any(_decides_inside(x) for x in _compat.open_jaxpr(body_of(eqn))[0].eqns)


def body_of(eqn: Eqn) -> Any:
    """Returns the one function inside of an equation that runs once on its operands."""
    entered: list[Any] = []

    class Finder:
        here: Address = ()

        def enter(self, jaxpr: Any, known: Sequence[Any], part: Address = ()) -> list[Any]:
            entered.append(jaxpr)
            return [None] * len(eqn.outvars)

        def leave(self, jaxpr: Any, reason: str) -> None:
            """Of these equations none has such a function."""

    FORMS[eqn.primitive.name].track(eqn, [None] * len(eqn.invars), Finder())  # pyright: ignore
    return entered[0]
