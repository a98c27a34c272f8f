"""The backward pass of a product of arrays, in a dtype of choice."""

import math
from collections.abc import Sequence
from functools import partial

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
    # Free axes keep their order; contracted axes have the order of the left operand.
    of_lhs = [*d.lhs_batch, *d.lhs_free, *_in_order(d.lhs_contracting, d.rhs_contracting)]
    of_rhs = [*d.rhs_batch, *_in_order(d.rhs_contracting, d.lhs_contracting), *d.rhs_free]
    dx = _product(g, w, ((right, d.rhs_free), (ahead, d.rhs_batch)), of_lhs, wide)
    dw = _product(x, g, ((d.lhs_free, left), (d.lhs_batch, ahead)), of_rhs, wide)
    return dx, dw


def _product(
    lhs: jax.Array,
    rhs: jax.Array,
    numbers: lax.DotDimensionNumbers,
    axes: Sequence[int],
    dtype: DTypeLike,
) -> jax.Array:
    """Returns a product whose axes are those of the result at the places in `axes`."""
    order = tuple(axes.index(axis) for axis in range(len(axes)))

    def plain(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        y = lax.dot_general(lhs, rhs, numbers, preferred_element_type=dtype)
        return jnp.transpose(y, order)

    if lhs.dtype.itemsize != 2:
        return plain(lhs, rhs)
    in_rows = partial(rows_product, numbers=numbers, order=order, dtype=dtype)
    return lax.platform_dependent(lhs, rhs, cpu=in_rows, default=plain)


def rows_product(
    lhs: jax.Array,
    rhs: jax.Array,
    numbers: lax.DotDimensionNumbers,
    order: Sequence[int],
    dtype: DTypeLike,
) -> jax.Array:
    """Returns a transposed product of 16-bit floats, of matrices whose last axes are contracted.

    XLA on CPU makes one product of a product and transposes around it, and most of these it cannot
    run on 16-bit floats. So barriers keep them apart, and a single row, which under `vmap` would be
    one axis of many, has a row of zeros below.
    """
    d = Dimensions.of(numbers, lhs.ndim, rhs.ndim)
    batch = len(d.lhs_batch)
    left = _transposed(lhs, (*d.lhs_batch, *d.lhs_free, *d.lhs_contracting))
    right = _transposed(rhs, (*d.rhs_batch, *d.rhs_free, *d.rhs_contracting))
    ahead, m = left.shape[:batch], left.shape[batch : batch + len(d.lhs_free)]
    n = right.shape[batch : batch + len(d.rhs_free)]
    k = math.prod(left.shape[batch + len(m) :])
    left, right = (x.reshape(*ahead, math.prod(own), k) for x, own in ((left, m), (right, n)))
    if is_row := math.prod(m) == 1:
        left = jnp.concatenate([left, jnp.zeros_like(left)], batch)
    axes = tuple(range(batch))
    last = (batch + 1,)
    y = lax.dot_general(left, right, ((last, last), (axes, axes)), preferred_element_type=dtype)
    y = lax.slice_in_dim(y, 0, 1, axis=batch) if is_row else y
    return _transposed(y.reshape(*ahead, *m, *n), order)


def _transposed(x: jax.Array, order: Sequence[int]) -> jax.Array:
    """Returns a transpose that is not merged with what is before it or after it."""
    if list(order) == list(range(x.ndim)):
        return x
    return lax.optimization_barrier(jnp.transpose(lax.optimization_barrier(x), order))


def _in_order(axes: Sequence[int], partners: Sequence[int]) -> list[int]:
    """Returns axes in the order of their partners."""
    return [axis for _, axis in sorted(zip(partners, axes, strict=True))]
