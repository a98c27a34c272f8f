"""How each primitive of JAX is written in ONNX, those that are no contraction."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import export, lax

from .. import compat
from ..checks import shown
from ..compat import Eqn
from ..errors import fail
from ..numerics.lookup import E8M0
from ..transforms.onnx_rules import ADDED
from .dtypes import cast, computed_in, number_of_e8m0, to_float, widened
from .graph import Graph, Operand, Value

Rule = Callable[..., Any]
"""From a graph, an equation and its operands to the name of its result, or those of its results."""

RULES: dict[str, Rule] = {}
"""The rule of each primitive, by its name."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers the rule of primitives."""

    def register(f: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, f))
        return f

    return register


def refuse(eqn: Eqn, reason: str, fix: str = "") -> Exception:
    """Returns the error of an equation that has no form in ONNX."""
    problem = f"`{eqn.primitive.name}` {reason}{compat.at_line_of(eqn)}."
    facts = f"scope {compat.scope_of(eqn) or '(none)'}"
    if not fix:
        fix = "write this part of the function in another way, compute it outside, or pass a rule "
        fix += "to jqx.extend.onnx_rules."
    return fail("interop.to_onnx", problem, given=facts, fix=fix, error=NotImplementedError)


def write(g: Graph, eqn: Eqn, operands: Sequence[Operand]) -> list[str]:
    """Writes an equation by the rule of its primitive, in a dtype that runtimes compute it in."""
    if eqn.primitive.name in ADDED.get():
        return _of_user(g, eqn, operands)
    name, dtype = eqn.primitive.name, np.dtype(eqn.invars[0].aval.dtype if eqn.invars else np.int64)
    apply, wide = RULES[name], computed_in(name, dtype)
    if wide is None:
        raise refuse(eqn, f"of {dtype.name} has no form in ONNX")
    if wide != dtype:
        return widened(g, eqn, operands, wide, apply)
    results = apply(g, eqn, *operands)
    return [results] if isinstance(results, str) else results


def _of_user(g: Graph, eqn: Eqn, operands: Sequence[Operand]) -> list[str]:
    """Writes an equation by the rule of the user."""
    name = eqn.primitive.name
    results = ADDED.get()[name](g, eqn, *operands)
    names = [results] if isinstance(results, (str, Value)) else results
    are_names = isinstance(names, (list, tuple)) and all(isinstance(x, (str, Value)) for x in names)
    if not are_names or len(names) != len(eqn.outvars):
        problem = f"the rule for the primitive {name!r} returned {shown(results)}."
        expected = f"{len(eqn.outvars)} results of the graph"
        fix = "return what graph.add returns, or a list of such results."
        raise fail("interop.to_onnx", problem, expected=expected, fix=fix, error=TypeError)
    return [g.name(x) for x in names]


def where(g: Graph, chosen: Operand, x: Operand, y: Operand, dtype: Any) -> str:
    """Returns `x` where `chosen` is true, else `y`, which have a given dtype."""
    wide = computed_in("where", dtype)
    if wide == dtype:
        return g.add("Where", chosen, x, y)
    return g.cast(g.add("Where", chosen, cast(g, x, wide), cast(g, y, wide)), dtype)


# Elementwise.

_SAME = {
    "abs": "Abs",
    "add": "Add",
    "add_any": "Add",
    "acos": "Acos",
    "acosh": "Acosh",
    "asin": "Asin",
    "asinh": "Asinh",
    "atan": "Atan",
    "atanh": "Atanh",
    "ceil": "Ceil",
    "copy": "Identity",
    "cos": "Cos",
    "cosh": "Cosh",
    "erf": "Erf",
    "exp": "Exp",
    "floor": "Floor",
    "log": "Log",
    "logistic": "Sigmoid",
    "max": "Max",
    "min": "Min",
    "mul": "Mul",
    "name": "Identity",
    "reshard": "Identity",
    "sharding_constraint": "Identity",
    "neg": "Neg",
    "pow": "Pow",
    "sign": "Sign",
    "sin": "Sin",
    "sinh": "Sinh",
    "sqrt": "Sqrt",
    "stop_gradient": "Identity",
    "sub": "Sub",
    "tan": "Tan",
    "tanh": "Tanh",
}


