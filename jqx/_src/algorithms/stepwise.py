"""A causal function of tokens, one position at a time.

A function of all positions becomes one of a single position and of what it needs of earlier ones:
keys, values and states of recurrences, as a decoder keeps them. Its jaxpr is evaluated with values
of one position, of size 1 along their axis of positions; what a product or a sum over positions
reads is kept, with zeros at later positions. Those have no effect on a causal function.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import compat
from ..compat import Eqn
from ..transforms.calibrate import arrays_of
from ..transforms.walk import bound, evaluate

# Evaluates a jaxpr at one position.


Array = jax.Array


class Unable(NotImplementedError):
    """The function cannot be evaluated one position at a time; the text says why."""


class Turn(Exception):
    """The other operand of a product holds the queries."""

    def __init__(self, product: int):
        super().__init__()
        self.product = product


@dataclasses.dataclass(frozen=True, eq=False)
class At:
    """A value at one position.

    Attributes:
      value: of size 1 along the axis of positions.
      axis: the axis of positions.
      product: the product of positions with positions that it comes from, in which this axis was
        taken for that of queries; `None` if there is none.
    """

    value: Array
    axis: int
    product: int | None = None


class Steps:
    """Evaluates a jaxpr at one position.

    Args:
      rules: how each primitive is evaluated, by name.
      position: the position.
      length: how many positions there are.
      turned: the products, by the `id` of their equations, whose right operand holds the queries.
      constants: the arguments that are the same at all positions.
      stored: what is stored of earlier positions, in the order in which it is needed; `None` to
        find what it is at first.
      parts: the parts of stacked arguments, in the same way.
    """

    def __init__(
        self,
        rules: "Rules",
        position: Any,
        length: int,
        turned: frozenset[int],
        constants: Sequence[Any],
        stored: list[Array] | None = None,
        parts: list[Array] | None = None,
    ):
        self.rules, self.position, self.length, self.turned = rules, position, length, turned
        self._constants, self._stored, self._parts = {id(x) for x in constants}, stored, parts
        self.new: list[Array] = []
        self.parts: list[Array] = []
        self._whole: dict[tuple[int, tuple[int, ...]], tuple[At, Array]] = {}

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Returns the results of a jaxpr."""
        return evaluate(jaxpr, consts, args, self._results)

    def _results(self, index: int, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        if not any(isinstance(x, At) for x in operands):
            return bound(index, eqn, operands)
        if eqn.primitive.name not in self.rules:
            raise self.unable(eqn, f"{eqn.primitive.name} has no rule")
        return self.rules[eqn.primitive.name](self, eqn, operands)

    def unable(self, eqn: Eqn, reason: str) -> Unable:
        """Returns an error with the shapes of the operands."""
        shapes = ", ".join(str(atom.aval) for atom in eqn.invars)
        return Unable(f"{reason} (of {shapes})")

    def over(self, eqn: Eqn, x: At) -> Exception:
        """Returns what to raise where an equation is not computed position by position."""
        if x.product is not None:
            return Turn(x.product)
        return self.unable(eqn, f"{eqn.primitive.name} combines positions")

    def at(self, x: Any, axis: int) -> Any:
        """Returns the part of an array at the position; numbers have no positions."""
        if jnp.ndim(x) == 0:
            return x
        return lax.dynamic_slice_in_dim(x, self.position, 1, axis)

    def whole(self, x: At, order: tuple[int, ...] | None = None) -> Array:
        """Returns a value at all positions up to this one, which is kept, with zeros at others, and
        with its axes in another order, if one is given.
        """
        order = tuple(range(x.value.ndim)) if order is None else order
        if (id(x), order) not in self._whole:
            value, axis = lax.transpose(x.value, order), order.index(x.axis)
            shape = list(value.shape)
            shape[axis] = self.length
            starts: list[Any] = [0] * len(shape)
            starts[axis] = self.position
            write = partial(lax.dynamic_update_slice, update=value, start_indices=starts)
            self._whole[id(x), order] = x, self.keep(jnp.zeros(shape, value.dtype), write)
        return self._whole[id(x), order][1]

    def keep(self, initial: Any, change: Callable[[Any], Any]) -> Any:
        """Returns what is kept, changed at this position; before the first one, `initial`."""
        new = initial if self._stored is None else change(self._stored.pop(0))
        self.new.append(new)
        return new

    def part(self, x: Array, i: int) -> Array:
        """Returns a part of a stack; that of an argument is taken once, for all positions."""
        if id(x) not in self._constants:
            return x[i]
        self.parts.append(x[i] if self._parts is None else self._parts.pop(0))
        return self.parts[-1]

    def alike(self, eqn: Eqn, xs: Sequence[Any]) -> tuple[int, int | None, list[Any]]:
        """Returns the axis of positions, and operands at this position."""
        stepped = [x for x in xs if isinstance(x, At)]
        products = [x for x in stepped if x.product is not None]
        axes = list(dict.fromkeys(x.axis for x in stepped))
        product = products[0].product if products else None
        axis = (products or stepped)[0].axis
        if len(axes) > 1 and not products:  # as the comparison of the segments of positions
            product, axis = id(eqn), axes[id(eqn) in self.turned]
        for x in products:
            if x.axis != axis and x.product is not None:
                raise Turn(x.product)
        xs = [self.whole(x) if isinstance(x, At) and x.axis != axis else x for x in xs]
        return axis, product, [x.value if isinstance(x, At) else self.at(x, axis) for x in xs]


Rules = Mapping[str, Callable[[Steps, Eqn, Sequence[Any]], list[Any]]]
"""For each primitive a rule, which gets an equation with a value at one position."""


# Elements, reductions and orders along other axes than that of positions.


def moved(new_axis: Callable[[Eqn, int], int | None]) -> Callable[..., list[Any]]:
    """Returns the rule of a primitive that computes each position from the same position of its
    operands, and whose axis of positions becomes another one; `None` if it combines positions.
    """

    def rule(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
        axis, product, values = steps.alike(eqn, xs)
        result_axis = new_axis(eqn, axis)
        if result_axis is None:
            raise steps.over(eqn, At(values[0], axis, product))
        return [At(y, result_axis, product) for y in compat.bind(eqn, values)]

    return rule


def _same(eqn: Eqn, axis: int) -> int:
    return axis


each = moved(_same)


def _without(name: str) -> Callable[[Eqn, int], int | None]:
    """Returns where an axis goes if those in the parameter `name` are dropped."""

    def new_axis(eqn: Eqn, axis: int) -> int | None:
        axes = eqn.params[name] if isinstance(eqn.params[name], tuple) else (eqn.params[name],)
        return None if axis in axes else axis - sum(i < axis for i in axes)

    return new_axis


def _outside(name: str) -> Callable[[Eqn, int], int | None]:
    """Returns an axis that is not among those in the parameter `name`."""

    def new_axis(eqn: Eqn, axis: int) -> int | None:
        axes = eqn.params[name] if isinstance(eqn.params[name], tuple) else (eqn.params[name],)
        return None if axis in axes else axis

    return new_axis


def _tiled(eqn: Eqn, axis: int) -> int | None:
    return axis if eqn.params["reps"][axis] == 1 else None


def _transposed(eqn: Eqn, axis: int) -> int:
    return eqn.params["permutation"].index(axis)


def along(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Cumulative sums; over positions they are computed of all up to this one."""
    (x,) = xs
    if x.axis != eqn.params["axis"]:
        return each(steps, eqn, xs)
    if x.product is not None or eqn.params["reverse"]:
        raise steps.over(eqn, x)
    return [At(steps.at(y, x.axis), x.axis) for y in compat.bind(eqn, [steps.whole(x)])]


def _ordered(eqn: Eqn, axis: int) -> int | None:
    count = eqn.invars[0].aval.ndim
    ordered = eqn.params.get("dimension", eqn.params.get("axis", count - 1))
    return None if axis == ordered % count else axis


_ELEMENTS = """
abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp conj convert_element_type copy
copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow
is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not or pow real
reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
sin sinh sqrt square stop_gradient sub tan tanh xor
"""

ELEMENTS: dict[str, Any] = {
    **dict.fromkeys(_ELEMENTS.split(), each),
    **dict.fromkeys(
        ("argmax", "argmin", *(f"reduce_{x}" for x in ("and", "max", "min", "or", "prod", "sum"))),
        moved(_without("axes")),
    ),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), along),
    **dict.fromkeys(("sort", "top_k"), moved(_ordered)),
}


# Products, convolutions and lookups.


def product(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Products. One with keys or values of all positions reads them from what is kept."""
    contracted, batch = eqn.params["dimension_numbers"]
    roles = [_role(*x) for x in zip(xs, contracted, batch, strict=True)]
    if "contracted" in roles:
        contracted_axis = roles.index("contracted")
        if roles[1 - contracted_axis] != "free":
            raise steps.over(eqn, xs[contracted_axis])
        query, product = 1 - contracted_axis, None
    elif roles == ["free", "free"]:
        query, product = int(id(eqn) in steps.turned), id(eqn)
    else:
        query = roles.index("batch" if "batch" in roles else "free")
        product = xs[query].product
    stepped = xs[query]
    if roles[query] == "batch":
        axis = batch[query].index(stepped.axis)
        pairs = zip(xs, batch, strict=True)
        if any(isinstance(x, At) and x.axis != dims[axis] for x, dims in pairs):
            raise steps.over(eqn, stepped)
        values = [
            x.value if isinstance(x, At) else steps.at(x, dims[axis])
            for x, dims in zip(xs, batch, strict=True)
        ]
    else:
        operand = xs[1 - query]
        if isinstance(operand, At):
            eqn, operand = _in_order(steps, eqn, 1 - query, operand)
            contracted, batch = eqn.params["dimension_numbers"]
        values = [stepped.value, operand][:: -1 if query else 1]
        free = [
            [i for i in range(jnp.ndim(x)) if i not in (*dims, *shared)]
            for x, dims, shared in zip(values, contracted, batch, strict=True)
        ]
        axis = len(batch[0]) + query * len(free[0]) + free[query].index(stepped.axis)
    return [At(y, axis, product) for y in compat.bind(eqn, values)]


def convolved(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Convolutions; those along positions are computed of all up to this one."""
    x, kernel = xs
    if isinstance(kernel, At):
        raise steps.over(eqn, kernel)
    axes = eqn.params["dimension_numbers"]
    axis = axes.out_spec[axes.lhs_spec.index(x.axis)]
    is_spatial = x.axis in axes.lhs_spec[2:]
    if not is_spatial or eqn.outvars[0].aval.shape[axis] != steps.length:
        raise steps.over(eqn, x)
    return [At(steps.at(y, axis), axis) for y in compat.bind(eqn, [steps.whole(x), kernel])]


def gathered(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Lookups: of each position in a table, or in its own part of a value."""
    x, indices = xs
    numbers, rank = eqn.params["dimension_numbers"], eqn.outvars[0].aval.ndim
    table_axes, others = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    sizes, is_alike = list(eqn.params["slice_sizes"]), isinstance(indices, At)
    if isinstance(x, At) and x.axis in table_axes:
        index_axis = others[table_axes.index(x.axis)]
        indices = indices if is_alike else At(steps.at(indices, index_axis), index_axis)
        if indices.axis != index_axis:
            raise steps.over(eqn, x)
        x = x.value
    elif isinstance(x, At):
        rows = [i for i in range(len(sizes)) if i not in numbers.collapsed_slice_dims]
        rows = [i for i in rows if i not in table_axes]
        if is_alike or x.axis not in rows or x.axis in numbers.start_index_map:
            raise steps.over(eqn, x)
        sizes[x.axis] = 1
        axis = numbers.offset_dims[rows.index(x.axis)]
        return [At(_gather(eqn, x.value, indices, sizes), axis, x.product)]
    elif indices.axis in others:
        x = steps.at(x, table_axes[others.index(indices.axis)])
    batch = [i for i in range(rank) if i not in numbers.offset_dims]
    if indices.axis >= len(batch):
        raise steps.over(eqn, indices)
    gathered_rows = _gather(eqn, x, indices.value, sizes)
    return [At(gathered_rows, batch[indices.axis], indices.product)]


def _in_order(steps: Steps, eqn: Eqn, which: int, x: At) -> tuple[Eqn, Any]:
    """Returns a product, and one of its operands at all positions up to this one, kept in the order
    of axes that products are computed in. From another one XLA would copy all of it at each
    position.
    """
    contracted, batch = ([*dims] for dims in eqn.params["dimension_numbers"])
    shared, summed = batch[which], contracted[which]
    free = [i for i in range(x.value.ndim) if i not in (*shared, *summed)]
    order = (*shared, *((*summed, *free) if which else (*free, *summed)))
    batch[which] = tuple(map(order.index, shared))
    contracted[which] = tuple(map(order.index, summed))
    params = {**eqn.params, "dimension_numbers": (tuple(contracted), tuple(batch))}
    return eqn.replace(params=params), steps.whole(x, order)


def _role(x: Any, contracted: Sequence[int], batch: Sequence[int]) -> str | None:
    if not isinstance(x, At):
        return None
    return "contracted" if x.axis in contracted else "batch" if x.axis in batch else "free"


def _gather(eqn: Eqn, x: Any, indices: Any, sizes: Sequence[int]) -> Any:
    params = {**eqn.params, "slice_sizes": tuple(sizes)}
    return compat.bind(eqn.replace(params=params), [x, indices])[0]


PRODUCTS: dict[str, Any] = {
    "conv_general_dilated": convolved,
    "dot_general": product,
    "gather": gathered,
}


# Calls of functions, and scans.


def called(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Calls of functions."""
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
    body, consts = compat.open_jaxpr(next(eqn.params[n] for n in names if n in eqn.params))
    return steps.run(body, consts, xs)


def scanned(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Scans over layers, which are evaluated one by one, and over positions."""
    p, (consts, carries) = eqn.params, compat.scan_counts(eqn)
    fixed, carry, stacks = xs[:consts], xs[consts : consts + carries], xs[consts + carries :]
    if any(isinstance(x, At) and x.axis == 0 for x in stacks):
        return _recurrent(steps, eqn, [*fixed, *carry], stacks, carries)
    body, body_consts = compat.open_jaxpr(p["jaxpr"])
    order, results = range(p["length"]), []
    for i in reversed(order) if p["reverse"] else order:
        parts = [
            At(x.value[i], x.axis - 1, x.product) if isinstance(x, At) else steps.part(x, i)
            for x in stacks
        ]
        step_results = steps.run(body, body_consts, [*fixed, *carry, *parts])
        carry = step_results[:carries]
        results.append(step_results[carries:])
    return [*carry, *map(_stacked, zip(*results[:: -1 if p["reverse"] else 1], strict=True))]


def _stacked(values: Sequence[Any]) -> Any:
    """Stacks the results of the steps of a scan."""
    example = values[0]
    if not isinstance(example, At):
        return jnp.stack(values)
    return At(jnp.stack([x.value for x in values]), example.axis + 1, example.product)


def _recurrent(
    steps: Steps, eqn: Eqn, values: Sequence[Any], stacks: Sequence[Any], carries: int
) -> list[Any]:
    """A scan over positions, whose state is kept."""
    p = eqn.params
    if any(isinstance(x, At) for x in values) or p["reverse"] or p["length"] != steps.length:
        raise steps.unable(eqn, "a scan runs over positions, and something else")
    body, body_consts = compat.open_jaxpr(p["jaxpr"])
    parts = [x.value[0] if isinstance(x, At) else steps.at(x, 0)[0] for x in stacks]
    consts, initial = values[: len(values) - carries], values[len(values) - carries :]

    def step(state: Sequence[Any]) -> list[Any]:
        return steps.run(body, body_consts, [*consts, *state, *parts])

    results: list[Any] = []

    def change(state: Sequence[Any]) -> list[Any]:
        results[:] = step(state)
        return results[:carries]

    next_state = steps.keep(initial, change)
    results = results or step(initial)
    return [*next_state, *(At(x[None], 0) for x in results[carries:])]


_CALLS = """
checkpoint closed_call core_call custom_jvp_call custom_vjp_call custom_vmap_call jit pjit remat2
"""

SCANS: dict[str, Any] = {**dict.fromkeys(_CALLS.split(), called), "scan": scanned}


# Views, and what puts values together, along other axes than that of positions.


def _stacked_after(eqn: Eqn, axis: int) -> int:
    return axis + (eqn.params["axis"] <= axis)


def padded(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Padding of other axes."""
    x, filling = xs
    if isinstance(filling, At) or any(eqn.params["padding_config"][x.axis]):
        raise steps.over(eqn, x)
    return [At(y, x.axis, x.product) for y in compat.bind(eqn, [x.value, filling])]


def broadcast(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Broadcasts."""
    (x,) = xs
    p = eqn.params
    axis, shape = p["broadcast_dimensions"][x.axis], list(p["shape"])
    shape[axis] = 1
    y = lax.broadcast_in_dim(x.value, shape, p["broadcast_dimensions"])
    return [At(y, axis, x.product)]


def reshaped(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Reshapes that keep the axis of positions."""
    (x,) = xs
    old_shape, new_shape = eqn.invars[0].aval.shape, list(eqn.outvars[0].aval.shape)
    leading = math.prod(old_shape[: x.axis])
    axes = [i for i in range(len(new_shape)) if math.prod(new_shape[:i]) == leading]
    axis = next((i for i in axes if new_shape[i] == steps.length), None)
    if axis is None or eqn.params.get("dimensions") is not None:
        raise steps.unable(eqn, "a reshape merges positions with another axis")
    new_shape[axis] = 1
    return [At(x.value.reshape(new_shape), axis, x.product)]


def sliced(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Slices of other axes."""
    (x,) = xs
    p = eqn.params
    starts, ends = list(p["start_indices"]), list(p["limit_indices"])
    strides = p["strides"] or (1,) * len(starts)
    if (starts[x.axis], ends[x.axis], strides[x.axis]) != (0, steps.length, 1):
        raise steps.over(eqn, x)
    ends[x.axis] = 1
    return [At(lax.slice(x.value, starts, ends, strides), x.axis, x.product)]


def dynamically_sliced(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Slices of other axes that begin at traced places."""
    x, *starts = xs
    sizes = list(eqn.params["slice_sizes"])
    if any(isinstance(i, At) for i in starts) or sizes[x.axis] != steps.length:
        raise steps.over(eqn, x)
    sizes[x.axis], starts[x.axis] = 1, jnp.zeros_like(starts[x.axis])
    return [At(lax.dynamic_slice(x.value, starts, sizes), x.axis, x.product)]


def updated(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Writes to other axes at all positions, as to the keys and values of a layer."""
    axis, product, (x, part, *starts) = steps.alike(eqn, xs)
    shapes = [atom.aval.shape for atom in eqn.invars[:2]]
    if any(isinstance(i, At) for i in xs[2:]) or any(s[axis] != steps.length for s in shapes):
        raise steps.over(eqn, At(x, axis, product))
    starts[axis] = jnp.zeros_like(starts[axis])
    return [At(lax.dynamic_update_slice(x, part, starts), axis, product)]


def unchanged(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Operations that return their operands."""
    return list(xs)


VIEWS: dict[str, Any] = {
    **dict.fromkeys(("optimization_barrier", "pvary", "reshard", "sharding_constraint"), unchanged),
    "broadcast_in_dim": broadcast,
    "concatenate": moved(_outside("dimension")),
    "dynamic_slice": dynamically_sliced,
    "dynamic_update_slice": updated,
    "pad": padded,
    "reshape": reshaped,
    "rev": moved(_outside("dimensions")),
    "slice": sliced,
    "split": moved(_outside("axis")),
    "squeeze": moved(_without("dimensions")),
    "stack": moved(_stacked_after),
    "tile": moved(_tiled),
    "transpose": moved(_transposed),
    "unstack": moved(_without("axis")),
}


_RULES = ELEMENTS | VIEWS | PRODUCTS | SCANS


@dataclasses.dataclass(frozen=True)
class Stepwise:
    """A function of one position.

    Attributes:
      start: `start(*args) -> (kept, parts)`, what is kept before the first position, and parts of
        stacked arguments.
      step: `step(kept, place, tokens, parts, *args) -> (result, kept)`, with tokens at one
        position.
    """

    start: Callable[..., tuple[list[Any], list[Array]]]
    step: Callable[..., tuple[Array, list[Any]]]


def stepwise(f: Callable[..., Any], tokens: jax.ShapeDtypeStruct, *args: Any) -> Stepwise:
    """Returns `f(*args, tokens)` one position at a time. Its result, and `tokens`, have the axis of
    positions last but one, and last. All leaves of `args` are arrays.

    Raises:
      Unable: something in `f` is not known to be computed position by position.
    """
    arrays, filled = arrays_of(args)
    jaxpr, consts = compat.trace(lambda *x: f(*filled(x[:-1]), x[-1]), *arrays, tokens)
    jaxpr = compat.without_dead(jaxpr)
    length, axis = tokens.shape[-1], len(tokens.shape) - 1
    results = len(jaxpr.outvars)
    shape = getattr(jaxpr.outvars[0].aval, "shape", ()) if results == 1 else ()
    if results != 1 or shape[:-1] != tokens.shape:
        kinds = ", ".join(str(v.aval) for v in jaxpr.outvars)
        raise Unable(f"the results are {kinds}, and not logits {[*tokens.shape, 'vocabulary']}")
    turned: set[int] = set()

    def evaluated(position: Any, tokens_now: Any, arrays: Sequence[Any], *leaves: Any) -> Any:
        steps = Steps(_RULES, position, length, frozenset(turned), arrays, *leaves)
        (result,) = steps.run(jaxpr, consts, [*arrays, At(tokens_now, axis)])
        if not isinstance(result, At) or result.axis != axis:
            raise Unable("the result does not have one entry for each token")
        return result.value, steps.new, steps.parts

    @jax.jit  # traced once
    def start(*inputs: Any) -> Any:
        none = jnp.zeros((*tokens.shape[:-1], 1), tokens.dtype)
        return evaluated(jnp.int32(0), none, arrays_of(inputs)[0])[1:]

    def step(stored: Any, position: Any, tokens: Any, parts: Any, *inputs: Any) -> Any:
        return evaluated(position, tokens, arrays_of(inputs)[0], list(stored), list(parts))[:2]

    while True:
        try:
            jax.eval_shape(start, *args)
            return Stepwise(start, step)
        except Turn as turn:
            if turn.product in turned:
                raise Unable("a product of positions with positions is summed over both") from None
            turned.add(turn.product)
