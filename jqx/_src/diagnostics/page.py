"""Parts of an HTML page without scripts and external resources, for light and dark mode, desktops
and phones. These functions escape the text passed to them.
"""

import html
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

_STYLE = """
:root{color-scheme:light dark;--back:#fff;--card:#f4f6f8;--ink:#1d2329;--soft:#5b6670;
--line:#d9dee3;--track:#e6eaee;--bar:#0072B2;--bad:#b84c00;--code:#eef1f4}
@media(prefers-color-scheme:dark){:root{--back:#14181c;--card:#1d2329;--ink:#e4e8ec;
--soft:#9aa5b0;--line:#343c44;--track:#2a3138;--bar:#3d9bd4;--bad:#f08a4b;--code:#262d34}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:66rem;padding:1.2rem 1rem 3rem;background:var(--back);
color:var(--ink);font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
font-variant-numeric:tabular-nums}
h1{font-size:1.5rem;line-height:1.2;margin:.2rem 0}
h2{font-size:1.1rem;margin:2rem 0 .3rem;padding-top:.8rem;border-top:1px solid var(--line)}
p{margin:.3rem 0 .6rem;overflow-wrap:anywhere}
.soft{color:var(--soft)}.bad{color:var(--bad)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));gap:.6rem;
margin:1rem 0}
.card{background:var(--card);border-radius:8px;padding:.6rem .8rem;min-width:0}
.card b{display:block;font-size:1.25rem;line-height:1.25;overflow-wrap:anywhere}
.card span{display:block;color:var(--soft);font-size:.82rem;overflow-wrap:anywhere}
.stack{display:grid;grid-template-columns:5.5rem 1fr 5.5rem;gap:.2rem .6rem;align-items:center;
margin:.6rem 0}
.stack>b{text-align:right;font-weight:500}
.whole{display:flex;height:1.3rem;border-radius:3px;overflow:hidden}
.whole i{display:block;height:100%}
.key{display:flex;flex-wrap:wrap;gap:.1rem 1.1rem;font-size:.85rem;margin:.4rem 0 .8rem}
.key i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
.key i.dot{height:2px;width:1.1em;vertical-align:middle}
.bars{list-style:none;margin:0;padding:0}
.bars li{display:grid;grid-template-columns:minmax(0,5fr) minmax(0,5fr) minmax(0,6fr) 4.5rem;
gap:0 .8rem;align-items:center;padding:.14rem 0}
.bars .name{overflow-wrap:anywhere;line-height:1.25}
.bars .detail{color:var(--soft);font-size:.82rem;line-height:1.25;overflow-wrap:anywhere}
.bars .track{position:relative;background:var(--track);height:.72rem;border-radius:3px}
.bars .track i{position:absolute;left:0;top:0;bottom:0;background:var(--bar);border-radius:3px}
.bars .track u{position:absolute;top:-3px;bottom:-3px;width:2px;background:var(--ink)}
.bars .value{text-align:right}
.scroll{overflow:auto;max-height:34rem;width:fit-content;max-width:100%;
border:1px solid var(--line);border-radius:6px;margin:.5rem 0}
table{border-collapse:collapse;font-size:.86rem}
th,td{padding:.25rem .7rem;text-align:right;white-space:nowrap;vertical-align:top}
th{position:sticky;top:0;background:var(--card);font-weight:600}
th.text,td.text{text-align:left}.wrap td{white-space:normal}
tbody tr:nth-child(even){background:var(--card)}
tr.dim{color:var(--soft)}
details{margin:.5rem 0}
summary{cursor:pointer;color:var(--bar)}
code,pre{font:.84rem/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{background:var(--code);border-radius:6px;padding:.5rem .7rem;margin:.2rem 0 .7rem;
overflow:auto;max-height:30rem}
dt{font-weight:600;margin-top:.5rem}dd{margin:0}
@media(max-width:640px){body{padding:.8rem .8rem 2rem}
.bars li{grid-template-columns:minmax(0,1fr) auto;padding:.3rem 0}
.bars .detail{grid-row:3;grid-column:1/3}.bars .track{grid-row:2;grid-column:1/3;margin:.15rem 0}
.stack{grid-template-columns:5rem 1fr 4.4rem}
table{font-size:.78rem}th,td{padding:.25rem .4rem}}
@media print{details>*{display:block}}
"""


class Row(NamedTuple):
    """A row of a list of bars.

    Attributes:
      name: name of the row.
      value: value as text.
      share: length of its bar, from 0 to 1.
      detail: further description.
      faults: problems.
      mark: position of a mark on its bar, from 0 to 1.
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


def page(title: str, body: str) -> str:
    """Returns a whole page with this body."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{_STYLE}</style></head>"
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
    inside = grid_html(table, MOST)
    kind = "scroll wrap" if wrap else "scroll"
    return f'<div class="{kind}" tabindex="0">{inside}</div>{note(*lines) if lines else ""}'


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


def _shared_ends(names: Sequence[str]) -> tuple[str, str]:
    """Returns the prefix and suffix of whole components that all names share; empty if a name would
    be left empty, or there is only one name.
    """
    split = [_COMPONENT.findall(name) for name in names]
    if len(split) < 2:
        return "", ""
    limit = min(map(len, split)) - 1
    start = 0
    while start < limit and len({parts[start] for parts in split}) == 1:
        start += 1
    if start and any(parts[start].strip("/.[]").isdecimal() for parts in split):
        start -= 1  # a number needs the word before it
    end = 0
    while end < limit - start and len({parts[-1 - end] for parts in split}) == 1:
        end += 1
    components = split[0]
    return "".join(components[:start]), "".join(components[len(components) - end :])


def shortened(names: Sequence[str]) -> tuple[list[str], str]:
    """Returns names without their shared parts, and these as a pattern, which may be empty."""
    prefix, suffix = _shared_ends(names)
    short = [name[len(prefix) : len(name) - len(suffix)].lstrip("/.") for name in names]
    return short, f"{prefix}{'/' * bool(prefix)}…{suffix}" if prefix or suffix else ""


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
