"""Labels of channels. Channels with one label have one factor. Labels that must have the same
factor are joined; labels that cannot have a factor are fixed, with a reason.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import Eqn
from ._scipy import components

Array = np.ndarray

FREE, FIXED = -1, 0
"""FREE labels zeros and infinities, which no factor changes; FIXED labels values without factor."""


@dataclasses.dataclass(frozen=True)
class Known:
    """A value that does not depend on arguments."""

    value: Any

    @property
    def label(self) -> int:
        """The label of all its elements: whether they may be scaled."""
        if is_key(self.value):
            return FIXED
        x = np.asarray(self.value)
        is_free = jnp.issubdtype(x.dtype, jnp.inexact) and bool(np.all((x == 0) | np.isinf(x)))
        return FREE if is_free else FIXED


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter, or a view of one.

    Attributes:
      place: the index of the leaf.
      shape: its shape.
      elements: the numbers of its elements; `None` for weights of sites.
    """

    place: int
    shape: tuple[int, ...]
    elements: Array | None


@dataclasses.dataclass(frozen=True)
class Labelled:
    """Any other value.

    Attributes:
      labels: labels of its elements, int32, of its rank, size 1 along an axis with equal labels.
      shape: its shape.
      why: why it is fixed, if it is.
    """

    labels: Array
    shape: tuple[int, ...]
    why: str = ""

    @classmethod
    def of(cls, labels: Array, shape: Sequence[int]) -> "Labelled":
        """Returns a value, with equal labels along an axis stored once."""
        return cls(narrowed(labels), tuple(shape))

    @classmethod
    def fixed(cls, shape: Sequence[int], why: str = "", label: int = FIXED) -> "Labelled":
        """Returns a value that has no factor."""
        return cls(np.full((1,) * len(shape), label, np.int32), tuple(shape), why)

    @property
    def is_fixed(self) -> bool:
        """Whether no part of it has a factor."""
        return self.labels.size == 1 and self.labels.item() in (FIXED, FREE)

    def whole(self) -> Array:
        """Returns the label of each element."""
        return np.broadcast_to(self.labels, self.shape)

    def even(self, axes: Sequence[int]) -> "Labelled | None":
        """Returns a copy of size 1 along axes; `None` if labels change along them."""
        labels = self.labels
        for axis in axes:
            most = labels.max(axis, keepdims=True)
            if labels.shape[axis] > 1 and np.any((labels != most) & (labels != FREE)):
                return None
            labels = most
        return dataclasses.replace(self, labels=labels)


Value = Known | Leaf | Labelled


def is_key(x: Any) -> bool:
    """Whether a value holds typed keys of random numbers, which NumPy does not know."""
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def narrowed(x: Array) -> Array:
    """Returns an array of size 1 along the axes with equal elements."""
    for axis in range(x.ndim):
        first = x[(slice(None),) * axis + (slice(1),)]
        if x.shape[axis] > 1 and np.all(x == first):
            x = np.ascontiguousarray(first)
    return x


