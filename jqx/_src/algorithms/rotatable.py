"""Which channels of a function can be rotated, and what must be rotated with them.

A rotated value is `x Q`, where `x` is the original. Weights take `Q` at their output axes, and its
inverse where they sum over channels; biases and tables take `Q` too. The root mean square does not
change. A gain after a norm is multiplied into the weights that read it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np

from ..compat import Eqn
from ..statistics.statistics import ObservedSite
from ..transforms.plan import Operand, Site
from ..transforms.rules import CONTRACTIONS
from ..transforms.views import SHARDINGS, Address
from .channels import Visit
from .grids import Elements, Every
from .labels import (
    FIXED,
    FREE,
    VIEWED,
    Array,
    Axes,
    ChannelDomain,
    Constraints,
    Known,
    Labelled,
    Parameter,
    along,
    axes_of_rows,
    channels_of,
    components,
    gathered,
    is_key,
    is_lookup_of_rows,
    kept,
    looked_up,
    of_product,
    starts_at,
    viewed,
    with_line,
)
from .stages import Steps

# Blocks of channels that one orthogonal matrix can rotate. Labels number channels; those of a
# block are consecutive. Blocks are cut where their channels are treated differently, joined
# where they take the same rotation, and stopped, with a reason, where they can take none.


def axes_of(shape: Sequence[int]) -> Axes:
    """Returns the axes along which a value of a shape may vary."""
    return frozenset(i for i, n in enumerate(shape) if n > 1)


@dataclasses.dataclass(frozen=True)
class Rotatable(Labelled):
    """Any other value that depends on arguments.

    Attributes:
      is_squared: whether it is the square of the value that has these labels.
      varies: if no part of it is rotated, the axes along which it may vary.
    """

    is_squared: bool = False
    varies: Axes = frozenset()

    @classmethod
    def fixed(
        cls,
        shape: Sequence[int],
        reason: str = "",
        label: int = FIXED,
        varies: Axes | None = None,
    ) -> Self:
        """Returns a value that is not rotated."""
        axes = axes_of(shape) if varies is None else varies & axes_of(shape)
        return dataclasses.replace(super().fixed(shape, reason, label), varies=axes)

    @classmethod
    def of(cls, labels: Array, shape: Sequence[int], gains: Array | None = None) -> Self:
        """Returns a value, with equal labels along an axis stored once."""
        value = super().of(labels, shape, gains)
        is_fixed = value.labels.size == 1 and value.labels.item() == FIXED
        return cls.fixed(shape) if is_fixed else value

    @property
    def is_bare(self) -> bool:
        """Whether it is neither multiplied by gains nor squared."""
        return self.gains is None and not self.is_squared


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


class Rotations(Constraints):
    """All labels of a function, and the constraints on their blocks."""

    value: ClassVar[type[Labelled]] = Rotatable

    def __init__(self) -> None:
        super().__init__()
        self._cuts: list[tuple[Array, str]] = []

    def new(self, *shape: int) -> Array:
        """Returns labels that are not in use; the last axis is a block."""
        count = int(np.prod(shape))
        labels = np.arange(self._count, self._count + count, dtype=np.int32).reshape(shape)
        self._count += count
        if count:
            self._cuts.append((np.append(labels[..., 0].ravel(), self._count), ""))
        return labels

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

    def solved(self) -> Blocks:
        """Returns the largest blocks that satisfy all rotations."""
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
        for stop in self._stops:
            for kind in np.unique(kinds[stop.labels]):
                reason_of_kind.setdefault(int(kind), stop.reason)
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


Rule = Callable[[Rotations, Eqn, Sequence[Rotatable], Sequence[Any]], Sequence[Rotatable]]


def scaled(f: Rotations, x: Rotatable, varies: Axes, reason: str) -> None:
    """Cuts the blocks of a value at factors that vary along some axes."""
    axes = [axis for axis in sorted(varies) if x.labels.shape[axis] > 1]
    if axes:
        other_axes = [axis for axis in range(x.labels.ndim) if axis not in axes]
        count = int(np.prod([x.labels.shape[axis] for axis in axes]))
        f.cut_sets(x.labels.transpose(*axes, *other_axes).reshape(count, -1), reason)


def _together(f: Rotations, x: Rotatable, axes: Sequence[int], reason: str) -> Rotatable | None:
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


def _alike(f: Rotations, eqn: Eqn, values: Sequence[Rotatable], inputs: Any) -> Sequence[Rotatable]:
    """Sums and choices: all operands have the same rotation."""
    shape, name = eqn.outvars[0].aval.shape, eqn.primitive.name
    reason = with_line(eqn, f"{name} with a value that cannot be rotated,")
    labels = np.full((1,) * len(shape), FREE, np.int32)
    which, values = (values[:1], values[1:]) if name == "select_n" else ((), values)
    if not all(x.is_bare for x in values):
        return f.stop_at(eqn, values, f"{name} after a gain")
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


def _times(f: Rotations, eqn: Eqn, values: Sequence[Rotatable], inputs: Any) -> Sequence[Rotatable]:
    """Products with factors that do not vary along the channels, and squares."""
    shape = eqn.outvars[0].aval.shape
    a, b = (_ranked(x, len(shape)) for x in values)
    if eqn.invars[0] is eqn.invars[1] and eqn.primitive.name == "mul":
        return _squared(f, eqn, [a], inputs)
    if a.is_fixed and eqn.primitive.name == "mul":
        a, b = b, a
    if not b.is_fixed:
        return f.stop_at(eqn, [a, b])
    scaled(f, a, b.varies, with_line(eqn, "a factor for each channel,"))
    return [dataclasses.replace(a, shape=shape)]


def _squared(
    f: Rotations, eqn: Eqn, values: Sequence[Rotatable], inputs: Any
) -> Sequence[Rotatable]:
    (x,) = values
    if eqn.params.get("y", 2) != 2 or not x.is_bare:
        return f.stop_at(eqn, values)
    return [dataclasses.replace(x, is_squared=True)]


def _summed(
    f: Rotations, eqn: Eqn, values: Sequence[Rotatable], inputs: Any
) -> Sequence[Rotatable]:
    """Sums: of squares over whole blocks, of other values over elements with one rotation."""
    (x,), axes, shape = values, eqn.params["axes"], eqn.outvars[0].aval.shape
    if not x.is_squared:
        even = _together(f, x, axes, with_line(eqn, "a sum with a value that cannot be rotated,"))
        if even is None:
            return f.stop_at(eqn, values, f"{eqn.primitive.name} over channels")
        gains = None if even.gains is None else np.squeeze(even.gains, tuple(axes))
        return [Rotatable.of(np.squeeze(even.labels, tuple(axes)), shape, gains)]
    other_axes = [axis for axis in range(x.labels.ndim) if axis not in axes]
    rows = x.labels.transpose(*other_axes, *axes)
    rows = rows.reshape(*rows.shape[: len(other_axes)], -1)
    f.cut_runs(rows, with_line(eqn, "a sum of squares"))
    return [Rotatable.fixed(shape)]


def _viewed(
    f: Rotations, eqn: Eqn, values: Sequence[Rotatable], inputs: Any
) -> Sequence[Rotatable]:
    """Operations that move elements move their labels."""
    name, start = eqn.primitive.name, starts_at(eqn, values)
    if any(x.is_squared for x in values[:start]):
        return f.stop_at(eqn, values[:start])
    if any(x.gains is not None for x in values[:start]) and len(values) > 1:
        return f.stop_at(eqn, values[:start], f"{name} after a gain")
    written = "it is written to a value that cannot be rotated,"
    return viewed(f, eqn, values[:start], inputs, f"{name} of channels", written)


def product(f: Rotations, eqn: Eqn, values: Sequence[Rotatable]) -> Rotatable:
    """A product of values: of attention weights and values, or of two with the same rotation."""
    axes, shape = CONTRACTIONS["dot_general"].axes(eqn), eqn.outvars[0].aval.shape
    if not all(x.is_bare for x in values):
        return f.stop_at(eqn, values, "a product after a gain")[0]
    if not any(x.is_fixed for x in values):
        return _inner(f, eqn, values, axes)
    argnum = 0 if values[1].is_fixed else 1
    x, factor, operand_axes = values[argnum], values[1 - argnum], axes[argnum]
    even = _together(
        f, x, operand_axes.contracted, with_line(eqn, "a sum with a value that cannot be rotated,")
    )
    if even is None:
        return f.stop_at(eqn, [x], "a sum over channels")[0]
    pairs = zip(operand_axes.batch, axes[1 - argnum].batch, strict=True)
    varies = frozenset(i for i, j in pairs if j in factor.varies)
    scaled(f, even, varies, with_line(eqn, "a factor for each channel,"))
    return Rotatable.of(of_product(even.labels, operand_axes, argnum, len(shape)), shape)


def _inner(f: Rotations, eqn: Eqn, values: Sequence[Rotatable], axes: Any) -> Rotatable:
    """Inner products, which do not change if both vectors are rotated by one matrix."""
    rows = []
    for x, operand_axes in zip(values, axes, strict=True):
        free = [axis for axis in operand_axes.kept if axis not in operand_axes.batch]
        even = x.even(free)
        if even is None:
            return f.stop_at(eqn, values, "a product of two values")[0]
        order, summed = (*operand_axes.batch, *operand_axes.contracted), tuple(range(len(free)))
        labels = np.squeeze(even.labels.transpose(*free, *order), summed)
        expanded = np.broadcast_to(labels, [x.shape[axis] for axis in order])
        rows.append(expanded.reshape(*expanded.shape[: len(operand_axes.batch)], -1))
        f.cut_runs(rows[-1], with_line(eqn, "a product of two values"))
    f.join(rows[0], rows[1], with_line(eqn, "a product with a value that cannot be rotated,"))
    return Rotatable.fixed(eqn.outvars[0].aval.shape)


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
    **dict.fromkeys(_SAME, kept),
    **dict.fromkeys(("add", "sub", "add_any", "select_n"), _alike),
    **dict.fromkeys(("mul", "div"), _times),
    **dict.fromkeys(("square", "integer_pow"), _squared),
    "reduce_sum": _summed,
    "cumsum": along,
    **dict.fromkeys(VIEWED, _viewed),
}


# Contractions and lookups: where the channels of a value meet a weight.


@dataclasses.dataclass(frozen=True)
class Read(Visit):
    """A contraction of a rotated value with a weight, in one step of the scans around it. Channels
    are in the order of the axes of the operand; rows of a weight that cannot take rotations have no
    labels.

    Attributes:
      value: identifies the operand: contractions of one value have the same object.
      order: the positions of channels in the order in which the site sums; `None` if that is the
        same.
      gains: labels of the gains of channels, [*batch, channels], 0 if there is none; or `None`.
      weight_steps: the numbers of the steps that `element_ids` depend on.
      is_site: whether it is a site of the full plan; otherwise its weight is also looked up.
    """

    value: object
    order: Array | None
    gains: Array | None
    weight_steps: Steps = ()
    is_site: bool = True

    @property
    def address(self) -> Address:
        """The address of the contraction."""
        return self.site.address

    @property
    def labels(self) -> Array:
        """Labels of what is rotated back if its weight cannot take a rotation."""
        return self.inputs

    @property
    def elements(self) -> Array:
        """Numbers of elements of its matrices, [*batch, rows, channels]; computed at each call."""
        numbers = self.summed
        return numbers if self.order is None else numbers[..., self.order]

    @property
    def summed(self) -> Array:
        """The same, with channels in the order in which the site sums over them."""
        assert self.element_ids is not None
        return self.element_ids[self.weight_steps]

    @property
    def channels(self) -> int:
        """The number of channels; for a convolution, those of one group."""
        assert self.element_ids is not None
        patches = self.observed_site.patches
        return self.element_ids.shape[-1] // (1 if patches is None else math.prod(patches.kernel))


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A lookup of rows of a parameter.

    Attributes:
      address: the address of the lookup.
      steps: the numbers of the steps of scans around it.
      leaf_index: the index of the leaf of the parameter.
      elements: the numbers of its elements, [rows, columns].
      labels: labels of its columns, and of the result.
    """

    address: Address
    steps: Steps
    leaf_index: int
    elements: Elements
    labels: Array


