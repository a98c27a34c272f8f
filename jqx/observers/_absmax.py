"""The largest magnitude of each channel."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._observer import ObservedSite, Observer, added, by_channel, count_of, serializable


@serializable
class AbsMaxStats(NamedTuple):
    """The largest magnitude of each channel, and of how many rows.

    Attributes:
      largest: float32, of the rank of the operand: size 1 along the axes that are neither
        contracted nor of a stack.
      rows: how many rows were seen, an int32 scalar; it stops at the largest int32.
    """

    largest: jax.Array
    rows: jax.Array


@dataclasses.dataclass(frozen=True)
class AbsMax(Observer):
    """The largest magnitude of each channel of an activation that a weight is multiplied by.

    A NaN makes that of its channel NaN. Rows of a `ragged_dot` count whichever group they are in,
    or none.
    """

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> AbsMaxStats:
        """Returns magnitudes of 0."""
        shape = by_channel(operand, site)
        return AbsMaxStats(jnp.zeros(shape, jnp.float32), jnp.zeros((), jnp.int32))

    def observe(self, x: jax.Array, site: ObservedSite) -> AbsMaxStats:
        """Returns the largest magnitudes of the rows of one operand."""
        axes = site.reduced(x.ndim)
        largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axes, keepdims=True, initial=0)
        return AbsMaxStats(largest, count_of(x, site))

    def merge(self, a: AbsMaxStats, b: AbsMaxStats) -> AbsMaxStats:
        """Returns the larger magnitudes."""
        return AbsMaxStats(jnp.maximum(a.largest, b.largest), added(a.rows, b.rows))


absmax = AbsMax()
