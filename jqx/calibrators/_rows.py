"""Rows of the elements that share a scale, for sorting, counting or searching scale by scale."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ._groups import Groups


def rows_of(x: jax.Array, groups: Groups, fill: float) -> jax.Array:
    """Returns one row per scale, `(*scale_shape, elements)`; the row of a tail is padded."""
    x, axes = groups.split(x, fill), groups.axes
    length = math.prod(x.shape[axis] for axis in axes)
    x = jnp.moveaxis(x, axes, range(-len(axes), 0))
    return x.reshape(*groups.scale_shape, length)


def members(groups: Groups) -> jax.Array:
    """Returns the number of elements that share each scale, uint32, in the shape of the scale."""
    rank = len(groups.shape)
    total = jnp.ones((1,) * rank, jnp.uint32)
    for axis, (n, b, m) in enumerate(
        zip(groups.shape, groups.sizes, groups.scale_shape, strict=True)
    ):
        sizes = np.full(m, b, np.uint32)
        sizes[-1:] = n - (m - 1) * b
        total = total * sizes.reshape([m if i == axis else 1 for i in range(rank)])
    return total
