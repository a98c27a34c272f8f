"""Finds the contractions of a jaxpr, in order, and the weights that reach them."""

import dataclasses
import re
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

from .. import _compat
from .._checks import is_real
from .._compat import Eqn
from ._lookups import is_lookup_or_product, without_reads
from ._origin import Address, Loop, Origin
from .primitives import CONTRACTIONS, FORMS, VIEWS, Contraction, tracked

_PART = re.compile(r"/\[[0-9]+:[0-9]+\](?=/|\Z)|\A\[[0-9]+:[0-9]+\](?:/|\Z)")
"""The name scope of a part of a split scan; rules do not see it."""

HIDDEN = "jqx_channel_map"
"""Name of jitted functions whose contractions belong to another contraction and are not found."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A contraction, or a lookup in a weight, found in a traced function.

    `address` is `()` if it is never evaluated as a site: it stays in float for the `reason`.
    """

    address: Address
    eqn: Eqn
    scope: str
    origins: tuple[Origin | None, ...]
    reason: str | None = None

    @property
    def family(self) -> Contraction:
        """The rules for reading and evaluating its primitive."""
        return CONTRACTIONS[self.eqn.primitive.name]

    @property
    def op(self) -> str:
        """The name of the operation in policies."""
        return self.family.op

    @property
    def path(self) -> str:
        """Path of its weight (the right one of two; all of several joined), or its name scope."""
        origin = self._weight
        return self.scope if origin is None else origin.name

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that rules match: the path of each of its weights, or its name scope."""
        weights = [x for x in reversed(self.origins) if x is not None]
        if not weights:
            return (_PART.sub("", self.scope),)
        return tuple(dict.fromkeys(part.path for x in weights for part in x.parts))

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The scans that step over its weight."""
        origin = self._weight
        return () if origin is None else origin.loops

    @property
    def _weight(self) -> Origin | None:
        return next((origin for origin in reversed(self.origins) if origin is not None), None)


def contraction_of(eqn: Eqn) -> Contraction:
    """Returns the rules for reading and evaluating the primitive of a contraction."""
    return CONTRACTIONS[eqn.primitive.name]


def is_marked(eqn: Eqn) -> bool:
    """Whether an equation counts in addresses: a contraction, or a form that holds one."""
    if is_lookup_or_product(eqn):
        return True
    return eqn.primitive.name in FORMS and holds_contraction(eqn)


def holds_contraction(eqn: Eqn) -> bool:
    """Whether the jaxprs inside an equation hold a contraction at any depth that is not hidden."""
    return _compat.name_of_jit(eqn) != HIDDEN and any(
        is_lookup_or_product(inner) or holds_contraction(inner)
        for jaxpr in _compat.sub_jaxprs(eqn)
        for inner in jaxpr.eqns
    )


class Addressed(NamedTuple):
    """An equation, the address of a site in its place, and whether it counts in addresses."""

    address: Address
    eqn: Eqn
    is_marked: bool


def addressed(jaxpr: Any, address: Address = ()) -> Iterator[Addressed]:
    """Yields the equations of an open jaxpr, each with the address of a site in its place: the
    address of the enclosing function, and the number of marked equations before it.
    """
    count = 0
    for eqn in jaxpr.eqns:
        marked = is_marked(eqn)
        yield Addressed((*address, count), eqn, marked)
        count += marked


def find(
    jaxpr: Any,
    origins: Sequence[Origin | None],
    address: Address = (),
    scope: str = "",
    reason: str | None = None,
) -> tuple[list[Found], list[Origin | None]]:
    """Returns the contractions of a jaxpr and the origins of its results.

    `reason` is given if all of them stay in float, and says why.
    """
    env: dict[Any, Origin | None] = dict(zip(jaxpr.invars, origins, strict=True))

    def origin_of(atom: Any) -> Origin | None:
        return None if _compat.is_literal(atom) else env.get(atom)

    found: list[Found] = []
    for here, eqn, marked in addressed(jaxpr, address):
        name = eqn.primitive.name
        inner_scope = "/".join(part for part in (scope, _compat.scope_of(eqn)) if part)
        known = tuple(map(origin_of, eqn.invars))
        results: Sequence[Origin | None] = []
        if name in CONTRACTIONS:
            family = CONTRACTIONS[name]
            if marked and (known[0] is not None or not family.needs_weight):
                why = reason or family.excuse(eqn)
                origins_here = known[: len(family.axes(eqn))]
                found.append(Found(() if why else here, eqn, inner_scope, origins_here, why))
        elif not (any(known) or marked or (name not in FORMS and holds_contraction(eqn))):
            pass
        elif name in FORMS and any(True for _ in _compat.sub_jaxprs(eqn)):
            inside = _Inside(here, inner_scope, reason)
            results = FORMS[name].track(eqn, known, inside)
            found += inside.found
        elif name in VIEWS:
            results = tracked(eqn, known) or []
        else:
            inside = _Inside(here, inner_scope, reason)
            what = _compat.shown_name(eqn)
            why = reason or f"it is inside `{what}`, which jqx does not look into"
            for body in _compat.sub_jaxprs(eqn):
                inside.leave(body, why)
            found += inside.found
        env.update(zip(eqn.outvars, results, strict=False))
    return found, [origin_of(atom) for atom in jaxpr.outvars]


@dataclasses.dataclass
class _Inside:
    """Collects what is found inside an equation."""

    here: Address
    scope: str
    reason: str | None
    found: list[Found] = dataclasses.field(default_factory=list)

    def enter(
        self, jaxpr: Any, known: Sequence[Origin | None], part: Address = ()
    ) -> list[Origin | None]:
        body, _ = _compat.open_jaxpr(jaxpr)
        found, results = find(body, known, (*self.here, *part), self.scope, self.reason)
        self.found += found
        return results

    def leave(self, jaxpr: Any, reason: str) -> None:
        body, _ = _compat.open_jaxpr(jaxpr)
        self.found += find(body, [None] * len(body.invars), self.here, self.scope, reason)[0]


def contractions(call: Any) -> list[Found]:
    """Returns the contractions of a `Call`, in order."""
    return _contractions(call, call.jaxpr)


def contractions_with_reads(call: Any) -> list[Found]:
    """Returns the same contractions with the addresses of older plans, in which reads count too."""
    return _contractions(call, without_reads(call.jaxpr))


def _contractions(call: Any, jaxpr: Any) -> list[Found]:
    floats = {path for path, dtype in dtypes_of(call).items() if is_real(dtype)}
    found, _ = find(jaxpr, origins_of(call.leaves, call.paths))
    return [_without_integers(item, floats) for item in found]


def origins_of(leaves: Sequence[Any], paths: Sequence[str | None]) -> list[Origin | None]:
    """Returns the origins of the operands of a traced function."""
    return [
        None if path is None else Origin.of_leaf(path, len(leaf.shape))
        for leaf, path in zip(leaves, paths, strict=True)
    ]


def dtypes_of(call: Any) -> dict[str, Any]:
    """Returns the dtype of each parameter of a `Call`, by path."""
    named = zip(call.paths, call.leaves, strict=True)
    return {path: leaf.dtype for path, leaf in named if path is not None}


def _without_integers(item: Found, floats: Set[str]) -> Found:
    """Treats a parameter of integers as an activation if a parameter of floats multiplies it."""
    real = [
        origin is not None and any(part.path in floats for part in origin.parts)
        for origin in item.origins
    ]
    if all(real) or not any(real):
        return item
    kept = zip(item.origins, real, strict=True)
    return dataclasses.replace(item, origins=tuple(x if is_real else None for x, is_real in kept))
