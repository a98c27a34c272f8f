"""Where the codes of weights go outside of contractions, as `convert` carries them: through views,
updates, loops and branches. Elsewhere they have no quantized form.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from .. import _compat
from .._compat import Eqn
from ._origin import Origin
from .primitives import CONTRACTIONS, FORMS, UPDATES, VIEWS

Paths = frozenset[str]
"""The weights whose codes a value holds; empty for an array."""

_NONE: Paths = frozenset()


@dataclasses.dataclass(frozen=True)
class Escape:
    """A place where codes have no quantized form.

    Attributes:
      paths: paths of the weights that reach it.
      how: a description, such as "reaches `sin`, which has no quantized form".
      eqn: the operation.
      scope: the name scopes around it.
    """

    paths: Paths
    how: str
    eqn: Eqn
    scope: str


@dataclasses.dataclass
class Codes:
    """Follows codes through jaxprs.

    Attributes:
      escapes: the places where they have no quantized form, in order.
      mixed: the places where codes of several origins become one value: their formats must agree.
      contracted: the weights whose codes a contraction reads.
    """

    escapes: list[Escape] = dataclasses.field(default_factory=list)
    mixed: list[Escape] = dataclasses.field(default_factory=list)
    contracted: set[str] = dataclasses.field(default_factory=set)

    def follow(self, jaxpr: Any, given: Sequence[Paths], scope: str = "") -> list[Paths]:
        """Returns the codes in the results of a jaxpr, given those in its operands."""
        body, _ = _compat.open_jaxpr(jaxpr)
        env: dict[Any, Paths] = dict(zip(body.invars, given, strict=True))

        def read(atom: Any) -> Paths:
            return _NONE if _compat.is_literal(atom) else env.get(atom, _NONE)

        for eqn in body.eqns:
            known = [read(atom) for atom in eqn.invars]
            if any(known):
                inside = "/".join(part for part in (scope, _compat.scope_of(eqn)) if part)
                env.update(zip(eqn.outvars, self._results(eqn, known, inside), strict=True))
        return [read(atom) for atom in body.outvars]

    def _results(self, eqn: Eqn, known: list[Paths], scope: str) -> list[Paths]:
        name, nothing = eqn.primitive.name, [_NONE] * len(eqn.outvars)
        how = f"reaches `{name}`, which has no quantized form"
        if name in CONTRACTIONS:
            why = CONTRACTIONS[name].excuse(eqn)
            if why is None:
                self.contracted |= _NONE.union(*known)
                return nothing
            if name in UPDATES and known[0]:
                return self._indexed(eqn, known, scope)
            how = f"reaches a `{name}` that has no quantized form: {why}"
        elif name in FORMS:
            return self._inside(eqn, known, scope)
        elif (seen := _views(eqn, known)) is not None:
            if len(set(filter(None, known))) > 1 and len(seen) == 1:
                self._mixes(eqn, known, "is joined with others of another format", scope)
            return seen
        elif name in UPDATES and (name == "select_n") != bool(known[0]):
            if name == "scatter":
                return self._indexed(eqn, known, scope)
            if sum(map(bool, known)) > 1:
                self._mixes(eqn, known, "is selected among others", scope)
            return [_NONE.union(*known)]
        self.escapes.append(Escape(_NONE.union(*known), how, eqn, scope))
        return nothing

    def _indexed(self, eqn: Eqn, known: list[Paths], scope: str) -> list[Paths]:
        """Values that are read or written at any places stay codes if the scale can follow."""
        how = f"reaches a `{eqn.primitive.name}` that its scale cannot follow"
        self._mixes(eqn, known[:1], how, scope)
        return known[:1]

    def _inside(self, eqn: Eqn, known: list[Paths], scope: str) -> list[Paths]:
        name, p = eqn.primitive.name, eqn.params
        if name == "scan":
            consts, count = _compat.scan_counts(eqn)
            return self._loop(eqn, p["jaxpr"], known, consts, count, scope)
        if name == "while":
            at, count = p["cond_nconsts"], len(eqn.outvars)
            self.follow(p["cond_jaxpr"], [*known[:at], *known[len(known) - count :]], scope)
            return self._loop(eqn, p["body_jaxpr"], known[at:], p["body_nconsts"], count, scope)
        given = known[1:] if name == "cond" else known
        each = [self.follow(body, given, scope) for body in _compat.sub_jaxprs(eqn)]
        results = [_NONE.union(*results) for results in zip(*each, strict=True)]
        if name in ("cond", "shard_map"):
            self._mixes(eqn, results, f"is returned by `{name}` in its own format", scope)
        return results

    def _mixes(self, eqn: Eqn, held: Sequence[Paths], how: str, scope: str) -> None:
        if any(held):
            self.mixed.append(Escape(_NONE.union(*held), how, eqn, scope))

    def _loop(
        self, eqn: Eqn, body: Any, known: list[Paths], consts: int, count: int, scope: str
    ) -> list[Paths]:
        """A carried value keeps the format that it has before the first step."""
        before = known[consts : consts + count]
        results = self.follow(body, known, scope)
        widened = [x for x, init in zip(results, before, strict=False) if x and not init]
        if widened:
            how = f"is carried by `{eqn.primitive.name}` in place of an array"
            self.escapes.append(Escape(_NONE.union(*widened), how, eqn, scope))
        inner, _ = _compat.open_jaxpr(body)
        carried = zip(inner.outvars, inner.invars[consts:], results, before, strict=False)
        changed = [x for out, given, x, init in carried if init and out is not given]
        how = f"is carried by `{eqn.primitive.name}`, which changes its format"
        self._mixes(eqn, changed, how, scope)
        return [*before, *results[count:]]


def _views(eqn: Eqn, known: Sequence[Paths]) -> list[Paths] | None:
    """Returns the codes in the results of a view; `None` if the equation is not a view."""
    view = VIEWS.get(eqn.primitive.name)
    if view is None:
        return None
    origins = [
        Origin.of_leaf("", atom.aval.ndim) if paths else None
        for atom, paths in zip(eqn.invars, known, strict=True)
    ]
    seen = [x if x and x.is_view else None for x in view.track(eqn, origins)]
    if not any(seen):
        return None
    if len(seen) == len(known):  # as many results as operands: each is a view of its operand
        return [paths if origin else _NONE for origin, paths in zip(seen, known, strict=True)]
    together = _NONE.union(*known)
    return [together if origin else _NONE for origin in seen]
