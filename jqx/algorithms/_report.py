"""What an algorithm reports of the matrices of weights."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any


def name_of(sites: Sequence[str], step: Sequence[int]) -> str:
    """Returns what reports call the matrix of some sites, at an index of a stack."""
    index = f"[{', '.join(map(str, step))}]" if step else ""
    return f"{' and '.join(sites)}{index}"


@dataclasses.dataclass(frozen=True)
class MatrixReport:
    """One matrix.

    Attributes:
      sites: the names of those that multiply by it.
      step: its index in the stack of a weight, such as a layer of a scan; `()` where there is one.
      path: of the weight.
      shape: (rows, columns): what the product keeps and what it sums over.
      before: the objective of rounding to nearest with the same scales, per input.
      after: that of the codes chosen.
      damping: what was added to the diagonal of the Hessian, relative to its mean; `None` where no
        damping made it positive definite, and the matrix was rounded to nearest.
      inputs: how many inputs were seen.
      dead: how many columns no input has reached.
      kept: how many rows are rounded to nearest, since that is less bad.
      seconds: how long it took.
    """

    sites: tuple[str, ...]
    step: tuple[int, ...]
    path: str
    shape: tuple[int, int]
    before: float
    after: float
    damping: float | None
    inputs: int
    dead: int
    kept: int
    seconds: float

    @property
    def name(self) -> str:
        """What the table calls it."""
        return name_of(self.sites, self.step)


@dataclasses.dataclass(frozen=True)
class AlgorithmReport(Sequence[MatrixReport]):
    """The entries of all matrices, in the order in which they were quantized; prints as a table."""

    entries: tuple[MatrixReport, ...]

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[MatrixReport]:
        return iter(self.entries)

    def __str__(self) -> str:
        head = (
            "matrix",
            "shape",
            "before",
            "after",
            "damping",
            "inputs",
            "dead",
            "kept",
            "seconds",
        )
        rows = [head, *map(_row, self.entries)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join(lines)


def _row(entry: MatrixReport) -> tuple[str, ...]:
    damping = "rounded" if entry.damping is None else f"{entry.damping:g}"
    numbers = f"{entry.before:.4g}", f"{entry.after:.4g}", damping
    counts = (f"{n:,}" for n in (entry.inputs, entry.dead, entry.kept))
    return (
        entry.name,
        f"{entry.shape[0]} x {entry.shape[1]}",
        *numbers,
        *counts,
        f"{entry.seconds:.2f}",
    )
