"""`python -m jqx`: quantize, convert, verify, report, diff and plot files of weights."""

import signal
import sys
import threading

from ._src.command_line.main import main


def _ask_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Sends the signal again if its exception came in a callback, which cannot raise it."""
    if isinstance(unraisable.exc_value, SystemExit):
        threading.Timer(0.01, signal.raise_signal, [signal.SIGTERM]).start()
    else:
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    # As an exception, the signal ends a writer like any error: nothing half-written is left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.unraisablehook = _ask_again
    sys.exit(main())
