"""`python -m jqx plot`: draws the weights of a file."""

import argparse
import importlib
import importlib.util
import io
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from .._errors import fail
from .._files import Replacement
from ..diagnostics import Report
from ..diagnostics._shared import measure, scheme_of, short_scheme
from ..interop import Archive
from ..tensor import QTensor
from ..transforms._shared import with_bar
from ._choices import Choice, add_choices, choose, quantize_leaf
from ._output import print_json


def add(commands: Any) -> None:
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the sub-command and returns the exit code."""
    plots = _plots()
    with Archive(args.file) as archive:
        chosen = {
            path: choice
            for path, choice in choose(archive, args).items()
            if _matches(args.tensor, path) and _is_drawn(archive.spec(path))
        }
        if not chosen:
            raise fail(
                "plot",
                "there is nothing to draw.",
                given=f"--tensor {args.tensor!r}",
                expected="a regular expression that matches whole names of float tensors or "
                "QTensors",
                fix="leave --tensor out.",
            )
        figure, drawn = _KINDS[args.kind](plots, archive, chosen)
        _save(figure, args.out)
    if args.json:
        print_json({"written": args.out, "kind": args.kind, "tensors": drawn})
    else:
        print(f"{args.out}: {args.kind} of {len(drawn)} tensors")
    return 0


def _save(figure: Any, path: str) -> None:
    """Writes a picture in the format of its file extension, PNG by default."""
    picture = io.BytesIO()
    with Replacement("plot", path) as file:
        figure.savefig(picture, dpi=150, format=os.path.splitext(path)[1][1:] or "png")
        file.write(0, picture.getbuffer())
        file.commit()


def _plots() -> Any:
    """Returns the module that draws. It needs matplotlib, which jqx itself does not."""
    if importlib.util.find_spec("matplotlib") is None:
        raise fail(
            "plot",
            "matplotlib is not installed.",
            given="no package of that name",
            expected="matplotlib, of the extra `examples`",
            fix='pip install "jqx[examples]".',
        )
    return importlib.import_module("..diagnostics.plots", __package__)


def _matches(pattern: str, path: str) -> bool:
    try:
        return re.fullmatch(pattern, path) is not None
    except (re.error, OverflowError) as error:
        raise fail(
            "plot",
            f"`--tensor` is not a valid regular expression: {error}.",
            given=repr(pattern),
            expected="a pattern that Python's re accepts",
            fix="escape special characters with a backslash.",
        ) from None


def _is_drawn(leaf: Any) -> bool:
    return leaf.size > 0 and jnp.issubdtype(leaf.dtype, jnp.floating)


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


def _ranges(plots: Any, archive: Archive, chosen: Mapping[str, Choice]) -> tuple[Any, list[str]]:
    return plots.ranges(_Reals(archive, chosen)), list(chosen)


def _sqnr(plots: Any, archive: Archive, chosen: Mapping[str, Choice]) -> tuple[Any, list[str]]:
    drawn = {path: choice.spec for path, choice in chosen.items() if choice.spec is not None}
    if not drawn:
        raise fail(
            "plot",
            "no float tensor is quantized, so there is no noise.",
            given=f"{len(chosen)} tensors",
            expected="a float file, and a policy or rules",
            fix="pass --policy, or --rule 'regex=scheme'.",
        )
    weights = []
    for path in with_bar("plot", "tensor", drawn):
        x: Any = archive.read(path)
        weights.append(measure(x, quantize_leaf(x, drawn[path]), path))
    report = Report(tuple(weights), 0, sites=0, skipped=0, macs=math.nan)
    return plots.sqnr_bars(report), list(drawn)


def _histogram(plots: Any, archive: Archive, chosen: Mapping[str, Choice]) -> tuple[Any, list[str]]:
    drawn = {
        path: choice.spec
        for path, choice in chosen.items()
        if choice.spec is not None or isinstance(archive.spec(path), QTensor)
    }
    if len(drawn) != 1:
        raise fail(
            "plot",
            "a histogram shows one quantized tensor.",
            given=f"{len(drawn)} tensors: {', '.join(list(drawn)[:4]) or 'none'}",
            expected="one tensor that is quantized, or that a policy or rules quantize",
            fix="narrow --tensor, or pass --policy or --rule.",
        )
    ((path, spec),) = drawn.items()
    q: Any = archive.read(path)
    x = q.dequantize() if spec is None else q
    q = q if spec is None else quantize_leaf(x, spec)
    return plots.histogram(x, q, title=f"{path}, {short_scheme(scheme_of(q))}"), [path]


_KINDS: dict[str, Callable[..., tuple[Any, list[str]]]] = {
    "ranges": _ranges,
    "sqnr": _sqnr,
    "histogram": _histogram,
}
