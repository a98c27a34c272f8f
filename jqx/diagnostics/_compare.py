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

from .. import _compat
from .._calls import called
from .._compat import Eqn
from .._errors import fail
from .._signatures import P
from ..calibrators import Affine
from ..policy import Policy
from ..tensor import QSpec, QTensor
from ..transforms import Plan, Site, Weight
from ..transforms._shared import (
    Address,
    Call,
    GivenAffines,
    Records,
    Rules,
    Trainable,
    check_function,
    codes_of,
    interpret,
    is_quantized,
    params_of,
    placed,
    quantize_weight,
    real_of,
)
from ._comparison import Comparison, SiteError
from ._members import (
    Entry,
    Members,
    QuantizedFunction,
    as_planned,
    checked_call,
    codes_by_path,
    entries_alone,
    entries_in,
    is_quantized_function,
    params_and_others,
)
from ._schemes import scheme_of_site

_MEMBERS = "jqx.compare"
"""Name of the mapped axis: member 0 is in float, member 1 has rounded operands."""


class Sums(NamedTuple):
    """Sums over one float result `y` and two others: `z`, rounded; and `local`, rounded from float
    operands.
    """

    seen: jax.Array
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
            seen=jnp.ones(()),
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
        found = cls.empty(())
        for y, z in pairs:
            if jnp.issubdtype(y.dtype, jnp.floating):
                found = found.merge(cls.of(y, z, z))
        return found

    def merge(self, other: "Sums") -> "Sums":
        both = zip(self._fields, self, other, strict=True)
        return Sums(*(jnp.maximum(a, b) if "largest" in name else a + b for name, a, b in both))


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
        (y,), (z,) = _compat.bind(eqn, plain), _compat.bind(eqn, rounded)
        if site.output is not None:
            z = self._round(z, site.output, site.output_key)
        result = lax.select(jnp.broadcast_to(_is_rounded(), y.shape), z, y)
        own, all_rounded = lax.all_gather(result, _MEMBERS), lax.all_gather(z, _MEMBERS)
        return result, {site.output_key: Sums.of(own[0], own[1], all_rounded[0])}

    def _round(self, x: jax.Array, spec: QSpec, key: str) -> jax.Array:
        return QTensor.quantize(x, spec, self.affines.get(key)).dequantize()

    def dense(self, eqn: Eqn | None, x: Any) -> Any:
        if not isinstance(x, Trainable):
            return real_of(x)
        return lax.select(jnp.broadcast_to(_is_rounded(), x.real.shape), _floats(x), x.real)

    def unseen(self, here: Address) -> Records:
        """Returns the records of sites inside this equation that do not step with it."""
        return {
            site.output_key: Sums.empty(tuple(loop.length for loop in site.loops_in(here)))
            for site in self.plan.sites
            if site.address[: len(here)] == here
            and not any(loop.address == here for loop in site.loops)
        }

    def merge(self, here: Address, a: Records, b: Records) -> Records:
        return {key: a[key].merge(b[key]) for key in a}


def _is_rounded() -> jax.Array:
    return lax.axis_index(_MEMBERS) == 1


def _floats(x: Any) -> Any:
    """Returns the dequantized values of a weight."""
    codes = codes_of(x)
    return codes.dequantize() if is_quantized(codes) else codes


