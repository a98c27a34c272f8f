"""Blocks of channels that one orthogonal matrix can rotate. Labels number channels; those of a
block are consecutive. Blocks are cut where their channels are treated differently, joined
where they take the same rotation, and stopped, with a reason, where they can take none.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..compat import Eqn
from ..transforms.rules import CONTRACTIONS
from ..transforms.views import SHARDINGS
from .chain import components
from .labels import (
    FIXED,
    FREE,
    VIEWED,
    Array,
    Axes,
    Known,
    moved,
    narrowed,
    of_product,
    with_line,
)


def axes_of(shape: Sequence[int]) -> Axes:
    """Returns the axes along which a value of a shape may vary."""
    return frozenset(i for i, n in enumerate(shape) if n > 1)


@dataclasses.dataclass(frozen=True)
class Rotatable:
    """Any other value that depends on arguments.

    Attributes:
      labels: labels of its elements, int32, of its rank, size 1 along axes with equal labels.
      shape: its shape.
      gains: elements of parameters that multiply its channels, as labels; or `None`.
      is_squared: whether it is the square of the value that has these labels.
      varies: if no part of it is rotated, the axes along which it may vary.
      reason: why no part of it is rotated, if known.
    """

    labels: Array
    shape: tuple[int, ...]
    gains: Array | None = None
    is_squared: bool = False
    varies: Axes = frozenset()
    reason: str = ""

    @classmethod
    def plain(
        cls, shape: Sequence[int], varies: Axes | None = None, reason: str = ""
    ) -> "Rotatable":
        """Returns a value that is not rotated."""
        shape = tuple(shape)
        axes = axes_of(shape) if varies is None else varies & axes_of(shape)
        return cls(np.full((1,) * len(shape), FIXED, np.int32), shape, varies=axes, reason=reason)

    @classmethod
    def of(cls, labels: Array, shape: Sequence[int], gains: Array | None = None) -> "Rotatable":
        """Returns a value, with equal labels along an axis stored once."""
        value = cls(narrowed(labels), tuple(shape), None if gains is None else narrowed(gains))
        is_fixed = value.labels.size == 1 and value.labels.item() == FIXED
        return cls.plain(shape) if is_fixed else value

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
            maximum = labels.max(axis, keepdims=True)
            if labels.shape[axis] > 1 and np.any((labels != maximum) & (labels != FREE)):
                return None
            if self.gains is not None and self.gains.shape[axis] > 1:
                return None
            labels = maximum
        return dataclasses.replace(self, labels=labels)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of all labels.

    Attributes:
      kinds: for each label, the number of the rotation of its block, 0 if there is none.
      sizes: for each rotation, its number of channels.
      reasons: for labels that cannot be rotated, the reason, if known.
    """

    kinds: Array
    sizes: Array
    reasons: dict[int, str]


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
        is_cut = (b != a + 1) | (a <= FIXED) | (b <= FIXED)
        self._cut(np.concatenate([a[is_cut & (a > FIXED)] + 1, b[is_cut & (b > FIXED)]]), reason)

    def cut_sets(self, labels: Array, reason: str) -> None:
        """Cuts blocks that are not whole in a row of labels, which may be in any order."""
        rows = np.sort(labels.reshape(labels.shape[0], -1), axis=1)
        repeated = np.zeros(rows.shape, bool)
        repeated[:, 1:] = rows[:, 1:] == rows[:, :-1]
        for row, is_repeated in zip(rows, repeated, strict=True) if repeated.any() else ():
            self.cut_runs(row[~is_repeated], reason)
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
        joined = components(self._count, pairs[0], pairs[1])
        cut = np.zeros(self._count + 1, bool)
        cut[[0, 1, self._count]] = True
        for labels, _ in self._cuts:
            cut[labels] = True
        while _refine(cut, joined, pairs):
            pass
        block, _, sizes = _blocks(cut)
        kinds = components(len(sizes), block[pairs[0]], block[pairs[1]])[block]
        reason_of_kind: dict[int, str] = {}
        for labels, reason in self._stops:
            for kind in np.unique(kinds[labels]):
                reason_of_kind.setdefault(int(kind), reason)
        size_of_kind = np.zeros(int(kinds.max()) + 1, int)
        size_of_kind[kinds] = sizes[block]
        already = np.zeros(self._count + 1, bool)
        for labels, reason in self._cuts:
            for kind in np.unique(kinds[labels[(labels < self._count) & ~already[labels]]]):
                if size_of_kind[kind] == 1 and reason:
                    reason_of_kind.setdefault(int(kind), reason)
            already[labels] = True
        fixed = size_of_kind < 2
        fixed[[kinds[FIXED], *reason_of_kind]] = True
        reasons = {
            i: reason_of_kind.get(int(kinds[i]), "")
            for i in np.flatnonzero(fixed[kinds])[1:].tolist()
        }
        numbers = np.cumsum(~fixed) * ~fixed
        return Blocks(numbers[kinds], np.append(0, size_of_kind[~fixed]), reasons)


