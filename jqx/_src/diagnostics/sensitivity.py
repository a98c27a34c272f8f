"""`sensitivity`: the cost of quantizing each weight and site, measured or estimated."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import Plan, Policy, QSpec, QTensor, affines, calibrate_batches
from ...calibrators import Affine
from ...extend import Site
from .. import compat
from ..compat import Eqn
from ..errors import fail, some
from ..table import Table, Tabular
from ..transforms.arguments import check_concrete, check_function, number_of
from ..transforms.calibrate import Batch, advancing, arguments_of, arrays_of, inputs_of
from ..transforms.higher_order import Records
from ..transforms.interpret import Rules, interpret
from ..transforms.make_plan import as_plan, params_of, planner
from ..transforms.paths import Splits, Weights
from ..transforms.quantize_params import quantize_weight
from ..transforms.trace import Call, is_quantized, trace_call
from ..transforms.views import real_of
from .report import scheme_of_site

Metric = Callable[[Any, Any], Any]


def relative_error(quantized: Any, plain: Any) -> jax.Array:
    """Returns the energy of the difference of two results, divided by that of the second: the
    inverse of the signal-to-noise ratio, for each channel (the last axis), averaged. All channels
    count the same, so a large one does not hide the others. All floating-point leaves count the
    same.

    The energy of one row of mean size is added to the energy of each channel, so that a channel
    that is zero or rarely active does not dominate. A difference from zeros is not divided.
    """
    pairs = zip(jax.tree.leaves(quantized), jax.tree.leaves(plain), strict=True)
    real = [(z, y) for z, y in pairs if jnp.issubdtype(jnp.result_type(y), jnp.floating)]
    return jnp.mean(jnp.stack([_error_of_channels(z, y) for z, y in real]))


ESTIMATES = ("one_at_a_time", "all_but_one", "weight_error", "hessian", "fisher")


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The cost of quantizing one weight, or one site without a weight.

    Attributes:
      path: path of the weight, or of all weights that one site joins; or the scope of a site.
      op: its first operation.
      cost: cost in units of the metric; larger is worse.
      scheme: how its operands were quantized, such as `float x int4 per_group(32)`.
      label: what tables call it; if empty, its path. Sites with neither weight nor scope are
        quantized together: `(4 unnamed)`.
    """

    path: str
    op: str
    cost: float
    scheme: str = ""
    label: str = ""

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.label or self.path or "(argument)"


@dataclasses.dataclass(frozen=True)
class Sensitivities(Tabular):
    """The result of `sensitivity`, the worst first. Prints as a table.

    Attributes:
      ranked: from the largest cost to the smallest.
      estimate: the estimate that was used.
      everything: the metric with everything quantized; `None` if it was not measured.
    """

    ranked: tuple[Sensitivity, ...]
    estimate: str
    everything: float | None

    def __getitem__(self, path: str) -> float:
        """Returns the cost of a path."""
        return {row.path: row.cost for row in self.ranked}[path]

    def table(self) -> Table:
        """Returns the rows as text."""
        total = sum(row.cost for row in self.ranked if row.cost > 0) or 1.0
        rows = [
            (
                row.name,
                row.op,
                f"{row.cost:.4g}",
                f"{100 * row.cost / total:.1f} %",
            )
            for row in self.ranked
        ]
        footer = f"estimate: {self.estimate}"
        if self.everything is not None:
            footer += f"; all quantized: {self.everything:.4g}"
        return Table(("path", "op", "cost", "share"), tuple(rows), footer, texts=2)


