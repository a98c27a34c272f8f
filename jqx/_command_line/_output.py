"""What sub-commands print beside tables."""

import json
from typing import Any

from ..diagnostics._shared import finite


def print_json(data: Any) -> None:
    """Prints JSON; infinite and NaN numbers, which it lacks, as null."""
    print(json.dumps(finite(data), indent=2))


def savings(before: int, after: int) -> str:
    """Returns in words what became of a number of bytes."""
    times = f" ({before / after:.2f} times fewer)" if after else ""
    return f"{before:,} bytes become {after:,}{times}"