def _blocks(cut: Array) -> tuple[Array, Array, Array]:
    """Returns for each label its block and its position in it, and the sizes of blocks."""
    starts = np.flatnonzero(cut[:-1])
    block = np.cumsum(cut[:-1]) - 1
    return block, np.arange(len(block)) - starts[block], np.diff(np.append(starts, len(block)))


def _refine(cut: Array, joined: Array, pairs: Sequence[Array]) -> bool:
    """Cuts where joined labels have different blocks, or positions in them. Returns whether it cut
    anything.
    """
    cuts, count = cut.sum(), int(joined.max()) + 1
    is_start, is_end = np.zeros(count, bool), np.zeros(count, bool)
    is_start[joined[cut[:-1]]], is_end[joined[cut[1:]]] = True, True
    cut[:-1] |= is_start[joined]
    cut[1:] |= is_end[joined]
    if cut.sum() > cuts:
        return True
    block, positions, sizes = _blocks(cut)
    kinds = components(len(sizes), block[pairs[0]], block[pairs[1]])
    smallest = np.full(int(kinds.max()) + 1, len(block))
    np.minimum.at(smallest, kinds, sizes)
    starts = np.flatnonzero(cut[:-1])
    cut[starts + smallest[kinds]] = True
    if cut.sum() > cuts:
        return True
    a, b = pairs
    wrong = np.concatenate([x[positions[a] != positions[b]] for x in (a, b)])
    cut[wrong] = True
    return bool(cut.sum() > cuts)


# How an equation without a site changes rotations of channels: a rule for each primitive. A
# primitive without a rule stops rotations of its operands.


Rule = Callable[[BlockConstraints, Eqn, Sequence[Rotatable], Sequence[Any]], Sequence[Rotatable]]


def stop_at(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], reason: str = ""
) -> list[Rotatable]:
    """Marks operands of an equation as not rotatable, and returns its results."""
    text = with_line(eqn, reason)
    for x in values:
        f.stop(x.labels, text)
    return [Rotatable.plain(v.aval.shape, reason=text) for v in eqn.outvars]


def scaled(f: BlockConstraints, x: Rotatable, varies: Axes, reason: str) -> None:
    """Cuts the blocks of a value at factors that vary along some axes."""
    axes = [axis for axis in sorted(varies) if x.labels.shape[axis] > 1]
    if axes:
        other_axes = [axis for axis in range(x.labels.ndim) if axis not in axes]
        count = int(np.prod([x.labels.shape[axis] for axis in axes]))
        f.cut_sets(x.labels.transpose(*axes, *other_axes).reshape(count, -1), reason)


def _together(
    f: BlockConstraints, x: Rotatable, axes: Sequence[int], reason: str
) -> Rotatable | None:
    """Returns a value of size 1 along axes that are summed over, such as experts: all elements
    along them get the same rotation. `None` if they are channels of one block.
    """
    labels = x.labels
    if x.gains is not None and any(x.gains.shape[axis] > 1 for axis in axes):
        return None
    for axis in axes:
        parts = np.split(labels, labels.shape[axis], axis)
        for a, b in itertools.pairwise(parts):
            if np.any((b == a + 1) & (a > FIXED)):
                return None
            parts[0] = f.join(parts[0], b, reason)
        labels = parts[0]
    return dataclasses.replace(x, labels=labels)


def _kept(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], inputs: Any
) -> Sequence[Rotatable]:
    """Operations that apply the same linear function to each element."""
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return stop_at(f, eqn, values)
    return values


def _alike(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], inputs: Any
) -> Sequence[Rotatable]:
    """Sums and choices: all operands have the same rotation."""
    shape, name = eqn.outvars[0].aval.shape, eqn.primitive.name
    reason = with_line(eqn, f"{name} with a value that cannot be rotated,")
    labels = np.full((1,) * len(shape), FREE, np.int32)
    which, values = (values[:1], values[1:]) if name == "select_n" else ((), values)
    if not all(x.is_bare for x in values):
        return stop_at(f, eqn, values, f"{name} after a gain")
    for x in values:
        labels = f.join(labels, _ranked(x, len(shape)).labels, reason)
    result = Rotatable.of(labels, shape)
    for x in which:
        f.stop(x.labels, with_line(eqn))
        scaled(f, result, x.varies, with_line(eqn, "a choice for each channel"))
    return [result]


def _ranked(x: Rotatable, rank: int) -> Rotatable:
    """Returns a value; a scalar gets the rank of the other operand."""
    return x if len(x.shape) == rank else Rotatable(x.labels.reshape((1,) * rank), (1,) * rank)