def sensitivity(
    f: Callable[..., Any],
    plan: Plan | Policy,
    metric: Metric = relative_error,
    *,
    estimate: str = "one_at_a_time",
    samples: int = 8,
    key: jax.Array | None = None,
    progress: bool = True,
) -> Callable[..., Sensitivities]:
    """Returns a function that ranks weights and sites by the cost of their quantization.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with (its parameters are argument 0 then).
      metric: `metric(result, float_result) -> scalar`, larger is worse, averaged over the batches.
        The default is `relative_error`: the energy of the difference divided by that of the float
        result, for each channel (the last axis), averaged. If `f` returns a loss, use
        `lambda loss, _: loss`.
      estimate: `"one_at_a_time"`: the metric with only this one quantized. `"all_but_one"`: the
        decrease of the metric if all others are quantized and this one is not. The other three are
        cheap, and for weights only. `"weight_error"`: the energy of the error divided by that of
        the weight. `"hessian"`: the mean of the diagonal of the Hessian of the metric, by
        Hutchinson's method, times the energy of the error (HAWQ-V2, arXiv:1911.03852). `"fisher"`:
        the sum of the squared error times the squared gradient of the metric.
      samples: samples of the Hutchinson estimate, per batch.
      key: random key of the Hutchinson estimate; `None` is `jax.random.key(0)`.
      progress: whether to show a progress bar, as in `jqx.calibrate_batches`.

    Returns:
      `ranked(params, *batches) -> Sensitivities`; each batch is a tuple of the other arguments of
      `f`, or a single argument. Static scales are calibrated on the batches. One program is
      compiled; it runs for each unit and batch.

    Raises:
      TypeError: if `f` is not a function or `plan` is not a plan.
      ValueError: if the plan was made for another function, `estimate` is unknown, there is no
        batch, a parameter is quantized already, or `metric` has no gradient at the float weights.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"]
      >>> w = jax.random.normal(jax.random.key(0), (16, 16))
      >>> p = {"a": w, "b": w.at[0, 0].set(1e3)}  # an outlier
      >>> policy = jqx.presets.w8a16(weight={"granularity": jqx.per_tensor()})
      >>> [row.path for row in jqx.diagnostics.sensitivity(f, policy)(p, w).ranked]
      ['b', 'a']
    """
    check_function("diagnostics.sensitivity", f)
    params_of("diagnostics.sensitivity", plan)
    if estimate not in ESTIMATES:
        fix = f"use one of {', '.join(map(repr, ESTIMATES))}; the first, the default, measures."
        raise fail("diagnostics.sensitivity", f"`estimate` is unknown: {estimate!r}.", fix=fix)

    def ranked(params: Any, *batches: Any) -> Sensitivities:
        batch_plan = plan if isinstance(plan, Plan) else plan_of_batches(f, plan, params, batches)
        sweep = Sweep("diagnostics.sensitivity", f, [batch_plan], metric, params, batches, progress)
        everything = None
        measured = estimate in ("one_at_a_time", "all_but_one")
        steps = len(batches) * {"hessian": samples, "fisher": 1}.get(estimate, 0)
        count = len(sweep.units) + 1 if measured else steps
        with advancing("sensitivity", "step", count, progress) as sweep.advance:
            if measured:
                everything = sweep(dict.fromkeys(sweep.units, 1))
            if estimate == "one_at_a_time":
                costs = {unit: sweep({unit: 1}) for unit in sweep.units}
            elif estimate == "all_but_one":
                assert everything is not None
                costs = {
                    unit: everything - sweep({u: 1 for u in sweep.units if u != unit})
                    for unit in sweep.units
                }
            else:
                costs = _of_weights(sweep, estimate, samples, key)
        rows = [
            Sensitivity(unit, sweep.ops[unit], cost, sweep.schemes[unit], sweep.labels[unit])
            for unit, cost in costs.items()
        ]
        return Sensitivities(tuple(sorted(rows, key=lambda row: -row.cost)), estimate, everything)

    return ranked


def _error_of_channels(quantized: Any, plain: Any) -> jax.Array:
    """Returns the relative error of a channel of one array, on average. An array of one axis or
    none is one channel.
    """
    y = jnp.asarray(plain, jnp.float32)
    noise = jnp.square(jnp.asarray(quantized, jnp.float32) - y)
    shape = (-1, y.shape[-1]) if y.ndim > 1 else (-1, 1)
    signal, noise = (jnp.mean(x.reshape(shape), 0) for x in (jnp.square(y), noise))
    rows = y.size // max(1, signal.size)
    mean_size = jnp.square(jnp.mean(jnp.sqrt(signal)))
    energy = (rows * signal + mean_size) / (rows + 1)
    return jnp.mean(noise / jnp.where(energy == 0, 1, energy))


def check_floats(caller: str, result: Any) -> None:
    """Checks that `relative_error` can compare results."""
    kinds = [jnp.result_type(y).name for y in jax.tree.leaves(result)]
    if not any(jnp.issubdtype(kind, jnp.floating) for kind in kinds):
        problem = "the result of `f` has no floats, so the default metric cannot compare it."
        fix = "return what the integers are chosen by, such as logits, or pass "
        fix += "metric=lambda y, exact: jnp.mean(y != exact)."
        raise fail(caller, problem, given=f"results of {some(dict.fromkeys(kinds))}", fix=fix)


