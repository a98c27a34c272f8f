"""`python -m jqx`: quantize, convert, verify, report, diff and plot files of weights."""

import sys

from ._command_line import main

if __name__ == "__main__":
    sys.exit(main())