def different(lookups: Iterable[Lookup]) -> list[Lookup]:
    """Returns one lookup of each set of lookups in the same view of one leaf."""
    distinct: list[Lookup] = []
    for x in lookups:
        if not any(
            x.leaf_index == y.leaf_index and x.elements.equals(y.elements) for y in distinct
        ):
            distinct.append(x)
    return distinct


def channels_at(
    rotations: Rotations, x: Rotatable, observed_site: ObservedSite, name: str
) -> tuple[Array, Array | None, Array | None]:
    """Returns the channels that a site sums over: labels, their order, and labels of gains, as in
    `Read`.
    """
    row_axes, gains = axes_of_rows(x, observed_site), x.gains
    labels = rotations.join_along(x.labels, row_axes, f"rows that {name} multiplies differ")
    for axis in row_axes:
        if gains is not None and gains.shape[axis] > 1:
            rotations.stop(labels, f"the gains of rows that {name} multiplies differ")
            gains = gains[(slice(None),) * axis + (slice(1),)]
    if observed_site.patches is not None:
        channel_axis = observed_site.patches.axes.lhs_spec[1]
        observed_site = dataclasses.replace(observed_site, patches=None, contracted=(channel_axis,))
    axes, order = sorted(observed_site.contracted), None
    if axes != [*observed_site.contracted]:
        sizes = [x.shape[axis] for axis in observed_site.contracted]
        numbers = np.arange(math.prod(sizes)).reshape(sizes)
        order = numbers.transpose(np.argsort(observed_site.contracted)).reshape(-1)
        observed_site = dataclasses.replace(observed_site, contracted=tuple(axes))
    inputs = channels_of(labels, x.shape, observed_site)
    rotations.cut_runs(inputs, f"the channels that {name} sums over")
    if gains is not None:
        gains = channels_of(gains, x.shape, observed_site)
    return inputs, order, gains