# Evaluates a function whose every weight and site is quantized in a way chosen at run time.
#
# One program is compiled for all choices, so that hundreds of choices can be tried.

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
    batch = batches[0] if batches else ()
    if like is not None:
        plan = planner(f, policy, Weights(like.params, like.names, splits=like.splits))
        return plan(*arguments_of(like, params, batch))
    plan = planner(f, policy, Weights(0, splits=policy if splits is None else splits))
    return plan(params, *inputs_of(batch))


@dataclasses.dataclass(frozen=True)
class _Chosen(Rules):
    """Rounds each operand of a site in the way chosen for it."""

    sites: Mapping[tuple[int, ...], Sequence[Site | None]] = dataclasses.field(default_factory=dict)
    choice: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)

    differentiable = False

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        site_of_plan = self.sites[site.address]
        rounded = [real_of(x) for x in operands]
        for i, operand in enumerate(site.operands):
            if operand.role == "activation" and not is_quantized(operands[i]):
                specs = [plan_site and plan_site.operands[i].spec for plan_site in site_of_plan]
                rounded[i] = self._round(operands[i], specs, operand.key, site.path)
        (result,) = compat.bind(eqn, rounded)
        outputs = [plan_site and plan_site.output for plan_site in site_of_plan]
        return self._round(result, outputs, site.output_key, site.path), {}

    def _round(self, x: jax.Array, specs: Sequence[QSpec | None], key: str, path: str) -> jax.Array:
        if not any(specs):
            return x
        scales: Any = self.affines.get(key) or [None] * len(specs)
        roundings = [
            functools.partial(_round, spec=s, affine=a) for s, a in zip(specs, scales, strict=True)
        ]
        return lax.switch(self.choice[path], [lambda x: x, *roundings], x)


def _round(x: jax.Array, spec: QSpec | None, affine: Affine | None) -> jax.Array:
    return x if spec is None else QTensor.quantize(x, spec, affine).dequantize()


