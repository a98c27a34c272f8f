"""Follows intervals through a jaxpr: its equations, the functions they call, branches, loops."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import compat
from ..calibrators.calibrator import Affine
from ..compat import Eqn
from ..tensor.qtensor import QTensor
from ..tensor.views import refine
from ..transforms.interpret import view
from ..transforms.plan import Plan
from ..transforms.views import Address
from ..transforms.walk import CALLS, Domain, Where, bodies, passed_on, walk
from .accumulators import at_site, of_output
from .intervals import (
    RULES,
    Bounds,
    Interval,
    any_of,
    anything,
    hull,
    is_integer,
    limits,
    of_value,
    rounded,
    summed,
)

_JQX = str(pathlib.Path(__file__).parents[1])
"""Folder of the code of jqx, which splits numbers into bytes and wraps around on purpose."""


@dataclasses.dataclass(frozen=True)
class Overflow:
    """An integer result that its dtype may not be able to hold.

    Attributes:
      primitive: the primitive that computes it.
      line: the source line that it was traced from.
      dtype: dtype of the result.
      low: the minimum of the result in exact arithmetic; minus infinity if an unbounded float
        becomes an integer.
      high: the maximum.
    """

    primitive: str
    line: str
    dtype: str
    low: int | float
    high: int | float


@dataclasses.dataclass
class Notes:
    """Collects findings; an equation that is followed several times has the union of its intervals.

    Attributes:
      overflows: overflows by equation.
      unknown: a source line for each primitive without a rule.
      sites: findings for each site that is reached, by address.
    """

    overflows: dict[int, Overflow] = dataclasses.field(default_factory=dict)
    unknown: dict[str, str] = dataclasses.field(default_factory=dict)
    sites: dict[tuple[int, ...], Any] = dataclasses.field(default_factory=dict)

    def overflow(self, eqn: Eqn, line: str, low: Any, high: Any) -> None:
        """Records that a result leaves the range of its dtype, except in the code of jqx itself."""
        if line.startswith(_JQX):
            return
        old = self.overflows.get(id(eqn))
        if old is not None:
            low, high = min(old.low, low), max(old.high, high)
        dtype = eqn.outvars[0].aval.dtype.name
        self.overflows[id(eqn)] = Overflow(eqn.primitive.name, line, dtype, low, high)


@dataclasses.dataclass(frozen=True)
class Follower(Domain[Interval]):
    """Follows intervals through the equations of a planned function.

    Attributes:
      plan: the plan with the sites.
      affines: static scales, by key.
      notes: collects the findings.
      axes: sizes of the mesh axes of the enclosing `shard_map`s.
      line: source line of the enclosing call, for equations without one.
    """

    plan: Plan
    affines: Mapping[str, Affine]
    notes: Notes
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    line: str = ""

    def run(
        self,
        jaxpr: Any,
        args: Sequence[Interval],
        address: Address = (),
        consts: Sequence[Any] = (),
    ) -> list[Interval]:
        """Returns the intervals of the results of a jaxpr."""
        return walk(self, jaxpr, args, Where(address, True), consts)

    def literal(self, atom: Any) -> Interval:
        return literal(atom)

    def constant(self, array: Any) -> Interval:
        return of_value(array)

    def enters(self, eqn: Eqn, values: list[Interval], where: Where) -> bool:
        return False  # loops have rules of their own

    def evaluate(self, eqn: Eqn, values: list[Interval], where: Where) -> list[Interval]:
        name = eqn.primitive.name
        site = self.plan.site_at(where.address) if where.is_marked else None
        if site is not None:
            values = at_site(site, eqn, values, self.affines, self.notes.sites)
            (result,) = self._ruled(eqn, values)
            return [of_output(site, result, self.affines, eqn.outvars[0].aval)]
        if name in _FORMS:
            inside = dataclasses.replace(self, line=self._line(eqn))
            return _FORMS[name](inside, eqn, values, where.address)
        if any(x.codes is not None for x in values):
            views = _view(eqn, values)
            if views is not None:
                return views
        index = self._from_the_end(values) if name == "select_n" else None
        if index is not None:
            return [index]
        results = self._plain(eqn, values)
        if name in ("lt", "add") and is_integer(eqn.invars[0].aval.dtype):
            x, n = values
            if n.low == n.high >= 0:
                results = [dataclasses.replace(results[0], origin=(name, x, n.low, eqn))]
        return results

    def _from_the_end(self, xs: Sequence[Interval]) -> Interval | None:
        """Returns `where(i < 0, i + n, i)`, JAX's index normalization: the sum is used only if `i`
        is negative, and does not overflow then.
        """
        match [x.origin for x in xs]:
            case [("lt", x, 0, _), _, ("add", y, n, added)] if x is y is xs[1] and not x.is_known:
                self.notes.overflows.pop(id(added), None)
                parts = [Interval(x.low + n, min(x.high, -1) + n)] if x.low < 0 else []
                parts += [Interval(max(x.low, 0), x.high)] if x.high >= 0 else []
                return hull(parts)
        return None

    def _plain(self, eqn: Eqn, xs: list[Interval]) -> list[Interval]:
        """Applies the rule of a primitive; if all operands are known, also computes it."""
        name = eqn.primitive.name
        computable = all(x.is_known for x in xs) and not eqn.effects
        if (
            computable
            and name != "broadcast_in_dim"
            and not any(True for _ in compat.sub_jaxprs(eqn))
        ):
            if name in RULES and is_integer(eqn.outvars[0].aval.dtype):
                self._ruled(eqn, xs)  # records overflows
            return [of_value(x) for x in _computed(eqn, xs)]
        if name not in RULES:
            self.notes.unknown.setdefault(name, self._line(eqn))
            return any_of(eqn)
        return self._ruled(eqn, xs)

    def _ruled(self, eqn: Eqn, xs: list[Interval]) -> list[Interval]:
        result = RULES[eqn.primitive.name](eqn, xs)
        results = result if isinstance(result, list) else [result]
        return [self._checked(eqn, x, v.aval) for x, v in zip(results, eqn.outvars, strict=True)]

    def _line(self, eqn: Eqn) -> str:
        return compat.line_of(eqn) or self.line

    def _checked(self, eqn: Eqn, result: Bounds | Interval, aval: Any) -> Interval:
        """Rounds bounds, or records that an integer dtype cannot hold them."""
        if not is_integer(aval.dtype):
            return result if isinstance(result, Interval) else rounded(result, aval.dtype)
        low, high = limits(aval.dtype)
        if low <= result.low and result.high <= high:
            return result if isinstance(result, Interval) else Interval(result.low, result.high)
        self.notes.overflow(eqn, self._line(eqn), result.low, result.high)
        return Interval(low, high)

    def aside(self) -> "Follower":
        """Returns a follower that records nothing, for trial steps."""
        return dataclasses.replace(self, notes=Notes())


def _computed(eqn: Eqn, xs: Sequence[Interval]) -> list[Any]:
    with compat.equation_context(eqn):
        return compat.bind(eqn, [_array(x, v) for x, v in zip(xs, eqn.invars, strict=True)])


def _array(x: Interval, atom: Any) -> Any:
    if x.value is not None:
        return x.value
    return jnp.full(atom.aval.shape, x.low, atom.aval.dtype)


def _view(eqn: Eqn, xs: Sequence[Interval]) -> list[Interval] | None:
    """Evaluates a view of quantized weights; `None` if the equation is not a view."""
    if not all(x.is_known for x in xs):
        return None
    operands = [
        _array(x, v) if x.codes is None else x.codes for x, v in zip(xs, eqn.invars, strict=True)
    ]
    views = view(eqn, operands)
    if views is None:
        return None
    return [
        dataclasses.replace(of_value(real), codes=q if isinstance(q, QTensor) else None)
        for q, real in zip(views, _computed(eqn, xs), strict=True)
    ]


def _call(self: Follower, eqn: Eqn, xs: list[Interval], address: Address) -> list[Interval]:
    return self.run(bodies(eqn)[0].jaxpr, xs, address)


def _cond(self: Follower, eqn: Eqn, xs: list[Interval], address: Address) -> list[Interval]:
    """Follows the branches that may be taken."""
    index, *operands = xs
    branches = eqn.params["branches"]
    largest = len(branches) - 1
    start, end = (min(max(i, 0), largest) for i in (index.low, index.high))
    taken = [self.run(branches[i], operands, (*address, i)) for i in range(start, end + 1)]
    return [hull(parts) for parts in zip(*taken, strict=True)]


def _shard_map(self: Follower, eqn: Eqn, xs: list[Interval], address: Address) -> list[Interval]:
    """Follows the function on a device, which gets a part of what is split."""
    sizes = dict(eqn.params["mesh"].shape)
    parts = [
        x if not any(spec) else x.hull_only()
        for x, spec in zip(xs, eqn.params["in_specs"], strict=True)
    ]
    inside = dataclasses.replace(self, axes={**self.axes, **sizes})
    return [x.hull_only() for x in inside.run(eqn.params["jaxpr"], parts, address)]


def _psum(self: Follower, eqn: Eqn, xs: list[Interval], address: Address) -> list[Interval]:
    axes = [axis for axis in eqn.params["axes"] if axis in self.axes]
    count = math.prod(self.axes[axis] for axis in axes)
    return [
        self._checked(eqn, summed(x.hull_only(), count), v.aval)
        for x, v in zip(xs, eqn.outvars, strict=True)
    ]


# Loops
#
# A loop is run step by step if it is short or its end is known. Otherwise its carried values are
# widened until no step changes them (P. Cousot, R. Cousot, "Abstract interpretation", POPL 1977),
# and narrowed by the condition of a `while` and by the length of a `scan` that adds to them.

STEPS = 128
"""Maximum number of steps of a loop that are followed one by one."""

_NOWHERE = -3
"""A part of an address that no site has."""

_TRIES = 3
"""Number of steps after which values that still grow are widened."""

Step = Callable[..., list[Interval]]
"""One step of a loop: from the follower and the carried values to the next ones and others."""


def literal(atom: Any) -> Interval:
    """Returns the interval of a literal in an equation."""
    return of_value(np.asarray(atom.val, atom.aval.dtype))


def makers(body: Any) -> Callable[[Any], Eqn | None]:
    """Returns a function from a value inside an open jaxpr to the equation that computes it."""
    producers = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    return lambda atom: None if compat.is_literal(atom) else producers.get(atom)


def scan(self: Follower, eqn: Eqn, xs: list[Interval], address: Address) -> list[Interval]:
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    num_consts, count = compat.scan_counts(eqn)
    consts, state, stacks = (
        xs[:num_consts],
        xs[num_consts : num_consts + count],
        xs[num_consts + count :],
    )
    if length == 0:
        return [*state, *(anything(v.aval) for v in eqn.outvars[count:])]
    if length > STEPS:
        parts = [x.hull_only() for x in stacks]

        def step(who: Follower, state: list[Interval], body: Any = body) -> list[Interval]:
            return who.run(body, [*consts, *state, *parts], address)

        start, fixed = state, _fixed(eqn)
        state = _invariant(self, step, start, fixed, body)
        state = _counted(self, step, start, state, body, num_consts, length)
        results = step(self, state)
        ends = [x if i in fixed else results[i] for i, x in enumerate(state)]
        return [*ends, *(x.hull_only() for x in results[count:])]
    steps = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
    stacked: list[list[Interval]] = []
    for i in steps:
        results = self.run(body, [*consts, *state, *(_slice(x, i) for x in stacks)], address)
        previous, state = state, results[:count]
        stacked.append([x.hull_only() for x in results[count:]])
        pairs = zip(previous, state, strict=True)
        if not any(x.is_known for x in stacks) and all(a.holds(b) for a, b in pairs):
            break  # all later steps do the same
    return [*state, *(hull(parts) for parts in zip(*stacked, strict=True))]


def _fixed(eqn: Eqn) -> list[int]:
    """Returns which carried values a loop passes on unchanged."""
    return [i for i, same in enumerate(passed_on(eqn)) if same]


def _slice(x: Interval, i: int) -> Interval:
    """Returns the slice for one step of an array that a scan steps over."""
    if x.value is None:
        return x.hull_only()
    q = x.codes
    if q is not None:
        q = (q if q.scale.shape[0] == q.shape[0] else refine(q, 0))[i]
    return dataclasses.replace(of_value(x.value[i]), codes=q)


def _invariant(
    self: Follower, step: Step, start: list[Interval], fixed: Sequence[int], body: Any
) -> list[Interval]:
    """Returns intervals of the carried values that hold before every step."""
    body, _ = compat.open_jaxpr(body)
    state = [x if i in fixed else x.hull_only() for i, x in enumerate(start)]
    tries = 0
    while True:
        results = [x.hull_only() for x in step(self.aside(), state)[: len(state)]]
        changed = [
            i
            for i, (a, b) in enumerate(zip(state, results, strict=True))
            if i not in fixed and not a.holds(b)
        ]
        if not changed:
            return state
        tries += 1
        for i in changed:
            old, new = state[i], hull([state[i], results[i]])
            if tries > _TRIES:
                low, high = limits(body.outvars[i].aval.dtype)
                new = Interval(
                    low if new.low < old.low else new.low,
                    high if new.high > old.high else new.high,
                )
            state[i] = new


def _counted(
    self: Follower,
    step: Step,
    start: list[Interval],
    state: list[Interval],
    body: Any,
    num_consts: int,
    length: int,
) -> list[Interval]:
    """Narrows carried integers that each step increments: `length - 1` times before the last."""
    closed, (body, _) = body, compat.open_jaxpr(body)
    producer = makers(body)
    increments = {}
    for i in range(len(state)):
        carried, eqn = body.invars[num_consts + i], producer(body.outvars[i])
        if eqn is not None and eqn.primitive.name == "add" and is_integer(carried.aval.dtype):
            others = [atom for atom in eqn.invars if atom is not carried]
            if len(others) == 1:
                increments[i] = others[0]
    with_addends = body.replace(outvars=[*body.outvars, *increments.values()])
    with_addends = compat.with_body(closed, with_addends)
    addends = step(self.aside(), state, with_addends)[len(body.outvars) :]
    state = list(state)
    for i, addend in zip(increments, addends, strict=True):
        total, old = summed(addend.hull_only(), length - 1), state[i]
        low, high = start[i].low + min(total.low, 0), start[i].high + max(total.high, 0)
        state[i] = Interval(max(low, old.low), min(high, old.high))
    return state


def while_loop(self: Follower, eqn: Eqn, xs: list[Interval], address: Address) -> list[Interval]:
    p = eqn.params
    num_consts, inside = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    cond_consts, consts, state = xs[:num_consts], xs[num_consts:inside], xs[inside:]

    def goes_on(state: list[Interval]) -> Interval:
        return self.run(p["cond_jaxpr"], [*cond_consts, *state], (*address, _NOWHERE))[0]

    def step(who: Follower, state: list[Interval]) -> list[Interval]:
        narrowed = _where_true(p["cond_jaxpr"], [*cond_consts, *state])[num_consts:]
        return who.run(p["body_jaxpr"], [*consts, *narrowed], address)

    for _ in range(STEPS):
        decided = goes_on(state)
        if decided.high == 0:
            return state
        if decided.low == 0:
            break
        state = step(self, state)
    start, fixed = state, _fixed(eqn)
    state = _invariant(self, step, start, fixed, p["body_jaxpr"])
    tighter = [hull([a, b]) for a, b in zip(start, step(self.aside(), state), strict=True)]
    state = [x if i in fixed else tighter[i].hull_only() for i, x in enumerate(state)]
    goes_on(state)
    results = step(self, state)
    return [x if i in fixed else hull([start[i], results[i]]) for i, x in enumerate(state)]


def _where_true(condition: Any, args: list[Interval]) -> list[Interval]:
    """Narrows the operands of a condition under the assumption that it holds. It consists of
    comparisons of integers joined by `and`.
    """
    body, _ = compat.open_jaxpr(condition)
    producer = makers(body)
    env = dict(zip(body.invars, args, strict=True))

    def source(atom: Any) -> Any:
        """Looks through conversions that do not change values, such as those of weak types."""
        eqn = producer(atom)
        if eqn is None or eqn.primitive.name != "convert_element_type":
            return atom
        same = eqn.invars[0].aval.dtype == atom.aval.dtype
        return source(eqn.invars[0]) if same else atom

    def narrow(atom: Any, low: Any, high: Any) -> None:
        x = env.get(atom) if not compat.is_literal(atom) else None
        if x is not None and not x.is_known and x.low <= high and low <= x.high:
            env[atom] = Interval(max(x.low, low), min(x.high, high))

    def visit(atom: Any) -> None:
        eqn = producer(source(atom))
        if eqn is None:
            return
        name, operands = eqn.primitive.name, [source(atom) for atom in eqn.invars]
        if name == "and" and operands[0].aval.dtype == bool:
            for operand in operands:
                visit(operand)
        if name not in ("lt", "le", "gt", "ge") or not is_integer(operands[0].aval.dtype):
            return
        a, b = operands if name[0] == "l" else operands[::-1]
        left, right = (literal(x) if compat.is_literal(x) else env.get(x) for x in (a, b))
        if left is not None and right is not None:
            narrow(a, -math.inf, right.high - (name[1] == "t"))
            narrow(b, left.low + (name[1] == "t"), math.inf)

    visit(body.outvars[0])
    return [env[v] for v in body.invars]


_FORMS: dict[str, Callable[..., list[Interval]]] = {
    **dict.fromkeys(CALLS, _call),
    "cond": _cond,
    "scan": scan,
    "while": while_loop,
    "shard_map": _shard_map,
    **dict.fromkeys(("psum", "psum_invariant"), _psum),
}
