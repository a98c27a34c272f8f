"""A multiple of the root mean square: `[-r, r]`, `r = multiplier * sqrt(mean(x**2))`.

For a normal distribution the mean squared error is least at about 2.5 for 4 bits and 4 for 8 bits:
Banner et al., "Post training 4-bit quantization of convolutional networks for rapid-deployment",
arXiv:1810.05723.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._arguments import check_number
from ._calibrator import (
    Affine,
    Affinity,
    Calibrator,
    added_counts,
    look_at,
    nothing_seen,
    poisoned,
    serializable,
)
from ._cover import cover
from ._rows import members


@serializable
class RmsStats(NamedTuple):
    """Sum of squares and number of values per scale (float32), NaN values, arrays observed (int32).

    Float sums round: merging in another order may change the last bits.
    """

    squares: jax.Array
    elements: jax.Array
    nans: jax.Array
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class Rms(Calibrator):
    """Covers `[-r, r]`, `r` a multiple of the root mean square of what was observed.

    The mean is exact for magnitudes between 2**-63 and 2**63. Squares of smaller ones are zero.
    Squares of larger ones are infinite, and so is the scale. An infinity makes the scale infinite.

    Attributes:
      multiplier: above 0.

    Raises:
      TypeError: if `multiplier` is not a number.
      ValueError: if `multiplier` is not finite, or not above 0.
    """

    multiplier: float

    def __post_init__(self) -> None:
        value = check_number(
            "calibrators.rms", "multiplier", self.multiplier, lambda v: v > 0, "above 0"
        )
        object.__setattr__(self, "multiplier", value)

    def empty(self, shape: Sequence[int]) -> RmsStats:
        """Returns sums of 0."""
        zero = jnp.zeros(tuple(shape), jnp.float32)
        return RmsStats(zero, zero, *nothing_seen(shape))

    def observe(self, x: jax.Array, spec: Affinity) -> RmsStats:
        """Returns the sum of squares of the elements that share a scale."""
        seen = look_at(x, spec)
        groups = spec.granularity.groups(x.shape)
        squares = groups.reduce(jnp.sum, jnp.square(seen.values.astype(jnp.float32)), 0)
        count = members(groups).astype(jnp.float32) - seen.nans.astype(jnp.float32)
        return RmsStats(squares, count, seen.nans, seen.observed)

    def merge(self, a: RmsStats, b: RmsStats) -> RmsStats:
        """Returns the sums, each rounded to float32 once."""
        return RmsStats(a.squares + b.squares, a.elements + b.elements, *added_counts(a, b))

    def affine(self, stats: RmsStats, spec: Affinity) -> Affine:
        """Returns the scale that covers the multiple of the root mean square."""
        count = jnp.maximum(stats.elements, jnp.ones_like(stats.elements))
        r = jnp.sqrt(stats.squares / count) * jnp.float32(self.multiplier)
        return poisoned(cover(-r, r, spec), stats.nans)

    def __str__(self) -> str:
        return f"rms({self.multiplier})"


def rms(multiplier: float) -> Rms:
    """Returns a calibrator that covers a multiple of the root mean square; see `Rms`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> spec = jqx.QSpec(jnp.int8, calibrator=jqx.calibrators.rms(127.0))
      >>> jqx.QTensor.quantize(jnp.array([1.0, -1.0, 1.0]), spec).scale
      Array([1.], dtype=float32)
    """
    return Rms(multiplier)
