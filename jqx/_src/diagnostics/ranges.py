"""`ranges`: bounds of the accumulators of a function, found without running it."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import Plan, Policy, QTensor
from ...calibrators import Affine
from .. import compat
from ..compat import Eqn
from ..errors import fail
from ..table import Table, Tabular, finite
from ..tensor.views import refine
from ..transforms.arguments import check_function
from ..transforms.interpret import view
from ..transforms.make_plan import as_plan, params_of
from ..transforms.quantize_params import quantize_weight
from ..transforms.trace import Call, is_array, is_quantized, trace_call
from ..transforms.views import Address
from ..transforms.walk import CALLS, Body, Domain, Where, passed_on, walk
from .accumulators import Accumulator, at_site, of_output
from .intervals import (
    RULES,
    Bounds,
    Interval,
    any_of,
    anything,
    flushed,
    hull,
    is_integer,
    limits,
    of_value,
    rounded,
    summed,
)

Bound = tuple[float, float]
"""The minimum and the maximum of the elements of an argument."""

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


@dataclasses.dataclass(frozen=True)
class Ranges(Tabular):
    """The result of `ranges`. Prints as a table; `to_dict` and `to_markdown` return data and text.

    Attributes:
      sites: an accumulator for each site, in the order of the plan.
      overflows: integer results of the function itself that their dtype may not be able to hold.
      unknown: a source line for each primitive without a rule: its results may have any value of
        their dtype.
      results: the minimum and the maximum of each array that the function returns.
    """

    sites: tuple[Accumulator, ...]
    overflows: tuple[Overflow, ...]
    unknown: Mapping[str, str]
    results: tuple[tuple[Any, Any], ...]

    def table(self) -> Table:
        """Returns the rows as text."""
        rows = [
            (
                row.label or row.path,
                row.op,
                _ends(row.lhs),
                _ends(row.rhs),
                f"{row.products:,}" if row.products else "-",
                _ends(row.sums),
                str(row.bits or "-"),
                row.dtype or "-",
                "-" if row.used is None else f"{100 * row.used:.3g} %",
                row.how,
            )
            for row in self.sites
        ]
        head = ("path", "op", "lhs codes", "rhs codes", "products", "sums", "bits", "dtype")
        lines = [
            f"may overflow: {x.primitive} in {x.dtype}, {_ends((x.low, x.high))}, at {x.line}"
            for x in self.overflows
        ]
        lines += [f"unknown: {name}, at {line}" for name, line in self.unknown.items()]
        footer = "\n".join(lines) or "no integer of the function leaves its dtype"
        return Table((*head, "share of int32", "summed in"), tuple(rows), footer, texts=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict for `json.dumps`; infinite values are `None`."""
        sites = [
            {**dataclasses.asdict(x), "bits": x.bits, "dtype": x.dtype, "used": x.used}
            for x in self.sites
        ]
        overflows = [dataclasses.asdict(x) for x in self.overflows]
        data = {"sites": sites, "overflows": overflows, "unknown": dict(self.unknown)}
        return finite({**data, "results": self.results})


