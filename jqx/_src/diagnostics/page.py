"""Parts of an HTML page without scripts and external resources, for light and dark mode, desktops
and phones. These functions escape the text passed to them.
"""

import html
import itertools
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..table import Table, grid_html

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""The palette of Okabe and Ito, for any kind of colour vision."""

OTHERS = "#8a8a8a"
"""The colour after the last one of the palette, and of parts that are not quantized."""

ACCENT = "#D55E00"
"""The colour of highlights."""

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


def color_of(index: int) -> str:
    """Returns the colour of a kind: of the palette, as long as it has one."""
    return COLORS[index] if index < len(COLORS) else OTHERS


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


# Names of tensors in pictures and pages: order, common parts, groups of layers.

_PARTS = re.compile(r"\d+|\D+")
_COMPONENT = re.compile(r"[/.]?[^/.\[]+|\[[^\]]*\]?|[/.]")


class Group(NamedTuple):
    """Consecutive rows that belong together, such as those of one layer.

    Attributes:
      name: common prefix of their names; empty if there is none.
      start: index of the first row.
      stop: index after the last row.
    """

    name: str
    start: int
    stop: int


def in_model_order(names: Sequence[str]) -> list[int]:
    """Returns the order in which names are shown: the given order, which is that of the model; but
    with numbers in natural order if the names are sorted as text, as JAX sorts the keys of a dict.
    """
    order = list(range(len(names)))
    components = [re.split(r"[/.]", name) for name in names]
    if list(names) == sorted(names) or components == sorted(components):
        return sorted(order, key=lambda i: _natural(names[i]))
    return order


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Returns a key that sorts numbers by their value."""
    components = re.split(r"[/.]", name)
    parts = [part for component in components for part in [*_PARTS.findall(component), ""]]
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def shortened(names: Sequence[str]) -> tuple[list[str], str]:
    """Returns names without the first and last components that all share, and these as a pattern.
    It is empty if there is only one name; no name is left empty.
    """
    split = [_COMPONENT.findall(name) for name in names]
    limit = max(0, min(map(len, split)) - 1) if len(split) > 1 else 0
    start = min(limit, _shared(split))
    if start and any(parts[start].strip("/.[]").isdecimal() for parts in split):
        start -= 1  # a number needs the word before it
    end = min(limit - start, _shared([parts[::-1] for parts in split]))
    prefix, suffix = "".join(split[0][:start]), "".join(split[0][len(split[0]) - end :])
    short = [name[len(prefix) : len(name) - len(suffix)].lstrip("/.") for name in names]
    return short, f"{prefix}{'/' * bool(prefix)}…{suffix}" if prefix or suffix else ""


def _shared(names: Sequence[Sequence[str]]) -> int:
    """Returns how many first components all names have in common."""
    same = (len(set(parts)) == 1 for parts in zip(*names, strict=False))
    return sum(itertools.takewhile(bool, same))


def groups_of(names: Sequence[str]) -> list[Group]:
    """Returns names in groups of consecutive names that begin with the same layer, or with the same
    parent if there are no layer numbers.
    """
    groups: list[Group] = []
    for row, name in enumerate(names):
        layer = _group(name)
        if groups and layer and groups[-1].name == layer:
            groups[-1] = groups[-1]._replace(stop=row + 1)
        else:
            groups.append(Group(layer, row, row + 1))
    return groups


def _group(name: str) -> str:
    *parts, leaf_name = _COMPONENT.findall(name) or [""]
    if leaf_name.strip("/.").isdecimal():
        return ""  # a number alone is not a name
    for i, part in enumerate(parts):
        if any(map(str.isdecimal, part)):
            return "".join(parts[: i + 1])
    return "".join(parts)


def within(name: str, group: str) -> str:
    """Returns the rest of a name within its group."""
    return name[len(group) :].lstrip("/.")


def cut(text: str, limit: int = 44) -> str:
    """Returns text of at most `most` characters: the start and end of longer text."""
    if len(text) <= limit:
        return text
    end = 2 * limit // 3
    return f"{text[: limit - 1 - end]}…{text[-end:]}"
