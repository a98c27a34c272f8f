"""Weights partitioned along the same axes as the rows (FSDP), gathered as codes and scales.

If the rows and a weight are partitioned along the same axes of a mesh, a compiler gathers the
weight before the product. If its scales are in blocks, the compiler gathers dequantized floats.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .._compat import has_explicit_axes
from .._errors import fail
from ..tensor._shared import names_of, shardings_of
from ._site import Operand
from ._trace import is_quantized
from ._weight_places import WeightPlaces


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Mesh axes along which weights are gathered where a contraction reads them.

    Attributes:
      places: how weights are partitioned.
      left: how they are partitioned after they are gathered.
    """

    places: WeightPlaces
    left: WeightPlaces

    def weight(self, operand: Operand, x: Any) -> Any:
        """Returns a QTensor with its codes and scales on all devices along the axes; other values
        are unchanged.
        """
        if operand.role != "weight" or not is_quantized(x):
            return x
        (mesh, entries), (_, left) = self.places.of(operand, x), self.left.of(operand, x)
        if [*map(names_of, entries)] == [*map(names_of, left)]:
            return x
        place = NamedSharding(mesh, PartitionSpec(*left))
        return jax.lax.with_sharding_constraint(x, shardings_of("convert", x, place))


def gathered(function: str, axes: Any, places: WeightPlaces) -> Gathered | None:
    """Returns the axes along which weights are gathered; `None` if the compiler decides."""
    if axes is None:
        return None
    names = (axes,) if isinstance(axes, str) else axes
    is_names = isinstance(names, tuple) and all(isinstance(name, str) for name in names)
    meshes = [place.mesh for place in places.known.values()]
    own = {
        name
        for place in places.known.values()
        if not has_explicit_axes(place.mesh)
        for entry in place.spec
        for name in names_of(entry)
    }
    if not (is_names and bool(names) and own.issuperset(names)):
        raise fail(
            function,
            "`gather_axes` are not axes along which weights are partitioned.",
            given=f"gather_axes == {axes!r}, and weights are partitioned along {sorted(own)}"
            + (", according to their types" if any(map(has_explicit_axes, meshes)) else ""),
            expected="the name of a mesh axis, or a tuple of names, along which the compiler "
            "partitions weights, according to shardings=",
            fix="pass shardings=jax.tree.map(lambda x: x.sharding, float_params), or leave it out; "
            "with explicit axes call jax.sharding.reshard(w, ...) in the function.",
        )
    return Gathered(places, places.without(names))