class Sweep:
    """A function with its weights and batches, to be evaluated with many choices.

    Static scales are calibrated on the batches, separately for each plan.

    Attributes:
      advance: called after each evaluation.
      units: the units of choice, in the order of the sites: the path of a weight, of several
        weights that are joined, or of a site without a weight.
      unit_of: the unit of each path.
      ops: the first operation of each unit.
      schemes: how the operands of each unit are quantized; where plans differ, by one of them.
      labels: what tables call each unit.
      pairs: each batch and its float result.
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
        if not batches:
            fix = f"call it as jqx.{caller}(...)(params, batch, ...); a batch is a tuple of the "
            fix += "other arguments, or a single one."
            raise fail(caller, "there is no batch.", fix=fix)
        leaves = jax.tree.leaves(params, is_leaf=is_quantized)
        if quantized := [x for x in leaves if is_quantized(x)]:
            fix = "pass the original parameters, not the result of jqx.quantize_params."
            raise fail(caller, f"a parameter is quantized already: {quantized[0]!r}.", fix=fix)
        check_concrete(caller, params, batches)
        self.advance: Callable[[], Any] = lambda: None
        self._caller, self._f, self.plans, self._metric = caller, f, plans, metric
        self._arrays, self._params_of = arrays_of(params)
        by_address = [{site.address: site for site in plan.sites} for plan in plans]
        addresses = sorted(set().union(*by_address))
        self._sites = {address: [x.get(address) for x in by_address] for address in addresses}
        merged_sites = tuple(map(_together, self._sites.values()))
        self._plan = dataclasses.replace(plans[0], sites=merged_sites)
        self.unit_of = _units(merged_sites, plans)
        self.units = list(dict.fromkeys(self.unit_of[site.path] for site in merged_sites))
        self.ops = {self.unit_of[site.path]: site.op for site in reversed(merged_sites)}
        self.schemes, self.labels = _described(merged_sites, self.unit_of)
        self._scales = _scales(f, plans, params, batches, progress)
        self._evaluate = jax.jit(self._metric_of_one_batch)
        plain = jax.jit(self._in_float)
        self.pairs = [(x, plain(self._arrays, x)) for x in map(Batch, batches)]
        if metric is relative_error:
            check_floats(caller, self.pairs[0][1])

    @functools.cached_property
    def weights(self) -> dict[str, jax.Array]:
        """The weights that any plan quantizes, by path."""
        paths = {weight.path for plan in self.plans for weight in plan.weights}
        call = self._call(self._arrays, self.pairs[0][0])
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
            path: [self.weights[path] if q is None else q.dequantize() for q in codes]
            for path, codes in self.codes.items()
        }

    def __call__(self, choice: Choice) -> float:
        """Returns the metric, averaged over the batches."""
        choices = {unit: jnp.int32(choice.get(unit, 0)) for unit in self.units}
        values = [
            self._evaluate(choices, self._arrays, self._rounded, self._scales, batch, plain)
            for batch, plain in self.pairs
        ]
        mean = float(sum(values) / len(values))
        self.advance()
        return mean

    def loss_of_weights(self) -> Callable[[dict[str, jax.Array], Any, Any], jax.Array]:
        """Returns the metric in float as a function of the weights, a batch and its float result;
        `None` uses the result at the same weights.
        """

        def loss(weights: dict[str, jax.Array], batch: Any, plain: Any) -> jax.Array:
            out = self._in_float(self._arrays, batch, weights)
            plain = lax.stop_gradient(out) if plain is None else plain
            return number_of(self._caller, "metric", self._metric, out, plain)

        return loss

    def paths(self, unit: str) -> list[str]:
        """Returns the weights of a unit."""
        return [path for path in self.weights if self.unit_of[path] == unit]

    def _call(self, arrays: Sequence[Any], batch: Any) -> Call:
        """Returns the function traced at the arrays of its parameters and a batch."""
        arguments = arguments_of(self.plans[0], self._params_of(arrays), batch)
        return trace_call(self._caller, self._f, self.plans[0].parameters, arguments, {})

    def _in_float(self, arrays: Any, batch: Any, weights: Mapping[str, Any] | None = None) -> Any:
        """Returns the float result, with other values in place of some weights."""
        call = self._call(arrays, batch)
        pairs = zip(call.paths, call.leaves, strict=True)
        leaves = [x if path is None else (weights or {}).get(path, x) for path, x in pairs]
        return _evaluated(call, leaves, _Chosen(dataclasses.replace(self._plan, sites=())))

    def _metric_of_one_batch(
        self, choice: Any, arrays: Any, rounded: Any, scales: Any, batch: Any, plain: Any
    ) -> jax.Array:
        call = self._call(arrays, batch)
        for plan in self.plans:
            as_plan(self._caller, plan, call, plan.parameters)
        by_path = {path: choice[unit] for path, unit in self.unit_of.items()}
        leaves = [
            x
            if path is None or path not in rounded
            else lax.select_n(by_path[path], x, *rounded[path])
            for path, x in zip(call.paths, call.leaves, strict=True)
        ]
        rules = _Chosen(self._plan, scales, sites=self._sites, choice=by_path)
        out = _evaluated(call, leaves, rules)
        return number_of(self._caller, "metric", self._metric, out, plain)


def _scales(
    f: Callable[..., Any],
    plans: Sequence[Plan],
    params: Any,
    batches: Sequence[Any],
    progress: bool,
) -> dict[str, list[Affine | None]]:
    """Returns the static scales of each plan, by key, calibrated on the batches."""
    scales_of_plan = [
        affines(plan, calibrate_batches(f, plan, params, batches, progress=progress))
        if plan.static_specs()
        else {}
        for plan in plans
    ]
    keys = set().union(*scales_of_plan)
    return {key: [scales.get(key) for scales in scales_of_plan] for key in keys}


def _evaluated(call: Call, leaves: Sequence[Any], rules: _Chosen) -> Any:
    """Returns the result of a call; quantized state is dequantized."""
    out, _ = interpret(call.jaxpr, call.consts, leaves, rules)
    return jax.tree.unflatten(call.out_tree, [real_of(x) for x in out])


def _together(site_of_plan: Sequence[Site | None]) -> Site:
    """Returns a site with the static scales of all ways."""
    sites = [site for site in site_of_plan if site is not None]

    def of(specs: Iterable[QSpec | None]) -> QSpec | None:
        set_specs = [spec for spec in specs if spec is not None]
        return next(
            (spec for spec in set_specs if not spec.dynamic), set_specs[0] if set_specs else None
        )

    operands = tuple(
        dataclasses.replace(operand, spec=of(site.operands[i].spec for site in sites))
        for i, operand in enumerate(sites[0].operands)
    )
    output = of(site.output for site in sites)
    return dataclasses.replace(sites[0], operands=operands, output=output)


def _described(
    sites: Sequence[Site], unit_of: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns how the sites of each unit are quantized, and what tables call the unit."""
    of_unit: dict[str, list[Site]] = {}
    for site in sites:
        of_unit.setdefault(unit_of[site.path], []).append(site)
    schemes, labels = {}, {}
    for unit, unit_sites in of_unit.items():
        schemes[unit] = "; ".join(dict.fromkeys(map(scheme_of_site, unit_sites)))
        several = not unit and len(unit_sites) > 1 and unit_sites[0].label != "(argument)"
        labels[unit] = f"({len(unit_sites)} unnamed)" if several else unit or unit_sites[0].label
    return schemes, labels


