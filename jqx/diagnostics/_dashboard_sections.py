"""The sections of a dashboard, each for the result of one function of jqx."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .._table import Table
from ..transforms import Plan
from ._assignment import Assignment, wholes
from ._budgets import in_words
from ._colors import COLORS, OTHERS
from ._comparison import Comparison
from ._explain import Explanation
from ._lowering import Lowering
from ._names import in_model_order
from ._one_model import of_another_plan
from ._page import Row, bars, code, folded, grid, key, note, section, stacks
from ._report import Report
from ._schemes import short_scheme
from ._sensitivity import Sensitivities
from ._strip import strip
from ._table import decibels, size
from ._weights import WeightError

_REALLY = {
    "codes": "codes by codes",
    "converted": "codes, converted in the kernel",
    "lookup": "lookup of rows",
    "widened first": "codes, written in a wider type first",
    "float": "floats",
    "gone": "no contraction of that name",
}
"""The meaning of each `Explained.really`, the best first."""


def counted(count: int, name: str) -> str:
    """Returns a count with its noun, in words."""
    return f"{count:,} {name}{'s' * (count != 1)}"


def bits_of_report(report: Report) -> float:
    """Returns the mean bits per quantized weight, weighted by float bytes."""
    whole = sum(w.bytes_before for w in report.weights)
    return sum(w.bits * w.bytes_before for w in report.weights) / whole if whole else math.nan


def sizes(report: Report) -> str:
    """Returns the sizes of the parameters before and after, and their formats."""
    found: dict[str, list[WeightError]] = {}
    for weight in report.weights:
        found.setdefault(short_scheme(weight.scheme), []).append(weight)
    groups = sorted(found.items(), key=lambda item: -sum(w.bytes_before for w in item[1]))
    rows = [
        (
            name,
            f"{len(own):,}",
            size(sum(w.bytes_before for w in own)),
            size(sum(w.bytes_after for w in own)),
            f"{bits_of_report(Report(tuple(own), 0, 0, 0, math.nan)):.2f}",
            decibels(min((w.sqnr for w in own if not math.isnan(w.sqnr)), default=math.nan)),
        )
        for name, own in groups
    ]
    kept = size(report.kept)
    rows.append(("not quantized", "-", kept, kept, "-", "-"))
    head = ("format", "weights", "in float", "quantized", "bits", "lowest SQNR dB")
    names = [name for name, _ in groups] + ["not quantized"]
    colors = [*_colors(len(groups)), OTHERS]
    before = [*(sum(w.bytes_before for w in own) for _, own in groups), report.kept]
    after = [*(sum(w.bytes_after for w in own) for _, own in groups), report.kept]
    return section(
        "Sizes and formats",
        stacks(
            [
                ("float", before, size(report.bytes_before)),
                ("quantized", after, size(report.bytes_after)),
            ],
            names,
            colors,
        ),
        grid(Table(head, tuple(rows), "bits: per weight, with its scales, and codes packed")),
    )


def _colors(count: int) -> list[str]:
    return [COLORS[i] if i < len(COLORS) else OTHERS for i in range(count)]


def weights(report: Report) -> str:
    """Returns the signal-to-noise ratio of each weight, the worst first."""
    order = in_model_order([w.path for w in report.weights])
    every = [report.weights[i] for i in order]
    top = max((w.sqnr for w in every if math.isfinite(w.sqnr)), default=1.0) or 1.0
    rows = [
        Row(
            w.path or "(argument)",
            _value(w.sqnr),
            1.0 if w.sqnr == math.inf else w.sqnr / top,
            f"{short_scheme(w.scheme)}, {size(w.bytes_after)}",
            _faults(w),
        )
        for w in sorted(every, key=lambda w: (not math.isnan(w.sqnr), w.sqnr))
    ]
    faults = counted(len(report.faults), "weight")
    warning = f"{faults} with clipped values, or with groups that stand for zeros alone."
    return section(
        "Weights, the worst first",
        note("Signal to noise in dB: 6 dB more is half the error."),
        strip([w.path for w in every], [w.sqnr for w in every]),
        note(warning, kind="bad") if report.faults else "",
        bars(rows, "weights"),
    )


def _value(x: float) -> str:
    return "not a number" if math.isnan(x) else f"{decibels(x)}{' dB' * math.isfinite(x)}"


def _faults(w: WeightError) -> str:
    clipped = f"{100 * w.clipped:.2g} % clipped" if w.clipped > 0 else ""
    dead = f"{counted(w.dead, 'group')} of zeros" if w.dead else ""
    return ", ".join(filter(None, [clipped, dead]))


def costs(found: Sensitivities, plan: Plan | None) -> str:
    """Returns the cost of quantizing each weight, the worst first; a plan tells which of them were
    measured with other formats.
    """
    others = of_another_plan(found, plan) if plan else set()
    most = max((row.cost for row in found.ranked), default=0.0) or 1.0
    whole = sum(row.cost for row in found.ranked if row.cost > 0) or 1.0
    rows = [
        Row(
            row.name,
            f"{100 * row.cost / whole:.1f} %",
            row.cost / most,
            f"cost {row.cost:.3g}" + f", {short_scheme(row.scheme)}" * (row.path in others),
        )
        for row in found.ranked
    ]
    everything = ""
    if found.everything is not None:
        everything = f" All quantized at once cost {found.everything:.3g}."
    another = "Measured with another plan than that of this model: the formats of "
    another += f"{counted(len(others), 'weight')} differ, and stand beside their costs."
    return section(
        "Sensitivities",
        note(
            f"What the quantization of each weight costs, in units of the metric, and its share "
            f"({found.estimate}).{everything}",
            *([another] if others else []),
        ),
        bars(rows, "weights"),
    )


def sites(found: Comparison) -> str:
    """Returns the error of each site."""
    order = in_model_order([row.name for row in found.sites])
    every = [found.sites[i] for i in order]
    own, gathered = [row.local_sqnr for row in every], [row.sqnr for row in every]
    top = max((x for x in (*own, *gathered) if math.isfinite(x)), default=1.0) or 1.0
    rows = [
        Row(
            row.name or "(argument)",
            _value(row.local_sqnr),
            1.0 if row.local_sqnr == math.inf else row.local_sqnr / top,
            short_scheme(row.scheme) or row.op,
            mark=None if math.isnan(row.sqnr) else min(1.0, row.sqnr / top),
        )
        for row in sorted(every, key=lambda row: _nan_last(row.local_sqnr))
    ]
    result = found.result
    return section(
        "Results, site by site",
        note(
            f"The result of the function: {_value(result.sqnr)}, cosine {result.cosine:.6f}, "
            f"largest difference {result.max_error:.3g}."
        ),
        strip([row.name for row in every], own, gathered),
        key([("this site alone, on float operands", "var(--bar)")], "with all before it"),
        bars(rows, "sites"),
        folded("The table, in the order of the model", grid(found.table())),
    )


def _nan_last(x: float) -> float:
    return math.inf if math.isnan(x) else x


def chip(found: Explanation | Lowering, plan: Plan | None) -> str:
    """Returns what a compiler makes of each site; a plan says which sites are quantized, if the
    explanation was made without a plan.
    """
    low = found.lowering if isinstance(found, Explanation) else found
    sizes = ", ".join(f"{name} {size(n)}" for name, n in low.memory.items() if n)
    lines = [f"Compiled for {low.target}. Memory: {sizes or 'not said by the compiler'}."]
    if low.cycles is not None:
        lines.append(f"{low.cycles:,} cycles estimated.")
    inside = [note(*lines)]
    if isinstance(found, Explanation):
        inside += _explained(found, plan)
    else:
        wrong = [c for c in found.contractions if c.widened or c.left]
        count = counted(len(found.contractions), "contraction")
        inside.append(note(f"{count}; {len(wrong)} with remarks."))
    table = "The table of contractions"
    return section("What the chip runs", *inside, folded(table, grid(found.table())))


def _explained(found: Explanation, plan: Plan | None) -> list[str]:
    known = {(site.path, site.op) for site in plan.sites} if plan else set()
    count = Counter(site.really for site in found.sites)
    kinds = [kind for kind in _REALLY if count[kind]]
    names = [f"{_REALLY[kind]} ({count[kind]})" for kind in kinds]
    colors = [dict(zip(_REALLY, (*COLORS[:4], OTHERS, COLORS[4]), strict=True))[x] for x in kinds]
    whole = counted(len(found.sites), "site")
    parts = [("sites", [float(count[kind]) for kind in kinds], whole)]
    wanted = [
        (site.name, site.op, site.plan or "-", _REALLY[site.really])
        for site in found.sites
        if site.really in ("float", "widened first", "gone")
        and not site.plan.startswith("left in float")
        and (site.plan or (site.path, site.op) in known)
    ]
    inside = [stacks(parts, names, colors)]
    if wanted:
        title = f"{counted(len(wanted), 'quantized site')} whose kernels read no codes:"
        head = ("site", "op", "plan", "what runs")
        inside += [note(title, kind="bad"), grid(Table(head, tuple(wanted), texts=4))]
    if found.plain:
        inside.append(
            note(
                f"{counted(len(found.plain), 'weight')} not laid out as {found.lowering.target} "
                "reads them fastest: jqx.quantize_params(..., target=), or jqx.pack_for, does it.",
                kind="bad",
            )
        )
    return inside


def in_float(plan: Plan) -> str:
    """Returns the contractions that a plan leaves in float, and why."""
    reasons: dict[str, list[str]] = {}
    for item in plan.skipped:
        reasons.setdefault(item.reason, []).append(f"{item.path or '(unnamed)'}, {item.op}")
    for item in plan.unreached:
        reasons.setdefault(item.reason, []).append(item.path or "(argument)")
    rows = [
        (why, str(len(own)), _some(own))
        for why, own in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    inside = grid(Table(("why", "how many", "which"), tuple(rows), texts=3), wrap=True)
    return section(
        "What stays in float",
        inside if rows else note("Nothing: every contraction is quantized."),
        folded("The plan", grid(plan.table())),
    )


def _some(names: Sequence[str]) -> str:
    each = [f"{name} ({n} times)" if n > 1 else name for name, n in Counter(names).items()]
    rest = len(each) - 4
    return "; ".join(each[:4]) + (f"; and {rest} more" if rest > 0 else "")


def mixture(found: Assignment) -> str:
    """Returns the scheme that a search gave to each weight, and the cost of one scheme for all."""
    rows = [
        (name, f"{bits:.2f}", size(count), f"{x:.4g}") for name, bits, count, x in wholes(found)
    ]
    schemes = tuple((path or "(argument)", name) for path, name in found.schemes.items())
    count = Counter(found.schemes.values())
    lines = [f"Weights: {', '.join(f'{n} in {name}' for name, n in count.most_common())}."]
    lines += [f"Budget: {in_words(found.budget)}."] if found.budget is not None else []
    lines.append("Of the candidates of the search: this model may have other formats.")
    scales = "bits and bytes: of the weights of the plan, with their scales"
    return section(
        "Search",
        note(*lines),
        grid(Table(("scheme", "bits a weight", "bytes", "metric"), tuple(rows), scales)),
        folded("The scheme of each weight", grid(Table(("path", "scheme"), schemes, texts=2))),
    )


def algorithm(details: Any, codes: str) -> str:
    """Returns the report of an algorithm."""
    inside = [note(codes)] if codes else []
    if details is not None:
        table = details.table() if hasattr(details, "table") else None
        found = grid(table) if isinstance(table, Table) else code(str(details))
        inside.append(folded("What it reports", found))
    return section("Algorithm", *inside)
