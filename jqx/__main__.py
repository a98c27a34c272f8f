"""`python -m jqx`: quantize, report, diff and plot files of weights."""

import sys

from ._command_line import main

if __name__ == "__main__":
    sys.exit(main())
