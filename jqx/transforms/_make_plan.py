"""`make_plan`: from a function and a policy to a plan. Nothing is computed."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import export

from .._checks import check_instance, require_that
from .._errors import message
from ..contractions import can_leave_sum
from ..policy import Policy, Rule
from ..tensor import QSpec, groups_of
from ._find import Found, find
from ._origin import Origin, close_over_merges
from ._plan import Operand, Plan, Shape, Site, Skipped, Weight, parameter_line
from ._reasons import NO_WEIGHT, reasons
from ._trace import Call, Params, as_params, check_function, trace_call


def make_plan(f: Callable[..., Any], policy: Policy, *, params: Params = 0) -> Callable[..., Plan]:
    """Returns a function of the arguments of `f` that decides which contractions are quantized, and
    how.

    Args:
      f: any JAX function; it is traced, never changed.
      policy: rules; the first that matches a contraction wins.
      params: position, or positions, of the arguments that hold weights.

    Returns:
      `plan(*args, **kwargs) -> Plan`, where the arguments may be arrays or `jax.ShapeDtypeStruct`s.
      The plan holds for any batch size.

    Raises:
      TypeError: `f` is no function or `policy` no `Policy`.
      ValueError: a rule matches nothing, two rules give one weight different specs, or a spec does
        not fit the contraction it is for.

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
    check_instance(
        "make_plan",
        "policy",
        policy,
        Policy,
        mend="pass jqx.presets.w8a8(), or jqx.Policy([rule, ...]).",
    )
    params = as_params("make_plan", params)

    def plan(*args: Any, **kwargs: Any) -> Plan:
        return plan_call(
            "make_plan", trace_call("make_plan", f, params, args, kwargs), policy, params
        )

    return plan


def contractions(call: Call) -> list[Found]:
    """Returns the contractions of a traced call, in order."""
    origins = [
        None if path is None else Origin.of_leaf(path, len(leaf.shape))
        for leaf, path in zip(call.leaves, call.paths, strict=True)
    ]
    return find(call.jaxpr, origins)[0]


def signature_of(call: Call, found: Sequence[Found]) -> tuple[str, ...]:
    """Returns one line per parameter and contraction, without batch sizes."""
    lines = [
        parameter_line(path, leaf)
        for leaf, path in zip(call.leaves, call.paths, strict=True)
        if path is not None
    ]
    for item in found:
        paths = [origin.name if origin else "-" for origin in item.origins]
        pattern = item.family.pattern(item.eqn)
        lines.append(f"contraction {item.address} {item.op}{pattern} of {' and '.join(paths)}")
    return tuple(lines)


def plan_call(function: str, call: Call, policy: Policy, params: Params) -> Plan:
    """Plans a traced call."""
    found = contractions(call)
    shapes_of = {
        path: tuple(leaf.shape)
        for leaf, path in zip(call.leaves, call.paths, strict=True)
        if path is not None
    }
    sites: list[tuple[Site, Found]] = []
    skipped: list[Skipped] = []
    used: set[int] = set()
    numbers: Counter[str] = Counter()
    why: dict[int, str] | None = None
    for item in found:
        choices = _choices(item, policy)
        used.update(choice[0] for choice in choices.values() if choice)
        place, rule, reason = _choose(item, choices)
        if reason is not None:
            if reason == NO_WEIGHT:
                why = reasons(call) if why is None else why
                reason = why.get(id(item.eqn), reason)
            shapes = tuple(_named(v.aval.shape) for v in item.eqn.invars[:2])
            macs = _known(item.family.macs(item.eqn))
            skipped.append(Skipped(item.address, item.path, item.op, reason, shapes, macs))
            continue
        assert place is not None and rule is not None
        name = f"{item.path}:{item.op}"
        numbers[name] += 1
        if numbers[name] > 1:
            name = f"{name}#{numbers[name] - 1}"
        sites.append((_site(function, item, place, rule, name), item))
    _check_used(function, policy, used, found, skipped)
    return Plan(
        sites=tuple(site for site, _ in sites),
        skipped=tuple(skipped),
        weights=_weights(function, sites, shapes_of),
        params=params,
        signature=signature_of(call, found),
    )