def _same(op: str) -> Rule:
    return lambda g, eqn, *xs: g.add(op, *xs)


RULES.update({name: _same(op) for name, op in _SAME.items()})

_COMPARISONS = {
    "eq": "Equal",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "lt": "Less",
    "le": "LessOrEqual",
}


def dtype_of(eqn: Eqn, index: int = 0) -> np.dtype[Any]:
    return np.dtype(eqn.invars[index].aval.dtype)


def scalar(eqn: Eqn, number: float) -> np.ndarray:
    """Returns a number in the dtype of the first operand."""
    return np.asarray(number, dtype_of(eqn))


def _compared(op: str) -> Rule:
    def apply(g: Graph, eqn: Eqn, x: Operand, y: Operand) -> str:
        return g.add(op, x, y)

    return apply


RULES.update({name: _compared(op) for name, op in _COMPARISONS.items()})


@rule("ne")
def _ne(g: Graph, eqn: Eqn, x: Operand, y: Operand) -> str:
    return g.add("Not", g.add("Equal", x, y))


_LOGIC = {"and": "And", "or": "Or", "xor": "Xor", "not": "Not"}


def _logic(name: str) -> Rule:
    def apply(g: Graph, eqn: Eqn, *xs: Operand) -> str:
        return g.add(_LOGIC[name] if dtype_of(eqn) == np.bool_ else f"Bitwise{_LOGIC[name]}", *xs)

    return apply


RULES.update({name: _logic(name) for name in _LOGIC})


@rule("shift_left", "shift_right_logical", "shift_right_arithmetic")
def _shift(g: Graph, eqn: Eqn, x: Operand, y: Operand) -> str:
    dtype, bits = dtype_of(eqn), dtype_of(eqn).itemsize * 8
    signed, unsigned = np.dtype(f"int{bits}"), np.dtype(f"uint{bits}")
    codes, count = (cast(g, a, unsigned) for a in (x, y))
    mask = None
    if eqn.primitive.name == "shift_right_arithmetic":
        # The complement of a negative number is shifted, and is not negative.
        zero, ones = np.zeros((), signed), ~np.zeros((), signed)
        is_negative = g.add("Less", cast(g, x, signed), zero)
        mask = g.cast(where(g, is_negative, ones, zero, signed), unsigned)
        codes = g.add("BitwiseXor", codes, mask)
    direction = "LEFT" if eqn.primitive.name == "shift_left" else "RIGHT"
    shifted = g.add("BitShift", codes, count, direction=direction)
    if not isinstance(count, np.ndarray) or (count >= bits).any():
        is_whole = g.add("GreaterOrEqual", count, np.asarray(bits, unsigned))
        shifted = where(g, is_whole, np.asarray(0, unsigned), shifted, unsigned)
    return g.cast(shifted if mask is None else g.add("BitwiseXor", shifted, mask), dtype)


@rule("rsqrt")
def _rsqrt(g: Graph, eqn: Eqn, x: Operand) -> str:
    return g.add("Div", scalar(eqn, 1), g.add("Sqrt", x))


@rule("square")
def _square(g: Graph, eqn: Eqn, x: Operand) -> str:
    return g.add("Mul", x, x)


