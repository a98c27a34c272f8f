"""A table that prints as text, in rich, in Markdown and in notebooks."""

import dataclasses
import html
import importlib
import math
from collections.abc import Sequence
from typing import Any, cast


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a header.

    Attributes:
      head: a title for each column.
      rows: cells, as text.
      footer: a line below; empty for none.
      texts: number of columns, from the left, that hold text; the others hold numbers.
      bright: number of rows, from the top, that matter most; the others are dimmed in rich and in
        notebooks. `None` dims none.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    footer: str = ""
    texts: int = 1
    bright: int | None = None

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        lines = [self._line(row, widths) for row in (self.head, *self.rows)]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:], *([self.footer] if self.footer else [])])

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = [
            cell.ljust(width) if i < self.texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    def is_dim(self, row: int) -> bool:
        """Whether a row, counted from the top, is dimmed."""
        return self.bright is not None and row >= self.bright

    def __rich__(self) -> Any:
        rich = importlib.import_module("rich.table")
        text = importlib.import_module("rich.text").Text
        table = rich.Table(caption=text(self.footer), caption_justify="left")
        for i, title in enumerate(self.head):
            table.add_column(text(title), justify="left" if i < self.texts else "right")
        for i, row in enumerate(self.rows):
            table.add_row(*map(text, row), style="dim" if self.is_dim(i) else None)
        return table

    def to_markdown(self) -> str:
        """Returns the table in Markdown."""
        rule = ["---" if i < self.texts else "---:" for i in range(len(self.head))]
        rows = [self.head, rule, *self.rows]
        lines = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows]
        return "\n".join([*lines, *(["", self.footer] if self.footer else [])])

    def to_html(self, title: str = "") -> str:
        """Returns the table in HTML, for a notebook. A long table scrolls, and shows how many rows
        are left out.
        """
        footer = self.footer
        if left_out := max(0, len(self.rows) - _MOST_ROWS):
            count = f"{left_out:,} of {len(self.rows):,} rows are left out here; print shows all."
            footer = f"{count}\n{footer}" if footer else count
        grid = grid_html(self, _MOST_ROWS)
        return _framed(f'<div class="jqx-scroll">{grid}</div>', title, footer)


class Tabular:
    """Base of values that are shown as the table that `table()` returns."""

    def table(self) -> Table:
        """Returns the rows as text."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dict for `json.dumps`; infinite and NaN values are `None`."""
        return finite(dataclasses.asdict(cast(Any, self)))

    def __str__(self) -> str:
        return str(self.table())

    def __rich__(self) -> Any:
        return self.table().__rich__()

    def to_markdown(self) -> str:
        """Returns the table in Markdown."""
        return self.table().to_markdown()

    def _repr_html_(self) -> str:
        return self.table().to_html(type(self).__name__)


class Printed:
    """Base of values that notebooks show in the same form as `print`."""

    def _repr_html_(self) -> str:
        return text_html(str(self), type(self).__name__)


def decibels(x: float) -> str:
    """Returns a ratio in dB as a cell; a dash if there is none."""
    return "-" if math.isnan(x) else "exact" if x == math.inf else f"{x:.1f}"


def size(count: float) -> str:
    """Returns a number of bytes with a unit."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:,.0f} bytes" if unit == "bytes" else f"{count:,.3g} {unit}"


def finite(x: Any) -> Any:
    """Returns a tree of dicts and lists with `None` for infinite and NaN values."""
    if isinstance(x, dict):
        return {name: finite(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


# HTML in notebooks, with escaped text and the colours of a light or dark notebook.

_MOST_ROWS = 500
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


def grid_html(table: Table, limit: int) -> str:
    """Returns the head and the first rows of a `Table` as an element, without style and footer."""
    head = _cells("th", table.head, table.texts)
    body = "".join(
        f"<tr{_class('jqx-dim', table.is_dim(i))}>{_cells('td', row, table.texts)}</tr>"
        for i, row in enumerate(table.rows[:limit])
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def pairs_html(pairs: Sequence[tuple[str, str]], title: str) -> str:
    """Returns names and values as HTML, one pair a row."""
    rows = "".join(f"<tr>{_cells('td', pair, 2)}</tr>" for pair in pairs)
    return _framed(f'<div class="jqx-scroll"><table><tbody>{rows}</tbody></table></div>', title)


def text_html(text: str, title: str) -> str:
    """Returns printed text as HTML."""
    return _framed(f'<div class="jqx-scroll"><pre>{html.escape(text)}</pre></div>', title)


def _framed(inside: str, title: str = "", footer: str = "") -> str:
    """Returns HTML in the style of jqx, between a title and a footer, which are escaped."""
    above = f'<div class="jqx-title">{html.escape(title)}</div>' if title else ""
    below = f"<p>{html.escape(footer)}</p>" if footer else ""
    return f'<div class="jqx">{_STYLE}{above}{inside}{below}</div>'


def _cells(tag: str, row: Sequence[str], texts: int) -> str:
    return "".join(
        f"<{tag}{_class('jqx-text', i < texts)}>{html.escape(cell)}</{tag}>"
        for i, cell in enumerate(row)
    )


def _class(name: str, applies: bool) -> str:
    return f' class="{name}"' if applies else ""
