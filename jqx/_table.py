"""A table that prints as text, in rich, in Markdown and in notebooks."""

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

from ._html import table_html, text_html


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

    def is_dim(self, place: int) -> bool:
        """Whether a row is dimmed."""
        return self.bright is not None and place >= self.bright

    def __rich__(self) -> Any:
        rich, text = (
            importlib.import_module("rich.table"),
            importlib.import_module("rich.text").Text,
        )
        table = rich.Table(caption=text(self.footer), caption_justify="left")
        for i, title in enumerate(self.head):
            table.add_column(text(title), justify="left" if i < self.texts else "right")
        for place, row in enumerate(self.rows):
            table.add_row(*map(text, row), style="dim" if self.is_dim(place) else None)
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
        return table_html(self, title)


class Tabular:
    """Base of values that are shown as the table that `table()` returns."""

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
        return self.table().to_html(type(self).__name__)


class Printed:
    """Base of values that notebooks show in the same form as `print`."""

    def _repr_html_(self) -> str:
        return text_html(str(self), type(self).__name__)
