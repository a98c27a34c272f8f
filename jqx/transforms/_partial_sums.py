"""Products whose contracted axis is on several devices: each scales its part of the sum before the
parts are added, in a dtype of the user's.

A compiler that parts a product of integers adds the int32 sums of the devices, four bytes an
element. Scaled first, the parts are as small as the dtype that they are added in.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._checks import as_dtype, check_real, require_that
from .._compat import Eqn
from ..contractions._shared import OnTheWay
from ..tensor._shared import alone, names_of, partition_specs, sharding_of
from ._param_shardings import as_sharding, is_place
from ._paths import flatten, rooted
from ._plan import Plan
from ._site import Operand, Site
from ._trace import is_quantized
from .primitives import CONTRACTIONS


@dataclasses.dataclass(frozen=True)
class PartialSums:
    """In which dtype parts of sums are added, and where weights lie.

    Attributes:
      dtype: of the parts.
      places: shardings of weights by path; in explicit sharding their types tell.
    """

    dtype: Any
    places: Mapping[str, NamedSharding]

    def contract(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> jax.Array | None:
        """Returns the product of a site with its parts added so; `None` where there are none."""
        if eqn.primitive.name != "dot_general":
            return None
        family = CONTRACTIONS[eqn.primitive.name]
        sides = [alone(x) for x in operands]
        found = list(map(self._entries_of, site.operands, sides))
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
        explicit = _is_explicit(mesh)
        if not explicit:  # all but the contracted axes are the compiler's
            left = [entry if axis in lhs.contracted else None for axis, entry in enumerate(left)]
            right = [entry if axis in rhs.contracted else None for axis, entry in enumerate(right)]
        given = [x.quantized() if isinstance(x, OnTheWay) else x for x in sides]
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

    def _entries_of(self, operand: Operand, x: Any) -> tuple[Any, list[Any]]:
        """Returns the mesh that an operand is known to be on, and by which of its axes each axis of
        the operand is partitioned.
        """
        array = x.x if isinstance(x, OnTheWay) else x
        typed = sharding_of(array)
        if typed is not None and _is_explicit(typed.mesh):
            return typed.mesh, [*typed.spec, *[None] * (array.ndim - len(typed.spec))]
        place = self.places.get(operand.path) if operand.path is not None else None
        if place is None:
            return None, [None] * array.ndim
        entries = (*place.spec, *(None,) * 32)
        held = operand.axes or tuple((axis,) for axis in range(array.ndim))
        require_that(
            not any(names_of(entries[axis]) for axes in held for axis in axes[1:]),
            error=ValueError,
            function="convert",
            problem=f"the weight {operand.path!r} is partitioned along an axis that a reshape "
            "merges into another.",
            given=f"{place.spec}",
            expected="the first of the merged axes to be partitioned, or none",
            mend="partition another axis, or leave out partial_dtype.",
        )
        return place.mesh, [entries[axes[0]] if axes else None for axes in held]


def partial_sums(
    function: str, plan: Plan, dtype: Any, shardings: Any, params: Any
) -> PartialSums | None:
    """Returns how parts of sums are added; `None` where a compiler decides it.

    Args:
      function: the caller, for messages.
      plan: of the function.
      dtype: that parts are added in, or `None`.
      shardings: where the weights lie, as the argument of `convert`; `None` where their types tell.
      params: the leaves of the call by path.
    """
    if dtype is None:
        require_that(
            shardings is None,
            error=ValueError,
            function=function,
            problem="`shardings` have no use.",
            given="shardings, and partial_dtype=None",
            expected="a dtype that parts of sums are added in, or no shardings",
            mend="pass partial_dtype=jnp.bfloat16, or leave shardings out: arrays keep theirs.",
        )
        return None
    kind = as_dtype(function, "partial_dtype", dtype)
    check_real(function, "`partial_dtype`", kind)
    if shardings is None:
        places = {path: sharding_of(leaf) for path, leaf in params.items()}
    else:
        flat = flatten(rooted(plan.params, shardings), is_place)
        names = plan.parameters.name(function, [keys for keys, _ in flat])
        pairs = zip(names, flat, strict=True)
        places = {
            name: as_sharding(function, place, name)
            for name, (_, place) in pairs
            if name is not None
        }
    known = {path: x for path, x in places.items() if isinstance(x, NamedSharding)}
    weights = {weight.path for weight in plan.weights}
    require_that(
        any(any(map(names_of, known[path].spec)) for path in weights & {*known}),
        error=ValueError,
        function=function,
        problem="`partial_dtype` has no use: no weight is partitioned, as far as is known.",
        given=f"partial_dtype == {jnp.dtype(kind).name}, "
        + ("no shardings" if shardings is None else "shardings of no partitioned weight"),
        expected="shardings of the weights, or arrays of a mesh with explicit axes",
        mend="pass shardings=jax.tree.map(lambda x: x.sharding, float_params), or leave it out.",
    )
    return PartialSums(kind, known)


def _specs(x: Any, entries: Sequence[Any], mesh: Any) -> Any:
    """Returns how an operand is partitioned: a QTensor of specs, or one spec."""
    spec = PartitionSpec(*entries)
    return partition_specs("convert", x, spec, dict(mesh.shape)) if is_quantized(x) else spec


def _sum(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Adds the parts of the devices. XLA on CPU (jaxlib 0.10.2) adds 16 bits in 32 bits, but ends
    the process where the axes of a mesh are the compiler's in part: there it is written out.
    """

    def in_float32(x: jax.Array) -> jax.Array:
        return lax.psum(x.astype(jnp.float32), names).astype(x.dtype)

    if x.dtype.itemsize > 2:
        return lax.psum(x, names)
    return lax.platform_dependent(x, cpu=in_float32, default=lambda x: lax.psum(x, names))


def _is_explicit(mesh: Any) -> bool:
    return AxisType.Explicit in mesh.axis_types


def _without(axes: Sequence[int], others: Sequence[int]) -> list[int]:
    return [axis for axis in axes if axis not in others]
