"""`dashboard`: a page about a quantized model, and the parts of its HTML."""

import html
import math
import pathlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import Plan
from ..checks import called, check_instance
from ..errors import fail, some
from ..files import Path, Replacement
from ..table import Table, decibels, grid_html, size
from .compare import Comparison
from .lowering import Explanation, Lowering
from .report import (
    COLORS,
    OTHERS,
    Report,
    WeightError,
    color_of,
    in_model_order,
    report,
    scheme_of_site,
    short_scheme,
)
from .search import Assignment, in_words, totals
from .sensitivity import Sensitivities

_NAME = "diagnostics.dashboard"

_SECTIONS = {
    "Sizes and weights": (
        "report",
        "dashboard(quantized)  # of jqx.ptq\n"
        "dashboard(plan, params)  # float parameters, which are rounded to nearest",
    ),
    "Results, site by site": (
        "comparison",
        "comparison = jqx.compare(f, quantized)(params, *batch)",
    ),
    "Sensitivities": (
        "sensitivities",
        "sensitivities = jqx.diagnostics.sensitivity(f, quantized.plan)(params, *batches)",
    ),
    "What the chip runs": (
        "explanation",
        "explanation = jqx.explain(\n"
        "    f, quantized.params, *batch, plan=quantized.plan, affines=quantized.affines\n"
        ')  # target="tpu-v6e" asks the compiler of another chip',
    ),
    "Search": (
        "assignment",
        "assignment = jqx.diagnostics.search(f, policy, candidates, budget)(params, *batches)",
    ),
    "What stays in float": ("plan", "dashboard(quantized)  # in place of its report"),
}
"""For each section, the argument that it is made from, and a program that computes it."""

_OF_THE_PLAN = "Sections are of the plan of this model, unless they say otherwise."


@dataclass(frozen=True)
class Dashboard:
    """A page about a quantized model, which `dashboard` returns. A notebook shows it.

    Attributes:
      title: title of the page.
      html: the whole page, without scripts and external resources.
      missing: the sections that the page does not have, since their data was not passed.
    """

    title: str
    html: str
    missing: tuple[str, ...]

    def save(self, path: Path) -> None:
        """Writes the page to a file, in UTF-8, such as `"model.html"`.

        Raises:
          TypeError: if `path` is not a path.
          OSError: if the file cannot be written.
        """
        with Replacement("Dashboard.save", path) as file:
            file.write(0, memoryview(self.html.encode()))
            file.commit()

    def __repr__(self) -> str:
        return f"Dashboard({self.title!r}, {len(self.html.encode()):,} bytes of HTML)"

    def _repr_html_(self) -> str:
        inside = html.escape(self.html)
        style = "width:100%;height:46rem;border:1px solid rgba(128,128,128,.4);border-radius:6px"
        name = html.escape(self.title)
        return f'<iframe srcdoc="{inside}" sandbox title="{name}" style="{style}"></iframe>'


def _instead(name: str) -> str | None:
    """Returns what to write in place of an argument that does not exist."""
    if name in ("search", "found"):
        return "pass what jqx.diagnostics.search returns as assignment=."
    if name in ("compare", "sensitivity", "explain", "lowering"):
        known = {"compare": "comparison", "sensitivity": "sensitivities"}
        return f"{name}= is called {known.get(name, 'explanation')}=."
    return None


