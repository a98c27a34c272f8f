"""A plan as a table: every contraction, how it is quantized, or why it is not."""

from typing import Any

from .._errors import some
from .._table import Table

_WIDTHS = (60, 24, 48, 48, 64, 160)
"""The largest width of each column of `HEAD` in characters; longer cells are cut."""

_MOST = 8
"""The largest number of parameters that no contraction reads in the table."""

HEAD = ("path", "op", "shapes", "weight", "activation", "rule")


def plan_table(plan: Any) -> Table:
    """Returns the table of a `Plan`; what stays in float is dimmed if the output supports it."""
    rows = tuple(_rows(plan))
    return Table(HEAD, rows, _footer(plan), texts=len(HEAD), bright=len(plan.sites))


def _rows(plan: Any) -> list[tuple[str, ...]]:
    rows = []
    for site in plan.sites:
        activation = _specs(site, "activation", plan) + (
            f" -> {site.output}" if site.output else ""
        )
        weight, shapes = _specs(site, "weight", plan), _shapes(site.shapes)
        rows.append((site.label, site.op, shapes, weight, activation, _rule(site)))
    for i, skip in enumerate(plan.skipped):
        path = plan.label_of_skipped(i)
        rows.append((path, skip.op, _shapes(skip.shapes), "-", "-", skip.reason))
    for item in plan.unreached[:_MOST]:
        path = item.path or "(argument)"
        rows.append((path, "(none)", _shapes((item.shape,)), "-", "-", item.reason))
    if (rest := len(plan.unreached) - _MOST) > 0:
        rows.append((f"and {rest} more", "(none)", "-", "-", "-", "no contraction reads them"))
    return [tuple(map(_cut, row, _WIDTHS)) for row in rows]


def _cut(text: str, width: int) -> str:
    """Returns a cell of at most a width; a longer text keeps its beginning and its end."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[-end:]}"


def _rule(site: Any) -> str:
    """Returns the rule of a site, and a note if its weight has other codes than the rule gives."""
    if site.codes is None:
        return str(site.rule)
    return f"{site.rule}; takes the codes of its {site.codes}"


def _footer(plan: Any) -> str:
    count = len(plan.sites) + len(plan.skipped)
    tied = [f"{w.path} ({w.sites} sites)" for w in plan.weights if w.sites > 1]
    shared = f"; one tensor for {some(tied)}" if tied else ""
    moved = [w.path or "(argument)" for w in plan.weights if {-1, -2} & {*w.moved}]
    order = f"; codes of {some(moved)} stay in order, as f moves its axes" if moved else ""
    return f"{len(plan.sites)} of {count} contractions quantized{_share(plan)}{shared}{order}"


def _share(plan: Any) -> str:
    """Returns the quantized share of the multiply-adds, in words; empty if sizes are symbolic."""
    macs = [item.macs for item in (*plan.sites, *plan.skipped)]
    known = [number for number in macs if number is not None]
    if not sum(known) or len(known) < len(macs):
        return ""
    return f", {100 * sum(known[: len(plan.sites)]) / sum(known):.1f} % of the multiply-adds"


def _specs(site: Any, role: str, plan: Any) -> str:
    specs = []
    for operand in site.operands:
        if operand.role == role:
            weight = plan.weight_at(operand.path) if role == "weight" else None
            spec = weight.spec if weight and operand.spec else operand.spec
            specs.append(str(spec) if spec else "float")
    return " x ".join(dict.fromkeys(specs)) or "-"


def _shapes(shapes: tuple[tuple[int | str, ...], ...]) -> str:
    return " x ".join("[" + ",".join(map(str, shape)) + "]" for shape in shapes)
