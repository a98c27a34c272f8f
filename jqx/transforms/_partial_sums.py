"""Products whose contracted axis is split over several devices: each device scales its part of the
sum before the parts are added, in a dtype that the user chooses.

A compiler that partitions a product of integers adds the int32 sums of the devices, four bytes an
element. If they are scaled first, the parts are as small as the dtype in which they are added.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from .._checks import as_dtype, check_real
from .._compat import Eqn, has_explicit_axes
from .._errors import fail
from ..contractions._shared import Pending
from ..tensor._shared import alone, names_of, partition_specs
from ._site import Site
from ._trace import is_quantized
from ._weight_places import WeightPlaces
from .primitives import CONTRACTIONS


@dataclasses.dataclass(frozen=True)
class PartialSums:
    """The dtype in which parts of sums are added, and the partitioning of weights.

    Attributes:
      dtype: dtype of the parts.
      places: how weights are partitioned.
    """

    dtype: Any
    places: WeightPlaces

    def contract(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> jax.Array | None:
        """Returns the product of a site with its parts added in `dtype`; `None` without parts."""
        if eqn.primitive.name != "dot_general":
            return None
        family = CONTRACTIONS[eqn.primitive.name]
        sides = [alone(x) for x in operands]
        found = list(map(self.places.of, site.operands, sides))
        mesh = next((mesh for mesh, _ in found if mesh is not None), None)
        if mesh is None:
            return None
        (_, left), (_, right) = found
        lhs, rhs = family.axes(eqn)
        pairs = list(zip(lhs.contracted, rhs.contracted, strict=True))
        summed = [left[a] or right[b] for a, b in pairs]
        names = [name for entry in summed for name in names_of(entry)]
        if not names:
            return None
        for (a, b), entry in zip(pairs, summed, strict=True):
            left[a] = right[b] = entry
        explicit = has_explicit_axes(mesh)
        if not explicit:  # the compiler handles all but the contracted axes
            left = [entry if axis in lhs.contracted else None for axis, entry in enumerate(left)]
            right = [entry if axis in rhs.contracted else None for axis, entry in enumerate(right)]
        given = [x.quantized() if isinstance(x, Pending) else x for x in sides]
        free = [left[axis] for axis in (*lhs.batch, *_without(lhs.kept, lhs.batch))]
        free += [right[axis] for axis in _without(rhs.kept, rhs.batch)]

        def part(*parts: Any) -> jax.Array:
            y = family.apply(eqn, parts)
            return _sum(y.astype(self.dtype), tuple(names)).astype(y.dtype)

        parted = jax.shard_map(
            part,
            mesh=mesh,
            in_specs=tuple(_specs(x, e, mesh) for x, e in zip(given, (left, right), strict=True)),
            out_specs=PartitionSpec(*free),
            axis_names=set(mesh.axis_names) if explicit else set(names),
        )
        y = jax.jit(parted)(*given)
        return jax.sharding.reshard(y, eqn.outvars[0].aval.sharding) if explicit else y


def partial_sums(function: str, dtype: Any, places: WeightPlaces) -> PartialSums | None:
    """Returns how parts of sums are added; `None` if the compiler decides.

    Args:
      function: name of the calling function, for messages.
      dtype: dtype in which parts are added, or `None`.
      places: how weights are partitioned.
    """
    if dtype is None:
        return None
    kind = as_dtype(function, "partial_dtype", dtype)
    check_real(function, "`partial_dtype`", kind)
    if not any(any(map(names_of, place.spec)) for place in places.known.values()):
        raise fail(
            function,
            "`partial_dtype` has no effect: no weight is known to be partitioned.",
            given=f"partial_dtype == {jnp.dtype(kind).name}, "
            + ("no shardings of partitioned weights" if places.given else "no shardings"),
            expected="shardings of the weights, or arrays of a mesh with explicit axes",
            fix="pass shardings=jax.tree.map(lambda x: x.sharding, float_params), or leave it out.",
        )
    return PartialSums(kind, places)


def _specs(x: Any, entries: Sequence[Any], mesh: Any) -> Any:
    """Returns how an operand is partitioned: a QTensor of specs, or one spec."""
    spec = PartitionSpec(*entries)
    return partition_specs("convert", x, spec, dict(mesh.shape)) if is_quantized(x) else spec


def _sum(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Adds the parts of the devices. XLA on CPU (jaxlib 0.10.2) adds 16-bit values in 32 bits, but
    aborts the process if the compiler handles some axes of the mesh. So on CPU the conversion is
    explicit.
    """

    def in_float32(x: jax.Array) -> jax.Array:
        return lax.psum(x.astype(jnp.float32), names).astype(x.dtype)

    if x.dtype.itemsize > 2:
        return lax.psum(x, names)
    return lax.platform_dependent(x, cpu=in_float32, default=lambda x: lax.psum(x, names))


def _without(axes: Sequence[int], others: Sequence[int]) -> list[int]:
    return [axis for axis in axes if axis not in others]
