"""`python -m jqx diff`: shows the differences of two files, tensor by tensor."""

import argparse
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from .._table import Table
from ..diagnostics._shared import decibels, scheme_of
from ..interop import Archive
from ..tensor import QTensor
from ..transforms._shared import with_bar
from ._output import print_json

_CHUNK = 1 << 20
_HEAD = ("path", "a", "b", "differs in", "max abs", "relative", "SQNR dB")


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of one tensor between two files.

    Attributes:
      path: name of the tensor.
      a: kind and shape in the first file; `None` if it is missing there.
      b: kind and shape in the second file.
      what: what differs: presence, shape, dtype, scheme, values.
      max_abs: the largest absolute difference of two numbers; NaN if shapes differ.
      relative: `sqrt(sum (a - b)**2 / sum a**2)`; NaN if shapes differ.
      sqnr: the same in decibels, `-20 log10(relative)`.
    """

    path: str
    a: str | None
    b: str | None
    what: tuple[str, ...]
    max_abs: float = math.nan
    relative: float = math.nan
    sqnr: float = math.nan


def add(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "diff",
        help="compare two files",
        description="Compares two safetensors files tensor by tensor, float or quantized: "
        "equal means equal bits. Errors are those of the dequantized values.",
        epilog="Exit codes: 0 equal, 1 different, 2 wrong usage, or a wrong file.",
    )
    parser.add_argument("a", help="a safetensors file")
    parser.add_argument("b", help="another one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the sub-command and returns the exit code: 0 if the files are equal, else 1."""
    with Archive(args.a) as a, Archive(args.b) as b:
        paths = dict.fromkeys((*a.paths, *b.paths))
        found = [compare(path, a, b) for path in with_bar("diff", "tensor", paths)]
    differences = [difference for difference in found if difference.what]
    equal = len(found) - len(differences)
    if args.json:
        listed = [dataclasses.asdict(difference) for difference in differences]
        print_json({"equal": not differences, "same": equal, "differences": listed})
    elif differences:
        rows = tuple(_row(difference) for difference in differences)
        print(Table(_HEAD, rows, f"{equal} tensors equal, {len(rows)} different", texts=4))
    else:
        print(f"{equal} tensors equal")
    return 1 if differences else 0


def compare(path: str, a: Archive, b: Archive) -> Difference:
    """Returns the difference of a tensor between two files."""
    if path not in a or path not in b:
        first, second = (_kind(file.spec(path)) if path in file else None for file in (a, b))
        return Difference(path, first, second, ("presence",))
    left, right = a.spec(path), b.spec(path)
    kinds = _kind(left), _kind(right)
    if left.shape != right.shape:
        return Difference(path, *kinds, ("shape",))
    what = []
    if left.dtype != right.dtype:
        what.append("dtype")
    if jax.tree.structure(left) != jax.tree.structure(right):
        what.append("scheme")
    x, y = a.read(path), b.read(path)
    if what or not _same_bits(x, y):
        errors = _errors(_real(x), _real(y))
        changed = [] if what and not errors[0] else ["values"]
        return Difference(path, *kinds, (*what, *changed), *errors)
    return Difference(path, *kinds, ())


def _kind(leaf: Any) -> str:
    kind = leaf.dtype.name
    if isinstance(leaf, QTensor):
        laid = f" {leaf.layout}" if leaf.layout is not None else ""
        kind = f"{scheme_of(leaf)}{laid}, {kind}"
    return f"{kind}{list(leaf.shape)}"


def _same_bits(x: Any, y: Any) -> bool:
    return all(map(_same_array, jax.tree.leaves(x), jax.tree.leaves(y)))


def _same_array(x: Any, y: Any) -> bool:
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return False
    return np.asarray(x).tobytes() == np.asarray(y).tobytes()


def _real(x: Any) -> np.ndarray:
    return np.asarray(x.dequantize() if isinstance(x, QTensor) else x).reshape(-1)


def _errors(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Returns the largest and the relative difference, and that in dB; sums are float64."""
    wide = np.complex128 if "complex" in x.dtype.name + y.dtype.name else np.float64
    largest = signal = noise = 0.0
    for start in range(0, x.size, _CHUNK):
        a, b = (z[start : start + _CHUNK].astype(wide) for z in (x, y))
        with np.errstate(invalid="ignore"):
            d = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, a - b)
        size = np.abs(d)
        largest = float(np.maximum(largest, size.max()))
        signal, noise = signal + float((np.abs(a) ** 2).sum()), noise + float((size**2).sum())
    if not noise:
        return largest, 0.0, math.inf
    if not math.isfinite(signal + noise):
        return largest, math.nan, math.nan
    relative = math.sqrt(noise / signal) if signal else math.inf
    return largest, relative, -20 * math.log10(relative) if relative < math.inf else -math.inf


def _row(d: Difference) -> tuple[str, ...]:
    numbers = ["-" if math.isnan(x) else f"{x:.3g}" for x in (d.max_abs, d.relative)]
    return d.path, d.a or "-", d.b or "-", ", ".join(d.what), *numbers, decibels(d.sqnr)
