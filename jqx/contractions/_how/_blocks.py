"""Scales in blocks along a contracted axis: each block is contracted, and the results are summed.

sum_k l[k] r[k]  =  sum_g scale[g] * sum_{k in block g} ...

The blocks become a batch axis (`sum_of_blocks`), or are contracted one by one (`sum_in_turn`).
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._checks import is_at_least
from ...calibrators import Groups
from ...tensor import QTensor
from ...tensor._shared import refine
from .._what._dimensions import Dimensions
from ._slices import item_along, slice_along

AT_ONCE = 2**22
"""Elements of the results of blocks that are in memory before they are summed."""


class Block(NamedTuple):
    """A contracted pair of axes whose scales are in blocks.

    Attributes:
      lhs: the axis of the left operand.
      rhs: the axis of the right operand.
      size: elements of a block in which no scale changes.
      dimensions: the dimensions of the whole contraction.
    """

    lhs: int
    rhs: int
    size: int
    dimensions: Dimensions


def find_block(lhs: Any, rhs: Any, dimensions: Dimensions) -> Block | None:
    """Returns the first contracted pair of axes along which a scale changes."""
    pairs = zip(dimensions.lhs_contracting, dimensions.rhs_contracting, strict=True)
    for i, j in pairs:
        n = lhs.shape[i]
        if n != rhs.shape[j]:
            continue  # the contraction itself raises
        size = math.gcd(*(_size(x, axis) for x, axis in ((lhs, i), (rhs, j)) if _size(x, axis) < n))
        if size:
            return Block(i, j, size, dimensions)
    return None


def can_leave_sum(groups: Groups, contracted: Iterable[int]) -> bool:
    """Whether elements that are summed share scales, instead of each having its own."""
    axes = tuple(contracted)
    shared = math.prod(groups.sizes[axis] for axis in axes)
    summed = math.prod(groups.shape[axis] for axis in axes)
    return is_at_least(shared, 2) or not is_at_least(summed, 2)


def shares_scale(q: QTensor, axes: Iterable[int]) -> bool:
    """Whether the elements along the axes share one scale."""
    return all(q.scale.shape[axis] == 1 for axis in axes)


def with_own_scales(x: Any, kept: Iterable[int]) -> Any:
    """Gives each index of the kept axes its own scale if they are in blocks."""
    for axis in kept:
        if isinstance(x, QTensor) and x.groups.is_blocked(axis):
            x = refine(x, axis)
    return x


def sum_of_blocks(
    lhs: Any,
    rhs: Any,
    dimensions: Dimensions,
    compute: Callable[[Any, Any, Dimensions], jax.Array],
    block: Block | None,
) -> jax.Array:
    """Contracts operands with `compute`, which is called on operands without blocks. `block` is the
    first contracted axis with blocks.

    Many or large blocks are computed in turn, so that not all results are in memory at once.
    """
    if block is None:
        lhs = with_own_scales(lhs, dimensions.lhs_kept)
        rhs = with_own_scales(rhs, dimensions.rhs_kept)
        return compute(lhs, rhs, dimensions)
    parts = [_sum_of_part(*part, block, compute) for part in _split_block(lhs, rhs, block)]
    return functools.reduce(jnp.add, parts)


def _sum_of_part(
    lhs: Any,
    rhs: Any,
    dimensions: Dimensions,
    block: Block,
    compute: Callable[[Any, Any, Dimensions], jax.Array],
) -> jax.Array:
    """Contracts operands whose first batch axis counts blocks, and sums over it."""

    def summed(lhs: Any, rhs: Any) -> jax.Array:
        more = find_block(lhs, rhs, dimensions)
        return jnp.sum(sum_of_blocks(lhs, rhs, dimensions, compute, more), axis=0)

    count = lhs.shape[block.lhs]
    batch = math.prod(lhs.shape[axis] for axis in dimensions.lhs_batch[1:])
    each = batch * dimensions.rows(lhs) * dimensions.columns(rhs)
    if not is_at_least(count * each, AT_ONCE + 1):
        return summed(lhs, rhs)
    runs = [n for n in range(2, count) if count % n == 0]
    run = max((n for n in runs if not is_at_least(n * each, AT_ONCE + 1)), default=1)

    def run_at(i: Any) -> jax.Array:
        return summed(
            slice_along(lhs, block.lhs, i * run, run), slice_along(rhs, block.rhs, i * run, run)
        )

    def add(total: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        return total + run_at(i), None

    total, _ = lax.scan(add, run_at(0), jnp.arange(1, count // run))
    return total


def sum_in_turn(
    lhs: Any,
    rhs: Any,
    dimensions: Dimensions,
    compute: Callable[[Any, Any, Dimensions], jax.Array],
    block: Block | None,
) -> jax.Array:
    """Returns the result of `sum_of_blocks`, but contracts one block after another."""
    if block is None:
        return sum_of_blocks(lhs, rhs, dimensions, compute, None)

    def in_turn(lhs: Any, rhs: Any) -> jax.Array:
        def block_at(i: Any) -> jax.Array:
            items = item_along(lhs, block.lhs, i), item_along(rhs, block.rhs, i)
            return sum_in_turn(*items, dimensions, compute, find_block(*items, dimensions))

        def add(total: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            return total + block_at(i), None

        return lax.scan(add, block_at(0), jnp.arange(1, lhs.shape[block.lhs]))[0]

    parts = [in_turn(lhs, rhs) for lhs, rhs, _ in _split_block(lhs, rhs, block)]
    return functools.reduce(jnp.add, parts)


def _split_block(lhs: Any, rhs: Any, block: Block) -> list[tuple[Any, Any, Dimensions]]:
    """Returns contractions whose results, summed over their first axis, add up to the whole: one of
    the full blocks, and one of the tail if there is one.
    """
    n = lhs.shape[block.lhs]
    lhs, rhs = _in_blocks(lhs, block.lhs, block.size), _in_blocks(rhs, block.rhs, block.size)
    full = n // block.size * block.size
    runs = [(0, full, block.size)] + ([(full, n, n - full)] if full < n else [])
    return [
        (
            _split(lhs, block.lhs, *run),
            _split(rhs, block.rhs, *run),
            _batched(block),
        )
        for run in runs
    ]


def _size(x: Any, axis: int) -> int:
    return x.groups.sizes[axis] if isinstance(x, QTensor) else x.shape[axis]


def _in_blocks(x: Any, axis: int, size: int) -> Any:
    return refine(x, axis, size) if size < _size(x, axis) < x.shape[axis] else x


def _split(x: Any, axis: int, start: int, stop: int, size: int) -> Any:
    part = x[(slice(None),) * axis + (slice(start, stop),)] if stop - start < x.shape[axis] else x
    return part.reshape(*x.shape[:axis], (stop - start) // size, size, *x.shape[axis + 1 :])


def _batched(block: Block) -> Dimensions:
    """The dimensions after both axes were split in two: the first of each pair is a batch axis."""
    old = block.dimensions

    def moved(axes: tuple[int, ...], at: int) -> tuple[int, ...]:
        return tuple(axis + (axis >= at) for axis in axes)

    return Dimensions(
        old.lhs_rank + 1,
        old.rhs_rank + 1,
        moved(old.lhs_contracting, block.lhs),
        moved(old.rhs_contracting, block.rhs),
        (block.lhs, *moved(old.lhs_batch, block.lhs)),
        (block.rhs, *moved(old.rhs_batch, block.rhs)),
    )
