"""Formats numbers for cells of tables and for JSON."""

import math
from typing import Any


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