@rule("integer_pow")
def _integer_pow(g: Graph, eqn: Eqn, x: Operand) -> str:
    exponent = eqn.params["y"]
    if exponent == 0:
        return g.add("Expand", scalar(eqn, 1), g.shape(eqn.invars[0].aval.shape))
    if not np.issubdtype(dtype_of(eqn), np.integer) and abs(exponent) > 2:
        power = g.add("Pow", x, scalar(eqn, abs(exponent)))
    else:  # `Pow` computes integers in floats
        factors, square = [], x
        for bit in reversed(f"{abs(exponent):b}"):
            factors += [square] if bit == "1" else []
            square = g.add("Mul", square, square)
        power = functools.reduce(lambda a, b: g.add("Mul", a, b), factors)
    return g.add("Div", scalar(eqn, 1), power) if exponent < 0 else g.name(power)


@rule("exp2")
def _exp2(g: Graph, eqn: Eqn, x: Operand) -> str:
    return g.add("Pow", scalar(eqn, 2), x)


@rule("log2")
def _log2(g: Graph, eqn: Eqn, x: Operand) -> str:
    return g.add("Div", g.add("Log", x), scalar(eqn, math.log(2)))


@rule("cbrt")
def _cbrt(g: Graph, eqn: Eqn, x: Operand) -> str:
    root = g.add("Pow", g.add("Abs", x), scalar(eqn, 1 / 3))
    return g.add("Mul", g.add("Sign", x), root)


@rule("expm1")
def _expm1(g: Graph, eqn: Eqn, x: Operand) -> str:
    """`tanh(x / 2) (exp(x) + 1)`, which loses no digits near 0."""
    power = g.add("Exp", x)
    half = g.add("Tanh", g.add("Mul", x, scalar(eqn, 0.5)))
    near = g.add("Mul", half, g.add("Add", power, scalar(eqn, 1)))
    is_near = g.add("Less", g.add("Abs", x), scalar(eqn, 1))
    return g.add("Where", is_near, near, g.add("Sub", power, scalar(eqn, 1)))


@rule("log1p")
def _log1p(g: Graph, eqn: Eqn, x: Operand) -> str:
    """`x log(u) / (u - 1)` for `u = 1 + x`, in which the errors of `u` cancel."""
    one = scalar(eqn, 1)
    u = g.add("Add", x, one)
    log, difference = g.add("Log", u), g.add("Sub", u, one)
    is_tiny = g.add("Equal", difference, scalar(eqn, 0))
    safe = g.add("Where", is_tiny, one, difference)
    near = g.add("Where", is_tiny, x, g.add("Mul", x, g.add("Div", log, safe)))
    is_near = g.add("Less", g.add("Abs", x), one)
    return g.add("Where", is_near, near, log)


@rule("erfc")
def _erfc(g: Graph, eqn: Eqn, x: Operand) -> str:
    """To the last digit of 1, not of the result: ONNX has no function for the tail."""
    return g.add("Sub", scalar(eqn, 1), g.add("Erf", x))


@rule("div", "rem")
def _divide(g: Graph, eqn: Eqn, x: Operand, y: Operand) -> str:
    """Integers by 0, and the least one by -1, have results in JAX, and stop runtimes."""
    dtype, is_div = dtype_of(eqn), eqn.primitive.name == "div"
    op, attributes = ("Div", {}) if is_div else ("Mod", {"fmod": 1})
    if not np.issubdtype(dtype, np.integer):
        return g.add(op, x, y, **attributes)
    divisors = [0, -1] if np.iinfo(dtype).min < 0 else [0]
    if isinstance(y, np.ndarray):
        divisors = [n for n in divisors if (y == n).any()]
    meets = {n: g.add("Equal", y, scalar(eqn, n)) for n in divisors}
    for here in meets.values():
        y = where(g, here, scalar(eqn, 1), y, dtype)
    result = g.add(op, x, y, **attributes)
    for n, here in meets.items():
        if is_div:
            other = g.add("Neg", x) if n else ~scalar(eqn, 0)
        else:
            other = scalar(eqn, 0) if n else x
        result = where(g, here, other, result, dtype)
    return result


