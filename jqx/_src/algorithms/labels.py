"""Labels of channels, passed through a traced function: the domain of scaling and of rotation.

Channels with one label are changed alike. Labels that must be changed alike are joined; labels that
cannot be changed are fixed, with a reason. Here are also the rules of scaling by primitive.
"""

import abc
import dataclasses
import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from .. import compat
from ..compat import Eqn
from ..contractions.problem import OperandAxes
from ..statistics.statistics import ObservedSite
from ..transforms.channel_map import Channels
from ..transforms.find import Found
from ..transforms.plan import Plan, Site
from ..transforms.rules import CONTRACTIONS
from ..transforms.stats import observed_parts
from ..transforms.trace import Call
from ..transforms.views import SHARDINGS, Address
from ..transforms.walk import Domain, Where, bodies, carried, walk
from .grids import Elements, Every
from .stages import Steps

# Labels of channels. Channels with one label have one factor. Labels that must have the same
# factor are joined; labels that cannot have a factor are fixed, with a reason.


Array = np.ndarray
Axes = frozenset[int]

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
class Parameter:
    """A parameter, or a view of one, possibly multiplied by a value.

    Attributes:
      leaf_index: the index of the leaf.
      shape: its shape.
      elements: the numbers of its elements, of its rank, size 1 along axes with equal numbers;
        `None` for weights of sites.
      offset: what is added to it, as in `1 + gain`.
      is_scaled: whether it is multiplied by a value, before or after the offset is added.
      varies: the axes along which that value varies.
    """

    leaf_index: int
    shape: tuple[int, ...]
    elements: Array | None
    offset: float = 0.0
    is_scaled: bool = False
    varies: Axes = frozenset()

    @property
    def whole(self) -> Array:
        """The number of each element."""
        assert self.elements is not None
        return np.broadcast_to(self.elements, self.shape)

    def step_of(self, i: int) -> "Parameter":
        """Returns the part that a step of a scan reads."""
        varies = frozenset(axis - 1 for axis in self.varies if axis)
        elements = None if self.elements is None else row_of(self.elements, i)
        return dataclasses.replace(self, shape=self.shape[1:], elements=elements, varies=varies)


@dataclasses.dataclass(frozen=True)
class Labelled:
    """Any other value.

    Attributes:
      labels: labels of its elements, int32, of its rank, size 1 along an axis with equal labels.
      shape: its shape.
      reason: why it is fixed, if it is.
      gains: elements of parameters that multiply its channels, as labels; or `None`.
    """

    labels: Array
    shape: tuple[int, ...]
    reason: str = ""
    gains: Array | None = None

    @classmethod
    def of(cls, labels: Array, shape: Sequence[int], gains: Array | None = None) -> Self:
        """Returns a value, with equal labels along an axis stored once."""
        gains = None if gains is None else narrowed(gains)
        return cls(narrowed(labels), tuple(shape), gains=gains)

    @classmethod
    def fixed(cls, shape: Sequence[int], reason: str = "", label: int = FIXED) -> Self:
        """Returns a value that has no factor."""
        return cls(np.full((1,) * len(shape), label, np.int32), tuple(shape), reason)

    @property
    def is_bare(self) -> bool:
        """Whether it is the value that has these labels, and nothing was done to it."""
        return self.gains is None

    @property
    def is_fixed(self) -> bool:
        """Whether no part of it has a factor."""
        return self.labels.size == 1 and self.labels.item() in (FIXED, FREE)

    def whole(self) -> Array:
        """Returns the label of each element."""
        return np.broadcast_to(self.labels, self.shape)

    def even(self, axes: Iterable[int]) -> Self | None:
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


Value = Known | Parameter | Labelled


def is_key(x: Any) -> bool:
    """Whether a value holds typed keys of random numbers, which NumPy does not know."""
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def narrowed(x: Array) -> Array:
    """Returns an array of size 1 along the axes with equal elements."""
    for axis in range(x.ndim):
        slab = x[(slice(None),) * axis + (slice(1),)]
        if x.shape[axis] > 1 and np.all(x == slab):
            x = np.ascontiguousarray(slab)
    return x


def row_of(x: Array, i: int) -> Array:
    """Returns a row of an array, which has one row if all are equal."""
    return x[i if x.shape[0] > 1 else 0]


def components(count: int, a: Array, b: Array) -> Array:
    """Returns the number of the connected component of each of `count` vertices, in the graph with
    edges between `a[i]` and `b[i]`.
    """
    sparse = importlib.import_module("scipy.sparse")
    graphs = importlib.import_module("scipy.sparse.csgraph")
    edges = sparse.coo_matrix((np.ones(len(a), bool), (a, b)), (count, count))
    return graphs.connected_components(edges, directed=False)[1]


