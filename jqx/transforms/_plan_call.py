"""Makes a plan from a traced call and a policy."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import export

from .._errors import message, some, warn
from ..policy import Policy
from ._arguments import check_plan
from ._choose import Chosen, choose
from ._find import Found, contractions, contractions_with_reads, dtypes_of
from ._follow import lost
from ._input_as_weight import check_inputs
from ._operations import operations_of, same_nesting
from ._origin import Address, Origin
from ._paths import Weights
from ._plan import Plan
from ._reach import unreached
from ._reasons import NO_WEIGHT, reasons
from ._resolve import resolve_activation, resolve_weights
from ._signature import AGAIN, addresses_of, check_ranks, check_same, without_addresses
from ._site import Operand, Shape, Site, Skipped
from ._trace import Call, trace_call
from ._unused_alternatives import warn_of_unused_alternatives
from ._unused_rules import check_used

NOTHING: Mapping[str, str] = MappingProxyType({})


def signature_of(call: Call, found: Sequence[Found], *, axes: bool = True) -> tuple[str, ...]:
    """Returns one line per parameter and contraction, without batch sizes.

    `axes=False` leaves out the position of a weight's axes in the contracted operand, as plans of
    jqx 0.1.0 do.
    """
    lines = [*call.lines]
    for item in found:
        operands = [_described(origin, axes) if origin else "-" for origin in item.origins]
        pattern = item.family.pattern(item.eqn)
        lines.append(f"contraction {item.address} {item.op}{pattern} of {' and '.join(operands)}")
    return tuple(lines)


def _described(origin: Origin, axes: bool) -> str:
    """Returns the paths of a weight, or of joined ones; a transposed one is such as `w[1,0]`."""
    if not axes:
        return origin.name
    own = [["&".join(map(str, sorted(held))) for held in part.dims] for part in origin.parts]
    named = zip(origin.parts, own, strict=True)
    return "+".join(dict.fromkeys(f"{part.path}[{','.join(held)}]" for part, held in named))


def plan_of_function(
    function: str, f: Callable[..., Any], plan: Plan, args: Sequence[Any], fix: str
) -> tuple[Plan, Call]:
    """Returns a plan with the addresses of a function, and the function traced at such arguments.
    Raises if it is not the one that the plan is for.
    """
    call = trace_call(function, f, plan.parameters, args, {}, lazy=True)
    return _fitted(function, plan, call, contractions(call), fix), call


def _fitted(
    function: str, plan: Plan, call: Call, found: Sequence[Found], fix: str = AGAIN
) -> Plan:
    """Returns a plan with the addresses of a function, which differ in plans of jqx 0.1, and where
    other parts of it are under jit or remat. Raises if the plan is for another function.
    """
    signature = signature_of(call, found)
    if plan.signature in (signature, signature_of(call, found, axes=False)):
        return plan
    before = contractions_with_reads(call)
    older = signature_of(call, before), signature_of(call, before, axes=False)
    if plan.signature in older and len(before) == len(found):
        return _renumbered(plan, [item.address for item in before], found, signature)
    alike = without_addresses(signature) == without_addresses(plan.signature)
    if alike and same_nesting(function, plan.operations, call.jaxpr):
        return _renumbered(plan, addresses_of(plan.signature), found, signature)
    check_ranks(function, plan, found)
    check_same(function, signature, plan.signature, fix)
    return plan


def _renumbered(
    plan: Plan, before: Sequence[Address], found: Sequence[Found], signature: tuple[str, ...]
) -> Plan:
    """Returns a plan with the addresses of contractions found in place of those before."""
    items = dict(zip(before, found, strict=True))
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
    found: list[Found] | None = None,
    floats: Mapping[str, str] = NOTHING,
) -> Plan:
    """Plans a traced call; `found` are its contractions, if known. `floats` are weights that cannot
    be quantized as planned, each with the reason.
    """
    found = contractions(call) if found is None else found
    dtypes = dtypes_of(call)
    chosen, used = choose(found, policy, dtypes, call.parts, floats)
    sites: list[tuple[Site, Found]] = []
    skipped: list[Skipped] = []
    whole: dict[str, str] = {}  # parameters of integers that rules cover
    numbers: Counter[str] = Counter()
    why: dict[int, str] | None = None
    for item, choice in zip(found, chosen, strict=True):
        reason = choice.reason
        if reason is not None:
            if reason == NO_WEIGHT:
                why = reasons(call) if why is None else why
                reason = why.get(id(item.eqn), reason)
            rule = choice.rule and choice.rule[1].weight_for(item.op)
            if rule is not None and item.op != "gather" and _is_float(item.eqn.outvars[0]):
                for path in item.paths:
                    if path in dtypes and jnp.issubdtype(dtypes[path], jnp.integer):
                        whole[path] = str(dtypes[path])
            shapes = tuple(_named(v.aval.shape) for v in item.eqn.invars[:2])
            macs = _known(item.family.macs(item.eqn))
            skipped.append(Skipped(item.address, item.path, item.op, reason, shapes, macs))
            continue
        name = f"{item.path}:{item.op}"
        numbers[name] += 1
        if numbers[name] > 1:
            name = f"{name}#{numbers[name] - 1}"
        sites.append((_site(function, item, choice, name), item))
    check_used(function, policy, used, found, skipped, call)
    warn_of_unused_alternatives(function, policy, found, call)
    if whole:
        warn(
            message(
                function,
                "the policy covers parameters of integers, which stay as they are.",
                given=some(f"{path!r} of {dtype}" for path, dtype in whole.items()),
                expected="weights of floats",
                fix="pass the float weights, x.astype(jnp.float32); or leave these out of the "
                "policy, by a rule that gives them no format.",
            )
        )
    check_inputs(function, call, _of_weights(sites), weights)
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
        signature=signature_of(call, found),
        names=call.names,
        unreached=unreached(call, found),
        splits=call.splits,
        operations=operations_of(call.jaxpr),
    )
    more = lost(call, plan, sites)
    return plan_call(function, call, policy, weights, found, {**floats, **more}) if more else plan


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.aval.dtype, jnp.floating))


def _of_weights(sites: Sequence[tuple[Site, Found]]) -> list[Found]:
    """Returns the contractions with a quantized weight."""
    return [
        item
        for site, item in sites
        if any(operand.role == "weight" and operand.spec for operand in site.operands)
    ]


def _site(function: str, item: Found, choice: Chosen, name: str) -> Site:
    assert choice.rule is not None
    place, rule = choice.rule
    kept, batch = item.family.kept(item.eqn), item.family.batch(item.eqn)
    operands = []
    for side, origin, weight, axes, stacked, atom in zip(
        ("lhs", "rhs"), item.origins, choice.specs, kept, batch, item.eqn.invars, strict=False
    ):
        key = f"{name}:{side}"
        if origin is not None:
            held = tuple(tuple(sorted(axes)) for axes in origin.dims)
            as_they_are = held == tuple((axis,) for axis in range(len(held)))
            axes_held = () if as_they_are else held
            operands.append(Operand("weight", weight, key, origin.path, axes_held))
            continue
        spec = rule.activation
        if spec is not None:
            where = f"{side} of {item.op} at path {item.path!r}, rule {place}"
            spec = resolve_activation(function, spec, atom.aval.shape, axes, where, stacked)
        operands.append(Operand("activation", spec, key))
    output = rule.output
    if output is not None:
        shape = item.eqn.outvars[0].aval.shape
        where = f"output of {item.op} at path {item.path!r}, rule {place}"
        output = resolve_activation(function, output, shape, range(len(shape)), where)
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
    found = contractions(call)
    if isinstance(plan, Policy):
        return plan_call(function, call, plan, weights, found), found
    if signature_of(call, found) != plan.signature:
        plan = _fitted(function, plan, call, found)
    return plan, found


def params_of(function: str, plan: Any) -> Weights:
    """Returns the arguments that hold weights, after checking that `plan` is a Plan or a Policy."""
    check_plan(function, plan, order=f"{function}(f, plan)", policies=True)
    return plan.parameters if isinstance(plan, Plan) else Weights(0, splits=plan)
