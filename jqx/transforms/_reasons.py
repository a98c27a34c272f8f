"""Reasons why no weight reaches a contraction: what its operands are computed from."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

from .. import _compat
from .._compat import Eqn
from ._offers import OUTSIDE, named, offers
from ._trace import Call
from .primitives import CONTRACTIONS, FORMS, VIEWS

NO_WEIGHT = "no weight reaches it through views, and no rule without a weight spec matches"


_DRAWS = ("random_", "rng_", "prng_", "threefry")
"""Prefixes of the names of primitives that make random numbers and keys; they return no weight."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The inputs that a value is computed from.

    Attributes:
      weights: the paths of weights.
      closure: whether it depends on arrays that the function closes over.
      other: whether it depends on other arguments.
      drawn: whether it depends on random numbers.
      through: the first operation on a weight that is not a view.
    """

    weights: frozenset[str] = frozenset()
    closure: bool = False
    other: bool = False
    drawn: bool = False
    through: str | None = None

    def __or__(self, also: "Source") -> "Source":
        return Source(
            self.weights | also.weights,
            self.closure or also.closure,
            self.other or also.other,
            self.drawn or also.drawn,
            self.through or also.through,
        )

    @property
    def is_closed_over(self) -> bool:
        """Whether it is computed only from arrays that the function closes over."""
        return self.closure and not (self.weights or self.other or self.drawn)

    @property
    def reason(self) -> str | None:
        """Why it is not a weight; `None` if it depends on other arguments, as activations do."""
        if self.other:
            return None
        if self.weights:
            by = f"`{self.through}`, which is not a view" if self.through else "more than views"
            return f"an operand is computed from {named(sorted(self.weights))} by {by}{OUTSIDE}"
        if self.closure:
            return "an operand is closed over by f: pass weights in an argument that params= names"
        return "an operand is drawn at random in f" if self.drawn else None


_NOTHING = Source()
_CLOSURE = Source(closure=True)


def reasons(call: Call) -> dict[int, str]:
    """Returns the reasons for the operands of contractions, by the `id` of the equation."""
    sources_of = sources(call)
    known = {place: [source.reason for source in each] for place, each in sources_of.items()}
    found = {place: next(filter(None, why)) for place, why in known.items() if any(why)}
    if any(source.weights for each in sources_of.values() for source in each):
        for place, (names, offer) in offers(call).items():
            why = found.get(place, f"an operand is computed from {names}")
            found[place] = why.removesuffix(OUTSIDE) + offer
    return found


def sources(call: Call) -> dict[int, list[Source]]:
    """Returns what the operands of contractions are computed from, by the `id` of the equation.

    The sources of a function that is called twice are those of all its calls together.
    """
    found: dict[int, list[Source]] = {}
    given = [
        Source(other=True) if path is None else Source(frozenset({path})) for path in call.paths
    ]
    _follow(call.jaxpr, given, found)
    return found


def _follow(jaxpr: Any, given: Sequence[Source], found: dict[int, list[Source]]) -> list[Source]:
    """Follows sources through a jaxpr; returns the sources of its results."""
    body, _ = _compat.open_jaxpr(jaxpr)
    env = dict.fromkeys(body.constvars, _CLOSURE)
    env.update(zip(body.invars, given, strict=True))

    def read(atom: Any) -> Source:
        return _NOTHING if _compat.is_literal(atom) else env[atom]

    for eqn in body.eqns:
        known = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in CONTRACTIONS:
            before = found.get(id(eqn), [_NOTHING] * len(known))
            found[id(eqn)] = [a | b for a, b in zip(before, known, strict=True)]
        env.update(zip(eqn.outvars, _results(eqn, known, found), strict=True))
    return [read(atom) for atom in body.outvars]


def _results(eqn: Eqn, known: list[Source], found: dict[int, list[Source]]) -> list[Source]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    together = _NOTHING
    for source in known:
        together |= source
    if name in ("scan", "while"):
        return _loop(eqn, known, found)
    if name == "cond":
        each = [_follow(body, known[1:], found) for body in eqn.params["branches"]]
        return [
            functools.reduce(operator.or_, results, known[0]) for results in zip(*each, strict=True)
        ]
    bodies = list(_compat.sub_jaxprs(eqn))
    if name.startswith(_DRAWS):
        return [Source(other=together.other, drawn=True)] * count
    if not bodies:
        if together.weights and not together.through and name not in VIEWS:
            together = dataclasses.replace(together, through=name)
        return [together] * count
    # The operands of a body of a form are the last ones of its equation.
    is_form = name in FORMS
    for body in bodies:
        n = len(body.invars)
        results = _follow(body, known[len(known) - n :] if is_form else [together] * n, found)
        if is_form:
            return results
    if together.weights and not together.through:
        together = dataclasses.replace(together, through=name)
    return [together] * count


def _loop(eqn: Eqn, known: list[Source], found: dict[int, list[Source]]) -> list[Source]:
    """Follows sources through a loop until those of the carried values stay the same."""
    if eqn.primitive.name == "scan":
        consts, count = _compat.scan_counts(eqn)
        body, shared = eqn.params["jaxpr"], known[:consts]
        carried, stacked = known[consts : consts + count], known[consts + count :]
        asked = 0
    else:
        asked, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        body, shared = eqn.params["body_jaxpr"], known[asked : asked + consts]
        carried, stacked = known[asked + consts :], []
    while True:
        results = _follow(body, [*shared, *carried, *stacked], found)
        after = [a | b for a, b in zip(carried, results, strict=False)]
        if after == carried:
            break
        carried = after
    if eqn.primitive.name == "while":
        _follow(eqn.params["cond_jaxpr"], [*known[:asked], *carried], found)
    return [*carried, *results[len(carried) :]]
