"""Groups times a Hadamard matrix, which spreads large values over all elements of a group.

    rotated(g) = (signs * g) H / sqrt(size)

The signs are random but fixed, so that a group with a single value, or one row of H, is spread too.

Source: Tseng et al., "QuIP#", arXiv:2402.04396; Ashkboos et al., "QuaRot", arXiv:2404.00456.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..algorithms._shared import factors_of, hadamard, is_order, signs_of

_MOST = 256
"""Larger matrices are Kronecker products of two smaller ones."""


@functools.cache
def sizes_of(size: int) -> tuple[int, ...]:
    """Returns the sizes of the factors of a group's matrix; empty if no matrix is known."""
    return (size,) if size <= _MOST and is_order(size) else factors_of(size)


def rotated(groups: jax.Array) -> jax.Array:
    """Rotates float32 [messages, groups, size] along the last axis."""
    size = groups.shape[2]
    return _times(groups * _signs(size), [hadamard(n) for n in sizes_of(size)])


def rotated_back(groups: jax.Array) -> jax.Array:
    """Inverts `rotated`."""
    size = groups.shape[2]
    return _times(groups, [hadamard(n).T for n in sizes_of(size)]) * _signs(size)


def _times(groups: jax.Array, matrices: list[np.ndarray]) -> jax.Array:
    """Multiplies by the Kronecker product of matrices, divided by the root of its size."""
    x = groups.reshape(*groups.shape[:2], *map(len, matrices))
    for axis, matrix in enumerate(matrices, 2):
        dims = (((axis,), (0,)), ((), ()))
        factor = jnp.asarray(matrix, x.dtype)
        x = jnp.moveaxis(lax.dot_general(x, factor, dims, lax.Precision.HIGHEST), -1, axis)
    return x.reshape(groups.shape) * jnp.asarray(1 / math.sqrt(groups.shape[2]), x.dtype)


def _signs(size: int) -> jax.Array:
    return jnp.asarray(signs_of(size, 0), jnp.float32)[None, None]