def _units(sites: Sequence[Site], plans: Sequence[Plan]) -> dict[str, str]:
    """Returns the unit of each path; weights that one site joins belong together."""
    weights = {weight.path for plan in plans for weight in plan.weights}
    unit = {}
    for site in sites:
        parts = site.path.split("+")
        joined = parts if len(parts) > 1 and weights.issuperset(parts) else [site.path]
        name = next((unit[part] for part in joined if part in unit), site.path)
        merged = {unit.get(part, part) for part in joined}
        unit.update({part: name for part in (*joined, site.path)})
        unit = {part: name if old in merged else old for part, old in unit.items()}
    return {**{path: path for path in weights}, **unit}


def _of_weights(
    sweep: Sweep, estimate: str, samples: int, key: jax.Array | None
) -> dict[str, float]:
    """Returns estimates from the weights and their error."""
    errors = {
        path: jnp.asarray(q.dequantize() - sweep.weights[path], jnp.float32)
        for path, (q,) in sweep.codes.items()
        if q is not None
    }
    if estimate == "weight_error":
        sizes = {path: jnp.square(sweep.weights[path].astype(jnp.float32)).sum() for path in errors}
        of_path = {
            path: jnp.sum(e * e) / jnp.where(sizes[path] == 0, 1, sizes[path])
            for path, e in errors.items()
        }
    else:
        loss = sweep.loss_of_weights()
        weights = {path: sweep.weights[path] for path in errors}
        if estimate == "fisher":
            gradient = jax.jit(jax.grad(loss))
            # From one program: results of two programs would differ by rounding.
            at_itself = gradient(weights, sweep.pairs[0][0], None)
            if not any(bool((g != 0).any()) for g in at_itself.values()):
                problem = "the metric has no gradient at the float weights."
                detail = "a gradient of 0, such as that of a distance from the float result"
                fix = "let f return a loss, such as one with labels, with metric=lambda loss, _: "
                fix += "loss; or use 'hessian'."
                raise fail("diagnostics.sensitivity", problem, given=detail, fix=fix)
            gradients = [*_advanced(sweep, (gradient(weights, *pair) for pair in sweep.pairs))]
            of_path = {
                path: sum(jnp.sum((tree[path] * e) ** 2) for tree in gradients) / len(gradients)
                for path, e in errors.items()
            }
        else:
            traces = _hutchinson(sweep, loss, weights, samples, key)
            of_path = {
                path: traces[path] / max(e.size, 1) * jnp.sum(e * e) for path, e in errors.items()
            }
    costs = dict.fromkeys((sweep.unit_of[path] for path in of_path), 0.0)
    for path, cost in of_path.items():
        costs[sweep.unit_of[path]] += float(cost)
    return costs


def _hutchinson(
    sweep: Sweep, loss: Any, weights: dict[str, Any], samples: int, key: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns the trace of the diagonal block of the Hessian of each weight: the mean of `v . H v`
    over random signs `v`.
    """

    @jax.jit
    def sample(key: jax.Array, batch: Any, plain: Any) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(weights))
        signs = {
            path: jax.random.rademacher(k, w.shape, w.dtype)
            for k, (path, w) in zip(keys, weights.items(), strict=True)
        }
        _, moved = jax.jvp(lambda w: jax.grad(loss)(w, batch, plain), (weights,), (signs,))
        return {path: jnp.sum(v * moved[path]) for path, v in signs.items()}

    key = jax.random.key(0) if key is None else key
    traces = (
        sample(k, batch, plain)
        for i, (batch, plain) in enumerate(sweep.pairs)
        for k in jax.random.split(jax.random.fold_in(key, i), samples)
    )
    traces = [*_advanced(sweep, traces)]
    return {path: jnp.mean(jnp.stack([tree[path] for tree in traces])) for path in weights}


def _advanced(sweep: Sweep, results: Iterable[Any]) -> Iterator[Any]:
    """Yields results as soon as they are computed, and advances the progress bar."""
    for result in results:
        yield jax.block_until_ready(result)
        sweep.advance()
