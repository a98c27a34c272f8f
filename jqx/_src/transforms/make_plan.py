"""`make_plan`: from a function and a policy to a plan. Nothing is computed. A plan has the rule of
each contraction, and the specs of weights and activations in their own axes.
"""

import dataclasses
import difflib
import fnmatch
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import export

from ..checks import called, is_real
from ..contractions.problem import OperandAxes, can_leave_sum
from ..errors import fail, message, some, warn
from ..policy import Policy, Rule, check_policy
from ..signatures import P
from ..tensor.grid import groups_of
from ..tensor.spec import QSpec
from .arguments import check_function, check_plan, fitted_plan, operations_of, signature_of
from .find import Found, contractions, dtypes_of, find, rule_for, selecting, selects
from .hoist import Hoisted
from .integers import check_reach, unfollowed
from .known_values import NO_WEIGHT, check_unsupported, reasons, sources, unreached
from .paths import Names, Params, Part, Weights, check_names
from .plan import Operand, Plan, Shape, Site, Skipped, Weight
from .trace import Call, TracedOnce, as_params, trace_call
from .views import Origin, close_over_merges


@called("make_plan", "call it in two steps: jqx.make_plan(f, policy)(params, x).")
def make_plan(
    f: Callable[P, Any],
    policy: Policy,
    *,
    params: Params = 0,
    names: Names = None,
    unsupported: str = "error",
) -> Callable[P, Plan]:
    """Returns a function of the arguments of `f` that plans which contractions are quantized, and
    how.

    The uses of one weight are decided together, by the first rule that matches any of them: all
    take the same codes, or all stay in float. Code that no result needs is not part of a plan.

    If rules select steps of a scan over stacked weights, such as `layers[0]`, `layers[-2:]` or
    `layers[1:3]/mlp/.*`, the scan is split there. Each part is a scan, and its contractions are
    sites with paths such as `layers/w[0:1]`, which rules may use again. Negative steps count from
    the end. All weights that the scan steps over are split with it (as are other scans over them):
    `quantize_params` makes them `jqx.Segments`. The scan may be inside jit, remat, cond, while and
    other scans, and its weights may pass through views that keep the steps apart.

    If an alternative in the path of a rule matches nothing, as in `(embed|haed)/kernel`, and the
    rule is not optional, a `UserWarning` names it.

    Args:
      f: any JAX function; it is traced, never changed.
      policy: an ordered list of rules; the first that matches a contraction applies.
      params: position, or positions, of the arguments that hold weights.
      names: names to use instead of key paths, for rules, plans and scales. Either a dict such as
        `{"0": "embed", "cache": None}`, which renames a path and everything below it (`None`: it
        holds no weights), or a function from a tuple of JAX's keys to a name. The plan keeps the
        names. By default a name is the keys joined by `/`, without the key of the value of an
        `nnx.Variable`.
      unsupported: what to do if a weight to be quantized also reaches an operation without a
        quantized form: `"error"`, or `"dequantize"` to plan it for `jqx.convert` with the same
        argument. (`jqx.simulate` runs it in any case.)

    Returns:
      `plan(*args, **kwargs) -> Plan`, where the arguments may be arrays or
      `jax.ShapeDtypeStruct` values. The plan holds for any batch size. For type checkers its
      parameters are those of `f`, and a `jax.ShapeDtypeStruct` is not an array: pass the result of
      `jax.eval_shape`, or use `typing.cast`.

    Raises:
      TypeError: if `f` is not a function, `policy` is not a `Policy`, or a name is not a string.
      ValueError: if a rule matches nothing; if two rules give one weight different specs; if a spec
        does not fit its contraction; if a path in `names` does not exist; if two weights have the
        same name; or if a rule selects steps that a scan does not have, or steps over more than one
        axis of the weight.
      NotImplementedError: if a weight to be quantized reaches an operation without a quantized form
        (this error is also a ValueError, since another policy fits); or if a scan would be split
        inside a `shard_map` or a custom derivative rule, or a weight reaches it through an
        operation that mixes its steps.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> def f(params, x):
      ...     return jax.nn.relu(x @ params["w"]) @ params["v"].T
      >>> params = {"w": jnp.ones((4, 8)), "v": jnp.ones((3, 8))}
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8_dynamic())(params, jnp.ones((2, 4)))
      >>> [(weight.path, str(weight.spec)) for weight in plan.weights]
      [('w', 'int8 per_axis(1)'), ('v', 'int8 per_axis(0)')]
    """
    check_function("make_plan", f)
    check_policy("make_plan", policy)
    check_unsupported("make_plan", unsupported)
    check_names("make_plan", names)
    weights = Weights(as_params("make_plan", params), names, splits=policy)
    return planner(f, policy, weights, unsupported)


