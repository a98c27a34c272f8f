"""`compare`: the error of a quantized function, site by site, in one pass.

Two members of a `vmap` evaluate the function at the same time, one in float and one with rounded
operands. They exchange their results at each site. Only a few sums are kept, which are merged
through loops and branches like statistics of calibration.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import Plan, Policy, QSpec, QTensor, hoist, map_channels
from ... import Quantized as PtqResult
from ...calibrators import Affine
from ...extend import Site, Weight
from .. import compat
from ..checks import called
from ..compat import Eqn
from ..errors import fail, some
from ..signatures import P
from ..table import Table, Tabular, decibels
from ..transforms.arguments import check_batches, check_function
from ..transforms.calibrate import Batch, arguments_of, arrays_of, inputs_of
from ..transforms.channel_map import Maps
from ..transforms.higher_order import Records
from ..transforms.hoist import Hoisted
from ..transforms.interpret import Rules, interpret
from ..transforms.make_plan import as_plan, params_of
from ..transforms.map_channels import as_maps
from ..transforms.paths import by_argument, insert_params
from ..transforms.plan import GivenAffines
from ..transforms.quantize_params import named_leaves, quantize_weight
from ..transforms.trace import Call, is_array, is_quantized, trace_call
from ..transforms.views import Address, Trainable, codes_of, real_of
from .report import scheme_of_site, sqnr_of


@dataclasses.dataclass(frozen=True)
class SiteError:
    """The error of the results of one site, for one layer if it is in a scan over layers.

    Attributes:
      path: path of its weight, or its name scope.
      op: the operation.
      layer: index in the scans that step over its weight; empty outside scans.
      sqnr: signal-to-noise ratio in dB of the quantized function relative to the float function:
        the error accumulated up to this site. Infinite if both are equal, NaN if the site never
        ran.
      local_sqnr: the same of this site alone: its quantized operands are in float up to here.
      cosine: cosine similarity of both results.
      max_error: largest absolute difference of both results.
      local_max_error: the same of this site alone.
      objective: the objective of the chosen codes that an algorithm has reported for the weight,
        relative to that of rounding to nearest; `None` if it reported nothing.
      scheme: how its operands are quantized, such as `float x int4 per_group(32)`.
      label: what tables call it, without its layer; if empty, its path.
    """

    path: str
    op: str
    layer: tuple[int, ...]
    sqnr: float
    local_sqnr: float
    cosine: float
    max_error: float
    local_max_error: float
    objective: float | None = None
    scheme: str = ""
    label: str = ""

    @property
    def name(self) -> str:
        """What tables call it, with its layer."""
        return (self.label or self.path) + "".join(f"[{i}]" for i in self.layer)


@dataclasses.dataclass(frozen=True)
class Comparison(Tabular):
    """The result of `compare`. Prints as a table; `to_dict` and `to_markdown` return data and text.

    Attributes:
      sites: one error for each site, and for each layer of a scan, in the order of the plan.
      result: the error of the results of the function together.
    """

    sites: tuple[SiteError, ...]
    result: SiteError

    def worst(self, count: int = 5) -> tuple[SiteError, ...]:
        """Returns the sites with the largest local errors, the worst first."""
        ran = [site for site in self.sites if not math.isnan(site.local_sqnr)]
        return tuple(sorted(ran, key=lambda site: site.local_sqnr)[:count])

    def table(self) -> Table:
        """Returns the rows as text."""
        all_rows = (*self.sites, self.result)
        rows = [
            (
                row.name or "(argument)",
                row.op,
                decibels(row.local_sqnr),
                decibels(row.sqnr),
                f"{row.cosine:.6f}",
                f"{row.local_max_error:.3g}",
                f"{row.max_error:.3g}",
            )
            for row in all_rows
        ]
        head = ("path", "op", "own SQNR dB", "SQNR dB", "cosine", "own max error", "max error")
        note = (
            "own: only this site quantized, on float operands; others: all sites up to it quantized"
        )
        if any(row.objective is not None for row in all_rows):
            objectives = (
                "" if row.objective is None else f"{row.objective:.3f}" for row in all_rows
            )
            rows = [(*cells, text) for cells, text in zip(rows, objectives, strict=True)]
            head = (*head, "objective")
            note += "; objective: of the chosen codes, relative to rounding to nearest"
        return Table(head, tuple(rows), note, texts=2)


@called("compare", "call it in two steps: jqx.compare(f, plan, affines)(params, x).")
def compare(
    f: Callable[P, Any],
    plan: Plan | Policy | PtqResult,
    affines: GivenAffines = None,
    *,
    weights: Any = None,
) -> Callable[P, Comparison]:
    """Returns a function that compares `f` with its quantized form at each site.

    Both are evaluated together in one pass, as the two members of a `jax.vmap`, through jit, scans
    (one row per layer if a scan steps over a weight), loops and branches. Quantized operands are
    rounded as in `simulate`, and multiplied in float. No result is kept, so a deep function fits in
    memory. The results of `convert` drift away from these with depth. A site's own error holds for
    both, but take the error of the whole function from `simulate(f, plan, affines,
    backward=jnp.float32)` or `convert`, which are bitwise equal.

    With the result of `ptq`, the float member computes as the quantized function does where an
    algorithm has scaled or rotated weights: `f` on the values and maps of `quantized.basis`, the
    same function up to rounding in float. So a site is compared as it computes. The rounded member
    has what corrects codes too (`bias_correction`, `eora`). A shift is added after its site, so it
    is no part of the site's own error.

    Args:
      f: the function that the plan was made for.
      plan: the result of `jqx.ptq`, whose plan, scales, codes, maps and details are then used; or a
        `Plan`; or a `Policy` to plan the call with (its parameters are argument 0 then).
      affines: scales from `jqx.affines`, for every static activation and output; `"dynamic"`
        computes them from the values of the call instead. `None` if the plan has no static ones.
      weights: the parameters with the codes to compare, as returned by `jqx.quantize_params` or by
        an algorithm (`Quantized.params`, `AlgorithmResult.params`); a tuple if there are several
        positions. `None` rounds the parameters of the call to nearest. The algorithm must choose
        codes alone. For one that also scales or rotates weights or corrects results, pass the
        result of `ptq`.

    Returns:
      `compared(*args, **kwargs) -> Comparison`, a function of float parameters. It compiles and
      computes.

    Raises:
      TypeError: if `f` is not a function or `plan` is not a plan.
      ValueError: if the plan was made for another function, `affines` does not fit it, a static
        activation or output has no scale, or a parameter is quantized already; or if `affines` or
        `weights` is passed with a result of `ptq`, or this has no `basis`, as after `jqx.load` of
        rotated weights.

    NaN, infinity: a result with a NaN has an SQNR of NaN.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"]
      >>> w = jax.random.normal(jax.random.key(0), (16, 16))
      >>> p, x = {"a": w, "b": w.at[0, 0].set(1e3)}, w
      >>> policy = jqx.presets.w8a8_dynamic(weight={"granularity": jqx.per_tensor()})
      >>> found = jqx.compare(f, policy)(p, x)
      >>> found.worst(1)[0].path
      'b'
      >>> quantized = jqx.ptq(f, policy, jqx.algorithms.rotate(), progress=False)(p, [x])
      >>> jqx.compare(f, quantized)(p, x).worst(1)[0].local_sqnr > found.worst(1)[0].local_sqnr
      True
    """
    check_function("compare", f)
    if isinstance(plan, PtqResult):
        if affines is not None or weights is not None:
            problem = "a quantized function has `affines` and `weights` already."
            raise fail("compare", problem, fix="write jqx.compare(f, quantized).")
        return _of_quantized(f, plan)
    params = params_of("compare", plan)

    def compared(*args: Any, **kwargs: Any) -> Comparison:
        call, call_plan = checked_call("compare", f, plan, args, kwargs, params)
        codes = {} if weights is None else codes_by_path("compare", call_plan, weights)
        return _compared(call, call_plan, affines, Members(None, {}, codes, ()), [])

    return compared


def _of_quantized(f: Callable[..., Any], quantized: PtqResult) -> Callable[..., Comparison]:
    """Returns `compare` for the result of `ptq`."""
    plan = quantized.plan

    def compared(*args: Any, **kwargs: Any) -> Comparison:
        function, arguments = as_planned(f, plan, args, kwargs)
        call, call_plan = checked_call(
            "compare", function, plan, arguments, kwargs, plan.parameters
        )
        params, others = params_and_others(plan, arguments)
        members = Members.of("compare", quantized, params)
        if members.params is not params or members.maps:
            arguments = insert_params(plan.params, members.params, others)
            call, call_plan = members.call("compare", function, plan, arguments, kwargs)
        return _compared(call, call_plan, quantized.affines, members, _entries(quantized.details))

    return compared


_MEMBERS = "jqx.compare"
"""Name of the mapped axis: member 0 is in float, member 1 has rounded operands."""


class Sums(NamedTuple):
    """Sums over one float result `y` and two others: `z`, rounded; and `local`, rounded from float
    operands.
    """

    runs: jax.Array
    signal: jax.Array
    power: jax.Array
    product: jax.Array
    noise: jax.Array
    largest: jax.Array
    local_noise: jax.Array
    local_largest: jax.Array

    @classmethod
    def of(cls, y: jax.Array, z: jax.Array, local: jax.Array) -> "Sums":
        y, z, local = (x.astype(jnp.float32) for x in (y, z, local))
        return cls(
            runs=jnp.ones(()),
            signal=jnp.sum(y * y),
            power=jnp.sum(z * z),
            product=jnp.sum(y * z),
            noise=jnp.sum((z - y) ** 2),
            largest=jnp.abs(z - y).max(initial=0),
            local_noise=jnp.sum((local - y) ** 2),
            local_largest=jnp.abs(local - y).max(initial=0),
        )

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> "Sums":
        return cls(*(jnp.zeros(shape) for _ in cls._fields))

    @classmethod
    def of_results(cls, pairs: Iterable[Any]) -> "Sums":
        """Returns the sums over the floats among the results of two functions, in pairs."""
        sums = cls.empty(())
        for y, z in pairs:
            if jnp.issubdtype(y.dtype, jnp.floating):
                sums = sums.merge(cls.of(y, z, z))
        return sums

    def merge(self, sums: "Sums") -> "Sums":
        fields = zip(self._fields, self, sums, strict=True)
        return Sums(*(jnp.maximum(a, b) if "largest" in name else a + b for name, a, b in fields))


@dataclasses.dataclass(frozen=True)
class _Both(Rules):
    """Evaluates the function in both members; a weight is a pair of its codes and its floats."""

    differentiable = False
    function = "compare"

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        plain, rounded = [real_of(x) for x in operands], [_floats(x) for x in operands]
        for i, operand in enumerate(site.operands):
            if operand.role == "activation" and operand.spec and not is_quantized(operands[i]):
                rounded[i] = self._round(operands[i], operand.spec, operand.key)
        (y,), (z,) = compat.bind(eqn, plain), compat.bind(eqn, rounded)
        if site.output is not None:
            z = self._round(z, site.output, site.output_key)
        result = lax.select(jnp.broadcast_to(_is_rounded(), y.shape), z, y)
        results, all_rounded = lax.all_gather(result, _MEMBERS), lax.all_gather(z, _MEMBERS)
        return result, {site.output_key: Sums.of(results[0], results[1], all_rounded[0])}

    def _round(self, x: jax.Array, spec: QSpec, key: str) -> jax.Array:
        return QTensor.quantize(x, spec, self.affines.get(key)).dequantize()

    def dense(self, eqn: Eqn | None, x: Any) -> Any:
        if not isinstance(x, Trainable):
            return real_of(x)
        return lax.select(jnp.broadcast_to(_is_rounded(), x.real.shape), _floats(x), x.real)

    def empty_records(self, address: Address) -> Records:
        """Returns the records of sites inside this equation that do not step with it."""
        return {
            site.output_key: Sums.empty(tuple(loop.length for loop in site.loops_in(address)))
            for site in self.plan.sites
            if site.address[: len(address)] == address
            and not any(loop.address == address for loop in site.loops)
        }

    def merge(self, here: Address, a: Records, b: Records) -> Records:
        return {key: a[key].merge(b[key]) for key in a}


def _is_rounded() -> jax.Array:
    return lax.axis_index(_MEMBERS) == 1


def _floats(x: Any) -> Any:
    """Returns the dequantized values of a weight."""
    codes = codes_of(x)
    return codes.dequantize() if is_quantized(codes) else codes


def side_by_side(
    call: Call,
    plan: Plan,
    leaves: Sequence[jax.Array],
    scales: dict[str, Affine],
    others: Sequence[Any],
) -> tuple[list[jax.Array], Records]:
    """Returns the results of a call, in float and rounded `[2, ...]`, and the sums of its sites.

    Args:
      call: the call.
      plan: its plan.
      leaves: its leaves, of the float member.
      scales: scales of activations and outputs, by key.
      others: what the rounded member has in their place; `None` for the same, or for a weight that
        is rounded to nearest.
    """
    rules = _Both(plan, scales)
    pairs: list[Any] = []
    for x, rounded, path in zip(leaves, others, call.paths, strict=True):
        weight = plan.weight_at(path)
        if rounded is None and weight is not None:
            rounded = quantize_weight(x, weight.spec, scales.get(weight.key))
        if rounded is not None and rounded.shape != x.shape:
            problem = "`weights` does not fit the parameters of the call."
            detail = f"shape {rounded.shape} for {path!r}, which has shape {x.shape}"
            fix = "pass Quantized.params, or what jqx.quantize_params returned for these "
            fix += "parameters."
            raise fail("compare", problem, given=detail, fix=fix)
        pairs.append((x if rounded is None else Trainable(rounded, x), weight is not None))

    def member() -> tuple[list[Any], Records]:
        member_leaves = [
            x if is_weight or not isinstance(x, Trainable) else rules.dense(None, x)
            for x, is_weight in pairs
        ]
        out, records = interpret(call.jaxpr, call.consts, member_leaves, rules)
        return [rules.dense(None, x) for x in out], records

    out, records = jax.vmap(member, axis_name=_MEMBERS, axis_size=2)()
    return out, jax.tree.map(lambda x: x[0], records)


def comparison_of(
    plan: Plan, out: Sums, records: Mapping[str, Sums], entries: Sequence[Any] = ()
) -> Comparison:
    """Returns the comparison with some sums of the result and of the sites."""
    rows = (row for site in plan.sites for row in _rows(site, records[site.output_key], entries))
    return Comparison(tuple(rows), _error("(result)", "", (), out))


def _rows(site: Site, sums: Sums, entries: Sequence[Any]) -> Iterator[SiteError]:
    for layer in np.ndindex(np.shape(sums.runs)):
        row = _error(site.path, site.op, layer, jax.tree.map(lambda x, index=layer: x[index], sums))
        site_entries = [
            x for x in entries if site.name in x.sites and x.step[: len(layer)] == layer
        ]
        objective = None
        if site_entries:
            nearest = sum(x.before for x in site_entries)
            objective = sum(x.after for x in site_entries) / nearest if nearest else 1.0
        scheme = scheme_of_site(site)
        yield dataclasses.replace(row, scheme=scheme, label=site.label, objective=objective)


def _error(path: str, op: str, layer: tuple[int, ...], sums: Sums) -> SiteError:
    x: dict[str, float] = {name: float(value) for name, value in sums._asdict().items()}
    if not x["runs"]:
        x = dict.fromkeys(x, math.nan)
    norms = math.sqrt(x["signal"] * x["power"])
    return SiteError(
        path=path,
        op=op,
        layer=tuple(map(int, layer)),
        sqnr=sqnr_of(x["signal"], x["noise"]),
        local_sqnr=sqnr_of(x["signal"], x["local_noise"]),
        cosine=x["product"] / norms if norms else math.nan,
        max_error=x["largest"],
        local_max_error=x["local_largest"],
    )


# What both members of a comparison evaluate: float parameters in the basis in which the sites of
# the quantized function compute, and in their place its codes and whatever else it has.

_MAPS, _KWARGS = "maps", "kwargs"


class Members(NamedTuple):
    """Both members of a comparison.

    Attributes:
      params: the parameters of the float member.
      maps: its maps at sites.
      rounded: what the other member has in place of parameters, by path: codes, and floats that a
        correction has changed.
      rounded_maps: what it has in place of the leaves of `maps`; `None` for the same.
    """

    params: Any
    maps: Maps
    rounded: Mapping[str, Any]
    rounded_maps: Sequence[Any]

    @classmethod
    def of(cls, function: str, quantized: PtqResult, params: Any) -> "Members":
        """Returns the members for a quantized function and its float parameters."""
        plan, basis = quantized.plan, quantized.basis
        if basis is None:
            raise fail(
                function,
                "it is not known what the algorithm did to the weights before it chose codes.",
                given="a Quantized from a file of scaled or rotated weights, or whose algorithm "
                "returned no AlgorithmResult.basis",
                fix="pass the result of jqx.ptq before saving it. If codes alone were chosen: "
                "jqx.compare(f, quantized.plan, quantized.affines, weights=quantized.params).",
            )
        floats, maps = basis(params)
        rounded: dict[str, Any] = {**codes_by_path(function, plan, quantized.params)}
        exact, others = (
            dict(named_leaves(function, by_argument(plan.params, x), plan))
            for x in (floats, quantized.params)
        )
        for path in (exact.keys() & others.keys()) - rounded.keys() - {None}:
            x, leaf = exact[path], others[path]
            is_known = x is leaf or is_quantized(x) or is_quantized(leaf)
            is_float = bool(jnp.issubdtype(x.dtype, jnp.floating))
            if not is_known and not jnp.array_equal(x, leaf, equal_nan=is_float):
                rounded[cast(str, path)] = leaf
        leaves = map(jax.tree.leaves, (as_maps(function, maps), as_maps(function, quantized.maps)))
        rounded_maps = [None if a is b else b for a, b in zip(*leaves, strict=True)]
        return cls(floats, as_maps(function, maps), rounded, rounded_maps)

    def call(
        self, function: str, f: Callable[..., Any], plan: Plan, args: Sequence[Any], kwargs: Any
    ) -> tuple[Call, Plan]:
        """Returns a function with the maps, traced at the parameters of the float member and other
        arguments, and its plan.
        """

        def mapped(*args: Any, maps: Maps, kwargs: Any) -> Any:
            return map_channels(f, plan, maps)(*args, **kwargs)

        with_maps = f
        if self.maps:
            with_maps, kwargs = mapped, {_MAPS: self.maps, _KWARGS: kwargs}
        call = trace_call(function, with_maps, plan.parameters, args, kwargs)
        return call, as_plan(function, plan, call, plan.parameters)

    def others(self, call: Call) -> list[Any]:
        """Returns what the rounded member has in place of the leaves of a call; `None` for the
        same, or for a weight that is rounded to nearest.
        """
        maps = iter(self.rounded_maps)

        def other(keys: tuple[Any, ...], path: str | None) -> Any:
            if self.maps and keys[0].idx == 1 and keys[1].key == _MAPS:
                return next(maps)
            return None if path is None else self.rounded.get(path)

        return [other(*x) for x in zip(call.keys, call.paths, strict=True)]


def _compared(
    call: Call, plan: Plan, affines: GivenAffines, members: Members, entries: Sequence[Any]
) -> Comparison:
    """Returns the comparison of a call, whose arguments are those of the float member."""
    scales = plan.scales_of("compare", affines)

    def compared(leaves: Any, scales: Any, others: Any) -> tuple[Sums, Records]:
        out, records = side_by_side(call, plan, leaves, scales, others)
        return Sums.of_results(out), records

    out, records = jax.jit(compared)(call.leaves, scales, members.others(call))
    return comparison_of(plan, out, records, entries)


def checked_call(
    function: str, f: Callable[..., Any], plan: Any, args: Sequence[Any], kwargs: Any, weights: Any
) -> tuple[Call, Plan]:
    """Returns a function traced at its arguments, with float weights, and the plan of the call."""
    call = trace_call(function, f, weights, args, kwargs)
    call_plan = as_plan(function, plan, call, weights)
    leaves = zip(call.paths, call.leaves, strict=True)
    done = [path for path, x in leaves if is_quantized(x) and call_plan.weight_at(path) is not None]
    if done:
        problem = "a parameter is quantized already, so that its float values are not known."
        fix = "pass the original parameters, not the result of jqx.quantize_params."
        detail = f"QTensors for {some(map(repr, done))}"
        raise fail(function, problem, given=detail, fix=fix)
    return call, call_plan


def as_planned(
    f: Callable[..., Any], plan: Plan, args: Sequence[Any], kwargs: Any
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Returns a function and its arguments in the form that a plan is for: split by `hoist`, if the
    planned function was.
    """
    argnums = places_of(f, plan)
    if plan.hoisted is None or isinstance(f, Hoisted):
        return f, args
    hoisting, _, names = plan.hoisted
    g, computed = hoist(f, cast(Any, hoisting), params=argnums, names=dict(names) or None)(
        *args, **kwargs
    )
    return g, insert_params(plan.params, computed, _without(args, argnums))


