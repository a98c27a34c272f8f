"""The rules of contractions, and the tables of all rules of primitives by name: those of jqx, and
those that the user has added.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .. import compat
from ..checks import check_instance
from ..compat import Eqn
from ..contractions.cache import take
from ..contractions.conv_general_dilated import conv_general_dilated
from ..contractions.dot_general import dot_general, dot_gradients, float_product
from ..contractions.einsum import einsum
from ..contractions.problem import (
    Dimensions,
    HowTo,
    OperandAxes,
    can_leave_sum,
    conv_axes,
    quantize_pending,
)
from ..contractions.ragged_dot import ROWS_OF_GROUPS, ragged_dot
from ..errors import fail
from ..tensor.qtensor import QTensor
from .views import VIEW_RULES, Origin, View, marked, real_of

# Contraction primitives, and lookups: the sites of a function.


Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Contraction:
    """How a contraction primitive is read and evaluated.

    Attributes:
      op: its name in policies.
      axes: the roles of the axes of each operand that can be quantized; these operands come first.
      pattern: the parameters on which a plan depends, without sizes.
      macs: the number of multiply-adds.
      apply: evaluates it on arrays and QTensors.
      gradients: the backward pass: from arrays and the cotangent to the gradients of the operands
        that can be quantized, contracted in a dtype.
      why_unsupported: why an equation has no quantized form; `None` if it has one.
      needs_weight: whether it is a site only if its first operand is a weight.
    """

    op: str
    axes: Callable[[Eqn], tuple[OperandAxes, ...]]
    pattern: Callable[[Eqn], str]
    macs: Callable[[Eqn], int]
    apply: Callable[[Eqn, Sequence[Any]], jax.Array]
    gradients: Callable[[Eqn, Sequence[jax.Array], jax.Array, DTypeLike], Sequence[jax.Array]]
    why_unsupported: Callable[[Eqn], str | None] = lambda eqn: None
    needs_weight: bool = False

    def kept(self, eqn: Eqn) -> tuple[Axes, ...]:
        """Returns the axes that the result keeps, for each operand that can be quantized."""
        return tuple(axes.kept for axes in self.axes(eqn))

    def batch(self, eqn: Eqn) -> tuple[Axes, ...]:
        """Returns the batch axes of the same operands."""
        return tuple(axes.batch for axes in self.axes(eqn))


def _transposed(
    eqn: Eqn, operands: Sequence[jax.Array], cotangent: jax.Array, dtype: DTypeLike
) -> Sequence[jax.Array]:
    """The backward pass of JAX."""
    count = len(CONTRACTION_RULES[eqn.primitive.name].axes(eqn))
    narrow = compat.with_result(eqn, dtype)
    _, pull = jax.vjp(
        lambda *real: compat.bind(narrow, [*real, *operands[count:]])[0],
        *(x.astype(dtype) for x in operands[:count]),
    )
    return pull(cotangent.astype(dtype))


def _dimensions(eqn: Eqn) -> Dimensions:
    lhs, rhs = eqn.invars
    return _dimensions_of(eqn.params["dimension_numbers"], lhs.aval.ndim, rhs.aval.ndim)


_dimensions_of = functools.lru_cache(Dimensions.of)  # read several times a site, mostly equal ones


def _macs(eqn: Eqn) -> int:
    contracted = _dimensions(eqn).contracted_size(eqn.invars[0].aval)
    return math.prod(eqn.outvars[0].aval.shape) * contracted


def _apply(eqn: Eqn, operands: Sequence[Any]) -> jax.Array:
    lhs, rhs = operands
    dimensions = _dimensions(eqn)
    if _sums_scales(rhs, dimensions.rhs_contracting):
        return _scaled_first(eqn, real_of(quantize_pending(lhs)), rhs)
    if _sums_scales(lhs, dimensions.lhs_contracting):
        return _scaled_first(eqn, lhs, real_of(quantize_pending(rhs)))
    return dot_general(lhs, rhs, eqn.params["dimension_numbers"], **_options(eqn))


def float_how(eqn: Eqn) -> HowTo:
    """Returns the static arguments of a product of arrays."""
    dtype = eqn.outvars[0].aval.dtype
    return HowTo(_dimensions(eqn), eqn.params["precision"], dtype=dtype)


def in_float(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluates an equation of arrays; large batches of products by the fastest formulation."""
    if eqn.primitive.name == "dot_general" and not compat.is_explicit(eqn):
        (lhs, rhs), dtype = operands, eqn.outvars[0].aval.dtype
        how = float_how(eqn)
        y = float_product(lhs, rhs, how) if jnp.issubdtype(dtype, jnp.floating) else None
        if y is not None:
            return [y]
    return compat.bind(eqn, operands)


