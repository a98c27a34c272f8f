"""The specified operators of jqx as nodes of ONNX, where these give the same numbers bit for bit.

In a jaxpr such an operator is the call of a jitted function, which shows the name but not the
options of the call. Whether it rounds as ONNX does is seen by tracing the function again with these
options. What is not the same is written operation by operation, as any other function is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .. import compat
from ..compat import Eqn
from ..gradients.estimators import ste
from ..numerics.exact import RoundMode
from ..numerics.lookup import format_of
from ..ops.affine import affine_dequantize, affine_fake_quantize, affine_quantize
from .contractions import rounded_units
from .graph import Graph, Operand, Value

Form = Callable[[Graph], str]
"""Writes an operator into a graph, and returns the name of its result."""

_CODES = ("int4", "int8", "int16", "uint4", "uint8", "uint16")
"""The integers that `QuantizeLinear` writes, all of which float32 holds."""

_READ = (*_CODES, "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
"""The codes that `DequantizeLinear` reads."""

_NEAREST = {"round_mode": RoundMode.NEAREST_TOWARD_EVEN}


def form_of(eqn: Eqn, values: Sequence[Operand]) -> Form | None:
    """Returns how the call of an operator of jqx is written; `None` if it is another call, or has
    no form of its own.
    """
    write = _OPERATORS.get(compat.name_of_jit(eqn))
    are_single = all(x.aval.dtype in (np.float32, *_small(x)) for x in (*eqn.invars, *eqn.outvars))
    return write(eqn, *values) if write is not None and are_single else None


def _small(atom: Any) -> tuple[Any, ...]:
    return (atom.aval.dtype,) if atom.aval.dtype.name in _READ else ()


def _quantize(eqn: Eqn, x: Operand, scale: Operand, zero_point: Operand = None) -> Form | None:
    """`QuantizeLinear` with a known scale, and with any other its arithmetic."""
    codes = eqn.outvars[0].aval.dtype
    if codes.name not in _CODES or not _is(eqn, affine_quantize, qtype=codes, **_NEAREST):
        return None
    axes = _axes(scale)
    if len(axes) <= 1 and _are_known(scale, zero_point):
        return lambda g: _linear(
            g, "QuantizeLinear", _numbers(g, x, scale, zero_point), scale, zero_point, codes
        )
    form = format_of(codes)

    def write(g: Graph) -> str:
        start = None if zero_point is None else g.cast(zero_point, np.float32)
        units = rounded_units(g, x, scale, start, (form.low, form.high))
        units = g.add("Where", g.add("Equal", units, units), units, np.float32(0))
        return g.cast(units, codes)

    return write


def _dequantize(eqn: Eqn, q: Operand, scale: Operand, zero_point: Operand = None) -> Form | None:
    codes = eqn.invars[0].aval.dtype
    options = {"qtype": codes, "dtype": np.dtype(np.float32)}
    if len(_axes(scale)) > 1 or not _is(eqn, affine_dequantize, **options):
        return None
    return lambda g: _linear(g, "DequantizeLinear", q, scale, zero_point, codes)


def _fake_quantize(eqn: Eqn, x: Operand, scale: Operand, zero_point: Operand = None) -> Form | None:
    """`QuantizeLinear` and `DequantizeLinear`. The call does not show the format of its codes."""
    if len(_axes(scale)) > 1 or not _are_known(scale, zero_point):
        return None
    same = functools.partial(_is, eqn, affine_fake_quantize, gradient=ste, **_NEAREST)
    found = [name for name in _CODES if same(qtype=np.dtype(name))]
    if not found:
        return None

    def write(g: Graph) -> str:
        q = _numbers(g, x, scale, zero_point)
        for op in ("QuantizeLinear", "DequantizeLinear"):
            q = _linear(g, op, q, scale, zero_point, np.dtype(found[0]))
        return q

    return write


_OPERATORS: dict[str, Callable[..., Form | None]] = {
    "affine_quantize": _quantize,
    "affine_dequantize": _dequantize,
    "affine_fake_quantize": _fake_quantize,
}


def _is(eqn: Eqn, function: Callable[..., Any], **options: Any) -> bool:
    """Whether a call in a jaxpr is that of a jitted function with these options."""
    types = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    return str(eqn.params["jaxpr"]) == _traced(function, tuple(options.items()), *types)


@functools.lru_cache(maxsize=256)
def _traced(function: Callable[..., Any], options: Sequence[Any], *types: Any) -> str:
    x, scale, *zero_point = types

    def call(x: jax.Array, scale: jax.Array, *zero_point: jax.Array) -> jax.Array:
        return function(x, scale, *(zero_point or [None]), **dict(options))

    return str(jax.make_jaxpr(call)(x, scale, *zero_point).eqns[0].params["jaxpr"])


def _axes(scale: Operand) -> list[int]:
    """Returns the axes along which a scale varies."""
    return [i for i, n in enumerate(scale.shape) if not isinstance(n, int) or n != 1]


def _linear(g: Graph, op: str, x: Operand, scale: Operand, zero_point: Any, codes: Any) -> str:
    """Adds a node with the scale of the whole array, or with those along an axis."""
    axes = _axes(scale)
    sizes = [scale.shape[i] for i in axes]

    def flat(x: Operand) -> Operand:
        return x.reshape(sizes) if isinstance(x, np.ndarray) else g.reshape(x, sizes)

    if zero_point is None and op == "QuantizeLinear":
        zero_point = np.zeros(scale.shape, codes)
    operands = [flat(a) for a in (scale, zero_point) if a is not None]
    return g.add(op, x, *operands, **({"axis": axes[0]} if axes else {}))


def _are_known(scale: Operand, zero_point: Operand) -> bool:
    """Whether scale and zero point are known, and of all numbers only NaN has no code."""
    if isinstance(scale, Value) or isinstance(zero_point, Value):
        return False
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(scale * np.float32(2**16))
    return bool((is_finite & (np.abs(scale) >= np.finfo(np.float32).tiny)).all())


def _numbers(g: Graph, x: Operand, scale: np.ndarray, zero_point: Any) -> str:
    """Returns numbers, with one of the code 0 in place of NaN, which has the code 0 in jqx."""
    zero = 0 if zero_point is None else zero_point.astype(np.float32)
    stand_in = np.asarray(-zero * scale, np.float32)
    return g.add("Where", g.add("Equal", x, x), x, stand_in)