@rule("round")
def _round(g: Graph, eqn: Eqn, x: Operand) -> str:
    if eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN:
        return g.add("Round", x)
    floor = g.add("Floor", g.add("Abs", x))
    rest = g.add("Sub", g.add("Abs", x), floor)
    up = g.cast(g.add("GreaterOrEqual", rest, scalar(eqn, 0.5)), dtype_of(eqn))
    return g.add("Mul", g.add("Sign", x), g.add("Add", floor, up))


@rule("is_finite")
def _is_finite(g: Graph, eqn: Eqn, x: Operand) -> str:
    difference = g.add("Sub", x, x)  # 0, or NaN for infinity and NaN
    return g.add("Equal", difference, scalar(eqn, 0))


@rule("clamp")
def _clamp(g: Graph, eqn: Eqn, low: Operand, x: Operand, high: Operand) -> str:
    return g.add("Min", g.add("Max", x, low), high)


@rule("select_n")
def _select_n(g: Graph, eqn: Eqn, which: Operand, *cases: Operand) -> str:
    dtype = dtype_of(eqn, 1)
    if len(cases) == 1:
        return g.name(cases[0])
    if dtype_of(eqn) == np.bool_:
        return where(g, which, cases[1], cases[0], dtype)
    result: Operand = cases[-1]
    for i in reversed(range(len(cases) - 1)):
        is_here = g.add("LessOrEqual", which, scalar(eqn, i))
        result = where(g, is_here, cases[i], result, dtype)
    return g.name(result)


@rule("convert_element_type")
def _convert(g: Graph, eqn: Eqn, x: Operand) -> str:
    old, new = dtype_of(eqn), np.dtype(eqn.params["new_dtype"])
    if old == E8M0:
        return g.cast(number_of_e8m0(g, x), new)
    if new == old:
        return g.name(x)
    if new == np.bool_:
        wide = computed_in("ne", old)
        return g.add("Not", g.add("Equal", cast(g, x, wide), np.zeros((), wide)))
    is_float = jnp.issubdtype(old, jnp.floating)
    if is_float and jnp.issubdtype(new, jnp.integer):
        return _saturated(g, x, old, new)
    if new.name.startswith("float8"):
        return to_float(g, cast(g, x, np.float32), new)
    return g.cast(x, new)


def _saturated(g: Graph, x: Operand, old: np.dtype[Any], new: np.dtype[Any]) -> str:
    """Returns floats as integers: toward zero, within the limits of the dtype, and NaN as 0, as XLA
    does. ONNX leaves open what does not fit.
    """
    if old.itemsize < 4:
        old, x = np.dtype(np.float32), g.cast(x, np.float32)
    limits = jnp.iinfo(new)
    if limits.bits < 8:  # runtimes round what they convert to 4 bits
        x = g.add("Min", g.add("Max", x, old.type(limits.min)), old.type(limits.max))
        return g.cast(_saturated(g, x, old, np.dtype(np.int8)), new)
    low, high = (np.asarray(n, old) for n in (limits.min, limits.max))
    x = g.add("Where", g.add("Equal", x, x), x, np.zeros((), old))
    if int(high) <= limits.max:
        return g.cast(g.add("Min", g.add("Max", x, low), high), new)
    # The largest float that fits is below the largest integer.
    inside = g.add("Min", g.add("Max", x, low), np.nextafter(high, np.zeros((), old)))
    above, largest = g.add("GreaterOrEqual", x, high), np.asarray(limits.max, new)
    return where(g, above, largest, g.cast(inside, new), new)


_PRECISIONS = {(8, 7): "bfloat16", (5, 10): "float16"}
"""The dtypes with given numbers of bits of the exponent and of the mantissa."""


@rule("reduce_precision")
def _reduce_precision(g: Graph, eqn: Eqn, x: Operand) -> str:
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    if bits not in _PRECISIONS or dtype_of(eqn) == np.float64:
        name = dtype_of(eqn).name
        raise refuse(eqn, f"of {name} to {bits[0]} and {bits[1]} bits has no form in ONNX")
    return g.cast(g.cast(x, jnp.dtype(_PRECISIONS[bits])), dtype_of(eqn))