def _options(eqn: Eqn) -> dict[str, Any]:
    dtype = eqn.outvars[0].aval.dtype
    return {"precision": eqn.params["precision"], "preferred_element_type": dtype}


def _sums_scales(x: Any, contracting: Axes) -> bool:
    """Whether the scale of an operand varies along the sum, as for cached values."""
    return isinstance(x, QTensor) and not can_leave_sum(x.groups, contracting)


def _scaled_first(eqn: Eqn, lhs: Any, rhs: Any) -> jax.Array:
    """Multiplies the array by the scale of the other operand before both are contracted."""
    dimensions = _dimensions(eqn)
    left = list(range(lhs.ndim))
    right = [lhs.ndim + axis for axis in range(rhs.ndim)]
    for ours, theirs in zip(
        (*dimensions.lhs_contracting, *dimensions.lhs_batch),
        (*dimensions.rhs_contracting, *dimensions.rhs_batch),
        strict=True,
    ):
        right[theirs] = left[ours]
    out = [left[axis] for axis in (*dimensions.lhs_batch, *dimensions.lhs_free)]
    out += [right[axis] for axis in dimensions.rhs_free]
    return einsum(lhs, left, rhs, right, out, **_options(eqn))


def _gradients(
    eqn: Eqn, operands: Sequence[jax.Array], cotangent: jax.Array, dtype: DTypeLike
) -> Sequence[jax.Array]:
    lhs, rhs = operands
    return dot_gradients(lhs, rhs, eqn.params["dimension_numbers"], cotangent, dtype)


def _conv_axes(eqn: Eqn) -> tuple[OperandAxes, ...]:
    image, kernel = conv_axes(eqn.params["dimension_numbers"])
    if eqn.params["batch_group_count"] > 1:  # groups of the batch meet other features of the result
        image = image._replace(kept=())
    return image, kernel


def _conv_macs(eqn: Eqn) -> int:
    kernel, (_, axes) = eqn.invars[1].aval, _conv_axes(eqn)
    products = math.prod(kernel.shape[axis] for axis in axes.contracted)
    return math.prod(eqn.outvars[0].aval.shape) * products


def _conv_pattern(eqn: Eqn) -> str:
    names = ("window_strides", "lhs_dilation", "rhs_dilation", "feature_group_count")
    names += ("batch_group_count", "dimension_numbers")
    return " ".join(f"{name}={eqn.params[name]}" for name in names)


_CONV = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers")
_CONV += ("feature_group_count", "batch_group_count")


def _conv_apply(eqn: Eqn, operands: Sequence[Any]) -> jax.Array:
    lhs, rhs = operands
    options = {name: eqn.params[name] for name in _CONV}
    return conv_general_dilated(lhs, rhs, **options, **_options(eqn))


_RAGGED = (((1,), (1,)), ((), ()))


def _why_no_rows(eqn: Eqn) -> str | None:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    dots = tuple(tuple(map(tuple, pair)) for pair in numbers.dot_dimension_numbers)
    plain = dots == _RAGGED and tuple(numbers.lhs_ragged_dimensions) == (0,)
    if plain and tuple(numbers.rhs_group_dimensions) == (0,):
        return None
    return "its groups are not rows for a stack of matrices, as in lax.ragged_dot"


def _ragged_macs(eqn: Eqn) -> int:
    lhs, rhs = eqn.invars[0].aval, eqn.invars[1].aval
    return math.prod(lhs.shape) * rhs.shape[-1]


def _ragged_apply(eqn: Eqn, operands: Sequence[Any]) -> jax.Array:
    lhs, rhs, sizes = operands
    return ragged_dot(lhs, rhs, sizes, **_options(eqn))


