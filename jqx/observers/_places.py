"""Where the elements of a weight stand in what its sites multiply by."""

import dataclasses
from typing import Any

import jax

from ._observer import ObservedSite, Observer


@dataclasses.dataclass(frozen=True)
class Places(Observer):
    """Says for each element of the matrix that a site multiplies by which element of its weight it
    is: int32 `[*loops, *batch, rows, channels]`, numbers in the order of the weight, the last axis
    the fastest. Rows are what the product keeps, channels those of `hessian`. Where several weights
    are joined, those of one are numbered behind those of another, in the order of `plan.weights`.
    Weights have no entry where they are of no product of matrices, inside of a `shard_map`, or read
    at a place that is computed.

    It depends on the function, not on values: an algorithm that works on the matrices of sites
    writes to the weight by it, through any views.
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
