"""An array split along an axis into one piece for each device, and joined again.

As in `jax.lax`: with `tiled`, an axis is split into parts, and parts are concatenated. Otherwise
the axis is removed, or added.
"""

import jax
import jax.numpy as jnp


def cut(x: jax.Array, axis: int, count: int, tiled: bool) -> jax.Array:
    """Returns the pieces, [count, *piece]."""
    if tiled:
        shape = x.shape
        x = x.reshape(*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def joined(pieces: jax.Array, axis: int, tiled: bool) -> jax.Array:
    """Returns pieces, [count, *piece], joined along an axis."""
    x = jnp.moveaxis(pieces, 0, axis)
    if tiled:
        shape = x.shape
        x = x.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    return x
