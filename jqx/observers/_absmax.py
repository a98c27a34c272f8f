"""The largest magnitude of each channel."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._channels import added, count_rows, no_rows, over_rows, shape_of
from ._observer import ObservedSite, serializable
from ._weighted import Weighted


@serializable
class AbsMaxStats(NamedTuple):
    """The largest magnitude of each channel, and the number of rows.

    Attributes:
      largest: float32, with the rank of the operand and size 1 along the axes that are neither
        contracted nor stacked; for a `ragged_dot` `[experts, channels]`.
      rows: number of rows seen, as in `MeanStats`.
    """

    largest: jax.Array
    rows: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsMax(Weighted):
    """The largest magnitude of each channel of an activation that is multiplied by a weight, over
    the rows whose weight is above 0.

    A NaN makes the result of its channel NaN. The rows of a convolution are pixels, and a group has
    some of the channels. A row of a `ragged_dot` counts for the expert that it reaches.
    """

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> AbsMaxStats:
        """Returns magnitudes of 0."""
        largest = jnp.zeros(shape_of(operand, site), jnp.float32)
        return AbsMaxStats(largest, no_rows(operand, site, self.weight is not None))

    def observe(self, x: jax.Array, site: ObservedSite) -> AbsMaxStats:
        """Returns the largest magnitudes of the rows of one operand."""
        return AbsMaxStats(over_rows(jnp.abs(x), site, "max"), count_rows(x, site))

    def merge(self, a: AbsMaxStats, b: AbsMaxStats) -> AbsMaxStats:
        """Returns the larger magnitudes."""
        return AbsMaxStats(jnp.maximum(a.largest, b.largest), added(a.rows, b.rows))


absmax: AbsMax = AbsMax()