def read_of_table(
    rotations: Rotations, item: Any, x: Rotatable, leaf: Parameter, steps: Steps
) -> Read | None:
    """Returns the product of a value and a parameter, such as a table that is also the head; `None`
    if the parameter is not a plain matrix.
    """
    argnums = [i for i, origin in enumerate(item.origins) if origin is not None]
    if leaf.elements is None or leaf.is_scaled or leaf.offset or x.is_squared or len(argnums) != 1:
        return None
    argnum = argnums[0]
    both_axes = CONTRACTIONS[item.eqn.primitive.name].axes(item.eqn)
    axes, weight_axes = both_axes[1 - argnum], both_axes[argnum]
    if weight_axes.batch:
        return None
    roles = ("weight", "activation") if argnum == 0 else ("activation", "weight")
    operands = tuple(
        Operand(role, None, "", item.path if role == "weight" else None) for role in roles
    )
    address = item.address, item.path, item.scope, item.op
    site = Site(*address, operands, None, "", 0, item.loops, (), (), None)
    observed_site = ObservedSite(
        item.path, item.op, "lhs", "activation", True, axes.contracted, axes.kept, axes.batch, None
    )
    inputs, order, gains = channels_at(rotations, x, observed_site, item.path)
    numbers = np.broadcast_to(leaf.elements, leaf.shape)
    numbers = numbers.transpose(*weight_axes.kept, *weight_axes.contracted)
    element_ids = Elements.of(numbers.reshape(-1, inputs.shape[-1]))
    where, empty = (site, steps, leaf.leaf_index, element_ids), np.empty(0, np.int32)
    operand = observed_site, x.shape, x.reason, x, order, gains
    return Read(*where, inputs, empty, *operand, is_site=False)


