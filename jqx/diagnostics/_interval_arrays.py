"""Intervals of sums, contractions, lookups and views; and the rules of all primitives that hold no
functions, by name. Primitives without a rule are unknown.
"""

import math
from collections.abc import Sequence

from jax import lax

from .._compat import Eqn
from ._interval_elementwise import ELEMENTWISE
from ._intervals import (
    Bounds,
    Interval,
    Result,
    Rule,
    any_of,
    dtype_of,
    hull,
    is_integer,
    sum_of_products,
    summed,
)


def _same(eqn: Eqn, xs: Sequence[Interval]) -> list[Interval]:
    return list(xs)


def _each(eqn: Eqn, xs: Sequence[Interval]) -> list[Interval]:
    """Elements of each operand, in any order."""
    return [x.hull_only() for x in xs]


def _first(eqn: Eqn, xs: Sequence[Interval]) -> list[Interval]:
    """Parts of the first operand, in any order; other operands are indices."""
    return [xs[0].hull_only() for _ in eqn.outvars]


def _among(*places: int) -> Rule:
    """Elements of some of the operands."""
    return lambda eqn, xs: hull([xs[i].hull_only() for i in places])


def _size(eqn: Eqn, axes: Sequence[int]) -> int:
    return math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)


def _cumsum(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    (x,) = xs
    total = summed(x, max(_size(eqn, (eqn.params["axis"],)), 1))
    return total._replace(low=min(x.low, total.low), high=max(x.high, total.high))


def _index(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    return Interval(0, max(_size(eqn, eqn.params["axes"]) - 1, 0))


def _top_k(eqn: Eqn, xs: Sequence[Interval]) -> list[Interval]:
    axis = eqn.params.get("axis", -1)
    return [xs[0].hull_only(), Interval(0, _size(eqn, (axis,)) - 1)]


def _window_sum(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    x = _with_gaps(xs[0], eqn.params["padding"], eqn.params["base_dilation"])
    return summed(x, math.prod(eqn.params["window_dimensions"]))


def _with_gaps(x: Interval, padding: Sequence[Sequence[int]], dilation: Sequence[int]) -> Interval:
    """Returns the interval that windows read, with zeros if an array is padded or dilated."""
    gaps = any(map(any, padding)) or any(n != 1 for n in dilation)
    return x.with_zero() if gaps else x.hull_only()


def _gather(eqn: Eqn, xs: Sequence[Interval]) -> Result:
    table, index = xs
    found = table.hull_only()
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return found
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    ends = [shape[axis] - sizes[axis] for axis in eqn.params["dimension_numbers"].start_index_map]
    if index.low >= 0 and index.high <= min(ends, default=0):
        return found
    fill = eqn.params["fill_value"]
    if fill is None and is_integer(dtype_of(eqn)):
        return any_of(eqn)
    return found if fill is None or fill != fill else hull([found, Interval(fill, fill)])


def _scatter_add(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    """All updates may go to one element."""
    table, _, updates = xs
    total = summed(updates, math.prod(eqn.invars[1].aval.shape[:-1]))
    low, high = table.low + min(total.low, 0), table.high + max(total.high, 0)
    return Bounds(low, high, total.low_error + abs(low), total.high_error + abs(high))


def contract(eqn: Eqn, lhs: Interval, rhs: Interval, sizes: Sequence[int] | None = None) -> Bounds:
    """Returns the bounds of a contraction: sums over all of its axes, or over blocks of `sizes`.

    Zeros are also read if an image is padded or dilated, in rows that belong to no group, and if
    each group sums a part of a ragged contraction.
    """
    p = eqn.params
    if eqn.primitive.name == "conv_general_dilated":
        lhs = _with_gaps(lhs, p["padding"], p["lhs_dilation"])
        _, *axes = p["dimension_numbers"].rhs_spec
        axes = (axes, axes)  # the image is read through the kernel
    elif "ragged_dot_dimension_numbers" in p:
        lhs = lhs.with_zero()
        axes, _ = p["ragged_dot_dimension_numbers"].dot_dimension_numbers
    else:
        axes, _ = p["dimension_numbers"]
    shape = eqn.invars[1].aval.shape
    sizes = [shape[axis] for axis in axes[1]] if sizes is None else sizes
    return sum_of_products(lhs, rhs, axes, sizes)


RULES: dict[str, Rule] = {
    **ELEMENTWISE,
    "reduce_sum": lambda eqn, xs: summed(xs[0], _size(eqn, eqn.params["axes"])),
    "cumsum": _cumsum,
    **dict.fromkeys(("argmax", "argmin"), _index),
    "top_k": _top_k,
    "reduce_window_sum": _window_sum,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-min", "scatter-max"), _among(0, 2)),
    "scatter-add": _scatter_add,
    **dict.fromkeys(("dynamic_update_slice", "pad"), _among(0, 1)),
    **dict.fromkeys(
        ("dot_general", "ragged_dot_general", "conv_general_dilated"),
        lambda eqn, xs: contract(eqn, xs[0], xs[1]),
    ),
    **dict.fromkeys(
        "copy device_put name optimization_barrier pcast pvary reshard sharding_constraint "
        "stop_gradient".split(),
        _same,
    ),
    **dict.fromkeys(("concatenate", "stack"), lambda eqn, xs: hull(_each(eqn, xs))),
    **dict.fromkeys("sort all_gather all_to_all ppermute pmax".split(), _each),
    **dict.fromkeys(
        "broadcast_in_dim dynamic_slice reshape rev slice split squeeze tile transpose unstack "
        "reduce_max reduce_min cummax reduce_window_max".split(),
        _first,
    ),
    **dict.fromkeys(
        "random_bits random_seed random_wrap random_unwrap random_fold_in random_split "
        "bitcast_convert_type erf_inv nextafter axis_index reduce_and reduce_or "
        "debug_print debug_callback pure_callback".split(),
        any_of,
    ),
}