@rule("device_put", "optimization_barrier")
def _barrier(g: Graph, eqn: Eqn, *xs: Operand) -> list[str]:
    return [g.add("Identity", x) for x in xs]


# Shapes.


@rule("broadcast_in_dim")
def _broadcast(g: Graph, eqn: Eqn, x: Operand, *sizes: Operand) -> str:
    shape, axes = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    aligned = [1] * len(shape)
    for axis, n in zip(axes, eqn.invars[0].aval.shape, strict=True):
        aligned[axis] = n
    is_same = tuple(aligned) == tuple(shape)
    in_place = tuple(axes) == tuple(range(len(shape) - len(axes), len(shape)))
    if is_same or not in_place:
        x = g.reshape(x, aligned)
    return g.name(x) if is_same else g.add("Expand", x, g.shape(shape))


@rule("reshape", "squeeze", "expand_dims")
def _reshape(g: Graph, eqn: Eqn, x: Operand, *sizes: Operand) -> str:
    return g.reshape(x, eqn.outvars[0].aval.shape)


@rule("transpose")
def _transpose(g: Graph, eqn: Eqn, x: Operand) -> str:
    return g.transpose(x, eqn.params["permutation"])


@rule("rev")
def _rev(g: Graph, eqn: Eqn, x: Operand) -> str:
    axes = eqn.params["dimensions"]
    if not axes:
        return g.name(x)
    least, count = np.iinfo(np.int64).min, len(axes)
    bounds = g.ints(*[-1] * count), g.ints(*[least] * count)
    return g.add("Slice", x, *bounds, g.ints(*axes), g.ints(*[-1] * count))


@rule("slice")
def _slice(g: Graph, eqn: Eqn, x: Operand) -> str:
    p, shape = eqn.params, eqn.invars[0].aval.shape
    steps = p["strides"] or (1,) * len(shape)
    parts = zip(range(len(shape)), p["start_indices"], p["limit_indices"], steps, strict=True)
    for axis, start, end, step in parts:
        if (start, step) != (0, 1) or (end is not shape[axis] and end != shape[axis]):
            x = g.slice(x, axis, start, end, step)
    return g.name(x)


@rule("split")
def _split(g: Graph, eqn: Eqn, x: Operand) -> list[str]:
    sizes, axis = eqn.params["sizes"], eqn.params["axis"]
    return g.add_many("Split", len(sizes), x, g.shape(sizes), axis=axis)


@rule("unstack")
def _unstack(g: Graph, eqn: Eqn, x: Operand) -> list[str]:
    axis, outvars = eqn.params["axis"], eqn.outvars
    parts = g.add_many("Split", len(outvars), x, axis=axis, num_outputs=len(outvars))
    pairs = zip(parts, outvars, strict=True)
    return [g.reshape(part, var.aval.shape) for part, var in pairs]


@rule("concatenate")
def _concatenate(g: Graph, eqn: Eqn, *xs: Operand) -> str:
    return g.add("Concat", *xs, axis=eqn.params["dimension"])


@rule("stack")
def _stack(g: Graph, eqn: Eqn, *xs: Operand) -> str:
    axis, shape = eqn.params["axis"], list(eqn.invars[0].aval.shape)
    rows = [g.reshape(x, [*shape[:axis], 1, *shape[axis:]]) for x in xs]
    return g.add("Concat", *rows, axis=axis)