def _times(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], inputs: Any
) -> Sequence[Rotatable]:
    """Products with factors that do not vary along the channels, and squares."""
    shape = eqn.outvars[0].aval.shape
    a, b = (_ranked(x, len(shape)) for x in values)
    if eqn.invars[0] is eqn.invars[1] and eqn.primitive.name == "mul":
        return _squared(f, eqn, [a], inputs)
    if a.is_plain and eqn.primitive.name == "mul":
        a, b = b, a
    if not b.is_plain:
        return stop_at(f, eqn, [a, b])
    scaled(f, a, b.varies, with_line(eqn, "a factor for each channel,"))
    return [dataclasses.replace(a, shape=shape)]


def _squared(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], inputs: Any
) -> Sequence[Rotatable]:
    (x,) = values
    if eqn.params.get("y", 2) != 2 or not x.is_bare:
        return stop_at(f, eqn, values)
    return [dataclasses.replace(x, is_squared=True)]


def _summed(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], inputs: Any
) -> Sequence[Rotatable]:
    """Sums: of squares over whole blocks, of other values over elements with one rotation."""
    (x,), axes, shape = values, eqn.params["axes"], eqn.outvars[0].aval.shape
    if not x.is_squared:
        even = _together(f, x, axes, with_line(eqn, "a sum with a value that cannot be rotated,"))
        if even is None:
            return stop_at(f, eqn, values, f"{eqn.primitive.name} over channels")
        gains = None if even.gains is None else np.squeeze(even.gains, tuple(axes))
        return [Rotatable.of(np.squeeze(even.labels, tuple(axes)), shape, gains)]
    other_axes = [axis for axis in range(x.labels.ndim) if axis not in axes]
    rows = x.labels.transpose(*other_axes, *axes)
    rows = rows.reshape(*rows.shape[: len(other_axes)], -1)
    f.cut_runs(rows, with_line(eqn, "a sum of squares"))
    return [Rotatable.plain(shape)]


def _along(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], inputs: Any
) -> Sequence[Rotatable]:
    """Running sums over elements with one rotation."""
    even = values[0].even([eqn.params["axis"]])
    if even is None or not even.is_bare:
        return stop_at(f, eqn, values, f"{eqn.primitive.name} over channels")
    return [even]


def _viewed(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], inputs: Any
) -> Sequence[Rotatable]:
    """Operations that move elements move their labels."""
    name, shapes = eqn.primitive.name, [v.aval.shape for v in eqn.outvars]
    starts = {"dynamic_slice": 1, "dynamic_update_slice": 2}.get(name, len(values))
    values, starts_given = values[:starts], inputs[starts:]
    if any(x.is_squared for x in values):
        return stop_at(f, eqn, values)
    if any(x.gains is not None for x in values) and (len(values) > 1 or starts_given):
        return stop_at(f, eqn, values, f"{name} after a gain")
    if not all(isinstance(x, Known) for x in starts_given):
        sizes = eqn.params["slice_sizes"] if name == "dynamic_slice" else values[1].shape
        axes = [i for i, n in enumerate(values[0].shape) if sizes[i] < n]
        even = [part for x in values if (part := x.even(axes)) is not None]
        if len(even) < len(values):
            return stop_at(f, eqn, values, f"{name} of channels")
        if name == "dynamic_update_slice":
            reason = with_line(eqn, "it is written to a value that cannot be rotated,")
            return [Rotatable.of(f.join(even[0].labels, even[1].labels, reason), shapes[0])]
        values, starts_given = even, [Known(np.int32(0)) for _ in starts_given]
    constants = [x.value for x in starts_given]
    labels = moved(eqn, [*(x.whole(x.labels) for x in values), *constants])
    gains: Sequence[Array | None] = [None] * len(labels)
    if values[0].gains is not None:
        gains = moved(eqn, [values[0].whole(values[0].gains)])
    return [
        Rotatable.of(x, shape, gain) for x, shape, gain in zip(labels, shapes, gains, strict=True)
    ]


def gathered(f: BlockConstraints, eqn: Eqn, x: Rotatable, indices: Any) -> Rotatable:
    """A lookup in a value."""
    shape, sizes = eqn.outvars[0].aval.shape, eqn.params["slice_sizes"]
    even = x.even([i for i, n in enumerate(x.shape) if sizes[i] < n])
    if x.is_plain:
        return Rotatable.plain(shape)
    if even is None or not even.is_bare:
        return stop_at(f, eqn, [x])[0]
    zeros = np.zeros(eqn.invars[1].aval.shape, eqn.invars[1].aval.dtype)
    return Rotatable.of(moved(eqn, [even.whole(even.labels), zeros])[0], shape)


