"""A table that prints as text, in rich, in Markdown and in notebooks."""

import dataclasses
import html
import importlib
import math
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a head.

    Attributes:
      head: a title for each column.
      rows: cells, as text.
      footer: a line below; empty for none.
      texts: how many columns, from the left, hold text; those behind hold numbers.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    footer: str = ""
    texts: int = 1

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

    def __rich__(self) -> Any:
        rich, text = (
            importlib.import_module("rich.table"),
            importlib.import_module("rich.text").Text,
        )
        table = rich.Table(caption=text(self.footer), caption_justify="left")
        for i, title in enumerate(self.head):
            table.add_column(text(title), justify="left" if i < self.texts else "right")
        for row in self.rows:
            table.add_row(*map(text, row))
        return table

    def to_markdown(self) -> str:
        """Returns the table in Markdown."""
        rule = ["---" if i < self.texts else "---:" for i in range(len(self.head))]
        rows = [self.head, rule, *self.rows]
        lines = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows]
        return "\n".join([*lines, *(["", self.footer] if self.footer else [])])

    def to_html(self) -> str:
        """Returns the table in HTML."""

        def cells(tag: str, row: Sequence[str]) -> str:
            align = ["left" if i < self.texts else "right" for i in range(len(row))]
            return "".join(
                f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>'
                for side, cell in zip(align, row, strict=True)
            )

        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        caption = f"<p>{html.escape(self.footer)}</p>" if self.footer else ""
        return f"<table><thead><tr>{cells('th', self.head)}</tr></thead>{body}</table>{caption}"


class Tabular:
    """Base of values that are shown as a table: `table()` gives it."""

    def table(self) -> Table:
        """Returns the rows as text."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table())

    def __rich__(self) -> Any:
        return self.table().__rich__()

    def to_markdown(self) -> str:
        """Returns the table in Markdown."""
        return self.table().to_markdown()

    def _repr_html_(self) -> str:
        return self.table().to_html()


def decibels(x: float) -> str:
    """Returns a ratio in dB as a cell; of what never ran, a dash."""
    return "-" if math.isnan(x) else "exact" if x == math.inf else f"{x:.1f}"


def finite(x: Any) -> Any:
    """Returns a tree of dicts and lists with `None` for infinite and NaN values."""
    if isinstance(x, dict):
        return {name: finite(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
