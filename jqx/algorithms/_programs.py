"""Compiled programs: equal stages, such as those of layers, share one program."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from .. import _compat
from .._heap import give_back

_PLACED = ("dynamic_slice", "dynamic_update_slice")
"""Primitives that read or write at an index, such as that of a layer in a cache."""


class Programs:
    """Functions of arrays, compiled once for all functions that trace to the same text with the
    same constants. Indices that are read or written at may differ: they become arguments.

    Traced functions live as long as this object, so that no two objects in them share an address.
    """

    def __init__(self) -> None:
        self._called: dict[Any, tuple[Any, list[Any], Any]] = {}
        self._compiled: dict[Any, Any] = {}

    def call(self, key: Any, f: Callable[..., Any], *given: Any) -> Any:
        """Calls a function, compiled. `key` identifies it, and lives as long as this object."""
        flat, tree = jax.tree.flatten(given)
        at = key, tree, tuple(map(_compat.type_of, flat))
        is_new = at not in self._called
        if is_new:
            self._called[at] = self._compile(f, tree, flat)
        program, numbers, out = self._called[at]
        results = program(numbers, *flat)
        if is_new:
            give_back()  # memory that compilers freed
        return jax.tree.unflatten(out, results)

    def _compile(
        self, f: Callable[..., Any], tree: Any, flat: Sequence[Any]
    ) -> tuple[Any, list[Any], Any]:
        out = None

        def run(*leaves: Any) -> list[Any]:
            nonlocal out
            results, out = jax.tree.flatten(f(*jax.tree.unflatten(tree, leaves)))
            return results

        jaxpr, consts = _compat.trace(run, *flat)
        numbers = [_number(x) for eqn in jaxpr.eqns for x in _places(eqn)]
        lifted, own = jaxpr, [*consts]
        if numbers:
            evaluate = partial(_evaluated, jaxpr, consts, numbers=len(numbers))
            lifted, own = _compat.trace(evaluate, *numbers, *flat)
        key = str(lifted), tuple(map(id, (*own, *_compat.arrays_inside(lifted))))
        if key not in self._compiled:
            self._compiled[key] = jax.jit(partial(_program, lifted, own))
        return self._compiled[key], numbers, out


def _places(eqn: _compat.Eqn) -> list[Any]:
    """Returns the integer literals of an equation that may say where it reads or writes."""
    if eqn.primitive.name not in _PLACED and not _compat.is_jit(eqn):
        return []
    return [x for x in eqn.invars if _compat.is_literal(x) and _is_place(x.aval)]


def _is_place(kind: Any) -> bool:
    """Whether a literal is a number to which JAX gives the same type if Python passes it."""
    return kind.shape == () and kind.dtype == np.int32


def _number(literal: Any) -> Any:
    return int(literal.val) if literal.aval.weak_type else np.int32(literal.val)


def _program(jaxpr: Any, consts: Sequence[Any], numbers: Sequence[Any], *given: Any) -> list[Any]:
    return _evaluated(jaxpr, consts, *numbers, *given)


def _evaluated(jaxpr: Any, consts: Sequence[Any], *given: Any, numbers: int = 0) -> list[Any]:
    """Evaluates a jaxpr; the first arguments replace the indices in it."""
    places, rest = iter(given[:numbers]), given[numbers:]
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *rest), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        lifted = _places(eqn) if numbers else []
        operands = [next(places) if any(x is y for y in lifted) else read(x) for x in eqn.invars]
        with _compat.equation_context(eqn):
            results = _compat.bind(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))
