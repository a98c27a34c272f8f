"""The bits of numbers, which ONNX has no operation for (before opset 26), by exact arithmetic."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ..compat import Eqn
from ..numerics.lookup import E8M0
from .graph import Graph, Operand
from .primitives import refuse, rule

_POWERS = np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)
"""The powers of two of the normal numbers of float32."""


@rule("bitcast_convert_type")
def _bitcast(g: Graph, eqn: Eqn, x: Operand) -> str:
    old, new = (np.dtype(atom.aval.dtype) for atom in (eqn.invars[0], eqn.outvars[0]))
    are_integers = old.kind in "iu" and new.kind in "iu"
    if E8M0 in (old, new) and np.uint8 in (old, new):
        return g.name(x)
    if (are_integers and old.itemsize == new.itemsize) or old == new:
        return g.cast(x, new)
    if old == np.float32 and new.kind in "iu" and new.itemsize == 4:
        return g.cast(_bits(g, x), new)
    if old.kind in "iu" and old.itemsize == 4 and new == np.float32:
        return _number(g, g.cast(x, np.uint32))
    if old == jnp.bfloat16 and new.kind in "iu" and new.itemsize == 2:
        codes = g.cast(_bits(g, g.cast(x, np.float32)), np.uint32)
        return g.cast(g.add("BitShift", codes, np.uint32(16), direction="RIGHT"), new)
    if old.kind in "iu" and old.itemsize == 2 and new == jnp.bfloat16:
        codes = g.cast(g.cast(x, np.uint16), np.uint32)
        return g.cast(_number(g, g.add("BitShift", codes, np.uint32(16), direction="LEFT")), new)
    if old == np.uint8 and new.name.startswith("float8"):
        numbers = np.arange(256, dtype=np.uint8).view(new).astype(np.float32)
        return g.cast(g.add("Gather", numbers, g.cast(x, np.int32)), new)
    raise refuse(eqn, f"of {old.name} to {new.name} has no form in ONNX")


def _bits(g: Graph, x: Operand) -> str:
    """Returns the bits of float32 as int32: the exponent by a logarithm, which is set right by
    comparing with powers of two, and what is left over one as an integer.
    """
    size = g.add("Abs", x)
    guess = g.add("Floor", g.add("Mul", g.add("Log", size), np.float32(1 / np.log(2))))
    index = g.add("Add", guess, np.float32(126))
    index = g.add("Min", g.add("Max", index, np.float32(0)), np.float32(len(_POWERS) - 1))
    index = g.cast(g.add("Where", g.add("Equal", index, index), index, np.float32(0)), np.int32)
    power = g.add("Gather", _POWERS, index)
    below = g.cast(g.add("Greater", power, size), np.int32)
    twice = g.add("Mul", power, np.float32(2))
    above = g.cast(g.add("GreaterOrEqual", size, twice), np.int32)
    index = g.add("Add", g.add("Sub", index, below), above)
    last = np.asarray(len(_POWERS) - 1, np.int32)
    index = g.add("Min", g.add("Max", index, np.int32(0)), last)
    rest = g.add("Div", size, g.add("Gather", _POWERS, index))
    fraction = g.add("Mul", g.add("Sub", rest, np.float32(1)), np.float32(2**23))
    exponent = g.add("Mul", g.add("Add", index, np.int32(1)), np.int32(2**23))
    is_small = g.add("Less", size, _POWERS[0].reshape(()))
    units = g.add("Mul", g.add("Mul", size, np.float32(2.0**100)), np.float32(2.0**49))
    # Numbers that are not finite have no fraction that an integer holds.
    is_finite = g.add("Less", size, np.float32(np.inf))
    parts = g.add("Where", is_small, units, fraction)
    parts = g.cast(g.add("Where", is_finite, parts, np.float32(0)), np.int32)
    exponent = g.add("Where", is_small, np.int32(0), exponent)
    bits = g.add("Add", exponent, parts)
    bits = g.add("Where", is_finite, bits, np.int32(0x7F800000))
    bits = g.add("Where", g.add("Equal", x, x), bits, np.int32(0x7FC00000))
    zero = np.float32(0)
    inverse = g.add("Div", np.float32(1), x)  # which shows the sign of a zero
    is_negative = g.add("Or", g.add("Less", x, zero), g.add("Less", inverse, zero))
    return g.add("Where", is_negative, g.add("Add", bits, np.int32(-(2**31))), bits)


def _number(g: Graph, bits: str) -> str:
    """Returns float32 of its bits, uint32."""
    exponent = g.add("BitShift", bits, np.uint32(23), direction="RIGHT")
    exponent = g.cast(g.add("BitwiseAnd", exponent, np.uint32(255)), np.int32)
    fraction = g.cast(g.add("BitwiseAnd", bits, np.uint32(2**23 - 1)), np.float32)
    sign = g.cast(g.add("BitShift", bits, np.uint32(31), direction="RIGHT"), np.float32)
    sign = g.add("Sub", np.float32(1), g.add("Mul", sign, np.float32(2)))
    small = g.add("Mul", g.add("Mul", fraction, np.float32(2.0**-100)), np.float32(2.0**-49))
    table = np.concatenate([_POWERS[:1], _POWERS, np.full(1, np.inf, np.float32)])
    rest = g.add("Add", g.add("Mul", fraction, np.float32(2.0**-23)), np.float32(1))
    size = g.add("Mul", rest, g.add("Gather", table, exponent))
    size = g.add("Where", g.add("Equal", exponent, np.int32(0)), small, size)
    beyond = g.add("Equal", exponent, np.int32(255))
    is_nan = g.add("And", beyond, g.add("Greater", fraction, np.float32(0)))
    return g.add("Mul", g.add("Where", is_nan, np.float32(np.nan), size), sign)