_FLAT = {*VIEWED, "convert_element_type", "copy", "stop_gradient"}


class RotationDomain(ChannelDomain):
    """Labels of channels that one matrix rotates.

    Attributes:
      reads: contractions with weights.
      lookups: lookups in parameters.
      gains: labels of gains, and of the channels that they multiply.
      offsets: by leaf, what is added to a gain.
      starts: by leaf, the label of its first element.
      unseen: leaves that are only partly used, and why that matters.
    """

    def __init__(self, traced: Every):
        self.labels: Rotations
        super().__init__(traced, Rotations())
        self.starts: dict[int, int] = {}
        self.reads: list[Read] = []
        self.lookups: list[Lookup] = []
        self.gains: list[tuple[Array, Array]] = []
        self.offsets: dict[int, float] = {}
        self.unseen: dict[int, str] = {}
        self._summed: set[int] = set()
        self.follow(traced.call)
        self._find_other_uses()
        self._used.clear()  # as large as the parameters

    def _find_other_uses(self) -> None:
        """Stops rotations that would change a parameter with another use."""
        for leaf_index in self.partly_used():
            self.unseen.setdefault(leaf_index, "a part of it is not used here")
        uses: dict[int, Array] = {}
        for table in different(self.lookups):
            counts = uses.setdefault(
                table.leaf_index, np.zeros(self.sizes[table.leaf_index], np.int32)
            )
            np.add.at(counts, table.elements[()], 1)
        for leaf_index, counts in uses.items():
            if np.any(counts > 1):
                self.elsewhere.setdefault(leaf_index, "two different views of it are looked up")
        for leaf_index in set(uses) & set(self.starts):
            self.elsewhere.setdefault(leaf_index, "rows of it are looked up")
        for leaf_index in {x.leaf_index for x in self.reads} & set(self.starts):
            self.elsewhere.setdefault(leaf_index, "a product with it")
        for leaf_index, reason in (self.unseen | self.elsewhere).items():
            if leaf_index in self.starts:
                labels = np.arange(self.sizes[leaf_index], dtype=np.int32) + self.starts[leaf_index]
                self.labels.stop(labels, f"{self.names[leaf_index]} has another use: {reason}")
        for gains, labels in self.gains:
            leaf_index, _ = self.elements_of(gains)
            if leaf_index in self.unseen | self.elsewhere or leaf_index in self._summed:
                self.labels.stop(labels, f"its gain {self.names[leaf_index]} has another use")

    def elements_of(self, labels: Array) -> tuple[int, Array]:
        """Returns the leaf of some labels, and the numbers of their elements."""
        matching = (x for x in self.starts.items() if 0 <= labels.flat[0] - x[1] < self.sizes[x[0]])
        leaf_index, start = next(matching)
        return leaf_index, labels - start

    def labelled(self, x: Any, use: str) -> Rotatable:
        """Returns a value with labels; each element of a parameter has a label."""
        if isinstance(x, Rotatable):
            return x
        if isinstance(x, Known):
            if is_key(x.value):
                return Rotatable.fixed(np.shape(x.value))
            value = np.asarray(x.value)
            if jnp.issubdtype(value.dtype, jnp.inexact) and np.all(value == 0):
                return Rotatable(np.full((1,) * value.ndim, FREE, np.int32), value.shape)
            varies = [
                axis for axis, n in enumerate(value.shape)
                if n > 1 and np.any(value != value.take([0], axis))
            ]  # fmt: skip
            return Rotatable.fixed(value.shape, varies=frozenset(varies))
        if x.elements is None:
            self.elsewhere.setdefault(x.leaf_index, use)
            return Rotatable.fixed(x.shape)
        labels = self._labels(x)
        self.use(x.leaf_index, x.elements)
        self._summed.add(x.leaf_index)
        result = Rotatable.of(labels, x.shape)
        scaled(self.labels, result, x.varies, use)
        if x.offset:
            self.labels.stop(labels, f"{self.names[x.leaf_index]} has a constant added")
            return Rotatable.fixed(x.shape)
        return result

    def _labels(self, x: Parameter) -> Array:
        """Returns the labels of the elements of a parameter."""
        if x.leaf_index not in self.starts:
            self.starts[x.leaf_index] = int(self.labels.new(1, self.sizes[x.leaf_index])[0, 0])
        return x.elements + np.int32(self.starts[x.leaf_index])  # type: ignore[operator]

    def results(self, eqn: Eqn, inputs: list[Any], address: Address, steps: Steps) -> Sequence[Any]:
        """Returns the labels of the results of an equation."""
        name = eqn.primitive.name
        if name in CONTRACTIONS:
            return [self._contraction(eqn, inputs, address, steps)]
        results = self._of_parameters(eqn, inputs)
        if results is not None:
            return results
        values = [self.labelled(x, with_line(eqn)) for x in inputs]
        if all(x.is_fixed for x in values):
            shapes, varies = [v.aval.shape for v in eqn.outvars], varies_of(eqn, values)
            reason = next((x.reason for x in values if x.reason), "")
            return [
                Rotatable.fixed(shape, reason, varies=axes)
                for shape, axes in zip(shapes, varies, strict=True)
            ]
        rule = RULES.get(name)
        if rule is None:
            return self.labels.stop_at(eqn, values)
        return rule(self.labels, eqn, values, inputs)

    def _of_parameters(self, eqn: Eqn, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Returns the results of views of parameters, of `1 + gain`, and of products with them;
        `None` if the parameters must be treated as other values.
        """
        name, parameters = eqn.primitive.name, [x for x in inputs if isinstance(x, Parameter)]
        if len({x.leaf_index for x in parameters}) != 1 or not jnp.issubdtype(
            eqn.outvars[0].aval.dtype, jnp.inexact
        ):
            return None
        scaled = self.scaled_weight(eqn, inputs)
        if scaled is not None:
            return scaled
        x, shape = parameters[0], eqn.outvars[0].aval.shape
        if (
            name in _FLAT
            and not x.varies
            and len(parameters) + sum(isinstance(x, Known) for x in inputs) == len(inputs)
        ):
            return self._viewed(eqn, inputs, x)
        if (
            len(parameters) > 1
            or len(inputs) != 2
            or x.elements is None
            or len(x.shape) != len(shape)
        ):
            return None
        (operand,) = (y for y in inputs if not isinstance(y, Parameter))
        if name in ("add", "sub") and isinstance(operand, Known) and not x.is_scaled:
            value = np.asarray(operand.value)
            is_first = inputs[0] is x or name == "add"
            if is_first and value.size and np.all(value == value.flat[0]) and value.flat[0]:
                change = float(value.flat[0]) * (1 if name == "add" else -1)
                return [dataclasses.replace(x, shape=shape, offset=x.offset + change)]
        if name == "mul" or (name == "div" and inputs[0] is x):
            factor = self.labelled(operand, with_line(eqn))
            if factor.is_fixed:
                varies = x.varies | factor.varies
                return [dataclasses.replace(x, shape=shape, is_scaled=True, varies=varies)]
            if name == "mul":
                return [self._gained(eqn, factor, x)]
        return None

    def _viewed(self, eqn: Eqn, inputs: Sequence[Any], x: Parameter) -> Sequence[Any] | None:
        if eqn.primitive.name not in VIEWED:
            return [x]
        views = self.viewed(eqn, inputs, x)
        if views is None or not x.varies:
            return views
        varies = varies_of(eqn, [Rotatable.fixed(x.shape, varies=x.varies)])
        return [
            dataclasses.replace(view, varies=axes) for view, axes in zip(views, varies, strict=True)
        ]

    def _gained(self, eqn: Eqn, x: Rotatable, gain: Parameter) -> Rotatable:
        """Returns a value with its channels multiplied by a gain."""
        shape = eqn.outvars[0].aval.shape
        if not x.is_bare:
            reason = "two gains, or a gain of squares,"
            self.elsewhere.setdefault(gain.leaf_index, with_line(eqn, reason))
            return self.labels.stop_at(eqn, [x], reason)[0]
        scaled(self.labels, x, gain.varies, with_line(eqn, "a factor for each channel,"))
        gain_labels = self._labels(gain)
        self.use(gain.leaf_index, gain.elements)  # type: ignore[arg-type]
        self.labels.stop(gain_labels, "it is a gain")
        aligned = np.broadcast_arrays(gain_labels, x.labels)
        pairs = np.unique(np.stack([y.ravel() for y in aligned]), axis=1)
        offset = self.offsets.setdefault(gain.leaf_index, gain.offset)
        if offset != gain.offset:
            reason = "a gain with another offset"
            self.elsewhere.setdefault(gain.leaf_index, with_line(eqn, reason))
            return self.labels.stop_at(eqn, [x], reason)[0]
        self.gains.append((pairs[0], pairs[1]))
        return dataclasses.replace(x, gains=gain_labels, shape=shape)

    def _contraction(
        self, eqn: Eqn, inputs: Sequence[Any], address: Address, steps: Steps
    ) -> Rotatable:
        name, site = eqn.primitive.name, self.site_at(address)
        if site is not None:
            return self._site(site, eqn, inputs, steps)
        if name == "gather":
            return self._gather(eqn, inputs, address, steps)
        if name == "dot_general" and self._skipped(eqn, inputs, address, steps):
            return Rotatable.fixed(eqn.outvars[0].aval.shape)
        values = [self.labelled(x, with_line(eqn)) for x in inputs]
        if name == "dot_general" and not all(x.is_fixed for x in values):
            return product(self.labels, eqn, values)
        return self.labels.stop_at(eqn, values)[0]

    def _site(self, site: Site, eqn: Eqn, operands: Sequence[Any], steps: Steps) -> Rotatable:
        shape = eqn.outvars[0].aval.shape
        weight_argnum, x, observed_site, weight_ids = self.at_site(site, operands)
        if x.is_squared or (observed_site.patches is not None and observed_site.patches.groups > 1):
            self.labels.stop(x.labels, with_line(eqn, "a square or groups of channels"))
            x = Rotatable.fixed(x.shape)
        inputs, order, gains = channels_at(self.labels, x, observed_site, site.name)
        where = getattr(operands[weight_argnum], "leaf_index", -1)
        weight_steps, outputs = (), np.empty(0, np.int32)
        if weight_ids is not None:
            batch, rows = weight_ids.shape[len(steps) : -2], weight_ids.shape[-2]
            inputs = np.broadcast_to(inputs, (*batch, inputs.shape[-1]))
            gains = None if gains is None else np.broadcast_to(gains, inputs.shape)
            weight_steps, outputs = steps, self.labels.new(*batch, rows)
            self.use(where, weight_ids[steps])
        operand = observed_site, x.shape, x.reason, x, order, gains
        read = Read(site, steps, where, weight_ids, inputs, outputs, *operand, weight_steps)
        self.reads.append(read)
        if weight_ids is None:
            return Rotatable.fixed(shape)
        return Rotatable.of(self.labels_of_result(site, eqn, weight_argnum, outputs), shape)

    def _skipped(self, eqn: Eqn, operands: Sequence[Any], address: Address, steps: Steps) -> bool:
        """Adds a product with a parameter that is not a site of the full plan, such as a table that
        is also the head. Returns whether the equation is one.
        """
        item = self.items.get(address)
        parameter_argnums = [i for i, x in enumerate(operands) if isinstance(x, Parameter)]
        if item is None or len(parameter_argnums) != 1:
            return False
        x = self.labelled(operands[1 - parameter_argnums[0]], with_line(eqn))
        read = read_of_table(self.labels, item, x, operands[parameter_argnums[0]], steps)
        if read is not None:
            self.reads.append(read)
        return read is not None

    def _gather(self, eqn: Eqn, inputs: Sequence[Any], address: Address, steps: Steps) -> Rotatable:
        source = inputs[0]
        is_table = isinstance(source, Parameter) and not source.varies and not source.offset
        if is_table and is_lookup_of_rows(eqn) and address in self.items:
            table_ids = source.elements
            if table_ids is None and self.is_whole(source):
                table_ids = self.numbers(source.leaf_index)
            if table_ids is not None:
                labels = self.labels.new(source.shape[1])
                self.use(source.leaf_index, table_ids)
                where = source.leaf_index, Elements.of(table_ids)
                self.lookups.append(Lookup(address, steps, *where, labels))
                return Rotatable.of(looked_up(eqn, labels), eqn.outvars[0].aval.shape)
        return gathered(self.labels, eqn, self.labelled(source, with_line(eqn)))

    def joined(self, values: Sequence[Any], reason: str) -> Any:
        """Joins the labels of the results of branches."""
        rotatables = [self.labelled(x, reason) for x in values]
        self._stop_gained(rotatables, f"{reason} after a gain")
        if all(x.is_fixed for x in rotatables):
            return Rotatable.fixed(rotatables[0].shape)
        return super().joined(rotatables, reason)

    def stacked(self, rows: Sequence[Any]) -> Any:
        """Stacks the labels of the results of steps."""
        values = [self.labelled(x, "a result of a scan") for x in rows]
        if all(x.is_fixed for x in values):
            return Rotatable.fixed((len(rows), *values[0].shape))
        self._stop_gained(values, "a result of a scan after a gain")
        return super().stacked(values)

    def _stop_gained(self, values: Sequence[Rotatable], reason: str) -> None:
        """Stops the rotations of several values that become one, if one has gains or is squared."""
        if not all(x.is_bare for x in values):
            for x in values:
                self.labels.stop(x.labels, reason)

    def step_of(self, x: Any, i: int) -> Any:
        """Returns the labels in a step."""
        if x.is_fixed:
            varies = frozenset(axis - 1 for axis in x.varies if axis)
            return Rotatable.fixed(x.shape[1:], varies=varies)
        result = super().step_of(x, i)
        return dataclasses.replace(result, is_squared=x.is_squared and not result.is_fixed)
