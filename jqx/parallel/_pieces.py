"""An array cut along an axis into pieces, one for each device, and put together again.

As in `jax.lax`: tiled, an axis is cut in parts, and parts are joined; else it goes, and is made.
"""

import jax
import jax.numpy as jnp


def cut(x: jax.Array, axis: int, count: int, tiled: bool) -> jax.Array:
    """Returns [count, *piece]."""
    if tiled:
        shape = x.shape
        x = x.reshape(*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def joined(pieces: jax.Array, axis: int, tiled: bool) -> jax.Array:
    """Returns pieces, [count, *piece], side by side along an axis."""
    x = jnp.moveaxis(pieces, 0, axis)
    if tiled:
        shape = x.shape
        x = x.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    return x
