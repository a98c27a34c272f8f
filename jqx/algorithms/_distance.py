"""The distance of the results of a block from those in float."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..transforms._shared import counts_of, is_counted, value_of


def distance(results: Sequence[Any], targets: Sequence[Any]) -> jax.Array:
    """Returns the squared errors of results relative to their squares, summed."""
    total = jnp.float32(0)
    for x, y in zip(results, targets, strict=True):
        if not jnp.issubdtype(value_of(y).dtype, jnp.floating):
            continue
        a, b = (value_of(z).astype(np.float32) for z in (x, y))
        count = jnp.float32(1)
        if is_counted(x):
            count = jnp.minimum(counts_of(x), counts_of(y))
            count = jnp.where(jnp.isfinite(count) & (count > 0), count, 0)
        # Equal infinities are those of masks.
        lost = jnp.where((count > 0) & (a != b), a - b, 0)
        norm = jnp.sum(count * jnp.where((count > 0) & jnp.isfinite(b), b, 0) ** 2)
        total += jnp.sum(count * lost**2) / jnp.where(norm > 0, norm, 1)
    return total
