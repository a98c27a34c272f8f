"""A lowering as a table: what each contraction multiplies and what runs it."""

import re
from collections.abc import Sequence
from typing import Any

from .._table import Table

HEAD = ("contraction", "multiplies", "reads", "runs", "times", "cycles", "remarks")

_KEYS = re.compile(r"\w+(?:\[[^\]]*\])*\['([^']*)'\]")
"""The path of an argument, such as `args[0]['up']['kernel']`: tables show the last key."""


def lowering_table(lowering: Any) -> Table:
    """Returns the table of a `Lowering`."""
    return text_table(HEAD, _rows(lowering), _footer(lowering))


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], footer: str) -> Table:
    """Returns a table whose columns all hold text."""
    return Table(tuple(head), tuple(map(tuple, rows)), footer, texts=len(head))


def _rows(lowering: Any) -> list[tuple[str, ...]]:
    return [
        (
            c.site or short(c.op_name),
            multiplied(c),
            read(c),
            c.runs,
            "?" if c.times is None else str(c.times),
            "-" if c.cycles is None else str(c.cycles),
            remarks(c),
        )
        for c in lowering.contractions
    ]


def short(op_name: str) -> str:
    """Returns the last scopes of a contraction."""
    return "/".join(op_name.split("/")[-2:]) or "(unnamed)"


def multiplied(c: Any) -> str:
    """Returns the types that a contraction multiplies."""
    return f"{' x '.join(c.operands)} -> {c.result}" if c.operands else c.result


def read(c: Any) -> str:
    """Returns the dtypes that a contraction reads."""
    return " x ".join("+".join(dtypes) or "-" for dtypes in c.reads) or "-"


def remarks(c: Any) -> str:
    """Returns the problems of a contraction."""
    copies = [_KEYS.sub(r"\1", copy) for copy in c.widened]
    return "; ".join([*(f"writes {copy} first" for copy in copies), *filter(None, [c.left])])


def _footer(lowering: Any) -> str:
    sizes = [f"{name} {size:,}" for name, size in lowering.memory.items() if size]
    cycles = "" if lowering.cycles is None else f"; {lowering.cycles:,} cycles estimated"
    count = len(lowering.contractions)
    memory = f"; bytes: {', '.join(sizes)}" if sizes else ""
    return f"{count} contractions on {lowering.target}{memory}{cycles}"
