"""The scale and zero point that cover a range of values and zero."""

import jax
import jax.numpy as jnp

from ..ops import affine_from_range
from ._calibrator import Affine, Affinity


def cover(low: jax.Array, high: jax.Array, spec: Affinity) -> Affine:
    """Returns the scale and zero point that cover `[low, high]`; an empty range counts as 0."""
    empty = low > high
    low, high = (jnp.where(empty, jnp.zeros_like(v), v) for v in (low, high))
    return Affine(
        *affine_from_range(
            low, high, qtype=spec.qtype, symmetric=spec.symmetric, numerics=spec.numerics
        )
    )
