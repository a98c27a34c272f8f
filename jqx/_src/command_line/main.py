"""`main`: parses the arguments, runs a sub-command, and prints errors in one line; the sub-commands
that read files only: verify, report, diff, plot.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import io
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ... import QTensor
from ..diagnostics.report import Report, WeightError, measure, scheme_of, short_scheme
from ..errors import fail, some
from ..files import Replacement
from ..interop.archive import Archive
from ..interop.verify import verify
from ..table import Table, decibels
from ..transforms.calibrate import with_bar
from .quantize import (
    Choice,
    add_choices,
    add_convert,
    add_quantize,
    choose,
    print_json,
    quantize_leaf,
    savings,
)

_CODES = (
    "Exit codes: 0 done, or equal; 1 the files of diff differ, or verify found a fault; 2 wrong "
    "usage, or a wrong file."
)


class _UsageError(Exception):
    """Arguments that cannot be read."""


class _Parser(argparse.ArgumentParser):
    """Raises an exception where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{self.prog}: {message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `python -m jqx` and returns its exit code.

    Args:
      argv: the arguments; `None` takes those of the process.

    Returns:
      0 on success, for `diff` if the files are equal; 1 if `diff` finds a difference or `verify` a
      problem; 2 for wrong arguments or files, with one line on standard error.
    """
    parser = _Parser(prog="python -m jqx", description=__doc__, epilog=_CODES)
    parser.description = "Quantize, convert, verify, measure and draw files of weights."
    version = importlib.import_module(__name__.partition(".")[0]).__version__
    parser.add_argument("--version", action="version", version=f"jqx {version}")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=_Parser)
    for add in (add_quantize, add_convert, add_verify, add_report, add_diff, add_plot):
        add(commands)
    try:
        args = parser.parse_args(argv)
        code = args.run(args)
        sys.stdout.flush()
        return code
    except _UsageError as error:
        return _failed(str(error))
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, TypeError, ValueError) as error:
        return _failed("; ".join(" ".join(line.split()) for line in str(error).splitlines()))
    except KeyboardInterrupt:
        return _failed("interrupted", 130)


def _failed(text: str, code: int = 2) -> int:
    print(f"error: {text}", file=sys.stderr)
    return code


# `python -m jqx verify`: compares a quantized checkpoint with the float model.


def add_verify(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "verify",
        help="check a quantized checkpoint against the float model",
        description="Reads a checkpoint again and compares it with the float model, tensor by "
        "tensor: what is missing, has another shape, is not finite, lost or too different.",
        epilog="Exit codes: 0 no problems, 1 problems, 2 wrong usage, or a wrong file.",
    )
    parser.add_argument("file", help="a folder or file that jqx.load reads")
    parser.add_argument("reference", help="the float model, in the same forms")
    parser.add_argument(
        "--least",
        type=float,
        default=3.0,
        metavar="DB",
        help="minimum signal-to-noise ratio of a weight, in dB; 3 by default",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="REGEX",
        help="regular expression of the whole names of tensors that are not compared",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run_verify)


def _run_verify(args: argparse.Namespace) -> int:
    """Runs the sub-command and returns the exit code: 0 if there are no problems, else 1."""
    verification = verify(args.file, args.reference, least=args.least, ignore=args.ignore)
    if args.json:
        print_json({"ok": verification.ok, **verification.to_dict()})
    else:
        print(verification)
    return 0 if verification.ok else 1


# `python -m jqx report`: the effect of quantization on each weight of a file.


_FIELDS = ("weights", "kept", "bytes_before", "bytes_after")
"""What a report shows of a file; its contractions are unknown."""


def add_report(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "report",
        help="measure what quantization does to each weight",
        description="Measures what a policy and rules would do to each weight of a safetensors "
        "file: bits with scales, bytes, range, clipped share, groups of zeros only, signal to "
        "noise. For tensors quantized already, the last and the clipped share are unknown.",
    )
    parser.add_argument("file", help="a safetensors file")
    add_choices(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run_report)


def _run_report(args: argparse.Namespace) -> int:
    """Runs the sub-command and returns the exit code."""
    with Archive(args.file) as archive:
        choices = choose(archive, args)
        paths = with_bar("report", "tensor", choices)
        errors = {path: _measured(archive, path, choices[path]) for path in paths}
        specs = [archive.spec(path) for path in errors if errors[path] is None]
    weights = tuple(weight for weight in errors.values() if weight is not None)
    if not weights:
        problem = f"there is nothing to report: none of {len(errors)} tensors is quantized."
        raise fail("report", problem, fix="pass --policy, or --rule 'regex=scheme'.")
    float_bytes = sum(spec.size * spec.dtype.itemsize for spec in specs)
    report = Report(weights, float_bytes, sites=len(weights), skipped=len(specs), macs=math.nan)
    if args.json:
        fields = report.to_dict()
        print_json({name: fields[name] for name in _FIELDS})
        return 0
    footer = f"{len(weights)} of {len(errors)} tensors quantized; "
    footer += savings(report.bytes_before, report.bytes_after)
    print(dataclasses.replace(report.table(), footer=footer))
    return 0


def _measured(archive: Archive, path: str, choice: Choice) -> WeightError | None:
    if isinstance(archive.spec(path), QTensor):
        q: Any = archive.read(path)
        error = measure(q.dequantize(), q, path)
        return dataclasses.replace(error, clipped=math.nan, sqnr=math.nan)
    if choice.spec is None:
        return None
    x: Any = archive.read(path)
    return measure(x, quantize_leaf(x, choice.spec), path)


# `python -m jqx diff`: shows the differences of two files, tensor by tensor.


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


def add_diff(commands: Any) -> None:
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
    parser.set_defaults(run=_run_diff)


def _run_diff(args: argparse.Namespace) -> int:
    """Runs the sub-command and returns the exit code: 0 if the files are equal, else 1."""
    with Archive(args.a) as a, Archive(args.b) as b:
        paths = dict.fromkeys((*a.paths, *b.paths))
        rows_of_diff = [compare(path, a, b) for path in with_bar("diff", "tensor", paths)]
    differences = [difference for difference in rows_of_diff if difference.what]
    equal = len(rows_of_diff) - len(differences)
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
        kind_a, kind_b = (_kind(file.spec(path)) if path in file else None for file in (a, b))
        return Difference(path, kind_a, kind_b, ("presence",))
    left, right = a.spec(path), b.spec(path)
    kinds = _kind(left), _kind(right)
    if left.shape != right.shape:
        return Difference(path, *kinds, ("shape",))
    changes = []
    if left.dtype != right.dtype:
        changes.append("dtype")
    if jax.tree.structure(left) != jax.tree.structure(right):
        changes.append("scheme")
    x, y = a.read(path), b.read(path)
    same = not changes and all(
        (v.dtype, v.shape) == (w.dtype, w.shape)
        and np.asarray(v).tobytes() == np.asarray(w).tobytes()
        for v, w in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=False)
    )
    if same:
        return Difference(path, *kinds, ())
    errors = _errors(_real(x), _real(y))
    changed = [] if changes and not errors[0] else ["values"]
    return Difference(path, *kinds, (*changes, *changed), *errors)


def _kind(leaf: Any) -> str:
    kind = leaf.dtype.name
    if isinstance(leaf, QTensor):
        layout = f" {leaf.layout}" if leaf.layout is not None else ""
        kind = f"{scheme_of(leaf)}{layout}, {kind}"
    return f"{kind}{list(leaf.shape)}"


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


# `python -m jqx plot`: draws the weights of a file.


def add_plot(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "plot",
        help="draw the weights of a file",
        description="Draws weights of a safetensors file, with matplotlib: their ranges as boxes, "
        "their signal-to-noise ratios under a policy and rules, or the values of one on its "
        "quantization grid.",
    )
    parser.add_argument("file", help="a safetensors file")
    parser.add_argument("--out", required=True, metavar="PICTURE", help="such as picture.png")
    parser.add_argument("--kind", choices=list(_KINDS), default="ranges", help="ranges by default")
    parser.add_argument("--tensor", default=".*", metavar="REGEX", help="draw only these")
    add_choices(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a line")
    parser.set_defaults(run=_run_plot)


def _run_plot(args: argparse.Namespace) -> int:
    """Runs the sub-command and returns the exit code."""
    if importlib.util.find_spec("matplotlib") is None:  # jqx itself does not need it
        raise fail("plot", "matplotlib is not installed.", fix='pip install "jqx[examples]".')
    plots = importlib.import_module("jqx.diagnostics.plots")
    try:
        pattern = re.compile(args.tensor)
    except (re.error, OverflowError) as error:
        problem = f"`--tensor` {args.tensor!r} is not a valid regular expression: {error}."
        raise fail("plot", problem, fix="escape special characters with a backslash.") from None
    with Archive(args.file) as archive:
        choices = {}
        for path, choice in choose(archive, args).items():
            leaf: Any = archive.spec(path)
            if pattern.fullmatch(path) and leaf.size and jnp.issubdtype(leaf.dtype, jnp.floating):
                choices[path] = choice
        if not choices:
            problem = f"there is nothing to draw: --tensor {args.tensor!r} matches no whole name."
            raise fail("plot", problem, fix="leave --tensor out.")
        figure, drawn = _KINDS[args.kind](plots, archive, choices)
        picture, extension = io.BytesIO(), os.path.splitext(args.out)[1][1:]
        with Replacement("plot", args.out) as file:
            figure.savefig(picture, dpi=150, format=extension or "png")
            file.write(0, picture.getbuffer())
            file.commit()
    if args.json:
        print_json({"written": args.out, "kind": args.kind, "tensors": drawn})
    else:
        print(f"{args.out}: {args.kind} of {len(drawn)} tensors")
    return 0


class _Reals(Mapping[str, Any]):
    """The dequantized arrays of tensors, each read when it is used."""

    def __init__(self, archive: Archive, paths: Mapping[str, Choice]) -> None:
        self._archive, self._paths = archive, paths

    def __getitem__(self, path: str) -> Any:
        x = self._archive.read(path)
        return x.dequantize() if isinstance(x, QTensor) else x

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _sqnr(plots: Any, archive: Archive, choices: Mapping[str, Choice]) -> tuple[Any, list[str]]:
    drawn = {path: choice.spec for path, choice in choices.items() if choice.spec is not None}
    if not drawn:
        problem = "no float tensor is quantized, so there is no noise."
        raise fail("plot", problem, fix="pass --policy, or --rule 'regex=scheme'.")
    weights = []
    for path in with_bar("plot", "tensor", drawn):
        x: Any = archive.read(path)
        weights.append(measure(x, quantize_leaf(x, drawn[path]), path))
    report = Report(tuple(weights), 0, sites=0, skipped=0, macs=math.nan)
    return plots.sqnr_bars(report), list(drawn)


def _histogram(
    plots: Any, archive: Archive, choices: Mapping[str, Choice]
) -> tuple[Any, list[str]]:
    drawn = {
        path: choice.spec
        for path, choice in choices.items()
        if choice.spec is not None or isinstance(archive.spec(path), QTensor)
    }
    if len(drawn) != 1:
        problem = f"a histogram shows one quantized tensor, not {len(drawn)}: {some(drawn)}."
        raise fail("plot", problem, fix="narrow --tensor, or pass --policy or --rule.")
    ((path, spec),) = drawn.items()
    q: Any = archive.read(path)
    x = q.dequantize() if spec is None else q
    q = q if spec is None else quantize_leaf(x, spec)
    return plots.histogram(x, q, title=f"{path}, {short_scheme(scheme_of(q))}"), [path]


_KINDS: dict[str, Callable[..., tuple[Any, list[str]]]] = {
    "ranges": lambda plots, archive, x: (plots.ranges(_Reals(archive, x)), list(x)),
    "sqnr": _sqnr,
    "histogram": _histogram,
}
