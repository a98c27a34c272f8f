"""What becomes of intervals at sums, contractions, lookups and views."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import Eqn
from ..transforms._shared import contraction_of
from ._interval_elementwise import raised
from ._interval_rule import Rule, dtype_of
from ._intervals import (
    Bounds,
    Interval,
    exactly,
    hull,
    is_integer,
    least,
    limits,
    most,
    sum_of_products,
    summed,
    times,
    wide,
)


def _same(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    """A part of the first operand, in whatever order."""
    return xs[0].hull_only()


def _each(eqn: Eqn, xs: Sequence[Interval]) -> list[Interval]:
    return [Interval(x.low, x.high, x.value, x.codes, x.about) for x in xs]


def _parts(eqn: Eqn, xs: Sequence[Interval]) -> list[Interval]:
    return [xs[0].hull_only() for _ in eqn.outvars]


def _hull(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    """A part of any of the operands."""
    return hull([x.hull_only() for x in xs])


def _size(eqn: Eqn, axes: Sequence[int]) -> int:
    return math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)


def _reduce_sum(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    axes = tuple(eqn.params["axes"])
    if xs[0].value is not None and is_integer(dtype_of(eqn)):
        total = np.asarray(wide(xs[0].value).sum(axis=axes))
        return exactly(least(total), most(total)) if total.size else exactly(0, 0)
    return summed(xs[0], _size(eqn, axes))


def _cumsum(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    (x,), axis = xs, eqn.params["axis"]
    if x.value is not None and is_integer(dtype_of(eqn)) and np.size(x.value):
        w = wide(x.value)
        total = np.cumsum(np.flip(w, axis) if eqn.params["reverse"] else w, axis)
        return exactly(least(total), most(total))
    count = max(_size(eqn, (axis,)), 1)
    total = summed(x, count)
    return total._replace(low=min(x.low, total.low), high=max(x.high, total.high))


def _product(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    axes = eqn.params["axes"] if "axes" in eqn.params else (eqn.params["axis"],)
    count = max(_size(eqn, axes), 1)
    (x,) = xs
    high = max(raised(x.largest, count), x.largest)
    low = -high if x.low < 0 else min(x.low, raised(x.low, count))
    if is_integer(dtype_of(eqn)):
        return exactly(low, high)
    return Bounds(low, high, times(count, abs(low)), times(count, high))


def _reduce_bits(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    return Interval(0, 1) if dtype_of(eqn) == jnp.bool_ else Interval(*limits(dtype_of(eqn)))


def _index(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    return Interval(0, max(_size(eqn, eqn.params["axes"]) - 1, 0))


def _top_k(eqn: Eqn, xs: Sequence[Interval]) -> list[Interval]:
    shape = eqn.invars[0].aval.shape
    axis = eqn.params.get("axis", -1)
    return [xs[0].hull_only(), Interval(0, shape[axis] - 1)]


def _window_sum(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    p = eqn.params
    gaps = any(map(any, p["padding"])) or any(n != 1 for n in p["base_dilation"])
    x = xs[0].with_zero() if gaps else xs[0].hull_only()
    return summed(x, math.prod(p["window_dimensions"]))


def _gather(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    table, index = xs
    found = table.hull_only()
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return found
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    ends = [shape[axis] - sizes[axis] for axis in eqn.params["dimension_numbers"].start_index_map]
    if index.low >= 0 and index.high <= min(ends, default=0):
        return found
    fill = eqn.params["fill_value"]
    if fill is None:
        low, high = limits(dtype_of(eqn))
        fill = low if low < 0 else high
        if not is_integer(dtype_of(eqn)):
            return found
    return found if fill != fill else hull([found, Interval(fill, fill)])


def _scatter_add(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    """All updates may fall on one element."""
    table, _, updates = xs
    shape = eqn.invars[1].aval.shape
    total = summed(updates, math.prod(shape[:-1]) if shape else 1)
    low, high = table.low + min(total.low, 0), table.high + max(total.high, 0)
    if is_integer(dtype_of(eqn)):
        return exactly(low, high)
    return Bounds(low, high, total.low_error + abs(low), total.high_error + abs(high))


def _dot(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    axes, _ = eqn.params["dimension_numbers"]
    sizes = [eqn.invars[0].aval.shape[axis] for axis in axes[0]]
    return sum_of_products(xs[0], xs[1], axes, sizes)


def _ragged_dot(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    """Rows of no group are zero, and of a ragged contraction each result sums a part."""
    axes, _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    sizes = [eqn.invars[0].aval.shape[axis] for axis in axes[0]]
    return sum_of_products(xs[0].with_zero(), xs[1], axes, sizes)


def image(eqn: Eqn, x: Interval) -> Interval:
    """Returns what a convolution reads of an image: zeros too where it is padded or dilated."""
    p = eqn.params
    gaps = any(map(any, p["padding"])) or any(n != 1 for n in p["lhs_dilation"])
    return x.with_zero() if gaps else x.hull_only()


def _conv(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    axes = contraction_of(eqn).axes(eqn)[1].contracted
    sizes = [eqn.invars[1].aval.shape[axis] for axis in axes]
    return sum_of_products(image(eqn, xs[0]), xs[1], (axes, axes), sizes)


ARRAYS: dict[str, Rule] = {
    "reduce_sum": _reduce_sum,
    "reduce_prod": _product,
    "reduce_and": _reduce_bits,
    "reduce_or": _reduce_bits,
    "argmax": _index,
    "argmin": _index,
    "cumsum": _cumsum,
    "cumprod": _product,
    "top_k": _top_k,
    "reduce_window_sum": _window_sum,
    "gather": _gather,
    "scatter": lambda eqn, xs: hull([xs[0].hull_only(), xs[2].hull_only()]),
    "scatter-min": lambda eqn, xs: hull([xs[0].hull_only(), xs[2].hull_only()]),
    "scatter-max": lambda eqn, xs: hull([xs[0].hull_only(), xs[2].hull_only()]),
    "scatter-add": _scatter_add,
    "dynamic_update_slice": lambda eqn, xs: hull([xs[0].hull_only(), xs[1].hull_only()]),
    "pad": _hull,
    "concatenate": _hull,
    "stack": _hull,
    "sort": lambda eqn, xs: [x.hull_only() for x in xs],
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
    "split": _parts,
    "unstack": _parts,
    "device_put": _each,
    "optimization_barrier": _each,
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "pvary", "pcast"), lambda eqn, xs: xs[0]),
    **dict.fromkeys(
        "broadcast_in_dim dynamic_slice expand_dims reshape rev slice squeeze tile transpose "
        "reduce_max reduce_min cummax cummin reduce_window_max reduce_window_min reshard "
        "sharding_constraint mesh_cast all_gather all_to_all ppermute pmax pmin".split(),
        _same,
    ),
}