def pad(g: Graph, x: Operand, value: Operand, config: Sequence[Any], shape: Sequence[Any]) -> str:
    """Returns `x` padded as `lax.pad` does; padding of an open size is not negative."""
    shape = list(shape)
    for axis, (_, _, between) in enumerate(config):
        if between and shape[axis] > 1:
            n = shape[axis]
            x = g.reshape(x, [*shape[: axis + 1], 1, *shape[axis + 1 :]])
            ends = [0] * (len(shape) + 1)
            ends[axis + 1] = between
            x = g.add("Pad", x, g.ints(*[0] * len(ends), *ends), value)
            shape[axis] = n * (1 + between)
            x = g.slice(g.reshape(x, shape), axis, 0, shape[axis] - between)
            shape[axis] -= between
    pads = [n for end in (0, 1) for n in (x[end] for x in config)]
    cuts = [0 if export.is_symbolic_dim(n) else max(-n, 0) for n in pads]
    for axis, (low, high) in enumerate(zip(cuts[: len(config)], cuts[len(config) :], strict=True)):
        if low or high:
            x = g.slice(x, axis, low, shape[axis] - high)
    pads = [n + cut for n, cut in zip(pads, cuts, strict=True)]
    is_padded = any(export.is_symbolic_dim(n) or n for n in pads)
    return g.add("Pad", x, g.shape(pads), value) if is_padded else g.name(x)


@rule("pad")
def _pad(g: Graph, eqn: Eqn, x: Operand, value: Operand) -> str:
    shape = eqn.invars[0].aval.shape
    return pad(g, x, value, eqn.params["padding_config"], shape)


@rule("tile")
def _tile(g: Graph, eqn: Eqn, x: Operand) -> str:
    return g.add("Tile", x, g.ints(*eqn.params["reps"]))


@rule("iota")
def _iota(g: Graph, eqn: Eqn, *sizes: Operand) -> str:
    p = eqn.params
    shape, axis = eqn.outvars[0].aval.shape, p["dimension"]
    count = g.add("Squeeze", g.size(shape[axis]))
    numbers = g.add("Range", np.asarray(0, np.int64), count, np.asarray(1, np.int64))
    aligned = [-1 if i == axis else 1 for i in range(len(shape))]
    column = g.add("Reshape", g.cast(numbers, p["dtype"]), g.ints(*aligned))
    return g.add("Expand", column, g.shape(shape)) if len(shape) > 1 else column


@rule("dim_as_value")
def _dim_as_value(g: Graph, eqn: Eqn) -> str:
    return g.cast(g.add("Squeeze", g.size(eqn.params["dim"])), eqn.outvars[0].aval.dtype)


# Reductions.


def _reduced(g: Graph, eqn: Eqn, op: str, x: Operand, empty: np.ndarray) -> str:
    """Returns a reduction; `empty` is that of nothing, at which some runtimes stop."""
    axes = eqn.params["axes"]
    if 0 in [eqn.invars[0].aval.shape[axis] for axis in axes]:
        return g.add("Expand", empty, g.shape(eqn.outvars[0].aval.shape))
    return g.add(op, x, g.ints(*axes), keepdims=0, noop_with_empty_axes=1)


def _neutral(eqn: Eqn) -> np.ndarray:
    """Returns the sum, maximum or minimum of nothing."""
    kind = eqn.primitive.name.rsplit("_", 1)[1]
    if kind == "sum":
        return scalar(eqn, 0)
    if jnp.issubdtype(dtype_of(eqn), jnp.floating):
        return scalar(eqn, -np.inf if kind == "max" else np.inf)
    limits = jnp.iinfo(dtype_of(eqn))
    return scalar(eqn, limits.min if kind == "max" else limits.max)


@rule("reduce_max", "reduce_min")
def _extreme(g: Graph, eqn: Eqn, x: Operand) -> str:
    """NaN if there is one, which runtimes pass over."""
    op = "ReduceMax" if eqn.primitive.name == "reduce_max" else "ReduceMin"
    result = _reduced(g, eqn, op, x, _neutral(eqn))
    if not jnp.issubdtype(dtype_of(eqn), jnp.floating):
        return result
    numbers = _reduced(g, eqn, "ReduceMin", g.add("Equal", x, x), np.asarray(True))
    return g.add("Where", numbers, result, scalar(eqn, np.nan))