@called("diagnostics.dashboard", "pass the result of jqx.ptq: dashboard(quantized).", _instead)
def dashboard(
    model: Any,
    params: Any = None,
    *,
    comparison: Comparison | None = None,
    sensitivities: Sensitivities | None = None,
    explanation: Explanation | Lowering | None = None,
    assignment: Assignment | None = None,
    title: str = "Quantized model",
) -> Dashboard:
    """Returns a page about a quantized model: sizes, errors, sensitivities, and what the chip runs.

    Only the report of a plan is computed. Data that is not passed has no section; the page lists
    these sections and how to get them. A comparison and an explanation must have the paths and
    formats of the plan of the model. Sensitivities may be measured with another plan, and a search
    has formats of its own; both must have paths of the model, and the page says what they are of.

    Args:
      model: the result of `jqx.ptq`, or of `jqx.load` for a quantized function; or a `Report`; or a
        `Plan`, with `params`.
      params: the float parameters of a plan, for its report; a tuple if there are several.
      comparison: from `jqx.compare`: the error of each site.
      sensitivities: from `jqx.diagnostics.sensitivity`: the cost of quantizing each weight.
      explanation: from `jqx.explain` or `jqx.lowering`: the compiled contractions.
      assignment: from `jqx.diagnostics.search`: the scheme of each weight.
      title: title of the page.

    Returns:
      A `Dashboard`: `save` writes it, and a notebook shows it. The page is one file that needs no
      network and no script. It is readable in light and dark mode, on desktops and phones.

    Raises:
      TypeError: if `model` is none of these, or another argument has another type.
      ValueError: if `params` is passed without a plan, or does not fit it; or if what is passed
        is of different models, or a comparison or an explanation is of another plan.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"]
      >>> a, b, x = jax.random.normal(jax.random.key(0), (3, 16, 16))
      >>> params = {"a": a, "b": b}
      >>> quantized = jqx.ptq(f, jqx.presets.w8a16(), progress=False)(params, [x])
      >>> found = jqx.compare(f, quantized)(params, x)
      >>> page = jqx.diagnostics.dashboard(quantized, comparison=found, title="two layers")
      >>> page.missing
      ('Sensitivities', 'What the chip runs', 'Search')
    """
    plan, weights = _plan_and_report(model, params)
    kinds = {
        "comparison": (comparison, Comparison),
        "explanation": (explanation, (Explanation, Lowering)),
        "sensitivities": (sensitivities, Sensitivities),
        "assignment": (assignment, Assignment),
    }
    for name, (value, kind) in kinds.items():
        if value is not None:
            check_instance(_NAME, name, value, kind, fix=_FIXES[name])
    check_instance(_NAME, "title", title, str, fix='pass title="a name".')
    results = {name: value for name, (value, _) in kinds.items()}
    _check_one_model(plan, weights, results)
    arguments = {**results, "report": weights, "plan": plan}
    missing = tuple(name for name, (x, _) in _SECTIONS.items() if arguments[x] is None)
    parts = [
        f"<header><h1>{text(title)}</h1>{note(_OF_THE_PLAN) if plan else ''}</header>",
        cards(_summary(plan, weights, comparison, explanation)),
        _sizes(weights) if weights else "",
        _weights(weights) if weights and weights.weights else "",
        _costs(sensitivities, plan) if sensitivities else "",
        _sites(comparison) if comparison else "",
        _chip(explanation, plan) if explanation else "",
        _mixture(assignment) if assignment else "",
        _algorithm(getattr(model, "details", None), weights.codes if weights else ""),
        _in_float(plan) if plan else "",
        _missing(missing),
    ]
    return Dashboard(title, document(title, "".join(parts)), missing)


def _plan_and_report(model: Any, params: Any) -> tuple[Plan | None, Report | None]:
    kind = type(model).__name__
    if params is not None and not isinstance(model, Plan):
        problem = f"`params` is passed without a plan, with an object of type {kind}."
        raise fail(_NAME, problem, fix="leave params out: only a Plan needs them, for its report.")
    if isinstance(model, Plan):
        return model, None if params is None else report(model, params)
    if isinstance(model, Report):
        return None, model
    plan, weights = getattr(model, "plan", None), getattr(model, "report", None)
    if isinstance(plan, Plan) and isinstance(weights, Report):
        return plan, weights
    problem = f"`model` is not a quantized model, but of type {kind}."
    fix = "pass jqx.ptq(f, policy)(params, batches), a Report, or a Plan and its params."
    raise fail(_NAME, problem, fix=fix, error=TypeError)


