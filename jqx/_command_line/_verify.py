"""`python -m jqx verify`: compares a quantized checkpoint with the float model."""

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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the sub-command and returns the exit code: 0 if there are no problems, else 1."""
    found = verify(args.file, args.reference, least=args.least, ignore=args.ignore)
    if args.json:
        print_json({"ok": found.ok, **found.to_dict()})
    else:
        print(found)
    return 0 if found.ok else 1
