"""Inputs in codes, such as caches of keys and values: what they are in a graph, and how a graph
writes to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from ..compat import Eqn
from ..contractions.cache import spec_like
from ..errors import fail
from ..numerics.lookup import format_of
from ..numerics.qtype import Integer
from ..tensor.qtensor import QTensor
from .contractions import current_affine, rounded_units
from .graph import Graph, Operand, Value
from .lookups import overwritten
from .primitives import refuse


def is_state(x: Any) -> bool:
    """Whether a value is a QTensor whose arrays the graph computes."""
    return isinstance(x, QTensor) and any(isinstance(leaf, Value) for leaf in parts_of(x).values())


def parts_of(q: QTensor) -> dict[str, Any]:
    """Returns the arrays of a QTensor, or what is in place of them, by their places in it."""
    pairs = jax.tree.leaves_with_path(q, is_leaf=lambda x: isinstance(x, Value))
    return {keystr(keys): leaf for keys, leaf in pairs}


def check_state(name: str, q: QTensor) -> None:
    """Checks that runtimes can slice and join the codes of an input."""
    form = format_of(q.qtype)
    is_plain = q.layout is None and q.offset is None and q.order is None
    is_byte = isinstance(form, Integer) and np.dtype(form.storage).name in ("int8", "uint8")
    if not (is_plain and is_byte and not isinstance(q.scale, QTensor)):
        problem = f"{name} is a QTensor that has no form in ONNX as an input."
        expected = "codes of 8 bits in the default layout, with scales that are not quantized"
        fix = "pass it as an array, x.dequantize(), or in int8, after q.unpack()."
        args = {"given": repr(q), "expected": expected, "fix": fix}
        raise fail("interop.to_onnx", problem, **args, error=NotImplementedError)


def written(g: Graph, eqn: Eqn, q: QTensor, update: Any, starts: Sequence[Operand]) -> QTensor:
    """Returns a state to which an update is written, which overwrites each scale as a whole or not
    at all.
    """
    sizes, parts = eqn.invars[1].aval.shape, parts_of(q)
    covered = [n is m or n == m for n, m in zip(q.shape, sizes, strict=True)]
    for scale in list(parts.values())[1:]:
        fields = zip(covered, scale.shape, q.shape, strict=True)
        if not all(m == n or (is_covered and m == 1) for is_covered, m, n in fields):
            raise refuse(eqn, "of elements that share a scale with others has no form in ONNX")
    new = parts_of(update if is_state(update) else _coded(g, eqn, q, update))

    def write(x: Value, update: Value) -> Value:
        name = overwritten(g, x, update, starts, x.shape, update.shape)
        return Value(name, x.shape, x.dtype)

    return with_parts(q, [write(x, new[place]) for place, x in parts.items()])


def with_parts(q: QTensor, parts: Sequence[Any]) -> QTensor:
    """Returns a QTensor with other arrays, or with what is in place of them."""
    return jax.tree.unflatten(jax.tree.structure(q, is_leaf=lambda x: isinstance(x, Value)), parts)


def _coded(g: Graph, eqn: Eqn, q: QTensor, x: Operand) -> QTensor:
    """Returns an array in the format of a state, with scales of its own."""
    shape = eqn.invars[1].aval.shape
    form, spec = format_of(q.qtype), spec_like(q, q.groups)
    if q.zero_point is None and not spec.symmetric:
        raise refuse(eqn, "to an input of unsigned codes without zero points has no form in ONNX")
    is_float = eqn.invars[1].aval.dtype == np.float32
    real = g.name(x) if is_float else g.cast(x, np.float32)
    shared = [i for i, n in enumerate(q.scale.shape) if n == 1]
    scale, zero_point = current_affine(g, real, spec, form, shared)
    units = rounded_units(g, real, scale, zero_point, (form.low, form.high))
    found = [(units, shape)]
    scale_shape = tuple(1 if i in shared else n for i, n in enumerate(shape))
    found += [(name, scale_shape) for name in (scale, zero_point) if name is not None]
    pairs = zip(found, parts_of(q).values(), strict=True)
    return with_parts(q, [Value(g.cast(n, p.dtype), s, p.dtype) for (n, s), p in pairs])