def _summary(
    plan: Plan | None,
    weights: Report | None,
    comparison: Comparison | None,
    explanation: Explanation | Lowering | None,
) -> list[tuple[str, str, str]]:
    """Returns the cards at the top of the page."""
    entries = []
    if weights is not None:
        float_bytes, quantized_bytes = weights.bytes_before, weights.bytes_after
        ratio = f"{float_bytes / quantized_bytes:.2f} times fewer bytes" if quantized_bytes else ""
        if weights.bytes_packed < quantized_bytes:
            ratio += f"; {size(weights.bytes_packed)} with packed codes"
        entries.append(("parameters", f"{size(float_bytes)} → {size(quantized_bytes)}", ratio))
        if weights.weights:
            bits = _mean_bits(weights.weights)
            entries.append(("bits a weight", f"{bits:.2f}", f"of {len(weights.weights)} quantized"))
        done, skipped, macs = weights.sites, weights.skipped, weights.macs
    else:
        assert plan is not None
        done, skipped, macs = len(plan.sites), len(plan.skipped), math.nan
    share = "" if math.isnan(macs) else f"{100 * macs:.1f} % of the multiply-adds"
    entries.append(("contractions quantized", f"{done} of {done + skipped}", share))
    measured = [w for w in weights.weights if not math.isnan(w.sqnr)] if weights else []
    if measured:
        worst = min(measured, key=lambda w: w.sqnr)
        entries.append(("lowest SQNR of a weight", _sqnr(worst.sqnr), worst.path or "(argument)"))
    if comparison is not None:
        sites = f"of {len(comparison.sites)} sites together"
        entries.append(("SQNR of the result", _sqnr(comparison.result.sqnr), sites))
    if isinstance(explanation, Explanation):
        codes = sum(site.is_quantized for site in explanation.sites)
        value = f"{codes} of {len(explanation.sites)}"
        entries.append((f"read codes on {explanation.lowering.target}", value, "contractions"))
    return entries


