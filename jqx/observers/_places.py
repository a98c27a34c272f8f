"""The positions of a weight's elements in the matrices that its sites multiply by."""

import dataclasses
from typing import Any

import jax

from ._observer import ObservedSite, Observer


@dataclasses.dataclass(frozen=True)
class Places(Observer):
    """Maps each element of the matrix that a site multiplies by to an element of its weight: int32
    `[*loops, *batch, rows, channels]`. Elements are numbered in the order of the weight, with the
    last axis fastest. Rows are the axes that the product keeps, channels are those of `hessian`. If
    several weights are joined, they are numbered consecutively, in the order of `plan.weights`.
    Weights have no entry if they are not in a product of matrices, are inside a `shard_map`, or are
    read at a computed position.

    The result depends on the function, not on values. An algorithm that works on the matrices of
    sites uses it to write to the weight through any views.
    """

    def looks_at(self, site: ObservedSite) -> bool:
        """Whether the operand is a weight."""
        return site.role == "weight"

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> Any:
        """Not called: `calibrate` follows the views of the function."""
        raise NotImplementedError

    def observe(self, x: jax.Array, site: ObservedSite) -> Any:
        """Not called: `calibrate` follows the views of the function."""
        raise NotImplementedError

    def merge(self, a: Any, b: Any) -> Any:
        """Returns the first: both are the same."""
        return a


places: Places = Places()
