"""How an equation without a site changes rotations of channels: a rule for each primitive. A
primitive without a rule stops rotations of its operands.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._compat import Eqn
from ..transforms._shared import CONTRACTIONS, SHARDINGS
from ._label_rules import VIEWED, moved, of_product
from ._labels import FIXED, FREE, Array, Known, with_line
from ._rotatable import Axes, BlockConstraints, Rotatable, axes_of

Rule = Callable[[BlockConstraints, Eqn, Sequence[Rotatable], Sequence[Any]], Sequence[Rotatable]]


def stop_at(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], reason: str = ""
) -> list[Rotatable]:
    """Marks operands of an equation as not rotatable, and returns its results."""
    why = with_line(eqn, reason)
    for x in values:
        f.stop(x.labels, why)
    return [Rotatable.plain(v.aval.shape, why=why) for v in eqn.outvars]


def scaled(f: BlockConstraints, x: Rotatable, varies: Axes, reason: str) -> None:
    """Cuts the blocks of a value at factors that vary along some axes."""
    axes = [axis for axis in sorted(varies) if x.labels.shape[axis] > 1]
    if axes:
        rest = [axis for axis in range(x.labels.ndim) if axis not in axes]
        count = int(np.prod([x.labels.shape[axis] for axis in axes]))
        f.cut_sets(x.labels.transpose(*axes, *rest).reshape(count, -1), reason)


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
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], given: Any
) -> Sequence[Rotatable]:
    """Operations that apply the same linear function to each element."""
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return stop_at(f, eqn, values)
    return values


def _alike(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], given: Any
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
    found = Rotatable.of(labels, shape)
    for x in which:
        f.stop(x.labels, with_line(eqn))
        scaled(f, found, x.varies, with_line(eqn, "a choice for each channel"))
    return [found]


def _ranked(x: Rotatable, rank: int) -> Rotatable:
    """Returns a value; a scalar gets the rank of the other operand."""
    return x if len(x.shape) == rank else Rotatable(x.labels.reshape((1,) * rank), (1,) * rank)


def _times(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], given: Any
) -> Sequence[Rotatable]:
    """Products with factors that do not vary along the channels, and squares."""
    shape = eqn.outvars[0].aval.shape
    a, b = (_ranked(x, len(shape)) for x in values)
    if eqn.invars[0] is eqn.invars[1] and eqn.primitive.name == "mul":
        return _squared(f, eqn, [a], given)
    if a.is_plain and eqn.primitive.name == "mul":
        a, b = b, a
    if not b.is_plain:
        return stop_at(f, eqn, [a, b])
    scaled(f, a, b.varies, with_line(eqn, "a factor for each channel,"))
    return [dataclasses.replace(a, shape=shape)]


def _squared(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], given: Any
) -> Sequence[Rotatable]:
    (x,) = values
    if eqn.params.get("y", 2) != 2 or not x.is_bare:
        return stop_at(f, eqn, values)
    return [dataclasses.replace(x, is_squared=True)]


def _summed(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], given: Any
) -> Sequence[Rotatable]:
    """Sums: of squares over whole blocks, of other values over elements with one rotation."""
    (x,), axes, shape = values, eqn.params["axes"], eqn.outvars[0].aval.shape
    if not x.is_squared:
        even = _together(f, x, axes, with_line(eqn, "a sum with a value that cannot be rotated,"))
        if even is None:
            return stop_at(f, eqn, values, f"{eqn.primitive.name} over channels")
        gains = None if even.gains is None else np.squeeze(even.gains, tuple(axes))
        return [Rotatable.of(np.squeeze(even.labels, tuple(axes)), shape, gains)]
    rest = [axis for axis in range(x.labels.ndim) if axis not in axes]
    rows = x.labels.transpose(*rest, *axes)
    rows = rows.reshape(*rows.shape[: len(rest)], -1)
    f.cut_runs(rows, with_line(eqn, "a sum of squares"))
    return [Rotatable.plain(shape)]


def _along(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], given: Any
) -> Sequence[Rotatable]:
    """Running sums over elements with one rotation."""
    even = values[0].even([eqn.params["axis"]])
    if even is None or not even.is_bare:
        return stop_at(f, eqn, values, f"{eqn.primitive.name} over channels")
    return [even]


def _viewed(
    f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], given: Any
) -> Sequence[Rotatable]:
    """Operations that move elements move their labels."""
    name, shapes = eqn.primitive.name, [v.aval.shape for v in eqn.outvars]
    starts = {"dynamic_slice": 1, "dynamic_update_slice": 2}.get(name, len(values))
    values, places = values[:starts], given[starts:]
    if any(x.is_squared for x in values):
        return stop_at(f, eqn, values)
    if any(x.gains is not None for x in values) and (len(values) > 1 or places):
        return stop_at(f, eqn, values, f"{name} after a gain")
    if not all(isinstance(x, Known) for x in places):
        sizes = eqn.params["slice_sizes"] if name == "dynamic_slice" else values[1].shape
        axes = [i for i, n in enumerate(values[0].shape) if sizes[i] < n]
        even = [own for x in values if (own := x.even(axes)) is not None]
        if len(even) < len(values):
            return stop_at(f, eqn, values, f"{name} of channels")
        if name == "dynamic_update_slice":
            reason = with_line(eqn, "it is written to a value that cannot be rotated,")
            return [Rotatable.of(f.join(even[0].labels, even[1].labels, reason), shapes[0])]
        values, places = even, [Known(np.int32(0)) for _ in places]
    after = [x.value for x in places]
    labels = moved(eqn, [*(x.whole(x.labels) for x in values), *after])
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
    place = 0 if values[1].is_plain else 1
    x, other, own = values[place], values[1 - place], axes[place]
    even = _together(
        f, x, own.contracted, with_line(eqn, "a sum with a value that cannot be rotated,")
    )
    if even is None:
        return stop_at(f, eqn, [x], "a sum over channels")[0]
    pairs = zip(own.batch, axes[1 - place].batch, strict=True)
    varies = frozenset(i for i, j in pairs if j in other.varies)
    scaled(f, even, varies, with_line(eqn, "a factor for each channel,"))
    return Rotatable.of(of_product(even.labels, own, place, len(shape)), shape)


def _inner(f: BlockConstraints, eqn: Eqn, values: Sequence[Rotatable], axes: Any) -> Rotatable:
    """Inner products, which do not change if both vectors are rotated by one matrix."""
    rows = []
    for x, own in zip(values, axes, strict=True):
        free = [axis for axis in own.kept if axis not in own.batch]
        even = x.even(free)
        if even is None:
            return stop_at(f, eqn, values, "a product of two values")[0]
        order, summed = (*own.batch, *own.contracted), tuple(range(len(free)))
        labels = np.squeeze(even.labels.transpose(*free, *order), summed)
        whole = np.broadcast_to(labels, [x.shape[axis] for axis in order])
        rows.append(whole.reshape(*whole.shape[: len(own.batch)], -1))
        f.cut_runs(rows[-1], with_line(eqn, "a product of two values"))
    f.join(rows[0], rows[1], with_line(eqn, "a product with a value that cannot be rotated,"))
    return Rotatable.plain(eqn.outvars[0].aval.shape)


def varies_of(eqn: Eqn, values: Sequence[Rotatable]) -> list[Axes]:
    """Returns the axes along which results vary, for operands that are not rotated."""
    name, shapes = eqn.primitive.name, [v.aval.shape for v in eqn.outvars]
    if name in _ELEMENTWISE:
        return [frozenset[int]().union(*(x.varies for x in values))]
    own = values[0].varies
    if name == "broadcast_in_dim":
        to = eqn.params["broadcast_dimensions"]
        return [frozenset(int(to[axis]) for axis in own)]
    if name == "transpose":
        return [frozenset(i for i, j in enumerate(eqn.params["permutation"]) if j in own)]
    if name in ("slice", "rev"):
        return [own]
    if name in ("squeeze", "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"):
        gone = eqn.params["dimensions" if name == "squeeze" else "axes"]
        rest = [axis for axis in range(len(values[0].shape)) if axis not in gone]
        return [frozenset(i for i, j in enumerate(rest) if j in own)]
    if name == "reshape":
        return [_reshaped(own, values[0].shape, shapes[0])]
    return list(map(axes_of, shapes))


def _reshaped(varies: Axes, shape: Sequence[int], to: Sequence[int]) -> Axes:
    """Returns the axes along which a value varies after a reshape."""
    found, i, j = set(), 0, 0
    while i < len(shape) and j < len(to):
        a, b, first, other = shape[i], to[j], i, j
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * shape[i], i + 1
            else:
                b, j = b * to[j], j + 1
        if varies & set(range(first, i)):
            found |= set(range(other, j))
    return frozenset(found)


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