def _why_no_lookup(eqn: Eqn) -> str | None:
    if _looked_up(eqn) is None:
        return "it is not a lookup along one axis, as in jnp.take"
    if eqn.invars[0].aval.ndim < 2:
        return "each row of the table is one number, and would need its own scale"
    return None


def _looked_up(eqn: Eqn) -> int | None:
    """Returns the axis along which a gather takes whole slices, as in `jnp.take` and a mapped
    `lax.dynamic_index_in_dim`.
    """
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = eqn.invars[0].aval.shape
    started = numbers.start_index_map
    indexed = [axis for axis in started if len(started) == 1 or sizes[axis] != shape[axis]]
    if len(indexed) != 1 or numbers.operand_batching_dims:
        return None
    (axis,) = indexed
    # An index into an axis that is taken whole is clamped to 0, unless the mode fills instead.
    plain = len(started) == 1 or eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP
    sizes_of_slice = tuple(1 if i == axis else n for i, n in enumerate(shape))
    collapsed = numbers.collapsed_slice_dims in ((), (axis,))
    return axis if plain and collapsed and tuple(sizes) == sizes_of_slice else None


def _gather_axes(eqn: Eqn) -> tuple[OperandAxes, ...]:
    """A lookup in a stack of matrices has a batch axis; a table has none."""
    axis = _looked_up(eqn)
    kept_axes = () if axis is None else (axis,)
    return (OperandAxes((), kept_axes, kept_axes if eqn.invars[0].aval.ndim > 2 else ()),)


_MODES = {
    lax.GatherScatterMode.CLIP: "clip",
    lax.GatherScatterMode.FILL_OR_DROP: "fill",
    lax.GatherScatterMode.PROMISE_IN_BOUNDS: "clip",
}


def _gather_apply(eqn: Eqn, operands: Sequence[Any]) -> jax.Array:
    table, indices = operands
    numbers, mode = eqn.params["dimension_numbers"], _MODES[eqn.params["mode"]]
    axis = _looked_up(eqn)
    assert axis is not None
    positions = indices[..., numbers.start_index_map.index(axis)]
    if mode == "fill" and jnp.issubdtype(positions.dtype, jnp.signedinteger):
        # For the primitive a negative index is out of bounds; for `take` it counts from the end.
        positions = positions.astype(jnp.promote_types(positions.dtype, jnp.int32))
        positions = jnp.where(positions < 0, table.shape[axis], positions)
    fill = eqn.params["fill_value"] if mode == "fill" else None
    rows = take(table, positions, axis=axis, mode=mode, fill_value=fill)
    if not numbers.collapsed_slice_dims:
        rows = jnp.expand_dims(rows, axis + positions.ndim)
    # The axes of the indices are adjacent in `found`; a gather names the positions of the others.
    batch = range(axis, axis + positions.ndim)
    others = [i for i in range(rows.ndim) if i not in batch]
    order = np.zeros(rows.ndim, int)
    order[list(numbers.offset_dims)] = others
    order[[i for i in range(rows.ndim) if i not in numbers.offset_dims]] = batch
    return jnp.transpose(rows, tuple(map(int, order)))


CONTRACTION_RULES: dict[str, Contraction] = {
    "dot_general": Contraction(
        "dot_general",
        lambda eqn: _dimensions(eqn).axes,
        lambda eqn: repr(_dimensions(eqn).numbers),
        _macs,
        _apply,
        _gradients,
    ),
    "conv_general_dilated": Contraction(
        "conv_general_dilated", _conv_axes, _conv_pattern, _conv_macs, _conv_apply, _transposed
    ),
    "ragged_dot_general": Contraction(
        "ragged_dot",
        lambda eqn: ROWS_OF_GROUPS,
        lambda eqn: "",
        _ragged_macs,
        _ragged_apply,
        _transposed,
        _why_no_rows,
    ),
    "gather": Contraction(
        "gather",
        _gather_axes,
        lambda eqn: f" along {_looked_up(eqn)}",
        lambda eqn: 0,
        _gather_apply,
        _transposed,
        _why_no_lookup,
        needs_weight=True,
    ),
}


Rule = TypeVar("Rule")

_ADDED = jax.make_user_context(())
"""Rules of users, as pairs of a name and a rule; part of the key of traces in `jax.jit`."""


