"""`python -m jqx quantize`: quantizes a file of floats to a file of QTensors."""

import argparse
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from .._errors import fail
from .._table import Table
from ..diagnostics._shared import scheme_of
from ..interop import Archive, Lazy
from ..interop._shared import save_tree
from ..tensor import QSpec
from ..tensor._shared import NONE, to_json
from ._beside import OWN, left_out, print_left_out, texts
from ._choices import Choice, add_choices, choose, made, quantize_finite
from ._output import add_force, check_absent, print_json, savings, size_of


def add(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "quantize",
        help="quantize the weights of a file",
        description="Quantizes weights of a safetensors file, one at a time. Writes a file that "
        "jqx.load reads.",
    )
    parser.add_argument("input", help="a file or folder that jqx.load reads")
    parser.add_argument("output", help="the file to write")
    add_choices(parser)
    add_force(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="if the process ends early, keep what is written and continue there when it is run "
        "again; the data is next to the output, as .part",
    )
    parser.add_argument(
        "--share",
        type=_share,
        default=(0, 1),
        metavar="I/N",
        help="write as process I of N, 0/N to N-1/N, on one file system; resumes",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the sub-command and returns the exit code."""
    check_absent("quantize", args.output, args.force or args.dry_run)
    with Archive(args.input) as archive:
        choices = choose(archive, args)
        if not any(choice.spec for choice in choices.values()):
            raise fail(
                "quantize",
                "nothing would be quantized.",
                given=f"{len(choices)} tensors, policy {args.policy}, {len(args.rule)} rules",
                expected="a policy, for tensors with names of weights, or a rule",
                fix="pass --policy, or --rule 'regex=scheme' for other names.",
            )
        specs = {path: made(archive.spec, path, choices[path]) for path in archive.paths}
        if not args.dry_run:
            tree = archive.map(lambda path: _leaf(archive, path, choices[path].spec))
            options = {"resume": args.resume or args.share != (0, 1), "share": args.share}
            save_tree(args.output, tree, texts(archive), **options)
        _show(args, archive, choices, specs)
    return 0


def _leaf(archive: Archive, path: str, spec: QSpec | None) -> Lazy:
    """Returns a lazy leaf of a file, which is read and quantized when it is written."""
    leaf = archive.lazy(path)
    if spec is None:
        return leaf
    source = str(to_json("quantize", spec, QSpec, NONE))
    return leaf.then(partial(quantize_finite, path=path, spec=spec), source)


def _share(text: str) -> tuple[int, int]:
    """Parses the index of this process and the number of processes."""
    place, _, count = text.partition("/")
    if not (place.isdecimal() and count.isdecimal() and int(place) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of 0/n, 1/n, ..., (n-1)/n")
    return int(place), int(count)


def _show(
    args: argparse.Namespace,
    archive: Archive,
    choices: Mapping[str, Choice],
    specs: Mapping[str, Any],
) -> None:
    tensors = [
        {
            "path": path,
            "shape": list(specs[path].shape),
            "dtype": specs[path].dtype.name,
            "scheme": None if choice.spec is None else scheme_of(specs[path]),
            "why": choice.why,
            "bytes_before": size_of(archive.spec(path)),
            "bytes_after": size_of(specs[path]),
        }
        for path, choice in choices.items()
    ]
    before, after = (sum(t[key] for t in tensors) for key in ("bytes_before", "bytes_after"))
    count = sum(t["scheme"] is not None for t in tensors)
    lost = left_out(archive, args.input, OWN)
    is_there = not args.dry_run and os.path.exists(args.output)
    if args.json:
        totals = {"quantized": count, "bytes_before": before, "bytes_after": after}
        written = {"written": args.output if is_there else None, "left_out": lost}
        print_json({**written, **totals, "tensors": tensors})
        return
    footer = f"{count} of {len(tensors)} tensors quantized; {savings(before, after)}"
    if is_there:
        print(f"{args.output}: {footer}")
        print_left_out(lost)
        return
    if not args.dry_run:
        print(f"{args.output}: this share is written; the file is complete when all shares are")
        return
    rows = [
        (
            t["path"],
            f"{t['dtype']}{t['shape']}",
            t["scheme"] or "-",
            t["why"],
            f"{t['bytes_before']:,}",
            f"{t['bytes_after']:,}",
        )
        for t in tensors
    ]
    print(
        Table(
            ("path", "tensor", "scheme", "decided by", "bytes", "quantized"),
            tuple(rows),
            footer,
            texts=4,
        )
    )