@rule("reduce_sum", "reduce_prod")
def _total(g: Graph, eqn: Eqn, x: Operand) -> str:
    """Runtimes add and multiply integers in float64, and do not wrap around."""
    is_sum, dtype = eqn.primitive.name == "reduce_sum", dtype_of(eqn)
    if jnp.issubdtype(dtype, jnp.floating):
        op = "ReduceSum" if is_sum else "ReduceProd"
        return _reduced(g, eqn, op, x, scalar(eqn, not is_sum))
    if not is_sum or dtype == np.int64:
        return _folded(g, eqn, "Add" if is_sum else "Mul", x, not is_sum)
    total = _reduced(g, eqn, "ReduceSum", g.cast(x, np.int64), np.asarray(0, np.int64))
    return g.cast(total, dtype)


@rule("reduce_and", "reduce_or", "reduce_xor")
def _reduce_logic(g: Graph, eqn: Eqn, x: Operand) -> str:
    name, is_bool = eqn.primitive.name, dtype_of(eqn) == np.bool_
    is_and = name == "reduce_and"
    if is_bool and name != "reduce_xor":
        return _reduced(g, eqn, "ReduceMin" if is_and else "ReduceMax", x, np.asarray(is_and))
    op = _LOGIC[name.removeprefix("reduce_")]
    return _folded(g, eqn, op if is_bool else f"Bitwise{op}", x, -1 if is_and else 0)


def _folded(g: Graph, eqn: Eqn, op: str, x: Operand, neutral: int) -> str:
    """Returns a reduction by an operation of two halves at a time."""
    sizes, axes = list(eqn.invars[0].aval.shape), eqn.params["axes"]
    if any(export.is_symbolic_dim(sizes[axis]) for axis in axes):
        raise refuse(eqn, f"of {dtype_of(eqn).name} over an open size has no form in ONNX")
    for axis in axes:
        while (n := sizes[axis]) > 1:
            half = n // 2
            parts = [g.add(op, *(g.slice(x, axis, i, i + half) for i in (0, half)))]
            parts += [g.slice(x, axis, 2 * half, n)] if n % 2 else []
            x = g.add("Concat", *parts, axis=axis) if n % 2 else parts[0]
            sizes[axis] = half + n % 2
    if 0 in [sizes[axis] for axis in axes]:
        return _reduced(g, eqn, op, x, np.asarray(neutral).astype(dtype_of(eqn)))
    return g.reshape(x, eqn.outvars[0].aval.shape)


@rule("argmax", "argmin")
def _arg(g: Graph, eqn: Eqn, x: Operand) -> str:
    """The first NaN if there is one, which runtimes pass over."""
    (axis,) = eqn.params["axes"]
    op = {"argmax": "ArgMax", "argmin": "ArgMin"}[eqn.primitive.name]
    index = g.add(op, x, axis=axis, keepdims=0)
    if jnp.issubdtype(dtype_of(eqn), jnp.floating):
        numbers = g.cast(g.add("Equal", x, x), np.uint8)
        are_all = g.cast(g.add("ReduceMin", numbers, g.ints(axis), keepdims=0), np.bool_)
        first = g.add("ArgMin", numbers, axis=axis, keepdims=0)
        index = g.add("Where", are_all, index, first)
    return g.cast(index, eqn.params["index_dtype"])


@rule("cumsum")
def _cumsum(g: Graph, eqn: Eqn, x: Operand) -> str:
    axis = np.asarray(eqn.params["axis"], np.int64)
    return g.add("CumSum", x, axis, reverse=int(eqn.params["reverse"]))


