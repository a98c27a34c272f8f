"""Computes the values that are split off a function, and evaluates the rest of the function."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

from .. import _compat
from .._compat import Eqn
from .._errors import fail
from ._evaluate import evaluate
from ._find import HIDDEN
from ._known_values import CUSTOM, INLINE, KnownValues
from ._live import live, read_by
from ._origin import Address
from .primitives import FORMS, Records, unchanged

Names = Mapping[int, str]
"""The names of the values that are split off, by their numbers."""

Arrays = dict[str, Any]
"""Values that are split off, by name."""


def computed(
    known: KnownValues, names: Names, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]
) -> Arrays:
    """Returns the values that are split off; `None` stands for operands that are no parameters."""
    return _compute(known, names, jaxpr, consts, args, ())[1]


def _compute(
    known: KnownValues,
    names: Names,
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    address: Address,
) -> tuple[list[Any], Arrays]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    found: Arrays = {}

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    for i, eqn in enumerate(jaxpr.eqns):
        operands = [read(atom) for atom in eqn.invars]
        name, here = eqn.primitive.name, (*address, i)
        with _compat.equation_context(eqn):
            if name in INLINE and _compat.name_of_jit(eqn) != HIDDEN:
                body, inner = _compat.open_jaxpr(eqn.params[INLINE[name]])
                results, more = _compute(known, names, body, inner, operands, here)
            elif all(known.knows(address, var) for var in eqn.outvars) and not any(
                x is None for x in operands
            ):
                results, more = _compat.bind(eqn, operands), {}
            else:
                results, more = _inside(known, names, eqn, operands, here)
        found |= more
        for j, (var, x) in enumerate(zip(eqn.outvars, results, strict=True)):
            env[var] = x
            own = known.at.get((address, i, j))
            if own is not None and x is not None:
                found[names[own.value.number]] = x
    return [read(atom) for atom in jaxpr.outvars], found


def _inside(
    known: KnownValues, names: Names, eqn: Eqn, operands: Sequence[Any], here: Address
) -> tuple[list[Any], Arrays]:
    """Computes what is split off the functions inside an equation."""
    name, results = eqn.primitive.name, [None] * len(eqn.outvars)
    at = [own for own in known.at if own[0][: len(here)] == here]

    def run(jaxpr: Any, args: Sequence[Any], place: Address) -> Arrays:
        body, consts = _compat.open_jaxpr(jaxpr)
        return _compute(known, names, body, consts, args, place)[1]

    if name == "while":
        first = eqn.params["cond_nconsts"]
        start = first + eqn.params["body_nconsts"]
        same = unchanged(eqn.params["body_jaxpr"], start - first, len(results))
        results = [operands[start + i] if i in same else None for i in range(len(results))]
        if not at:
            return results, {}
        found = run(eqn.params["cond_jaxpr"], [*operands[:first], *results], (*here, -1))
        return results, found | run(
            eqn.params["body_jaxpr"], [*operands[first:start], *results], here
        )
    if name == "scan":
        consts, count = _compat.scan_counts(eqn)
        same = unchanged(eqn.params["jaxpr"], consts, count)
        state = [operands[consts + i] if i in same else None for i in range(count)]
        results[:count] = state
        if not at:
            return results, {}
        body, xs = eqn.params["jaxpr"], operands[consts + count :]
        fixed, stepped = [*operands[:consts], *state], _stepped(known, names, here)
        found = run(body, [*fixed, *([None] * len(xs))], here)
        places = known.steps(eqn, here)
        slices = {i: x for i, x in enumerate(xs) if places[i] and x is not None}
        if stepped and slices:

            def step(own: dict[int, Any]) -> Arrays:
                each = run(body, [*fixed, *(own.get(i) for i in range(len(xs)))], here)
                return {name: each[name] for name in stepped if name in each}

            found |= lax.map(step, slices)
        return results, found
    if not at:
        return results, {}
    if name == "cond":
        found: Arrays = {}
        for i, branch in enumerate(eqn.params["branches"]):
            found |= run(branch, operands[1:], (*here, i))
        return results, found
    assert name in CUSTOM, name
    return results, run(eqn.params[CUSTOM[name]], operands, here)


def _stepped(known: KnownValues, names: Names, here: Address) -> list[str]:
    """Returns the names of what is split off a scan as a stack of its steps."""
    values = [own.value for own in known.at.values() if here in own.value.loops]
    return sorted({names[value.number] for value in values})


def rest(
    known: KnownValues,
    names: Names,
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    given: Arrays,
    address: Address = (),
) -> list[Any]:
    """Evaluates a function in which some values are given."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    inside = {own[0][: len(address) + 1] for own in known.at if len(own[0]) > len(address)}
    for i, eqn in enumerate(jaxpr.eqns):
        operands = [read(atom) for atom in eqn.invars]
        here = (*address, i)
        with _compat.equation_context(eqn):
            if here not in inside:
                results = _compat.bind(eqn, operands)
            elif eqn.primitive.name in CUSTOM:
                results = _without_rule(known, names, eqn, operands, given, here)
            else:
                runner = _Runner(known, names, eqn, here, given)
                results = FORMS[eqn.primitive.name].apply(eqn, operands, runner)[0]
        env.update(zip(eqn.outvars, results, strict=True))
        for j, var in enumerate(eqn.outvars):
            own = known.at.get((address, i, j))
            if own is not None:
                env[var] = given[names[own.value.number]]
    return [read(atom) for atom in jaxpr.outvars]


