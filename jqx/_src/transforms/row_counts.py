"""How much the rows of a batch count, by the weight of an observer: for the arguments of a
function, the results of each primitive, and the operands of its sites.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from ..compat import Eqn
from ..errors import fail, some
from ..statistics.statistics import RowWeight
from .paths import Params, positions_of
from .rules import CONTRACTION_RULES, CONTRACTIONS
from .views import is_coded

# Values with a count for each element: how much the rows of the batch that it comes from count, by
# the weight of an observer.


@partial(jax.tree_util.register_dataclass, data_fields=("value", "counts"), meta_fields=("lost",))
@dataclasses.dataclass(frozen=True)
class Counted:
    """An array that depends on a batch. Values made of parameters alone are plain arrays.

    Attributes:
      value: the array.
      counts: how much its elements count, float32, with its rank and size 1 along an axis whose
        elements all count the same; infinite for elements that no value of a batch has reached.
        `None` if it is unknown.
      lost: why it is unknown.
    """

    value: Any
    counts: Any
    lost: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the counts of the elements are known."""
        return self.counts is not None


class Lost(Exception):
    """Raised if the counts of a value that a loop carries are known before its first step, but not
    after a step.

    Attributes:
      reason: the reason that they are unknown.
      index: index of the value among those that are carried.
    """

    index: int = -1

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def value_of(x: Any) -> Any:
    """Returns the plain value."""
    return x.value if isinstance(x, Counted) else x


def is_counted(x: Any) -> bool:
    """Whether a value is a `Counted`, with known or unknown counts."""
    return isinstance(x, Counted)


def counts_of(x: Any) -> jax.Array:
    """Returns how much each element of a value counts, in the shape of the value."""
    value = value_of(x)
    has_counts = is_counted(x) and x.is_known
    counts = x.counts if has_counts else jnp.full((1,) * jnp.ndim(value), jnp.inf, jnp.float32)
    return jnp.broadcast_to(counts, jnp.shape(value))


def opened(x: Any) -> Any:
    """Returns a value with a count for each of its elements, if they can be known: all values that
    a loop carries have this form.
    """
    if is_coded(x) or (is_counted(x) and not x.is_known):
        return x
    value = value_of(x)
    return Counted(value, compat.vary(counts_of(x), compat.varies_along(value)))


def spread(x: Any) -> Any:
    """Returns a `Counted` value with a count for each of its elements, so that both can be split
    along the axes of the value. Other values are returned unchanged.
    """
    return opened(x) if is_counted(x) else x


def common(forms: Sequence[Any]) -> Any:
    """Returns the form in which all of several values of one shape can be expressed."""
    unknown = next((x for x in forms if is_counted(x) and not x.is_known), None)
    counted = next(filter(is_counted, forms), None)
    if unknown is not None or counted is None:
        return forms[0] if unknown is None else unknown
    shape = jax.ShapeDtypeStruct(jnp.shape(counted.value), jnp.float32)
    return Counted(counted.value, shape)


def alike(values: Sequence[Any]) -> list[Any]:
    """Returns values of one shape, all in the form in which each can be expressed."""
    form = common(values)
    return [counted_like(x, form) for x in values] if is_counted(form) else list(values)


def counted_like(x: Any, example: Counted) -> Counted:
    """Returns a value in the form of another."""
    if not example.is_known:
        return Counted(value_of(x), None, example.lost)
    if is_counted(x) and not x.is_known:
        raise Lost(x.lost)
    return opened(x)


# A rule for each primitive: the counts of its results, given those of its operands.
#
# A value made of one element of each operand counts as much as the least of them. A value made of
# several elements along an axis, such as a sum, counts as much as the largest. So a mean over
# tokens counts if one of them does, and attention counts as much as the token of the query.
# Operations that only move elements move their counts.


Counts = jax.Array | list[jax.Array | None]
Rule = Callable[[Eqn, Sequence[Any], Sequence[Any]], Counts | None]
"""Maps an equation, its operands and its results to the counts of the elements of the results;
`None` if they are unknown.
"""


