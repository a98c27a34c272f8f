"""`main`: parses the arguments, runs a sub-command, and prints errors in one line."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import _convert, _diff, _plot, _quantize, _report, _verify

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
    for module in (_quantize, _convert, _verify, _report, _diff, _plot):
        module.add(commands)
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
