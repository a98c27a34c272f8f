"""Finds the contractions of a jaxpr, in order, and the weights that reach them: which gathers are
lookups, where the rules of a policy split scans, and which operands are one value.
"""

import dataclasses
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export, lax

from .. import compat
from ..checks import is_real
from ..compat import Eqn
from ..errors import fail
from ..policy import Policy, Rule
from .paths import Part, Split
from .rules import CONTRACTIONS, VIEWS, Contraction, tracked
from .views import Address, Loop, Origin, Origins
from .walk import (
    CALLS,
    CONDITION,
    Body,
    Domain,
    Followed,
    Read,
    Where,
    bodies,
    enter,
    holds_contraction,
    walk,
)

_PART = re.compile(r"/\[[0-9]+:[0-9]+\](?=/|\Z)|\A\[[0-9]+:[0-9]+\](?:/|\Z)")
"""The name scope of a part of a split scan; rules do not see it."""


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

    @functools.cached_property
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


def find(jaxpr: Any, origins: Sequence[Origin | None]) -> tuple[list[Found], list[Origin | None]]:
    """Returns the contractions of a jaxpr and the origins of its results."""
    search = _Search([])
    results = walk(search, jaxpr, origins)
    return search.items, results


@dataclass(frozen=True)
class _Search(Followed[Origin]):
    """Follows weights to contractions, which it collects. With a reason, all stay in float."""

    items: list[Found]
    reason: str | None = None

    def enters(self, eqn: Eqn, values: list[Origin | None], where: Where) -> bool:
        return where.is_marked or super().enters(eqn, values, where)

    def evaluate(
        self, eqn: Eqn, values: list[Origin | None], where: Where
    ) -> Sequence[Origin | None]:
        name = eqn.primitive.name
        if name in CONTRACTIONS:
            family = CONTRACTIONS[name]
            if where.is_marked and (values[0] is not None or not family.needs_weight):
                unsupported = self.reason or family.why_unsupported(eqn)
                address = () if unsupported else where.address
                origins = tuple(values[: len(family.axes(eqn))])
                self.items.append(Found(address, eqn, where.scope, origins, unsupported))
        elif name in VIEWS:
            if any(values):
                return tracked(eqn, values) or super().evaluate(eqn, values, where)
        elif holds_contraction(eqn):
            reason = f"it is inside `{compat.shown_name(eqn)}`, which jqx does not look into"
            for jaxpr in compat.sub_jaxprs(eqn):
                walk(self._in_float(reason), jaxpr, [None] * len(jaxpr.invars), where)
        return super().evaluate(eqn, values, where)

    def body(
        self, eqn: Eqn, body: Body, values: list[Origin | None], where: Where
    ) -> tuple[Domain[Origin | None], list[Origin | None]]:
        _, values = super().body(eqn, body, values, where)
        if body.part != CONDITION:
            return self, values
        return self._in_float("it is in the condition of a while loop"), values

    def _in_float(self, reason: str) -> "_Search":
        return _Search(self.items, self.reason or reason)


def contractions(call: Any, *, count_reads: bool = False) -> list[Found]:
    """Returns the contractions of a `Call`, in order. With `count_reads` they have the addresses of
    older plans, in which reads count too.
    """
    key = call.jaxpr, count_reads
    if key not in call.found:
        jaxpr = _without_reads(call.jaxpr) if count_reads else call.jaxpr
        floats = {path for path, dtype in dtypes_of(call).items() if is_real(dtype)}
        items, _ = find(jaxpr, origins_of(call.leaves, call.paths))
        call.found[key] = [_without_integers(item, floats) for item in items]
    return call.found[key]


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
    pairs = zip(item.origins, real, strict=True)
    return dataclasses.replace(item, origins=tuple(x if is_real else None for x, is_real in pairs))


# Tells lookups in weights from reads of other values. In a jaxpr both are gathers, but only
# lookups are contractions.
#
# An index such as `h[:, -1]` is traced as a slice, and as a gather if a size of `h` is symbolic. So
# reads must not count in addresses: a function then has the same addresses for all sizes.


_INSIDE = lax.GatherScatterMode.PROMISE_IN_BOUNDS


def with_reads(jaxpr: Any, origins: Origins) -> Any:
    """Returns an open jaxpr, given the weights among its operands, in which every gather of another
    value is marked; the same object if there is none.
    """
    holding: dict[int, bool] = {}
    return _marked(jaxpr, origins, holding)[0] if _holds_lookup(jaxpr, holding) else jaxpr


