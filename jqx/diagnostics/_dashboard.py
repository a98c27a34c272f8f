"""`dashboard`: a page about a quantized model."""

import html
import math
from dataclasses import dataclass
from typing import Any

from .._calls import called
from .._checks import check_instance
from .._errors import fail
from .._files import Path, Replacement
from ..transforms import Plan
from . import _dashboard_sections as sections
from ._assignment import Assignment
from ._comparison import Comparison
from ._explain import Explanation
from ._lowering import Lowering
from ._one_model import check_one_model
from ._page import cards, code, note, page, section, text
from ._report import Report, report
from ._sensitivity import Sensitivities
from ._table import size

_WAYS = {
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
"""For each section, what it is made from and how to get it."""

OF_THE_PLAN = "Sections are of the plan of this model, unless they say otherwise."


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


@called("diagnostics.dashboard", "pass the result of jqx.ptq: dashboard(quantized).")
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
    plan, known = _known(model, params)
    for name, value, kind in (
        ("comparison", comparison, Comparison),
        ("sensitivities", sensitivities, Sensitivities),
        ("explanation", explanation, (Explanation, Lowering)),
        ("assignment", assignment, Assignment),
    ):
        if value is not None:
            fix = f"{next(how for own, how in _WAYS.values() if own == name)}."
            check_instance("diagnostics.dashboard", name, value, kind, fix=fix)
    check_instance("diagnostics.dashboard", "title", title, str, fix='pass title="a name".')
    given = {
        "report": known,
        "comparison": comparison,
        "sensitivities": sensitivities,
        "explanation": explanation,
        "assignment": assignment,
        "plan": plan,
    }
    missing = tuple(name for name, (own, _) in _WAYS.items() if given[own] is None)
    measured = ("comparison", "sensitivities", "explanation", "assignment")
    check_one_model(plan, known, {name: given[name] for name in measured})
    details, codes = getattr(model, "details", None), known.codes if known else ""
    parts = [
        f"<header><h1>{text(title)}</h1>{note(OF_THE_PLAN) if plan else ''}</header>",
        cards(_cards(plan, known, comparison, explanation)),
        sections.sizes(known) if known else "",
        sections.weights(known) if known and known.weights else "",
        sections.costs(sensitivities, plan) if sensitivities else "",
        sections.sites(comparison) if comparison else "",
        sections.chip(explanation, plan) if explanation else "",
        sections.mixture(assignment) if assignment else "",
        sections.algorithm(details, codes) if details is not None or codes else "",
        sections.in_float(plan) if plan else "",
        _missing(missing),
    ]
    return Dashboard(title, page(title, "".join(parts)), missing)


def _known(model: Any, params: Any) -> tuple[Plan | None, Report | None]:
    """Returns the plan and the report of a model."""
    is_plan = isinstance(model, Plan)
    if params is not None and not is_plan:
        raise fail(
            "diagnostics.dashboard",
            "`params` is passed without a plan.",
            given=f"an object of type {type(model).__name__}, and params",
            expected="params only with a Plan: anything else has a report",
            fix="leave params out.",
        )
    if isinstance(model, Plan):
        return model, None if params is None else report(model, params)
    if isinstance(model, Report):
        return None, model
    plan, known = getattr(model, "plan", None), getattr(model, "report", None)
    if isinstance(plan, Plan) and isinstance(known, Report):
        return plan, known
    raise fail(
        "diagnostics.dashboard",
        "`model` is not a quantized model.",
        given=f"an object of type {type(model).__name__}",
        expected="the result of jqx.ptq, a Report, or a Plan",
        fix="pass quantized = jqx.ptq(f, policy)(params, batches), or "
        "jqx.make_plan(f, policy)(params, *batch) and params.",
        error=TypeError,
    )


def _cards(
    plan: Plan | None,
    known: Report | None,
    comparison: Comparison | None,
    explanation: Explanation | Lowering | None,
) -> list[tuple[str, str, str]]:
    """Returns the summary cards at the top of the page."""
    found = []
    if known is not None:
        before, after = known.bytes_before, known.bytes_after
        times = f"{before / after:.2f} times fewer bytes" if after else ""
        if known.bytes_packed < after:
            times += f"; {size(known.bytes_packed)} with packed codes"
        sizes = f"{size(before)} → {size(after)}"
        found.append(("parameters", sizes, times))
        if known.weights:
            bits = sections.bits_of_report(known)
            found.append(("bits a weight", f"{bits:.2f}", f"of {len(known.weights)} quantized"))
    done, skipped, macs = _counts(plan, known)
    share = "" if math.isnan(macs) else f"{100 * macs:.1f} % of the multiply-adds"
    found.append(("contractions quantized", f"{done} of {done + skipped}", share))
    worst = [w for w in known.weights if not math.isnan(w.sqnr)] if known else []
    if worst:
        least = min(worst, key=lambda w: w.sqnr)
        value = "exact" if least.sqnr == math.inf else f"{least.sqnr:.1f} dB"
        found.append(("lowest SQNR of a weight", value, least.path or "(argument)"))
    if comparison is not None:
        result = comparison.result.sqnr
        value = "exact" if result == math.inf else f"{result:.1f} dB"
        found.append(("SQNR of the result", value, f"of {len(comparison.sites)} sites together"))
    if isinstance(explanation, Explanation):
        codes = sum(site.is_quantized for site in explanation.sites)
        value = f"{codes} of {len(explanation.sites)}"
        found.append((f"read codes on {explanation.lowering.target}", value, "contractions"))
    return found


def _counts(plan: Plan | None, known: Report | None) -> tuple[int, int, float]:
    if known is not None:
        return known.sites, known.skipped, known.macs
    assert plan is not None
    return len(plan.sites), len(plan.skipped), math.nan


def _missing(names: tuple[str, ...]) -> str:
    if not names:
        return ""
    inside = "".join(f"<dt>{text(name)}</dt><dd>{code(_WAYS[name][1])}</dd>" for name in names)
    keywords = [_WAYS[name][0] for name in names if _WAYS[name][0] not in ("report", "plan")]
    how = "Pass them to dashboard by name: " + ", ".join(f"{x}={x}" for x in keywords) + "."
    return section(
        "Not on this page",
        note("Nothing was given for these.", *([how] if keywords else [])),
        f"<dl>{inside}</dl>",
    )
