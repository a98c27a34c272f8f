"""The parameters of a function that runs stage by stage. Lazy leaves are read when a stage, or the
choice of their codes, needs them, and dropped when the next one needs others.
"""

from collections.abc import Collection
from typing import Any

import jax

from .. import _compat
from ..tensor._shared import Lazy


class Leaves:
    """The leaves of the parameters, by their index among the operands of the function.

    Args:
      given: the leaves, as they are at each stage; stored without a copy.
    """

    def __init__(self, given: dict[int, Any]):
        self._given = given
        self._held: dict[int, Any] = {}

    def some(self, places: Collection[int]) -> dict[int, Any]:
        """Returns some leaves as arrays, and drops the arrays of all other lazy leaves."""
        self._held = {i: x for i, x in self._held.items() if i in places}
        return {i: self._read(i) for i in sorted(places)}

    def write(self, place: int, where: Any, values: Any) -> None:
        """Writes values to some elements of a leaf. For a lazy leaf they are kept only until other
        leaves are read; the source of the leaf must return them when it is read again.
        """
        to = self._held if isinstance(self._given[place], Lazy) else self._given
        to[place] = _written(self._read(place), where, values)

    def _read(self, place: int) -> Any:
        leaf = self._given[place]
        if not isinstance(leaf, Lazy):
            return leaf
        if place not in self._held:
            self._held[place] = leaf.read()
        return self._held[place]


@jax.jit
def _written(x: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
    """Returns a parameter with new values at some elements."""

    def written(x: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
        return x.ravel().at[places].set(values.astype(x.dtype)).reshape(x.shape)

    return _compat.as_type_of(x, written, x, places, values)
