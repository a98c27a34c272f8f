"""Which dtypes runtimes compute each primitive in, and how the others are written.

onnxruntime has kernels for some dtypes of an operation alone. A primitive of another dtype is
written in a wider one, which holds every value of it: integers wrap when they are narrowed again,
and floats are rounded once, as XLA does. Where no wider dtype will do, the primitive is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..compat import Eqn
from ..numerics.lookup import E8M0
from .graph import Graph, Operand, Value

_SINGLE = ("float16", "float32")
_FLOATS = (*_SINGLE, "float64")
_WIDE = ("int32", "int64")
_BYTES = ("int8", "uint8")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
_INTEGERS = ("int8", "int16", *_WIDE, *_UNSIGNED)
_NUMBERS = (*_FLOATS, *_INTEGERS)
_ORDERED = (*_FLOATS, *_WIDE, *_BYTES)

_STORED = ("int4", "uint4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
"""The dtypes that runtimes only convert."""

_WIDER = {
    "bool": ("uint8", "int32"),
    "int4": ("int8", "int32", "float64"),
    "uint4": ("uint8", "int32", "float64"),
    "int8": ("int32", "float64"),
    "int16": ("int32", "float64"),
    "int32": ("float64",),
    "uint8": ("int32", "float64"),
    "uint16": ("int32", "float64"),
    "uint32": ("int64", "float64"),
    "float16": ("float32",),
    "bfloat16": ("float32",),
    **dict.fromkeys((*_STORED[2:], E8M0.name), ("float32",)),
}
"""The dtypes that hold every value of a dtype, in the order of preference."""

_MODULAR = ("cumsum", "neg", "reduce_prod", "reduce_sum", "where")
"""Primitives whose results modulo 2**64 depend on their operands modulo 2**64 alone."""


def _kernels(names: str, *dtypes: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(names.split(), dtypes)


_KERNELS: dict[str, tuple[str, ...]] = {
    **_kernels("acos acosh asin asinh atan atanh cosh erf sinh tan", *_SINGLE),
    **_kernels("ceil cos exp floor is_finite log logistic pow round sin sqrt tanh", *_FLOATS),
    # Those of several operations are rounded once.
    **_kernels("cbrt exp2 expm1 log1p log2 rsqrt", "float32", "float64"),
    **_kernels("erfc reduce_window_sum", "float32"),
    **_kernels("add add_any div ge gt integer_pow le lt mul rem square sub", *_NUMBERS),
    **_kernels("eq ne", *_NUMBERS, "bool"),
    **_kernels("and not or reduce_and reduce_or reduce_xor xor", *_INTEGERS, "bool"),
    **_kernels("shift_left shift_right_arithmetic shift_right_logical", *_INTEGERS),
    **_kernels("abs", *_NUMBERS),
    **_kernels("sign", "float32", "float64", *_INTEGERS),
    **_kernels("neg", *_FLOATS, "int8", "int16", *_WIDE),
    **_kernels("clamp max min", *_ORDERED, "uint32", "uint64"),
    **_kernels("where", *_ORDERED, "uint32"),
    **_kernels("broadcast_in_dim tile", *_NUMBERS, "bool"),
    **_kernels("pad", *_ORDERED, "uint32", "uint64", "bool"),
    **_kernels("cumsum reduce_prod reduce_sum", *_FLOATS, *_WIDE),
    **_kernels("argmax argmin reduce_max reduce_min", *_ORDERED),
    **_kernels("sort top_k", *_ORDERED, "int16"),
    **_kernels("reduce_window_max", *_FLOATS, *_BYTES),
    **_kernels("reduce_window_min", *_FLOATS),
    **_kernels("scatter", *_NUMBERS, "bool"),
    **_kernels("scatter-add scatter-max scatter-min scatter-mul", "float32", "float64", *_INTEGERS),
    **_kernels("dot_general", *_FLOATS, *_WIDE, "uint32", "uint64"),
    **_kernels("conv_general_dilated", *_SINGLE),
}
"""The dtypes of the first operand of which onnxruntime has kernels, by primitive. Primitives that
are not here have kernels for all dtypes, or widen by themselves.
"""


def computed_in(name: str, dtype: Any) -> np.dtype[Any] | None:
    """Returns the dtype in which a primitive is written; `None` if there is none."""
    dtype = np.dtype(dtype)
    kernels = _KERNELS.get(name)
    wider = list(_WIDER.get(dtype.name, ()))
    if dtype == np.uint64 and name in _MODULAR:
        wider = ["int64"]
    if name == "shift_right_logical":  # depends on the number of bits
        wider = []
    if kernels is None:
        return dtype if name == "convert_element_type" else moved_in(dtype)
    found = [x for x in (dtype.name, *wider) if x in kernels]
    return jnp.dtype(found[0]) if found else None


def number_of_e8m0(g: Graph, x: Operand) -> str:
    """Returns the powers of two of float8_e8m0fnu, which a graph has as bytes, as float32."""
    numbers = np.arange(256, dtype=np.uint8).view(E8M0).astype(np.float32)
    return g.add("Gather", numbers, g.cast(x, np.int32))


def moved_in(dtype: Any) -> np.dtype[Any]:
    """Returns the dtype in which runtimes slice and join values."""
    dtype = np.dtype(dtype)
    return jnp.dtype(_WIDER[dtype.name][0]) if dtype.name in _STORED else dtype


def cast(g: Graph, x: Operand, dtype: Any) -> Operand:
    """Returns an operand in a dtype: of an array an array, and of a `Value` one."""
    if getattr(x, "dtype", None) == dtype:
        return x
    if isinstance(x, np.ndarray):
        return x.astype(dtype)
    name = g.cast(x, dtype)
    return x._replace(name=name, dtype=np.dtype(dtype)) if isinstance(x, Value) else name


_OVERFLOWS = {
    "float8_e4m3fn": (np.nextafter(np.float32(464), np.float32(np.inf)), np.float32(np.nan)),
    "float8_e5m2": (np.float32(61440), np.float32(np.inf)),
}
"""From which magnitude on numbers do not fit, and what they become."""


def to_float(g: Graph, x: Operand, dtype: Any) -> str:
    """Returns float32 numbers in another float dtype. onnxruntime misses a few that do not fit."""
    dtype = np.dtype(dtype)
    if dtype.name in _OVERFLOWS:
        first, factor = _OVERFLOWS[dtype.name]
        is_beyond = g.add("GreaterOrEqual", g.add("Abs", x), first)
        x = g.add("Where", is_beyond, g.add("Mul", x, factor), x)
    return g.cast(x, dtype)


class _Atom(NamedTuple):
    """In place of a variable of another dtype."""

    aval: Any


def widened(
    g: Graph, eqn: Eqn, operands: Sequence[Operand], wide: Any, write: Callable[..., Any]
) -> list[str]:
    """Writes an equation with `wide` in place of the dtype of its first operand, and returns the
    results in that dtype.
    """
    dtype = eqn.invars[0].aval.dtype

    def of(atoms: Sequence[Any]) -> list[Any]:
        return [_Atom(a.aval.update(dtype=wide)) if a.aval.dtype == dtype else a for a in atoms]

    changed = eqn.replace(invars=of(eqn.invars), outvars=of(eqn.outvars))
    pairs = zip(operands, eqn.invars, strict=True)
    read = number_of_e8m0 if dtype == E8M0 else functools.partial(cast, dtype=wide)
    cast_operands = [read(g, x) if a.aval.dtype == dtype else x for x, a in pairs]
    results = write(g, changed, *cast_operands)
    names = [results] if isinstance(results, str) else results
    outputs = zip(names, eqn.outvars, strict=True)
    narrow = to_float if np.dtype(wide) == np.float32 else Graph.cast
    return [narrow(g, x, dtype) if a.aval.dtype == dtype else x for x, a in outputs]
