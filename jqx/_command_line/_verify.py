"""`python -m jqx verify`: a quantized checkpoint beside the float model."""

import argparse
from typing import Any

from ..interop import verify
from ._output import print_json


def add(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "verify",
        help="check a quantized checkpoint against the float model",
        description="Reads a checkpoint again and compares it with the float model, tensor by "
        "tensor: what is missing, of another shape, not finite, lost or too far away.",
        epilog="Exit codes: 0 all is right, 1 something is wrong, 2 wrong usage, or a wrong file.",
    )
    parser.add_argument("file", help="a folder or file that jqx.load reads")
    parser.add_argument("reference", help="the float model, likewise")
    parser.add_argument(
        "--least",
        type=float,
        default=3.0,
        metavar="DB",
        help="signal to noise that a weight must have, in dB; 3 by default",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="REGEX",
        help="tensors that are not compared, by whole name",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs it and returns the exit code: 0 where nothing is wrong, else 1."""
    found = verify(args.file, args.reference, least=args.least, ignore=args.ignore)
    if args.json:
        print_json({"ok": found.ok, **found.to_dict()})
    else:
        print(found)
    return 0 if found.ok else 1