@dataclasses.dataclass(frozen=True)
class Stop:
    """Labels that cannot have a factor, and why."""

    labels: Array
    reason: str
    is_choice: bool = False


class Constraints:
    """All labels of a function, and what is known of them.

    Attributes:
      value: the class of values with labels.
      of_arguments: why arguments are fixed, for reports.
    """

    value: ClassVar[type[Labelled]] = Labelled
    of_arguments: ClassVar[str] = ""

    def __init__(self) -> None:
        self._count = 1
        self._pairs: list[tuple[Array, Array]] = []
        self._stops: list[Stop] = []

    def stop(self, labels: Array, reason: str, is_choice: bool = False) -> None:
        """Fixes labels."""
        labels = np.unique(labels)
        if np.any(labels > FIXED):
            self._stops.append(Stop(labels[labels > FIXED], reason, is_choice))

    def stop_at(self, eqn: Eqn, values: Sequence[Any], reason: str = "") -> list[Any]:
        """Fixes the operands of an equation, and returns its results."""
        text = with_line(eqn, reason)
        for x in values:
            self.stop(x.labels, text)
        return [self.value.fixed(v.aval.shape, text) for v in eqn.outvars]

    def join(self, a: Array, b: Array, reason: str) -> Array:
        """Joins the labels of two values that are changed alike, and returns them."""
        a, b = np.broadcast_arrays(a, b)
        differ = (a != b) & (a != FREE) & (b != FREE)
        if differ.any():
            pairs = np.unique(np.stack([a[differ], b[differ]]), axis=1)
            self.stop(pairs[:, (pairs == FIXED).any(0)], reason)
            self._join_pairs(pairs[:, (pairs != FIXED).all(0)], reason)
        return np.where(a == FREE, b, a)

    def _join_pairs(self, pairs: Array, reason: str) -> None:
        """Joins pairs of labels that may change, [2, pairs]."""
        self._pairs.append((pairs[0], pairs[1]))

    def join_along(self, labels: Array, axes: Iterable[int], reason: str) -> Array:
        """Returns labels of size 1 along axes, after joining those that differ."""
        for axis in axes:
            first, *others = np.split(labels, labels.shape[axis], axis)
            for following in others:
                if not np.array_equal(first, following):
                    first = self.join(first, following, reason)
            labels = first
        return labels


