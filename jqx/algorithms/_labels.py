"""Labels of channels: what has one label has one factor. What must have the same factor is joined;
what cannot have any is fixed, and it is said why.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph

from .. import _compat
from .._compat import Eqn

Array = np.ndarray

FREE, FIXED = -1, 0
"""Labels of zeros and infinities, which any factor leaves as they are; of what has no factor."""


@dataclasses.dataclass(frozen=True)
class Known:
    """A value that depends on nothing that is given."""

    value: Any

    @property
    def label(self) -> int:
        """Whether it may be scaled as others are."""
        x = np.asarray(self.value)
        is_free = np.issubdtype(x.dtype, np.inexact) and bool(np.all((x == 0) | np.isinf(x)))
        return FREE if is_free else FIXED


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter, or a view of one.

    Attributes:
      place: which leaf it is.
      shape: its shape.
      elements: the numbers of its elements; `None` where sites multiply by it.
    """

    place: int
    shape: tuple[int, ...]
    elements: Array | None


@dataclasses.dataclass(frozen=True)
class Labelled:
    """Any other value.

    Attributes:
      labels: of its elements, int32, of its rank, size 1 along an axis where all are alike.
      shape: its own.
      why: it is fixed, where it is.
    """

    labels: Array
    shape: tuple[int, ...]
    why: str = ""

    @classmethod
    def of(cls, labels: Array, shape: Sequence[int]) -> "Labelled":
        """Drops what repeats."""
        for axis in range(labels.ndim):
            first = labels[(slice(None),) * axis + (slice(1),)]
            if labels.shape[axis] > 1 and np.all(labels == first):
                labels = np.ascontiguousarray(first)
        return cls(labels, tuple(shape))

    @classmethod
    def fixed(cls, shape: Sequence[int], why: str = "", label: int = FIXED) -> "Labelled":
        """One that has no factor."""
        return cls(np.full((1,) * len(shape), label, np.int32), tuple(shape), why)

    @property
    def is_fixed(self) -> bool:
        """Whether nothing of it has a factor."""
        return self.labels.size == 1 and self.labels.item() in (FIXED, FREE)

    def whole(self) -> Array:
        """Returns the label of each element."""
        return np.broadcast_to(self.labels, self.shape)

    def even(self, axes: Sequence[int]) -> "Labelled | None":
        """Returns the same, of size 1 along axes; `None` where labels change along them."""
        labels = self.labels
        for axis in axes:
            most = labels.max(axis, keepdims=True)
            if labels.shape[axis] > 1 and np.any((labels != most) & (labels != FREE)):
                return None
            labels = most
        return dataclasses.replace(self, labels=labels)


Value = Known | Leaf | Labelled


def step_of(x: Value, i: int) -> Value:
    """Returns what a step of a scan sees of a value."""
    if isinstance(x, Known):
        return Known(np.asarray(x.value)[i])
    if isinstance(x, Leaf):
        return Leaf(x.place, x.shape[1:], None if x.elements is None else x.elements[i])
    return Labelled(x.labels[i if x.labels.shape[0] > 1 else 0], x.shape[1:])


@dataclasses.dataclass(frozen=True)
class Stop:
    """Labels that cannot have a factor, and why."""

    labels: Array
    reason: str
    is_choice: bool = False


class Labels:
    """All labels of a function.

    Args:
      fixed: which of them are known to have no factor, whatever becomes of products of two values
        that may have one, and why.
    """

    def __init__(self, fixed: "tuple[Array, dict[int, str]] | None" = None):
        self._fixed, self._why = fixed or (None, {})
        self._count = 1
        self._pairs: list[tuple[Array, Array]] = []
        self._stops: list[Stop] = []

    @property
    def has_choices(self) -> bool:
        """Whether there are products of two values of which each might have taken a factor."""
        return any(stop.is_choice for stop in self._stops)

    def new(self, count: int) -> Array:
        """Returns labels that nothing has."""
        self._count += count
        return np.arange(self._count - count, self._count, dtype=np.int32)

    def made(self, labels: Array, shape: Sequence[int]) -> Labelled:
        """Returns a value of new labels, but for those that are known as fixed."""
        if self._fixed is None:
            return Labelled.of(labels, shape)
        first = int(labels.flat[0]) if labels.size else FIXED
        own = np.where(self._fixed[labels], FIXED, labels)
        return dataclasses.replace(Labelled.of(own, shape), why=self._why.get(first, ""))

    def stop(self, x: Labelled, reason: str, is_choice: bool = False) -> None:
        """Fixes what cannot have a factor."""
        self.stop_labels(x.labels, reason, is_choice)

    def stop_labels(self, labels: Array, reason: str, is_choice: bool = False) -> None:
        """Fixes labels."""
        labels = np.unique(labels)
        if np.any(labels > FIXED):
            self._stops.append(Stop(labels[labels > FIXED], reason, is_choice))

    def stop_at(self, eqn: Eqn, values: Sequence[Labelled], reason: str = "") -> list[Labelled]:
        """Fixes the operands of an equation, and returns its results."""
        why = told(eqn, reason)
        for x in values:
            self.stop(x, why)
        return [Labelled.fixed(v.aval.shape, why) for v in eqn.outvars]

    def join(self, a: Array, b: Array, reason: str) -> Array:
        """Returns labels of what has the same factors in two values."""
        a, b = np.broadcast_arrays(a, b)
        differ = (a != b) & (a != FREE) & (b != FREE)
        if differ.any():
            pairs = np.unique(np.stack([a[differ], b[differ]]), axis=1)
            self.stop_labels(pairs[:, (pairs == FIXED).any(0)], reason)
            both = pairs[:, (pairs != FIXED).all(0)]
            self.join_labels(*both)
        return np.where(a == FREE, b, a)

    def join_labels(self, a: Array, b: Array) -> None:
        """Joins labels that may have factors, one by one."""
        self._pairs.append((a, b))

    def solved(self, choices: bool = True) -> "tuple[Array, dict[int, str]]":
        """Returns of each label the number of those that have one factor with it, 0 where that is
        1, and for fixed labels why they are; without `choices` only those that must be.
        """
        none = np.empty(0, np.int32)
        a, b = (np.concatenate([none, *x]) for x in zip(*self._pairs, (none, none), strict=True))
        edges = scipy.sparse.coo_matrix((np.ones(len(a), bool), (a, b)), (self._count,) * 2)
        _, found = scipy.sparse.csgraph.connected_components(edges, directed=False)
        why: dict[int, str] = {}
        for stop in (x for x in self._stops if choices or not x.is_choice):
            for group in np.unique(found[stop.labels]):
                why.setdefault(int(group), stop.reason)
        is_fixed = np.zeros(found.max() + 1, bool)
        is_fixed[[*why, found[FIXED]]] = True
        if self._fixed is not None:
            is_fixed[found[self._fixed]] = True
        numbers = np.cumsum(~is_fixed) * ~is_fixed
        fixed = np.flatnonzero(is_fixed[found])[1:]
        told = {int(x): why.get(int(found[x])) or self._why.get(int(x), "") for x in fixed}
        return numbers[found], told


def told(eqn: Eqn, what: str = "") -> str:
    """Returns an equation, or something else, with its line, where that is known."""
    line = _compat.line_of(eqn)
    return f"{what or eqn.primitive.name}{f' at {line}' if line else ''}"