@called("compare", "call it in two steps: jqx.compare(f, plan, affines)(params, x).")
def compare(
    f: Callable[P, Any],
    plan: Plan | Policy | QuantizedFunction,
    affines: GivenAffines = None,
    *,
    weights: Any = None,
    report: Sequence[Entry] | None = None,
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
        an algorithm (`Quantized.params`, `Chosen.params`); a tuple if there are several positions.
        `None` rounds the parameters of the call to nearest. The algorithm must choose codes alone.
        For one that also scales or rotates weights or corrects results, pass the result of `ptq`.
      report: the report of such an algorithm (`Quantized.details`, `Chosen.report`), for the
        objective of the weight in each row.

    Returns:
      `compared(*args, **kwargs) -> Comparison`, a function of float parameters. It compiles and
      computes.

    Raises:
      TypeError: if `f` is not a function or `plan` is not a plan.
      ValueError: if the plan was made for another function, `affines` does not fit it, a static
        activation or output has no scale, or a parameter is quantized already; if `affines`,
        `weights` or `report` is passed with a result of `ptq`, or this has no `basis`, as after
        `jqx.load` of rotated weights; or if `report` is that of an algorithm which does more than
        choose codes.

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
    if is_quantized_function(plan):
        given = {"affines": affines, "weights": weights, "report": report}
        own = [name for name, value in given.items() if value is not None]
        if own:
            raise fail(
                "compare",
                "a quantized function has these arguments already.",
                given=f"the result of jqx.ptq, and {', '.join(own)}",
                expected="the result of jqx.ptq alone, or a plan",
                fix="write jqx.compare(f, quantized).",
            )
        return _of_quantized(f, cast(QuantizedFunction, plan))
    return _of_plan(f, cast("Plan | Policy", plan), affines, weights, report)


def _of_plan(
    f: Callable[..., Any], plan: Plan | Policy, affines: GivenAffines, weights: Any, report: Any
) -> Callable[..., Comparison]:
    """Returns `compare` for a plan, or a policy."""
    params, entries = params_of("compare", plan), entries_alone("compare", report)

    def compared(*args: Any, **kwargs: Any) -> Comparison:
        call, known = checked_call("compare", f, plan, args, kwargs, params)
        codes = {} if weights is None else codes_by_path("compare", known, weights)
        return _compared(call, known, affines, Members(None, {}, codes, ()), entries)

    return compared


def _of_quantized(f: Callable[..., Any], quantized: QuantizedFunction) -> Callable[..., Comparison]:
    """Returns `compare` for the result of `ptq`."""
    plan = quantized.plan

    def compared(*args: Any, **kwargs: Any) -> Comparison:
        own, given = as_planned(f, plan, args, kwargs)
        call, known = checked_call("compare", own, plan, given, kwargs, plan.parameters)
        params, others = params_and_others(plan, given)
        members = Members.of("compare", quantized, params)
        if members.params is not params or members.maps:
            given = placed(plan.params, members.params, others)
            call, known = members.call("compare", own, plan, given, kwargs)
        return _compared(call, known, quantized.affines, members, entries_in(quantized.details))

    return compared


def _compared(
    call: Call, plan: Plan, affines: GivenAffines, members: Members, entries: Sequence[Entry]
) -> Comparison:
    """Returns the comparison of a call, whose arguments are those of the float member."""
    given = plan.scales_of("compare", affines)

    def both(leaves: Any, given: Any, others: Any) -> tuple[Sums, Records]:
        out, records = side_by_side(call, plan, leaves, given, others)
        return Sums.of_results(out), records

    out, records = jax.jit(both)(call.leaves, given, members.others(call))
    return comparison_of(plan, out, records, entries)


def comparison_of(
    plan: Plan, out: Sums, records: Mapping[str, Sums], report: Sequence[Entry] = ()
) -> Comparison:
    """Returns the comparison with some sums of the result and of the sites."""
    objectives = _objectives(report)
    rows = (row for site in plan.sites for row in _rows(site, records[site.output_key], objectives))
    return Comparison(tuple(rows), _error("(result)", "", (), out))


def side_by_side(
    call: Call,
    plan: Plan,
    leaves: Sequence[jax.Array],
    given: dict[str, Affine],
    others: Sequence[Any],
) -> tuple[list[jax.Array], Records]:
    """Returns the results of a call, in float and rounded `[2, ...]`, and the sums of its sites.

    Args:
      call: the call.
      plan: its plan.
      leaves: its leaves, of the float member.
      given: scales.
      others: what the rounded member has in their place; `None` for the same, or for a weight that
        is rounded to nearest.
    """
    rules = _Both(plan, given)
    weights = [plan.weight_at(path) for path in call.paths]
    each = zip(leaves, others, call.paths, weights, strict=True)
    pairs = [_pair(*x, given) for x in each]

    def member() -> tuple[list[Any], Records]:
        own = [
            x if weight is not None or not isinstance(x, Trainable) else rules.dense(None, x)
            for x, weight in zip(pairs, weights, strict=True)
        ]
        out, records = interpret(call.jaxpr, call.consts, own, rules)
        return [rules.dense(None, x) for x in out], records

    out, records = jax.vmap(member, axis_name=_MEMBERS, axis_size=2)()
    return out, jax.tree.map(lambda x: x[0], records)


def _pair(
    x: jax.Array, other: Any, path: str | None, weight: Weight | None, given: Mapping[str, Affine]
) -> Any:
    """Returns a leaf with what the rounded member has in its place."""
    if other is None:
        if weight is None:
            return x
        other = quantize_weight(x, weight.spec, given.get(weight.key))
    if other.shape != x.shape:
        raise fail(
            "compare",
            "`weights` does not fit the parameters of the call.",
            given=f"shape {other.shape} for {path!r}, which has shape {x.shape}",
            expected="the parameters of the call, quantized",
            fix="pass Quantized.params, or what jqx.quantize_params returned for these parameters.",
        )
    return Trainable(other, x)


def _objectives(report: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Returns the entries of a report by the names of sites."""
    found: dict[str, list[Entry]] = {}
    for entry in report:
        for name in entry.sites:
            found.setdefault(name, []).append(entry)
    return found


def _rows(site: Site, sums: Sums, objectives: Mapping[str, Sequence[Entry]]) -> Iterator[SiteError]:
    for layer in np.ndindex(np.shape(sums.seen)):
        row = _error(site.path, site.op, layer, jax.tree.map(lambda x, at=layer: x[at], sums))
        entries = [x for x in objectives.get(site.name, ()) if x.step[: len(layer)] == layer]
        before = sum(x.before for x in entries)
        after = sum(x.after for x in entries)
        objective = after / before if before else 1.0
        row = dataclasses.replace(row, scheme=scheme_of_site(site), label=site.label)
        yield dataclasses.replace(row, objective=objective) if entries else row


def _error(path: str, op: str, layer: tuple[int, ...], sums: Sums) -> SiteError:
    x: dict[str, float] = {name: float(value) for name, value in sums._asdict().items()}
    if not x["seen"]:
        x = dict.fromkeys(x, math.nan)
    norms = math.sqrt(x["signal"] * x["power"])
    return SiteError(
        path=path,
        op=op,
        layer=tuple(map(int, layer)),
        sqnr=_decibels(x["signal"], x["noise"]),
        local_sqnr=_decibels(x["signal"], x["local_noise"]),
        cosine=x["product"] / norms if norms else math.nan,
        max_error=x["largest"],
        local_max_error=x["local_largest"],
    )


def _decibels(signal: float, noise: float) -> float:
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
