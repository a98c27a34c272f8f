"""What `compare` returns: the error of each site, and of the result."""

import dataclasses
import math
from typing import Any

from ._table import Table, Tabular, decibels, finite


@dataclasses.dataclass(frozen=True)
class SiteError:
    """The error of the results of one site, of one layer where it stands in a scan over layers.

    Attributes:
      path: that of its weight, or its name scope.
      op: the operation.
      layer: place in the scans that step over its weight; empty outside of them.
      sqnr: signal to noise, in dB, of the quantized function beside the float one: the error that
        has gathered up to here. Infinite where equal, NaN where the site never ran.
      local_sqnr: that of this site alone: quantized operands that are in float up to here.
      cosine: of both results.
      max_error: largest difference between both results.
      local_max_error: that of this site alone.
      objective: what an algorithm has reported of the weight: the objective of the codes it chose,
        as a part of that of rounding to nearest; `None` where it reported nothing of it.
      scheme: how its operands are quantized, such as `float x int4 per_group(32)`.
    """

    path: str
    op: str
    layer: tuple[int, ...]
    sqnr: float
    local_sqnr: float
    cosine: float
    max_error: float
    local_max_error: float
    objective: float | None = None
    scheme: str = ""

    @property
    def name(self) -> str:
        """Path, operation where there are several on it, and layer."""
        return self.path + "".join(f"[{i}]" for i in self.layer)


@dataclasses.dataclass(frozen=True)
class Comparison(Tabular):
    """What `compare` found. Prints as a table; `to_dict`, `to_markdown` give it as data and text.

    Attributes:
      sites: one error for each site, and for each layer of a scan, in the order of the plan.
      result: the error of the results of the function together.
    """

    sites: tuple[SiteError, ...]
    result: SiteError

    def worst(self, count: int = 5) -> tuple[SiteError, ...]:
        """Returns the sites with the largest errors of their own, the worst first."""
        ran = [site for site in self.sites if not math.isnan(site.local_sqnr)]
        return tuple(sorted(ran, key=lambda site: site.local_sqnr)[:count])

    def table(self) -> Table:
        """Returns the rows as text."""
        every = (*self.sites, self.result)
        rows = [
            (
                row.name or "(argument)",
                row.op,
                decibels(row.local_sqnr),
                decibels(row.sqnr),
                f"{row.cosine:.6f}",
                f"{row.local_max_error:.3g}",
                f"{row.max_error:.3g}",
            )
            for row in every
        ]
        head = ("path", "op", "own SQNR dB", "SQNR dB", "cosine", "own max error", "max error")
        note = "own: this site alone, on float operands; the rest: all quantized up to there"
        if any(row.objective is not None for row in every):
            told = ("" if row.objective is None else f"{row.objective:.3f}" for row in every)
            rows = [(*cells, text) for cells, text in zip(rows, told, strict=True)]
            head = (*head, "objective")
            note += "; objective: of the codes chosen, as a part of that of rounding to nearest"
        return Table(head, tuple(rows), note, texts=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns the rows as what `json.dumps` takes; infinite and NaN values as `None`."""
        return finite(dataclasses.asdict(self))