class Labels(Constraints):
    """All labels of a function. Clipped values have separate labels, with the factors that they had
    before the clip.

    Args:
      fixed: labels that are known to have no factor, independent of the choices at products of two
        values that may both have one, and why; as `fixed` of another pass returns it.
    """

    of_arguments: ClassVar[str] = "it is an argument"

    def __init__(self, fixed: "tuple[Array, dict[int, str]] | None" = None):
        super().__init__()
        self._fixed, self._why = fixed or (None, {})
        self._clipped, self._limits = np.empty(0, np.int32), np.empty(0)

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
        indices = self._place(labels)
        first_index = int(indices.flat[0]) if labels.size else FIXED
        visible = np.where(self._fixed[indices], FIXED, labels)
        return dataclasses.replace(
            Labelled.of(visible, shape), reason=self._why.get(first_index, "")
        )

    def _place(self, labels: Array) -> Array:
        """Returns the indices of labels among those of values that are not clipped. They are the
        same in each pass, whatever is fixed.
        """
        return labels - np.searchsorted(self._clipped, labels).astype(np.int32)

    def limits(self, labels: Array) -> Array:
        """Returns the upper limits of values of these labels, infinity if they are not clipped."""
        if not self.has_clips:
            return np.full(labels.shape, np.inf)
        clip_index = np.minimum(np.searchsorted(self._clipped, labels), len(self._clipped) - 1)
        return np.where(self._clipped[clip_index] == labels, self._limits[clip_index], np.inf)

    def clipped(self, x: Labelled, limit: Array) -> Labelled:
        """Returns a value clipped at a limit that scales with it."""
        limit = narrowed(limit.reshape(limit.shape or (1,) * len(x.shape)))
        labels, limits = np.broadcast_arrays(x.labels, limit)
        limits = np.minimum(limits, self.limits(labels))
        is_limited = (labels > FIXED) & np.isfinite(limits)
        pairs = np.stack([labels[is_limited].astype(np.float64), limits[is_limited]])
        (old_labels, limits), where = np.unique(pairs, axis=1, return_inverse=True)
        new = self.new(len(old_labels))
        self._clipped = np.concatenate([self._clipped, new])
        self._limits = np.concatenate([self._limits, limits])
        self._pairs.append((old_labels.astype(np.int32), new))
        result = labels.copy()
        result[is_limited] = new[where.ravel()]
        return Labelled.of(result, x.shape)

    def stop_clipped(self, values: Sequence[Labelled], reason: str) -> None:
        """Fixes clipped values."""
        for x in values if self.has_clips else ():
            self.stop(x.labels[np.isfinite(self.limits(x.labels))], reason)

    def _join_pairs(self, pairs: Array, reason: str) -> None:
        super()._join_pairs(pairs, reason)
        differs = self.limits(pairs[0]) != self.limits(pairs[1])
        self.stop(pairs[:, differs], f"{reason} where one is clipped and another not")

    def solved(self, choices: bool = True) -> "tuple[Array, dict[int, str]]":
        """Returns for each label the number of its factor, 0 if the factor is 1, and for fixed
        labels the reason. Without `choices`, fixes only labels that must be fixed.
        """
        none = np.empty(0, np.int32)
        a, b = (np.concatenate([none, *x]) for x in zip(*self._pairs, (none, none), strict=True))
        group_of = components(self._count, a, b)
        reason_of_group: dict[int, str] = {}
        for stop in (x for x in self._stops if choices or not x.is_choice):
            for group in np.unique(group_of[stop.labels]):
                reason_of_group.setdefault(int(group), stop.reason)
        is_fixed = np.zeros(group_of.max() + 1, bool)
        is_fixed[[*reason_of_group, group_of[FIXED]]] = True
        if self._fixed is not None:
            is_fixed[group_of[self._unclipped()[self._fixed]]] = True
        numbers = np.cumsum(~is_fixed) * ~is_fixed
        fixed = np.flatnonzero(is_fixed[group_of])[1:]
        fixed_pairs = zip(fixed.tolist(), self._place(fixed).tolist(), strict=True)
        reasons = {
            x: reason_of_group.get(int(group_of[x])) or self._why.get(index, "")
            for x, index in fixed_pairs
        }
        return numbers[group_of], reasons

    def _unclipped(self) -> Array:
        """Returns the labels of values that are not clipped."""
        return np.delete(np.arange(self._count), self._clipped)

    def fixed(self) -> "tuple[Array, dict[int, str]]":
        """Returns labels that have no factor whatever is chosen, and why, for another pass."""
        numbers, reasons = self.solved(choices=False)
        unclipped = self._unclipped()
        return numbers[unclipped] == 0, {
            i: reasons[x] for i, x in enumerate(unclipped.tolist()) if x in reasons
        }


def with_line(eqn: Eqn, description: str = "") -> str:
    """Returns an equation, or a description of it, with its source line, if that is known."""
    line = compat.line_of(eqn)
    return f"{description or eqn.primitive.name}{f' at {line}' if line else ''}"


# How an equation without a site changes labels of channels: a rule for each primitive. A primitive
# without a rule fixes its operands.


Rule = Callable[[Labels, Eqn, Sequence[Labelled], Sequence[Value]], Sequence[Labelled]]


def moved(eqn: Eqn, operands: Sequence[Any]) -> list[Array]:
    """Evaluates a view on numbers in place of values."""
    return [np.asarray(x) for x in compat.bind(eqn, [jnp.asarray(x) for x in operands])]


def kept(f: Constraints, eqn: Eqn, values: Sequence[Any], inputs: Any) -> list[Any]:
    """Operations that apply the same linear function to each element, or nearly."""
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return f.stop_at(eqn, values)
    return [*values]


def _alike(f: Labels, eqn: Eqn, values: Sequence[Labelled], inputs: Any) -> list[Labelled]:
    """Sums and choices: all operands have the same factor."""
    shape, name = eqn.outvars[0].aval.shape, eqn.primitive.name
    if name == "select_n":
        f.stop(values[0].labels, with_line(eqn))
        values = values[1:]
    reason = with_line(eqn, f"{name} with an unscaled value,")
    if name in ("max", "min", "clamp") and any(isinstance(x, Known) for x in inputs):
        reason = with_line(eqn, f"{name} with a constant")
        clip = _clip_of(name, inputs)
        if clip is not None and np.all(clip[1] > 0):
            return [f.clipped(values[clip[0]], clip[1])]
        if clip is not None:
            reason = with_line(eqn, f"{name} with a constant that is not positive")
    labels = np.full((1,) * len(shape), FREE, np.int32)
    for x in values:
        x_labels = x.labels.reshape((1,) * len(shape)) if not x.shape else x.labels
        labels = f.join(labels, x_labels, reason)
    result = Labelled.of(labels, shape)
    return [dataclasses.replace(result, reason=reason if result.is_fixed else "")]