def planner(
    f: Callable[..., Any], policy: Policy, weights: Weights, unsupported: str = "error"
) -> Callable[..., Plan]:
    """Returns the result of `make_plan`; weights may be split differently from the policy."""

    def plan(*args: Any, **kwargs: Any) -> Plan:
        call = trace_call("make_plan", f, weights, args, kwargs, lazy=True)
        planned = plan_call("make_plan", call, policy, weights)
        if unsupported == "error":
            check_reach("make_plan", call, planned)
        function = f.f if isinstance(f, TracedOnce) else f
        if isinstance(function, Hoisted):
            planned = dataclasses.replace(planned, hoisted=function.hoisting)
        return planned

    return plan


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

    def matching_rule(item: Found, path: str) -> MatchingRule:
        if path in parts:
            return rule_for(policy, parts[path], item.op, rules)
        has_weight = any(origin is not None for origin in item.origins)
        return policy.first(path, item.op, has_weight=has_weight)

    choices = [{path: matching_rule(item, path) for path in item.paths} for item in items]
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
    uses: dict[str, list[tuple[str, Origin, OperandAxes]]] = defaultdict(list)
    convolved = set[str]()
    for site, item in sites:
        for operand, origin, axes in zip(
            site.operands, item.origins, item.family.axes(item.eqn), strict=True
        ):
            for part in origin.parts if origin else ():
                spec, index = specs.setdefault(part.path, (operand.spec, site.rule))
                if spec != operand.spec:
                    problem = f"two rules give the weight {part.path!r} different specs."
                    details = f"rule {index}: {spec}; rule {site.rule}: {operand.spec}"
                    fix = "let one rule match all its uses."
                    raise fail(function, problem, given=details, fix=fix)
                uses[part.path].append((operand.key, part, axes))
                if site.op == "conv_general_dilated":  # reads codes in the order of their axes
                    convolved.add(part.path)
    weights = []
    for path, (spec, index) in specs.items():
        if spec is None:
            continue
        rank, views = len(shapes_of[path]), [(part, axes) for _, part, axes in uses[path]]
        kept_axes = [part.kept(axes.kept, rank) for part, axes in views]
        stacked = [_stacked(part, axes.kept, axes.batch, rank) for part, axes in views]
        merged = {group for part, _ in views for group in part.merged}
        axes_of_site = close_over_merges(frozenset.intersection(*kept_axes), merged)
        where = f"weight {path!r}, rule {index}"
        try:
            stack = sorted(frozenset.intersection(*stacked))
            resolved = spec.resolve(rank, sorted(axes_of_site), stack)
        except ValueError as error:
            raise ValueError(f"{error} Here it is {_GRANULARITY}, at {where}.") from None
        differ = len(set(kept_axes)) > 1
        for site_axes in kept_axes:
            _check_kept(function, resolved, shapes_of[path], site_axes, where, tied=differ)
        summed = {
            frozenset().union(*(part.dims[dim] for dim in axes.contracted))
            for part, axes in views
            if axes.contracted
        }
        contracted = -1 if summed == {frozenset({rank - 1})} else None
        moved = {axis - rank for part, _ in views for axis, _ in part.moved}
        moved |= {-2, -1} if path in convolved else set()
        cut = tuple(sorted({axis - rank for part, _ in views for axis, _ in part.cut}))
        count, key = len({key for key, _, _ in uses[path]}), f"{path}:weight"
        weights.append(Weight(path, resolved, key, count, contracted, tuple(sorted(moved)), cut))
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
        products=rule.products,
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
        plan = fitted_plan(function, plan, call, items)
    return plan, items


def params_of(function: str, plan: Any) -> Weights:
    """Returns the arguments that hold weights, after checking that `plan` is a Plan or a Policy."""
    check_plan(function, plan, order=f"{function}(f, plan)", policies=True)
    return plan.parameters if isinstance(plan, Plan) else Weights(0, splits=plan)


_MOST = 8
"""How many paths the error lists."""


# The error of a rule of a policy that matches no contraction, the warning about alternatives that
# match nothing, and the error of an input that is planned as a weight.


def check_used(
    function: str,
    policy: Policy,
    used: set[int],
    items: Sequence[Found],
    skipped: Sequence[Skipped],
    call: Call,
) -> None:
    """Raises if a rule that is not optional was not used."""
    for index, rule in enumerate(policy.rules):
        if index not in used and not rule.optional:
            problem, facts, fix = _why_unused(rule, items, skipped, call)
            problem = f"rule {index} of the policy matches no contraction{problem}"
            paths = sorted({path for item in items for path in item.paths})
            expected = f"a match; paths are: {shown_paths(rule.path, paths)}"
            raise fail(function, problem, given=facts, expected=expected, fix=fix)


