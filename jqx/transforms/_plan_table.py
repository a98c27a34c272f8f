"""A plan as a table: every contraction, how it is quantized, or why it is not."""

import importlib
from typing import Any

_WIDTHS = (60, 24, 48, 48, 64, 160)
"""How many characters a column takes at most, as `HEAD` names them: longer cells are cut."""

_MOST = 8
"""How many parameters that no contraction reads are listed."""

HEAD = ("path", "op", "shapes", "weight", "activation", "rule")


def as_text(plan: Any) -> str:
    """Returns the table of a `Plan`, and its footer, as plain text."""
    rows = [HEAD, *_rows(plan)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], _footer(plan)])


def as_rich_table(plan: Any) -> Any:
    """Returns the same as a `rich.table.Table`, which fits a terminal. rich alone calls this."""
    rich, text = importlib.import_module("rich.table"), importlib.import_module("rich.text").Text
    table = rich.Table(*HEAD, caption=_footer(plan), caption_justify="left")
    done = len(plan.sites)
    for i, row in enumerate(_rows(plan)):
        table.add_row(*map(text, row), style=None if i < done else "dim")
    return table


def _rows(plan: Any) -> list[tuple[str, ...]]:
    rows = []
    for site in plan.sites:
        activation = _specs(site, "activation", plan) + (
            f" -> {site.output}" if site.output else ""
        )
        weight, shapes = _specs(site, "weight", plan), _shapes(site.shapes)
        path = site.path or "(argument)"
        rows.append((path, site.op, shapes, weight, activation, _rule(site)))
    for skip in plan.skipped:
        path = skip.path or "(unnamed)"
        rows.append((path, skip.op, _shapes(skip.shapes), "-", "-", skip.reason))
    for item in plan.unreached[:_MOST]:
        path = item.path or "(argument)"
        rows.append((path, "(none)", _shapes((item.shape,)), "-", "-", item.reason))
    if (rest := len(plan.unreached) - _MOST) > 0:
        rows.append((f"and {rest} more", "(none)", "-", "-", "-", "no contraction reads them"))
    return [tuple(map(_cut, row, _WIDTHS)) for row in rows]


def _cut(text: str, width: int) -> str:
    """Returns a cell of at most a width: of what is longer, the beginning and the end."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[-end:]}"


def _rule(site: Any) -> str:
    """Returns the rule of a site, and where its weight has other codes than that rule gives."""
    if site.codes is None:
        return str(site.rule)
    return f"{site.rule}; takes the codes of its {site.codes}"


def _footer(plan: Any) -> str:
    count = len(plan.sites) + len(plan.skipped)
    tied = [f"{w.path} ({w.sites} sites)" for w in plan.weights if w.sites > 1]
    more = f" and {len(tied) - 4} more" if len(tied) > 4 else ""
    shared = f"; one tensor for {', '.join(tied[:4])}{more}" if tied else ""
    return f"{len(plan.sites)} of {count} contractions quantized{_share(plan)}{shared}"


def _share(plan: Any) -> str:
    """Returns which share of the multiply-adds is quantized, in words; of symbolic sizes no share
    is known.
    """
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
