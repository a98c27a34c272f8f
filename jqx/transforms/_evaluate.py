"""Evaluates a jaxpr, one equation after another."""

from collections.abc import Callable, Sequence
from typing import Any

from .. import _compat
from .._compat import Eqn


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    results_of: Callable[[Eqn, list[Any]], Sequence[Any]] = _compat.bind,
) -> list[Any]:
    """Returns the results of a jaxpr; operands that it does not read may be `None`. `results_of`
    evaluates an equation on operands of any kind, in the context that it was traced in.
    """
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        with _compat.equation_context(eqn):
            results = results_of(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
