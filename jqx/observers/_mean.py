"""The mean of each channel."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._observer import ObservedSite, Observer, added, by_channel, count_of, serializable


@serializable
class MeanStats(NamedTuple):
    """Sums of channels, and how many rows they are of.

    Float sums round: merging in another order may change the last bits.

    Attributes:
      total: sum of each channel, float32, of the rank of the operand: size 1 along the axes that
        are neither contracted nor of a stack.
      rows: how many rows were seen, an int32 scalar; it stops at the largest int32.
    """

    total: jax.Array
    rows: jax.Array


@dataclasses.dataclass(frozen=True)
class Mean(Observer):
    """Sums the channels of an activation that a weight is multiplied by.

    The mean is `total / rows`. Sums are in float32 whatever the dtype of the operand. A NaN makes
    that of its channel NaN. Rows of a `ragged_dot` count whichever group they are in, or none.
    """

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> MeanStats:
        """Returns sums of 0."""
        return MeanStats(
            jnp.zeros(by_channel(operand, site), jnp.float32), jnp.zeros((), jnp.int32)
        )

    def observe(self, x: jax.Array, site: ObservedSite) -> MeanStats:
        """Returns the sum over the rows of one operand."""
        total = jnp.sum(x.astype(jnp.float32), axis=site.reduced(x.ndim), keepdims=True)
        return MeanStats(total, count_of(x, site))

    def merge(self, a: MeanStats, b: MeanStats) -> MeanStats:
        """Returns the sums, each rounded to float32 once."""
        return MeanStats(a.total + b.total, added(a.rows, b.rows))


mean = Mean()
