"""Bias correction: gives results of quantized contractions the means that they have in float."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from .._compat import Eqn
from .._errors import fail
from .._table import Printed
from ..calibrators import Affine
from ..observers import Mean, ObservedSite
from ..observers._shared import MeanStats, check_weight, flags
from ..transforms import ChannelMap, Plan, Site, dequantize_params, map_channels, simulate
from ..transforms._shared import (
    FORMS,
    Address,
    Batch,
    Call,
    Channels,
    Chosen,
    Observe,
    OnNonfinite,
    Records,
    Stats,
    addressed,
    arguments_of,
    arrays_of,
    check_finite,
    check_mode,
    contractions,
    in_order,
    is_counted,
    merged_flags,
    observed,
    observed_parts,
    progress_bar,
    trace_call,
    value_of,
    warn_left_out,
)
from ._biases import into_biases
from ._decisions import body_of
from ._few import Few
from ._options import algorithm

_NAME = "algorithms.bias_correction"


@dataclasses.dataclass(frozen=True)
class SiteShift:
    """The difference between the means of a site's result and those in float: the root mean square
    over its channels and the steps of the surrounding scans.

    Attributes:
      site: its name.
      before: the difference with the codes alone.
      after: the difference with all shifts.
    """

    site: str
    before: float
    after: float


class BiasReport(Printed, tuple[SiteShift, ...]):
    """The sites whose results were shifted. Prints as a table."""

    def __str__(self) -> str:
        lines = [f"{'shift before':>12} {'after':>10}  site"]
        lines += [f"{x.before:12.4g} {x.after:10.4g}  {x.site}" for x in self]
        return "\n".join(lines)


@algorithm("bias_correction", "pass options by name: bias_correction(weight=is_token).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasCorrection:
    """Shifts the result of each quantized contraction so that its channels have the means that they
    have in float: an algorithm of `jqx.ptq` that runs after codes are chosen.

    Sites are corrected in order, in one pass. For each batch, the results of a site get the means
    that they have in float before later sites run. The final shift is the mean over batches.
    Lookups are not corrected, nor is the rounding of a result (`output=`).

    A site in a `while` or a `cond`, or in a scan that does not step over its weight, gets one
    correction for all its steps, and later sites do not see it in this pass. The report says what
    remains. With products of narrow matrices (`eora`, `loftq`), which are added to a result after
    its site, the mean of the site itself is corrected.

    Sites with experts that few rows reached are not corrected, nor other sites with rows of zeros
    beside them: a shift is added to all rows.

    A shift is folded into the bias that is added to the result, if that is a parameter of float32
    or wider with no other use. Otherwise it is added at its site (`jqx.Quantized.maps`), where XLA
    fuses it with the operations that follow.

    Attributes:
      weight: weights of the rows, as in `jqx.observers.mean`.

    Raises:
      TypeError: `weight` is not a function.
      ValueError: at run time, the plan quantizes no contraction with a weight.

    Source: Nagel et al., arXiv:1906.04721, section 4.2, but with measured means.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f, policy = lambda w, x: x @ w, jqx.Policy({".*": "int2"})
      >>> w, x = jnp.array([[1.0, 0.4], [0.4, 1.0]]), jnp.array([[1.0, 2.0], [3.0, 2.0]])
      >>> quantize = jqx.ptq(f, policy, jqx.algorithms.bias_correction(), progress=False)
      >>> quantize(w, [x])(x).mean(0).round(2), f(w, x).mean(0).round(2)
      (Array([2.8, 2.8], dtype=float32), Array([2.8, 2.8], dtype=float32))
    """

    weight: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_weight("algorithms.bias_correction", self.weight)

    def correct(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        codes: Any,
        affines: Mapping[str, Affine],
        batches: Iterable[Any],
        *,
        progress: bool = True,
        on_nonfinite: OnNonfinite = "error",
    ) -> Chosen:
        """Returns the same codes, biases that include shifts, and the shifts to add at sites."""
        sites = [site for site in plan.sites if _is_corrected(site)]
        if not sites:
            raise fail(
                "algorithms.bias_correction",
                "the plan quantizes no contraction with a weight.",
                given=f"{len(plan.sites)} sites",
                expected="a site of a weight and an activation",
                fix="leave this algorithm out.",
            )
        batches, means = list(batches), _Means(_bare(plan), self.weight, on_nonfinite)
        operands = dataclasses.replace(plan, weights=())  # weights are dequantized codes already
        quantized = lambda g: simulate(g, operands, affines)  # noqa: E731
        bar = progress_bar("bias correction", "pass", total=4) if progress else None

        def seen(function: Callable[..., Any], own: Any, wanted: Any = None) -> list[Any]:
            found = means.of(function, own, batches, wanted)
            if bar is not None:
                bar.update()
            return found

        real = dequantize_params(codes)
        exact = seen(f, params)
        arguments = arguments_of(plan, params, batches[0])
        call = trace_call("algorithms.bias_correction", f, plan.parameters, arguments, {})
        few = Few(Stats((), means.flags))
        left_as_is = _left_as_is(few, sites, call)
        once = _run_once(plan, call.jaxpr) - left_as_is
        wanted = [{key: _mean(x[key]) for key in once if key in x} for x in exact]
        shifted = seen(quantized(f), real, wanted)
        shifts = means.difference(exact, shifted)
        shifts = {key: x for key, x in shifts.items() if key not in left_as_is}
        maps = {key: ChannelMap(shift=x) for key, x in shifts.items()}
        lost = [
            means.difference(exact, seen(quantized(g), real))
            for g in (f, map_channels(f, plan, maps))
        ]
        means.warn()
        if bar is not None:
            bar.close()
        report = BiasReport(
            SiteShift(site.name, _size(lost[0][key]), _size(lost[1][key] - shifts.get(key, 0)))
            for site in sites
            for key in [site.output_key]
        )
        params, left = into_biases(plan, call, codes, batches[0], shifts)
        return Chosen(params, report, {key: maps[key] for key in left}, few=few.why)


bias_correction = BiasCorrection


def _is_corrected(site: Site) -> bool:
    return site.op != "gather" and any(x.role == "weight" for x in site.operands)


def _left_as_is(few: Few, sites: Sequence[Site], call: Call) -> set[str]:
    """Returns the keys of results that are not shifted: those of sites with a matrix that few rows
    reached, and those with rows of zeros beside such a site. A shift is added to the rows of other
    experts too.
    """
    items = {item.address: item for item in contractions(call)}
    found, with_zeros = set(), []
    for site in sites:
        parts = {x.about.role: x for x in observed_parts(site, items[site.address])}
        weight, operand = parts["weight"], parts.get("activation")
        if operand is None:
            continue
        channels = math.prod(weight.kind.shape[axis] for axis in weight.about.contracted)
        if few.at(site, operand.key, channels).any():
            found.add(site.output_key)
        elif (few.share(site, operand.key) < 1).any():
            with_zeros.append(site)
    if found:
        few.why |= {x.name: "a shift would reach the rows of other experts" for x in with_zeros}
        found |= {x.output_key for x in with_zeros}
    return found


def _bare(plan: Plan) -> Plan:
    """Returns a plan that does not round, for observing without calibrators."""
    sites = [
        dataclasses.replace(
            site,
            operands=tuple(dataclasses.replace(x, spec=None) for x in site.operands),
            output=None,
        )
        for site in plan.sites
    ]
    return dataclasses.replace(plan, sites=tuple(sites))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ResultMean(Mean):
    """Sums the channels of results, as `mean` sums those of operands."""

    def looks_at(self, site: ObservedSite) -> bool:
        return site.role == "result" and site.has_weight and site.op != "gather"

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> MeanStats:
        return _flat(super().empty(operand, _of_channels(site)), operand.shape, site)

    def observe(self, x: jax.Array, site: ObservedSite) -> MeanStats:
        return _flat(super().observe(x, _of_channels(site)), x.shape, site)


def _of_channels(site: ObservedSite) -> ObservedSite:
    return dataclasses.replace(site, contracted=site.channels, sizes=None)


def _flat(stats: MeanStats, shape: Sequence[int], site: ObservedSite) -> MeanStats:
    """Returns sums `[*batch, channels]`."""
    stack = [shape[axis] for axis in site.batch]
    rows = stats.rows.reshape(*stack, 1) if stats.rows.ndim else stats.rows
    return MeanStats(stats.total.reshape(*stack, -1), rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shifting(Observe):
    """Shifts results to the wanted means, at sites that have some."""

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[Any, Records]:
        result, records = super().at_site(site, eqn, operands)
        if site.output_key not in self.affines:
            return result, records
        stats = next(x for x in records.values() if isinstance(x, MeanStats))
        place = next(i for i, x in enumerate(site.operands) if x.role == "weight")
        wanted: Any = self.affines[site.output_key]
        shift = wanted - _mean(stats)
        y = value_of(result)
        spread = Channels.of_result(eqn, place).spread(shift, y.shape)
        shifted = y + spread.astype(y.dtype)
        if is_counted(result):
            return dataclasses.replace(result, value=shifted), records
        return shifted, records


class _Means:
    """The means of results over batches.

    Attributes:
      flags: the flags of operands and results, over all batches and calls.
    """

    def __init__(self, plan: Plan, weight: Callable[..., Any] | None, on_nonfinite: OnNonfinite):
        self._plan, self._observer = plan, _ResultMean(weight=weight)
        self._ignores = check_mode(_NAME, on_nonfinite)
        self._left_out: list[Mapping[str, Any]] = []
        self.flags: dict[str, Any] = {}

    def of(
        self, f: Callable[..., Any], params: Any, batches: Sequence[Any], wanted: Any = None
    ) -> list[dict[str, MeanStats]]:
        """Returns the means of each batch, by the key of the result. Results are shifted to the
        wanted means before later sites run.
        """
        plan, observers = self._plan, {".*": (self._observer, flags)}
        arrays, filled = arrays_of(params)
        rules = Observe if wanted is None else _Shifting

        @jax.jit
        def seen(arrays: list[Any], wanted: Any, batch: Any) -> Any:
            given = arguments_of(plan, filled(arrays), batch)
            means = observed(f, plan, observers, rules, wanted or {}, ignores=self._ignores)
            stats = means(*given)[1]
            means = {
                key.rpartition("@")[0]: x for key, x in stats.items() if isinstance(x, MeanStats)
            }
            return means, stats.flags, stats.left_out

        each, found = [None] * len(batches) if wanted is None else wanted, []
        for place, (own, x) in enumerate(zip(each, batches, strict=True)):
            means, seen_flags, left_out = seen(arrays, own, Batch(x))
            check_finite(_NAME, in_order(self._plan, seen_flags), place)
            self._left_out.append(left_out)
            self.flags = merged_flags(self.flags, seen_flags or left_out)
            found.append(means)
        return found

    def warn(self) -> None:
        """Warns of rows that were left out."""
        most: dict[str, Any] = {}
        for batch in self._left_out:
            most = merged_flags(most, batch)
        warn_left_out(_NAME, in_order(self._plan, most))

    def difference(self, a: Sequence[Any], b: Sequence[Any]) -> dict[str, jax.Array]:
        """Returns the means of `a` over all batches minus those of `b`."""
        merge = self._observer.merge
        means = [
            {key: _mean(functools.reduce(merge, (x[key] for x in each))) for key in each[0]}
            for each in (a, b)
        ]
        return {key: means[0][key] - means[1][key] for key in means[0]}


def _run_once(plan: Plan, jaxpr: Any) -> set[str]:
    """Returns the keys of the results of sites that run once for each part of their weight."""
    found: set[str] = set()
    stepped = {loop.address for site in plan.sites for loop in site.loops}

    def look(jaxpr: Any, address: Address) -> None:
        body, _ = _compat.open_jaxpr(jaxpr)
        for here, eqn, marked in addressed(body, address):
            site, name = plan.site_at(here), eqn.primitive.name
            if site is not None:
                found.add(site.output_key)
            elif marked and name in FORMS and name not in ("while", "cond", "shard_map"):
                if name != "scan" or here in stepped:
                    look(body_of(eqn), here)

    look(jaxpr, ())
    return found


def _mean(stats: MeanStats) -> jax.Array:
    rows = jnp.maximum(stats.rows, 1).astype(jnp.float32)
    return stats.total / rows.reshape(rows.shape + (1,) * (stats.total.ndim - rows.ndim))


def _size(x: jax.Array) -> float:
    return float(jnp.sqrt(jnp.mean(x**2)))
