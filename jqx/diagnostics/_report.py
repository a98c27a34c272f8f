"""`report`: the effect of a plan on the weights, in numbers."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .._added import added
from .._calls import called
from .._errors import fail
from .._table import Table, Tabular
from ..calibrators import Affine
from ..tensor._shared import read
from ..transforms import Plan, quantize_params
from ..transforms._shared import (
    check_concrete,
    check_plan,
    is_array,
    is_quantized,
    named_leaves,
    rooted,
)
from ._table import decibels, finite
from ._weights import WeightError, measure


@dataclasses.dataclass(frozen=True)
class Report(Tabular):
    """The result of `report`. Prints as a table, also in a notebook.

    Attributes:
      weights: the effect of quantization on each weight, in the order of the plan.
      kept: bytes of the parameters that are not quantized.
      sites: number of contractions that are quantized.
      skipped: number of contractions that are not.
      macs: share of the multiply-adds that is quantized; NaN if a size was symbolic.
      codes: the algorithm of `jqx.ptq` that chose the codes; empty if it is not known.
    """

    weights: tuple[WeightError, ...]
    kept: int
    sites: int
    skipped: int
    macs: float
    codes: str = added("")

    @property
    def bytes_before(self) -> int:
        """Bytes of all parameters in float."""
        return self.kept + sum(weight.bytes_before for weight in self.weights)

    @property
    def bytes_after(self) -> int:
        """Bytes of all parameters in memory: a code of less than 8 bits takes one if not packed."""
        return self.kept + sum(weight.bytes_after for weight in self.weights)

    @property
    def bytes_packed(self) -> int:
        """Bytes of all parameters with codes packed, as in files of `jqx.save`. (There a zero point
        of less than 8 bits takes a byte; here it is packed too.)
        """
        return self.kept + sum(weight.bytes_packed for weight in self.weights)

    @property
    def faults(self) -> tuple[WeightError, ...]:
        """The weights with clipped values, or with groups in which all codes mean zero."""
        return tuple(weight for weight in self.weights if weight.dead or weight.clipped)

    def table(self) -> Table:
        """Returns the rows as text."""
        rows = [
            (
                w.path or "(argument)",
                w.scheme,
                f"{w.bits:.2f}",
                f"{w.bytes_before:,}",
                f"{w.bytes_after:,}",
                f"{w.low:.3g} to {w.high:.3g}",
                f"{100 * w.clipped:.2g} %" if w.clipped > 0 else "-",
                str(w.dead or "-"),
                decibels(w.sqnr),
            )
            for w in self.weights
        ]
        head = (
            "path",
            "scheme",
            "bits",
            "bytes",
            "quantized",
            "range",
            "clipped",
            "dead",
            "SQNR dB",
        )
        before, after = self.bytes_before, self.bytes_after
        footer = f"{before:,} bytes of parameters become {after:,}"
        footer += f" ({before / after:.2f} times fewer)" if after else ""
        if 0 < self.bytes_packed < after:
            times = f"{before / self.bytes_packed:.2f}"
            footer += f", with packed codes, as in a file, {self.bytes_packed:,} ({times})"
        count = self.sites + self.skipped
        footer += f"; {self.sites} of {count} contractions quantized"
        if not math.isnan(self.macs):
            footer += f", {100 * self.macs:.1f} % of the multiply-adds"
        if self.codes:
            footer += f"\ncodes: {self.codes}"
        return Table(head, tuple(rows), footer, texts=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict for `json.dumps`; infinite and NaN values are `None`."""
        totals = {
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bytes_packed": self.bytes_packed,
        }
        return {**finite(dataclasses.asdict(self)), **totals}


@called("report", "pass the plan first: jqx.report(plan, params).")
def report(plan: Plan, params: Any, affines: Mapping[str, Affine] | None = None) -> Report:
    """Returns the effect of a plan on the weights: format, bits, bytes, range, error.

    Args:
      plan: from `make_plan`.
      params: the float parameters that it was made for; a tuple of arguments if there are several.
        They are quantized here one at a time; `jqx.interop.Lazy` ones are read for that, and then
        dropped.
      affines: scales of weights that were learned, as `quantize_params` takes them; `None` has them
        computed from the weights.

    Raises:
      TypeError: if `plan` is not a `Plan`.
      ValueError: if a parameter is missing, quantized already, or abstract.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> params = {"a": jnp.ones((64, 8)), "b": jnp.zeros((8, 64)), "bias": jnp.zeros(64)}
      >>> f = lambda p, x: (x @ p["a"]) @ p["b"] + p["bias"]
      >>> plan = jqx.make_plan(f, jqx.presets.w8a16())(params, jnp.ones((2, 64)))
      >>> found = jqx.report(plan, params)
      >>> found.bytes_before, found.bytes_after, [w.path for w in found.faults]
      (4352, 1568, ['b'])
    """
    check_plan("report", plan, params, order="report(plan, params)")
    check_concrete("report", params)
    return report_of(plan, params, lambda: quantize_params(params, plan, affines))


def report_of(plan: Plan, params: Any, quantize: Callable[[], Any]) -> Report:
    """Returns the effect of quantization on the weights; `quantize` returns the quantized ones."""
    leaves = _named(plan, params)
    abstract = [path for path, x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
    if abstract:
        raise fail(
            "report",
            "the parameters have no values.",
            given=f"only shapes for {', '.join(map(repr, abstract[:4]))}",
            expected="float arrays",
            fix="pass the parameters, or print the plan, which needs no values.",
        )
    given, quantized = dict(leaves), dict(_named(plan, quantize()))

    def measured(path: str) -> WeightError:
        return measure(read(given[path]), read(quantized[path]), path)

    macs = [item.macs for item in (*plan.sites, *plan.skipped)]
    known = [n for n in macs if n is not None]
    whole = len(known) == len(macs) and sum(known) > 0
    return Report(
        weights=tuple(measured(w.path) for w in plan.weights),
        kept=sum(x.nbytes for path, x in leaves if plan.weight_at(path) is None),
        sites=len(plan.sites),
        skipped=len(plan.skipped),
        macs=sum(known[: len(plan.sites)]) / sum(known) if whole else math.nan,
    )


def _named(plan: Plan, params: Any) -> list[tuple[str | None, Any]]:
    """Returns the leaves of parameters with their paths, which start with the position if there are
    several arguments; `None` for leaves that are not weights.
    """
    named = named_leaves("report", rooted(plan.params, params), plan)
    return [(path, x) for path, x in named if is_quantized(x) or is_array(x)]