def step_of(x: Leaf | Labelled, i: int) -> Value:
    """Returns the part of a value that a step of a scan reads."""
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
    """All labels of a function. Clipped values have separate labels, with the factors that they had
    before the clip.

    Args:
      fixed: labels that are known to have no factor, independent of the choices at products of two
        values that may both have one, and why; as `fixed` of another pass returns it.
    """

    def __init__(self, fixed: "tuple[Array, dict[int, str]] | None" = None):
        self._fixed, self._why = fixed or (None, {})
        self._count = 1
        self._clipped, self._limits = np.empty(0, np.int32), np.empty(0)
        self._pairs: list[tuple[Array, Array]] = []
        self._stops: list[Stop] = []

    @property
    def has_choices(self) -> bool:
        """Whether there are products of two values that could both take a factor."""
        return any(stop.is_choice for stop in self._stops)

    @property
    def has_clips(self) -> bool:
        """Whether any value is clipped."""
        return len(self._clipped) > 0

    def new(self, count: int) -> Array:
        """Returns labels that are not in use."""
        self._count += count
        return np.arange(self._count - count, self._count, dtype=np.int32)

    def made(self, labels: Array, shape: Sequence[int]) -> Labelled:
        """Returns a value with new labels, except those that are known to be fixed."""
        if self._fixed is None:
            return Labelled.of(labels, shape)
        places = self._place(labels)
        first = int(places.flat[0]) if labels.size else FIXED
        own = np.where(self._fixed[places], FIXED, labels)
        return dataclasses.replace(Labelled.of(own, shape), why=self._why.get(first, ""))

    def _place(self, labels: Array) -> Array:
        """Returns the indices of labels among those of values that are not clipped. They are the
        same in each pass, whatever is fixed.
        """
        return labels - np.searchsorted(self._clipped, labels).astype(np.int32)

    def limits(self, labels: Array) -> Array:
        """Returns the upper limits of values of these labels, infinity if they are not clipped."""
        if not self.has_clips:
            return np.full(labels.shape, np.inf)
        place = np.minimum(np.searchsorted(self._clipped, labels), len(self._clipped) - 1)
        return np.where(self._clipped[place] == labels, self._limits[place], np.inf)

    def clipped(self, x: Labelled, limit: Array) -> Labelled:
        """Returns a value clipped at a limit that scales with it."""
        limit = narrowed(limit.reshape(limit.shape or (1,) * len(x.shape)))
        labels, limits = np.broadcast_arrays(x.labels, limit)
        limits = np.minimum(limits, self.limits(labels))
        own = (labels > FIXED) & np.isfinite(limits)
        both = np.stack([labels[own].astype(np.float64), limits[own]])
        (before, limits), where = np.unique(both, axis=1, return_inverse=True)
        new = self.new(len(before))
        self._clipped = np.concatenate([self._clipped, new])
        self._limits = np.concatenate([self._limits, limits])
        self.join_labels(before.astype(np.int32), new)
        found = labels.copy()
        found[own] = new[where.ravel()]
        return Labelled.of(found, x.shape)

    def stop_clipped(self, values: Sequence[Labelled], reason: str) -> None:
        """Fixes clipped values."""
        for x in values if self.has_clips else ():
            self.stop_labels(x.labels[np.isfinite(self.limits(x.labels))], reason)

    def stop(self, x: Labelled, reason: str, is_choice: bool = False) -> None:
        """Fixes a value that cannot have a factor."""
        self.stop_labels(x.labels, reason, is_choice)

    def stop_labels(self, labels: Array, reason: str, is_choice: bool = False) -> None:
        """Fixes labels."""
        labels = np.unique(labels)
        if np.any(labels > FIXED):
            self._stops.append(Stop(labels[labels > FIXED], reason, is_choice))

    def stop_at(self, eqn: Eqn, values: Sequence[Labelled], reason: str = "") -> list[Labelled]:
        """Fixes the operands of an equation, and returns its results."""
        why = with_line(eqn, reason)
        for x in values:
            self.stop(x, why)
        return [Labelled.fixed(v.aval.shape, why) for v in eqn.outvars]

    def join(self, a: Array, b: Array, reason: str) -> Array:
        """Joins the labels of two values that have the same factors, and returns them."""
        a, b = np.broadcast_arrays(a, b)
        differ = (a != b) & (a != FREE) & (b != FREE)
        if differ.any():
            pairs = np.unique(np.stack([a[differ], b[differ]]), axis=1)
            self.stop_labels(pairs[:, (pairs == FIXED).any(0)], reason)
            both = pairs[:, (pairs != FIXED).all(0)]
            self.join_labels(*both)
            apart = self.limits(both[0]) != self.limits(both[1])
            self.stop_labels(both[:, apart], f"{reason} where one is clipped and another not")
        return np.where(a == FREE, b, a)

    def join_labels(self, a: Array, b: Array) -> None:
        """Joins labels that may have factors, element by element."""
        self._pairs.append((a, b))

    def solved(self, choices: bool = True) -> "tuple[Array, dict[int, str]]":
        """Returns for each label the number of its factor, 0 if the factor is 1, and for fixed
        labels the reason. Without `choices`, fixes only labels that must be fixed.
        """
        none = np.empty(0, np.int32)
        a, b = (np.concatenate([none, *x]) for x in zip(*self._pairs, (none, none), strict=True))
        found = components(self._count, a, b)
        why: dict[int, str] = {}
        for stop in (x for x in self._stops if choices or not x.is_choice):
            for group in np.unique(found[stop.labels]):
                why.setdefault(int(group), stop.reason)
        is_fixed = np.zeros(found.max() + 1, bool)
        is_fixed[[*why, found[FIXED]]] = True
        if self._fixed is not None:
            is_fixed[found[self._unclipped()[self._fixed]]] = True
        numbers = np.cumsum(~is_fixed) * ~is_fixed
        fixed = np.flatnonzero(is_fixed[found])[1:]
        known = zip(fixed.tolist(), self._place(fixed).tolist(), strict=True)
        reasons = {x: why.get(int(found[x])) or self._why.get(place, "") for x, place in known}
        return numbers[found], reasons

    def _unclipped(self) -> Array:
        """Returns the labels of values that are not clipped."""
        return np.delete(np.arange(self._count), self._clipped)

    def fixed(self) -> "tuple[Array, dict[int, str]]":
        """Returns labels that have no factor whatever is chosen, and why, for another pass."""
        numbers, why = self.solved(choices=False)
        own = self._unclipped()
        return numbers[own] == 0, {i: why[x] for i, x in enumerate(own.tolist()) if x in why}


def with_line(eqn: Eqn, what: str = "") -> str:
    """Returns an equation, or a description of it, with its source line, if that is known."""
    line = _compat.line_of(eqn)
    return f"{what or eqn.primitive.name}{f' at {line}' if line else ''}"