def counted(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation with the counts of their elements."""
    operands = [Counted(x, None, "it is quantized state") if is_coded(x) else x for x in operands]
    some = [x for x in operands if is_counted(x)]
    if not some or all(map(is_coded, results)):
        return list(results)
    rule = COUNTS.get(eqn.primitive.name)
    counts = rule(eqn, operands, results) if rule and any(map(_known, some)) else None
    counts_of_results = counts if isinstance(counts, list) else [counts] * len(results)
    unknown = next(
        (x.lost for x in some if not x.is_known),
        f"rows are not followed through `{eqn.primitive.name}`",
    )
    pairs = zip(results, counts_of_results, strict=True)
    return [x if is_coded(x) else Counted(x, n, unknown if n is None else "") for x, n in pairs]


def _known(x: Any) -> bool:
    return is_counted(x) and x.is_known


def _is_lost(x: Any) -> bool:
    return is_counted(x) and not x.is_known


def _minimum(counts: Sequence[jax.Array]) -> jax.Array:
    """Returns the least of counts, some of which may be scalars."""
    rank = max(x.ndim for x in counts)
    return reduce(jnp.minimum, (x if x.ndim == rank else x.reshape((1,) * rank) for x in counts))


def _elementwise(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    counts = _minimum([x.counts for x in operands if _known(x)])
    # The count of a scalar does not extend to the elements that it is combined with.
    rank = eqn.outvars[0].aval.ndim
    if counts.ndim not in (0, rank):
        return None
    return counts if counts.ndim == rank else counts.reshape((1,) * rank)


def _moved(*argnums: int) -> Rule:
    """Applies an equation that moves the operands at these indices to their counts as well."""

    def rule(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
        moved = [operands[i] for i in argnums] if argnums else operands
        if any(map(_is_lost, moved)):
            return None
        moved_counts = [
            counts_of(x) if not argnums or i in argnums else value_of(x)
            for i, x in enumerate(operands)
        ]
        return compat.bind(eqn, moved_counts)

    return rule


def _pad(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    """Padding counts 0."""
    if not _known(operands[0]):
        return None
    return lax.pad(counts_of(operands[0]), jnp.float32(0), eqn.params["padding_config"])


def _gather(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    """A value that is read keeps its count, limited by that of the index; fill values count 0."""
    table, indices = operands
    p, counts_of_rows = eqn.params, []
    numbers = p["dimension_numbers"]
    if _known(table):
        options = ("slice_sizes", "indices_are_sorted", "unique_indices", "mode")
        counts_of_rows = [
            lax.gather(
                counts_of(table),
                value_of(indices),
                numbers,
                **{name: p[name] for name in options},
                fill_value=0,
            )
        ]
    if _known(indices):
        counts = counts_of(indices).max(-1)
        out = eqn.outvars[0].aval.shape
        batch = [axis for axis in range(len(out)) if axis not in numbers.offset_dims]
        lined_up = [n if axis in batch else 1 for axis, n in enumerate(out)]
        counts_of_rows.append(counts.reshape(lined_up))
    return _minimum(counts_of_rows)


def _scatter(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    """A written value has the count of the update; a value that is added to counts like a sum."""
    target, indices, updates = operands
    if _is_lost(target) or _is_lost(updates):
        return None
    options = {name: eqn.params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}
    args = value_of(indices), counts_of(updates), eqn.params["dimension_numbers"]
    if eqn.primitive.name == "scatter":
        return lax.scatter(counts_of(target), *args, **options)
    nothing = jnp.full(eqn.outvars[0].aval.shape, -jnp.inf, jnp.float32)
    largest = lax.scatter_max(nothing, *args, **options)
    target_counts = counts_of(target)
    return jnp.where(largest == -jnp.inf, target_counts, jnp.minimum(target_counts, largest))


def _reduced(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    return operands[0].counts.max(eqn.params["axes"])


def _cumulative(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    axis, reverse = eqn.params["axis"], eqn.params["reverse"]
    return lax.cummax(counts_of(operands[0]), axis=axis, reverse=reverse)


def _window(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    names = "window_dimensions window_strides padding base_dilation window_dilation"
    options = {name: eqn.params[name] for name in names.split()}
    return lax.reduce_window(counts_of(operands[0]), jnp.float32(0), lax.max, **options)


def _sort(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    """Elements that are moved together are one row."""
    counts = jnp.broadcast_to(
        _minimum([x.counts for x in operands if _known(x)]), eqn.outvars[0].aval.shape
    )
    options = {name: eqn.params[name] for name in ("dimension", "is_stable", "num_keys")}
    return lax.sort((*map(value_of, operands), counts), **options)[-1]


def _top_k(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    axis = eqn.params.get("axis", eqn.outvars[0].aval.ndim - 1)
    return jnp.take_along_axis(counts_of(operands[0]), results[1], axis=axis)


def _dot(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    (contract, others), (batch, also) = eqn.params["dimension_numbers"]
    rank = eqn.outvars[0].aval.ndim
    sides = zip(operands, eqn.invars, (contract, others), (batch, also), strict=True)
    free, counts_of_results = len(batch), []
    for x, v, summed, stacked in sides:
        free_axes = [i for i in range(v.aval.ndim) if i not in (*summed, *stacked)]
        if _known(x):
            counts = x.counts.max(summed, keepdims=True).transpose(*stacked, *free_axes, *summed)
            shape = [1] * rank
            shape[: len(stacked)] = counts.shape[: len(stacked)]
            shape[free : free + len(free_axes)] = counts.shape[len(stacked) :][: len(free_axes)]
            counts_of_results.append(counts.reshape(shape))
        free += len(free_axes)
    return _minimum(counts_of_results)


def _ragged(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    rows = operands[0]
    if not _known(rows) or CONTRACTION_RULES[eqn.primitive.name].why_unsupported(eqn):
        return None
    return rows.counts.max(1, keepdims=True)


def _conv(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    """A pixel counts as much as the one of its patch that counts most."""
    image, p = operands[0], eqn.params
    if not _known(image) or p["batch_group_count"] != 1:
        return None
    axes, groups = p["dimension_numbers"], p["feature_group_count"]
    counts = counts_of(image).transpose(axes.lhs_spec)
    n, _, *space = counts.shape
    counts = counts.reshape(n, groups, -1, *space).max(2)
    kernel = [eqn.invars[1].aval.shape[axis] for axis in axes.rhs_spec[2:]]
    pairs = ((p["window_strides"], 1), (p["lhs_dilation"], 1), (p["rhs_dilation"], 1))
    strides, base, dilation = ((default, default, *sizes) for sizes, default in pairs)
    padding = ((0, 0), (0, 0), *p["padding"])
    window_counts = lax.reduce_window(
        counts, jnp.float32(0), lax.max, (1, 1, *kernel), strides, padding, base, dilation
    )
    features = eqn.outvars[0].aval.shape[axes.out_spec[1]]
    window_counts = (
        jnp.repeat(window_counts, features // groups, axis=1) if groups > 1 else window_counts
    )
    return window_counts.transpose([axes.out_spec.index(i) for i in range(window_counts.ndim)])


def _barrier(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    return [None if _is_lost(x) else counts_of(x) for x in operands]


def _all_reduced(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    """A sum over devices counts as much as on the device where it counts most."""
    if eqn.params.get("axis_index_groups") is not None:
        return None
    axes = eqn.params["axes"]

    def most(x: Any) -> jax.Array | None:
        if _is_lost(x):
            return None
        counts = compat.vary(counts_of(x), frozenset(axes) | compat.varies_along(value_of(x)))
        return lax.pmax(counts, axes)

    return list(map(most, operands))


def _exchanged(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> Counts | None:
    if not all(map(_known, operands)):
        return None
    counts = [compat.vary(counts_of(x), compat.varies_along(value_of(x))) for x in operands]
    return compat.bind(eqn, counts)


_NAMES: dict[str, Rule] = {
    """
    abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type
    cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to
    erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow
    is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi name ne neg nextafter
    not or polygamma population_count pow real reduce_precision regularized_incomplete_beta rem
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh xor zeta
    device_put pcast pvary reshard sharding_constraint
    """: _elementwise,
    "broadcast_in_dim reshape rev slice split squeeze tile transpose unstack": _moved(0),
    "concatenate stack": _moved(),
    "dynamic_slice": _moved(0),
    "dynamic_update_slice": _moved(0, 1),
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin": (
        _reduced
    ),
    "cumsum cummax cummin cumprod cumlogsumexp": _cumulative,
    "reduce_window_sum reduce_window_max reduce_window_min": _window,
    "gather": _gather,
    "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max": _scatter,
    "pad": _pad,
    "sort": _sort,
    "top_k": _top_k,
    "dot_general": _dot,
    "ragged_dot_general": _ragged,
    "conv_general_dilated": _conv,
    "optimization_barrier": _barrier,
    "psum psum_invariant pmax pmin": _all_reduced,
    "all_gather all_to_all ppermute": _exchanged,
}
COUNTS: dict[str, Rule] = {name: rule for names, rule in _NAMES.items() for name in names.split()}
"""Rules by the name of the primitive."""


# Elements that come from a NaN or an infinity, for `on_nonfinite="ignore"`. Their count is below 0
# and stays so in what is computed from them, even if that is finite again.
#
# Negative infinities are in masks of attention too. So in arguments they taint weakly: not what is
# 0 in the end, as the exponential of a mask is. In other values they taint nothing, unless they are
# operands or results of contractions.


_WEAKLY, _TAINTED = -1.0, -2.0
"""Counts of tainted elements."""

_CHOOSES = ("select_n", "max", "min")
"""Primitives that return one of their operands for each element."""


def tainted(x: Any, negative: float = _WEAKLY) -> Any:
    """Returns a value with counts below 0 for NaN and infinities; `negative` is that of a negative
    infinity.
    """
    if not _has_counts(x):
        return x
    counts = jnp.where(x.value == -jnp.inf, jnp.float32(negative), jnp.float32(_TAINTED))
    counts = jnp.where(jnp.isfinite(x.value), x.counts, jnp.minimum(counts, x.counts))
    return Counted(x.value, jnp.where(x.counts == 0, x.counts, counts))


def tainted_results(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation, with the count -1 where they are tainted."""
    name = eqn.primitive.name
    negative = _TAINTED if name in CONTRACTIONS else jnp.inf
    results_tainted = [tainted(x, negative) for x in results]
    if name not in _CHOOSES or not _has_counts(results_tainted[0]):
        return results_tainted
    (result,) = results_tainted
    if name == "select_n":
        which, *cases = operands
        selected_counts = lax.select_n(value_of(which), *map(counts_of, cases))
        selected_counts = (
            jnp.minimum(selected_counts, counts_of(which)) if is_counted(which) else selected_counts
        )
    else:
        a, b = operands
        is_first = jnp.broadcast_to(value_of(a) == result.value, result.value.shape)
        selected_counts = jnp.where(is_first, _counts(a, is_first), _counts(b, is_first))
    counts = jnp.where(result.counts < 0, selected_counts, result.counts)
    return [tainted(Counted(result.value, counts), jnp.inf)]


def tainted_rows(eqn: Eqn, operands: Sequence[Any], cleans: bool = False) -> list[Any]:
    """Returns the operands of a contraction. All of a row is tainted if some of it is, or is not
    finite; with `cleans` such rows are zeros.
    """
    family = CONTRACTIONS[eqn.primitive.name]
    if family.why_unsupported(eqn) is not None:
        return [*operands]
    tainted_operands = [*operands]
    for i, operand_axes in enumerate(family.axes(eqn)):
        x, axes = operands[i], operand_axes.contracted
        if not _has_counts(x):
            continue
        # In a convolution the features come first; along the other axes the kernel slides.
        axes = axes[:1] if eqn.primitive.name == "conv_general_dilated" else axes
        bad = (x.counts < 0) & (x.value != 0)
        bad |= ~jnp.isfinite(x.value) | (x.counts <= _TAINTED)
        bad = jnp.any(bad, axes, keepdims=True)
        counts = jnp.where(bad & (x.counts != 0), jnp.float32(_TAINTED), x.counts)
        value = jnp.where(bad, jnp.zeros_like(x.value), x.value) if cleans else x.value
        tainted_operands[i] = Counted(value, counts)
    return tainted_operands


def _has_counts(x: Any) -> bool:
    return is_counted(x) and x.is_known and jnp.issubdtype(x.value.dtype, jnp.inexact)


def _counts(x: Any, example: Any) -> Any:
    """Returns the counts of an operand in the shape of a result."""
    return jnp.broadcast_to(counts_of(x), example.shape)


# The counts of the arguments of a function, and of the operands of its sites.


def every_row(*args: Any, **kwargs: Any) -> jax.Array:
    """A weight by which all rows count the same."""
    return jnp.ones((), jnp.float32)


def weights_of(
    function: str, weight: RowWeight, params: Params, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> jax.Array:
    """Returns how much rows count, float32: the result of `weight` for the arguments of a call
    without the parameters.
    """
    positions = positions_of(params)
    inputs = [x for argnum, x in enumerate(args) if argnum not in positions]
    try:
        weights = weight(*inputs, **kwargs)
    except Exception as error:
        count = f"{len(inputs)} arguments, those of f without its parameters"
        error.add_note(f"  at:       weight= of an observer, called with {count}")
        raise
    fix = "let it return booleans, such as tokens != 0, or non-negative numbers."
    if not (hasattr(weights, "shape") and hasattr(weights, "dtype")):
        problem = "the `weight` of an observer does not return an array."
        details = f"an object of type {type(weights).__name__}"
        raise fail(function, problem, given=details, fix=fix, error=TypeError)
    is_real = any(jnp.issubdtype(weights.dtype, x) for x in (jnp.bool_, jnp.integer, jnp.floating))
    is_positive = not compat.is_concrete(weights) or bool(np.all(np.asarray(weights) >= 0))
    if not (is_real and is_positive):
        problem = "the `weight` of an observer does not return booleans or non-negative numbers."
        details = f"an array of {jnp.dtype(weights.dtype).name}"
        details += "" if is_positive else " with entries below 0, or NaN"
        raise fail(function, problem, given=details, fix=fix)
    return jnp.asarray(weights).astype(jnp.float32)


def count_arguments(
    function: str, weights: jax.Array, params: Params, call: Any, leaves: Sequence[Any]
) -> list[Any]:
    """Returns the leaves of a call. Those that are not parameters have counts, or the reason why
    these are unknown.
    """
    positions = positions_of(params)
    shape, counted_leaves = weights.shape, []
    for leaf, keys in zip(leaves, call.keys, strict=True):
        is_parameter = keys[0].idx == 0 and keys[1].idx in positions
        if is_parameter or is_coded(leaf):
            counted_leaves.append(leaf)
        elif len(leaf.shape) >= len(shape) and all(
            n in (1, size) for n, size in zip(shape, leaf.shape, strict=False)
        ):
            trailing = (1,) * (len(leaf.shape) - len(shape))
            counted_leaves.append(Counted(leaf, weights.reshape(*shape, *trailing)))
        else:
            name = jax.tree_util.keystr(keys[1:], simple=True, separator="/")
            reason = (
                f"the argument {name!r} of shape {leaf.shape} does not begin with the axes {shape}"
                " of the weight"
            )
            counted_leaves.append(Counted(leaf, None, reason))
    if shape != () and not any(is_counted(x) and x.is_known for x in counted_leaves):
        shapes = [str(x.value.shape) for x in counted_leaves if is_counted(x)]
        problem = "no argument has the rows that the `weight` of an observer counts."
        details = f"a weight of shape {shape}, arguments of shapes {some(shapes)}"
        raise fail(function, problem, given=details, fix="let it return an array with these axes.")
    return counted_leaves


def count_operand(
    function: str, site: str, x: Any, shape: tuple[int, ...] | None = None
) -> jax.Array:
    """Returns how much the elements of an operand of a site count, as observers receive it.

    Args:
      function: name of the calling function, for messages.
      site: the name of the site.
      x: the operand.
      shape: the shape of the weight, for messages; all rows count the same if it is `()`.
    """
    if is_counted(x) and x.is_known:
        return jnp.where(jnp.isinf(x.counts), 1, x.counts)
    if shape == () or (not is_counted(x) and not is_coded(x)):  # the same for all rows
        return jnp.ones((1,) * jnp.ndim(value_of(x)), jnp.float32)
    operand = jax.typeof(x.value).str_short() if is_counted(x) else repr(x)
    problem = f"it is not known how much the rows of {site!r} count."
    details = "" if shape is None else f"a weight of shape {shape}, and "
    details += f"an operand {operand}: {x.lost if is_counted(x) else 'it is quantized'}"
    fix = "name other sites in observers=, or let `weight` return the leading axes of the argument "
    fix += "that this site reads."
    raise fail(function, problem, given=details, fix=fix)