def product(f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable]) -> Rotatable:
    """A product of values: of attention weights and values, or of two with the same rotation."""
    axes, shape = CONTRACTIONS["dot_general"].axes(eqn), eqn.outvars[0].aval.shape
    if not all(x.is_bare for x in values):
        return stop_at(f, eqn, values, "a product after a gain")[0]
    if not any(x.is_plain for x in values):
        return _inner(f, eqn, values, axes)
    argnum = 0 if values[1].is_plain else 1
    x, factor, operand_axes = values[argnum], values[1 - argnum], axes[argnum]
    even = _together(
        f, x, operand_axes.contracted, with_line(eqn, "a sum with a value that cannot be rotated,")
    )
    if even is None:
        return stop_at(f, eqn, [x], "a sum over channels")[0]
    pairs = zip(operand_axes.batch, axes[1 - argnum].batch, strict=True)
    varies = frozenset(i for i, j in pairs if j in factor.varies)
    scaled(f, even, varies, with_line(eqn, "a factor for each channel,"))
    return Rotatable.of(of_product(even.labels, operand_axes, argnum, len(shape)), shape)


def _inner(f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], axes: Any) -> Rotatable:
    """Inner products, which do not change if both vectors are rotated by one matrix."""
    rows = []
    for x, operand_axes in zip(values, axes, strict=True):
        free = [axis for axis in operand_axes.kept if axis not in operand_axes.batch]
        even = x.even(free)
        if even is None:
            return stop_at(f, eqn, values, "a product of two values")[0]
        order, summed = (*operand_axes.batch, *operand_axes.contracted), tuple(range(len(free)))
        labels = np.squeeze(even.labels.transpose(*free, *order), summed)
        expanded = np.broadcast_to(labels, [x.shape[axis] for axis in order])
        rows.append(expanded.reshape(*expanded.shape[: len(operand_axes.batch)], -1))
        f.cut_runs(rows[-1], with_line(eqn, "a product of two values"))
    f.join(rows[0], rows[1], with_line(eqn, "a product with a value that cannot be rotated,"))
    return Rotatable.plain(eqn.outvars[0].aval.shape)


def varies_of(eqn: Eqn, values: Sequence[Rotatable]) -> list[Axes]:
    """Returns the axes along which results vary, for operands that are not rotated."""
    name, shapes = eqn.primitive.name, [v.aval.shape for v in eqn.outvars]
    if name in _ELEMENTWISE:
        return [frozenset[int]().union(*(x.varies for x in values))]
    varying = values[0].varies
    if name == "broadcast_in_dim":
        to = eqn.params["broadcast_dimensions"]
        return [frozenset(int(to[axis]) for axis in varying)]
    if name == "transpose":
        return [frozenset(i for i, j in enumerate(eqn.params["permutation"]) if j in varying)]
    if name in ("slice", "rev"):
        return [varying]
    if name in ("squeeze", "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"):
        gone = eqn.params["dimensions" if name == "squeeze" else "axes"]
        remaining = [axis for axis in range(len(values[0].shape)) if axis not in gone]
        return [frozenset(i for i, j in enumerate(remaining) if j in varying)]
    if name == "reshape":
        return [_reshaped(varying, values[0].shape, shapes[0])]
    return list(map(axes_of, shapes))


def _reshaped(varies: Axes, shape: Sequence[int], to: Sequence[int]) -> Axes:
    """Returns the axes along which a value varies after a reshape."""
    axes, i, j = set(), 0, 0
    while i < len(shape) and j < len(to):
        a, b, start, new_start = shape[i], to[j], i, j
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * shape[i], i + 1
            else:
                b, j = b * to[j], j + 1
        if varies & set(range(start, i)):
            axes |= set(range(new_start, j))
    return frozenset(axes)


_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "max", "min", "pow", "integer_pow", "square", "exp", "exp2"),
    *("log", "log1p", "expm1", "rsqrt", "sqrt", "tanh", "logistic", "neg", "sign", "abs", "erf"),
    *("convert_element_type", "select_n", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"),
    *("rem", "clamp", "sin", "cos", "floor", "ceil", "round", "stop_gradient", "copy", "cbrt"),
    *("reduce_precision", "add_any", "is_finite"),
}
_SAME = {"neg", "copy", "stop_gradient", "convert_element_type", "reduce_precision"}
_SAME |= {"optimization_barrier", "pvary", *SHARDINGS}
RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAME, _kept),
    **dict.fromkeys(("add", "sub", "add_any", "select_n"), _alike),
    **dict.fromkeys(("mul", "div"), _times),
    **dict.fromkeys(("square", "integer_pow"), _squared),
    "reduce_sum": _summed,
    "cumsum": _along,
    **dict.fromkeys(VIEWED, _viewed),
}
