"""`held_back`: the error on held-back rows, beside that on the rows that calibrated."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax

from ..checks import called
from ..errors import fail
from ..table import Table, Tabular
from ..transforms.arguments import check_batches, check_function
from ..transforms.calibrate import Batch, arguments_of, arrays_of, inputs_of, insert_params
from ..transforms.higher_order import Records
from ..transforms.operands import real_of
from ..transforms.trace import is_array, is_quantized
from .compare import (
    Comparison,
    Members,
    SiteError,
    Sums,
    as_planned,
    checked_call,
    comparison_of,
    is_quantized_function,
    params_and_others,
    places_of,
    side_by_side,
)

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
        pairs = [
            (site, site.local_sqnr, held.local_sqnr)
            for site, held in zip(self.used.sites, self.held_back.sites, strict=True)
        ]
        result = self.used.result
        pairs.append((result, result.sqnr, self.held_back.result.sqnr))
        rows = tuple(map(_row, *zip(*pairs, strict=True)))
        head = ("path", "op", "error on rows used", "on held-back rows", "ratio")
        note = "error: energy of the difference, relative to that of the float result; of a site: "
        note += "with only this site quantized, on float operands"
        return Table(head, rows, note, texts=2)


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
    if not is_quantized_function(quantized):
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


def _row(site: SiteError, used: float, held: float) -> tuple[str, ...]:
    errors = (f"{10 ** (-x / 10):.4g}" for x in (used, held))
    return (site.name or "(argument)", site.op, *errors, f"{_ratio(used, held):.2f}")


def _ratio(used: float, held: float) -> float:
    """Returns the ratio of two errors, from their signal-to-noise ratios in dB."""
    return 10 ** ((used - held) / 10)