def _clip_of(name: str, inputs: Sequence[Value]) -> tuple[int, Array] | None:
    """Returns which operand a constant limits from above, and the limit."""
    if name == "max" or (name == "clamp" and not _is_free(inputs[0])):
        return None
    argnum = 1 if name == "clamp" or isinstance(inputs[0], Known) else 0
    limit = inputs[2 if name == "clamp" else 1 - argnum]
    if not isinstance(limit, Known) or _is_free(limit):
        return None
    return argnum, np.asarray(limit.value, np.float64)


def _is_free(x: Value) -> bool:
    return isinstance(x, Known) and x.label == FREE


def _times(f: Labels, eqn: Eqn, values: Sequence[Labelled], inputs: Any) -> list[Labelled]:
    """Products: one operand takes the factor."""
    a, b = values
    if eqn.primitive.name == "div" or (not a.is_fixed and not b.is_fixed):
        is_choice = eqn.primitive.name == "mul"
        text = "the other factor of a product takes it," if is_choice else "a divisor"
        is_choice = is_choice and eqn.invars[0] is not eqn.invars[1]
        f.stop(b.labels, with_line(eqn, text), is_choice)
        b = Labelled.fixed(b.shape)
    carries = b if a.is_fixed else a
    shape = eqn.outvars[0].aval.shape
    if len(carries.shape) != len(shape):
        f.stop(carries.labels, with_line(eqn))
        carries = Labelled.fixed(shape)
    return [Labelled.of(carries.labels, shape)]


def _compared(f: Labels, eqn: Eqn, values: Sequence[Labelled], inputs: Any) -> list[Labelled]:
    """Signs, which depend only on the signs of the operands."""
    zero = any(isinstance(x, Known) and x.label == FREE for x in inputs)
    if not zero:
        return f.stop_at(eqn, values)
    return [Labelled.fixed(eqn.outvars[0].aval.shape)]


def _reduced(f: Labels, eqn: Eqn, values: Sequence[Labelled], inputs: Any) -> list[Labelled]:
    """Sums and maxima over elements with one factor."""
    (x,) = values
    axes = eqn.params["axes"]
    even = x.even(axes)
    if even is None:
        return f.stop_at(eqn, values, f"{eqn.primitive.name} over channels")
    shape = eqn.outvars[0].aval.shape
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return [Labelled.fixed(shape)]
    return [Labelled(np.squeeze(even.labels, tuple(axes)), shape)]


def along(f: Constraints, eqn: Eqn, values: Sequence[Any], inputs: Any) -> list[Any]:
    """Running sums and maxima, and windows, over elements that change alike."""
    x, p = values[0], eqn.params
    if "axis" in p:
        axes = [p["axis"]]
    else:  # those along which the windows change anything
        names = "window_dimensions", "window_strides", "base_dilation"
        windows = enumerate(zip(*(p[name] for name in names), p["padding"], strict=True))
        axes = [i for i, (*sizes, ends) in windows if any(n != 1 for n in sizes) or any(ends)]
    even = x.even(axes)
    if even is None or not even.is_bare:
        return f.stop_at(eqn, values, f"{eqn.primitive.name} over channels")
    return [dataclasses.replace(even, shape=eqn.outvars[0].aval.shape)]


def viewed(
    f: Constraints,
    eqn: Eqn,
    values: Sequence[Labelled],
    inputs: Any,
    uneven: str = "",
    written: str = "",
) -> list[Any]:
    """Operations that move elements move their labels, and their gains.

    Args:
      f: the labels.
      eqn: the equation.
      values: its operands.
      inputs: likewise; indices are known, or may be anything.
      uneven: why labels are fixed that change along an axis with an unknown index.
      written: why labels are fixed that are written to a value without.
    """
    name, shapes = eqn.primitive.name, [v.aval.shape for v in eqn.outvars]
    count = starts_at(eqn, values)
    parts, indices = values[:count], [getattr(x, "value", None) for x in inputs[count:]]
    if not all(isinstance(x, Known) for x in inputs[count:]):
        sizes = eqn.params["slice_sizes"] if name == "dynamic_slice" else values[1].shape
        axes = [i for i, n in enumerate(values[0].shape) if sizes[i] < n]
        parts = [part for x in parts if (part := x.even(axes)) is not None]
        if len(parts) < count:
            return f.stop_at(eqn, values, uneven)
        if name == "dynamic_update_slice":
            labels = f.join(parts[0].labels, parts[1].labels, with_line(eqn, written))
            return [f.value.of(labels, shapes[0])]
        indices = [np.int32(0) for _ in indices]
    labels = moved(eqn, [*(x.whole() for x in parts), *indices])
    gains: Sequence[Array | None] = [None] * len(labels)
    if parts[0].gains is not None:
        gains = moved(eqn, [np.broadcast_to(parts[0].gains, parts[0].shape)])
    return [f.value.of(*x) for x in zip(labels, shapes, gains, strict=True)]


