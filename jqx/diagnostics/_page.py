"""Parts of an HTML page without scripts and external resources, for light and dark mode, desktops
and phones. These functions escape the text passed to them.
"""

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .._html import grid_html
from .._table import Table

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
h3{font-size:.95rem;margin:1rem 0 .3rem}
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
.bars .what{color:var(--soft);font-size:.82rem;line-height:1.25;overflow-wrap:anywhere}
.bars .track{position:relative;background:var(--track);height:.72rem;border-radius:3px}
.bars .track i{position:absolute;left:0;top:0;bottom:0;background:var(--bar);border-radius:3px}
.bars .track u{position:absolute;top:-3px;bottom:-3px;width:2px;background:var(--ink)}
.bars .value{text-align:right}
.strip{position:relative;margin:.6rem 2.7rem .2rem 0;height:7rem;
border-bottom:1px solid var(--soft)}
.strip svg{position:absolute;inset:0;width:100%;height:100%}
.strip hr{position:absolute;left:0;right:0;margin:0;border:0;border-top:1px solid var(--line)}
.strip em{position:absolute;left:100%;padding-left:.3rem;font:.72rem/1 inherit;font-size:.72rem;
color:var(--soft);font-style:normal;transform:translateY(-50%);white-space:nowrap}
.strip rect{fill:var(--bar)}.strip rect.bad{fill:var(--bad)}
.strip polyline{fill:none;stroke:var(--ink);stroke-width:1.3;vector-effect:non-scaling-stroke}
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
.bars .what{grid-row:3;grid-column:1/3}.bars .track{grid-row:2;grid-column:1/3;margin:.15rem 0}
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
      what: further description.
      faults: problems.
      mark: position of a mark on its bar, from 0 to 1.
    """

    name: str
    value: str
    share: float
    what: str = ""
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
    most = max((sum(parts) for _, parts, _ in rows), default=0) or 1.0
    inside = ""
    for name, parts, whole in rows:
        segments = "".join(
            f'<i style="width:{100 * part / most:.3f}%;background:{color}" title="{text(own)}"></i>'
            for part, own, color in zip(parts, names, colors, strict=True)
            if part
        )
        inside += (
            f'<span>{text(name)}</span><div class="whole">{segments}</div><b>{text(whole)}</b>'
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


def bars(rows: Sequence[Row], what: str, shown: int = OPEN) -> str:
    """Returns a list of bars; for a long list, the first rows, and the others folded."""
    found = f'<ol class="bars">{"".join(map(_bar, rows[:shown]))}</ol>'
    rest = rows[shown:MOST]
    if rest:
        more = f"The other {len(rest):,} {what}"
        found += f"<details><summary>{text(more)}</summary>"
        found += f'<ol class="bars">{"".join(map(_bar, rest))}</ol></details>'
    if len(rows) > MOST:
        found += note(f"{len(rows) - MOST:,} more {what} are left out of this page.")
    return found


def _bar(row: Row) -> str:
    faults = f' <span class="bad">{text(row.faults)}</span>' if row.faults else ""
    mark = "" if row.mark is None else f'<u style="left:{100 * _part(row.mark):.2f}%"></u>'
    return (
        f'<li><span class="name">{text(row.name)}</span>'
        f'<span class="what">{text(row.what)}{faults}</span>'
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
