"""The mean of each channel."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._channels import added, count_rows, no_rows, over_rows, shape_of
from ._observer import ObservedSite, serializable
from ._weighted import Weighted


@serializable
class MeanStats(NamedTuple):
    """Sums of channels, and the number of rows they are taken over: the mean is `total / rows`.

    Float sums round: merging in another order may change the last bits.

    Attributes:
      total: sum of each channel, float32, with the rank of the operand and size 1 along the axes
        that are neither contracted nor stacked; for a `ragged_dot` `[experts, channels]`.
      rows: number of rows seen, int32, one number, or `[experts, 1]` for a `ragged_dot`. It
        saturates at the largest int32. With a `weight`, the sum of the weights of the rows,
        float32, in the shape of `total` with size 1 along the channels.
    """

    total: jax.Array
    rows: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean(Weighted):
    """Sums the channels of an activation that is multiplied by a weight: the mean is
    `total / rows`.

    Sums are in float32 whatever the dtype of the operand. A NaN makes the sum of its channel NaN.
    The rows of a convolution are pixels, and a group has some of the channels. A row of a
    `ragged_dot` counts for the expert that it reaches.
    """

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> MeanStats:
        """Returns sums of 0."""
        total = jnp.zeros(shape_of(operand, site), jnp.float32)
        return MeanStats(total, no_rows(operand, site, self.weight is not None))

    def observe(self, x: jax.Array, site: ObservedSite) -> MeanStats:
        """Returns the sum over the rows of one operand."""
        return MeanStats(over_rows(self.of(x), site, "sum"), count_rows(x, site))

    def merge(self, a: MeanStats, b: MeanStats) -> MeanStats:
        """Returns the sums, each rounded to float32 once."""
        return MeanStats(a.total + b.total, added(a.rows, b.rows))

    def of(self, x: jax.Array) -> jax.Array:
        """Returns the values that are summed."""
        return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanAbs(Mean):
    """Sums the magnitudes of the channels of an activation, as `mean` does their values."""

    def of(self, x: jax.Array) -> jax.Array:
        """Returns the values that are summed."""
        return jnp.abs(x)

    def __str__(self) -> str:
        return "mean_abs"


mean: Mean = Mean()
mean_abs: MeanAbs = MeanAbs()
