"""`python -m jqx`: quantize, convert, verify, report, diff and plot files of weights."""

import signal
import sys

from ._src.command_line.main import main

if __name__ == "__main__":
    # As an exception, the signal ends a writer like any error: nothing half-written is left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
