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
    """Sums of channels, and how many rows they are of: the mean is `total / rows`.

    Float sums round: merging in another order may change the last bits.

    Attributes:
      total: sum of each channel, float32, of the rank of the operand: size 1 along the axes that
        are neither contracted nor of a stack; of a `ragged_dot` `[experts, channels]`.
      rows: how many rows were seen, int32, one number, of a `ragged_dot` `[experts, 1]`; it stops
        at the largest int32. With a `weight` the sum of these, float32, of the shape of `total` but
        for size 1 along the channels.
    """

    total: jax.Array
    rows: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean(Weighted):
    """Sums the channels of an activation that a weight is multiplied by: the mean is
    `total / rows`.

    Sums are in float32 whatever the dtype of the operand. A NaN makes that of its channel NaN. The
    rows of a convolution are pixels, a group has some of the channels; a row of a `ragged_dot`
    counts for the expert that it reaches.
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
        """Returns what is summed."""
        return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanAbs(Mean):
    """Sums the magnitudes of the channels of an activation, as `mean` does their values."""

    def of(self, x: jax.Array) -> jax.Array:
        """Returns what is summed."""
        return jnp.abs(x)

    def __str__(self) -> str:
        return "mean_abs"


mean: Mean = Mean()
mean_abs: MeanAbs = MeanAbs()