def _count(number: int, name: str) -> str:
    """Returns a number with its noun."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def _mean_bits(weights: Iterable[WeightError]) -> float:
    """Returns the mean bits per quantized weight, weighted by float bytes."""
    total = sum(w.bytes_before for w in weights)
    return sum(w.bits * w.bytes_before for w in weights) / total if total else math.nan


def _sqnr(x: float) -> str:
    return "not a number" if math.isnan(x) else f"{decibels(x)}{' dB' * math.isfinite(x)}"


def _sizes(report: Report) -> str:
    """Returns the sizes of the parameters before and after, and their formats."""
    by_scheme: dict[str, list[WeightError]] = {}
    for weight in report.weights:
        by_scheme.setdefault(short_scheme(weight.scheme), []).append(weight)
    groups = sorted(by_scheme.items(), key=lambda item: -sum(w.bytes_before for w in item[1]))
    float_bytes = [sum(w.bytes_before for w in weights) for _, weights in groups]
    quantized_bytes = [sum(w.bytes_after for w in weights) for _, weights in groups]
    rows = [
        (
            scheme,
            f"{len(weights):,}",
            size(float_bytes[i]),
            size(quantized_bytes[i]),
            f"{_mean_bits(weights):.2f}",
            decibels(min((w.sqnr for w in weights if not math.isnan(w.sqnr)), default=math.nan)),
        )
        for i, (scheme, weights) in enumerate(groups)
    ]
    rows.append(("not quantized", "-", size(report.kept), size(report.kept), "-", "-"))
    head = ("format", "weights", "in float", "quantized", "bits", "lowest SQNR dB")
    stacked = [
        ("float", [*float_bytes, report.kept], size(report.bytes_before)),
        ("quantized", [*quantized_bytes, report.kept], size(report.bytes_after)),
    ]
    table = Table(head, tuple(rows), "bits: per weight, with its scales, and codes packed")
    colors = [*map(color_of, range(len(groups))), OTHERS]
    picture = stacks(stacked, [row[0] for row in rows], colors)
    return section("Sizes and formats", picture, grid(table))


def _weights(report: Report) -> str:
    """Returns the signal-to-noise ratio of each weight, the worst first."""
    weights = [report.weights[i] for i in in_model_order([w.path for w in report.weights])]
    top = max((w.sqnr for w in weights if math.isfinite(w.sqnr)), default=1.0) or 1.0
    rows = []
    for w in sorted(weights, key=lambda w: (not math.isnan(w.sqnr), w.sqnr)):
        clipped = f"{100 * w.clipped:.2g} % clipped" if w.clipped > 0 else ""
        dead = f"{_count(w.dead, 'group')} of zeros" if w.dead else ""
        detail = f"{short_scheme(w.scheme)}, {size(w.bytes_after)}"
        problems = ", ".join(filter(None, [clipped, dead]))
        rows.append(Row(w.path or "(argument)", _sqnr(w.sqnr), w.sqnr / top, detail, problems))
    faults = _count(len(report.faults), "weight")
    warning = f"{faults} with clipped values, or with groups that stand for zeros alone."
    return section(
        "Weights, the worst first",
        note("Signal to noise in dB: 6 dB more is half the error."),
        note(warning, kind="bad") if report.faults else "",
        bars(rows, "weights"),
    )


def _costs(costs: Sensitivities, plan: Plan | None) -> str:
    """Returns the cost of quantizing each weight, the worst first; a plan tells which of them were
    measured with other formats.
    """
    differing = set()
    if plan is not None:
        formats = _formats_of(plan)
        for row in (row for row in costs.ranked if row.scheme):
            planned = _without_axes(formats.get(row.path, ()))
            if not _without_axes(row.scheme.split("; ")) <= planned:
                differing.add(row.path)
    largest = max((row.cost for row in costs.ranked), default=0.0) or 1.0
    total = sum(row.cost for row in costs.ranked if row.cost > 0) or 1.0
    rows = [
        Row(
            row.name,
            f"{100 * row.cost / total:.1f} %",
            row.cost / largest,
            f"cost {row.cost:.3g}" + f", {short_scheme(row.scheme)}" * (row.path in differing),
        )
        for row in costs.ranked
    ]
    line = "What the quantization of each weight costs, in units of the metric, and its share "
    line += f"({costs.estimate})."
    if costs.everything is not None:
        line += f" All quantized at once cost {costs.everything:.3g}."
    lines = [line]
    if differing:
        lines.append(
            "Measured with another plan than that of this model: the formats of "
            f"{_count(len(differing), 'weight')} differ, and stand beside their costs."
        )
    return section("Sensitivities", note(*lines), bars(rows, "weights"))


def _sites(comparison: Comparison) -> str:
    """Returns the error of each site."""
    order = in_model_order([row.name for row in comparison.sites])
    sites = [comparison.sites[i] for i in order]
    ratios = [x for row in sites for x in (row.local_sqnr, row.sqnr) if math.isfinite(x)]
    top = max(ratios, default=1.0) or 1.0
    rows = [
        Row(
            row.name or "(argument)",
            _sqnr(row.local_sqnr),
            row.local_sqnr / top,
            short_scheme(row.scheme) or row.op,
            mark=None if math.isnan(row.sqnr) else row.sqnr / top,
        )
        for row in sorted(sites, key=lambda row: (math.isnan(row.local_sqnr), row.local_sqnr))
    ]
    result = comparison.result
    return section(
        "Results, site by site",
        note(
            f"The result of the function: {_sqnr(result.sqnr)}, cosine {result.cosine:.6f}, "
            f"largest difference {result.max_error:.3g}."
        ),
        key([("this site alone, on float operands", "var(--bar)")], "with all before it"),
        bars(rows, "sites"),
        folded("The table, in the order of the model", grid(comparison.table())),
    )


_KINDS = {
    "codes": ("codes by codes", COLORS[0]),
    "converted": ("codes, converted in the kernel", COLORS[1]),
    "lookup": ("lookup of rows", COLORS[2]),
    "widened first": ("codes, written in a wider type first", COLORS[3]),
    "float": ("floats", OTHERS),
    "gone": ("no contraction of that name", COLORS[4]),
}
"""The meaning of each `Explained.executed_as`, and its colour; the best first."""


def _chip(compiled: Explanation | Lowering, plan: Plan | None) -> str:
    """Returns what a compiler makes of each site; a plan says which sites are quantized, if the
    explanation was made without a plan.
    """
    low = compiled.lowering if isinstance(compiled, Explanation) else compiled
    memory = ", ".join(f"{name} {size(n)}" for name, n in low.memory.items() if n)
    lines = [f"Compiled for {low.target}. Memory: {memory or 'not said by the compiler'}."]
    if low.cycles is not None:
        lines.append(f"{low.cycles:,} cycles estimated.")
    inside = [note(*lines)]
    if isinstance(compiled, Explanation):
        inside += _explained(compiled, plan)
    else:
        remarks = sum(bool(c.widened or c.left) for c in low.contractions)
        count = _count(len(low.contractions), "contraction")
        inside.append(note(f"{count}; {remarks} with remarks."))
    table = folded("The table of contractions", grid(compiled.table()))
    return section("What the chip runs", *inside, table)


def _explained(explanation: Explanation, plan: Plan | None) -> list[str]:
    planned = {(site.path, site.op) for site in plan.sites} if plan else set()
    counts = Counter(site.executed_as for site in explanation.sites)
    kinds = [kind for kind in _KINDS if counts[kind]]
    bar = [float(counts[kind]) for kind in kinds]
    names = [f"{_KINDS[kind][0]} ({counts[kind]})" for kind in kinds]
    total = _count(len(explanation.sites), "site")
    inside = [stacks([("sites", bar, total)], names, [_KINDS[kind][1] for kind in kinds])]
    without_codes = tuple(
        (site.name, site.op, site.plan or "-", _KINDS[site.executed_as][0])
        for site in explanation.sites
        if site.executed_as in ("float", "widened first", "gone")
        and not site.plan.startswith("left in float")
        and (site.plan or (site.path, site.op) in planned)
    )
    if without_codes:
        title = f"{_count(len(without_codes), 'quantized site')} whose kernels read no codes:"
        head = ("site", "op", "plan", "what runs")
        inside += [note(title, kind="bad"), grid(Table(head, without_codes, texts=4))]
    if explanation.plain:
        count = _count(len(explanation.plain), "weight")
        target = explanation.lowering.target
        line = f"{count} not laid out as {target} reads them fastest: "
        line += "jqx.quantize_params(..., target=), or jqx.pack_for, does it."
        inside.append(note(line, kind="bad"))
    return inside


def _mixture(assignment: Assignment) -> str:
    """Returns the scheme that a search gave to each weight, and the cost of one scheme for all."""
    rows = tuple(
        (name, f"{bits:.2f}", size(count), f"{x:.4g}")
        for name, bits, count, x in totals(assignment)
    )
    schemes = tuple((path or "(argument)", name) for path, name in assignment.schemes.items())
    table = grid(Table(("path", "scheme"), schemes, texts=2))
    counts = Counter(assignment.schemes.values()).most_common()
    lines = [f"Weights: {', '.join(f'{n} in {name}' for name, n in counts)}."]
    if assignment.budget is not None:
        lines.append(f"Budget: {in_words(assignment.budget)}.")
    lines.append("Of the candidates of the search: this model may have other formats.")
    footer = "bits and bytes: of the weights of the plan, with their scales"
    return section(
        "Search",
        note(*lines),
        grid(Table(("scheme", "bits a weight", "bytes", "metric"), rows, footer)),
        folded("The scheme of each weight", table),
    )


def _algorithm(details: Any, codes: str) -> str:
    """Returns what an algorithm reports; nothing without an algorithm."""
    if details is None and not codes:
        return ""
    inside = [note(codes)] if codes else []
    if details is not None:
        table = details.table() if hasattr(details, "table") else None
        shown = grid(table) if isinstance(table, Table) else code(str(details))
        inside.append(folded("What it reports", shown))
    return section("Algorithm", *inside)


def _in_float(plan: Plan) -> str:
    """Returns the contractions that a plan leaves in float, and why."""
    reasons: dict[str, list[str]] = {}
    for item in plan.skipped:
        reasons.setdefault(item.reason, []).append(f"{item.path or '(unnamed)'}, {item.op}")
    for item in plan.unreached:
        reasons.setdefault(item.reason, []).append(item.path or "(argument)")
    rows = []
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        counts = Counter(names).items()
        listed = [f"{name} ({n} times)" if n > 1 else name for name, n in counts]
        others = f"; and {len(listed) - 4} more" if len(listed) > 4 else ""
        rows.append((reason, str(len(names)), "; ".join(listed[:4]) + others))
    table = grid(Table(("why", "how many", "which"), tuple(rows), texts=3), wrap=True)
    return section(
        "What stays in float",
        table if rows else note("Nothing: every contraction is quantized."),
        folded("The plan", grid(plan.table())),
    )


def _missing(names: tuple[str, ...]) -> str:
    if not names:
        return ""
    inside, keywords = "", []
    for name in names:
        argument, program = _SECTIONS[name]
        inside += f"<dt>{text(name)}</dt><dd>{code(program)}</dd>"
        if argument not in ("report", "plan"):
            keywords.append(f"{argument}={argument}")
    lines = ["Nothing was given for these."]
    if keywords:
        lines.append(f"Pass them to dashboard by name: {', '.join(keywords)}.")
    return section("Not on this page", note(*lines), f"<dl>{inside}</dl>")


# Whether all that a page shows is of one model. A comparison, and an explanation with a plan, must
# have the paths and formats of the plan of the model; sensitivities and what a search found may
# have other formats, but only paths of the model.

Formats = Mapping[str, set[str]]
"""For each path, how the contractions on it are quantized."""

_AXES = re.compile(r"(per_axis|along) ?\([^)]*\)")
"""Numbers of axes in a scheme, which differ where batches have more axes."""

_STEPS = re.compile(r"\[\d+:\d+\]$")
"""The steps of a scan that a part of a weight is for."""

_FIXES = {
    "comparison": "pass jqx.compare(f, quantized)(params, *batch).",
    "explanation": "pass jqx.explain(f, quantized.params, *batch, plan=quantized.plan).",
    "sensitivities": "pass jqx.diagnostics.sensitivity(f, quantized.plan)(params, *batches), or "
    "what was measured with another plan of the same function and parameters.",
    "assignment": "pass what jqx.diagnostics.search found for the same function and parameters.",
}


def _check_one_model(plan: Plan | None, report: Report | None, results: Mapping[str, Any]) -> None:
    if plan is None:
        assert report is not None
        formats, paths = {}, {weight.path for weight in report.weights}
    else:
        formats = _formats_of(plan)
        others = (*plan.skipped, *plan.unreached, *plan.weights)
        paths = {*formats, *(item.path for item in others)}
    for name, result in results.items():
        result_formats = _formats_in(result)
        if plan is not None and result_formats is not None:
            _check_formats(name, result_formats, formats)
        elif paths:
            _check_paths(name, _paths_in(result), paths, subset=plan is not None)


def _formats_of(plan: Plan) -> dict[str, set[str]]:
    return _gathered((site.path, scheme_of_site(site)) for site in plan.sites)


def _gathered(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    formats: dict[str, set[str]] = {}
    for path, scheme in pairs:
        formats.setdefault(path, set()).add(scheme)
    return formats


def _formats_in(result: Any) -> Formats | None:
    """Returns the formats of a comparison, or of an explanation that was made with a plan."""
    if isinstance(result, Comparison):
        return _gathered((site.path, site.scheme) for site in result.sites)
    if isinstance(result, Explanation) and any(site.plan for site in result.sites):
        left = ("left in float", "quantized already")
        sites = (site for site in result.sites if not site.plan.startswith(left))
        return _gathered((site.path, site.plan) for site in sites)
    return None


def _paths_in(result: Any) -> list[str]:
    if isinstance(result, Sensitivities):
        return [row.path for row in result.ranked]
    if isinstance(result, Explanation | Comparison):
        return [site.path for site in result.sites]
    return list(result.schemes) if isinstance(result, Assignment) else []


def _check_formats(name: str, result: Formats, model: Formats) -> None:
    for path in {**result, **model}:
        schemes, expected = result.get(path, set()), model.get(path, set())
        if _without_axes(schemes) != _without_axes(expected) and "" not in schemes | expected:
            problem = f"`{name}` is of another plan than the plan of the model."
            detail = f"{path or '(argument)'} as {_joined(schemes)} in `{name}`"
            expected = f"{_joined(expected)}, as in the plan of the model"
            raise fail(_NAME, problem, given=detail, expected=expected, fix=_FIXES[name])


def _check_paths(name: str, paths: list[str], model: set[str], subset: bool) -> None:
    """Checks that paths are those of the model; unless `subset`, the model may have fewer."""
    parts = _parts(model)
    unknown = [path for path in paths if not _parts([path]) <= parts]
    if not unknown or (not subset and parts <= _parts(paths)):
        return
    detail = f"the paths {some(map(repr, unknown), 3)} in `{name}`"
    expected = f"paths of the model, such as {', '.join(map(repr, sorted(model)[:3]))}"
    problem = f"`{name}` is of another model."
    raise fail(_NAME, problem, given=detail, expected=expected, fix=_FIXES[name])


def _parts(paths: Iterable[str]) -> set[str]:
    """Returns the weights that paths join or are steps of."""
    return {_STEPS.sub("", part) for path in paths for part in path.split("+")}


def _without_axes(schemes: Iterable[str]) -> set[str]:
    return {_AXES.sub(r"\1", scheme) for scheme in schemes}


def _joined(schemes: Iterable[str]) -> str:
    return " and ".join(sorted(schemes)) or "float, or no contraction,"


# Parts of an HTML page without scripts and external resources, for light and dark mode, desktops
# and phones. These functions escape the text passed to them.

OPEN = 15
"""Number of rows of a list that are shown unfolded."""

MOST = 2000
"""Maximum number of rows of a list on a page."""


class Row(NamedTuple):
    """A row of a list of bars.

    Attributes:
      name: name of the row.
      value: value as text.
      share: length of its bar: from 0 to 1, or as one of these if it is outside; NaN is 0.
      detail: further description.
      faults: problems.
      mark: position of a mark on its bar, as `share`.
    """

    name: str
    value: str
    share: float
    detail: str = ""
    faults: str = ""
    mark: float | None = None


def text(value: object) -> str:
    """Returns escaped text for HTML."""
    return html.escape(str(value))


def document(title: str, body: str) -> str:
    """Returns a whole page with this body."""
    style = pathlib.Path(__file__).with_name("page.css").read_text("utf-8")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{style}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def section(title: str, *inside: str) -> str:
    """Returns a section, of HTML, under a title."""
    return f"<section><h2>{text(title)}</h2>{''.join(inside)}</section>"


def note(*lines: str, kind: str = "soft") -> str:
    """Returns a paragraph."""
    return f'<p class="{kind}">{"<br>".join(map(text, lines))}</p>'


def cards(entries: Iterable[tuple[str, str, str]]) -> str:
    """Returns cards, each with a name, a value and a remark."""
    inside = "".join(
        f'<div class="card"><span>{text(name)}</span><b>{text(value)}</b>'
        f"<span>{text(remark)}</span></div>"
        for name, value, remark in entries
    )
    return f'<div class="cards">{inside}</div>'


def stacks(
    rows: Sequence[tuple[str, Sequence[float], str]], names: Sequence[str], colors: Sequence[str]
) -> str:
    """Returns stacked bars, one below the other on one scale, and a legend of the colours.

    Args:
      rows: name, parts, and sum as text of each bar.
      names: names of the parts.
      colors: colours of the parts.
    """
    longest = max((sum(parts) for _, parts, _ in rows), default=0) or 1.0
    inside = ""
    for name, parts, total in rows:
        segments = "".join(
            f'<i style="width:{100 * part / longest:.3f}%;background:{color}"'
            f' title="{text(label)}"></i>'
            for part, label, color in zip(parts, names, colors, strict=True)
            if part
        )
        inside += (
            f'<span>{text(name)}</span><div class="whole">{segments}</div><b>{text(total)}</b>'
        )
    return f'<div class="stack">{inside}</div>{key(zip(names, colors, strict=True))}'


def key(entries: Iterable[tuple[str, str]], line: str = "") -> str:
    """Returns a legend of colours, and of a line if there is one."""
    inside = "".join(
        f'<span><i style="background:{color}"></i>{text(name)}</span>' for name, color in entries
    )
    if line:
        inside += f'<span><i class="dot" style="background:var(--ink)"></i>{text(line)}</span>'
    return f'<div class="key">{inside}</div>'


def bars(rows: Sequence[Row], plural: str, shown: int = OPEN) -> str:
    """Returns a list of bars; for a long list, the first rows, and the others folded."""
    page = f'<ol class="bars">{"".join(map(_bar, rows[:shown]))}</ol>'
    others = rows[shown:MOST]
    if others:
        summary = f"The other {len(others):,} {plural}"
        page += f"<details><summary>{text(summary)}</summary>"
        page += f'<ol class="bars">{"".join(map(_bar, others))}</ol></details>'
    if len(rows) > MOST:
        page += note(f"{len(rows) - MOST:,} more {plural} are left out of this page.")
    return page


def _bar(row: Row) -> str:
    faults = f' <span class="bad">{text(row.faults)}</span>' if row.faults else ""
    mark = "" if row.mark is None else f'<u style="left:{100 * _part(row.mark):.2f}%"></u>'
    return (
        f'<li><span class="name">{text(row.name)}</span>'
        f'<span class="detail">{text(row.detail)}{faults}</span>'
        f'<span class="track"><i style="width:{100 * _part(row.share):.2f}%"></i>{mark}</span>'
        f'<span class="value">{text(row.value)}</span></li>'
    )


def _part(x: float) -> float:
    return min(1.0, max(0.0, x)) if x == x else 0.0


def grid(table: Table, *, wrap: bool = False) -> str:
    """Returns a scrollable table with its footer; long cells can be wrapped."""
    left_out = max(0, len(table.rows) - MOST)
    lines = [f"{left_out:,} more rows are left out of this page."] if left_out else []
    lines += table.footer.splitlines()
    kind = "scroll wrap" if wrap else "scroll"
    below = note(*lines) if lines else ""
    return f'<div class="{kind}" tabindex="0">{grid_html(table, MOST)}</div>{below}'


def folded(title: str, inside: str) -> str:
    """Returns HTML that is shown when its title is clicked."""
    return f"<details><summary>{text(title)}</summary>{inside}</details>"


def code(lines: str) -> str:
    """Returns lines of a program, or its output."""
    return f"<pre>{text(lines)}</pre>"
