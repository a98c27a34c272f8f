"""Weights that are partitioned over devices: shardings of parameters, weights that are gathered as
codes, and products whose contracted axis is split.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ..checks import as_dtype, check_real
from ..compat import Eqn, has_explicit_axes
from ..contractions.problem import Pending, quantize_pending
from ..errors import fail
from ..tensor.segments import without_stack
from ..tensor.shardings import names_of, partition_specs, sharding_of, shardings_of
from .paths import by_argument
from .plan import Operand, Plan, Site
from .rules import CONTRACTIONS
from .trace import is_quantized

# Shardings of parameters: those of a model's arrays become those of QTensors.


LeafSharding = Sharding | PartitionSpec | None
"""The sharding of an array; `None` means unspecified."""


def is_sharding(x: Any) -> bool:
    """Whether a node of a tree of shardings is a leaf."""
    return x is None or isinstance(x, (PartitionSpec, Sharding))


def as_sharding_of_leaf(function: str, sharding: Any, mesh: Mesh | None, path: str) -> LeafSharding:
    """Returns the sharding of a leaf, after checking its type; a PartitionSpec is put on `mesh`."""
    if not is_sharding(sharding):
        problem = f"the entry for {path!r} is not a sharding."
        details = f"an object of type {type(sharding).__name__}"
        fix = "pass a NamedSharding, a PartitionSpec or None in place of each array of the tree."
        raise fail(function, problem, given=details, fix=fix, error=TypeError)
    if mesh is None or not isinstance(sharding, PartitionSpec):
        return sharding
    return NamedSharding(mesh, sharding)


def as_sharding(function: str, sharding: Any, path: str) -> Sharding | None:
    """Returns the sharding of a leaf; a PartitionSpec is put on the current mesh."""
    resolved = as_sharding_of_leaf(function, sharding, None, path)
    if not isinstance(resolved, PartitionSpec):
        return resolved
    mesh_sizes(function, resolved, path)
    return NamedSharding(jax.sharding.get_mesh(), resolved)


def mesh_sizes(function: str, spec: PartitionSpec, path: str) -> dict[str, int]:
    """Returns the sizes of the axes of the current mesh; raises if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        problem = f"the mesh along whose axes {path!r} is partitioned is not known: {spec}."
        fix = "pass NamedShardings, or call it in `with jax.set_mesh(mesh):`."
        raise fail(function, problem, fix=fix)
    return dict(mesh.shape)


@dataclasses.dataclass(frozen=True)
class WeightShardings:
    """The partitioning of weights.

    Attributes:
      by_path: shardings of weights by path; with explicit axes their types carry them.
      are_given: whether they were passed by the user.
    """

    by_path: Mapping[str, NamedSharding]
    are_given: bool

    def without(self, axes: Collection[str]) -> "WeightShardings":
        """Returns the partitioning after weights are gathered along some axes of the mesh."""

        def left(entry: Any) -> Any:
            return tuple(name for name in names_of(entry) if name not in axes) or None

        remaining = {
            path: NamedSharding(sharding.mesh, PartitionSpec(*map(left, sharding.spec)))
            for path, sharding in self.by_path.items()
        }
        return WeightShardings(remaining, self.are_given)

    def of(self, operand: Operand, x: Any) -> tuple[Any, list[Any]]:
        """Returns the mesh of an operand, if known, and the mesh axes along which each axis of the
        operand is partitioned.
        """
        array = x.x if isinstance(x, Pending) else x
        typed = sharding_of(array)
        if typed is not None and has_explicit_axes(typed.mesh):
            return typed.mesh, [*typed.spec, *[None] * (array.ndim - len(typed.spec))]
        sharding = self.by_path.get(operand.path) if operand.path is not None else None
        if sharding is None:
            return None, [None] * array.ndim
        entries = (*sharding.spec, *(None,) * 32)
        axes_of_parameter = operand.axes or tuple((axis,) for axis in range(array.ndim))
        if any(names_of(entries[axis]) for axes in axes_of_parameter for axis in axes[1:]):
            problem = f"the weight {operand.path!r} is partitioned along an axis that f merges."
            fix = "partition another axis, or leave out partial_dtype and gather_axes."
            raise fail("convert", problem, given=f"{sharding.spec}", fix=fix)
        return sharding.mesh, [entries[axes[0]] if axes else None for axes in axes_of_parameter]


def weight_shardings(
    function: str, plan: Plan, shardings: Any, params: Mapping[str | None, Any]
) -> WeightShardings:
    """Returns the partitioning of the weights of a plan.

    Args:
      function: name of the calling function, for messages.
      plan: the plan of the function.
      shardings: the argument of `convert`; `None` if the arrays carry their shardings.
      params: the leaves of the call by path.
    """
    if shardings is None:
        by_path = {path: sharding_of(leaf) for path, leaf in params.items()}
    else:
        tree = by_argument(plan.params, shardings)
        by_path = {
            name: as_sharding(function, sharding, name)
            for name, sharding in plan.parameters.named(function, tree, is_sharding)
            if name is not None
        }
    weights = [weight.path for weight in plan.weights]  # a part has the sharding of the whole
    shardings_of_weights = {
        path: by_path.get(path, by_path.get(plan.whole_of(path))) for path in weights
    }
    named_shardings = {
        path: sharding
        for path, sharding in shardings_of_weights.items()
        if isinstance(sharding, NamedSharding)
    }
    return WeightShardings(named_shardings, shardings is not None)


