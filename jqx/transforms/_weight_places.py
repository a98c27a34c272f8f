"""Partitioning of weights: the mesh axes along which each axis of an operand is partitioned."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from .._compat import has_explicit_axes
from .._errors import fail
from ..contractions._shared import Pending
from ..tensor._shared import names_of, sharding_of
from ._param_shardings import as_sharding, is_place
from ._paths import flatten, rooted
from ._plan import Plan
from ._site import Operand


@dataclasses.dataclass(frozen=True)
class WeightPlaces:
    """The partitioning of weights.

    Attributes:
      known: shardings of weights by path; with explicit axes their types carry them.
      given: whether they were passed by the user.
    """

    known: Mapping[str, NamedSharding]
    given: bool

    def without(self, axes: Collection[str]) -> "WeightPlaces":
        """Returns the partitioning after weights are gathered along some axes of the mesh."""

        def left(entry: Any) -> Any:
            return tuple(name for name in names_of(entry) if name not in axes) or None

        known = {
            path: NamedSharding(place.mesh, PartitionSpec(*map(left, place.spec)))
            for path, place in self.known.items()
        }
        return WeightPlaces(known, self.given)

    def of(self, operand: Operand, x: Any) -> tuple[Any, list[Any]]:
        """Returns the mesh of an operand, if known, and the mesh axes along which each axis of the
        operand is partitioned.
        """
        array = x.x if isinstance(x, Pending) else x
        typed = sharding_of(array)
        if typed is not None and has_explicit_axes(typed.mesh):
            return typed.mesh, [*typed.spec, *[None] * (array.ndim - len(typed.spec))]
        place = self.known.get(operand.path) if operand.path is not None else None
        if place is None:
            return None, [None] * array.ndim
        entries = (*place.spec, *(None,) * 32)
        held = operand.axes or tuple((axis,) for axis in range(array.ndim))
        if any(names_of(entries[axis]) for axes in held for axis in axes[1:]):
            raise fail(
                "convert",
                f"the weight {operand.path!r} is partitioned along an axis that a reshape "
                "merges into another.",
                given=f"{place.spec}",
                expected="the first of the merged axes to be partitioned, or none",
                fix="partition another axis, or leave out partial_dtype and gather_axes.",
            )
        return place.mesh, [entries[axes[0]] if axes else None for axes in held]


def weight_places(
    function: str, plan: Plan, shardings: Any, params: Mapping[str | None, Any]
) -> WeightPlaces:
    """Returns the partitioning of the weights of a plan.

    Args:
      function: name of the calling function, for messages.
      plan: the plan of the function.
      shardings: the argument of `convert`; `None` if the arrays carry their shardings.
      params: the leaves of the call by path.
    """
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
    weights = [weight.path for weight in plan.weights]  # a part has the sharding of the whole
    own = {path: places.get(path, places.get(plan.whole_of(path))) for path in weights}
    known = {path: place for path, place in own.items() if isinstance(place, NamedSharding)}
    return WeightPlaces(known, shardings is not None)
