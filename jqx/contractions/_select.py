"""Quantized arrays in the format of others: quantized from floats, or selected by element."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..calibrators import Affine
from ..tensor import QTensor
from ._bare import check_bare
from ._cache import check_zero_points, spec_like, values_as


def quantized_like(q: QTensor, x: jax.Array) -> QTensor:
    """Quantizes an array of the shape of a QTensor to its format, dtypes and layout, with new
    scales.
    """
    check_bare("select", q, what=", so nothing can be quantized to its format")
    new = QTensor.quantize(x.astype(q.dtype), spec_like(q, q.groups))
    scale: Any = new.scale
    if not isinstance(scale, QTensor):
        scale = scale.astype(q.scale.dtype)
    zero_point = new.zero_point
    check_zero_points(q, zero_point, q.zero_point)
    if zero_point is not None and q.zero_point is not None:
        zero_point = jnp.broadcast_to(zero_point, q.zero_point.shape)
    return dataclasses.replace(q, values=values_as(new, q), scale=scale, zero_point=zero_point)


def is_like(q: Any, other: Any) -> bool:
    """Whether two values have the same format, shape, granularity and layout."""

    def kind(x: Any) -> Any:
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(x)], jax.tree.structure(x)

    return kind(q) == kind(other)


def select(which: jax.Array, *cases: QTensor | jax.Array) -> QTensor | None:
    """Returns `lax.select_n(which, *cases)` of the real values, in the format of the QTensors among
    the cases; `None` if their formats differ.

    Elements that share a scale keep the scale and their codes if they come from one case, or from
    cases with the same scale; elements of an array are quantized with that scale. Otherwise they
    are quantized together with a new scale, as are elements that come from an array only.
    """
    like = next(case for case in cases if isinstance(case, QTensor))
    tensors = {i: case for i, case in enumerate(cases) if isinstance(case, QTensor)}
    if not all(is_like(like, case) for case in tensors.values()):
        return None
    if which.ndim == 0:
        both = [x if isinstance(x, QTensor) else quantized_like(like, x) for x in cases]
        return jax.tree.map(lambda *leaves: lax.select_n(which, *leaves), *both)
    if isinstance(like.scale, QTensor) or like.offset is not None or like.order is not None:
        return None
    real = [x.dequantize() if isinstance(x, QTensor) else x.astype(like.dtype) for x in cases]
    chosen = lax.select_n(which, *real)
    groups, place = like.groups, which.astype(jnp.int32)
    found = quantized_like(like, chosen)
    lowest, highest = groups.reduce(jnp.min, place, len(cases)), groups.reduce(jnp.max, place, 0)
    several = lowest != highest
    grid = (found.scale, found.zero_point)
    grid = _where(several & _all([_same(x, like) for x in tensors.values()]), _grid(like), grid)
    for i, case in tensors.items():
        grid = _where(~several & (lowest == i), _grid(case), grid)
    new = QTensor.quantize(chosen, spec_like(like, groups), Affine(*grid))
    values, shape = new.values, groups.split(place).shape
    for i, case in tensors.items():
        kept = groups.split_scale(_same(case, new))
        taken = groups.join(jnp.broadcast_to(kept, shape)) & (place == i)
        values = jnp.where(taken, case.unpack().values, values)
    new = dataclasses.replace(new, values=values)
    return dataclasses.replace(new, values=values_as(new, like), layout=like.layout)


def _grid(q: QTensor) -> tuple[Any, Any]:
    return q.scale, q.zero_point


def _where(mask: jax.Array, x: Any, y: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(mask, a, b), x, y)


def _all(masks: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.logical_and, masks)


def _same(q: QTensor, other: QTensor) -> jax.Array:
    """Returns where two tensors have the same scale and zero point."""
    both = zip(jax.tree.leaves(_grid(q)), jax.tree.leaves(_grid(other)), strict=True)
    return _all([a == b for a, b in both])
