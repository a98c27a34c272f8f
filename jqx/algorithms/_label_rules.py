"""How an equation without a site changes labels of channels: a rule for each primitive. A primitive
without a rule fixes its operands.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import Eqn
from ..observers import ObservedSite
from ..transforms import OperandAxes
from ..transforms._shared import CONTRACTIONS, SHARDINGS
from ._labels import FIXED, FREE, Array, Known, Labelled, Labels, Value, is_key, with_line

Rule = Callable[[Labels, Eqn, Sequence[Labelled], Sequence[Value]], Sequence[Labelled]]


def moved(eqn: Eqn, operands: Sequence[Any]) -> list[Array]:
    """Evaluates a view on numbers in place of values."""
    return [np.asarray(x) for x in _compat.bind(eqn, [jnp.asarray(x) for x in operands])]


def _kept(f: Labels, eqn: Eqn, values: Sequence[Labelled], given: Any) -> list[Labelled]:
    """Operations whose result scales like the operand."""
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return f.stop_at(eqn, values)
    return [Labelled(x.labels, v.aval.shape) for x, v in zip(values, eqn.outvars, strict=False)]


def _alike(f: Labels, eqn: Eqn, values: Sequence[Labelled], given: Any) -> list[Labelled]:
    """Sums and choices: all operands have the same factor."""
    shape, name = eqn.outvars[0].aval.shape, eqn.primitive.name
    if name == "select_n":
        f.stop(values[0], with_line(eqn))
        values = values[1:]
    reason = with_line(eqn, f"{name} with an unscaled value,")
    if name in ("max", "min", "clamp") and any(isinstance(x, Known) for x in given):
        reason = with_line(eqn, f"{name} with a constant")
        clip = _clip_of(name, given)
        if clip is not None and np.all(clip[1] > 0):
            return [f.clipped(values[clip[0]], clip[1])]
        if clip is not None:
            reason = with_line(eqn, f"{name} with a constant that is not positive")
    labels = np.full((1,) * len(shape), FREE, np.int32)
    for x in values:
        own = x.labels.reshape((1,) * len(shape)) if not x.shape else x.labels
        labels = f.join(labels, own, reason)
    found = Labelled.of(labels, shape)
    return [dataclasses.replace(found, why=reason if found.is_fixed else "")]


def _clip_of(name: str, given: Sequence[Value]) -> tuple[int, Array] | None:
    """Returns which operand a constant limits from above, and the limit."""
    if name == "max" or (name == "clamp" and not _is_free(given[0])):
        return None
    place = 1 if name == "clamp" or isinstance(given[0], Known) else 0
    limit = given[2 if name == "clamp" else 1 - place]
    if not isinstance(limit, Known) or _is_free(limit):
        return None
    return place, np.asarray(limit.value, np.float64)


def _is_free(x: Value) -> bool:
    return isinstance(x, Known) and x.label == FREE


def _times(f: Labels, eqn: Eqn, values: Sequence[Labelled], given: Any) -> list[Labelled]:
    """Products: one operand takes the factor."""
    a, b = values
    if eqn.primitive.name == "div" or (not a.is_fixed and not b.is_fixed):
        is_choice = eqn.primitive.name == "mul"
        why = "the other factor of a product takes it," if is_choice else "a divisor"
        f.stop(b, with_line(eqn, why), is_choice=is_choice and eqn.invars[0] is not eqn.invars[1])
        b = Labelled.fixed(b.shape)
    carries = b if a.is_fixed else a
    shape = eqn.outvars[0].aval.shape
    if len(carries.shape) != len(shape):
        f.stop(carries, with_line(eqn))
        carries = Labelled.fixed(shape)
    return [Labelled.of(carries.labels, shape)]


def _compared(f: Labels, eqn: Eqn, values: Sequence[Labelled], given: Any) -> list[Labelled]:
    """Signs, which depend only on the signs of the operands."""
    zero = any(isinstance(x, Known) and x.label == FREE for x in given)
    if not zero:
        return f.stop_at(eqn, values)
    return [Labelled.fixed(eqn.outvars[0].aval.shape)]


def _reduced(f: Labels, eqn: Eqn, values: Sequence[Labelled], given: Any) -> list[Labelled]:
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


def _along(f: Labels, eqn: Eqn, values: Sequence[Labelled], given: Any) -> list[Labelled]:
    """Running sums and maxima, and windows, over elements with one factor."""
    x, p = values[0], eqn.params
    even = x.even([p["axis"]] if "axis" in p else _windowed(p))
    if even is None:
        return f.stop_at(eqn, values, f"{eqn.primitive.name} over channels")
    return [Labelled(even.labels, eqn.outvars[0].aval.shape)]


def _windowed(p: Mapping[str, Any]) -> list[int]:
    """Returns the axes along which the windows of an equation change anything."""
    names = "window_dimensions", "window_strides", "base_dilation"
    each = enumerate(zip(*(p[name] for name in names), p["padding"], strict=True))
    return [i for i, (*sizes, ends) in each if any(n != 1 for n in sizes) or any(ends)]


def _viewed(f: Labels, eqn: Eqn, values: Sequence[Labelled], given: Any) -> list[Labelled]:
    """Operations that move elements move their labels."""
    name, shapes = eqn.primitive.name, [v.aval.shape for v in eqn.outvars]
    starts = {"dynamic_slice": 1, "dynamic_update_slice": 2}.get(name, len(values))
    places = given[starts:]
    operands: list[Any] = [x.whole() for x in values[:starts]]
    if not all(isinstance(x, Known) for x in places):
        sizes = eqn.params["slice_sizes"] if name == "dynamic_slice" else values[1].shape
        axes = [i for i, n in enumerate(values[0].shape) if sizes[i] < n]
        even = [x.even(axes) for x in values[:starts]]
        if any(x is None for x in even):
            return f.stop_at(eqn, values)
        if name == "dynamic_update_slice":
            own, other = (x.labels for x in even if x is not None)
            return [Labelled.of(f.join(own, other, with_line(eqn)), shapes[0])]
        operands = [x.whole() for x in even if x is not None]
        operands += [np.int32(0) for _ in places]
    else:
        operands += [x.value for x in places]
    found = moved(eqn, operands)
    return [Labelled.of(x, shape) for x, shape in zip(found, shapes, strict=True)]


def channels_of(x: Array, shape: Sequence[int], about: ObservedSite) -> Array:
    """Returns a statistic for each channel, as a site sums over them, [*batch, channels].

    Args:
      x: of the rank of the operand, size 1 along an axis whose elements share a value.
      shape: shape of the operand.
      about: what observers get to know about it.
    """
    if about.patches is not None:
        axis, groups = about.patches.axes.lhs_spec[1], about.patches.groups
        x = np.broadcast_to(x.ravel(), (shape[axis],)).reshape(groups, -1)
        x = np.repeat(x, math.prod(about.patches.kernel), axis=1)
        return x[0] if groups == 1 else x
    reduced = about.reduced(len(shape))
    whole = np.broadcast_to(x, [1 if i in reduced else n for i, n in enumerate(shape)])
    turned = whole.transpose(*about.batch, *reduced, *about.contracted)
    return turned.reshape(*(shape[axis] for axis in about.batch), -1)


def gathered(f: Labels, eqn: Eqn, x: Labelled, indices: Value) -> Labelled:
    """A lookup in a value."""
    shape, sizes = eqn.outvars[0].aval.shape, eqn.params["slice_sizes"]
    if x.is_fixed:
        return Labelled.fixed(shape, x.why)
    if isinstance(indices, Known):
        return Labelled.of(moved(eqn, [x.whole(), indices.value])[0], shape)
    even = x.even([i for i, n in enumerate(x.shape) if sizes[i] < n])
    if even is None:
        return f.stop_at(eqn, [x])[0]
    zeros = np.zeros(eqn.invars[1].aval.shape, eqn.invars[1].aval.dtype)
    return Labelled.of(moved(eqn, [even.whole(), zeros])[0], shape)


def product(f: Labels, eqn: Eqn, values: Sequence[Labelled]) -> Labelled:
    """A product of values, such as attention's weights and values: one takes the factor."""
    axes, shape = CONTRACTIONS["dot_general"].axes(eqn), eqn.outvars[0].aval.shape
    a, b = values
    f.stop_clipped(values, with_line(eqn, "a product of clipped values"))
    if not a.is_fixed and not b.is_fixed:
        return f.stop_at(eqn, [a, b], "a product of two values")[0]
    place = 0 if b.is_fixed else 1
    x, own = values[place], axes[place]
    even = x.even(own.contracted)
    if even is None:
        return f.stop_at(eqn, [x], "a sum over channels")[0]
    return Labelled.of(of_product(even.labels, own, place, len(shape)), shape)


