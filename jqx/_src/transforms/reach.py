"""Where the codes of parameters go, which parameters no contraction multiplies by, and the reasons
why no weight reaches a contraction.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .. import compat
from ..compat import Eqn
from ..errors import fail
from .find import Found
from .higher_order import FORMS
from .known_values import KnownValues, Value
from .plan import Plan, Unreached
from .rules import CONTRACTIONS, VIEWS
from .trace import Call, is_quantized
from .views import UPDATES, Origin

# Where the codes of weights go outside of contractions, as `convert` carries them: through views,
# updates, loops and branches. Elsewhere they have no quantized form.


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

    def follow(self, jaxpr: Any, inputs: Sequence[Paths], scope: str = "") -> list[Paths]:
        """Returns the codes in the results of a jaxpr, given those in its operands."""
        body, _ = compat.open_jaxpr(jaxpr)
        env: dict[Any, Paths] = dict(zip(body.invars, inputs, strict=True))

        def read(atom: Any) -> Paths:
            return _NONE if compat.is_literal(atom) else env.get(atom, _NONE)

        for eqn in body.eqns:
            operands = [read(atom) for atom in eqn.invars]
            if any(operands):
                inside = "/".join(part for part in (scope, compat.scope_of(eqn)) if part)
                env.update(zip(eqn.outvars, self._results(eqn, operands, inside), strict=True))
        return [read(atom) for atom in body.outvars]

    def _results(self, eqn: Eqn, operands: list[Paths], scope: str) -> list[Paths]:
        name, nothing = eqn.primitive.name, [_NONE] * len(eqn.outvars)
        how = f"reaches `{name}`, which has no quantized form"
        if name in CONTRACTIONS:
            unsupported = CONTRACTIONS[name].why_unsupported(eqn)
            if unsupported is None:
                self.contracted |= _NONE.union(*operands)
                return nothing
            if name in UPDATES and operands[0]:
                return self._indexed(eqn, operands, scope)
            how = f"reaches a `{name}` that has no quantized form: {unsupported}"
        elif name in FORMS:
            return self._inside(eqn, operands, scope)
        elif (viewed := _views(eqn, operands)) is not None:
            if len(set(filter(None, operands))) > 1 and len(viewed) == 1:
                self._mixes(eqn, operands, "is joined with others of another format", scope)
            return viewed
        elif name in UPDATES and (name == "select_n") != bool(operands[0]):
            if name == "scatter":
                return self._indexed(eqn, operands, scope)
            if sum(map(bool, operands)) > 1:
                self._mixes(eqn, operands, "is selected among others", scope)
            return [_NONE.union(*operands)]
        self.escapes.append(Escape(_NONE.union(*operands), how, eqn, scope))
        return nothing

    def _indexed(self, eqn: Eqn, operands: list[Paths], scope: str) -> list[Paths]:
        """Values that are read or written at any places stay codes if the scale can follow."""
        how = f"reaches a `{eqn.primitive.name}` that its scale cannot follow"
        self._mixes(eqn, operands[:1], how, scope)
        return operands[:1]

    def _inside(self, eqn: Eqn, operands: list[Paths], scope: str) -> list[Paths]:
        name, p = eqn.primitive.name, eqn.params
        if name == "scan":
            consts, count = compat.scan_counts(eqn)
            return self._loop(eqn, p["jaxpr"], operands, consts, count, scope)
        if name == "while":
            cond_count, count = p["cond_nconsts"], len(eqn.outvars)
            self.follow(
                p["cond_jaxpr"], [*operands[:cond_count], *operands[len(operands) - count :]], scope
            )
            return self._loop(
                eqn, p["body_jaxpr"], operands[cond_count:], p["body_nconsts"], count, scope
            )
        inputs = operands[1:] if name == "cond" else operands
        results_of_bodies = [self.follow(body, inputs, scope) for body in compat.sub_jaxprs(eqn)]
        results = [_NONE.union(*results) for results in zip(*results_of_bodies, strict=True)]
        if name in ("cond", "shard_map"):
            self._mixes(eqn, results, f"is returned by `{name}` in its own format", scope)
        return results

    def _mixes(self, eqn: Eqn, codes: Sequence[Paths], how: str, scope: str) -> None:
        if any(codes):
            self.mixed.append(Escape(_NONE.union(*codes), how, eqn, scope))

    def _loop(
        self, eqn: Eqn, body: Any, operands: list[Paths], consts: int, count: int, scope: str
    ) -> list[Paths]:
        """A carried value keeps the format that it has before the first step."""
        carried_codes = operands[consts : consts + count]
        results = self.follow(body, operands, scope)
        widened = [x for x, init in zip(results, carried_codes, strict=False) if x and not init]
        if widened:
            how = f"is carried by `{eqn.primitive.name}` in place of an array"
            self.escapes.append(Escape(_NONE.union(*widened), how, eqn, scope))
        inner, _ = compat.open_jaxpr(body)
        carried = zip(inner.outvars, inner.invars[consts:], results, carried_codes, strict=False)
        changed = [x for out, value, x, init in carried if init and out is not value]
        how = f"is carried by `{eqn.primitive.name}`, which changes its format"
        self._mixes(eqn, changed, how, scope)
        return [*carried_codes, *results[count:]]


def _views(eqn: Eqn, operands: Sequence[Paths]) -> list[Paths] | None:
    """Returns the codes in the results of a view; `None` if the equation is not a view."""
    view = VIEWS.get(eqn.primitive.name)
    if view is None:
        return None
    origins = [
        Origin.of_leaf("", atom.aval.ndim) if paths else None
        for atom, paths in zip(eqn.invars, operands, strict=True)
    ]
    viewed = [x if x and x.is_view else None for x in view.track(eqn, origins)]
    if not any(viewed):
        return None
    if len(viewed) == len(operands):  # as many results as operands: each is a view of its operand
        return [paths if origin else _NONE for origin, paths in zip(viewed, operands, strict=True)]
    joint = _NONE.union(*operands)
    return [joint if origin else _NONE for origin in viewed]


def check_unsupported(function: str, unsupported: Any) -> None:
    """Checks the value of `unsupported`."""
    if unsupported not in ("error", "dequantize"):
        problem = f"`unsupported` is unknown: {unsupported!r}."
        raise fail(function, problem, fix="leave it at 'error', or pass 'dequantize'.")


def unreached(call: Call, found: Sequence[Found]) -> tuple[Unreached, ...]:
    """Returns the float parameters with two or more axes that no contraction multiplies by."""
    reached = {
        part.path for item in found for origin in item.origins if origin for part in origin.parts
    }
    used_otherwise = {
        path: tuple(leaf.shape)
        for path, leaf in zip(call.paths, call.leaves, strict=True)
        if path is not None and path not in reached
        if len(leaf.shape) > 1 and jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    if not used_otherwise:
        return ()
    codes, returned = followed(call, set(used_otherwise))
    reason_of = dict.fromkeys(returned, "f returns it")
    reason_of |= dict.fromkeys(
        codes.contracted, "only the result of a loop or branch on it is multiplied"
    )
    only = "uses it, and only operands of contractions are quantized"
    for escape in reversed(codes.escapes):
        reason_of |= dict.fromkeys(escape.paths, f"`{compat.shown_name(escape.eqn)}` {only}")
    unused = "f does not use it"
    return tuple(
        Unreached(path, reason_of.get(path, unused), shape)
        for path, shape in used_otherwise.items()
    )


def followed(call: Call, paths: set[str]) -> tuple[Codes, set[str]]:
    """Follows the codes of some weights; returns what was found, and which of them `f` returns."""
    codes = Codes()
    inputs = [frozenset({path} & paths) if path is not None else frozenset() for path in call.paths]
    results = codes.follow(call.jaxpr, inputs)
    return codes, set().union(*results)


def reaching(call: Call, plan: Plan, eqn: Any) -> list[tuple[str | None, str]]:
    """Returns the quantized leaves whose codes an equation cannot take: the path of each, `None` if
    it is no parameter, and its name in an error.
    """
    named = dict(enumerate(zip(call.paths, call.leaves, strict=True)))
    inputs = [
        frozenset({str(i)} if is_quantized(leaf) or plan.weight_at(path) is not None else ())
        for i, (path, leaf) in named.items()
    ]
    codes = Codes()
    codes.follow(call.jaxpr, inputs)
    path_sets = [x.paths for x in (*codes.escapes, *codes.mixed) if x.eqn is eqn]
    numbers = sorted(map(int, frozenset().union(*path_sets)))
    return [(named[i][0], _name(call, i)) for i in numbers]


def _name(call: Call, i: int) -> str:
    path = call.paths[i]
    if path is not None:
        return repr(path)
    kind, argument, *_ = call.keys[i]
    return f"argument {argument.idx}" if kind.idx == 0 else f"argument {argument.key!r}"


# What a plan says of operands that `jqx.hoist` can split off.


OUTSIDE = ": compute it outside of f"
"""The end of a reason that an offer replaces."""


def offers(call: Call) -> dict[int, tuple[str, str]]:
    """Returns what can be done about operands that depend on parameters alone, by the `id` of the
    contraction: the names of the parameters, and the end of the reason.
    """
    values = known_values(call)
    inner = "parameters", ": jqx.hoist computes it outside of f"
    offered: dict[int, tuple[str, str]] = dict.fromkeys(values.inner, inner)
    for eqn_id, operand in values.operands.items():
        paths = [call.paths[parent] for parent in sorted(operand.value.parents)]
        names = named([path for path in paths if path is not None])
        offered[eqn_id] = names, _offer(values, operand.value, operand.aval)
    return offered


def known_values(call: Call) -> KnownValues:
    """Returns what depends on the parameters of a call alone."""
    numbered = zip(call.paths, call.keys, strict=True)
    argnums = {keys[1].idx for path, keys in numbered if path is not None}
    are_known = [
        path is not None
        or (keys[0].idx == 0 and keys[1].idx in argnums and tuple(leaf.shape) == ())
        for path, keys, leaf in zip(call.paths, call.keys, call.leaves, strict=True)
    ]
    return KnownValues(call.jaxpr, are_known, "all")


def _offer(values: KnownValues, value: Value, aval: Any) -> str:
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        return f", and it is {aval.dtype.name}, not a float"
    size, size_before = values.size_of(value, aval), values.size_before(value)
    if size <= size_before:
        return ": use jqx.hoist, or ptq(hoist=True)"
    return (
        f": with {size:,} elements it is larger than their {size_before:,}, so use jqx.hoist, or "
        "ptq(hoist='all')"
    )


def named(paths: list[str]) -> str:
    """Returns paths of parameters as text; of many, the first three."""
    names = " and ".join(map(repr, paths[:3]))
    return names + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


# Reasons why no weight reaches a contraction: what its operands are computed from.


NO_WEIGHT = "no weight reaches it through views, and no rule without a weight spec matches"


_DRAWS = ("random_", "rng_", "prng_", "threefry")
"""Prefixes of the names of primitives that make random numbers and keys; they return no weight."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The inputs that a value is computed from.

    Attributes:
      weights: the paths of weights.
      closure: whether it depends on arrays that the function closes over.
      inputs: whether it depends on other arguments.
      drawn: whether it depends on random numbers.
      through: the first operation on a weight that is not a view.
    """

    weights: frozenset[str] = frozenset()
    closure: bool = False
    inputs: bool = False
    drawn: bool = False
    through: str | None = None

    def __or__(self, also: "Source") -> "Source":
        return Source(
            self.weights | also.weights,
            self.closure or also.closure,
            self.inputs or also.inputs,
            self.drawn or also.drawn,
            self.through or also.through,
        )

    @property
    def is_closed_over(self) -> bool:
        """Whether it is computed only from arrays that the function closes over."""
        return self.closure and not (self.weights or self.inputs or self.drawn)

    @property
    def reason(self) -> str | None:
        """Why it is not a weight; `None` if it depends on other arguments, as activations do."""
        if self.inputs:
            return None
        if self.weights:
            operation = (
                f"`{self.through}`, which is not a view" if self.through else "more than views"
            )
            return (
                f"an operand is computed from {named(sorted(self.weights))} by {operation}{OUTSIDE}"
            )
        if self.closure:
            return "an operand is closed over by f: pass weights in an argument that params= names"
        return "an operand is drawn at random in f" if self.drawn else None


_NOTHING = Source()
_CLOSURE = Source(closure=True)


def reasons(call: Call) -> dict[int, str]:
    """Returns the reasons for the operands of contractions, by the `id` of the equation."""
    sources_of = sources(call)
    reasons_of = {
        eqn_id: [source.reason for source in sources_of_eqn]
        for eqn_id, sources_of_eqn in sources_of.items()
    }
    reason_of = {
        eqn_id: next(filter(None, reason)) for eqn_id, reason in reasons_of.items() if any(reason)
    }
    if any(source.weights for sources_of_eqn in sources_of.values() for source in sources_of_eqn):
        for eqn_id, (names, offer) in offers(call).items():
            reason = reason_of.get(eqn_id, f"an operand is computed from {names}")
            reason_of[eqn_id] = reason.removesuffix(OUTSIDE) + offer
    return reason_of


def sources(call: Call) -> dict[int, list[Source]]:
    """Returns what the operands of contractions are computed from, by the `id` of the equation.

    The sources of a function that is called twice are those of all its calls together.
    """
    sources_of: dict[int, list[Source]] = {}
    inputs = [
        Source(inputs=True) if path is None else Source(frozenset({path})) for path in call.paths
    ]
    _follow(call.jaxpr, inputs, sources_of)
    return sources_of


def _follow(
    jaxpr: Any, inputs: Sequence[Source], sources_of: dict[int, list[Source]]
) -> list[Source]:
    """Follows sources through a jaxpr; returns the sources of its results."""
    body, _ = compat.open_jaxpr(jaxpr)
    env = dict.fromkeys(body.constvars, _CLOSURE)
    env.update(zip(body.invars, inputs, strict=True))

    def read(atom: Any) -> Source:
        return _NOTHING if compat.is_literal(atom) else env[atom]

    for eqn in body.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in CONTRACTIONS:
            previous = sources_of.get(id(eqn), [_NOTHING] * len(operands))
            sources_of[id(eqn)] = [a | b for a, b in zip(previous, operands, strict=True)]
        env.update(zip(eqn.outvars, _results(eqn, operands, sources_of), strict=True))
    return [read(atom) for atom in body.outvars]


def _results(eqn: Eqn, operands: list[Source], sources_of: dict[int, list[Source]]) -> list[Source]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    joint = _NOTHING
    for source in operands:
        joint |= source
    if name in ("scan", "while"):
        return _loop(eqn, operands, sources_of)
    if name == "cond":
        results_of_branches = [
            _follow(body, operands[1:], sources_of) for body in eqn.params["branches"]
        ]
        return [
            functools.reduce(operator.or_, results, operands[0])
            for results in zip(*results_of_branches, strict=True)
        ]
    bodies = list(compat.sub_jaxprs(eqn))
    if name.startswith(_DRAWS):
        return [Source(inputs=joint.inputs, drawn=True)] * count
    if not bodies:
        if joint.weights and not joint.through and name not in VIEWS:
            joint = dataclasses.replace(joint, through=name)
        return [joint] * count
    # The operands of a body of a form are the last ones of its equation.
    is_form = name in FORMS
    for body in bodies:
        n = len(body.invars)
        results = _follow(
            body, operands[len(operands) - n :] if is_form else [joint] * n, sources_of
        )
        if is_form:
            return results
    if joint.weights and not joint.through:
        joint = dataclasses.replace(joint, through=name)
    return [joint] * count


def _loop(eqn: Eqn, operands: list[Source], sources_of: dict[int, list[Source]]) -> list[Source]:
    """Follows sources through a loop until those of the carried values stay the same."""
    if eqn.primitive.name == "scan":
        consts, count = compat.scan_counts(eqn)
        body, shared = eqn.params["jaxpr"], operands[:consts]
        carried, stacked = operands[consts : consts + count], operands[consts + count :]
        asked = 0
    else:
        asked, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        body, shared = eqn.params["body_jaxpr"], operands[asked : asked + consts]
        carried, stacked = operands[asked + consts :], []
    while True:
        results = _follow(body, [*shared, *carried, *stacked], sources_of)
        joined = [a | b for a, b in zip(carried, results, strict=False)]
        if joined == carried:
            break
        carried = joined
    if eqn.primitive.name == "while":
        _follow(eqn.params["cond_jaxpr"], [*operands[:asked], *carried], sources_of)
    return [*carried, *results[len(carried) :]]