def starts_at(eqn: Eqn, operands: Sequence[Any]) -> int:
    """Returns the number of operands of a view before its indices."""
    counts = {"dynamic_slice": 1, "dynamic_update_slice": 2}
    return counts.get(eqn.primitive.name, len(operands))


def channels_of(x: Array, shape: Sequence[int], observed_site: ObservedSite) -> Array:
    """Returns a statistic for each channel, as a site sums over them, [*batch, channels].

    Args:
      x: of the rank of the operand, size 1 along an axis whose elements share a value.
      shape: shape of the operand.
      observed_site: what observers get to know about it.
    """
    if observed_site.patches is not None:
        axis, groups = observed_site.patches.axes.lhs_spec[1], observed_site.patches.groups
        x = np.broadcast_to(x.ravel(), (shape[axis],)).reshape(groups, -1)
        x = np.repeat(x, math.prod(observed_site.patches.kernel), axis=1)
        return x[0] if groups == 1 else x
    reduced = observed_site.reduced(len(shape))
    expanded = np.broadcast_to(x, [1 if i in reduced else n for i, n in enumerate(shape)])
    turned = expanded.transpose(*observed_site.batch, *reduced, *observed_site.contracted)
    return turned.reshape(*(shape[axis] for axis in observed_site.batch), -1)


def axes_of_rows(x: Labelled, observed_site: ObservedSite) -> list[int]:
    """Returns the axes of an operand over which a site does not sum channels, nor is a batch."""
    channel_axes = {*observed_site.contracted, *observed_site.batch}
    if observed_site.patches is not None:
        channel_axes = {observed_site.patches.axes.lhs_spec[1]}
    return [axis for axis in range(len(x.shape)) if axis not in channel_axes]


def gathered(f: Constraints, eqn: Eqn, x: Labelled, indices: Any = None) -> Any:
    """A lookup in a value, at indices that may be known."""
    shape, sizes = eqn.outvars[0].aval.shape, eqn.params["slice_sizes"]
    if x.is_fixed:
        return f.value.fixed(shape, x.reason)
    if isinstance(indices, Known):
        return f.value.of(moved(eqn, [x.whole(), indices.value])[0], shape)
    even = x.even([i for i, n in enumerate(x.shape) if sizes[i] < n])
    if even is None or not even.is_bare:
        return f.stop_at(eqn, [x])[0]
    zeros = np.zeros(eqn.invars[1].aval.shape, eqn.invars[1].aval.dtype)
    return f.value.of(moved(eqn, [even.whole(), zeros])[0], shape)


def product(f: Labels, eqn: Eqn, values: Sequence[Labelled]) -> Labelled:
    """A product of values, such as attention's weights and values: one takes the factor."""
    axes, shape = CONTRACTIONS["dot_general"].axes(eqn), eqn.outvars[0].aval.shape
    a, b = values
    f.stop_clipped(values, with_line(eqn, "a product of clipped values"))
    if not a.is_fixed and not b.is_fixed:
        return f.stop_at(eqn, [a, b], "a product of two values")[0]
    argnum = 0 if b.is_fixed else 1
    x, operand_axes = values[argnum], axes[argnum]
    even = x.even(operand_axes.contracted)
    if even is None:
        return f.stop_at(eqn, [x], "a sum over channels")[0]
    return Labelled.of(of_product(even.labels, operand_axes, argnum, len(shape)), shape)


def of_product(labels: Array, axes: OperandAxes, argnum: int, rank: int) -> Array:
    """Returns the labels of a product of `rank` axes: those of one operand, which are equal along
    its contracted axes.
    """
    free = [axis for axis in axes.kept if axis not in axes.batch]
    labels = labels.transpose(*axes.batch, *free, *axes.contracted)
    labels = labels.reshape(labels.shape[: len(axes.batch) + len(free)])
    padding = (1,) * (rank - labels.ndim)
    batch, remaining = labels.shape[: len(axes.batch)], labels.shape[len(axes.batch) :]
    return labels.reshape(
        *batch, *((*remaining, *padding) if argnum == 0 else (*padding, *remaining))
    )


