"""What an algorithm reports of the matrices of weights, and of blocks."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from .._table import Printed, Table, Tabular
from ._memory import Memory


def name_of(sites: Sequence[str], step: Sequence[int]) -> str:
    """Returns what reports call the matrix of some sites, at an index of a stack."""
    index = f"[{', '.join(map(str, step))}]" if step else ""
    return f"{' and '.join(sites)}{index}"


@dataclasses.dataclass(frozen=True)
class MatrixReport:
    """One matrix.

    Attributes:
      sites: the names of those that multiply by it.
      step: the number of the step in each scan over the weight around the site, such as a layer.
      at: which of several matrices that are multiplied by at once, such as an expert or a group of
        a convolution; `()` where there is one.
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
    at: tuple[int, ...]
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
        return name_of(self.sites, (*self.step, *self.at))

    @property
    def layer(self) -> str:
        """What the table calls it together with those that are multiplied by at once."""
        return name_of(self.sites, self.step)


_HEAD = ("matrix", "shape", "before", "after", "damping", "inputs", "dead", "kept", "seconds")


@dataclasses.dataclass(frozen=True)
class AlgorithmReport(Tabular, Sequence[MatrixReport]):
    """The entries of all matrices, in the order in which they were quantized.

    It prints as a table, in which matrices that are multiplied by at once are one line: the largest
    damping, the least and the most inputs, and sums of all else.

    Attributes:
      entries: of each matrix one.
      memory: what the run took, as it was known before; `None` for one pass.
    """

    entries: tuple[MatrixReport, ...]
    memory: Memory | None = None

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[MatrixReport]:
        return iter(self.entries)

    def table(self) -> Table:
        """Returns the rows as text."""
        lines: dict[Any, list[MatrixReport]] = {}
        for entry in self.entries:
            lines.setdefault((entry.layer, entry.path, entry.shape), []).append(entry)
        return Table(_HEAD, tuple(map(_row, lines.values())), texts=len(_HEAD))


def _row(entries: Sequence[MatrixReport]) -> tuple[str, ...]:
    first, several = entries[0], len(entries) > 1
    shape = f"{first.shape[0]} x {first.shape[1]}"
    damping = [entry.damping for entry in entries if entry.damping is not None]
    inputs = sorted({entry.inputs for entry in entries})
    before, after, dead, kept, seconds = (
        sum(getattr(entry, field) for entry in entries)
        for field in ("before", "after", "dead", "kept", "seconds")
    )
    return (
        first.layer if several else first.name,
        f"{len(entries)} x ({shape})" if several else shape,
        f"{before:.4g}",
        f"{after:.4g}",
        f"{max(damping):g}" if len(damping) == len(entries) else "rounded",
        f"{inputs[0]:,}" if len(inputs) == 1 else f"{inputs[0]:,} to {inputs[-1]:,}",
        f"{dead:,}",
        f"{kept:,}",
        f"{seconds:.2f}",
    )


@dataclasses.dataclass(frozen=True)
class BlockReport:
    """One block.

    Attributes:
      sites: the names of its sites.
      step: the number of the step in each scan around it, such as a layer.
      before: what rounding to nearest loses: of each result of the block the squared error relative
        to its squares, summed; over batches the mean.
      after: what is lost in the end.
      best: after how many steps that was found; 0 is rounding to nearest.
      seconds: how long it took.
    """

    sites: tuple[str, ...]
    step: tuple[int, ...]
    before: float
    after: float
    best: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class BlocksReport(Printed, Sequence[BlockReport]):
    """The entries of all blocks, in the order in which they were learned. Prints as a table.

    Attributes:
      entries: of each block one.
      nearest: the names of sites whose weights were rounded to nearest, with the reason.
    """

    entries: tuple[BlockReport, ...]
    nearest: tuple[tuple[str, str], ...] = ()

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        lines = [f"{'before':>10} {'after':>10} {'best':>6} {'seconds':>8}  block"]
        for x in self.entries:
            more = f" and {len(x.sites) - 1} more" if len(x.sites) > 1 else ""
            lines.append(
                f"{x.before:10.4g} {x.after:10.4g} {x.best:6} {x.seconds:8.2f}  "
                f"{name_of(x.sites[:1], x.step)}{more}"
            )
        lines += [f"rounded to nearest: {name}, {reason}" for name, reason in self.nearest]
        return "\n".join(lines)
