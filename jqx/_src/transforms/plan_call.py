"""Makes a plan from a traced call and a policy: the rule of each contraction, then the specs of
weights and activations in their own axes.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import export

from ..checks import is_real
from ..contractions.problem import can_leave_sum
from ..errors import fail, message, some, warn
from ..policy import Policy, Rule
from ..tensor.grid import groups_of
from ..tensor.spec import QSpec
from .arguments import check_plan, operations_of, same_nesting
from .find import Found, contractions, contractions_with_reads, dtypes_of, rule_for, selecting
from .integers import unfollowed
from .known_values import NO_WEIGHT, reasons, unreached
from .paths import AGAIN, Part, Weights, addresses_of, check_ranks, check_same, without_addresses
from .plan import Operand, Plan, Shape, Site, Skipped, Weight
from .trace import Call, trace_call
from .unused_rules import check_inputs, check_used, warn_of_unused_alternatives
from .views import Address, Origin, close_over_merges

# The rule of each contraction, and the format of a weight with several uses.
#
# The uses of one weight are decided together, by the first rule of the policy that matches any of
# them. If one rule matches several uses, its entry for lookups decides. If the decision is float,
# the weight stays in float for all uses. If it is quantized, all uses take the same codes,
# including a use that no rule covers or that a later rule leaves in float.


MatchingRule = tuple[int, Rule] | None
"""A rule and its index in the policy."""


@dataclasses.dataclass(frozen=True)
class SiteDecision:
    """The decision for a contraction.

    Attributes:
      rule: its rule and the index of the rule; `None` if none matches.
      reason: why it stays in float; `None` if it is quantized.
      codes: the operation of the other use from which its weight takes its codes.
      specs: the spec of the weight in each operand; `None` for activations and weights in float.
      may_take: whether it may take codes that its weight has from another use, because no rule
        forbids it.
    """

    rule: MatchingRule
    reason: str | None
    codes: str | None = None
    specs: tuple[QSpec | None, ...] = ()
    may_take: bool = False


def choose(
    items: Sequence[Found],
    policy: Policy,
    dtypes: Mapping[str, Any],
    parts: Mapping[str, Part],
    unsupported: Mapping[str, str],
) -> tuple[list[SiteDecision], set[int]]:
    """Returns the decision for each contraction, and the indices of the rules that match one.

    `dtypes` are the dtypes of the parameters, `parts` those parameters that are parts of another,
    and `unsupported` those that cannot be quantized as planned, each with the reason.
    """
    rules = selecting(items, policy, parts)
    choices = [_choices(item, policy, rules, parts) for item in items]
    used = {choice[0] for choice_of_path in choices for choice in choice_of_path.values() if choice}
    uses = _uses(items, choices)
    first_use = {
        path: min(uses_of_path, key=lambda use: (use.rule_index, use.op != "gather"))
        for path, uses_of_path in uses.items()
    }
    floats = {path: use for path, use in first_use.items() if use and use.spec is None}
    floats |= {
        path: first_use[path]._replace(spec=None, reason=reason)
        for path, reason in unsupported.items()
    }
    decisions = [
        _by_own_rule(item, choice_of_path, dtypes)
        for item, choice_of_path in zip(items, choices, strict=True)
    ]
    _spread_floats(items, decisions, floats)
    results = [
        _with_other_uses(item, decision, first_use, floats)
        for item, decision in zip(items, decisions, strict=True)
    ]
    return results, used


def weights_of(item: Found) -> list[Origin]:
    """Returns the weights among the operands of a contraction; joined weights are separate."""
    return [part for origin in item.origins if origin for part in origin.parts]


class Use(NamedTuple):
    """What a rule specifies for a use of a weight; `reason` says why if it cannot be done."""

    rule_index: int
    path: str
    op: str
    spec: QSpec | None
    reason: str = ""


def _choices(
    item: Found, policy: Policy, selecting: Mapping[int, Rule], parts: Mapping[str, Part]
) -> dict[str, MatchingRule]:
    """Returns the rule for each path of a contraction."""
    has_weight = any(origin is not None for origin in item.origins)

    def of(path: str) -> MatchingRule:
        if path in parts:
            return rule_for(policy, parts[path], item.op, selecting)
        return policy.first(path, item.op, has_weight=has_weight)

    return {path: of(path) for path in item.paths}


def _uses(
    items: Sequence[Found], choices: Sequence[Mapping[str, MatchingRule]]
) -> dict[str, list[Use]]:
    uses = defaultdict(list)
    for item, choice_of_path in zip(items, choices, strict=True):
        general = next(iter(choice_of_path.values()))
        for path in {part.path for part in weights_of(item)}:
            choice = choice_of_path.get(path, general)
            if choice is not None:
                index, rule = choice
                uses[path].append(Use(index, path, item.op, rule.weight_for(item.op)))
    return uses


def _by_own_rule(
    item: Found, choices: Mapping[str, MatchingRule], dtypes: Mapping[str, Any]
) -> SiteDecision:
    """Returns the decision for a contraction by the rule that covers it, without regard to other
    uses of its weights.
    """
    choice = next(iter(choices.values()))
    if len({choice and choice[0] for choice in choices.values()}) > 1:
        names = " and ".join(map(repr, choices))
        several = sum(origin is not None for origin in item.origins) > 1
        how = "multiplied by each other" if several else "joined"
        explanation = f"the weights {names} are {how}, but fall under different rules"
        return SiteDecision(None, explanation)
    if item.reason is not None:
        return SiteDecision(choice, item.reason)
    operands = [v.aval.dtype for v in item.eqn.invars[: len(item.origins)]]
    integers = [part.path for part in weights_of(item) if not is_real(dtypes[part.path])]
    cast = next((part for part in weights_of(item) if part.cast), None)
    real = all(map(is_real, operands)) and not integers and cast is None
    if choice is None:
        reason = "no rule matches" if any(item.origins) else NO_WEIGHT
        return SiteDecision(None, reason, may_take=real)
    index, rule = choice
    weight, lookup = rule.weight_for(item.op), item.op == "gather"
    if weight is None and rule.output is None and (lookup or rule.activation is None):
        subject = "lookups" if lookup and rule.weight else "it"
        return SiteDecision(choice, f"rule {index} leaves {subject} in float", may_take=real)
    if cast is not None:
        return SiteDecision(choice, f"f rounds {cast.path!r} to {cast.cast}")
    if not all(map(is_real, operands)):
        names = " and ".join(dtype.name for dtype in operands)
        return SiteDecision(
            choice, f"operands are {names}, not floats{_OF_BITS * ('float' in names)}"
        )
    if integers:
        name = dtypes[integers[0]].name
        kind = f"{name}, not a float{_OF_BITS * name.startswith('float')}"
        return SiteDecision(choice, f"the parameter {integers[0]!r} is {kind}")
    specs = tuple(weight if origin else None for origin in item.origins)
    return SiteDecision(choice, None, specs=specs, may_take=True)


_OF_BITS = " of 16 bits or more"


def _spread_floats(
    items: Sequence[Found], decisions: Sequence[SiteDecision], floats: dict[str, Use]
) -> None:
    """Adds the weights that are multiplied together with a weight that stays in float."""
    previous = -1
    while previous != len(floats):
        previous = len(floats)
        for item, decision in zip(items, decisions, strict=True):
            paths = [part.path for part in weights_of(item)]
            use = next((floats[path] for path in paths if path in floats), None)
            if use and any(decision.specs):
                floats.update({path: use for path in paths if path not in floats})


def _with_other_uses(
    item: Found, decision: SiteDecision, first_use: Mapping[str, Use], floats: Mapping[str, Use]
) -> SiteDecision:
    """Returns the decision for a contraction, given the other uses of its weights."""
    paths = [part.path for part in weights_of(item)]
    tied = next((path for path in paths if path in floats), None)
    if tied is not None and any(decision.specs):
        return SiteDecision(decision.rule, _reason_of_float(tied, floats[tied]))
    if tied is not None or not decision.may_take:
        return decision
    specs = decision.specs or (None,) * len(item.origins)
    pairs = list(zip(item.origins, specs, strict=True))
    taken = [_use_with_codes(origin, spec, first_use) if origin else None for origin, spec in pairs]
    is_complete = all(use or not origin for use, origin in zip(taken, item.origins, strict=True))
    if not any(taken) or (decision.reason is not None and not is_complete):
        return decision
    source = next(use for use in taken if use)
    specs = tuple(use.spec if use else spec for use, spec in zip(taken, specs, strict=True))
    return SiteDecision(decision.rule or (source.rule_index, Rule()), None, source.op, specs)


def _use_with_codes(origin: Origin, spec: QSpec | None, first_use: Mapping[str, Use]) -> Use | None:
    """Returns the use from which a weight takes its codes, if it is another one: its own rule
    leaves it in float, or a rule for lookups in it decides otherwise.
    """
    uses = [first_use[part.path] for part in origin.parts if part.path in first_use]
    if len(uses) < len(origin.parts) or len({use.spec for use in uses}) > 1:
        return None
    use = uses[0]
    return use if spec is None or (use.op == "gather" and use.spec != spec) else None


def _reason_of_float(path: str, use: Use) -> str:
    if use.reason:
        also = f", and {path!r} is multiplied together with it"
        return use.reason + (also if path != use.path else "")
    subject, hint = f"{use.path!r}", ""
    if use.op == "gather":
        subject, hint = f"the lookup of {use.path!r}", 'pass tables="int8", or '
    explanation = "a weight is quantized for all its uses or for none"
    if path != use.path:
        explanation = f"{path!r} is multiplied together with it"
    text = f"rule {use.rule_index} leaves {subject} in float, and {explanation}"
    return f"{text}: {hint}put a rule for it first"


# Resolves specs of a plan to the axes of weights, and of activations at a site.


def resolve_weights(
    function: str,
    sites: Sequence[tuple[Site, Found]],
    shapes_of: Mapping[str, tuple[int, ...]],
) -> tuple[Weight, ...]:
    """Resolves the spec of every weight in its own axes; sites that share a weight must agree."""
    specs: dict[str, tuple[QSpec | None, int]] = {}
    kept_axes: dict[str, list[frozenset[int]]] = {}
    stacked: dict[str, list[frozenset[int]]] = {}
    merged: dict[str, set[frozenset[int]]] = {}
    summed: dict[str, set[frozenset[int]]] = {}
    moved: dict[str, set[int]] = defaultdict(set)
    cut: dict[str, set[int]] = defaultdict(set)
    counts: Counter[str] = Counter()
    for site, item in sites:
        for operand, origin, axes in zip(
            site.operands, item.origins, item.family.axes(item.eqn), strict=True
        ):
            if origin is None:
                continue
            counts.update({part.path for part in origin.parts})
            for part in origin.parts:
                path, rank = part.path, len(shapes_of[part.path])
                spec, index = specs.setdefault(path, (operand.spec, site.rule))
                if spec != operand.spec:
                    problem = f"two rules give the weight {path!r} different specs."
                    details = f"rule {index}: {spec}; rule {site.rule}: {operand.spec}"
                    fix = "let one rule match all its uses."
                    raise fail(function, problem, given=details, fix=fix)
                moved[path].update(axis - rank for axis, _ in part.moved)
                cut[path].update(axis - rank for axis, _ in part.cut)
                merged.setdefault(path, set()).update(part.merged)
                kept_axes.setdefault(path, []).append(part.kept(axes.kept, rank))
                stacked.setdefault(path, []).append(_stacked(part, axes.kept, axes.batch, rank))
                summed_axes = frozenset().union(*(part.dims[dim] for dim in axes.contracted))
                summed.setdefault(path, set()).update([summed_axes] if axes.contracted else [])
    weights = []
    for path, (spec, index) in specs.items():
        if spec is None:
            continue
        axes = close_over_merges(frozenset.intersection(*kept_axes[path]), merged[path])
        stack = frozenset.intersection(*stacked[path])
        where = f"weight {path!r}, rule {index}"
        try:
            resolved = spec.resolve(len(shapes_of[path]), sorted(axes), sorted(stack))
        except ValueError as error:
            raise ValueError(f"{error} Here it is {_GRANULARITY}, at {where}.") from None
        differ = len(set(kept_axes[path])) > 1
        for site_axes in kept_axes[path]:
            _check_kept(function, resolved, shapes_of[path], site_axes, where, tied=differ)
        is_last = summed[path] == {frozenset({len(shapes_of[path]) - 1})}
        contracted = -1 if is_last else None
        views = tuple(sorted(moved[path])), tuple(sorted(cut[path]))
        weights.append(Weight(path, resolved, f"{path}:weight", counts[path], contracted, *views))
    return tuple(weights)


_GRANULARITY = "jqx.per_channel() or jqx.per_group(size), which find the axes of a weight"


def _stacked(
    part: Origin, kept_dims: Sequence[int], batch: Sequence[int], rank: int
) -> frozenset[int]:
    """Returns the axes of a weight along which it is a stack of weights.

    They are in batch axes, or not in the value at all, which is then one of the stack. `vmap` makes
    no batch axis if all share the other operand. Then they are the axes in front of all contracted
    ones, of which the last is left to the weights themselves.
    """
    batch_axes, kept_axes = part.kept(batch, rank), part.kept(kept_dims, rank)
    contracted = min(frozenset(range(rank)) - kept_axes, default=0)
    return batch_axes | {axis for axis in sorted(kept_axes - batch_axes)[:-1] if axis < contracted}


def resolve_activation(
    function: str,
    spec: QSpec,
    shape: tuple[int, ...],
    kept_axes: Sequence[int],
    where: str,
    stacked: Sequence[int] = (),
) -> QSpec:
    """Resolves the spec of an activation, or of a result, in its own axes; `where` for errors."""
    if not spec.dynamic and spec.granularity.is_relative:
        problem = f"a static scale per token is bound to one batch size ({where})."
        fix = "pass dynamic=True, or granularity=jqx.per_tensor()."
        raise fail(function, problem, given=f"granularity {spec.granularity}", fix=fix)
    resolved = spec.resolve(len(shape), kept_axes, stacked)
    _check_kept(function, resolved, shape, kept_axes, where)
    return resolved


def _check_kept(
    function: str,
    spec: QSpec,
    shape: tuple[int, ...],
    kept_axes: Sequence[int] | frozenset[int],
    where: str,
    tied: bool = False,
) -> None:
    """Raises if each element that the contraction sums over has its own scale.

    With `tied`, other sites contract other axes of the same weight.
    """
    fix = f"use {_GRANULARITY}, or jqx.per_axis({', '.join(map(str, sorted(kept_axes)))})."
    if tied:
        fix = "its sites contract different axes: put a separate rule for it first, with "
        fix += "per_tensor(), or with blocks along all of them, such as per_block({0: 8, 1: 8})."
    try:
        groups = groups_of(function, spec, shape)
    except ValueError as error:
        raise ValueError(f"{error}\n  at:       {where}") from None
    if not can_leave_sum(groups, set(range(len(shape))) - set(kept_axes)):
        problem = f"the scale varies along a contracted axis ({where})."
        details = f"granularity {spec.granularity}; the contraction keeps axes {sorted(kept_axes)}"
        raise fail(function, problem, given=details, fix=fix)


NOTHING: Mapping[str, str] = MappingProxyType({})


def signature_of(call: Call, items: Sequence[Found], *, axes: bool = True) -> tuple[str, ...]:
    """Returns one line per parameter and contraction, without batch sizes.

    `axes=False` leaves out the position of a weight's axes in the contracted operand, as plans of
    jqx 0.1.0 do.
    """
    lines = [*call.lines]
    for item in items:
        operands = [_described(origin, axes) if origin else "-" for origin in item.origins]
        pattern = item.family.pattern(item.eqn)
        lines.append(f"contraction {item.address} {item.op}{pattern} of {' and '.join(operands)}")
    return tuple(lines)


def _described(origin: Origin, axes: bool) -> str:
    """Returns the paths of a weight, or of joined ones; a transposed one is such as `w[1,0]`."""
    if not axes:
        return origin.name
    dims = [
        ["&".join(map(str, sorted(axes_of_dim))) for axes_of_dim in part.dims]
        for part in origin.parts
    ]
    named = zip(origin.parts, dims, strict=True)
    return "+".join(
        dict.fromkeys(f"{part.path}[{','.join(axes_of_dim)}]" for part, axes_of_dim in named)
    )


def plan_of_function(
    function: str, f: Callable[..., Any], plan: Plan, args: Sequence[Any], fix: str
) -> tuple[Plan, Call]:
    """Returns a plan with the addresses of a function, and the function traced at such arguments.
    Raises if it is not the one that the plan is for.
    """
    call = trace_call(function, f, plan.parameters, args, {}, lazy=True)
    return _fitted(function, plan, call, contractions(call), fix), call


def _fitted(
    function: str, plan: Plan, call: Call, items: Sequence[Found], fix: str = AGAIN
) -> Plan:
    """Returns a plan with the addresses of a function, which differ in plans of jqx 0.1, and where
    other parts of it are under jit or remat. Raises if the plan is for another function.
    """
    signature = signature_of(call, items)
    if plan.signature in (signature, signature_of(call, items, axes=False)):
        return plan
    old_items = contractions_with_reads(call)
    older = signature_of(call, old_items), signature_of(call, old_items, axes=False)
    if plan.signature in older and len(old_items) == len(items):
        return _renumbered(plan, [item.address for item in old_items], items, signature)
    alike = without_addresses(signature) == without_addresses(plan.signature)
    if alike and same_nesting(function, plan.operations, call.jaxpr):
        return _renumbered(plan, addresses_of(plan.signature), items, signature)
    check_ranks(function, plan, items)
    check_same(function, signature, plan.signature, fix)
    return plan


def _renumbered(
    plan: Plan,
    old_addresses: Sequence[Address],
    new_items: Sequence[Found],
    signature: tuple[str, ...],
) -> Plan:
    """Returns a plan with the addresses of contractions found in place of those before."""
    items = dict(zip(old_addresses, new_items, strict=True))
    new = {old: item.address for old, item in items.items()}
    sites = [
        dataclasses.replace(
            site, address=items[site.address].address, loops=items[site.address].loops
        )
        for site in plan.sites
    ]
    skipped = [dataclasses.replace(item, address=new[item.address]) for item in plan.skipped]
    return dataclasses.replace(
        plan, sites=tuple(sites), skipped=tuple(skipped), signature=signature
    )


def plan_call(
    function: str,
    call: Call,
    policy: Policy,
    weights: Weights,
    items: list[Found] | None = None,
    floats: Mapping[str, str] = NOTHING,
) -> Plan:
    """Plans a traced call; `items` are its contractions, if known. `floats` are weights that cannot
    be quantized as planned, each with the reason.
    """
    items = contractions(call) if items is None else items
    dtypes = dtypes_of(call)
    decisions, used = choose(items, policy, dtypes, call.parts, floats)
    sites: list[tuple[Site, Found]] = []
    skipped: list[Skipped] = []
    integers: dict[str, str] = {}  # parameters of integers that rules cover
    numbers: Counter[str] = Counter()
    reason_of: dict[int, str] | None = None
    for item, choice in zip(items, decisions, strict=True):
        reason = choice.reason
        if reason is not None:
            if reason == NO_WEIGHT:
                reason_of = reasons(call) if reason_of is None else reason_of
                reason = reason_of.get(id(item.eqn), reason)
            rule = choice.rule and choice.rule[1].weight_for(item.op)
            is_float = jnp.issubdtype(item.eqn.outvars[0].aval.dtype, jnp.floating)
            if rule is not None and item.op != "gather" and is_float:
                for path in item.paths:
                    if path in dtypes and jnp.issubdtype(dtypes[path], jnp.integer):
                        integers[path] = str(dtypes[path])
            shapes = tuple(_named(v.aval.shape) for v in item.eqn.invars[:2])
            macs = _known(item.family.macs(item.eqn))
            skipped.append(Skipped(item.address, item.path, item.op, reason, shapes, macs))
            continue
        name = f"{item.path}:{item.op}"
        numbers[name] += 1
        if numbers[name] > 1:
            name = f"{name}#{numbers[name] - 1}"
        sites.append((_site(function, item, choice, name), item))
    check_used(function, policy, used, items, skipped, call)
    warn_of_unused_alternatives(function, policy, items, call)
    if integers:
        problem = "the policy covers parameters of integers, which stay as they are."
        details = some(f"{path!r} of {dtype}" for path, dtype in integers.items())
        fix = "pass the float weights, x.astype(jnp.float32); or leave these out of the policy, by "
        fix += "a rule that gives them no format."
        warn(message(function, problem, given=details, fix=fix))
    check_inputs(
        function,
        call,
        [item for site, item in sites if any(x.role == "weight" and x.spec for x in site.operands)],
        weights,
    )
    shapes_of = {
        path: tuple(leaf.shape)
        for leaf, path in zip(call.leaves, call.paths, strict=True)
        if path is not None
    }
    plan = Plan(
        sites=tuple(site for site, _ in sites),
        skipped=tuple(skipped),
        weights=resolve_weights(function, sites, shapes_of),
        params=weights.params,
        signature=signature_of(call, items),
        names=call.names,
        unreached=unreached(call, items),
        splits=call.splits,
        operations=operations_of(call.jaxpr),
    )
    unsupported = unfollowed(call, plan, sites)
    return (
        plan_call(function, call, policy, weights, items, {**floats, **unsupported})
        if unsupported
        else plan
    )


def _site(function: str, item: Found, choice: SiteDecision, name: str) -> Site:
    assert choice.rule is not None
    index, rule = choice.rule
    kept_axes, batch = item.family.kept(item.eqn), item.family.batch(item.eqn)
    operands = []
    for side, origin, weight, axes, stacked, atom in zip(
        ("lhs", "rhs"), item.origins, choice.specs, kept_axes, batch, item.eqn.invars, strict=False
    ):
        key = f"{name}:{side}"
        if origin is not None:
            dims = tuple(tuple(sorted(axes)) for axes in origin.dims)
            as_they_are = dims == tuple((axis,) for axis in range(len(dims)))
            axes_held = () if as_they_are else dims
            operands.append(Operand("weight", weight, key, origin.path, axes_held))
            continue
        spec = rule.activation
        if spec is not None:
            where = f"{side} of {item.op} at path {item.path!r}, rule {index}"
            spec = resolve_activation(function, spec, atom.aval.shape, axes, where, stacked)
        operands.append(Operand("activation", spec, key))
    output = rule.output
    if output is not None:
        shape = item.eqn.outvars[0].aval.shape
        where = f"output of {item.op} at path {item.path!r}, rule {index}"
        output = resolve_activation(function, output, shape, range(len(shape)), where)
    return Site(
        address=item.address,
        path=item.path,
        scope=item.scope,
        op=item.op,
        operands=tuple(operands),
        output=output,
        output_key=f"{name}:out",
        rule=index,
        loops=item.loops,
        shapes=tuple(_named(v.aval.shape) for v in item.eqn.invars[:2]),
        result=_named(item.eqn.outvars[0].aval.shape),
        macs=_known(item.family.macs(item.eqn)),
        codes=choice.codes,
    )


def _named(shape: Sequence[Any]) -> Shape:
    """Returns a shape in which symbolic sizes of `jax.export` are replaced by their names."""
    return tuple(str(n) if export.is_symbolic_dim(n) else int(n) for n in shape)


def _known(number: Any) -> int | None:
    return None if export.is_symbolic_dim(number) else int(number)


def as_plan(function: str, plan: Plan | Policy, call: Call, weights: Weights) -> Plan:
    """Returns the plan of a call: the given one, after checking that it fits, or a policy's."""
    return with_contractions(function, plan, call, weights)[0]


def with_contractions(
    function: str, plan: Plan | Policy, call: Call, weights: Weights
) -> tuple[Plan, list[Found]]:
    """Returns the plan of a call, as `as_plan` does, and the contractions of the call."""
    items = contractions(call)
    if isinstance(plan, Policy):
        return plan_call(function, call, plan, weights, items), items
    if signature_of(call, items) != plan.signature:
        plan = _fitted(function, plan, call, items)
    return plan, items


def params_of(function: str, plan: Any) -> Weights:
    """Returns the arguments that hold weights, after checking that `plan` is a Plan or a Policy."""
    check_plan(function, plan, order=f"{function}(f, plan)", policies=True)
    return plan.parameters if isinstance(plan, Plan) else Weights(0, splits=plan)
