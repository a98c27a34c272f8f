"""The live part of a traced function: what its results and effects need, in loops and branches too.

JAX drops dead code everywhere except in a `while` (before jax 0.11). There a carried value that
nothing needs is passed on unchanged, so that the code that computes it is dead.
"""

from typing import Any, NamedTuple

from .. import compat
from ..compat import Eqn


def live(jaxpr: Any) -> Any:
    """Returns an open jaxpr without dead code, with the same operands and results; the same object
    if there is no dead code.
    """
    if not _may_hold_dead(jaxpr, {}):
        return jaxpr
    alive = compat.without_dead(jaxpr)
    size = _size(alive)
    if size.loops:
        alive = compat.without_dead(_with_live_loops(alive, {}))
        size = _size(alive)
    return jaxpr if size == _size(jaxpr) else alive


def _may_hold_dead(jaxpr: Any, memo: dict[int, bool]) -> bool:
    """Whether there is a `while`, a result of an equation that nothing reads, or an operand that a
    function inside an equation does not read. If there is none, nothing is dead.
    """
    if id(jaxpr) not in memo:
        read = read_by(jaxpr)
        memo[id(jaxpr)] = any(
            eqn.primitive.name == "while"
            or not read.issuperset(map(id, eqn.outvars))
            or any(
                not read_by(body).issuperset(map(id, body.invars)) or _may_hold_dead(body, memo)
                for body in compat.sub_jaxprs(eqn)
            )
            for eqn in jaxpr.eqns
        )
    return memo[id(jaxpr)]


def read_by(jaxpr: Any) -> set[int]:
    """Returns the `id` of each value of an open jaxpr that its equations or results read."""
    return {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars} | set(map(id, jaxpr.outvars))


class _Size(NamedTuple):
    """The number of equations, including those inside others, and of `while` loops among them."""

    eqns: int
    loops: int


def _size(jaxpr: Any, memo: dict[int, _Size] | None = None) -> _Size:
    memo = {} if memo is None else memo
    if id(jaxpr) not in memo:
        parts = [_size(body, memo) for eqn in jaxpr.eqns for body in compat.sub_jaxprs(eqn)]
        parts += [_Size(1, eqn.primitive.name == "while") for eqn in jaxpr.eqns]
        memo[id(jaxpr)] = _Size(sum(p.eqns for p in parts), sum(p.loops for p in parts))
    return memo[id(jaxpr)]


def _with_live_loops(jaxpr: Any, memo: dict[int, Any]) -> Any:
    """Returns an open jaxpr without dead code in its `while` loops; the same object if none."""
    if id(jaxpr) not in memo:
        read = read_by(jaxpr)
        eqns = [_with_live_bodies(eqn, read, memo) for eqn in jaxpr.eqns]
        changed = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
        memo[id(jaxpr)] = jaxpr.replace(eqns=eqns) if changed else jaxpr
    return memo[id(jaxpr)]


def _with_live_bodies(eqn: Eqn, read: set[int], memo: dict[int, Any]) -> Eqn:
    eqn = compat.with_bodies(eqn, lambda body: _with_live_loops(body, memo))
    if eqn.primitive.name != "while":
        return eqn
    old = eqn.params["body_jaxpr"]
    new = _live_body(eqn, read, old)
    return eqn if new is old else eqn.replace(params={**eqn.params, "body_jaxpr": new})


def _live_body(eqn: Eqn, read: set[int], closed: Any) -> Any:
    """Returns the body of a `while` without dead code."""
    body, _ = compat.open_jaxpr(closed)
    condition, _ = compat.open_jaxpr(eqn.params["cond_jaxpr"])
    consts = eqn.params["body_nconsts"]
    asked = compat.needed(condition)
    used = [id(result) in read for result in eqn.outvars]
    grown = [a or b for a, b in zip(used, asked[eqn.params["cond_nconsts"] :], strict=True)]
    while grown != used:
        used = grown
        needed = compat.needed(body, used)
        grown = [a or b for a, b in zip(used, needed[consts:], strict=True)]
    carried = zip(used, body.outvars, body.invars[consts:], strict=True)
    handed_on = body.replace(outvars=[new if live else old for live, new, old in carried])
    new = compat.without_dead(handed_on)
    return closed if _size(new) == _size(body) else compat.with_body(closed, new)
