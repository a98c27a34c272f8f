"""`search`: a scheme for each weight, such that the error is minimal within a budget."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ... import Plan, Policy, Rule
from ..checks import check_instance
from ..errors import fail
from ..policy import check_policy
from ..table import Table, Tabular
from ..transforms.arguments import check_function, check_plan
from ..transforms.calibrate import advancing
from ..transforms.find import rule_for
from ..transforms.paths import EACH, Part
from .report import bits_of
from .sensitivity import Metric, Sweep, plan_of_batches, relative_error


@dataclasses.dataclass(frozen=True)
class Bytes:
    """A budget: the maximum number of bytes of the weights of the plan, with their scales."""

    limit: float


@dataclasses.dataclass(frozen=True)
class Bits:
    """A budget: the maximum mean bits per weight of the plan.

    Scales count, and zero points: int4 in groups of 32 with a float32 scale each takes 5 bits a
    weight, so `Bits(4)` excludes it.
    """

    limit: float


@dataclasses.dataclass(frozen=True)
class Error:
    """A budget: the maximum of the metric."""

    limit: float


class Point(NamedTuple):
    """One assignment of the front: no other has both fewer bytes and less error.

    Attributes:
      bytes: bytes of the weights of the plan, with their scales.
      error: sum of the costs of the parts.
      schemes: scheme of each unit, in order.
    """

    bytes: float
    error: float
    schemes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Assignment(Tabular):
    """The result of `search`. Prints as a table.

    Attributes:
      policy: a policy with a rule for each path only.
      schemes: name of the scheme of each path.
      bytes: bytes of the weights of the plan, with their scales, packed.
      bits: mean bits per weight of the plan, scales included, as `Bits` counts them.
      predicted: sum of the costs of the parts; for one candidate on all weights, or a greedy
        search, the metric of the whole.
      measured: metric of the whole.
      uniform: bytes and measured metric of each candidate on all paths.
      front: the best assignments for any number of bytes, by predicted error; for a greedy search,
        its intermediate assignments.
      budget: the budget that `search` was given.
    """

    policy: Policy
    schemes: dict[str, str]
    bytes: float
    bits: float
    predicted: float
    measured: float
    uniform: dict[str, tuple[float, float]]
    front: tuple[Point, ...]
    budget: Bytes | Bits | Error | None = None

    def table(self) -> Table:
        """Returns the rows as text."""
        rows = [(path or "(argument)", scheme) for path, scheme in self.schemes.items()]
        lines = [
            f"{name}: {bits:.2f} bits a weight ({size:,.0f} bytes), metric {x:.4g}"
            for name, bits, size, x in totals(self)
        ]
        lines[0] += f" ({self.predicted:.4g} predicted)"
        budget = "" if self.budget is None else f"budget: {in_words(self.budget)}; "
        lines.append(f"{budget}bits and bytes are of the weights of the plan with their scales")
        return Table(("path", "scheme"), tuple(rows), "\n".join(lines), texts=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict for `json.dumps`, without the policy."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        front = [point._asdict() for point in self.front]
        limit = self.budget
        budget = None if limit is None else {type(limit).__name__.lower(): limit.limit}
        policy = [str(rule) for rule in self.policy.rules]
        return {**fields, "front": front, "policy": policy, "budget": budget}


_NAME = "diagnostics.search"

FLOAT = "float"
"""Name of the scheme that leaves a weight in float."""

_MEASURED = 8
"""Number of the assignments with the best predictions that are measured."""


def search(
    f: Callable[..., Any],
    plan: Plan | Policy,
    candidates: Mapping[str, Policy],
    budget: Bytes | Bits | Error,
    *,
    metric: Metric = relative_error,
    additive: bool = True,
    steps: bool = False,
    progress: bool = True,
) -> Callable[..., Assignment]:
    """Returns a function that assigns one of several schemes to each weight, within a budget.

    A weight that is split, because rules select steps of a scan over it, counts as one weight for
    each part; each part gets its own scheme.

    Costs are measured one weight at a time. If they add up, `additive=True`, the assignment is
    optimal: all assignments that no other beats in bytes and error are built weight by weight (the
    multiple-choice knapsack problem, by dynamic programming). Those with the best predictions, and
    each candidate on all weights, are measured, and the best one is returned. `additive=False`
    starts with the fewest bytes for every weight and measures the whole function at each step. It
    makes the change with the largest gain per byte until the budget is met.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with. Its quantized weights are searched.
      candidates: policies by name; the rule of a policy that matches a weight is its scheme for
        that weight. A weight that a candidate does not quantize is in float under it. `"float"` is
        always one of the schemes.
      budget: `Bytes(n)`, `Bits(mean)` or `Error(limit of the metric)`. Bytes and bits count the
        scales of the weights too.
      metric: as in `sensitivity`. The default is a ratio of energies: its root is comparable with
        relative L2 errors.
      additive: whether the costs of several weights add up.
      steps: whether every scan over weights is split at each of its steps, so that each layer of a
        stack gets its own scheme. `plan` must then be a policy. The policy of the result joins
        consecutive steps with one scheme.
      progress: whether to show a progress bar, as in `jqx.calibrate_batches`.

    Returns:
      `searched(params, *batches) -> Assignment`; each batch is a tuple of the other arguments of
      `f`, or a single argument. Static scales are calibrated on the batches. Activations that
      multiply a weight are quantized by its scheme; sites without a weight stay in float.

    Raises:
      TypeError: if `f` is not a function, `candidates` is not a dict of policies, or `budget` is
        not a budget.
      ValueError: if no assignment meets the budget; if there is no batch or no weight; if a
        candidate is named "float"; or if `steps` is set for a plan.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> from jqx.diagnostics import Bytes, search
      >>> f = lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"]
      >>> a, b, x = jax.random.normal(jax.random.key(0), (3, 64, 64))
      >>> p = {"a": a, "b": b.at[:, 0].mul(20.0)}
      >>> ways = {f"int{n}": jqx.presets.w8a16(weight={"qtype": f"int{n}"}) for n in (8, 4)}
      >>> search(f, ways["int8"], ways, Bytes(64 * 64 * 1.5 + 512))(p, x).schemes
      {'a': 'int8', 'b': 'int4'}
    """
    check_function(_NAME, f)
    check_plan(_NAME, plan, order="diagnostics.search(f, plan, candidates, budget)", policies=True)
    check_instance(_NAME, "candidates", candidates, Mapping, fix="pass {name: policy}.")
    for policy in candidates.values():
        check_policy(_NAME, policy, "a candidate")
    fix = "pass Bytes(n), Bits(mean) or Error(limit) of jqx.diagnostics."
    check_instance(_NAME, "budget", budget, (Bytes, Bits, Error), fix=fix)
    if not candidates or FLOAT in candidates:
        problem = f"`candidates` has no entry, or one named {FLOAT!r}, which is always included."
        fix = 'name them by their formats, such as {"int8": jqx.presets.w8a16()}.'
        raise fail(_NAME, problem, given=f"{[*candidates]}", fix=fix)
    if steps and not isinstance(plan, Policy):
        problem = "the scans of a finished plan cannot be split, as steps=True asks."
        raise fail(_NAME, problem, fix="pass the policy instead of the plan.")

    def searched(params: Any, *batches: Any) -> Assignment:
        base = plan
        if not isinstance(base, Plan):
            rules = [rule for policy in (base, *candidates.values()) for rule in policy.rules]
            splits = EACH if steps else Policy(rules)
            base = plan_of_batches(f, base, params, batches, splits=splits)
        whole_plans = [
            plan_of_batches(f, policy, params, batches, base) for policy in candidates.values()
        ]
        plans = [_restricted(policy, base) for policy in whole_plans]
        sweep = Sweep(_NAME, f, plans, metric, params, batches, progress)
        units = [unit for unit in sweep.units if sweep.paths(unit)]
        if not units:
            problem = "there is no weight to search for: the plan has no quantized weights."
            fix = "print the plan: it shows why each contraction stays in float."
            raise fail(_NAME, problem, fix=fix)
        sizes = {unit: _sizes(sweep, unit) for unit in units}
        problem = _Problem(sweep, units, sizes, [FLOAT, *candidates], budget)
        count = len(candidates) * (len(units) + 1) if additive else None
        with advancing("search", "step", count, progress) as sweep.advance:
            uniform = {name: problem.uniform(name) for name in candidates}
            front = problem.exact() if additive else problem.greedy()
        with advancing("search: the best", "step", None, progress) as sweep.advance:
            point, measured = problem.best(front, list(uniform.values()))
        schemes = dict(zip(units, point.schemes, strict=True))
        paths_and_names = [(sweep.paths(unit), name) for unit, name in schemes.items()]
        return Assignment(
            policy=_policy_of(paths_and_names, candidates, base),
            schemes=schemes,
            bytes=point.bytes,
            bits=8 * point.bytes / max(problem.count, 1),
            predicted=point.error,
            measured=measured,
            uniform={name: (point.bytes, point.error) for name, point in uniform.items()},
            front=tuple(front),
            budget=budget,
        )

    return searched


def bytes_of(budget: Bytes | Bits | Error, count: float) -> float:
    """Returns the maximum bytes of `count` weights; infinite for a budget of the metric."""
    if isinstance(budget, Error):
        return math.inf
    return budget.limit / 8 * count if isinstance(budget, Bits) else budget.limit


def in_words(budget: Bytes | Bits | Error) -> str:
    """Returns a budget with its unit, such as `at most 5 bits a weight`."""
    if isinstance(budget, Bytes):
        return f"at most {budget.limit:,.0f} bytes"
    if isinstance(budget, Bits):
        return f"at most {budget.limit:.4g} bits a weight"
    return f"a metric of at most {budget.limit:.4g}"


def totals(assignment: Assignment) -> list[tuple[str, float, float, float]]:
    """Returns name, bits per weight, bytes and measured metric of an assignment, and of each
    candidate on all weights.
    """
    pairs = {"this mixture": (assignment.bytes, assignment.measured)}
    pairs |= {f"{name} on all": pair for name, pair in assignment.uniform.items()}
    return [
        (name, size / assignment.bytes * assignment.bits, size, x)
        for name, (size, x) in pairs.items()
    ]


# The policy of an assignment that `search` has found.


def _policy_of(
    units: Sequence[tuple[Sequence[str], str]], candidates: Mapping[str, Policy], base: Plan
) -> Policy:
    """Returns the policy that assigns a candidate, by name, to each unit, given as the paths of its
    weights. A name without a candidate leaves the unit in float.
    """
    parts = {part.path: part for split in base.splits for part in split.parts}
    uneven = {n for n, policy in candidates.items() if any(rule.selector for rule in policy.rules)}
    joined: dict[tuple[str, ...], list[tuple[list[Part], str]]] = {}
    for paths, name in units:
        unit_parts = [parts.get(path, Part(path, path, 0, 0, 0)) for path in paths]
        pairs = joined.setdefault(tuple(part.whole for part in unit_parts), [])
        # Consecutive parts with one scheme are joined, unless its policy selects steps.
        if pairs and pairs[-1][1] == name and name not in uneven:
            steps = list(zip(pairs[-1][0], unit_parts, strict=True))
            if all(a.stop == b.start and b.length for a, b in steps):
                unit_parts = [b._replace(start=a.start) for a, b in steps]
                pairs.pop()
        pairs.append((unit_parts, name))
    return Policy(
        rule
        for pairs in joined.values()
        for unit_parts, name in pairs
        for rule in _rules(unit_parts, candidates.get(name), base)
    )


def _rules(parts: Sequence[Part], policy: Policy | None, base: Plan) -> list[Rule]:
    """Returns a rule for each operation on a weight, or on several weights that one site joins."""
    splits = {split.path: split for split in base.splits}
    paths = {
        x.path
        for part in parts
        for x in (splits[part.whole].parts if part.length else [part])
        if part.start <= x.start and x.stop <= part.stop
    }
    ops = dict.fromkeys(
        site.op for site in base.sites for operand in site.operands if operand.path in paths
    )
    rules = []
    for op in ops:
        choice = rule_for(policy, parts[0], op) if policy is not None else None
        rule = choice[1] if choice else Rule()
        optional = len(ops) > 1
        rules += [
            dataclasses.replace(rule, path=path, op=op, optional=optional)
            for path in _patterns(parts)
        ]
    return rules


def _patterns(parts: Sequence[Part]) -> list[str]:
    """Returns the paths of rules for weights; weights with one range of steps share one path."""
    ranges: dict[str, list[str]] = {}
    for part in parts:
        steps = f"[{part.start}:{part.stop}]" if part.length else ""
        ranges.setdefault(steps, []).append(re.escape(part.whole))
    patterns = []
    for steps, paths in ranges.items():
        joined = "|".join(paths)
        patterns.append(f"(?:{joined}){steps}" if steps and len(paths) > 1 else joined + steps)
    return patterns


def _restricted(plan: Plan, base: Plan) -> Plan:
    """Returns a plan without the weights that `base` does not quantize, and without their sites."""
    base_paths = {weight.path for weight in base.weights}
    weights = tuple(weight for weight in plan.weights if weight.path in base_paths)
    paths = {weight.path for weight in weights}
    sites = tuple(
        site for site in plan.sites if any(operand.path in paths for operand in site.operands)
    )
    return dataclasses.replace(plan, weights=weights, sites=sites)


def _sizes(sweep: Sweep, unit: str) -> list[float]:
    """Returns the bytes of a unit in float, and under each plan."""
    sizes = [0.0] * (len(sweep.plans) + 1)
    for path in sweep.paths(unit):
        x = sweep.weights[path]
        sizes[0] += x.nbytes
        for i, q in enumerate(sweep.codes[path]):
            sizes[i + 1] += x.nbytes if q is None else bits_of(q) / 8
    return sizes


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Units, the bytes of each under every scheme, and the costs of the choices."""

    sweep: Sweep
    units: Sequence[str]
    sizes: Mapping[str, Sequence[float]]
    names: Sequence[str]
    budget: Bytes | Bits | Error

    @functools.cached_property
    def count(self) -> int:
        """The number of weights of the plan, as numbers."""
        return sum(w.size for w in self.sweep.weights.values())

    @property
    def most(self) -> float:
        """The maximum number of bytes; infinite if the budget is one of the metric."""
        return bytes_of(self.budget, self.count)

    def exact(self) -> list[Point]:
        """Returns all assignments that no other beats, fewest bytes first."""
        front = [Point(0.0, 0.0, ())]
        for unit in self.units:
            costs = [0.0, *(self.sweep({unit: i}) for i in range(1, len(self.names)))]
            longer = [
                Point(p.bytes + size, p.error + cost, (*p.schemes, name))
                for p in front
                for size, cost, name in zip(self.sizes[unit], costs, self.names, strict=True)
            ]
            front = _undominated(longer)
        return front

    def greedy(self) -> list[Point]:
        """Returns the assignments on the way from the fewest bytes to float."""
        state = {unit: min(range(len(s)), key=s.__getitem__) for unit, s in self.sizes.items()}
        front = [self._point(state)]
        while not self._is_met(front[-1]) or self.most < math.inf:
            steps = []
            for unit, sizes in self.sizes.items():
                for i, size in enumerate(sizes):
                    growth = size - sizes[state[unit]]
                    if growth > 0 and front[-1].bytes + growth <= self.most:
                        point = self._point({**state, unit: i})
                        steps.append(
                            ((front[-1].error - point.error) / growth, point, {**state, unit: i})
                        )
            if not steps or max(steps, key=lambda step: step[0])[0] <= 0:
                break
            _, point, state = max(steps, key=lambda step: step[0])
            front.append(point)
        return front

    def best(self, front: Sequence[Point], uniform: Sequence[Point]) -> tuple[Point, float]:
        """Returns the assignment that meets the budget with the least error, or with the fewest
        bytes, and its measured metric. Those of the front with the best predictions are measured.
        """
        met = [point for point in (*front, *uniform) if self._is_met(point)]
        if not met:
            words = in_words(self.budget)
            if isinstance(self.budget, Bits):
                words += f", {self.most:,.0f} bytes for {self.count:,} weights"
            detail = f"{type(self.budget).__name__}({self.budget.limit:g}): {words}"
            expected = self._smallest_budget(front)
            fix = "raise the budget, or add a candidate with fewer bits."
            problem = "no assignment meets the budget."
            raise fail(_NAME, problem, given=detail, expected=expected, fix=fix)
        if self.most < math.inf:
            likely = sorted(met, key=lambda point: (point.error, point.bytes))[:_MEASURED]
            trials = dict.fromkeys([*likely, *(point for point in uniform if point in met)])
            tried = [(point, self.measured(point.schemes)) for point in trials]
            return min(tried, key=lambda pair: (pair[1], pair[0].bytes))
        for point in sorted(met, key=lambda point: (point.bytes, point.error)):
            if (measured := self.measured(point.schemes)) <= self.budget.limit:
                return point, measured
        return front[-1], self.measured(front[-1].schemes)

    def uniform(self, name: str) -> Point:
        """Returns one scheme on all weights, with its measured metric."""
        return self._point(dict.fromkeys(self.units, self.names.index(name)))

    def measured(self, schemes: Sequence[str]) -> float:
        """Returns the metric of an assignment."""
        pairs = zip(self.units, schemes, strict=True)
        return self.sweep({unit: self.names.index(name) for unit, name in pairs})

    def _point(self, state: Mapping[str, int]) -> Point:
        size = sum(self.sizes[unit][i] for unit, i in state.items())
        return Point(size, self.sweep(dict(state)), tuple(self.names[i] for i in state.values()))

    def _is_met(self, point: Point) -> bool:
        if isinstance(self.budget, Error):
            return point.error <= self.budget.limit
        return point.bytes <= self.most

    def _smallest_budget(self, front: Sequence[Point]) -> str:
        """Returns the least budget that could be met, in its own units, rounded up."""
        if isinstance(self.budget, Error):
            return f"a metric of at least {min(p.error for p in front):.4g}"
        fewest = min(p.bytes for p in front)
        size = f"{math.ceil(fewest):,} bytes"
        if isinstance(self.budget, Bytes):
            return f"at least {size}, scales included"
        bits = math.ceil(100 * 8 * fewest / max(self.count, 1)) / 100
        return f"at least {bits:.2f} bits a weight, scales included ({size})"


def _undominated(points: Sequence[Point]) -> list[Point]:
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.bytes, p.error)):
        if not front or point.error < front[-1].error:
            front.append(point)
    return front