def _why_unused(
    rule: Rule, items: Sequence[Found], skipped: Sequence[Skipped], call: Call
) -> tuple[str, str, str]:
    """Returns the end of the problem, what is known about the rule, and what to do."""
    parts = call.parts

    def is_covered(path: str, item: Found) -> bool:
        stack = parts[path].whole if path in parts else path
        matches = rule.matches(stack, item.op, has_weight=any(item.origins))
        return matches or (path in parts and selects(rule, parts[path], item.op))

    is_shadowed = any(is_covered(path, item) for item in items for path in item.paths)
    facts = [str(rule)]
    if rule.selector is not None and not is_shadowed:
        facts.append(f"no scan steps over a weight at {rule.selector.base!r}")
    weights = {item.path for item in items if any(item.origins)}
    named = [path for path in call.paths if path is not None]
    if any(re.fullmatch(rule.path, path) for path in (*named, *(x.path for x in skipped))):
        others = [x for x in skipped if x.path not in weights]
        facts += [f"at {x.path!r} {x.reason}" for x in others][:2]
    fix = "pass the weights in an argument of f, and its position as params=."
    if weights:
        fix = _fix(rule, sorted({path for item in items for path in item.paths}), is_shadowed)
    elif any("jqx.hoist" in text for text in facts):
        fix = "compute them first: g, computed = jqx.hoist(f)(params, x), and plan g."
    elif any("does not look into" in text for text in facts):
        fix = "pass a function that computes the same to jqx.extend.primitive_rules."
    problem = " that an earlier rule has not taken." if is_shadowed else "."
    return problem, "; ".join(dict.fromkeys(facts)), fix


def shown_paths(pattern: str, paths: Sequence[str]) -> str:
    """Returns paths as text: of many, those that are most similar to a pattern."""
    similar = paths
    if len(paths) > _MOST:
        similar = difflib.get_close_matches(pattern, paths, n=_MOST, cutoff=0)
    ending = f" and {len(paths) - len(similar)} more" if len(paths) > len(similar) else ""
    return (", ".join(map(repr, similar)) or "(none)") + ending


def _fix(rule: Rule, paths: Sequence[str], is_shadowed: bool) -> str:
    operation = _OPS.get((rule.op or "").lower())
    if operation is not None and any(re.fullmatch(rule.path, path) for path in paths):
        return f"the operation is called {operation!r}: write op={operation!r}, or leave it out."
    hint = None if is_shadowed else near_path(rule.path, paths)
    if hint is None:
        return "correct its path or op, move it up, or pass optional=True."
    return f"{hint} Or pass optional=True." if hint.endswith("?") else hint


_OPS = {
    **dict.fromkeys(("matmul", "dot", "linear", "dense", "einsum", "bmm", "mm"), "dot_general"),
    **dict.fromkeys(("conv", "conv1d", "conv2d", "conv3d", "convolution"), "conv_general_dilated"),
    **dict.fromkeys(("embedding", "embed", "take", "lookup"), "gather"),
}
"""Operations by the names that others give them."""


_ALL = ("", "*", "all", "default", "any", "everything")


def near_path(pattern: str, paths: Sequence[str]) -> str | None:
    """Returns the path that a pattern without a match is likely to mean, as a hint; `None` if there
    is none.
    """
    for path in paths:
        for parent in accumulate(path.split("/")[:-1], "{}/{}".format):
            if re.fullmatch(pattern, parent):
                return f"a path must match in full, such as {path!r}: write '{parent}/.*'."
    if pattern.lower() in _ALL:
        return "write '.*', which matches every path."
    if pattern in paths:
        return f"it is a regular expression: write {re.escape(pattern)!r}."
    globbed = [path for path in paths if "*" in pattern and fnmatch.fnmatchcase(path, pattern)]
    if globbed:
        text = re.sub(r"(?<!\.)\*+", ".*", pattern)
        return f"it is a regular expression, in which any text is '.*': write {text!r}."
    plain = "/".join(re.findall(r"[^\[\]'\"./]+", pattern))  # PyTorch's dots, JAX's brackets
    for text in (plain, plain.partition("/")[2], plain.rpartition("/")[0]):
        if text and text in paths:
            return f"did you mean {text!r}?"
    close = difflib.get_close_matches(pattern, paths, n=1, cutoff=0.75)
    return f"did you mean {close[0]!r}?" if close else None


_GROUP = re.compile(r"([^(|\\[]*)\((?:\?:)?([^()\\[?+{]+)\)(?![?*+{])([^(|\\[]*)|([^()\\[{]+)()()")
"""A path with one flat group of alternatives, or with alternatives and no group."""


