"""View primitives: a weight passes through them quantized, its scale in step.

Each has two rules: `track` says where the axes of the weight go, `apply` does it to a QTensor.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ..._compat import Eqn
from ...contractions import dynamic_slice
from ...tensor import QTensor, axis_groups
from .._origin import Origin


@dataclasses.dataclass(frozen=True)
class View:
    """How one view primitive treats a weight; both rules get the position of the weight's operand.

    `track` returns `None` where the result is no longer the weight.
    """

    track: Callable[[Eqn, int, Origin], Origin | None]
    apply: Callable[[Eqn, int, Sequence[Any]], QTensor]


def _same(eqn: Eqn, position: int, origin: Origin) -> Origin:
    return origin


def _identity(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[0]


def _track_transpose(eqn: Eqn, position: int, origin: Origin) -> Origin:
    return origin.with_dims(origin.dims[axis] for axis in eqn.params["permutation"])


def _apply_transpose(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[0].transpose(eqn.params["permutation"])


def _track_reshape(eqn: Eqn, position: int, origin: Origin) -> Origin | None:
    if eqn.params["dimensions"] is not None:
        return None
    new = eqn.outvars[0].aval.shape
    dims: list[frozenset[int]] = [frozenset()] * len(new)
    merged = set(origin.merged)
    for sources, targets in axis_groups(eqn.invars[0].aval.shape, new):
        held = frozenset().union(*(origin.dims[i] for i in sources))
        for j in targets:
            dims[j] = held
        if len(held) > 1:
            merged.add(held)
    return dataclasses.replace(origin, dims=tuple(dims), merged=frozenset(merged))


def _apply_reshape(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[0].reshape(eqn.outvars[0].aval.shape)


def _track_squeeze(eqn: Eqn, position: int, origin: Origin) -> Origin:
    gone = eqn.params["dimensions"]
    return origin.with_dims(held for axis, held in enumerate(origin.dims) if axis not in gone)


def _track_broadcast(eqn: Eqn, position: int, origin: Origin) -> Origin:
    dims: list[frozenset[int]] = [frozenset()] * len(eqn.params["shape"])
    for axis, target in enumerate(eqn.params["broadcast_dimensions"]):
        dims[target] = origin.dims[axis]
    return origin.with_dims(dims)


def _apply_broadcast(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    q, shape, axes = operands[0], eqn.params["shape"], eqn.params["broadcast_dimensions"]
    lined_up = [1] * len(shape)
    for axis, target in enumerate(axes):
        lined_up[target] = q.shape[axis]
    return q.reshape(lined_up).broadcast_to(shape)


def _apply_slice(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(start)
    return operands[0][tuple(slice(*part) for part in zip(start, limit, strides, strict=True))]


def _track_dynamic_slice(eqn: Eqn, position: int, origin: Origin) -> Origin | None:
    return origin if position == 0 else None


def _apply_dynamic_slice(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    q, *starts = operands
    return dynamic_slice(q, starts, eqn.params["slice_sizes"])


def _track_convert(eqn: Eqn, position: int, origin: Origin) -> Origin | None:
    return origin if jnp.issubdtype(eqn.params["new_dtype"], jnp.floating) else None


def _apply_convert(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[0].astype(eqn.params["new_dtype"])


def _track_mul(eqn: Eqn, position: int, origin: Origin) -> Origin | None:
    return origin if eqn.invars[1 - position].aval.ndim == 0 else None


def _apply_mul(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    q, factor = operands[position], operands[1 - position]
    return q.scaled(factor)


def _track_div(eqn: Eqn, position: int, origin: Origin) -> Origin | None:
    return _track_mul(eqn, position, origin) if position == 0 else None


def _apply_div(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    q, divisor = operands
    return q.map_scale(lambda scale: scale / jnp.asarray(divisor, scale.dtype))


_UNCHANGED = View(_same, _identity)

VIEWS: dict[str, View] = {
    "broadcast_in_dim": View(_track_broadcast, _apply_broadcast),
    "convert_element_type": View(_track_convert, _apply_convert),
    "copy": _UNCHANGED,
    "div": View(_track_div, _apply_div),
    "dynamic_slice": View(_track_dynamic_slice, _apply_dynamic_slice),
    "mul": View(_track_mul, _apply_mul),
    "reshape": View(_track_reshape, _apply_reshape),
    "slice": View(_same, _apply_slice),
    "squeeze": View(_track_squeeze, _apply_reshape),
    "stop_gradient": _UNCHANGED,
    "transpose": View(_track_transpose, _apply_transpose),
}