def _ends(ends: tuple[float, float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:,} to {ends[1]:,}"


def ranges(
    f: Callable[..., Any],
    plan: Plan | Policy,
    affines: Mapping[str, Affine] | None = None,
    *,
    bounds: Mapping[int | str, Any] | None = None,
) -> Callable[..., Ranges]:
    """Returns a function that bounds the accumulators of `f` at each site, and its own integer
    arithmetic. Nothing is run: intervals are followed through its jaxpr.

    Weights are known, channel by channel. Other arguments may have any value of their dtype, or lie
    within `bounds`. The bounds of one contraction are attained by some operands; later bounds may
    be too wide, since intervals do not represent dependencies between values. So a result that is
    reported to fit does fit, but a reported overflow may be impossible: pass `bounds` or `affines`
    to narrow the intervals.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with (its parameters are argument 0 then).
      affines: scales from `jqx.affines`; without them an activation may have any codes with its
        sign.
      bounds: the `(low, high)` of the elements of an argument without weights, keyed by its
        position or name, or a pytree of such pairs that is a prefix of the argument.

    Returns:
      `found(*args, **kwargs) -> Ranges`. Arguments may be `jax.ShapeDtypeStruct`; abstract weights
      may have any codes. Only the shapes of other arguments are used.

    Raises:
      TypeError: if `f` is not a function, `plan` is not a plan, or `bounds` is not a mapping.
      ValueError: if the plan was made for another function, `affines` does not fit it, `bounds`
        does not fit an argument, names none or one of weights, or a weight is traced.

    NaN, infinity: nothing is stated about NaN. A float without bounds has infinite bounds.
    Rounding: bounds of floats are widened by the possible rounding error of the dtype of each
      result. A TPU that multiplies float32 as bfloat16 may exceed them. Sums of codes are exact.
    Integers: only final results count, since partial sums that wrap around do no harm. The
      arithmetic inside jqx, which wraps around on purpose, is not listed.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> from jqx.diagnostics import ranges
      >>> w, x = jnp.eye(64) * 127.0, jax.ShapeDtypeStruct((1, 64), jnp.float32)
      >>> f = lambda w, x: x @ w
      >>> found = ranges(f, jqx.presets.w8a8_dynamic(), bounds={1: (0.0, 1.0)})(w, x)
      >>> found.sites[0].sums, found.sites[0].dtype
      ((0, 16129), 'int16')
    """
    check_function("diagnostics.ranges", f)
    params = params_of("diagnostics.ranges", plan)
    if bounds is not None and not isinstance(bounds, Mapping):
        problem = f"`bounds` is not a mapping, but of type {type(bounds).__name__}."
        fix = "pass positions or names of arguments, for example bounds={1: (0.0, 1.0)}."
        raise fail("diagnostics.ranges", problem, fix=fix, error=TypeError)

    def found(*args: Any, **kwargs: Any) -> Ranges:
        call = trace_call("diagnostics.ranges", f, params, args, kwargs)
        call_plan = as_plan("diagnostics.ranges", plan, call, params)
        scales = call_plan.check_affines("diagnostics.ranges", affines)
        notes = Notes()
        leaves = _leaves(call, call_plan, scales, args, kwargs, bounds or {})
        results = IntervalDomain(call_plan, scales, notes).run(
            call.jaxpr, leaves, consts=call.consts
        )
        return Ranges(
            sites=tuple(
                notes.sites.get(x.address)
                or Accumulator(x.path, x.op, None, None, 0, None, "not reached", x.label)
                for x in call_plan.sites
            ),
            overflows=tuple(notes.overflows.values()),
            unknown=dict(notes.unknown),
            results=tuple((x.low, x.high) for x in results),
        )

    return found


def _leaves(
    call: Call,
    plan: Plan,
    scales: Mapping[str, Affine],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    bounds: Mapping[int | str, Any],
) -> list[Interval]:
    """Returns the intervals of the arrays among the arguments."""
    positions = (plan.params,) if isinstance(plan.params, int) else plan.params
    arguments = {**dict(enumerate(args)), **kwargs}
    inputs = [name for name in arguments if name not in positions]
    for name in bounds:
        if name not in inputs:
            kind = "an argument of weights, which are known" if name in arguments else "no argument"
            names = ", ".join(map(repr, inputs)) or "no arguments"
            fix = f"pass one of {names}, counted from 0 as in f(*args), or by keyword."
            raise fail("diagnostics.ranges", f"bounds[{name!r}] names {kind}.", fix=fix)
    pairs = {name: iter(_pairs(name, bounds[name], arguments[name])) for name in bounds}

    def interval(keys: Any, x: Any, path: str | None) -> Interval:
        name = keys[1].idx if keys[0].idx == 0 else keys[1].key
        if name in pairs:
            return _bounded(name, x, next(pairs[name]))
        return _parameter(x, path, plan, scales) if name in positions else anything(x)

    return [interval(*leaf) for leaf in zip(call.keys, call.leaves, call.paths, strict=True)]


def _parameter(x: Any, path: str | None, plan: Plan, scales: Mapping[str, Affine]) -> Interval:
    """Returns a known parameter: a weight of the plan with the values of its codes."""
    arrays = jax.tree.leaves(x)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arrays):
        return anything(x)
    if not all(map(compat.is_concrete, arrays)):
        problem = f"the parameter {path!r} is traced, so that its values are not known."
        fix = "call it outside jax.jit, or pass jax.ShapeDtypeStructs for weights that may be "
        fix += "anything."
        raise fail("diagnostics.ranges", problem, fix=fix)
    weight = plan.weight_at(path)
    q = x if is_quantized(x) else None
    if weight is not None and q is None:
        q = quantize_weight(x, weight.spec, scales.get(weight.key))
    if q is None:
        return of_value(x)
    values = of_value(q.dequantize())
    return values if weight is None else dataclasses.replace(values, codes=q)