def _without_reads(jaxpr: Any) -> Any:
    """Returns an open jaxpr in which no gather is marked, as plans of jqx 0.1 count."""
    eqns = [
        eqn.replace(params=dict(eqn.params))
        if isinstance(eqn.params, Read)
        else compat.with_bodies(eqn, _without_reads)
        for eqn in jaxpr.eqns
    ]
    return _with_eqns(jaxpr, eqns)


def _holds_lookup(jaxpr: Any, memo: dict[int, bool]) -> bool:
    if id(jaxpr) not in memo:
        memo[id(jaxpr)] = any(
            _needs_weight(eqn) or any(_holds_lookup(body, memo) for body in compat.sub_jaxprs(eqn))
            for eqn in jaxpr.eqns
        )
    return memo[id(jaxpr)]


def _needs_weight(eqn: Eqn) -> bool:
    name = eqn.primitive.name
    return name in CONTRACTIONS and CONTRACTIONS[name].needs_weight


def _marked(
    jaxpr: Any, origins: Origins, holding: dict[int, bool]
) -> tuple[Any, list[Origin | None]]:
    """Returns a jaxpr with marks, and the origins of its results.

    This writes a jaxpr anew, which `walk` does not: an equation may become several. So it goes
    through equations itself, and takes from `enter` what the operands of inner functions are.
    """
    env: dict[Any, Origin | None] = dict(zip(jaxpr.invars, origins, strict=True))

    def origin_of(atom: Any) -> Origin | None:
        return None if compat.is_literal(atom) else env.get(atom)

    eqns, producers = [], dict[Any, Eqn]()
    for eqn in jaxpr.eqns:
        origins_of_inputs = tuple(map(origin_of, eqn.invars))
        name, results = eqn.primitive.name, ()
        producers.update(dict.fromkeys(eqn.outvars, eqn))
        if _needs_weight(eqn):
            views = [] if origins_of_inputs[0] is None else _static_index(eqn, producers)
            for view in views:
                view_origins = VIEWS[view.primitive.name].track(view, [origin_of(view.invars[0])])
                env.update(zip(view.outvars, view_origins, strict=True))
            if views:
                eqns += views
                continue
            is_read = origins_of_inputs[0] is None or _is_symbolic(eqn)
            eqns.append(eqn.replace(params=Read(eqn.params)) if is_read else eqn)
            continue
        holds = any(_holds_lookup(body, holding) for body in compat.sub_jaxprs(eqn))
        if holds or any(origins_of_inputs):
            new: dict[int, Any] = {}

            def mark(_: Any, jaxpr: Any, origins: Any, __: Where, new: Any = new) -> Any:
                body, _ = compat.open_jaxpr(jaxpr)
                new[id(body)], inner_results = _marked(body, origins, holding)
                return inner_results

            if bodies(eqn):
                results = enter(Followed(), eqn, origins_of_inputs, Where(), mark)
            else:
                for body in compat.sub_jaxprs(eqn):
                    mark(None, body, [None] * len(body.invars), Where())
                if name in VIEWS:
                    results = VIEWS[name].track(eqn, origins_of_inputs)
            if holds:
                eqn = compat.with_bodies(eqn, lambda body, new=new: new.get(id(body), body))
            env.update(zip(eqn.outvars, results, strict=False))
        eqns.append(eqn)
    return _with_eqns(jaxpr, eqns), [origin_of(atom) for atom in jaxpr.outvars]


def _is_symbolic(eqn: Eqn) -> bool:
    """Whether a lookup is in a value with symbolic sizes, which no weight has: an index of a weight
    that is repeated for each row of a batch.
    """
    return any(map(export.is_symbolic_dim, eqn.invars[0].aval.shape))


def _static_index(eqn: Eqn, producers: Mapping[Any, Eqn]) -> list[Eqn]:
    """Returns a gather at one static index of a value with symbolic sizes as what JAX traces for
    known sizes, a slice without some axes; none if it is another gather.
    """
    numbers, starts = eqn.params["dimension_numbers"], _constant(eqn.invars[1], producers)
    is_one = starts is not None and starts.shape == (len(numbers.start_index_map),)
    if starts is None or not (is_one and _is_symbolic(eqn) and eqn.params["mode"] == _INSIDE):
        return []
    begin = dict(zip(numbers.start_index_map, starts.tolist(), strict=True))
    sizes = enumerate(eqn.params["slice_sizes"])
    ends = [(begin.get(axis, 0), begin.get(axis, 0) + n) for axis, n in sizes]
    (x, _), (y,) = eqn.invars, eqn.outvars

    def view(x: jax.Array) -> jax.Array:
        part = lax.slice(x, *zip(*ends, strict=True))
        return lax.squeeze(part, numbers.collapsed_slice_dims)

    traced, _ = compat.trace(view, jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype))
    named = {traced.invars[0]: x, traced.outvars[0]: y}
    return [
        inner.replace(
            invars=[named.get(v, v) for v in inner.invars],
            outvars=[named.get(v, v) for v in inner.outvars],
        )
        for inner in traced.eqns
    ]


