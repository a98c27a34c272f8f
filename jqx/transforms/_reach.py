"""Where the codes of parameters go, and parameters that no contraction multiplies by."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .. import _compat
from .._errors import fail
from ._codes import Codes
from ._find import Found
from ._plan import Plan
from ._site import Unreached
from ._trace import Call, is_quantized

UNSUPPORTED = ("error", "dequantize")


def check_unsupported(function: str, unsupported: Any) -> None:
    """Checks the value of `unsupported`."""
    if unsupported not in UNSUPPORTED:
        raise fail(
            function,
            "`unsupported` is unknown.",
            given=f"unsupported == {unsupported!r}",
            expected=f"one of {', '.join(map(repr, UNSUPPORTED))}",
            fix="leave it at 'error', or pass 'dequantize'.",
        )


def unreached(call: Call, found: Sequence[Found]) -> tuple[Unreached, ...]:
    """Returns the float parameters with two or more axes that no contraction multiplies by."""
    reached = {
        part.path for item in found for origin in item.origins if origin for part in origin.parts
    }
    rest = {
        path: tuple(leaf.shape)
        for path, leaf in zip(call.paths, call.leaves, strict=True)
        if path is not None and path not in reached
        if len(leaf.shape) > 1 and jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    if not rest:
        return ()
    codes, returned = followed(call, set(rest))
    why = dict.fromkeys(returned, "f returns it")
    why |= dict.fromkeys(
        codes.contracted, "only the result of a loop or branch on it is multiplied"
    )
    only = "uses it, and only operands of contractions are quantized"
    for escape in reversed(codes.escapes):
        why |= dict.fromkeys(escape.paths, f"`{_compat.shown_name(escape.eqn)}` {only}")
    unused = "f does not use it"
    return tuple(Unreached(path, why.get(path, unused), shape) for path, shape in rest.items())


def followed(call: Call, paths: set[str]) -> tuple[Codes, set[str]]:
    """Follows the codes of some weights; returns what was found, and which of them `f` returns."""
    codes = Codes()
    given = [frozenset({path} & paths) if path is not None else frozenset() for path in call.paths]
    results = codes.follow(call.jaxpr, given)
    return codes, set().union(*results)


def reaching(call: Call, plan: Plan, eqn: Any) -> list[tuple[str | None, str]]:
    """Returns the quantized leaves whose codes an equation cannot take: the path of each, `None` if
    it is no parameter, and its name in an error.
    """
    named = dict(enumerate(zip(call.paths, call.leaves, strict=True)))
    given = [
        frozenset({str(i)} if is_quantized(leaf) or plan.weight_at(path) is not None else ())
        for i, (path, leaf) in named.items()
    ]
    codes = Codes()
    codes.follow(call.jaxpr, given)
    places = [x.paths for x in (*codes.escapes, *codes.mixed) if x.eqn is eqn]
    held = sorted(map(int, frozenset().union(*places)))
    return [(named[i][0], _name(call, i)) for i in held]


def _name(call: Call, i: int) -> str:
    path = call.paths[i]
    if path is not None:
        return repr(path)
    kind, place, *_ = call.keys[i]
    return f"argument {place.idx}" if kind.idx == 0 else f"argument {place.key!r}"
