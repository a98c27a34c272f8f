"""Blocks of channels that one orthogonal matrix can rotate. Labels number channels; those of a
block are consecutive. Blocks are cut where their channels are treated differently, joined
where they take the same rotation, and stopped, with a reason, where they can take none.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from ._labels import FIXED, FREE, Array, narrowed
from ._scipy import components

Axes = frozenset[int]


def axes_of(shape: Sequence[int]) -> Axes:
    """Returns the axes along which a value of a shape may vary."""
    return frozenset(i for i, n in enumerate(shape) if n > 1)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter, or a view of one, possibly multiplied by a value.

    Attributes:
      place: the index of the leaf.
      shape: its shape.
      elements: the numbers of its elements, of its rank, size 1 along axes with equal numbers;
        `None` for weights of sites.
      offset: what is added to it, as in `1 + gain`.
      is_scaled: whether it is multiplied by a value, before or after the offset is added.
      varies: the axes along which that value varies.
    """

    place: int
    shape: tuple[int, ...]
    elements: Array | None
    offset: float = 0.0
    is_scaled: bool = False
    varies: Axes = frozenset()


@dataclasses.dataclass(frozen=True)
class Rotatable:
    """Any other value that depends on arguments.

    Attributes:
      labels: labels of its elements, int32, of its rank, size 1 along axes with equal labels.
      shape: its shape.
      gains: elements of parameters that multiply its channels, as labels; or `None`.
      is_squared: whether it is the square of the value that has these labels.
      varies: if no part of it is rotated, the axes along which it may vary.
      why: why no part of it is rotated, if known.
    """

    labels: Array
    shape: tuple[int, ...]
    gains: Array | None = None
    is_squared: bool = False
    varies: Axes = frozenset()
    why: str = ""

    @classmethod
    def plain(cls, shape: Sequence[int], varies: Axes | None = None, why: str = "") -> "Rotatable":
        """Returns a value that is not rotated."""
        shape = tuple(shape)
        own = axes_of(shape) if varies is None else varies & axes_of(shape)
        return cls(np.full((1,) * len(shape), FIXED, np.int32), shape, varies=own, why=why)

    @classmethod
    def of(cls, labels: Array, shape: Sequence[int], gains: Array | None = None) -> "Rotatable":
        """Returns a value, with equal labels along an axis stored once."""
        found = cls(narrowed(labels), tuple(shape), None if gains is None else narrowed(gains))
        is_fixed = found.labels.size == 1 and found.labels.item() == FIXED
        return cls.plain(shape) if is_fixed else found

    @property
    def is_plain(self) -> bool:
        """Whether no part of it is rotated."""
        return self.labels.size == 1 and self.labels.item() in (FIXED, FREE)

    @property
    def is_bare(self) -> bool:
        """Whether it is neither multiplied by gains nor squared."""
        return self.gains is None and not self.is_squared

    def whole(self, x: Array) -> Array:
        """Returns labels or gains of all elements."""
        return np.broadcast_to(x, self.shape)

    def even(self, axes: Iterable[int]) -> "Rotatable | None":
        """Returns a copy of size 1 along axes; `None` if it changes along them."""
        labels = self.labels
        for axis in axes:
            most = labels.max(axis, keepdims=True)
            if labels.shape[axis] > 1 and np.any((labels != most) & (labels != FREE)):
                return None
            if self.gains is not None and self.gains.shape[axis] > 1:
                return None
            labels = most
        return dataclasses.replace(self, labels=labels)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of all labels.

    Attributes:
      kinds: for each label, the number of the rotation of its block, 0 if there is none.
      places: for each label, its position in its block.
      sizes: for each rotation, its number of channels.
      why: for labels that cannot be rotated, the reason, if known.
    """

    kinds: Array
    places: Array
    sizes: Array
    why: dict[int, str]


class BlockConstraints:
    """All labels of a function, and the constraints on their blocks."""

    def __init__(self) -> None:
        self._count = 1
        self._pairs: list[tuple[Array, Array]] = []
        self._cuts: list[tuple[Array, str]] = []
        self._stops: list[tuple[Array, str]] = []

    def new(self, *shape: int) -> Array:
        """Returns labels that are not in use; the last axis is a block."""
        count = int(np.prod(shape))
        labels = np.arange(self._count, self._count + count, dtype=np.int32).reshape(shape)
        self._count += count
        if count:
            self._cuts.append((np.append(labels[..., 0].ravel(), self._count), ""))
        return labels

    def stop(self, labels: Array, reason: str) -> None:
        """Marks labels as not rotatable."""
        labels = np.unique(labels)
        if np.any(labels > FIXED):
            self._stops.append((labels[labels > FIXED], reason))

    def cut_runs(self, labels: Array, reason: str) -> None:
        """Cuts blocks where labels along the last axis are not consecutive."""
        rows = labels.reshape(-1, labels.shape[-1])
        rows = np.pad(rows, ((0, 0), (1, 1)), constant_values=FREE - 1)
        a, b = rows[:, :-1], rows[:, 1:]
        apart = (b != a + 1) | (a <= FIXED) | (b <= FIXED)
        self._cut(np.concatenate([a[apart & (a > FIXED)] + 1, b[apart & (b > FIXED)]]), reason)

    def cut_sets(self, labels: Array, reason: str) -> None:
        """Cuts blocks that are not whole in a row of labels, which may be in any order."""
        rows = np.sort(labels.reshape(labels.shape[0], -1), axis=1)
        repeated = np.zeros(rows.shape, bool)
        repeated[:, 1:] = rows[:, 1:] == rows[:, :-1]
        for row, own in zip(rows, repeated, strict=True) if repeated.any() else ():
            self.cut_runs(row[~own], reason)
        if not repeated.any():
            self.cut_runs(rows, reason)

    def _cut(self, labels: Array, reason: str) -> None:
        if labels.size:
            self._cuts.append((np.unique(labels), reason))

    def join(self, a: Array, b: Array, reason: str) -> Array:
        """Joins the labels of two values that have the same rotations, and returns them."""
        a, b = np.broadcast_arrays(a, b)
        differ = (a != b) & (a != FREE) & (b != FREE)
        if differ.any():
            pairs = np.unique(np.stack([a[differ], b[differ]]), axis=1)
            self.stop(pairs[:, (pairs == FIXED).any(0)], reason)
            self._pairs.append(tuple(pairs[:, (pairs != FIXED).all(0)]))  # type: ignore[arg-type]
        return np.where(a == FREE, b, a)

    def solved(self) -> Blocks:
        """Returns the largest blocks that satisfy all constraints."""
        none = np.empty(0, np.int32)
        pairs = [np.concatenate([none, *x]) for x in zip(*self._pairs, (none, none), strict=True)]
        together = components(self._count, pairs[0], pairs[1])
        cut = np.zeros(self._count + 1, bool)
        cut[[0, 1, self._count]] = True
        for labels, _ in self._cuts:
            cut[labels] = True
        while _refine(cut, together, pairs):
            pass
        block, places, sizes = _blocks(cut)
        kinds = components(len(sizes), block[pairs[0]], block[pairs[1]])[block]
        why: dict[int, str] = {}
        for labels, reason in self._stops:
            for kind in np.unique(kinds[labels]):
                why.setdefault(int(kind), reason)
        own = np.zeros(int(kinds.max()) + 1, int)
        own[kinds] = sizes[block]
        already = np.zeros(self._count + 1, bool)
        for labels, reason in self._cuts:
            for kind in np.unique(kinds[labels[(labels < self._count) & ~already[labels]]]):
                if own[kind] == 1 and reason:
                    why.setdefault(int(kind), reason)
            already[labels] = True
        fixed = own < 2
        fixed[[kinds[FIXED], *why]] = True
        reasons = {i: why.get(int(kinds[i]), "") for i in np.flatnonzero(fixed[kinds])[1:].tolist()}
        numbers = np.cumsum(~fixed) * ~fixed
        return Blocks(numbers[kinds], places, np.append(0, own[~fixed]), reasons)


def _blocks(cut: Array) -> tuple[Array, Array, Array]:
    """Returns for each label its block and its position in it, and the sizes of blocks."""
    starts = np.flatnonzero(cut[:-1])
    block = np.cumsum(cut[:-1]) - 1
    return block, np.arange(len(block)) - starts[block], np.diff(np.append(starts, len(block)))


def _refine(cut: Array, together: Array, pairs: Sequence[Array]) -> bool:
    """Cuts where joined labels have different blocks, or positions in them. Returns whether it cut
    anything.
    """
    before, count = cut.sum(), int(together.max()) + 1
    first, last = np.zeros(count, bool), np.zeros(count, bool)
    first[together[cut[:-1]]], last[together[cut[1:]]] = True, True
    cut[:-1] |= first[together]
    cut[1:] |= last[together]
    if cut.sum() > before:
        return True
    block, places, sizes = _blocks(cut)
    kinds = components(len(sizes), block[pairs[0]], block[pairs[1]])
    least = np.full(int(kinds.max()) + 1, len(block))
    np.minimum.at(least, kinds, sizes)
    starts = np.flatnonzero(cut[:-1])
    cut[starts + least[kinds]] = True
    if cut.sum() > before:
        return True
    a, b = pairs
    wrong = np.concatenate([x[places[a] != places[b]] for x in (a, b)])
    cut[wrong] = True
    return bool(cut.sum() > before)
