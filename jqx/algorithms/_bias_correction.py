"""Bias correction: results of quantized contractions get the means that they have in float."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._calls import called
from .._checks import check_integer, require_that
from ..calibrators import Affine
from ..observers import Mean, ObservedSite
from ..observers._shared import MeanStats, check_weight
from ..transforms import (
    ChannelMap,
    Plan,
    calibrate,
    dequantize_params,
    map_channels,
    merge_stats,
    simulate,
)
from ..transforms._shared import Chosen, Site, arguments_of, arrays_of, progress_bar

_STILL = 1e-2
"""The part of the first difference of means at which they agree."""


@dataclasses.dataclass(frozen=True)
class SiteShift:
    """How far the means of the result of a site are from those in float: the root mean square of
    the differences, over its channels and the steps of the scans around it.

    Attributes:
      site: its name.
      before: of the codes alone.
      after: with all shifts.
    """

    site: str
    before: float
    after: float


class BiasReport(tuple[SiteShift, ...]):
    """The sites whose results were shifted. Prints as a table."""

    def __str__(self) -> str:
        lines = [f"{'before':>10} {'after':>10}  site"]
        lines += [f"{x.before:10.4g} {x.after:10.4g}  {x.site}" for x in self]
        return "\n".join(lines)


@called("algorithms.bias_correction", "options go by name: bias_correction(steps=50).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasCorrection:
    """Adds to the result of each quantized contraction what it takes for its channels to have the
    means that they have in float: an algorithm of `jqx.ptq`, for codes that are chosen. The shifts
    are those of all sites together, each with all before it corrected, as a pass from site to site
    would find them: batches are passed through again with the shifts found so far, until means
    agree. A lookup is not corrected.

    A shift is added at its site (`jqx.Quantized.maps`); XLA joins it with what follows.

    Attributes:
      steps: how often batches are passed through at most; it ends where no root mean square of the
        differences at a site is more than a hundredth of what it was at first.
      weight: how much rows count, as that of `jqx.observers.mean`.

    Raises:
      TypeError: an option is not of its kind.
      ValueError: `steps` is less than 1; when it runs, the plan quantizes no contraction with a
        weight.

    Source: Nagel et al., arXiv:1906.04721, section 4.2, with means that are measured.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f, policy = lambda w, x: x @ w, jqx.Policy({".*": "int2"})
      >>> w, x = jnp.array([[1.0, 0.4], [0.4, 1.0]]), jnp.array([[1.0, 2.0], [3.0, 2.0]])
      >>> quantize = jqx.ptq(f, policy, jqx.algorithms.bias_correction(), progress=False)
      >>> quantized = quantize(w, [x])
      >>> quantized.maps[":dot_general:out"][0].shift[0] > 0.7, quantized(x).mean(0).round(2)
      (Array(True, dtype=bool), Array([2.8, 2.8], dtype=float32))
    """

    steps: int = 30
    weight: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        name = "algorithms.bias_correction"
        steps = check_integer(name, "steps", self.steps)
        require_that(
            steps > 0,
            error=ValueError,
            function=name,
            problem="`steps` is not positive.",
            given=f"steps == {steps}",
            expected="1 or more",
            mend="leave it out: it ends where means agree.",
        )
        check_weight(name, self.weight)

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
    ) -> Chosen:
        """Returns the codes as they are, and what is added at sites."""
        sites = [site for site in plan.sites if _is_corrected(site)]
        require_that(
            sites,
            error=ValueError,
            function="algorithms.bias_correction",
            problem="the plan quantizes no contraction with a weight.",
            given=f"{len(plan.sites)} sites",
            expected="a site of a weight and an activation",
            mend="leave it out.",
        )
        means = _Means(_bare(plan), self.weight, list(batches))
        wanted = means.of(f, params)({})
        operands = dataclasses.replace(plan, weights=())  # these are what codes stand for
        quantized = means.of(f, dequantize_params(codes), lambda g: simulate(g, operands, affines))
        shifts = {site.output_key: jnp.zeros_like(wanted[site.output_key]) for site in sites}
        first: dict[str, float] = {}
        size: dict[str, float] = {}
        bar = progress_bar("bias correction", "pass", total=self.steps) if progress else None
        for _ in range(self.steps):
            seen = quantized(shifts)
            error = {key: wanted[key] - seen[key] - shift for key, shift in shifts.items()}
            size = {key: float(np.sqrt(np.mean(np.square(x)))) for key, x in error.items()}
            first = first or size
            if bar is not None:
                bar.update()
            if all(size[key] <= _STILL * first[key] for key in size):
                break
            shifts = {key: shift + error[key] for key, shift in shifts.items()}
        if bar is not None:
            bar.close()
        names = {site.output_key: site.name for site in sites}
        report = BiasReport(SiteShift(names[key], first[key], size[key]) for key in size)
        return Chosen(codes, report, {key: ChannelMap(shift=x) for key, x in shifts.items()})


bias_correction = BiasCorrection


def _is_corrected(site: Site) -> bool:
    return site.op != "gather" and any(x.role == "weight" for x in site.operands)


def _bare(plan: Plan) -> Plan:
    """Returns a plan that rounds nothing: to observe with, without calibrators."""
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
    """Sums the channels of results, as `mean` does those of operands."""

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


class _Means:
    """The means of results over batches, by key: `[*loops, *batch, channels]`."""

    def __init__(self, plan: Plan, weight: Callable[..., Any] | None, batches: list[Any]):
        self._plan, self._batches = plan, batches
        self._observer = _ResultMean(weight=weight)

    def of(
        self,
        f: Callable[..., Any],
        params: Any,
        rounded: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda g: g,
    ) -> Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]]:
        """Returns a function of shifts at results that returns the means of these before them."""
        plan, observers = self._plan, {".*": self._observer}
        arrays, filled = arrays_of(params)

        @jax.jit
        def seen(arrays: list[Any], shifts: Mapping[str, jax.Array], batch: Any) -> Any:
            maps = {key: ChannelMap(shift=x) for key, x in shifts.items()}
            given = arguments_of(plan, filled(arrays), batch)
            shifted = rounded(map_channels(f, plan, maps))
            return calibrate(shifted, plan, observers=observers)(*given)[1]

        @jax.jit
        def merge(a: Any, b: Any) -> Any:
            return merge_stats(plan, a, b, observers=observers)

        def means(shifts: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            found = functools.reduce(merge, (seen(arrays, shifts, x) for x in self._batches))
            return {key.rsplit("@", 1)[0]: _mean(x) for key, x in found.items()}

        return means


def _mean(stats: MeanStats) -> jax.Array:
    rows = jnp.maximum(stats.rows, 1).astype(jnp.float32)
    return stats.total / rows.reshape(rows.shape + (1,) * (stats.total.ndim - rows.ndim))
