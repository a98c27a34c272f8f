"""Evaluates a function whose every weight and site is quantized in a way chosen at run time.

One program is compiled for all choices, so that hundreds of choices can be tried.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._compat import Eqn
from .._errors import fail
from ..calibrators import Affine
from ..policy import Policy
from ..tensor import QSpec, QTensor
from ..transforms import Plan, Site, affines, calibrate_batches
from ..transforms._shared import (
    Batch,
    Call,
    Records,
    Rules,
    Splits,
    Weights,
    arguments_of,
    as_plan,
    check_concrete,
    inputs_of,
    interpret,
    is_array,
    is_quantized,
    number_of,
    planner,
    quantize_weight,
    real_of,
    trace_call,
)
from ._metric import Metric, check_floats, relative_error
from ._schemes import scheme_of_site

Choice = dict[str, int]
"""The choice for each unit: 0 for float, i for the i-th plan."""


def plan_of_batches(
    f: Callable[..., Any],
    policy: Policy,
    params: Any,
    batches: Sequence[Any],
    like: Plan | None = None,
    splits: Splits | None = None,
) -> Plan:
    """Returns the plan of the first batch.

    Args:
      f: the function.
      policy: what is quantized.
      params: its parameters.
      batches: batches of its other arguments.
      like: another plan, from which the positions, names and splits of parameters are taken.
      splits: how scans are split if `like` is not given; `None` follows the policy.
    """
    first = batches[0] if batches else ()
    if like is not None:
        plan = planner(f, policy, Weights(like.params, like.names, splits=like.splits))
        return plan(*arguments_of(like, params, first))
    plan = planner(f, policy, Weights(0, splits=policy if splits is None else splits))
    return plan(params, *inputs_of(first))


@dataclasses.dataclass(frozen=True)
class _Chosen(Rules):
    """Rounds each operand of a site in the way chosen for it."""

    sites: Mapping[tuple[int, ...], Sequence[Site | None]] = dataclasses.field(default_factory=dict)
    choice: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)

    differentiable = False

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        ways = self.sites[site.address]
        rounded = [real_of(x) for x in operands]
        for i, operand in enumerate(site.operands):
            if operand.role == "activation" and not is_quantized(operands[i]):
                specs = [way and way.operands[i].spec for way in ways]
                rounded[i] = self._round(operands[i], specs, operand.key, site.path)
        (result,) = _compat.bind(eqn, rounded)
        outputs = [way and way.output for way in ways]
        return self._round(result, outputs, site.output_key, site.path), {}

    def _round(self, x: jax.Array, specs: Sequence[QSpec | None], key: str, path: str) -> jax.Array:
        if not any(specs):
            return x
        scales: Any = self.affines.get(key) or [None] * len(specs)
        ways = [
            functools.partial(_round, spec=s, affine=a) for s, a in zip(specs, scales, strict=True)
        ]
        return lax.switch(self.choice[path], [lambda x: x, *ways], x)


def _round(x: jax.Array, spec: QSpec | None, affine: Affine | None) -> jax.Array:
    return x if spec is None else QTensor.quantize(x, spec, affine).dequantize()


class _Array:
    """Placeholder of an array of the parameters; their other leaves are static."""


class Sweep:
    """A function with its weights and batches, to be evaluated with many choices.

    Static scales are calibrated on the batches, separately for each plan.

    Attributes:
      advance: called after each evaluation.
      units: the units of choice, in the order of the sites: the path of a weight, of several
        weights that are joined, or of a site without a weight.
      ops: the first operation of each unit.
      schemes: how the operands of each unit are quantized; where plans differ, by one of them.
      labels: what tables call each unit.
    """

    def __init__(
        self,
        caller: str,
        f: Callable[..., Any],
        plans: Sequence[Plan],
        metric: Metric,
        params: Any,
        batches: Sequence[Any],
        progress: bool,
    ):
        _check(caller, params, batches)
        check_concrete(caller, params, batches)
        self.advance: Callable[[], Any] = lambda: None
        self._caller, self._f, self.plans, self._metric = caller, f, plans, metric
        self._arrays = [x for x in jax.tree.leaves(params) if is_array(x)]
        self._batches = [Batch(x) for x in batches]
        self._like = jax.tree.map(lambda x: _Array() if is_array(x) else x, params)
        self._sites = _ways(plans)
        known = tuple(map(_together, self._sites.values()))
        self._plan = dataclasses.replace(plans[0], sites=known)
        self._unit_of = _units(known, plans)
        self.units = list(dict.fromkeys(self._unit_of[site.path] for site in known))
        self.ops = {self._unit_of[site.path]: site.op for site in reversed(known)}
        self.schemes, self.labels = _described(known, self._unit_of)
        self._scales = _scales(f, plans, params, batches, progress)
        self._evaluate = jax.jit(self._metric_of_one_batch)
        plain = jax.jit(self._in_float)
        self._plain = [plain(self._arrays, batch) for batch in self._batches]
        if metric is relative_error:
            check_floats(caller, self._plain[0])

    @functools.cached_property
    def weights(self) -> dict[str, jax.Array]:
        """The weights that any plan quantizes, by path."""
        paths = {weight.path for plan in self.plans for weight in plan.weights}
        call = self._call(self._arrays, self._batches[0])
        return {
            path: leaf for path, leaf in zip(call.paths, call.leaves, strict=True) if path in paths
        }

    @functools.cached_property
    def codes(self) -> dict[str, list[QTensor | None]]:
        """The weights as quantized by each plan."""
        return {
            path: [
                weight and quantize_weight(x, weight.spec)
                for weight in (plan.weight_at(path) for plan in self.plans)
            ]
            for path, x in self.weights.items()
        }

    @functools.cached_property
    def _rounded(self) -> dict[str, list[jax.Array]]:
        return {
            path: [self.weights[path] if q is None else q.dequantize() for q in ways]
            for path, ways in self.codes.items()
        }

    def __call__(self, choice: Choice) -> float:
        """Returns the metric, averaged over the batches."""
        every = {unit: jnp.int32(choice.get(unit, 0)) for unit in self.units}
        values = [
            self._evaluate(every, self._arrays, self._rounded, self._scales, batch, plain)
            for batch, plain in zip(self._batches, self._plain, strict=True)
        ]
        found = float(sum(values) / len(values))
        self.advance()
        return found

    def pairs(self) -> list[tuple[Any, Any]]:
        """Returns each batch and its float result."""
        return list(zip(self._batches, self._plain, strict=True))

    def loss_of_weights(self) -> Callable[[dict[str, jax.Array], Any, Any], jax.Array]:
        """Returns the metric in float as a function of the weights, a batch and its float result;
        `None` uses the result at the same weights.
        """

        nothing = dataclasses.replace(self._plan, sites=())

        def loss(weights: dict[str, jax.Array], batch: Any, plain: Any) -> jax.Array:
            call = self._call(self._arrays, batch)
            leaves = [
                weights.get(path, x) if path is not None else x
                for path, x in zip(call.paths, call.leaves, strict=True)
            ]
            out = _evaluated(call, leaves, _Chosen(nothing))
            plain = jax.lax.stop_gradient(out) if plain is None else plain
            return number_of(self._caller, "metric", self._metric, out, plain)

        return loss

    def unit_of(self, path: str) -> str:
        """Returns the unit that a weight belongs to."""
        return self._unit_of[path]

    def paths(self, unit: str) -> list[str]:
        """Returns the weights of a unit."""
        return [path for path in self.weights if self._unit_of[path] == unit]

    def _arguments(self, arrays: Sequence[Any], batch: Any) -> list[Any]:
        """Returns the arguments of the function, from the arrays of its parameters and a batch."""
        rest = iter(arrays)
        params = jax.tree.map(lambda x: next(rest) if isinstance(x, _Array) else x, self._like)
        return arguments_of(self.plans[0], params, batch)

    def _call(self, arrays: Sequence[Any], batch: Any) -> Call:
        arguments = self._arguments(arrays, batch)
        return trace_call(self._caller, self._f, self.plans[0].parameters, arguments, {})

    def _metric_of_one_batch(
        self, choice: Any, arrays: Any, rounded: Any, scales: Any, batch: Any, plain: Any
    ) -> jax.Array:
        call = self._call(arrays, batch)
        for plan in self.plans:
            as_plan(self._caller, plan, call, plan.parameters)
        by_path = {path: choice[unit] for path, unit in self._unit_of.items()}
        leaves = [
            x if path is None or path not in rounded else _select(by_path[path], x, rounded[path])
            for path, x in zip(call.paths, call.leaves, strict=True)
        ]
        rules = _Chosen(self._plan, scales, sites=self._sites, choice=by_path)
        out = _evaluated(call, leaves, rules)
        return number_of(self._caller, "metric", self._metric, out, plain)

    def _in_float(self, arrays: Any, batch: Any) -> Any:
        if not any(map(is_quantized, jax.tree.leaves(batch, is_leaf=is_quantized))):
            return self._f(*self._arguments(arrays, batch))
        call = self._call(arrays, batch)
        nothing = dataclasses.replace(self._plan, sites=())
        return _evaluated(call, call.leaves, _Chosen(nothing))


def _check(caller: str, params: Any, batches: Sequence[Any]) -> None:
    """Checks that there are batches, and that parameters are in float."""
    if not batches:
        raise fail(
            caller,
            "there is no batch.",
            given="only parameters",
            expected="one batch or more: a tuple of the other arguments, or a single one",
            fix=f"call it as jqx.{caller}(...)(params, batch, ...).",
        )
    quantized = [x for x in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(x)]
    if quantized:
        raise fail(
            caller,
            "a parameter is quantized already.",
            given=f"{quantized[0]!r}" if quantized else "",
            expected="float parameters",
            fix="pass the original parameters, not the result of jqx.quantize_params.",
        )


def _ways(plans: Sequence[Plan]) -> dict[tuple[int, ...], list[Site | None]]:
    """Returns the site of each plan at each address, in order."""
    by_address = [{site.address: site for site in plan.sites} for plan in plans]
    addresses = sorted(set().union(*by_address))
    return {address: [sites.get(address) for sites in by_address] for address in addresses}


def _scales(
    f: Callable[..., Any],
    plans: Sequence[Plan],
    params: Any,
    batches: Sequence[Any],
    progress: bool,
) -> dict[str, list[Affine | None]]:
    """Returns the static scales of each plan, by key, calibrated on the batches."""
    found = [
        affines(plan, calibrate_batches(f, plan, params, batches, progress=progress))
        if plan.static_specs()
        else {}
        for plan in plans
    ]
    keys = set().union(*found)
    return {key: [scales.get(key) for scales in found] for key in keys}


def _evaluated(call: Call, leaves: Sequence[Any], rules: _Chosen) -> Any:
    """Returns the result of a call; quantized state is dequantized."""
    out, _ = interpret(call.jaxpr, call.consts, leaves, rules)
    return jax.tree.unflatten(call.out_tree, [real_of(x) for x in out])


def _select(choice: jax.Array, x: jax.Array, ways: Sequence[jax.Array]) -> jax.Array:
    values = [jnp.asarray(x), *ways]
    return lax.switch(choice, [lambda i=i: values[i] for i in range(len(values))])


def _together(ways: Sequence[Site | None]) -> Site:
    """Returns a site with the static scales of all ways."""
    known = [way for way in ways if way is not None]

    def of(specs: Iterable[QSpec | None]) -> QSpec | None:
        given = [spec for spec in specs if spec is not None]
        return next((spec for spec in given if not spec.dynamic), given[0] if given else None)

    operands = tuple(
        dataclasses.replace(operand, spec=of(way.operands[i].spec for way in known))
        for i, operand in enumerate(known[0].operands)
    )
    output = of(way.output for way in known)
    return dataclasses.replace(known[0], operands=operands, output=output)


def _described(
    sites: Sequence[Site], unit_of: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns how the sites of each unit are quantized, and what tables call the unit."""
    of_unit: dict[str, list[Site]] = {}
    for site in sites:
        of_unit.setdefault(unit_of[site.path], []).append(site)
    schemes, labels = {}, {}
    for unit, own in of_unit.items():
        schemes[unit] = "; ".join(dict.fromkeys(map(scheme_of_site, own)))
        several = not unit and len(own) > 1 and own[0].label != "(argument)"
        labels[unit] = f"({len(own)} unnamed)" if several else unit or own[0].label
    return schemes, labels


def _units(sites: Sequence[Site], plans: Sequence[Plan]) -> dict[str, str]:
    """Returns the unit of each path; weights that one site joins belong together."""
    weights = {weight.path for plan in plans for weight in plan.weights}
    unit = {}
    for site in sites:
        parts = site.path.split("+")
        together = parts if len(parts) > 1 and weights.issuperset(parts) else [site.path]
        name = next((unit[part] for part in together if part in unit), site.path)
        merged = {unit.get(part, part) for part in together}
        unit.update({part: name for part in (*together, site.path)})
        unit = {part: name if of in merged else of for part, of in unit.items()}
    return {**{path: path for path in weights}, **unit}
