"""Finds which operands of contractions in a jaxpr are one value, by value numbering."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import _compat
from .._compat import Eqn
from ._find import addressed
from ._origin import Address
from .primitives import CONTRACTIONS, FORMS

_TRANSPARENT = {"jit", "pjit", "remat2", "remat", "checkpoint"}
_TRANSPARENT |= {"custom_jvp_call", "custom_vjp_call"}
"""Forms whose body runs once, on the operands of the equation."""


class Numbered(NamedTuple):
    """The operands and the result of a contraction by number.

    Equal numbers are equal values; `inside` is the loop, branch or `shard_map` they belong to.
    """

    inside: Address
    operands: tuple[int, ...]
    result: int


def numbered(jaxpr: Any) -> dict[Address, Numbered]:
    """Returns the numbers of the operands and the result of each contraction of an open jaxpr."""
    numbering = _Numbering()
    numbering.follow(jaxpr, [numbering.new() for _ in jaxpr.invars], (), ())
    return numbering.found


@dataclass
class _Numbering:
    """Numbers of values. Two equations with the same primitive, parameters and operands share them,
    and so do two calls of functions that compute the same.
    """

    found: dict[Address, Numbered] = field(default_factory=dict)
    known: dict[Any, int] = field(default_factory=dict)
    count: Iterator[int] = field(default_factory=itertools.count)

    def new(self) -> int:
        return next(self.count)

    def number(self, key: Any) -> int:
        """Returns the number for a key; a new one if the key cannot be hashed."""
        try:
            return self.known.setdefault(key, self.new())
        except TypeError:  # a parameter without a hash
            return self.new()

    def follow(
        self, body: Any, operands: Sequence[int], address: Address, inside: Address
    ) -> list[int]:
        """Numbers the values of a jaxpr, and returns the numbers of its results."""
        env = {var: self.new() for var in body.constvars}
        env.update(zip(body.invars, operands, strict=True))

        def read(atom: Any) -> int:
            if not _compat.is_literal(atom):
                return env[atom]
            if atom.aval.shape:
                return self.new()
            return self.number((str(atom.aval), repr(atom.val)))

        for here, eqn, marked in addressed(body, address):
            values = list(map(read, eqn.invars))
            if eqn.primitive.name in (FORMS if marked else _TRANSPARENT):
                results = self.form(eqn, values, here, inside)
            else:
                results = self.results(eqn, values)
            if marked and eqn.primitive.name in CONTRACTIONS:
                self.found[here] = Numbered(inside, tuple(values), results[0])
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, body.outvars))

    def results(self, eqn: Eqn, values: Sequence[int]) -> list[int]:
        """Numbers the results of an equation without looking inside."""
        if eqn.effects:
            return [self.new() for _ in eqn.outvars]
        what = (eqn.primitive, tuple(sorted(eqn.params.items(), key=lambda pair: pair[0])))
        return [self.number((*what, *values, i)) for i in range(len(eqn.outvars))]

    def form(self, eqn: Eqn, values: Sequence[int], here: Address, inside: Address) -> list[int]:
        """Numbers the values inside an equation."""
        transparent = eqn.primitive.name in _TRANSPARENT
        within = _Inside(self, here, inside, values if transparent else None)
        FORMS[eqn.primitive.name].track(eqn, [None] * len(values), within)
        return within.results if transparent else [self.new() for _ in eqn.outvars]


@dataclass
class _Inside:
    """Numbers the values of the functions inside an equation; those of a transparent one get the
    numbers of its operands.
    """

    numbering: _Numbering
    here: Address
    inside: Address
    given: Sequence[int] | None
    results: list[int] = field(default_factory=list)

    def enter(self, jaxpr: Any, known: Sequence[Any], part: Address = ()) -> list[Any]:
        body, _ = _compat.open_jaxpr(jaxpr)
        at = (*self.here, *part)
        if self.given is not None:
            self.results = self.numbering.follow(body, self.given, at, self.inside)
        else:
            self.numbering.follow(body, [self.numbering.new() for _ in body.invars], at, at)
        return [None] * len(body.outvars)

    def leave(self, jaxpr: Any, reason: str) -> None:
        """Nothing inside is evaluated as a site."""
