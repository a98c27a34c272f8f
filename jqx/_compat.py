"""The only file that touches `jax.extend` and JAX names that change between versions.

jax 0.11 merged ClosedJaxpr into Jaxpr and made `get_bind_params` return a dict alone; nothing here
dispatches on the class. Supported: jax 0.10.2 to 0.12.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core as jex_core
from jax.extend import source_info_util

Eqn = Any
"""One equation of a jaxpr: `primitive`, `params`, `invars`, `outvars`."""


def trace(f: Callable[..., Any], *args: Any) -> tuple[Any, list[Any]]:
    """Traces `f`, flat in and flat out, and returns `(jaxpr, consts)`."""
    return open_jaxpr(jax.make_jaxpr(f)(*args))


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Returns `(jaxpr, consts)` of a jaxpr, closed or open."""
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def sub_jaxprs(eqn: Eqn) -> Iterator[Any]:
    """Yields the jaxprs among the parameters of an equation, opened."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a constant written into it."""
    return isinstance(atom, jex_core.Literal)


def is_concrete(x: Any) -> bool:
    """Whether an array has a value that Python can read."""
    return not isinstance(x, Tracer)


def equation_context(eqn: Eqn) -> ExitStack:
    """Returns the context an equation was traced in: its name scopes and configuration."""
    stack = ExitStack()
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    stack.enter_context(source_info_util.user_context(eqn.source_info.traceback, name_stack=names))
    stack.enter_context(eqn.ctx.manager)
    return stack


def bind(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluates an equation as it stands, whatever its primitive, and returns its results."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def is_jit(eqn: Eqn) -> bool:
    """Whether an equation is the call of a jitted function."""
    return eqn.primitive.name in ("jit", "pjit") and "jaxpr" in eqn.params


def has_shardings(eqn: Eqn) -> bool:
    """Whether a jit equation fixes the sharding of an operand or a result."""
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)


def scope_of(eqn: Eqn) -> str:
    """Returns the name scopes of an equation, joined by `/`; relative to its own jaxpr."""
    return str(eqn.source_info.name_stack)


def name_of_jit(eqn: Eqn) -> str:
    """Returns the name of the jitted function that an equation calls; else an empty string."""
    return eqn.params["name"] if is_jit(eqn) else ""
