"""The result of `compare`: the error of each site, and of the result."""

import dataclasses
import math
from typing import Any

from .._table import Table, Tabular
from ._table import decibels, finite


@dataclasses.dataclass(frozen=True)
class SiteError:
    """The error of the results of one site, for one layer if it is in a scan over layers.

    Attributes:
      path: path of its weight, or its name scope.
      op: the operation.
      layer: index in the scans that step over its weight; empty outside scans.
      sqnr: signal-to-noise ratio in dB of the quantized function relative to the float function:
        the error accumulated up to this site. Infinite if both are equal, NaN if the site never
        ran.
      local_sqnr: the same of this site alone: its quantized operands are in float up to here.
      cosine: cosine similarity of both results.
      max_error: largest absolute difference of both results.
      local_max_error: the same of this site alone.
      objective: the objective of the chosen codes that an algorithm has reported for the weight,
        relative to that of rounding to nearest; `None` if it reported nothing.
      scheme: how its operands are quantized, such as `float x int4 per_group(32)`.
      label: what tables call it, without its layer; if empty, its path.
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
    label: str = ""

    @property
    def name(self) -> str:
        """What tables call it, with its layer."""
        return (self.label or self.path) + "".join(f"[{i}]" for i in self.layer)


@dataclasses.dataclass(frozen=True)
class Comparison(Tabular):
    """The result of `compare`. Prints as a table; `to_dict` and `to_markdown` return data and text.

    Attributes:
      sites: one error for each site, and for each layer of a scan, in the order of the plan.
      result: the error of the results of the function together.
    """

    sites: tuple[SiteError, ...]
    result: SiteError

    def worst(self, count: int = 5) -> tuple[SiteError, ...]:
        """Returns the sites with the largest local errors, the worst first."""
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
        note = (
            "own: only this site quantized, on float operands; others: all sites up to it quantized"
        )
        if any(row.objective is not None for row in every):
            objectives = ("" if row.objective is None else f"{row.objective:.3f}" for row in every)
            rows = [(*cells, text) for cells, text in zip(rows, objectives, strict=True)]
            head = (*head, "objective")
            note += "; objective: of the chosen codes, relative to rounding to nearest"
        return Table(head, tuple(rows), note, texts=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns the rows as a dict for `json.dumps`; infinite and NaN values are `None`."""
        return finite(dataclasses.asdict(self))
