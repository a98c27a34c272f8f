"""Output of sub-commands other than tables."""

import argparse
import json
import os
from typing import Any

from .._errors import fail
from ..diagnostics._shared import finite
from ..tensor import QTensor


def print_json(data: Any) -> None:
    """Prints JSON, with infinite and NaN numbers, which JSON lacks, as null."""
    print(json.dumps(finite(data), indent=2))


def savings(before: int, after: int) -> str:
    """Returns a description of the change of a number of bytes."""
    if before == after:
        return f"{before:,} bytes, as before"
    times = f" ({before / after:.2f} times fewer)" if after else ""
    return f"{before:,} bytes become {after:,}{times}"


def size_of(leaf: Any) -> int:
    """Returns the bytes of a leaf, abstract or not."""
    return leaf.nbytes if isinstance(leaf, QTensor) else leaf.size * leaf.dtype.itemsize


def add_force(parser: argparse.ArgumentParser) -> None:
    """Adds the option to overwrite existing output."""
    parser.add_argument("--force", action="store_true", help="replace existing output")


def check_absent(function: str, path: str, force: bool) -> None:
    """Checks that no file or checkpoint folder is replaced without `--force`."""
    is_model = os.path.isdir(path) and function == "convert"
    if not force and (os.path.isfile(path) or is_model):
        raise fail(
            function,
            f"{path!r} exists already.",
            given="no --force",
            expected="a new name",
            fix="choose another name, or pass --force.",
            error=FileExistsError,
        )