@rule("sort")
def _sort(g: Graph, eqn: Eqn, *xs: Operand) -> list[str]:
    """By the last key first: `TopK` leaves equal elements in their order."""
    axis = eqn.params["dimension"]
    count = g.size(eqn.invars[0].aval.shape[axis])
    for i in reversed(range(eqn.params["num_keys"])):
        key, order = g.add_many("TopK", 2, xs[i], count, axis=axis, largest=0, sorted=1)
        moved = [
            g.add("GatherElements", x, order, axis=axis) if x is not xs[i] else key for x in xs
        ]
        xs = tuple(moved)
    return list(xs)


@rule("top_k")
def _top_k(g: Graph, eqn: Eqn, x: Operand) -> list[str]:
    axis = eqn.params.get("axis", eqn.invars[0].aval.ndim - 1)
    values, indices = g.add_many("TopK", 2, x, g.ints(eqn.params["k"]), axis=axis)
    return [values, g.cast(indices, eqn.outvars[1].aval.dtype)]


@rule("reduce_window_max", "reduce_window_sum", "reduce_window_min")
def _window(g: Graph, eqn: Eqn, x: Operand) -> str:
    p, shape, padding = eqn.params, eqn.invars[0].aval.shape, eqn.params["padding"]
    sizes, steps, dilations = p["window_dimensions"], p["window_strides"], p["window_dilation"]
    config = [(*pads, n - 1) for pads, n in zip(padding, p["base_dilation"], strict=True)]
    is_open = any(export.is_symbolic_dim(n) for pads in padding for n in pads)
    pairs = zip(config, sizes, strict=True)
    if is_open or any(min(x) < 0 or max(x) >= n or x[2] for x, n in pairs):
        # Runtimes take less padding than a window, and no holes.
        x = pad(g, x, _neutral(eqn), config, shape)
        pairs = zip(shape, config, strict=True)
        shape = [a + n + (max(n - 1, 0) * c if c else 0) + b for n, (a, b, c) in pairs]
        padding = [(0, 0)] * len(shape)
    fields = zip(sizes, steps, padding, dilations, strict=True)
    moving = [i for i, x in enumerate(fields) if x[:3] != (1, 1, (0, 0))] or [len(shape) - 1]
    rest = [i for i in range(len(shape)) if i not in moving]
    x = g.transpose(x, [*rest, *moving])
    space = [shape[i] for i in moving]
    x = g.reshape(x, [math.prod(shape[i] for i in rest), 1, *space])
    pads = [padding[i][0] for i in moving] + [padding[i][1] for i in moving]
    window = {
        "kernel_shape": [sizes[i] for i in moving],
        "strides": [steps[i] for i in moving],
        "dilations": [dilations[i] for i in moving],
        "pads": pads,
    }
    if eqn.primitive.name == "reduce_window_sum":
        mean = g.add("AveragePool", x, count_include_pad=1, **window)
        y = g.add("Mul", mean, scalar(eqn, math.prod(window["kernel_shape"])))
    else:
        is_max = eqn.primitive.name == "reduce_window_max"
        x = x if is_max else g.add("Neg", x)
        y = g.add("MaxPool", x, **window)
        if jnp.issubdtype(dtype_of(eqn), jnp.floating):
            # Runtimes pass over NaN, and give the least number for infinities alone.
            low, nan = scalar(eqn, -np.inf), scalar(eqn, np.nan)
            kinds = g.cast(g.add("Greater", x, low), np.uint8)
            kinds = g.add("Where", g.add("IsNaN", x), np.uint8(2), kinds)
            kind = g.add("MaxPool", kinds, **window)
            y = g.add("Where", g.cast(kind, np.bool_), y, low)
            y = g.add("Where", g.add("Equal", kind, np.uint8(2)), nan, y)
        y = y if is_max else g.add("Neg", y)
    out = eqn.outvars[0].aval.shape
    y = g.reshape(y, [out[i] for i in (*rest, *moving)])
    return g.transpose(y, list(np.argsort([*rest, *moving])))