def _constant(atom: Any, producers: Mapping[Any, Eqn]) -> np.ndarray | None:
    """Returns an index that is made of numbers alone; `None` for others."""
    if compat.is_literal(atom):
        return np.asarray(atom.val)
    eqn = producers.get(atom)
    parts = [] if eqn is None else [_constant(x, producers) for x in eqn.invars]
    arrays = [x for x in parts if x is not None]
    if eqn is None or not arrays or len(arrays) < len(parts):
        return None
    if eqn.primitive.name == "broadcast_in_dim" and len(atom.aval.shape) == 1:
        return np.broadcast_to(arrays[0], atom.aval.shape)
    return np.concatenate(arrays) if eqn.primitive.name == "concatenate" else None


def _with_eqns(jaxpr: Any, eqns: Sequence[Eqn]) -> Any:
    changed = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr.replace(eqns=list(eqns)) if changed else jaxpr


# Finds where the rules of a policy split the weights of scans.


def selecting(items: Sequence[Found], policy: Policy, parts: Mapping[str, Part]) -> dict[int, Rule]:
    """Returns the rules that select steps, by index. A rule whose path, brackets included, matches
    a contraction as a regular expression is not one. `parts` are the weights that are parts of one.
    """

    def matches(rule: Rule, item: Found) -> bool:
        has_weight = any(origin is not None for origin in item.origins)
        paths = [parts[path].whole if path in parts else path for path in item.paths]
        return any(rule.matches(path, item.op, has_weight=has_weight) for path in paths)

    return {
        index: rule
        for index, rule in enumerate(policy.rules)
        if rule.selector is not None and not any(matches(rule, item) for item in items)
    }


def selects(rule: Rule, part: Part, op: str) -> bool:
    """Whether a rule selects all steps of a part."""
    if rule.selector is None or not rule.selects(part.whole, op):
        return False
    try:
        start, stop = rule.selector.resolve("make_plan", part.whole, part.length)
    except ValueError:  # raised where the scan is split, unless the rule is optional
        return False
    return start <= part.start and part.stop <= stop


def rule_for(
    policy: Policy, part: Part, op: str, selecting: Collection[int] | None = None
) -> tuple[int, Rule] | None:
    """Returns the first rule for a part and its index; `None` if there is none. `selecting` has the
    indices of rules that select steps, `None` for all that may.
    """
    for index, rule in enumerate(policy.rules):
        selects_steps = selecting is None or index in selecting
        if rule.matches(part.whole, op, has_weight=True) or (
            selects_steps and selects(rule, part, op)
        ):
            return index, rule
    return None


class _Use(NamedTuple):
    """The use of a weight that a scan steps over in a contraction."""

    scan: Address
    length: int
    path: str
    axes: frozenset[int]
    op: str


def splits_of(
    function: str, items: Sequence[Found], policy: Policy | None, shapes: dict[str, tuple[int, ...]]
) -> tuple[Split, ...]:
    """Returns the splits of the scans of a function. All weights that a scan steps over are split
    with it, and all scans that step over a weight are split with it. `shapes` are those of the
    parameters. Without a policy all are split at each step.
    """
    rules = {} if policy is None else selecting(items, policy, {})
    if policy is not None and not rules:
        return ()
    uses = [
        _Use(part.loops[0].address, part.loops[0].length, part.path, part.stepped[0], item.op)
        for item in items
        for origin in item.origins
        for part in (origin.parts if origin else ())
        if part.loops
    ]
    roots = _together(uses)
    cuts: dict[Any, set[int]] = defaultdict(set)
    for use in uses if policy is None else ():
        cuts[roots[use.path]] |= {*range(use.length)}
    for rule in rules.values():
        for use in uses:
            if not rule.selects(use.path, use.op):
                continue
            assert rule.selector is not None
            try:
                cuts[roots[use.path]] |= {*rule.selector.resolve(function, use.path, use.length)}
            except ValueError:
                if rule.optional:
                    continue
                raise
            if not _is_whole(use, shapes):
                problem = f"a rule selects steps of {use.path!r}, which are not steps of one axis."
                details = f"path {rule.path!r}; shape {list(shapes[use.path])}, and a scan of "
                details += f"{use.length} steps over axes {sorted(use.axes)}"
                fix = "let the rule match the whole weight, or keep the layers of f in one stack."
                raise fail(function, problem, given=details, fix=fix)
    splits = {}
    for use in uses:
        if (bounds := cuts.get(roots[use.path])) and _is_whole(use, shapes):
            (axis,) = use.axes
            splits[use.path] = Split(use.path, axis, tuple(sorted({0, use.length, *bounds})))
    return tuple(splits[path] for path in shapes if path in splits)


