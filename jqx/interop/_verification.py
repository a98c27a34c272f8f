"""What `verify` returns: each tensor beside that of the float model, and what is wrong."""

import dataclasses
import math
from typing import Any

from ..diagnostics import Comparison
from ..diagnostics._shared import Table, Tabular, decibels, finite


@dataclasses.dataclass(frozen=True)
class TensorCheck:
    """A tensor of a file beside that of the float model.

    Attributes:
      path: its name.
      scheme: its format, or its dtype where it is not quantized.
      sqnr: signal to noise, `10 log10(sum x**2 / sum (x - q)**2)`, in dB; inf where the two are
        equal, NaN where there is no other, or numbers are not finite.
      max_error: largest difference.
      problems: what is wrong with it; empty where nothing is.
    """

    path: str
    scheme: str
    sqnr: float
    max_error: float
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verification(Tabular):
    """What `verify` found. Prints as a table; `check()` raises where something is wrong.

    Attributes:
      tensors: in the order of the file; those that it lacks come last.
      sites: errors of the contractions of a function; `None` where none was given.
      problems: what is wrong, a line each.
    """

    tensors: tuple[TensorCheck, ...]
    sites: Comparison | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def check(self) -> "Verification":
        """Returns itself.

        Raises:
          ValueError: something is wrong; the message says what.
        """
        if self.problems:
            raise ValueError("jqx.interop.verify: " + "; ".join(self.problems))
        return self

    def table(self) -> Table:
        """Returns the rows as text."""
        rows = tuple(
            (
                row.path,
                row.scheme,
                ", ".join(row.problems) or "-",
                decibels(row.sqnr),
                "-" if math.isnan(row.max_error) else f"{row.max_error:.3g}",
            )
            for row in self.tensors
        )
        wrong = sum(bool(row.problems) for row in self.tensors)
        footer = f"{len(rows)} tensors, {wrong} of them wrong"
        if self.sites is not None:
            footer += f"\n\n{self.sites}"
        more = len(self.problems) - sum(len(row.problems) for row in self.tensors)
        footer += f"\n{more} sites wrong" if more else ""
        return Table(("path", "scheme", "wrong", "SQNR dB", "max error"), rows, footer, texts=3)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as what `json.dumps` takes; infinite and NaN values as `None`."""
        return finite(dataclasses.asdict(self))
