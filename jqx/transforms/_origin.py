"""The origin of a traced value: a weight, or several joined, seen through views."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

Address = tuple[int, ...]
"""Address of an equation: its index among the contractions and calls of each enclosing jaxpr."""


Marks = frozenset[tuple[int, str]]
"""Axes of a weight, each with the name of a view that has changed it."""


class Loop(NamedTuple):
    """A scan that steps over the leading axis of a weight: its address and its length."""

    address: Address
    length: int


@dataclasses.dataclass(frozen=True)
class Origin:
    """A value that is one weight seen through views, or one joined with others.

    Attributes:
      path: key path of the weight.
      dims: for each axis of the value, the axes of the weight that it holds.
      merged: sets of axes of the weight that a reshape has merged: a scale varies along all or
        none.
      loops: the scans that gave a slice of the weight to each of their steps, outermost first.
      stepped: for each of these scans the axes of the weight that it steps over.
      others: the other weights that are joined with it in the value, each with its own axes.
      moved: the axes of the weight that a view has merged, split, or moved away from the end of the
        shape, each with the name of the view.
      cut: the axes of which a view has taken a part, in any order, or joined parts; each with the
        name of the view.
      cast: the format of less than 16 bits that the function has rounded it to; else empty. What it
        multiplies is listed under its path, but it is not a view.
    """

    path: str
    dims: tuple[frozenset[int], ...]
    merged: frozenset[frozenset[int]] = frozenset()
    loops: tuple[Loop, ...] = ()
    others: tuple["Origin", ...] = ()
    stepped: tuple[frozenset[int], ...] = ()
    moved: Marks = frozenset()
    cut: Marks = frozenset()
    cast: str = ""

    @classmethod
    def of_leaf(cls, path: str, rank: int) -> "Origin":
        """The weight itself."""
        return cls(path, tuple(frozenset({axis}) for axis in range(rank)))

    @classmethod
    def joined(cls, parts: Iterable["Origin | None"]) -> "Origin | None":
        """A value joined from several weights, or several views of one; `None` if anything else is
        part of it, or if scans step over only some of them.
        """
        known: dict[Origin, Origin] = {}
        for joined in parts:
            if joined is None:
                return None
            for part in joined.parts:
                bare = part.with_marks()
                other = known.setdefault(bare, part)
                known[bare] = other.with_marks(other.moved | part.moved, other.cut | part.cut)
        if not known or len({part.loops for part in known}) > 1:
            return None
        first, *rest = known.values()
        return dataclasses.replace(first, others=tuple(rest)) if rest else first

    @property
    def parts(self) -> tuple["Origin", ...]:
        """The weights joined in the value, each as a separate origin."""
        return (dataclasses.replace(self, others=()), *self.others) if self.others else (self,)

    @property
    def is_view(self) -> bool:
        """Whether the value is a view of all of them."""
        return not any(part.cast for part in self.parts)

    @property
    def name(self) -> str:
        """The paths of these weights."""
        return "+".join(dict.fromkeys(part.path for part in self.parts))

    def through(self, view: Callable[["Origin"], "Origin | None"]) -> "Origin | None":
        """The origin of a view of all of them together."""
        return Origin.joined(map(view, self.parts)) if self.others else view(self)

    def with_marks(self, moved: Marks = frozenset(), cut: Marks = frozenset()) -> "Origin":
        """The same value with other marks of views."""
        if (moved, cut) == (self.moved, self.cut):
            return self
        return dataclasses.replace(self, moved=moved, cut=cut)

    def with_dims(self, dims: Iterable[frozenset[int]]) -> "Origin":
        """The same weight with its axes moved."""
        return dataclasses.replace(self, dims=tuple(dims))

    def step_of(self, loop: Loop) -> "Origin | None":
        """The origin of the value in one step of a scan over the leading axis."""

        def step(part: "Origin") -> "Origin":
            return dataclasses.replace(
                part,
                dims=part.dims[1:],
                loops=(*part.loops, loop),
                stepped=(*part.stepped, part.dims[0]),
            )

        return self.through(step)

    def kept(self, dims: Iterable[int], rank: int) -> frozenset[int]:
        """Returns the axes of the weight that are only in the axes `dims` of the value."""
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
