"""HTML of tables in notebooks, with escaped text and the colours of a light or dark notebook."""

import html
from collections.abc import Sequence
from typing import Any

MOST_ROWS = 500
"""The largest number of rows of a table that are shown."""

_STYLE = """<style>
.jqx{font-size:.9em;line-height:1.35;max-width:100%}
.jqx .jqx-title{font-weight:600;margin:.2em 0 .4em}
.jqx .jqx-scroll{overflow:auto;max-height:28em;max-width:100%;width:fit-content;
border:1px solid rgba(128,128,128,.35);border-radius:5px}
.jqx table{border-collapse:collapse;border:0;margin:0;font-variant-numeric:tabular-nums}
.jqx th,.jqx td{padding:.2em .7em;border:0;white-space:nowrap;text-align:right;
vertical-align:top;max-width:none}
.jqx .jqx-text{text-align:left}
.jqx th{position:sticky;top:0;font-weight:600;
background:var(--jp-layout-color0,var(--vscode-editor-background,Canvas));
box-shadow:0 1px 0 rgba(128,128,128,.5)}
.jqx tbody tr:nth-child(even){background:rgba(128,128,128,.08)}
.jqx .jqx-dim{opacity:.6}
.jqx pre{margin:0;padding:.4em .7em;line-height:1.35}
.jqx p{margin:.4em 0 0;opacity:.75;white-space:pre-line}
</style>"""


def table_html(table: Any, title: str = "") -> str:
    """Returns a `Table` in HTML, with a title above and its footer below."""
    footer = table.footer
    if left_out := max(0, len(table.rows) - MOST_ROWS):
        count = f"{left_out:,} of {len(table.rows):,} rows are left out here; print shows all."
        footer = f"{count}\n{footer}" if footer else count
    grid = grid_html(table, MOST_ROWS, "jqx-")
    return framed(f'<div class="jqx-scroll">{grid}</div>', title, footer)


def grid_html(table: Any, most: int, prefix: str = "") -> str:
    """Returns the head and the first rows of a `Table` as an element, without style and footer.

    Args:
      table: the table.
      most: the largest number of rows.
      prefix: before the names of the classes, `text` of cells and `dim` of rows.
    """
    head = _cells("th", table.head, table.texts, prefix)
    body = "".join(
        f"<tr{_class(prefix + 'dim', table.is_dim(i))}>"
        f"{_cells('td', row, table.texts, prefix)}</tr>"
        for i, row in enumerate(table.rows[:most])
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def pairs_html(pairs: Sequence[tuple[str, str]], title: str) -> str:
    """Returns names and values as HTML, one pair a row."""
    rows = "".join(f"<tr>{_cells('td', pair, 2, 'jqx-')}</tr>" for pair in pairs)
    return framed(f'<div class="jqx-scroll"><table><tbody>{rows}</tbody></table></div>', title)


def text_html(text: str, title: str) -> str:
    """Returns printed text as HTML."""
    return framed(f'<div class="jqx-scroll"><pre>{html.escape(text)}</pre></div>', title)


def framed(inside: str, title: str = "", footer: str = "") -> str:
    """Returns HTML in the style of jqx, between a title and a footer, which are escaped."""
    above = f'<div class="jqx-title">{html.escape(title)}</div>' if title else ""
    below = f"<p>{html.escape(footer)}</p>" if footer else ""
    return f'<div class="jqx">{_STYLE}{above}{inside}{below}</div>'


def _cells(tag: str, row: Sequence[str], texts: int, prefix: str) -> str:
    return "".join(
        f"<{tag}{_class(prefix + 'text', i < texts)}>{html.escape(cell)}</{tag}>"
        for i, cell in enumerate(row)
    )


def _class(name: str, applies: bool) -> str:
    return f' class="{name}"' if applies else ""
