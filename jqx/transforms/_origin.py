"""Where a traced value comes from: a weight, seen through views."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

Address = tuple[int, ...]
"""Place of an equation: its number among the contractions and calls of each enclosing jaxpr."""


class Loop(NamedTuple):
    """A scan that steps over the leading axis of a weight: where it stands, and its length."""

    address: Address
    length: int


@dataclasses.dataclass(frozen=True)
class Origin:
    """A value that is one weight seen through views.

    Attributes:
      path: key path of the weight.
      dims: for each axis of the value, the axes of the weight that it holds.
      merged: sets of axes of the weight that a reshape has merged: a scale varies along all or
        none.
      loops: the scans that gave a slice of the weight to each of their steps, from the outermost.
    """

    path: str
    dims: tuple[frozenset[int], ...]
    merged: frozenset[frozenset[int]] = frozenset()
    loops: tuple[Loop, ...] = ()

    @classmethod
    def of_leaf(cls, path: str, rank: int) -> "Origin":
        """The weight itself."""
        return cls(path, tuple(frozenset({axis}) for axis in range(rank)))

    def with_dims(self, dims: Iterable[frozenset[int]]) -> "Origin":
        """The same weight with its axes elsewhere."""
        return dataclasses.replace(self, dims=tuple(dims))

    def step_of(self, loop: Loop) -> "Origin":
        """What one step of a scan over the leading axis sees."""
        return dataclasses.replace(self, dims=self.dims[1:], loops=(*self.loops, loop))

    def kept(self, dims: Iterable[int], rank: int) -> frozenset[int]:
        """Returns the axes of the weight that lie in the axes `dims` of the value alone."""
        dims = set(dims)
        lost = set().union(*(held for dim, held in enumerate(self.dims) if dim not in dims))
        return close_over_merges(frozenset(range(rank)) - lost, self.merged)


def close_over_merges(kept: frozenset[int], merged: Iterable[frozenset[int]]) -> frozenset[int]:
    """Drops every merged set of axes that is not kept as a whole."""
    merged = tuple(merged)
    while True:
        lost = frozenset().union(*(group for group in merged if not group <= kept))
        if not lost & kept:
            return kept
        kept = kept - lost