VIEWED = {
    "transpose",
    "reshape",
    "squeeze",
    "broadcast_in_dim",
    "slice",
    "dynamic_slice",
    "rev",
    "expand_dims",
    "split",
    "unstack",
    "stack",
    "concatenate",
    "pad",
    "dynamic_update_slice",
}
_SAME = {"neg", "copy", "abs", "stop_gradient", "convert_element_type", "reduce_precision"}
_SAME |= {"optimization_barrier", "pvary", *SHARDINGS}
RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAME, kept),
    **dict.fromkeys(("add", "sub", "add_any", "max", "min", "clamp", "select_n"), _alike),
    **dict.fromkeys(("mul", "div"), _times),
    **dict.fromkeys(("gt", "ge", "lt", "le"), _compared),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin"), _reduced),
    **dict.fromkeys(("cumsum", "cummax", "cummin", "reduce_window_sum"), along),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min"), along),
    **dict.fromkeys(VIEWED, viewed),
}
_CLIPPED = {*VIEWED, *_SAME} - {"neg", "abs"} | {"gt", "ge", "lt", "le", "select_n"}
_CLIPPED |= {"max", "min", "clamp", "reduce_max", "cummax", "reduce_window_max"}
"""For clipped values, these return values with the same clips."""


def evaluated(
    f: Labels, eqn: Eqn, values: Sequence[Labelled], inputs: Sequence[Value]
) -> Sequence[Labelled]:
    """Returns the results of an equation that has neither a site nor an inner function."""
    name = eqn.primitive.name
    rule = RULES.get(name)
    if all(x.is_fixed for x in values):
        labels = {int(x.labels.item()) for x in values}
        label = FREE if rule is not None and labels == {FREE} else FIXED
        reason = (
            with_line(eqn) if rule is None else next((x.reason for x in values if x.reason), "")
        )
        return [Labelled.fixed(v.aval.shape, reason, label) for v in eqn.outvars]
    if rule is None:
        return f.stop_at(eqn, values)
    if name not in _CLIPPED or (f.has_clips and any(map(_has_infinity, inputs))):
        f.stop_clipped(values, with_line(eqn, f"{name} of clipped values"))
    reason = next((x.reason for x in values if x.is_fixed and x.reason), "")
    results = rule(f, eqn, values, inputs)
    return [dataclasses.replace(x, reason=x.reason or reason) if x.is_fixed else x for x in results]


def _has_infinity(x: Value) -> bool:
    return (
        isinstance(x, Known) and not is_key(x.value) and bool(np.any(np.asarray(x.value) == np.inf))
    )


# Follows a traced function with other objects in place of its values: step by step through scans,
# into both branches, and into all functions that are called once.


_MOST = 256
"""Number of steps to follow in a scan that does not step over parameters."""


