"""Sums of products of int8 arrays in int32, with the sums of either operand that zero points need.

There are several forms of one function. `plain` is the definition, and the best form for compilers
for GPUs and TPUs. `shaped` brings operands into the shapes that XLA on CPU passes to its int8
library (measured on jaxlib 0.10.2): a left operand contracted along its last axes, two or more rows
and columns, and no reduction of int8 outside of a product, which is 20 times slower than a product.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._checks import is_at_least
from .._what._dimensions import Dimensions

TALL = 512
"""From this number of rows on, one more row costs less in a separate product, without a copy of the
others.
"""

PARTS = 4
"""Parts of a contracted axis that is the first one, if there are few rows."""


class Products(NamedTuple):
    """Sums over the contracted axes, in int32, lined up with the result.

    Attributes:
      total: the sums of the products.
      left: the sums of the left operand; `None` if not requested.
      right: the sums of the right operand; `None` if not requested.
    """

    total: Any
    left: Any
    right: Any


def plain(
    lhs: jax.Array, rhs: jax.Array, dimensions: Dimensions, *, left: bool, right: bool
) -> Products:
    """Multiplies as written."""
    total = lax.dot_general(lhs, rhs, dimensions.numbers, preferred_element_type=jnp.int32)
    of_left = dimensions.lhs_to_output(_sum(lhs, dimensions.lhs_contracting)) if left else None
    of_right = dimensions.rhs_to_output(_sum(rhs, dimensions.rhs_contracting)) if right else None
    return Products(total, of_left, of_right)


def _sum(codes: jax.Array, axes: Sequence[int]) -> jax.Array:
    return jnp.sum(codes, axis=axes, keepdims=True, dtype=jnp.int32)


def shaped(
    lhs: jax.Array, rhs: jax.Array, dimensions: Dimensions, *, left: bool, right: bool
) -> Products:
    """Multiplies in the shapes that are fast on CPU; the result is that of `plain`."""
    if needs_transpose(dimensions) and not is_at_least(rhs.size, lhs.size):
        swapped = shaped(rhs, lhs, dimensions.swapped, left=right, right=left)
        total, of_right, of_left = (
            None if part is None else dimensions.swap_output(part) for part in swapped
        )
        return Products(total, of_left, of_right)
    rows = to_rows(lhs, dimensions)
    total, of_left, of_right = rows_product(
        rows, rhs, dimensions, left=left, right=right, transposed=needs_transpose(dimensions)
    )
    batch = rows.shape[: len(dimensions.lhs_batch)]
    free = tuple(lhs.shape[axis] for axis in dimensions.lhs_free)
    columns = tuple(rhs.shape[axis] for axis in dimensions.rhs_free)
    return Products(
        total.reshape(batch + free + columns),
        None if of_left is None else of_left.reshape(batch + free + (1,) * len(columns)),
        None if of_right is None else of_right.reshape(batch + (1,) * len(free) + columns),
    )


def fitting(
    lhs: jax.Array, rhs: jax.Array, dimensions: Dimensions, *, left: bool, right: bool
) -> Products:
    """Multiplies as written if that is fast on CPU, else in other shapes."""
    form = shaped if left or right or needs_shape(lhs, rhs, dimensions) else plain
    return form(lhs, rhs, dimensions, left=left, right=right)


def needs_transpose(dimensions: Dimensions) -> bool:
    """Whether the left operand is not in the order: batch axes, free axes, contracted axes."""
    order = (*dimensions.lhs_batch, *dimensions.lhs_free, *dimensions.lhs_contracting)
    return order != tuple(range(dimensions.lhs_rank))


def needs_shape(lhs: Any, rhs: Any, dimensions: Dimensions) -> bool:
    """Whether a product leaves the fast path of XLA on CPU as written."""
    narrow = dimensions.rows(lhs) == 1 or dimensions.columns(rhs) == 1
    return narrow or needs_transpose(dimensions)


def to_rows(x: jax.Array, dimensions: Dimensions) -> jax.Array:
    """Brings a left operand into the order (*batch, rows, *contracted), free axes merged."""
    order = (*dimensions.lhs_batch, *dimensions.lhs_free, *dimensions.lhs_contracting)
    batch = tuple(x.shape[axis] for axis in dimensions.lhs_batch)
    contracted = tuple(x.shape[axis] for axis in dimensions.lhs_contracting)
    return x.transpose(order).reshape(*batch, dimensions.rows(x), *contracted)


def rows_product(
    rows: jax.Array,
    rhs: jax.Array,
    dimensions: Dimensions,
    *,
    left: bool = False,
    right: bool = False,
    transposed: bool = False,
) -> Products:
    """Multiplies `(*batch, rows, *contracted)` by a right operand without changing its shape.

    Args:
      rows: int8, from `to_rows`.
      rhs: int8, with the axes of `dimensions`.
      dimensions: of the whole contraction; only the numbers of axes of the left operand are used.
      left: whether to sum the rows.
      right: whether to sum the right operand.
      transposed: whether the rows come from a transpose. XLA would undo it and leave the fast path;
        an extra row of zeros makes it a copy.

    Returns:
      Products of shapes (*batch, rows, *columns), with 1 for each of the columns in the sums of the
      left operand and for the rows in those of the right one.
    """
    at = len(dimensions.lhs_batch)
    m = rows.shape[at]
    # With few rows, an extra row of ones gives the sums of the right operand.
    ones_below = right and not is_at_least(m, TALL)
    tall = rows
    if ones_below or m == 1 or transposed:
        tall = jnp.concatenate([rows, _constant(rows, at, 1, int(ones_below))], axis=at)
    y = _multiply(tall, rhs, dimensions)
    of_left = _sums_of_rows(rows, at, dimensions) if left else None
    of_right = None
    if right:
        of_right = (
            _between(y, at, m, m + 1) if ones_below else _sums_of_columns(rows, rhs, at, dimensions)
        )
    return Products(_between(y, at, 0, m), of_left, of_right)


def _constant(rows: jax.Array, at: int, count: int, value: int) -> jax.Array:
    """Returns `count` rows in the shape of others, filled with one number."""
    return jnp.full((*rows.shape[:at], count, *rows.shape[at + 1 :]), value, jnp.int8)


def _between(y: jax.Array, axis: int, start: int, stop: int) -> jax.Array:
    return y[(slice(None),) * axis + (slice(start, stop),)]


def _sums_of_columns(rows: jax.Array, rhs: jax.Array, at: int, dimensions: Dimensions) -> jax.Array:
    """Returns the sums of the right operand, of shape (*batch, 1, *columns), as a product with
    ones.
    """
    return _between(_multiply(_constant(rows, at, 2, 1), rhs, dimensions), at, 0, 1)


def _sums_of_rows(rows: jax.Array, at: int, dimensions: Dimensions) -> jax.Array:
    """Returns the sums of rows, of shape (*batch, rows, 1...), as a product with ones.

    XLA on CPU would store the operand of a sum (see `_xla_cpu`). The rows are the right operand,
    because sums in a row are later read twice as fast as sums in a column.
    """
    axes, leads = tuple(range(at + 1, rows.ndim)), tuple(range(at))
    numbers = ((axes, axes), (leads, leads))
    ones = _constant(rows, at, 2, 1)
    sums = lax.dot_general(ones, rows, numbers, preferred_element_type=jnp.int32)
    sums = sums[..., 0, :]
    return sums.reshape(*sums.shape, *(1,) * len(dimensions.rhs_free))


def _multiply(rows: jax.Array, rhs: jax.Array, dimensions: Dimensions) -> jax.Array:
    """Returns int32 of shape (*batch, rows, *columns); a single column is padded with zeros."""
    at = len(dimensions.rhs_batch)
    contracting = tuple(range(at + 1, rows.ndim))
    columns = tuple(rhs.shape[axis] for axis in dimensions.rhs_free)
    batch_axes, contracted_axes = dimensions.rhs_batch, dimensions.rhs_contracting
    padded = math.prod(columns) == 1
    if padded:
        rhs = to_rows(rhs, dimensions.swapped)
        beside = jnp.zeros((*rhs.shape[:at], 1, *rhs.shape[at + 1 :]), jnp.int8)
        rhs = jnp.concatenate([rhs, beside], axis=at)
        batch_axes, contracted_axes = tuple(range(at)), contracting
    if _has_few_rows(rows, rhs, contracted_axes, batch_axes):
        return _in_parts(rows, rhs)
    numbers = ((contracting, contracted_axes), (tuple(range(at)), batch_axes))
    y = lax.dot_general(rows, rhs, numbers, preferred_element_type=jnp.int32)
    return y[..., :1].reshape(*y.shape[:-1], *columns) if padded else y


def _has_few_rows(
    rows: jax.Array, rhs: jax.Array, contracted: tuple[int, ...], batch: tuple[int, ...]
) -> bool:
    """Whether there are few rows, and a matrix contracted along a first axis that can be split."""
    few = not is_at_least(rows.shape[0], 17)
    return contracted == (0,) and not batch and few and rhs.shape[0] % PARTS == 0


def _in_parts(rows: jax.Array, rhs: jax.Array) -> jax.Array:
    """Multiplies parts of the contracted axis as a batch, in half the time of one product."""
    size = rhs.shape[0] // PARTS
    rows = rows.reshape(rows.shape[0], PARTS, size)
    rhs = rhs.reshape(PARTS, size, *rhs.shape[1:])
    numbers = (((2,), (1,)), ((1,), (0,)))
    y = lax.dot_general(rows, rhs, numbers, preferred_element_type=jnp.int32)
    return jnp.sum(y, axis=0, dtype=jnp.int32)
