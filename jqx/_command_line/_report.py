"""`python -m jqx report`: the effect of quantization on each weight of a file."""

import argparse
import dataclasses
import math
from typing import Any

from .._errors import fail
from ..diagnostics import Report, WeightError
from ..diagnostics._shared import measure
from ..interop import Archive
from ..tensor import QTensor
from ..transforms._shared import with_bar
from ._choices import Choice, add_choices, choose, quantize_leaf
from ._output import print_json, savings

_FIELDS = ("weights", "kept", "bytes_before", "bytes_after")
"""What a report shows of a file; its contractions are unknown."""


def add(commands: Any) -> None:
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the sub-command and returns the exit code."""
    with Archive(args.file) as archive:
        choices = choose(archive, args)
        paths = with_bar("report", "tensor", choices)
        found = {path: _measured(archive, path, choices[path]) for path in paths}
        specs = [archive.spec(path) for path in found if found[path] is None]
    weights = tuple(weight for weight in found.values() if weight is not None)
    if not weights:
        raise fail(
            "report",
            "there is nothing to report.",
            given=f"{len(found)} tensors, none of them quantized",
            expected="quantized tensors, or a policy or rules to try",
            fix="pass --policy, or --rule 'regex=scheme'.",
        )
    kept = sum(spec.size * spec.dtype.itemsize for spec in specs)
    report = Report(weights, kept, sites=len(weights), skipped=len(specs), macs=math.nan)
    if args.json:
        fields = report.to_dict()
        print_json({name: fields[name] for name in _FIELDS})
        return 0
    footer = f"{len(weights)} of {len(found)} tensors quantized; "
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
