"""Where parameters lie over devices: the shardings of a model's arrays become those of QTensors."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .._checks import require_that
from ..tensor._shared import shardings_of
from ._paths import flatten, path_of, rooted
from ._plan import Plan
from ._signature import parameter_of

Place = Sharding | PartitionSpec | None
"""Where an array lies; `None` says nothing."""


def is_place(x: Any) -> bool:
    """Whether a node of a tree of shardings is a leaf of it."""
    return x is None or isinstance(x, (PartitionSpec, Sharding))


def as_place(function: str, place: Any, mesh: Mesh | None, path: str) -> Place:
    """Returns where a leaf lies, after checking that it says so; on a mesh where there is one."""
    require_that(
        is_place(place),
        error=TypeError,
        function=function,
        problem=f"what stands for {path!r} is no sharding.",
        given=f"an object of type {type(place).__name__}",
        expected="a jax.sharding.NamedSharding, a jax.sharding.PartitionSpec, or None",
        mend="pass the tree of parameters with a sharding in the place of each array.",
    )
    if mesh is None or not isinstance(place, PartitionSpec):
        return place
    return NamedSharding(mesh, place)


def as_sharding(function: str, place: Any, path: str) -> Sharding | None:
    """Returns where a leaf lies as a sharding: a PartitionSpec on the mesh around."""
    found = as_place(function, place, None, path)
    if not isinstance(found, PartitionSpec):
        return found
    _check_mesh(function, found, path)
    return NamedSharding(jax.sharding.get_mesh(), found)


def of_leaf(function: str, place: Place, leaf: Any, path: str) -> Any:
    """Returns a leaf with a sharding in the place of each of its arrays; `None` stays.

    Raises:
      ValueError: a PartitionSpec stands alone, of a mesh that is not known; or see `shardings_of`.
    """
    if place is None:
        return None
    sizes = _check_mesh(function, place, path) if isinstance(place, PartitionSpec) else None
    return shardings_of(function, leaf, place, sizes, path)


def _check_mesh(function: str, spec: PartitionSpec, path: str) -> dict[str, int]:
    """Returns the sizes of the axes of the mesh around, after checking that there is one."""
    around = jax.sharding.get_abstract_mesh()
    require_that(
        not around.empty,
        error=ValueError,
        function=function,
        problem=f"the mesh whose axes {path!r} is partitioned along is not known.",
        given=f"{spec}",
        expected="a mesh: it says how many parts there are",
        mend="pass NamedShardings, or call it in `with jax.set_mesh(mesh):`.",
    )
    return dict(around.shape)


def floats_of(function: str, plan: Plan, tree: Any) -> Any:
    """Returns the parameters that a plan was made for, without numbers, in the form of a tree of
    shardings; leaves that are none of its parameters are what they are there.
    """
    own = rooted(plan.params, tree)
    flat = flatten(own, is_place)
    known = dict(map(parameter_of, plan.parameters.lines or ()))
    names = plan.parameters.name(function, [keys for keys, _ in flat])
    found = [known.get(name or "", place) for name, (_, place) in zip(names, flat, strict=True)]
    floats = jax.tree.unflatten(jax.tree.structure(own, is_leaf=is_place), found)
    return floats if isinstance(plan.params, int) else tuple(floats[n] for n in plan.params)


def of_params(function: str, tree: Any, params: Any, mesh: Mesh | None) -> Any:
    """Returns parameters with a sharding in the place of each array; leaves that are no arrays, and
    those of which nothing is said, are what `tree` has.
    """

    def at(keys: Any, place: Any, leaf: Any) -> Any:
        path = path_of(keys)
        found = as_place(function, place, mesh, path)
        return of_leaf(function, found, leaf, path) if hasattr(leaf, "shape") else found

    return jax.tree_util.tree_map_with_path(at, tree, params, is_leaf=is_place)