Choice = tuple[int, Rule] | None
"""A rule and its place in the policy."""


def _choices(item: Found, policy: Policy) -> dict[str, Choice]:
    """Returns the rule for each path of a contraction."""
    has_weight = any(origin is not None for origin in item.origins)
    return {path: policy.first(path, item.op, has_weight=has_weight) for path in item.paths}


def _choose(item: Found, choices: dict[str, Choice]) -> tuple[int | None, Rule | None, str | None]:
    """Returns the rule for a contraction, or why it stays in float."""
    choice = next(iter(choices.values()))
    if len({choice and choice[0] for choice in choices.values()}) > 1:
        names = " and ".join(map(repr, choices))
        return None, None, f"the weights {names} are joined, but fall under different rules"
    if item.reason is not None:
        return choice[0] if choice else None, None, item.reason
    if choice is None:
        reason = "no rule matches"
        if not any(item.origins):
            reason = NO_WEIGHT
        return None, None, reason
    place, rule = choice
    if rule.weight is None and rule.activation is None and rule.output is None:
        return place, rule, f"rule {place} leaves it in float"
    dtypes = [v.aval.dtype for v in item.eqn.invars[: len(item.origins)]]
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return place, rule, f"operands are {' and '.join(dtype.name for dtype in dtypes)}, not real"
    return place, rule, None


def _site(function: str, item: Found, place: int, rule: Rule, name: str) -> Site:
    kept = item.family.kept(item.eqn)
    operands = []
    for side, origin, axes, atom in zip(
        ("lhs", "rhs"), item.origins, kept, item.eqn.invars, strict=False
    ):
        key = f"{name}:{side}"
        if origin is not None:
            operands.append(Operand("weight", rule.weight, key, origin.path))
            continue
        spec = rule.activation
        if spec is not None:
            where = f"{side} of {item.op} at path {item.path!r}, rule {place}"
            spec = _resolve_activation(function, spec, atom.aval.shape, axes, where)
        operands.append(Operand("activation", spec, key))
    output = rule.output
    if output is not None:
        shape = item.eqn.outvars[0].aval.shape
        where = f"output of {item.op} at path {item.path!r}, rule {place}"
        output = _resolve_activation(function, output, shape, range(len(shape)), where)
    return Site(
        address=item.address,
        path=item.path,
        scope=item.scope,
        op=item.op,
        operands=tuple(operands),
        output=output,
        output_key=f"{name}:out",
        rule=place,
        loops=item.loops,
        shapes=tuple(_named(v.aval.shape) for v in item.eqn.invars[:2]),
        result=_named(item.eqn.outvars[0].aval.shape),
        macs=_known(item.family.macs(item.eqn)),
    )


def _named(shape: Sequence[Any]) -> Shape:
    """Returns a shape with the names of symbolic sizes, of `jax.export`, in their place."""
    return tuple(str(n) if export.is_symbolic_dim(n) else int(n) for n in shape)


def _known(number: Any) -> int | None:
    return None if export.is_symbolic_dim(number) else int(number)


def _resolve_activation(
    function: str, spec: QSpec, shape: tuple[int, ...], kept: Sequence[int], where: str
) -> QSpec:
    require_that(
        spec.dynamic or not spec.granularity.is_relative,
        error=ValueError,
        function=function,
        problem=f"a static scale per token is bound to one batch size ({where}).",
        given=f"granularity {spec.granularity} with dynamic=False",
        expected="per_tensor() where static, or dynamic=True",
        mend="pass dynamic=True, or granularity=jqx.per_tensor().",
    )
    resolved = spec.resolve(len(shape), kept)
    _check_kept(function, resolved, shape, kept, where)
    return resolved


