"""Integers that a function computes from floats, such as the expert of a token. The second of two
functions that run in parallel takes those of the first, so that rows of both are the same tokens.
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
    """Evaluates equations and records the integers that they decide, or takes known decisions.

    Attributes:
      plan: the plan.
      made: for each equation that decides, its results, and the order in which a sort puts rows.
    """

    def __init__(self, plan: Plan, known: Sequence[Any] | None = None, ignores: bool = False):
        self.plan, self.made, self._ignores = plan, [], ignores
        self._known = None if known is None else iter(known)

    def evaluate(self, eqn: Eqn, operands: list[Any]) -> list[Any]:
        """Returns the results of an equation."""
        if not _decides_inside(eqn):
            return followed(self.plan, eqn, operands, self._ignores)
        if not _decides(eqn):
            return self._inside(eqn, operands)
        if self._known is not None:
            return self._taken(eqn, operands, next(self._known))
        results, order = followed(self.plan, eqn, operands, self._ignores), None
        if eqn.primitive.name == "sort":
            values, params = [value_of(x) for x in operands], eqn.params
            places = jax.lax.broadcasted_iota(jnp.int32, values[0].shape, params["dimension"])
            order = eqn.primitive.bind(*values, places, **params)[-1]
        self.made.append((results, order))
        return results

    def _inside(self, eqn: Eqn, operands: list[Any]) -> list[Any]:
        """Evaluates the equations of the function inside an equation."""
        body, consts = _compat.open_jaxpr(body_of(eqn))
        env = dict(zip((*body.constvars, *body.invars), (*consts, *operands), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if _compat.is_literal(atom) else env[atom]

        for inner in body.eqns:
            results = self.evaluate(inner, list(map(read, inner.invars)))
            env.update(zip(inner.outvars, results, strict=True))
        return list(map(read, body.outvars))

    def _taken(self, eqn: Eqn, operands: list[Any], decided: Any) -> list[Any]:
        """Returns the decided integers, and floats from these operands in the same order."""
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
    """Whether a value may be a row index; codes of 8 bits and less are values."""
    return jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits > 8


def _decides(eqn: Eqn) -> bool:
    """Whether an equation computes integers from something else. It must be known how its other
    results follow from these integers.
    """
    kinds = [_is_integer(x.aval) for x in eqn.outvars]
    of_others = not all(_is_integer(x.aval) for x in eqn.invars)
    known = all(kinds) or eqn.primitive.name in ("sort", "top_k")
    return of_others and known and (any(kinds) or len(eqn.outvars) > 1)


def _decides_inside(eqn: Eqn) -> bool:
    """Whether an equation decides, or one of a function that it runs once."""
    if _decides(eqn):
        return True
    name = eqn.primitive.name
    if name not in FORMS or name in ("scan", "while", "cond", "shard_map"):
        return False
    return any(_decides_inside(x) for x in _compat.open_jaxpr(body_of(eqn))[0].eqns)


def body_of(eqn: Eqn) -> Any:
    """Returns the one function inside an equation that runs once on its operands."""
    entered: list[Any] = []

    class Finder:
        here: Address = ()

        def enter(self, jaxpr: Any, known: Sequence[Any], part: Address = ()) -> list[Any]:
            entered.append(jaxpr)
            return [None] * len(eqn.outvars)

        def leave(self, jaxpr: Any, reason: str) -> None:
            """No such function: equations of this kind have none."""

    FORMS[eqn.primitive.name].track(eqn, [None] * len(eqn.invars), Finder())  # pyright: ignore
    return entered[0]