def _is_pair(x: Any) -> bool:
    number = (int, float, np.number)
    return isinstance(x, tuple) and len(x) == 2 and all(isinstance(end, number) for end in x)


def _pairs(name: int | str, bounds: Any, argument: Any) -> list[Bound]:
    """Returns the bounds of each array of an argument."""
    leaves = jax.tree.leaves(argument, is_leaf=is_quantized)
    try:
        tree = jax.tree.broadcast(bounds, argument, lambda x: _is_pair(x) or is_quantized(x))
    except ValueError:
        tree = None
    pairs = jax.tree.leaves(tree, is_leaf=_is_pair)
    fits = len(pairs) == len(leaves) and all(map(_is_pair, pairs))
    pairs = [pair for pair, x in zip(pairs, leaves, strict=False) if is_array(x)]
    if not (fits and pairs and all(low <= high for low, high in pairs)):
        counts = f"{len(leaves)} leaves, {sum(map(is_array, leaves))} of them arrays"
        problem = f"`bounds` does not fit the argument {name!r} of {counts}."
        pair = f"bounds={{{name!r}: (0.0, 1.0)}}"
        fix = f"pass a pair with low <= high, such as {pair}, or a pytree of pairs for its arrays."
        raise fail("diagnostics.ranges", problem, fix=fix)
    return pairs


def _bounded(name: int | str, x: Any, pair: Bound) -> Interval:
    low, high = (float(end) for end in pair)
    if not is_integer(x.dtype):
        return flushed(low, high, x.dtype)
    smallest, largest = limits(x.dtype)
    if low < smallest or high > largest:
        problem = f"`bounds` of the argument {name!r} exceed its dtype: {pair} for {x.dtype}."
        fix = f"pass bounds of at least {smallest} and at most {largest}."
        raise fail("diagnostics.ranges", problem, fix=fix)
    return Interval(math.ceil(pair[0]), math.floor(pair[1]))


# Intervals are followed through the equations, the functions they call, branches and loops.


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
class IntervalDomain(Domain[Interval]):
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
        # Branches and loops have rules of their own.
        return eqn.primitive.name in (*CALLS, "shard_map")

    def body(
        self, eqn: Eqn, body: Body, values: list[Interval], where: Where
    ) -> tuple["IntervalDomain", list[Interval]]:
        inside = dataclasses.replace(self, line=self._line(eqn))
        if eqn.primitive.name != "shard_map":
            return inside, values
        # Each device gets a part of what is split.
        specs = zip(values, eqn.params["in_specs"], strict=True)
        axes = {**self.axes, **eqn.params["mesh"].shape}
        parts = [x.hull_only() if any(spec) else x for x, spec in specs]
        return dataclasses.replace(inside, axes=axes), parts

    def returned(
        self, eqn: Eqn, values: list[Interval], results: list[list[Interval]], where: Where
    ) -> list[Interval]:
        if eqn.primitive.name != "shard_map":
            return results[-1]
        return [x.hull_only() for x in results[-1]]

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
        if computable and name != "broadcast_in_dim" and not compat.sub_jaxprs(eqn):
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

    def aside(self) -> "IntervalDomain":
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


