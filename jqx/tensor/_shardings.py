"""Shardings of parameters over devices: the arrays of a QTensor are sharded in step."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ._partition import check_parts, partition_specs
from ._qtensor import QTensor
from ._segments import Segments


def shardings_of(
    function: str,
    leaf: Any,
    sharding: Sharding | PartitionSpec,
    sizes: Mapping[str, int] | None = None,
    place: str = "",
) -> Any:
    """Returns a leaf with the sharding of each of its arrays in place of the array.

    Args:
      function: the caller, for messages.
      leaf: an array, a QTensor or Segments; its arrays may be `jax.ShapeDtypeStruct`.
      sharding: the sharding of its real array. The result has values of the same type. A sharding
        without axis names applies to all arrays.
      sizes: size of each axis of the mesh; not needed for a `NamedSharding`.
      place: path of the leaf, for messages.

    Raises:
      ValueError: a part is not a whole number of blocks or elements; or an axis along which codes
        are packed or permuted is partitioned.
    """
    if isinstance(leaf, Segments):
        parts = [shardings_of(function, part, sharding, sizes, place) for part in leaf.parts]
        return jax.tree.unflatten(jax.tree.structure(leaf), jax.tree.leaves(parts))
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        specs = shardings_of(function, leaf, sharding.spec, dict(mesh.shape), place)
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    if not isinstance(sharding, PartitionSpec):
        return jax.tree.map(lambda _: sharding, leaf)
    if isinstance(leaf, QTensor):
        return partition_specs(function, leaf, sharding, sizes or {}, place)
    check_parts(function, leaf, sharding, sizes or {}, place)
    return sharding


def put(function: str, leaf: Any, sharding: Sharding, place: str = "") -> Any:
    """Puts a leaf where its real array should be; arrays that are already there are not copied."""
    places = shardings_of(function, leaf, sharding, place=place)
    arrays = jax.tree.leaves(leaf)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
        return jax.tree.map(
            lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), leaf, places
        )
    if all(map(_compat.is_concrete, arrays)):
        return jax.tree.map(_placed, leaf, places)
    explicit = isinstance(sharding, NamedSharding) and sharding.mesh.are_all_axes_explicit
    move = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
    return move(leaf, places)


def _placed(x: Any, sharding: Sharding) -> jax.Array:
    """Puts an array on devices, also on those of other processes. Each process must have the whole
    array, or its part already in place.
    """
    known = x.sharding if isinstance(x, jax.Array) else None
    if sharding.is_fully_addressable or (known and not known.is_fully_addressable):
        return jax.device_put(x, sharding)
    values = np.asarray(x)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def sharding_of(x: Any) -> NamedSharding | None:
    """Returns how the real array of a leaf is partitioned over devices; `None` if it is not, or if
    it is a tracer whose type does not include a sharding.
    """
    if isinstance(x, Segments):
        found = sharding_of(x.parts[0])
        if found is None or len(found.spec) <= x.axis:
            return found
        entries = [None if n == x.axis else entry for n, entry in enumerate(found.spec)]
        return NamedSharding(found.mesh, PartitionSpec(*entries))
    if isinstance(x, QTensor):
        found = sharding_of(x.values)
        if found is None or x.layout is None or not x.layout.swapped:
            return found
        entries = (*found.spec, *(None,) * (x.values.ndim - len(found.spec)))
        return NamedSharding(found.mesh, PartitionSpec(*entries[:-2], *reversed(entries[-2:])))
    if not isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return None
    sharding = x.sharding if _compat.is_concrete(x) else _compat.explicit_sharding(x)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


def kept(function: str, given: Any, made: Any, place: str = "") -> Any:
    """Returns `made`, which was computed from `given`, with the sharding of `given`."""
    sharding = sharding_of(given)
    return made if sharding is None else put(function, made, sharding, place)