class RuleTable(Mapping[str, Rule], Generic[Rule]):
    """Rules of one kind, by the name of the primitive."""

    def __init__(self, kind: type[Rule], built_in: Mapping[str, Rule]):
        self._kind, self._own = kind, built_in

    def __getitem__(self, name: str) -> Rule:
        for added, rule in _ADDED.value:
            if added == name and isinstance(rule, self._kind):
                return rule
        return self._own[name]

    def __iter__(self) -> Iterator[str]:
        added = (name for name, rule in _ADDED.value if isinstance(rule, self._kind))
        return iter(dict.fromkeys((*added, *self._own)))

    def __len__(self) -> int:
        return len(list(iter(self)))


CONTRACTIONS: RuleTable[Contraction] = RuleTable(Contraction, CONTRACTION_RULES)
VIEWS: RuleTable[View] = RuleTable(View, VIEW_RULES)


def tracked(eqn: Eqn, origins: Sequence[Origin | None]) -> Sequence[Origin | None] | None:
    """Returns the origins of the results of a view, with what it does to the axes of weights;
    `None` if the equation is not a view. A view of the user may do anything to all axes.
    """
    name = eqn.primitive.name
    view = VIEWS.get(name)
    if view is None:
        return None
    return marked(eqn, origins, view.track(eqn, origins), is_known=name in VIEW_RULES)


def given_functions() -> dict[str, Callable[..., Any]]:
    """Returns what the user has given for jitted functions, by their names."""
    rules = reversed(_ADDED.value)  # the innermost context counts
    return {name: f for name, f in rules if not isinstance(f, (Contraction, View))}


_RULES = "extend.primitive_rules"


@contextlib.contextmanager
def primitive_rules(rules: Mapping[str, Contraction | View | Callable[..., Any]]) -> Iterator[None]:
    """Adds rules for primitives and jitted functions that jqx does not know, for planning,
    calibration, simulation and conversion inside the context.

    It affects only this thread, and only inside the context. A plan that was made inside fits its
    function only inside.

    Args:
      rules: by the name of the primitive, a `Contraction`, whose operands can be quantized, or a
        `View`, through which a weight passes. The primitive has no functions among its parameters.
        Or by the name of a jitted function, such as one that calls a kernel, a function that
        computes the same in operations that jqx knows. It is given the operands of the call in a
        jaxpr, without those that are static, and is evaluated in its place, also where no rule of
        the policy matches. Its derivative counts, also if a `jax.custom_vjp` is around the call and
        does nothing else; one that does more keeps its own.

    Raises:
      TypeError: if `rules` is not a mapping, or an entry is not a rule.
      ValueError: if jqx has a rule for a primitive of that name; in a transform, if a function
        returns other shapes or dtypes than the jitted function.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> from jqx.extend import View, primitive_rules
      >>> def f(w, x):
      ...     return x @ jax.lax.reduce_precision(w, 8, 23)
      >>> same = View(track=lambda eqn, known: known, apply=lambda eqn, operands: list(operands))
      >>> args = jnp.ones((4, 4)), jnp.ones((1, 4))
      >>> with primitive_rules({"reduce_precision": same}):
      ...     plan = jqx.make_plan(f, jqx.presets.w8a16())(*args)
      >>> [site.op for site in plan.sites]
      ['dot_general']
      >>> @jax.jit
      ... def kernel(x, w):
      ...     return jnp.sum(x[:, :, None] * w[None], axis=1)
      >>> with primitive_rules({"kernel": lambda x, w: x @ w}):
      ...     plan = jqx.make_plan(lambda w, x: kernel(x, w), jqx.presets.w8a16())(*args)
      >>> [site.op for site in plan.sites]
      ['dot_general']
    """
    fix = "pass for example {'my_primitive': jqx.extend.View(track, apply)}."
    check_instance(_RULES, "rules", rules, Mapping, fix=fix)
    for primitive, rule in rules.items():
        if not callable(rule):
            check_instance(_RULES, f"rules[{primitive!r}]", rule, (Contraction, View), fix=fix)
        if primitive in {*CONTRACTION_RULES, *VIEW_RULES}:
            problem = f"jqx already has a rule for the primitive {primitive!r}."
            raise fail(_RULES, problem, fix="leave it out.")
    with _ADDED((*rules.items(), *_ADDED.value)):
        yield