class ChannelDomain(Domain[Any], abc.ABC):
    """Follows labels of channels through a function. Values that do not depend on arguments are
    `Known`, and are computed. Subclasses are the algebras: what labels are, and what equations do
    to them.

    Args:
      traced: the function.

    Attributes:
      plan: the plan of everything that may be a site.
      names: the name of each leaf among the parameters, or `None`.
      shapes: the shape of each leaf.
      sizes: the number of elements of each leaf.
      items: the contractions, by address.
      elsewhere: leaves that cannot be changed, and why.
    """

    unrolls: ClassVar[bool] = True

    def __init__(self, traced: Every, labels: Constraints):
        call, self.labels = traced.call, labels
        self.plan: Plan = traced.plan
        self._elements, self._once = traced.elements, traced.once
        self.names: list[str | None] = names_of(call, self.plan.params)
        self.shapes: list[tuple[int, ...]] = [np.shape(leaf) for leaf in call.leaves]
        self.sizes: list[int] = [math.prod(shape) for shape in self.shapes]
        self.items: dict[Address, Found] = traced.items
        self.elsewhere: dict[int, str] = {}
        self._used: dict[int, Array] = {}
        self._whole: set[int] = set()

    @abc.abstractmethod
    def labelled(self, x: Any, use: str) -> Any:
        """Returns a value with labels, given what uses it."""

    @abc.abstractmethod
    def results(self, eqn: Eqn, inputs: list[Any], address: Address, steps: Steps) -> Sequence[Any]:
        """Returns the results of an equation without inner functions."""

    def stopped(self, eqn: Eqn, inputs: Sequence[Any], reason: str = "") -> list[Any]:
        """Fixes the operands of an equation that is not entered, and returns its results."""
        values = [self.labelled(x, with_line(eqn)) for x in inputs]
        return self.labels.stop_at(eqn, values, reason)

    def joined(self, values: Sequence[Any], reason: str) -> Any:
        """Joins the values of several branches into one."""
        first, *others = (self.labelled(x, reason) for x in values)
        labels = first.labels
        for x in others:
            labels = self.labels.join(labels, x.labels, reason)
        return self.labels.value.of(labels, first.shape)

    def stacked(self, rows: Sequence[Any]) -> Any:
        """Joins the values of all steps of a scan into one; not all of them are known."""
        values = [self.labelled(x, "a result of a scan") for x in rows]
        shape = np.broadcast_shapes(*(x.labels.shape for x in values))
        labels = np.stack([np.broadcast_to(x.labels, shape) for x in values])
        return self.labels.value.of(labels, (len(rows), *values[0].shape))

    def step_of(self, x: Any, i: int) -> Any:
        """Returns the part of a value that a step of a scan reads; the value is not known."""
        gains = None if x.gains is None else row_of(x.gains, i)
        return self.labels.value.of(row_of(x.labels, i), x.shape[1:], gains)

    def literal(self, atom: Any) -> Known:
        return Known(atom.val)

    def constant(self, array: Any) -> Known:
        return Known(array)

    def enters(self, eqn: Eqn, values: list[Any], where: Where) -> bool:
        is_followed = eqn.primitive.name not in ("while", "shard_map")
        return is_followed and not _is_known(eqn, values) and not self._is_long(eqn, values)

    def _is_long(self, eqn: Eqn, values: list[Any]) -> bool:
        """Whether an equation is a scan of many steps over values that are not parameters."""
        if eqn.primitive.name != "scan" or eqn.params["length"] <= _MOST:
            return False
        return not any(isinstance(x, Parameter) for x in values[carried(eqn).stop :])

    def evaluate(self, eqn: Eqn, values: list[Any], where: Where) -> Sequence[Any]:
        if _is_known(eqn, values):
            return [Known(x) for x in compat.bind(eqn, [x.value for x in values])]
        if not bodies(eqn):
            return self.results(eqn, values, where.around, where.steps)
        is_long = self._is_long(eqn, values)
        reason = f"a scan of {eqn.params['length']} steps" if is_long else ""
        return self.stopped(eqn, values, reason)

    def part(self, value: Any, step: int) -> Any:
        if isinstance(value, Known):
            return Known(_rows(value.value)[step])
        return value.step_of(step) if isinstance(value, Parameter) else self.step_of(value, step)

    def stack(self, values: list[Any], aval: Any) -> Any:
        if not values:
            return self.labels.value.fixed(aval.shape)
        if all(isinstance(x, Known) for x in values):
            stack = jnp.stack if is_key(values[0].value) else np.stack
            return Known(stack([_rows(x.value) for x in values]))
        return self.stacked(values)

    def returned(
        self, eqn: Eqn, values: list[Any], results: list[list[Any]], where: Where
    ) -> Sequence[Any]:
        if eqn.primitive.name != "cond":
            return results[-1]
        index, reason = values[0], with_line(eqn)
        if isinstance(index, Known):
            return results[int(np.clip(int(index.value), 0, len(results) - 1))]
        return [self.joined(x, reason) for x in zip(*results, strict=True)]

    def follow(self, call: Call) -> None:
        """Follows the whole function, whose results cannot change."""
        weights = {weight.path for weight in self.plan.weights}
        operands = [self._operand(i, path in weights) for i, path in enumerate(call.paths)]
        self._whole = {id(x) for x in operands}
        for x in walk(self, call.jaxpr, operands, consts=call.consts):
            if not isinstance(x, Known):
                returned = self.labelled(x, "it is returned")
                self.labels.stop(returned.labels, "it is a result of the function")

    def _operand(self, leaf_index: int, is_weight: bool) -> Any:
        shape = self.shapes[leaf_index]
        if self.names[leaf_index] is None:
            return self.labels.value.fixed(shape, self.labels.of_arguments)
        return Parameter(leaf_index, shape, None if is_weight else self.numbers(leaf_index))

    def numbers(self, leaf_index: int) -> Array:
        """Returns the number of each element of a leaf."""
        return np.arange(self.sizes[leaf_index], dtype=np.int32).reshape(self.shapes[leaf_index])

    def is_whole(self, x: Parameter) -> bool:
        """Whether a value is a parameter itself, and no view of one."""
        return id(x) in self._whole

    def site_at(self, address: Address) -> Site | None:
        """Returns the site at an address, if it multiplies a weight by something else."""
        site = self.plan.site_at(address)
        is_one = site is not None and sum(x.path is not None for x in site.operands) == 1
        return site if is_one else None

    def at_site(
        self, site: Site, operands: Sequence[Any]
    ) -> tuple[int, Any, ObservedSite, Elements | None]:
        """Returns the position of the weight of a site, the other operand with labels, what
        observers get to know about that, and which elements of a leaf the weight holds, over all
        steps; `None` if the weight has another use, or is not a plain matrix.
        """
        (argnum,) = (i for i, x in enumerate(site.operands) if x.path is None)
        observed_site = observed_parts(site, self.items[site.address])[argnum].observed
        x, weight_argnum = self.labelled(operands[argnum], site.name), 1 - argnum
        is_known = site.address in self._once and isinstance(operands[weight_argnum], Parameter)
        key = site.operands[weight_argnum].key
        return weight_argnum, x, observed_site, self._elements.get(key) if is_known else None

    def labels_of_result(self, site: Site, eqn: Eqn, weight_argnum: int, outputs: Array) -> Array:
        """Returns the labels of the result of a site, given those of the rows of its weight."""
        if site.op == "ragged_dot":  # a row may go to any of the matrices
            outputs = self.labels.join_along(outputs, [0], with_line(eqn))[0]
        return Channels.of_result(eqn, weight_argnum).spread(outputs, eqn.outvars[0].aval.shape)

    def use(self, leaf_index: int, elements: Array) -> None:
        """Marks elements of a leaf as used."""
        self._used.setdefault(leaf_index, np.zeros(self.sizes[leaf_index], bool))[elements] = True

    def partly_used(self) -> list[int]:
        """Returns the leaves of which a part is not used. A call with other shapes may use it."""
        return [leaf_index for leaf_index, used in self._used.items() if not used.all()]

    def scaled_weight(self, eqn: Eqn, inputs: Sequence[Any]) -> list[Parameter] | None:
        """Returns the weight of a site that is cast, or multiplied or divided by a number, which
        changes all channels alike; `None` for other equations.
        """
        x, name = inputs[0], eqn.primitive.name
        if name == "mul" and not isinstance(x, Parameter):
            x = inputs[1]
        if not isinstance(x, Parameter) or x.elements is not None:
            return None
        is_cast = name == "convert_element_type" and jnp.issubdtype(
            eqn.outvars[0].aval.dtype, jnp.inexact
        )
        is_scaled = name in ("mul", "div") and any(
            isinstance(y, Known) and np.ndim(y.value) == 0 for y in inputs
        )
        if is_cast:
            return [x]
        return [dataclasses.replace(x)] if is_scaled else None

    def viewed(self, eqn: Eqn, inputs: Sequence[Any], x: Parameter) -> list[Parameter] | None:
        """Returns views of a parameter; `None` if some of their elements are not of it."""
        shapes = [v.aval.shape for v in eqn.outvars]
        if x.elements is None:
            return [Parameter(x.leaf_index, shape, None) for shape in shapes]
        if eqn.primitive.name in ("pad", "dynamic_update_slice"):
            return None
        views = moved(eqn, [y.whole if isinstance(y, Parameter) else y.value for y in inputs])
        return [
            dataclasses.replace(x, elements=narrowed(elements), shape=shape)
            for elements, shape in zip(views, shapes, strict=True)
        ]


