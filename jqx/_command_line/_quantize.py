"""`python -m jqx quantize`: a file of floats to a file of QTensors, tensor by tensor."""

import argparse
import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

from .._checks import require_that
from ..diagnostics._shared import Table, scheme_of
from ..interop import Archive, save_leaves
from ._beside import OWN, left_out, print_left_out, texts
from ._choices import Choice, add_choices, choose, made
from ._output import add_force, check_absent, print_json, savings, size_of


def add(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "quantize",
        help="quantize the weights of a file",
        description="Quantizes weights of a safetensors file, one at a time, and writes what "
        "jqx.load reads.",
    )
    parser.add_argument("input", help="a file or folder that jqx.load reads")
    parser.add_argument("output", help="the file to write")
    add_choices(parser)
    add_force(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs it and returns the exit code."""
    check_absent("quantize", args.output, args.force or args.dry_run)
    with Archive(args.input) as archive:
        choices = choose(archive, args)
        require_that(
            any(choice.spec for choice in choices.values()),
            error=ValueError,
            function="quantize",
            problem="nothing would be quantized.",
            given=f"{len(choices)} tensors, policy {args.policy}, {len(args.rule)} rules",
            expected="a policy, for tensors named as weights are, or a rule",
            mend="pass --policy, or --rule 'regex=scheme' for other names.",
        )
        specs = {path: made(archive.spec, path, choices[path]) for path in archive.paths}
        if not args.dry_run:
            leaves = (made(archive.read, path, choice) for path, choice in choices.items())
            leaves = _shown(leaves, archive)
            save_leaves(args.output, archive.map(specs.get), leaves, metadata=texts(archive))
        _show(args, archive, choices, specs)
    return 0


def _shown(leaves: Iterable[Any], archive: Archive) -> Iterable[Any]:
    """Shows in a terminal how many tensors are done, with tqdm (of the extra `examples`)."""
    if importlib.util.find_spec("tqdm") is None:
        return leaves
    bar = importlib.import_module("tqdm").tqdm
    return bar(leaves, desc="quantize", total=len(archive.paths), unit="tensor", disable=None)


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
    if args.json:
        totals = {"quantized": count, "bytes_before": before, "bytes_after": after}
        written = {"written": None if args.dry_run else args.output, "left_out": lost}
        print_json({**written, **totals, "tensors": tensors})
        return
    footer = f"{count} of {len(tensors)} tensors quantized; {savings(before, after)}"
    if not args.dry_run:
        print(f"{args.output}: {footer}")
        print_left_out(lost)
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
    print(Table(("path", "tensor", "scheme", "by", "bytes", "after"), tuple(rows), footer, texts=4))