def _without_rule(
    known: KnownValues,
    names: Names,
    eqn: Eqn,
    operands: Sequence[Any],
    given: Arrays,
    here: Address,
) -> list[Any]:
    """Evaluates a function with a derivative rule, which cannot be applied, since it reads
    parameters that are split off. Differentiating it is an error.
    """
    body, consts = _compat.open_jaxpr(eqn.params[CUSTOM[eqn.primitive.name]])

    def run(given: Arrays, args: Sequence[Any]) -> list[Any]:
        return rest(known, names, body, consts, args, given, here)

    jaxpr, inner = _compat.trace(run, given, list(operands))
    jaxpr, flat = live(jaxpr), [*jax.tree.leaves(given), *operands]
    read = read_by(jaxpr)
    places = [i for i, var in enumerate(jaxpr.invars) if id(var) in read]

    @jax.custom_jvp
    def value(*own: Any) -> list[Any]:
        some = dict(zip(places, own, strict=True))
        return evaluate(jaxpr, inner, [some.get(i) for i in range(len(flat))])

    @value.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        raise fail(
            "hoist",
            "a function with a derivative rule of its own has no derivative here.",
            given=f"`{eqn.primitive.name}`{_compat.at_line_of(eqn)}, from which "
            "values of parameters are split off",
            expected="values only: the rule needs the parameters",
            fix="differentiate f itself; g is for inference.",
            error=NotImplementedError,
        )

    return value(*(flat[i] for i in places))


@dataclasses.dataclass(frozen=True)
class _Runner:
    """Evaluates the functions inside an equation; what they need is in `given`."""

    known: KnownValues
    names: Names
    eqn: Eqn
    here: Address
    all_given: Arrays
    differentiable: bool = True
    is_counting: bool = False

    @property
    def given(self) -> Arrays:
        own = {
            self.names[x.value.number]
            for at, x in self.known.at.items()
            if at[0][: len(self.here)] == self.here
        }
        return {name: self.all_given[name] for name in sorted(own)}

    def run(
        self, jaxpr: Any, args: Sequence[Any], part: Address = (), given: Any = None
    ) -> tuple[list[Any], Records]:
        body, consts = _compat.open_jaxpr(jaxpr)
        own = self.given if given is None else given
        place = (*self.here, *part)
        return rest(self.known, self.names, body, consts, args, own, place), {}

    def split(self, length: int) -> tuple[Any, Any]:
        stepped = set(_stepped(self.known, self.names, self.here))
        given = self.given
        steps = {name: x for name, x in given.items() if name in stepped}
        return steps, {name: x for name, x in given.items() if name not in stepped}

    def join(self, step: Any, shared: Any) -> Any:
        return step | shared

    def numbered(self, given: Any, step: Any) -> Any:
        return given

    def unseen(self) -> Records:
        return {}

    def merge(self, a: Records, b: Records) -> Records:
        return {}

    def dense(self, x: Any) -> Any:
        return x

    def carried(self, x: Any) -> Any:
        return x

    def common(self, forms: Sequence[Any]) -> Any:
        return forms[0]

    def like(self, x: Any, other: Any) -> Any:
        return x
