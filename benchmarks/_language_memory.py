"""How much memory a part of a run has held at most."""

import resource
from pathlib import Path


class Peak:
    """The most that this process holds from here on. Linux forgets what was before; elsewhere it is
    the most of the whole run.
    """

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pass

    def megabytes(self) -> float:
        """Returns the most so far."""
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) / 1e3