def _cond(self: IntervalDomain, eqn: Eqn, xs: list[Interval], address: Address) -> list[Interval]:
    """Follows the branches that may be taken."""
    index, *operands = xs
    branches = eqn.params["branches"]
    largest = len(branches) - 1
    start, end = (min(max(i, 0), largest) for i in (index.low, index.high))
    taken = [self.run(branches[i], operands, (*address, i)) for i in range(start, end + 1)]
    return [hull(parts) for parts in zip(*taken, strict=True)]


def _psum(self: IntervalDomain, eqn: Eqn, xs: list[Interval], address: Address) -> list[Interval]:
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


def _scan(self: IntervalDomain, eqn: Eqn, xs: list[Interval], address: Address) -> list[Interval]:
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

        def step(who: IntervalDomain, state: list[Interval], body: Any = body) -> list[Interval]:
            return who.run(body, [*consts, *state, *parts], address)

        start, fixed = state, passed_on(eqn)
        state = _invariant(self, step, start, fixed, body)
        state = _counted(self, step, start, state, body, num_consts, length)
        results = step(self, state)
        ends = [x if fixed[i] else results[i] for i, x in enumerate(state)]
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


def _slice(x: Interval, i: int) -> Interval:
    """Returns the slice for one step of an array that a scan steps over."""
    if x.value is None:
        return x.hull_only()
    q = x.codes
    if q is not None:
        q = (q if q.scale.shape[0] == q.shape[0] else refine(q, 0))[i]
    return dataclasses.replace(of_value(x.value[i]), codes=q)


def _invariant(
    self: IntervalDomain, step: Step, start: list[Interval], fixed: Sequence[bool], body: Any
) -> list[Interval]:
    """Returns intervals of the carried values that hold before every step."""
    body, _ = compat.open_jaxpr(body)
    state = [x if fixed[i] else x.hull_only() for i, x in enumerate(start)]
    tries = 0
    while True:
        results = [x.hull_only() for x in step(self.aside(), state)[: len(state)]]
        changed = [
            i
            for i, (a, b) in enumerate(zip(state, results, strict=True))
            if not fixed[i] and not a.holds(b)
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
    self: IntervalDomain,
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


def _while(self: IntervalDomain, eqn: Eqn, xs: list[Interval], address: Address) -> list[Interval]:
    p = eqn.params
    num_consts, inside = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    cond_consts, consts, state = xs[:num_consts], xs[num_consts:inside], xs[inside:]

    def goes_on(state: list[Interval]) -> Interval:
        return self.run(p["cond_jaxpr"], [*cond_consts, *state], (*address, _NOWHERE))[0]

    def step(who: IntervalDomain, state: list[Interval]) -> list[Interval]:
        narrowed = _where_true(p["cond_jaxpr"], [*cond_consts, *state])[num_consts:]
        return who.run(p["body_jaxpr"], [*consts, *narrowed], address)

    for _ in range(STEPS):
        decided = goes_on(state)
        if decided.high == 0:
            return state
        if decided.low == 0:
            break
        state = step(self, state)
    start, fixed = state, passed_on(eqn)
    state = _invariant(self, step, start, fixed, p["body_jaxpr"])
    tighter = [hull([a, b]) for a, b in zip(start, step(self.aside(), state), strict=True)]
    state = [x if fixed[i] else tighter[i].hull_only() for i, x in enumerate(state)]
    goes_on(state)
    results = step(self, state)
    return [x if fixed[i] else hull([start[i], results[i]]) for i, x in enumerate(state)]


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
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    **dict.fromkeys(("psum", "psum_invariant"), _psum),
}
