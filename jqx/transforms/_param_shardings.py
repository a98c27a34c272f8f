"""Shardings of parameters: those of a model's arrays become those of QTensors."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .._errors import fail
from ..tensor._shared import shardings_of
from ._paths import flatten, path_of, rooted
from ._plan import Plan
from ._signature import parameter_of

Place = Sharding | PartitionSpec | None
"""The sharding of an array; `None` means unspecified."""


def is_place(x: Any) -> bool:
    """Whether a node of a tree of shardings is a leaf of it."""
    return x is None or isinstance(x, (PartitionSpec, Sharding))


def as_place(function: str, place: Any, mesh: Mesh | None, path: str) -> Place:
    """Returns the sharding of a leaf, after checking its type; a PartitionSpec is put on `mesh`."""
    if not is_place(place):
        raise fail(
            function,
            f"the entry for {path!r} is not a sharding.",
            given=f"an object of type {type(place).__name__}",
            expected="a jax.sharding.NamedSharding, a jax.sharding.PartitionSpec, or None",
            fix="pass the tree of parameters with a sharding in the place of each array.",
            error=TypeError,
        )
    if mesh is None or not isinstance(place, PartitionSpec):
        return place
    return NamedSharding(mesh, place)


def as_sharding(function: str, place: Any, path: str) -> Sharding | None:
    """Returns the sharding of a leaf; a PartitionSpec is put on the current mesh."""
    found = as_place(function, place, None, path)
    if not isinstance(found, PartitionSpec):
        return found
    _check_mesh(function, found, path)
    return NamedSharding(jax.sharding.get_mesh(), found)


def of_leaf(function: str, place: Place, leaf: Any, path: str) -> Any:
    """Returns a leaf with a sharding in place of each of its arrays; `None` stays.

    Raises:
      ValueError: if a PartitionSpec is given and the mesh is not known; or see `shardings_of`.
    """
    if place is None:
        return None
    sizes = _check_mesh(function, place, path) if isinstance(place, PartitionSpec) else None
    return shardings_of(function, leaf, place, sizes, path)


def _check_mesh(function: str, spec: PartitionSpec, path: str) -> dict[str, int]:
    """Returns the sizes of the axes of the current mesh, after checking that there is one."""
    around = jax.sharding.get_abstract_mesh()
    if around.empty:
        raise fail(
            function,
            f"the mesh along whose axes {path!r} is partitioned is not known.",
            given=f"{spec}",
            expected="a mesh, which has the number of partitions",
            fix="pass NamedShardings, or call it in `with jax.set_mesh(mesh):`.",
        )
    return dict(around.shape)


def floats_of(function: str, plan: Plan, tree: Any) -> Any:
    """Returns the parameters that a plan was made for, as shapes and dtypes, in the form of a tree
    of shardings. Leaves that are not its parameters stay as they are.
    """
    own = rooted(plan.params, tree)
    flat = flatten(own, is_place)
    lines = map(parameter_of, plan.parameters.lines or ())
    known = {
        path: jax.ShapeDtypeStruct(shape, dtype)
        for path, dtype, shape in lines
        if not dtype.startswith("key<")  # random keys are no weights
    }
    names = plan.parameters.name(function, [keys for keys, _ in flat])
    found = [known.get(name or "", place) for name, (_, place) in zip(names, flat, strict=True)]
    floats = jax.tree.unflatten(jax.tree.structure(own, is_leaf=is_place), found)
    return floats if isinstance(plan.params, int) else tuple(floats[n] for n in plan.params)


def of_params(function: str, tree: Any, params: Any, mesh: Mesh | None) -> Any:
    """Returns parameters with a sharding in place of each array. Leaves that are not arrays, and
    those without a sharding, are taken from `tree`.
    """

    def at(keys: Any, place: Any, leaf: Any) -> Any:
        path = path_of(keys)
        found = as_place(function, place, mesh, path)
        return of_leaf(function, found, leaf, path) if hasattr(leaf, "shape") else found

    return jax.tree_util.tree_map_with_path(at, tree, params, is_leaf=is_place)
