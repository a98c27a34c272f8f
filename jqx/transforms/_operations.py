"""The names of a function's operations in order, from which a file tells that `bind` gets another
function with the same contractions.

Functions that compute the same in the same order have the same names: calls of jitted functions and
of custom derivatives are opened, and operations that only move or convert elements are left out,
because jit, sizes and 64-bit types add or remove them. Numbers in the function are not compared.
"""

import base64
import itertools
import re
import zlib
from collections.abc import Iterator
from typing import Any

import jax

from .. import _compat
from .._errors import fail, message, warn
from .primitives import CONTRACTIONS

_OPENED = {
    "jit",
    "pjit",
    "checkpoint",
    "remat2",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
}
"""Calls of functions that compute what the function alone would compute."""

_LEFT_OUT = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "device_put",
    "dim_as_value",
    "dynamic_slice",
    "expand_dims",
    "gather",
    "name",
    "optimization_barrier",
    "pvary",
    "reshape",
    "reshard",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "stop_gradient",
    "transpose",
}

_END = "end_of_"
"""Before the name of an operation: the end of one of the functions inside of it."""

_EMPTY = re.compile(rf" ?\b(\w+)(?: {_END}\1\b)+ ?")
"""An operation with functions inside, of which none holds a contraction."""

_LIMIT = 2**26
"""The most bytes of names that are read from a file."""


def operations_of(jaxpr: Any) -> str:
    """Returns the names of the operations of an open jaxpr, compressed, and the version of jax."""
    names = " ".join(_names(jaxpr, {}))
    return f"{jax.__version__}:{base64.b85encode(zlib.compress(names.encode(), 9)).decode()}"


def _names(jaxpr: Any, known: dict[int, list[str]]) -> list[str]:
    if id(jaxpr) not in known:
        known[id(jaxpr)] = list(itertools.chain.from_iterable(_of(e, known) for e in jaxpr.eqns))
    return known[id(jaxpr)]


def _of(eqn: _compat.Eqn, known: dict[int, list[str]]) -> Iterator[str]:
    name = eqn.primitive.name
    if name in _LEFT_OUT:
        return
    bodies = list(_compat.sub_jaxprs(eqn))
    opened = bool(bodies) and name in _OPENED
    if not opened:
        yield name
    for body in bodies:
        yield from _names(body, known)
        if not opened:
            yield f"{_END}{name}"


def check_operations(function: str, planned: str, jaxpr: Any, strict: bool) -> None:
    """Warns, or raises if `strict`, if a function has other operations than were planned. With
    another version of jax, and for plans without operations, only `strict` has an effect.
    """
    version, _, stored = planned.partition(":")
    if version != jax.__version__:
        if strict:
            _refuse_unknown(function, version)
        return
    found = operations_of(jaxpr).partition(":")[2]
    if stored == found:
        return
    before, now = _read(function, stored), _read(function, found)
    place = next(i for i, (a, b) in enumerate(itertools.zip_longest(now, before)) if a != b)
    after = f"after `{now[place - 1]}`" if place else "at the start"
    text = message(
        function,
        "the function has the contractions of the plan, and other operations between them.",
        given=f"{_shown(now, place)}, operation {place} {after}",
        expected=f"{_shown(before, place)}, as in the function that was quantized",
        fix="bind that function. If the difference is meant, "
        + (
            "leave out check=."
            if strict
            else "bind the first function, and then this one: jqx.load(path).bind(f).bind(step)."
        ),
    )
    if strict:
        raise ValueError(text)
    warn(text)


def same_nesting(function: str, planned: str, jaxpr: Any) -> bool:
    """Whether a function has its contractions in the same loops and branches as was planned. False
    for plans without operations.
    """
    _, _, stored = planned.partition(":")
    found = operations_of(jaxpr).partition(":")[2]
    return bool(stored) and _nesting(_read(function, stored)) == _nesting(_read(function, found))


def _nesting(names: list[str]) -> str:
    """Returns the contractions among names of operations, and the loops and branches that hold
    any.
    """
    ends = {name for name in names if name.startswith(_END)}
    kept = {*CONTRACTIONS, *ends, *(name.removeprefix(_END) for name in ends)}
    text, before = " ".join(name for name in names if name in kept), ""
    while text != before:
        before, text = text, _EMPTY.sub(" ", text)
    return text


def _read(function: str, stored: str) -> list[str]:
    stream = zlib.decompressobj()
    try:
        names = stream.decompress(base64.b85decode(stored), _LIMIT).decode().split()
        if not stream.eof:
            raise ValueError("not the whole")
        return names
    except (ValueError, zlib.error) as error:
        raise fail(
            function,
            "the operations in the plan cannot be read.",
            given=f"{stored[:40]!r}",
            expected="names, compressed, as make_plan writes them",
            fix="write the file again with jqx.save(path, quantized).",
        ) from error


def _shown(names: list[str], place: int) -> str:
    if place == len(names):
        return "the end"
    return f"`{names[place]}`".replace(_END, "end of ")


def _refuse_unknown(function: str, version: str) -> None:
    given = f"a file that was written with jax {version}" if version else "a file without them"
    raise fail(
        function,
        "the operations of the function cannot be compared.",
        given=f'{given}, and check="function"',
        expected=f"a file that holds the operations of the function as jax {jax.__version__} "
        "traces it",
        fix="leave out check=, which compares parameters and contractions only, or write the "
        "file again with this jax.",
    )
