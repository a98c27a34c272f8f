"""The result of `verify`: each tensor compared with the float model, and the problems found."""

import dataclasses
import math
from typing import Any

from .._table import Table, Tabular
from ..diagnostics import Comparison
from ..diagnostics._shared import decibels, finite


@dataclasses.dataclass(frozen=True)
class TensorCheck:
    """A tensor of a file, compared with that of the float model.

    Attributes:
      path: name of the tensor.
      scheme: format of the tensor, or its dtype if it is not quantized.
      sqnr: signal-to-noise ratio, `10 log10(sum x**2 / sum (x - q)**2)`, in dB; inf if the two are
        equal, NaN if the other tensor is missing or numbers are not finite.
      max_error: largest absolute difference.
      problems: the problems of the tensor; empty if there are none.
    """

    path: str
    scheme: str
    sqnr: float
    max_error: float
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verification(Tabular):
    """The result of `verify`. Prints as a table; `check()` raises if there are problems.

    Attributes:
      tensors: in the order of the file; tensors missing in the file come last.
      sites: errors of the contractions of a function; `None` if no function was given.
      problems: all problems, one line each.
    """

    tensors: tuple[TensorCheck, ...]
    sites: Comparison | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def check(self) -> "Verification":
        """Returns itself if there are no problems.

        Raises:
          ValueError: if there are problems; the message lists them.
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
        """Returns a dict for `json.dumps`; infinite and NaN values are `None`."""
        return finite(dataclasses.asdict(self))