def warn_of_unused_alternatives(
    function: str, policy: Policy, items: Sequence[Found], call: Call
) -> None:
    """Warns of an alternative in the path of a rule, such as `none` in `(embed|none)/kernel`, that
    matches no path of a parameter or contraction. Only paths that `_GROUP` describes are examined.
    """
    paths_of_sites = sorted({path for item in items for path in item.paths})
    paths = {
        *paths_of_sites,
        *(part.whole for part in call.parts.values()),
        *filter(None, call.paths),
    }
    for index, rule in enumerate(policy.rules):
        match = _GROUP.fullmatch(rule.path)
        if rule.optional or match is None or "|" not in rule.path:
            continue
        prefix, group, suffix, options = match.group(1, 2, 3, 4)
        texts = (group or options).split("|")
        patterns = {text: f"{prefix or ''}{text}{suffix or ''}" for text in texts}
        used = [t for t in texts if any(re.fullmatch(patterns[t], path) for path in paths)]
        if (unused := [t for t in texts if t not in used]) and all(texts):
            others = [path for path in paths_of_sites if not re.fullmatch(rule.path, path)]
            hint = near_path(patterns[unused[0]], others) or "correct the path."
            problem = f"rule {index} of the policy has alternatives without a match."
            details = f"{', '.join(map(repr, unused))} in {rule}"
            fix = f"{hint} Or drop them, or pass optional=True for a policy of several models."
            warn(message(function, problem, given=details, fix=fix))


def check_inputs(function: str, call: Call, planned: Sequence[Found], weights: Weights) -> None:
    """Raises if the only array of the weights' argument is an input in all its products:
    `f(x, params)` planned without `params=1`, or `f(x)` that closes over its weights. Without this
    error the plan would look complete, and `quantize_params` would quantize the batch.

    `planned` are the contractions with a quantized weight.
    """
    is_array = [path for path in call.paths if path is not None] == [""]
    keys = _keys_of_weights(call, planned) if is_array else None
    if not isinstance(weights.params, int) or keys is None:
        return
    aval = call.jaxpr.invars[call.paths.index("")].aval
    problem = f"argument {weights.params}, {aval.dtype}{list(aval.shape)}, is planned as the "
    fix = "pass the weights as an argument, f(params, x), or use jqx.nnx.quantize."
    if keys and keys[0].idx == 0:
        fix = f"pass params={keys[1].idx} to jqx.make_plan."
    elif keys:
        fix = f"pass {keys[1].key} by position, and that position as params=."
    fix += f" (If it is the weight: params=({weights.params},).)"
    problem += "weight, but looks like the input of `f`."
    raise fail(function, problem, fix=fix)


def _keys_of_weights(call: Call, planned: Sequence[Found]) -> tuple[Any, ...] | None:
    """Returns the keys of the argument that holds the weights which an array that is planned as a
    weight is multiplied by; `()` if `f` closes over them; `None` if the array may be a weight.

    The array is an input where it is on the left, or alone contracts its last axis, and meets a
    matrix of a tree in another argument or, if no other argument is in a product, one that `f`
    closes over.
    """
    sides = {item.address: item.origins.index(None) for item in planned if None in item.origins}
    leaves = call.jaxpr.invars
    origins = [Origin.of_leaf(str(i), len(leaf.aval.shape)) for i, leaf in enumerate(leaves)]
    items, _ = find(call.jaxpr, origins)
    sources_of = sources(call)
    partners: set[tuple[Any, ...]] = set()
    for item in items:
        if item.address not in sides:
            continue
        side, origin = sides[item.address], item.origins[sides[item.address]]
        parts = [int(part.path) for part in origin.parts] if origin else []
        is_closed_over = origin is None and sources_of[id(item.eqn)][side].is_closed_over
        avals = [leaves[i].aval for i in parts] or [item.eqn.invars[side].aval]
        is_partner = all(map(_is_matrix, avals)) and all(len(call.keys[i]) > 2 for i in parts)
        if not (_is_input(item, 1 - side) and is_partner and (parts or is_closed_over)):
            return None
        partners.update([call.keys[i][:2] for i in parts] or [()])
    multiplied = {int(part.path) for x in items for o in x.origins if o for part in o.parts}
    matrices = {i for i in multiplied if _is_matrix(leaves[i].aval) and call.paths[i] != ""}
    is_clear = len(partners) == 1 and not (partners == {()} and matrices)
    return partners.pop() if is_clear else None


def _is_matrix(aval: Any) -> bool:
    return len(aval.shape) > 1 and jnp.issubdtype(aval.dtype, jnp.floating)


def _is_input(item: Found, side: int) -> bool:
    """Whether an operand of a product stands where inputs do."""
    pairs = zip(item.family.kept(item.eqn), item.eqn.invars, strict=False)
    is_last = [len(operand.aval.shape) - 1 not in axes for axes, operand in pairs]
    return is_last[side] if item.op == "dot_general" and is_last[0] != is_last[1] else side == 0
