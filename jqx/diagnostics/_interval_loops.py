"""Follows intervals through loops.

A loop is run step by step if it is short or its end is known. Otherwise its carried values are
widened until no step changes them (P. Cousot, R. Cousot, "Abstract interpretation", POPL 1977), and
narrowed by the condition of a `while` and by the length of a `scan` that adds to them.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _compat
from .._compat import Eqn
from ..tensor._shared import refine
from ..transforms._shared import Address
from ._intervals import Interval, anything, hull, is_integer, limits, of_value, summed

Follower = Any
"""The follower of `_interval_forms`, which imports this file."""

STEPS = 128
"""Maximum number of steps of a loop that are followed one by one."""

_NOWHERE = -3
"""A part of an address that no site has."""

_TRIES = 3
"""Number of steps after which values that still grow are widened."""

Step = Callable[..., list[Interval]]
"""One step of a loop: from the follower and the carried values to the next ones and others."""


def literal(atom: Any) -> Interval:
    """Returns the interval of a literal in an equation."""
    return of_value(np.asarray(atom.val, atom.aval.dtype))


def makers(body: Any) -> Callable[[Any], Eqn | None]:
    """Returns a function from a value inside an open jaxpr to the equation that computes it."""
    made = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    return lambda atom: None if _compat.is_literal(atom) else made.get(atom)


def scan(self: Follower, eqn: Eqn, xs: list[Interval], here: Address) -> list[Interval]:
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    at, count = _compat.scan_counts(eqn)
    consts, state, stacks = xs[:at], xs[at : at + count], xs[at + count :]
    if length == 0:
        return [*state, *(anything(v.aval) for v in eqn.outvars[count:])]
    if length > STEPS:
        parts = [x.hull_only() for x in stacks]

        def step(who: Follower, state: list[Interval], also: Sequence[Any] = ()) -> Any:
            return who.run(body, [*consts, *state, *parts], here, also)

        start, fixed = state, _unchanged(body, at, count)
        state = _invariant(self, step, start, fixed, body)
        state = _counted(self, step, start, state, body, at, length)
        results = step(self, state)
        ends = [x if i in fixed else results[i] for i, x in enumerate(state)]
        return [*ends, *(x.hull_only() for x in results[count:])]
    steps = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
    seen: list[list[Interval]] = []
    for i in steps:
        results = self.run(body, [*consts, *state, *(_slice(x, i) for x in stacks)], here)
        before, state = state, results[:count]
        seen.append([x.hull_only() for x in results[count:]])
        pairs = zip(before, state, strict=True)
        if not any(x.is_known for x in stacks) and all(a.holds(b) for a, b in pairs):
            break  # all later steps do the same
    return [*state, *(hull(parts) for parts in zip(*seen, strict=True))]


def _slice(x: Interval, i: int) -> Interval:
    """Returns the slice for one step of an array that a scan steps over."""
    if x.value is None:
        return x.hull_only()
    q = x.codes
    if q is not None:
        q = (q if q.scale.shape[0] == q.shape[0] else refine(q, 0))[i]
    return dataclasses.replace(of_value(x.value[i]), codes=q)


def _invariant(
    self: Follower, step: Step, start: list[Interval], fixed: Sequence[int], body: Any
) -> list[Interval]:
    """Returns intervals of the carried values that hold before every step."""
    body, _ = _compat.open_jaxpr(body)
    state = [x if i in fixed else x.hull_only() for i, x in enumerate(start)]
    tries = 0
    while True:
        after = [x.hull_only() for x in step(self.aside(), state)[: len(state)]]
        changed = [
            i
            for i, (a, b) in enumerate(zip(state, after, strict=True))
            if i not in fixed and not a.holds(b)
        ]
        if not changed:
            return state
        tries += 1
        for i in changed:
            old, new = state[i], hull([state[i], after[i]])
            if tries > _TRIES:
                low, high = limits(body.outvars[i].aval.dtype)
                new = Interval(
                    low if new.low < old.low else new.low,
                    high if new.high > old.high else new.high,
                )
            state[i] = new


def _counted(
    self: Follower,
    step: Step,
    start: list[Interval],
    state: list[Interval],
    body: Any,
    at: int,
    length: int,
) -> list[Interval]:
    """Narrows carried integers that each step increments: `length - 1` times before the last."""
    body, _ = _compat.open_jaxpr(body)
    made = makers(body)
    found = {}
    for i in range(len(state)):
        carried, eqn = body.invars[at + i], made(body.outvars[i])
        if eqn is not None and eqn.primitive.name == "add" and is_integer(carried.aval.dtype):
            others = [atom for atom in eqn.invars if atom is not carried]
            if len(others) == 1:
                found[i] = others[0]
    addends = step(self.aside(), state, list(found.values()))[len(body.outvars) :]
    state = list(state)
    for i, addend in zip(found, addends, strict=True):
        total, old = summed(addend.hull_only(), length - 1), state[i]
        low, high = start[i].low + min(total.low, 0), start[i].high + max(total.high, 0)
        state[i] = Interval(max(low, old.low), min(high, old.high))
    return state


def _unchanged(body: Any, consts: int, count: int) -> list[int]:
    """Returns which carried values a loop passes on unchanged."""
    body, _ = _compat.open_jaxpr(body)
    return [i for i in range(count) if body.outvars[i] is body.invars[consts + i]]


def while_loop(self: Follower, eqn: Eqn, xs: list[Interval], here: Address) -> list[Interval]:
    p = eqn.params
    at, inside = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    asked, consts, state = xs[:at], xs[at:inside], xs[inside:]

    def goes_on(state: list[Interval]) -> Interval:
        return self.run(p["cond_jaxpr"], [*asked, *state], (*here, _NOWHERE))[0]

    def step(who: Follower, state: list[Interval]) -> list[Interval]:
        narrowed = _where_true(p["cond_jaxpr"], [*asked, *state])[at:]
        return who.run(p["body_jaxpr"], [*consts, *narrowed], here)

    for _ in range(STEPS):
        decided = goes_on(state)
        if decided.high == 0:
            return state
        if decided.low == 0:
            break
        state = step(self, state)
    start, fixed = state, _unchanged(p["body_jaxpr"], p["body_nconsts"], len(state))
    state = _invariant(self, step, start, fixed, p["body_jaxpr"])
    tighter = [hull([a, b]) for a, b in zip(start, step(self.aside(), state), strict=True)]
    state = [x if i in fixed else tighter[i].hull_only() for i, x in enumerate(state)]
    goes_on(state)
    after = step(self, state)
    return [x if i in fixed else hull([start[i], after[i]]) for i, x in enumerate(state)]


def _where_true(condition: Any, args: list[Interval]) -> list[Interval]:
    """Narrows the operands of a condition under the assumption that it holds. It consists of
    comparisons of integers joined by `and`.
    """
    body, _ = _compat.open_jaxpr(condition)
    made = makers(body)
    env = dict(zip(body.invars, args, strict=True))

    def source(atom: Any) -> Any:
        """Looks through conversions that do not change values, such as those of weak types."""
        eqn = made(atom)
        if eqn is None or eqn.primitive.name != "convert_element_type":
            return atom
        same = eqn.invars[0].aval.dtype == atom.aval.dtype
        return source(eqn.invars[0]) if same else atom

    def narrow(atom: Any, low: Any, high: Any) -> None:
        x = env.get(atom) if not _compat.is_literal(atom) else None
        if x is not None and not x.is_known and x.low <= high and low <= x.high:
            env[atom] = Interval(max(x.low, low), min(x.high, high))

    def visit(atom: Any) -> None:
        eqn = made(source(atom))
        if eqn is None:
            return
        name, operands = eqn.primitive.name, [source(atom) for atom in eqn.invars]
        if name == "and" and operands[0].aval.dtype == bool:
            for operand in operands:
                visit(operand)
        if name not in ("lt", "le", "gt", "ge") or not is_integer(operands[0].aval.dtype):
            return
        a, b = operands if name[0] == "l" else operands[::-1]
        left, right = (literal(x) if _compat.is_literal(x) else env.get(x) for x in (a, b))
        if left is not None and right is not None:
            narrow(a, -math.inf, right.high - (name[1] == "t"))
            narrow(b, left.low + (name[1] == "t"), math.inf)

    visit(body.outvars[0])
    return [env[v] for v in body.invars]