def _check_kept(
    function: str,
    spec: QSpec,
    shape: tuple[int, ...],
    kept: Sequence[int] | frozenset[int],
    where: str,
    tied: bool = False,
) -> None:
    """Raises where each element that the contraction sums over has a scale of its own.

    `tied` says that others contract other axes of the same weight.
    """
    mend = "use per_channel() or per_group(size), which find those axes, or name them."
    if tied:
        mend = "its sites contract different axes: give it a rule of its own before, with "
        mend += "per_tensor(), or with blocks along all of them, such as per_block({0: 8, 1: 8})."
    try:
        groups = groups_of(function, spec, shape)
    except ValueError as error:
        raise ValueError(f"{error}\n  at:       {where}") from None
    require_that(
        can_leave_sum(groups, set(range(len(shape))) - set(kept)),
        error=ValueError,
        function=function,
        problem=f"the scale varies along a contracted axis ({where}).",
        given=f"granularity {spec.granularity}; the contraction keeps axes {sorted(kept)}",
        expected="a scale that is shared along every contracted axis, or in blocks",
        mend=mend,
    )


def _check_used(
    function: str, policy: Policy, used: set[int], found: list[Found], skipped: list[Skipped]
) -> None:
    for place, rule in enumerate(policy.rules):
        if place in used or rule.optional:
            continue
        known = sorted({path for item in found for path in item.paths})
        weights = {item.path for item in found if any(item.origins)}
        shadowed = any(
            rule.matches(path, item.op, has_weight=any(item.origins))
            for item in found
            for path in item.paths
        )
        apart = [f"at {skip.path!r} {skip.reason}" for skip in skipped if skip.path not in weights]
        raise ValueError(
            message(
                function,
                f"rule {place} of the policy matches no contraction"
                + (" that an earlier rule has not taken." if shadowed else "."),
                given="; ".join([str(rule), *dict.fromkeys(apart[:2])]),
                expected="a match; paths are: " + (", ".join(map(repr, known[:8])) or "(none)"),
                mend="correct its path or op, move it up, or pass optional=True.",
            )
        )


def _weights(
    function: str, sites: list[tuple[Site, Found]], shapes_of: dict[str, tuple[int, ...]]
) -> tuple[Weight, ...]:
    """Resolves the spec of every weight in its own axes; sites that share one must agree."""
    specs: dict[str, tuple[QSpec | None, int]] = {}
    kept: dict[str, list[frozenset[int]]] = {}
    merged: dict[str, set[frozenset[int]]] = {}
    counts: Counter[str] = Counter()
    for site, item in sites:
        axes = item.family.kept(item.eqn)
        for operand, origin, dims in zip(site.operands, item.origins, axes, strict=True):
            if origin is None:
                continue
            counts.update({part.path for part in origin.parts})
            for part in origin.parts:
                path = part.path
                spec, place = specs.setdefault(path, (operand.spec, site.rule))
                require_that(
                    spec == operand.spec,
                    error=ValueError,
                    function=function,
                    problem=f"two rules give the weight {path!r} different specs.",
                    given=f"rule {place}: {spec}; rule {site.rule}: {operand.spec}",
                    expected="one spec for one weight, wherever it is used",
                    mend="let one rule match every use of it.",
                )
                merged.setdefault(path, set()).update(part.merged)
                kept.setdefault(path, []).append(part.kept(dims, len(shapes_of[path])))
    weights = []
    for path, (spec, place) in specs.items():
        if spec is None:
            continue
        axes = close_over_merges(frozenset.intersection(*kept[path]), merged[path])
        resolved = spec.resolve(len(shapes_of[path]), sorted(axes))
        where = f"weight {path!r}, rule {place}"
        differ = len(set(kept[path])) > 1
        for here in kept[path]:
            _check_kept(function, resolved, shapes_of[path], here, where, tied=differ)
        weights.append(Weight(path, resolved, f"{path}:weight", counts[path]))
    return tuple(weights)


def as_plan(function: str, plan: Plan | Policy, call: Call, params: Params) -> Plan:
    """Returns the plan of a call: the one given, after checking that it fits, or a policy's."""
    if isinstance(plan, Policy):
        return plan_call(function, call, plan, params)
    plan.check_signature(function, signature_of(call, contractions(call)))
    return plan


def params_of(function: str, plan: Any) -> Params:
    """Returns which arguments hold weights, after checking that `plan` is a Plan or a Policy."""
    check_instance(
        function,
        "plan",
        plan,
        (Plan, Policy),
        mend="make one with jqx.make_plan(f, policy)(*args).",
    )
    return plan.params if isinstance(plan, Plan) else 0
