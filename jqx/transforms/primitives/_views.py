"""View primitives: a weight passes through them quantized, together with its scale."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._checks import is_real
from ..._compat import Eqn
from ...contractions import dynamic_slice
from ...tensor import QTensor
from ...tensor._shared import axis_groups
from .._origin import Origin
from ._shardings import SHARDINGS
from ._view import Known, View, of_one, same, starts_of


def _identity(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[position]


def _track_transpose(eqn: Eqn, position: int, origin: Origin) -> Origin:
    return origin.with_dims(origin.dims[axis] for axis in eqn.params["permutation"])


def _apply_transpose(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[0].transpose(eqn.params["permutation"])


def _track_reshape(eqn: Eqn, position: int, origin: Origin) -> Origin | None:
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    order = _read_order(eqn)
    before = [origin.dims[axis] for axis in order]
    dims: list[frozenset[int]] = [frozenset()] * len(new)
    merged = set(origin.merged)
    for sources, targets in axis_groups([old[axis] for axis in order], new):
        held = frozenset().union(*(before[i] for i in sources))
        for j in targets:
            dims[j] = held
        if len(held) > 1:
            merged.add(held)
    return dataclasses.replace(origin, dims=tuple(dims), merged=frozenset(merged))


def _read_order(eqn: Eqn) -> Sequence[int]:
    """Returns the order in which a reshape reads the axes, which `vmap` may have transposed."""
    given = eqn.params["dimensions"]
    return range(eqn.invars[0].aval.ndim) if given is None else given


def _apply_reshape(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[0].transpose(_read_order(eqn)).reshape(eqn.outvars[0].aval.shape)


def _track_squeeze(eqn: Eqn, position: int, origin: Origin) -> Origin:
    gone = eqn.params["dimensions"]
    return origin.with_dims(held for axis, held in enumerate(origin.dims) if axis not in gone)


def _apply_squeeze(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[0].reshape(eqn.outvars[0].aval.shape)


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
    parts = list(zip(start, limit, strides, strict=True))
    wholes = [(0, n, 1) for n in eqn.invars[0].aval.shape]  # sizes may be symbolic
    pairs = zip(parts, wholes, strict=True)
    return operands[0][tuple(slice(None) if a == b else slice(*a) for a, b in pairs)]


def _track_dynamic_slice(eqn: Eqn, position: int, origin: Origin) -> Origin | None:
    return origin if position == 0 else None


def _apply_dynamic_slice(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    q, *starts = operands
    return dynamic_slice(q, starts_of(starts), eqn.params["slice_sizes"])


def _track_convert(eqn: Eqn, position: int, origin: Origin) -> Origin | None:
    old, new = eqn.invars[position].aval.dtype, eqn.params["new_dtype"]
    if not jnp.issubdtype(new, jnp.floating):
        return None
    rounds = is_real(old) and not is_real(new)
    return dataclasses.replace(origin, cast=jnp.dtype(new).name) if rounds else origin


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


def _apply_neg(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[0].scaled(-1)


def _apply_rev(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    flipped = eqn.params["dimensions"]
    q = operands[0]
    return q[tuple(slice(None, None, -1 if axis in flipped else 1) for axis in range(q.ndim))]


def _apply_split(eqn: Eqn, position: int, operands: Sequence[Any]) -> list[QTensor]:
    ends = [int(end) for end in itertools.accumulate(eqn.params["sizes"])]
    return operands[0].split(ends[:-1], eqn.params["axis"])


def _track_unstack(eqn: Eqn, position: int, origin: Origin) -> Origin:
    gone = eqn.params["axis"]
    return origin.with_dims(held for axis, held in enumerate(origin.dims) if axis != gone)


def _apply_unstack(eqn: Eqn, position: int, operands: Sequence[Any]) -> list[QTensor]:
    q, lead = operands[0], (slice(None),) * eqn.params["axis"]
    return [q[(*lead, i)] for i in range(len(eqn.outvars))]


def _apply_tile(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    q = operands[0]
    for axis, times in enumerate(eqn.params["reps"]):
        q = QTensor.concatenate([q] * times, axis) if times != 1 else q
    return q


def _track_concatenate(eqn: Eqn, known: Known) -> Known:
    return [Origin.joined(known)]


def _apply_concatenate(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
    return [QTensor.concatenate(operands, eqn.params["dimension"])]


def _track_stack(eqn: Eqn, known: Known) -> Known:
    origin, at = Origin.joined(known), eqn.params["axis"]
    if origin is None:
        return [None]
    new: frozenset[int] = frozenset()
    return [origin.through(lambda x: x.with_dims((*x.dims[:at], new, *x.dims[at:])))]


def _apply_stack(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
    return [QTensor.stack(operands, eqn.params["axis"])]


_UNCHANGED = of_one(same, _identity)
_EACH = View(lambda eqn, known: known, lambda eqn, operands: list(operands))
"""A view with as many results as operands, each unchanged."""

VIEWS: dict[str, View] = {
    "broadcast_in_dim": of_one(_track_broadcast, _apply_broadcast),
    "concatenate": View(_track_concatenate, _apply_concatenate),
    "convert_element_type": of_one(_track_convert, _apply_convert),
    "copy": _UNCHANGED,
    "div": of_one(_track_div, _apply_div),
    "dynamic_slice": of_one(_track_dynamic_slice, _apply_dynamic_slice),
    "layout_constraint": _UNCHANGED,
    "mul": of_one(_track_mul, _apply_mul),
    "name": _UNCHANGED,
    "neg": of_one(same, _apply_neg),
    "optimization_barrier": _EACH,
    "reshape": of_one(_track_reshape, _apply_reshape),
    "rev": of_one(same, _apply_rev),
    "slice": of_one(same, _apply_slice),
    "split": of_one(same, _apply_split),
    "squeeze": of_one(_track_squeeze, _apply_squeeze),
    "stack": View(_track_stack, _apply_stack),
    "stop_gradient": _UNCHANGED,
    "tile": of_one(same, _apply_tile),
    "transpose": of_one(_track_transpose, _apply_transpose),
    "unstack": of_one(_track_unstack, _apply_unstack),
    "xla_metadata_value": _UNCHANGED,
    **SHARDINGS,
}
