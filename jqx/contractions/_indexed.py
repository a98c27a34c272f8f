"""`lax.gather` and `lax.scatter` on QTensors: scales are read and written in step with values.

Along an axis that shares one scale there is one entry, with index 0. Along an axis with blocks, a
slice must take the whole axis.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..calibrators import Affine, Groups
from ..numerics._shared import bit_width
from ..tensor import QTensor
from ..tensor._shared import refine
from ._cache import spec_like, values_as

FILL = lax.GatherScatterMode.FILL_OR_DROP


def gathered(q: QTensor, indices: jax.Array, **options: Any) -> QTensor | None:
    """Returns the result of `lax.gather`, still quantized; `None` if the scale cannot follow.

    Elements out of bounds are NaN if NaN is the fill value.
    """
    sizes, numbers = options["slice_sizes"], options["dimension_numbers"]
    indexed, fill = numbers.start_index_map, options.pop("fill_value", None)
    fills = options["mode"] == FILL
    known = fill is None or (isinstance(fill, float) and np.isnan(fill))
    own = (*numbers.operand_batching_dims, *(indexed if fills else ()))
    q = _with_own_scales(q.unpack(), own)
    entries = _entries(q.groups, sizes)
    nested = isinstance(q.scale, QTensor) or isinstance(q.offset, QTensor)
    if nested or q.order is not None or entries is None or (fills and not known):
        return None
    shared = [axis for axis in indexed if q.scale.shape[axis] == 1 != q.shape[axis]]
    places = _on_entries(indices, indexed, shared)

    def take(parameter: jax.Array) -> jax.Array:
        whole = jnp.broadcast_to(parameter, q.scale.shape)
        return lax.gather(whole, places, **{**options, "slice_sizes": entries})

    values = lax.gather(q.values, indices, fill_value=0 if fills else None, **options)
    return dataclasses.replace(q.map_parameters(take), values=values)


def scattered(q: QTensor, indices: jax.Array, updates: jax.Array, **options: Any) -> QTensor | None:
    """Returns a QTensor with windows overwritten by `lax.scatter`; `None` if the scale cannot
    follow.

    The written elements are quantized with new scales if a window holds all elements that share a
    scale, or with the scale of the whole tensor if it has only one.
    """
    numbers, like, q = options["dimension_numbers"], q, q.unpack()
    if isinstance(q.scale, QTensor) or q.offset is not None or q.order is not None:
        return None
    alone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [axis for axis in range(q.ndim) if axis not in alone]
    window, groups = [1] * q.ndim, [1] * updates.ndim
    for axis, at in zip(kept, numbers.update_window_dims, strict=True):
        window[axis] = updates.shape[at]
        groups[at] = min(q.groups.sizes[axis], updates.shape[at])
    shared = [i for i, (m, n) in enumerate(zip(q.scale.shape, q.shape, strict=True)) if m == 1 != n]
    one = len(shared) == sum(n != 1 for n in q.shape)
    cut = any(window[axis] != q.shape[axis] for axis in shared)
    if _entries(q.groups, window) is None or (cut and not one):
        return None
    if one:
        spec = spec_like(q, Groups(updates.shape, updates.shape))
        new = QTensor.quantize(updates.astype(q.dtype), spec, _reshaped(q, updates.ndim))
        written = q
    else:
        new = QTensor.quantize(
            updates.astype(q.dtype), spec_like(q, Groups(updates.shape, tuple(groups)))
        )
        places = _on_entries(indices, numbers.scatter_dims_to_operand_dims, shared)

        def put(parameter: Any, entry: Any) -> Any:
            target = jnp.broadcast_to(parameter, q.scale.shape)
            return lax.scatter(target, places, entry.astype(target.dtype), **options)

        if new.zero_point is not None and (
            q.zero_point is None or q.zero_point.shape != q.scale.shape
        ):
            return None
        zero_point = None if q.zero_point is None else put(q.zero_point, new.zero_point)
        written = dataclasses.replace(q, scale=put(q.scale, new.scale), zero_point=zero_point)
    codes = _in_bytes(q.values, indices, new.values, options)
    written = dataclasses.replace(written, values=codes)
    return dataclasses.replace(written, values=values_as(written, like), layout=like.layout)


def _reshaped(q: QTensor, rank: int) -> Affine:
    """Returns the single scale of a tensor for an array of another rank."""
    own, scale = (1,) * rank, q.real_scale()
    return Affine(scale.reshape(own), None if q.zero_point is None else q.zero_point.reshape(own))


def _in_bytes(x: jax.Array, indices: jax.Array, updates: jax.Array, options: Any) -> jax.Array:
    """Scatters codes; integers of less than 8 bits are scattered as bytes."""
    dtype = x.dtype
    if not jnp.issubdtype(dtype, jnp.integer) or bit_width(dtype) >= 8:
        return lax.scatter(x, indices, updates, **options)
    wide = jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
    written = lax.scatter(x.astype(wide), indices, updates.astype(wide), **options)
    return written.astype(dtype)


def _with_own_scales(q: QTensor, axes: Sequence[int]) -> QTensor:
    """Gives each index of some axes its own scale."""
    for axis in axes:
        q = refine(q, axis) if q.scale.shape[axis] != q.shape[axis] else q
    return q


def _entries(groups: Groups, sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the size of a slice of the scale; `None` if the slice of the values cuts blocks."""
    found = []
    for n, b, m, size in zip(groups.shape, groups.sizes, groups.scale_shape, sizes, strict=True):
        if m not in (1, n) and size != n:
            return None
        found.append(size if m == n and b == 1 else m)
    return tuple(found)


def _on_entries(indices: jax.Array, axes: Sequence[int], shared: Sequence[int]) -> jax.Array:
    """Returns the indices of the entries of the scale: 0 along axes that share one."""
    kept = np.array([axis not in shared for axis in axes])
    lined_up = kept.reshape((1,) * (indices.ndim - 1) + (-1,))
    return jnp.where(lined_up, indices, jnp.zeros_like(indices))
