"""The backward pass of a product of arrays, in a dtype of choice."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ._what._dimensions import Dimensions


def dot_gradients(
    lhs: jax.Array,
    rhs: jax.Array,
    numbers: lax.DotDimensionNumbers,
    cotangent: jax.Array,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of both operands, as float32 or wider.

    Operands are rounded to `dtype`, and products are summed in float32 or wider. (On CPU, a product
    with a bfloat16 result would be computed in float32 throughout.)
    """
    wide = jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
    d = Dimensions.of(numbers, lhs.ndim, rhs.ndim)
    batch, lefts = len(d.lhs_batch), len(d.lhs_free)
    ahead = tuple(range(batch))
    left = tuple(range(batch, batch + lefts))
    right = tuple(range(batch + lefts, cotangent.ndim))
    x, w, g = lhs.astype(dtype), rhs.astype(dtype), cotangent.astype(dtype)
    dx = lax.dot_general(
        g, w, ((right, d.rhs_free), (ahead, d.rhs_batch)), preferred_element_type=wide
    )
    dw = lax.dot_general(
        x, g, ((d.lhs_free, left), (d.lhs_batch, ahead)), preferred_element_type=wide
    )
    # Free axes keep their order; contracted axes have the order of the left operand.
    of_lhs = [*d.lhs_batch, *d.lhs_free, *_in_order(d.lhs_contracting, d.rhs_contracting)]
    of_rhs = [*d.rhs_batch, *_in_order(d.rhs_contracting, d.lhs_contracting), *d.rhs_free]
    return _back(dx, of_lhs), _back(dw, of_rhs)


def _in_order(axes: Sequence[int], partners: Sequence[int]) -> list[int]:
    """Returns axes in the order of their partners."""
    return [axis for _, axis in sorted(zip(partners, axes, strict=True))]


def _back(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Moves each axis of `x` to its place in `axes`."""
    return jnp.transpose(x, [axes.index(axis) for axis in range(len(axes))])