def places_of(f: Callable[..., Any], plan: Plan) -> int | tuple[int, ...]:
    """Returns the position, or positions, of the parameters among the arguments of a function."""
    return plan.params if plan.hoisted is None or isinstance(f, Hoisted) else plan.hoisted.params


def params_and_others(plan: Plan, args: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns the parameters among the arguments of a function, a tuple if they are several
    arguments, and the other arguments.
    """
    argnums = plan.params
    params = args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)
    return params, _without(args, argnums)


def _without(args: Sequence[Any], argnums: int | tuple[int, ...]) -> list[Any]:
    positions = (argnums,) if isinstance(argnums, int) else argnums
    return [x for i, x in enumerate(args) if i not in positions]


def codes_by_path(function: str, plan: Plan, weights: Any) -> dict[str, QTensor]:
    """Returns the codes of each weight of a plan."""
    codes: dict[str, QTensor] = {}

    def keep(weight: Weight, x: Any) -> Any:
        if not (isinstance(x, QTensor) and x.qtype == weight.spec.qtype):
            kind = f"{x!r} for" if is_quantized(x) else "floats:"
            problem = "`weights` do not belong to this plan."
            detail, expected = f"{kind} {weight.path!r}", f"a QTensor of {weight.spec}"
            fix = "pass Quantized.params, or what jqx.quantize_params returned for this plan."
            raise fail(function, problem, given=detail, expected=expected, fix=fix)
        codes[weight.path] = x
        return x

    plan.map_weights(keep, weights)
    return codes


def _entries(report: Any) -> list[Any]:
    """Returns the entries for one matrix or block in a report of `jqx.algorithms`, or in several;
    other reports have no entries.
    """
    several = type(report) is tuple and not any(map(_is_entry, report))
    reports = report if several else (report,)
    return [entry for x in reports if isinstance(x, Iterable) for entry in x if _is_entry(entry)]


def _is_entry(x: Any) -> bool:
    return all(hasattr(x, name) for name in ("sites", "step", "before", "after"))


# `held_back`: the error on held-back rows, beside that on the rows that calibrated.


_NAME = "diagnostics.held_back"


@dataclasses.dataclass(frozen=True)
class HeldBack(Tabular):
    """The result of `held_back`. Prints as a table.

    Attributes:
      used: the errors on the rows that were used.
      held_back: the errors on the rows that were not.
    """

    used: Comparison
    held_back: Comparison

    @property
    def ratio(self) -> float:
        """The error of the result on held-back rows, relative to that on the rows used."""
        return _ratio(self.used.result.sqnr, self.held_back.result.sqnr)

    def table(self) -> Table:
        """Returns the rows as text."""
        results = self.used.result, self.held_back.result
        pairs = [*zip(self.used.sites, self.held_back.sites, strict=True), results]
        rows: list[tuple[str, ...]] = []
        for used, unused in pairs:
            is_result = used is self.used.result
            ratios = [x.sqnr if is_result else x.local_sqnr for x in (used, unused)]
            errors = (f"{10 ** (-x / 10):.4g}" for x in ratios)
            rows.append((used.name or "(argument)", used.op, *errors, f"{_ratio(*ratios):.2f}"))
        head = ("path", "op", "error on rows used", "on held-back rows", "ratio")
        note = "error: energy of the difference, relative to that of the float result; of a site: "
        note += "with only this site quantized, on float operands"
        return Table(head, tuple(rows), note, texts=2)


@called(_NAME, "call it in two steps: held_back(f, quantized)(params, used, others).")
def held_back(f: Callable[..., Any], quantized: Any) -> Callable[..., HeldBack]:
    """Returns a function that compares the error of a quantized function on the rows that were used
    to calibrate it with its error on rows that were held back.

    Codes and scales that are fitted to few rows are better on these than on others. If the error on
    held-back rows is much larger, pass more rows, or rows of more kinds, to `jqx.ptq`.

    The error of the result is that of `quantized.function`. The errors of sites are those of
    `jqx.compare(f, quantized)`, over all batches.

    Args:
      f: the float function.
      quantized: the result of `jqx.ptq(f, ...)`.

    Returns:
      `measured(params, used, others) -> HeldBack`: `params` are the float parameters, `used` the
      batches that were passed to `jqx.ptq`, and `others` batches that were not; each a list as
      there. It compiles one function for each shape of batches.

    Raises:
      TypeError: if `f` is not a function, `quantized` is not the result of `jqx.ptq`, or batches
        are not a list.
      ValueError: if `f` is another function, a parameter is quantized already, there is no batch,
        or `quantized` has no `basis`, as after `jqx.load` of rotated weights.

    Example:
      >>> import jqx, jax
      >>> f = lambda w, x: x @ w
      >>> w, x = jax.random.normal(jax.random.key(0), (2, 64, 64))
      >>> used, others = [x[:16]], [x[16:]]
      >>> quantize = jqx.ptq(f, jqx.Policy({".*": "int4"}), jqx.algorithms.gptq(), progress=False)
      >>> found = jqx.diagnostics.held_back(f, quantize(w, used))(w, used, others)
      >>> found.ratio > 2
      True
    """
    check_function(_NAME, f)
    if not isinstance(quantized, PtqResult):
        kind = type(quantized).__name__
        problem = f"`quantized` is not a quantized function, but of type {kind}."
        fix = "pass quantized = jqx.ptq(f, policy)(params, batches)."
        raise fail(_NAME, problem, fix=fix, error=TypeError)

    def measured(params: Any, used: Iterable[Any], others: Iterable[Any]) -> HeldBack:
        compiled: list[Callable[[Any], _All]] = []

        def sums_of_batch(batch: Any) -> _All:
            if not compiled:
                compiled.append(_sums_of(f, quantized, params, batch))
            return compiled[0](batch)

        sums = [_summed(sums_of_batch, batches) for batches in (used, others)]
        return HeldBack(*(comparison_of(quantized.plan, *pair) for pair in sums))

    return measured


_All = tuple[Sums, Records]
"""Sums over the result of the quantized function, and over sites."""


def _sums_of(
    f: Callable[..., Any], quantized: Any, params: Any, batch: Any
) -> Callable[[Any], _All]:
    """Returns a compiled function of a batch that returns its sums. It is checked with a batch."""
    plan = quantized.plan
    scales = plan.scales_of(_NAME, quantized.affines)
    arguments = insert_params(places_of(f, plan), params, inputs_of(batch))
    f, arguments = as_planned(f, plan, arguments, {})
    checked_call(_NAME, f, plan, arguments, {}, plan.parameters)
    members = Members.of(_NAME, quantized, params_and_others(plan, arguments)[0])
    (arrays, filled), (weights, weights_filled) = map(arrays_of, (members.params, quantized.params))

    @jax.jit
    def sums(arrays: Any, weights: Any, scales: Any, members: Members, batch: Any) -> _All:
        arguments = arguments_of(plan, filled(arrays), batch)
        call, call_plan = members.call(_NAME, f, plan, arguments, {})
        members_results, records = side_by_side(
            call, call_plan, call.leaves, scales, members.others(call)
        )
        results = quantized.function(*arguments_of(plan, weights_filled(weights), batch))
        leaves = filter(is_array, jax.tree.leaves(results, is_leaf=is_quantized))
        pairs = [(x[0], real_of(z)) for x, z in zip(members_results, leaves, strict=True)]
        return Sums.of_results(pairs), records

    members = members._replace(params=None)
    return lambda batch: sums(arrays, weights, scales, members, Batch(batch))


def _summed(sums_of_batch: Callable[[Any], _All], batches: Iterable[Any]) -> _All:
    """Returns the sums over batches."""
    check_batches(_NAME, batches)
    total: _All | None = None
    for batch in batches:
        sums = sums_of_batch(batch)
        total = sums if total is None else _merged(total, sums)
    if total is None:
        problem = "there is no batch: an empty list, or an exhausted generator."
        raise fail(_NAME, problem, fix="pass lists: held_back(f, quantized)(params, used, others).")
    return total


@jax.jit
def _merged(a: _All, b: _All) -> _All:
    return jax.tree.map(Sums.merge, a, b, is_leaf=lambda x: isinstance(x, Sums))


def _ratio(used: float, held: float) -> float:
    """Returns the ratio of two errors, from their signal-to-noise ratios in dB."""
    return 10 ** ((used - held) / 10)
