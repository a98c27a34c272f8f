"""The affine that covers a range of real values, zero included."""

import jax
import jax.numpy as jnp

from ..ops import affine_from_range
from ._calibrator import Affine, Affinity


def cover(low: jax.Array, high: jax.Array, spec: Affinity) -> Affine:
    """Returns the scale and zero point that cover `[low, high]`; of an empty range, those of 0."""
    empty = low > high
    low, high = (jnp.where(empty, jnp.zeros_like(v), v) for v in (low, high))
    return Affine(
        *affine_from_range(
            low, high, qtype=spec.qtype, symmetric=spec.symmetric, numerics=spec.numerics
        )
    )
