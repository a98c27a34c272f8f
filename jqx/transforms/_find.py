"""Finding the contractions of a jaxpr, in order, and the weights that reach them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from .. import _compat
from .._compat import Eqn
from .._errors import message
from ._origin import Origin
from ._plan import Address
from .primitives import CONTRACTIONS, UNQUANTIZED, VIEWS


@dataclasses.dataclass(frozen=True)
class Found:
    """A contraction, or a lookup in a weight, met in a traced function.

    `address` is `()` where the operation has no quantized form: it is never evaluated as a site.
    """

    address: Address
    eqn: Eqn
    op: str
    scope: str
    origins: tuple[Origin | None, ...]

    @property
    def path(self) -> str:
        """Path of its weight (the right one of two), or its name scope."""
        known = [origin for origin in self.origins if origin is not None]
        return known[-1].path if known else self.scope


def is_marked(eqn: Eqn) -> bool:
    """Whether an equation counts in addresses: a contraction, or a call that holds one."""
    if eqn.primitive.name in CONTRACTIONS:
        return True
    return _compat.is_jit(eqn) and holds_contraction(eqn)


def holds_contraction(eqn: Eqn) -> bool:
    """Whether a contraction stands anywhere inside the jaxprs of an equation."""
    return any(
        inner.primitive.name in CONTRACTIONS
        or (inner.primitive.name in UNQUANTIZED and inner.primitive.name != "gather")
        or holds_contraction(inner)
        for jaxpr in _compat.sub_jaxprs(eqn)
        for inner in jaxpr.eqns
    )


def find(
    jaxpr: Any,
    origins: Sequence[Origin | None],
    function: str,
    address: Address = (),
    scope: str = "",
) -> tuple[list[Found], list[Origin | None]]:
    """Returns the contractions of a jaxpr and the origins of its results."""
    env: dict[Any, Origin | None] = dict(zip(jaxpr.invars, origins, strict=True))

    def origin_of(atom: Any) -> Origin | None:
        return None if _compat.is_literal(atom) else env.get(atom)

    found: list[Found] = []
    marked = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        here = (*address, marked)
        inner_scope = "/".join(part for part in (scope, _compat.scope_of(eqn)) if part)
        known = tuple(map(origin_of, eqn.invars))
        results: list[Origin | None] = []
        if name in CONTRACTIONS:
            found.append(Found(here, eqn, name, inner_scope, known))
        elif name in UNQUANTIZED:
            op, position = UNQUANTIZED[name]
            origin = known[position]
            if op != "gather" or origin is not None:
                found.append(Found((), eqn, op, inner_scope, (origin,)))
        elif _compat.is_jit(eqn):
            body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
            inner, results = find(body, known, function, here, inner_scope)
            found += inner
        elif holds_contraction(eqn):
            raise NotImplementedError(
                message(
                    function,
                    f"a contraction stands inside `{name}`, which is not supported yet.",
                    given=f"`{name}` in scope {inner_scope or '(none)'}",
                    expected="contractions at top level or inside jit",
                    mend="unroll it, or apply jqx to the function that it calls.",
                )
            )
        elif name in VIEWS:
            results = [_through_view(eqn, known)]
        marked += is_marked(eqn)
        env.update(zip(eqn.outvars, results, strict=False))
    return found, [origin_of(atom) for atom in jaxpr.outvars]


def _through_view(eqn: Eqn, known: Sequence[Origin | None]) -> Origin | None:
    positions = [i for i, origin in enumerate(known) if origin is not None]
    if len(positions) != 1:
        return None
    origin = known[positions[0]]
    assert origin is not None
    return VIEWS[eqn.primitive.name].track(eqn, positions[0], origin)