def _together(uses: Sequence[_Use]) -> dict[str, Any]:
    """Returns one name for all weights that any scans step over together."""
    name: dict[Any, Any] = {}
    for use in uses:
        a, b = (name.setdefault(x, x) for x in (use.scan, use.path))
        name = {x: a if root == b else root for x, root in name.items()}
    return {use.path: name[use.path] for use in uses}


def _is_whole(use: _Use, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether the steps of a scan are the indices of one axis of the weight."""
    return len(use.axes) == 1 and shapes[use.path][min(use.axes)] == use.length


def check_split(function: str, items: Sequence[Found], splits: Sequence[Split]) -> None:
    """Raises if a weight was split but no scan reads its parts."""
    stack_of = {part.path: part.whole for split in splits for part in split.parts}
    reached: set[str] = set()
    for origin in (origin for item in items for origin in item.origins if origin is not None):
        paths = [part.path for part in origin.parts]
        if len({stack_of.get(path, path) for path in paths}) == len(set(paths)):
            reached |= {stack_of[path] for path in paths if path in stack_of}
    if unreached := [split.path for split in splits if split.path not in reached]:
        problem = f"the weight {unreached[0]!r}, whose steps a rule selects, reaches its scan "
        problem += "through an operation that mixes them."
        fix = "prepare the weight outside of f, or let rules match the whole weight."
        raise fail(function, problem, fix=fix, error=NotImplementedError)


# Finds which operands of contractions in a jaxpr are one value, by value numbering.


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
    walk(numbering, jaxpr, [numbering.new() for _ in jaxpr.invars])
    return numbering.numbers_at


@dataclass
class _Numbering(Domain[int]):
    """Numbers of values. Two equations with the same primitive, parameters and operands share them,
    and so do two calls of functions that compute the same.
    """

    numbers_at: dict[Address, Numbered] = field(default_factory=dict)
    numbers: dict[Any, int] = field(default_factory=dict)
    count: Iterator[int] = field(default_factory=itertools.count)

    def new(self) -> int:
        """Returns a new number."""
        return next(self.count)

    def constant(self, array: Any) -> int:
        return self.new()

    def literal(self, atom: Any) -> int:
        if atom.aval.shape:
            return self.new()
        return self.number((str(atom.aval), repr(atom.val)))

    def number(self, key: Any) -> int:
        """Returns the number for a key; a new one if the key cannot be hashed."""
        try:
            return self.numbers.setdefault(key, self.new())
        except TypeError:  # a parameter without a hash
            return self.new()

    def enters(self, eqn: Eqn, values: list[int], where: Where) -> bool:
        return where.is_marked or eqn.primitive.name in CALLS

    def evaluate(self, eqn: Eqn, values: list[int], where: Where) -> list[int]:
        """Numbers the results of an equation without looking inside."""
        if eqn.effects:
            results = [self.new() for _ in eqn.outvars]
        else:
            params = tuple(sorted(eqn.params.items(), key=lambda pair: pair[0]))
            key = eqn.primitive, params, *values
            results = [self.number((*key, i)) for i in range(len(eqn.outvars))]
        if where.is_marked and eqn.primitive.name in CONTRACTIONS:
            self.numbers_at[where.address] = Numbered(where.inside, tuple(values), results[0])
        return results

    def body(
        self, eqn: Eqn, body: Body, values: list[int], where: Where
    ) -> tuple[Domain[int], list[int]]:
        is_call = eqn.primitive.name in CALLS
        return self, values if is_call else [self.new() for _ in values]

    def start(self, eqn: Eqn, values: list[int], where: Where) -> list[int]:
        return values

    def returned(
        self, eqn: Eqn, values: list[int], results: list[list[int]], where: Where
    ) -> list[int]:
        is_call = eqn.primitive.name in CALLS
        return results[0] if is_call else [self.new() for _ in eqn.outvars]