def is_lookup_of_rows(eqn: Eqn) -> bool:
    """Whether an equation looks up whole rows of a matrix."""
    sizes, numbers = eqn.params["slice_sizes"], eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    axes = [i for i, n in enumerate(shape) if sizes[i] < n]
    return axes == [0] and len(shape) == 2 and not numbers.operand_batching_dims


def looked_up(eqn: Eqn, columns: Array) -> Array:
    """Returns the labels of rows that are looked up, given those of the columns."""
    rank = eqn.outvars[0].aval.ndim
    axis = eqn.params["dimension_numbers"].offset_dims[-1]  # in a vmap one of size 1 is before it
    return np.moveaxis(np.broadcast_to(columns, (1,) * (rank - 1) + columns.shape), -1, axis)


def names_of(call: Call, params: int | tuple[int, ...]) -> list[str | None]:
    """Returns for each leaf its name among the parameters, whether weights of a plan can have it or
    not; `None` if it is not a parameter.
    """
    positions, names = (params,) if isinstance(params, int) else params, []
    for (kind, position, *keys), path in zip(call.keys, call.paths, strict=True):
        inside = kind.idx == 0 and position.idx in positions
        name = keystr(tuple(keys), simple=True, separator="/")
        names.append(path if path is not None else name if inside else None)
    return names


def _is_known(eqn: Eqn, values: Sequence[Any]) -> bool:
    """Whether the results of an equation can be computed."""
    return all(isinstance(x, Known) for x in values) and not eqn.effects


def _rows(x: Any) -> Any:
    """Returns an array on the host; typed keys are left as they are."""
    return x if is_key(x) else np.asarray(x)