def of_product(labels: Array, axes: OperandAxes, place: int, rank: int) -> Array:
    """Returns the labels of a product of `rank` axes: those of one operand, which are equal along
    its contracted axes.
    """
    free = [axis for axis in axes.kept if axis not in axes.batch]
    labels = labels.transpose(*axes.batch, *free, *axes.contracted)
    labels = labels.reshape(labels.shape[: len(axes.batch) + len(free)])
    ones = (1,) * (rank - labels.ndim)
    batch, kept = labels.shape[: len(axes.batch)], labels.shape[len(axes.batch) :]
    return labels.reshape(*batch, *((*kept, *ones) if place == 0 else (*ones, *kept)))


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
    **dict.fromkeys(_SAME, _kept),
    **dict.fromkeys(("add", "sub", "add_any", "max", "min", "clamp", "select_n"), _alike),
    **dict.fromkeys(("mul", "div"), _times),
    **dict.fromkeys(("gt", "ge", "lt", "le"), _compared),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin"), _reduced),
    **dict.fromkeys(("cumsum", "cummax", "cummin", "reduce_window_sum"), _along),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min"), _along),
    **dict.fromkeys(VIEWED, _viewed),
}
_CLIPPED = {*VIEWED, *_SAME} - {"neg", "abs"} | {"gt", "ge", "lt", "le", "select_n"}
_CLIPPED |= {"max", "min", "clamp", "reduce_max", "cummax", "reduce_window_max"}
"""For clipped values, these return values with the same clips."""


def evaluated(
    f: Labels, eqn: Eqn, values: Sequence[Labelled], given: Sequence[Value]
) -> Sequence[Labelled]:
    """Returns the results of an equation that has neither a site nor an inner function."""
    name = eqn.primitive.name
    rule = RULES.get(name)
    if all(x.is_fixed for x in values):
        labels = {int(x.labels.item()) for x in values}
        label = FREE if rule is not None and labels == {FREE} else FIXED
        why = with_line(eqn) if rule is None else next((x.why for x in values if x.why), "")
        return [Labelled.fixed(v.aval.shape, why, label) for v in eqn.outvars]
    if rule is None:
        return f.stop_at(eqn, values)
    if name not in _CLIPPED or (f.has_clips and any(map(_has_infinity, given))):
        f.stop_clipped(values, with_line(eqn, f"{name} of clipped values"))
    why = next((x.why for x in values if x.is_fixed and x.why), "")
    found = rule(f, eqn, values, given)
    return [dataclasses.replace(x, why=x.why or why) if x.is_fixed else x for x in found]


def _has_infinity(x: Value) -> bool:
    return (
        isinstance(x, Known) and not is_key(x.value) and bool(np.any(np.asarray(x.value) == np.inf))
    )