# Weights partitioned along the same axes as the rows (FSDP), gathered as codes and scales.
#
# If the rows and a weight are partitioned along the same axes of a mesh, a compiler gathers the
# weight before the product. If its scales are in blocks, the compiler gathers dequantized floats.


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Mesh axes along which weights are gathered where a contraction reads them.

    Attributes:
      places: how weights are partitioned.
      left: how they are partitioned after they are gathered.
    """

    places: WeightShardings
    left: WeightShardings

    def weight(self, operand: Operand, x: Any) -> Any:
        """Returns a QTensor with its codes and scales on all devices along the axes; other values
        are unchanged.
        """
        if operand.role != "weight" or not is_quantized(x):
            return x
        (mesh, entries), (_, left) = self.places.of(operand, x), self.left.of(operand, x)
        if [*map(names_of, entries)] == [*map(names_of, left)]:
            return x
        sharding = NamedSharding(mesh, PartitionSpec(*left))
        return jax.lax.with_sharding_constraint(x, shardings_of("convert", x, sharding))


def gathered(function: str, axes: Any, shardings: WeightShardings) -> Gathered | None:
    """Returns the axes along which weights are gathered; `None` if the compiler decides."""
    if axes is None:
        return None
    names = (axes,) if isinstance(axes, str) else axes
    is_names = isinstance(names, tuple) and all(isinstance(name, str) for name in names)
    meshes = [sharding.mesh for sharding in shardings.by_path.values()]
    mesh_axes = {
        name
        for sharding in shardings.by_path.values()
        if not has_explicit_axes(sharding.mesh)
        for entry in sharding.spec
        for name in names_of(entry)
    }
    if not (is_names and bool(names) and mesh_axes.issuperset(names)):
        problem = "`gather_axes` are not axes along which weights are partitioned."
        details = f"gather_axes == {axes!r}, and weights are partitioned along {sorted(mesh_axes)}"
        details += ", according to their types" if any(map(has_explicit_axes, meshes)) else ""
        fix = "pass shardings= of the float weights, or leave it out; with explicit axes call "
        fix += "jax.sharding.reshard(w, ...) in the function."
        raise fail(function, problem, given=details, fix=fix)
    return Gathered(shardings, shardings.without(names))


# Products whose contracted axis is split over several devices: each device scales its part of the
# sum before the parts are added, in a dtype that the user chooses.
#
# A compiler that partitions a product of integers adds the int32 sums of the devices, four bytes an
# element. If they are scaled first, the parts are as small as the dtype in which they are added.


@dataclasses.dataclass(frozen=True)
class PartialSums:
    """The dtype in which parts of sums are added, and the partitioning of weights.

    Attributes:
      dtype: dtype of the parts.
      places: how weights are partitioned.
    """

    dtype: Any
    places: WeightShardings

    def contract(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> jax.Array | None:
        """Returns the product of a site with its parts added in `dtype`; `None` without parts."""
        if eqn.primitive.name != "dot_general":
            return None
        family = CONTRACTIONS[eqn.primitive.name]
        sides = [without_stack(x) for x in operands]
        specs = list(map(self.places.of, site.operands, sides))
        mesh = next((mesh for mesh, _ in specs if mesh is not None), None)
        if mesh is None:
            return None
        (_, left), (_, right) = specs
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
        settled_sides = list(map(quantize_pending, sides))
        free = [left[axis] for axis in (*lhs.batch, *_without(lhs.kept, lhs.batch))]
        free += [right[axis] for axis in _without(rhs.kept, rhs.batch)]

        def part(*parts: Any) -> jax.Array:
            y = family.apply(eqn, parts)
            return _sum(y.astype(self.dtype), tuple(names)).astype(y.dtype)

        parted = jax.shard_map(
            part,
            mesh=mesh,
            in_specs=tuple(
                _specs(x, e, mesh) for x, e in zip(settled_sides, (left, right), strict=True)
            ),
            out_specs=PartitionSpec(*free),
            axis_names=set(mesh.axis_names) if explicit else set(names),
        )
        y = jax.jit(parted)(*settled_sides)
        return jax.sharding.reshard(y, eqn.outvars[0].aval.sharding) if explicit else y


def partial_sums(function: str, dtype: Any, shardings: WeightShardings) -> PartialSums | None:
    """Returns how parts of sums are added; `None` if the compiler decides.

    Args:
      function: name of the calling function, for messages.
      dtype: dtype in which parts are added, or `None`.
      shardings: how weights are partitioned.
    """
    if dtype is None:
        return None
    kind = as_dtype(function, "partial_dtype", dtype)
    check_real(function, "`partial_dtype`", kind)
    if not any(any(map(names_of, sharding.spec)) for sharding in shardings.by_path.values()):
        problem = "`partial_dtype` has no effect: no weight is known to be partitioned."
        details = f"partial_dtype == {kind.name}, "
        details += "no shardings of partitioned weights" if shardings.are_given else "no shardings"
        fix = "pass shardings=jax.tree.map(lambda x: x.sharding, float_params), or leave it out."
        raise fail(function, problem, given=details, fix=fix)
    return PartialSums(kind, shardings)


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
