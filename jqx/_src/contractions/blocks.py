"""Scales in blocks along a contracted axis: each block is contracted, and the results are summed.

sum_k l[k] r[k]  =  sum_g scale[g] * sum_{k in block g} ...

The blocks become a batch axis (`sum_of_blocks`), or are contracted one by one (`sum_in_turn`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export, lax

from .. import compat
from ..checks import is_at_least
from ..numerics.lookup import format_of
from ..tensor.layout import Layout, Packing
from ..tensor.qtensor import QTensor
from ..tensor.views import refine
from .problem import Block, Dimensions, block_size, find_block

# A large operand in slices, one after another, so that no temporary is as large as the operand.


class Cut(NamedTuple):
    """How an axis of a QTensor is cut into slices.

    A packed axis holds overlaid runs of codes, `runs` of them in each byte. A slice of its bytes
    holds a slice of every run, one after another.

    Attributes:
      axis: the axis of the QTensor.
      runs: the number of runs, 1 if the axis is not packed.
      size: elements of a run in a slice.
      number: the number of full slices.
    """

    axis: int
    runs: int
    size: int
    number: int

    @property
    def full(self) -> int:
        """The number of elements of all full slices."""
        return self.runs * self.size * self.number


Slice = Callable[[Any], jax.Array]
"""The result of a slice, by its number."""


def in_slices(
    lhs: jax.Array,
    rhs: QTensor,
    dimensions: Dimensions,
    count: int,
    compute: Callable[[jax.Array, QTensor], jax.Array],
) -> jax.Array:
    """Returns `compute(lhs, rhs)`, for about `count` slices of the right operand in turn.

    Slices run along the first axis that can be cut, so that they are contiguous in memory: on CPU,
    other slices take many times longer to read in a loop. Along a contracted axis, the results are
    summed.

    Args:
      lhs: array.
      rhs: QTensor; packed or not.
      dimensions: of the contraction that `compute` does, and of its result.
      count: the number of slices; 1 for the whole.
      compute: contracts a slice of both operands; linear in either.
    """
    cuts = (cut_of(rhs, axis, count) for axis in range(rhs.ndim))
    cut = next((cut for cut in cuts if cut is not None), None)
    # If the axis is partitioned over devices, the compiler would send all slices to each of them.
    if cut is None or compat.is_on_a_mesh(lhs, rhs.values):
        return compute(lhs, rhs)
    n, partner = rhs.shape[cut.axis], dimensions.partner(cut.axis)
    rhs = with_own_second_scales(rhs, cut.axis)
    lefts = None if partner is None else _in_parts(lhs, partner, cut, n)
    rights = jax.tree.map(lambda leaf: _in_parts_of(leaf, cut, rhs), rhs)

    @jax.checkpoint  # so that the backward pass does not store the slices
    def slice_at(i: Any) -> jax.Array:
        left = lhs if lefts is None else item_at(lefts, i)
        return compute(left, _laid_out(jax.tree.map(lambda x: item_at(x, i), rights), cut, rhs))

    tail = None
    if cut.full < n:
        left = lhs if partner is None else lax.slice_in_dim(lhs, cut.full, n, axis=partner)
        tail = compute(left, rhs[(slice(None),) * cut.axis + (slice(cut.full, None),)])
    if cut.axis in dimensions.rhs_contracting:
        first = slice_at(0) if tail is None else tail + slice_at(0)
        return _summed(slice_at, cut.number, first)
    return joined(slice_at, cut, dimensions.output_axis(cut.axis), tail)


def _summed(slice_at: Slice, count: int, first: jax.Array) -> jax.Array:
    """Returns the sum of the first result and those of all other slices."""
    steps = jnp.arange(1, count)
    return lax.scan(lambda total, i: (total + slice_at(i), None), first, steps)[0]


def joined(slice_at: Slice, cut: Cut, axis: int, tail: jax.Array | None) -> jax.Array:
    """Returns the results of all slices and of the rest, joined along an axis."""
    _, parts = lax.scan(lambda carry, i: (carry, slice_at(i)), None, jnp.arange(cut.number))
    shape = parts.shape[1:]
    parts = parts.reshape(cut.number, *shape[:axis], cut.runs, cut.size, *shape[axis + 1 :])
    y = jnp.moveaxis(parts, 0, axis + 1).reshape(*shape[:axis], cut.full, *shape[axis + 1 :])
    return y if tail is None else jnp.concatenate([y, tail], axis=axis)


def with_own_second_scales(q: QTensor, axis: int) -> QTensor:
    """Gives each quantized scale along an axis its own second scale if they share these in blocks,
    because slices follow the scales, not the blocks of second scales.
    """
    if not isinstance(q.scale, QTensor) or not q.scale.groups.is_blocked(axis):
        return q
    return dataclasses.replace(q, scale=refine(q.scale, axis))


def slice_of(q: QTensor, cut: Cut, i: Any) -> QTensor:
    """Returns a slice of a QTensor without blocks along the axis that is cut, without a copy of the
    whole.
    """
    q = with_own_second_scales(q, cut.axis)
    n, axis = q.shape[cut.axis], cut.axis

    def sliced(leaf: jax.Array) -> jax.Array:
        m = leaf.shape[axis]
        if m == 1 and n > 1:
            return leaf
        runs = 1 if leaf is q.values else cut.runs
        split = leaf.reshape(*leaf.shape[:axis], runs, m // runs, *leaf.shape[axis + 1 :])
        tied, step = _tied(split, i)
        part = lax.dynamic_slice_in_dim(tied, step * cut.size, cut.size, axis + 1)
        return part.reshape(*leaf.shape[:axis], runs * cut.size, *leaf.shape[axis + 1 :])

    return _laid_out(jax.tree.map(sliced, q), cut, q)


def slice_along(x: Any, axis: int, start: Any, size: int) -> Any:
    """Slices an array, or a QTensor without blocks along the axis; `start` may be traced."""
    n = x.shape[axis]
    x = with_own_second_scales(x, axis) if isinstance(x, QTensor) else x

    def sliced(leaf: jax.Array) -> jax.Array:
        if leaf.shape[axis] != n or n == 1:
            return leaf
        return lax.dynamic_slice_in_dim(*_tied(leaf, start), size, axis)

    return jax.tree.map(sliced, x)


def item_along(x: Any, axis: int, i: Any) -> Any:
    """Returns an item of an axis of an array, or of a QTensor without blocks along the axis."""
    return slice_along(x, axis, i, 1).reshape(*x.shape[:axis], *x.shape[axis + 1 :])


def item_at(x: jax.Array, i: Any) -> jax.Array:
    """Returns an item of the first axis; `i` may be traced."""
    return lax.dynamic_index_in_dim(*_tied(x, i), keepdims=False)


def _tied(x: jax.Array, step: Any) -> tuple[jax.Array, Any]:
    """Ties codes to the step of a loop; otherwise XLA on CPU would convert all of them before the
    loop (see `xla_cpu`).
    """
    narrow = x.dtype.itemsize == 1 and x.dtype not in (jnp.int8, jnp.uint8)
    return lax.optimization_barrier((x, jnp.asarray(step))) if narrow else (x, step)


def cut_of(q: QTensor, axis: int, count: int) -> Cut | None:
    """Returns how to cut an axis into about `count` slices, between blocks; `None` if it is too
    short, of a symbolic size, or packed so that it cannot be cut.
    """
    runs = _packed_runs(q, axis)
    if count < 2 or runs is None or export.is_symbolic_dim(q.shape[axis]):
        return None
    n, block = q.shape[axis], q.groups.sizes[axis]
    block = 1 if block == n else block  # a single block does not limit the slices
    length = n // runs
    if length < 2 * block:
        return None
    even = None
    if length % block == 0:
        even = _even(length // block, count, fewer=runs > 1)
    if even is not None:
        return Cut(axis, runs, length // even, even)
    if runs > 1:  # the rest would be packed in another way
        return None
    size = max(1, math.ceil(length / block) // count) * block
    return Cut(axis, 1, size, length // size)


def _even(blocks: int, count: int, *, fewer: bool) -> int | None:
    """Returns a divisor of a number of blocks: `count`, or up to four times that; or else fewer."""
    counts = [*range(count, 4 * count), *(range(count, 1, -1) if fewer else ())]
    return next((c for c in counts if blocks % c == 0), None)


def _packed_runs(q: QTensor, axis: int) -> int | None:
    """Returns the number of overlaid runs of codes along an axis: 1 if it is not packed, `None` if
    they do not fill bytes.
    """
    packing = None if q.layout is None else q.layout.packing
    if packing is None or packing.axis + q.ndim != axis:
        return 1
    bits = format_of(q.qtype).bits
    if q.layout is not None and q.layout.kernel == "cpu":
        return None  # the codes in a byte are neighbours
    return 8 // bits if bits in (1, 2, 4) and q.shape[axis] * bits % 8 == 0 else None


def _in_parts(x: jax.Array, axis: int, cut: Cut, n: int) -> jax.Array:
    """Brings the full slices of an axis to the front, without the rest."""
    size = cut.size * x.shape[axis] // n  # fewer if x has one element per block
    full = size * cut.number * cut.runs
    x = lax.slice_in_dim(x, 0, full, axis=axis)
    lead, trail = x.shape[:axis], x.shape[axis + 1 :]
    parts = x.reshape(*lead, cut.runs, cut.number, size, *trail)
    parts = jnp.moveaxis(parts, axis + 1, 0)
    return parts.reshape(cut.number, *lead, cut.runs * size, *trail)


def _in_parts_of(leaf: jax.Array, cut: Cut, q: QTensor) -> jax.Array:
    """Brings the slices of a leaf of a QTensor (codes, bytes or parameters) to the front."""
    n, m = q.shape[cut.axis], leaf.shape[cut.axis]
    if m == 1:
        return jnp.broadcast_to(leaf, (cut.number, *leaf.shape))
    if leaf is q.values and cut.runs > 1:
        return _in_parts(leaf, cut.axis, cut._replace(runs=1), m)
    if m < n and n % m:  # blocks with a tail: one entry for each block
        block = q.groups.sizes[cut.axis]
        return _in_parts(leaf, cut.axis, cut._replace(size=cut.size // block), m)
    return _in_parts(leaf, cut.axis, cut, n)


def _laid_out(part: QTensor, cut: Cut, q: QTensor) -> QTensor:
    """Gives a slice of a packed axis the layout of its length."""
    if cut.runs == 1:
        return part
    packing = Packing(cut.axis - q.ndim, cut.runs * cut.size)
    return dataclasses.replace(part, layout=Layout(packing))


Compute = Callable[[Any, Any, Dimensions], jax.Array]
"""The contraction of two operands without blocks."""

AT_ONCE = 2**22
"""Elements of the results of blocks that are in memory before they are summed."""


def with_own_scales(x: Any, axes: Iterable[int]) -> Any:
    """Gives each index of the kept axes its own scale if they are in blocks."""
    for axis in axes:
        if isinstance(x, QTensor) and x.groups.is_blocked(axis):
            x = refine(x, axis)
    return x


def sum_of_blocks(
    lhs: Any, rhs: Any, dimensions: Dimensions, compute: Compute, block: Block | None
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
    lhs: Any, rhs: Any, dimensions: Dimensions, block: Block, compute: Compute
) -> jax.Array:
    """Contracts operands whose first batch axis counts blocks, and sums over it."""

    def summed(lhs: Any, rhs: Any) -> jax.Array:
        inner_block = find_block(lhs, rhs, dimensions)
        return jnp.sum(sum_of_blocks(lhs, rhs, dimensions, compute, inner_block), axis=0)

    count = lhs.shape[block.lhs]
    batch = math.prod(lhs.shape[axis] for axis in dimensions.lhs_batch[1:])
    block_results = batch * dimensions.rows(lhs) * dimensions.columns(rhs)
    if not is_at_least(count * block_results, AT_ONCE + 1):
        return summed(lhs, rhs)
    runs = [n for n in range(2, count) if count % n == 0]
    run = max((n for n in runs if not is_at_least(n * block_results, AT_ONCE + 1)), default=1)

    def run_at(i: Any) -> jax.Array:
        return summed(
            slice_along(lhs, block.lhs, i * run, run), slice_along(rhs, block.rhs, i * run, run)
        )

    return _summed(run_at, count // run, run_at(0))


def sum_in_turn(
    lhs: Any, rhs: Any, dimensions: Dimensions, compute: Compute, block: Block | None
) -> jax.Array:
    """Returns the result of `sum_of_blocks`, but contracts one block after another."""
    if block is None:
        return sum_of_blocks(lhs, rhs, dimensions, compute, None)

    def in_turn(lhs: Any, rhs: Any) -> jax.Array:
        def block_at(i: Any) -> jax.Array:
            items = item_along(lhs, block.lhs, i), item_along(rhs, block.rhs, i)
            return sum_in_turn(*items, dimensions, compute, find_block(*items, dimensions))

        return _summed(block_at, lhs.shape[block.lhs], block_at(0))

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


def _in_blocks(x: Any, axis: int, size: int) -> Any:
    return refine(x, axis, size) if size < block_size(x, axis) < x.shape[axis] else x


def _split(x: Any, axis: int, start: int, stop: int, size: int) -> Any:
    part = x[(slice(None),) * axis + (slice(start, stop),)] if stop - start < x.shape[axis] else x
    return part.reshape(*x.shape[:axis], (stop - start) // size, size, *x.shape[axis + 1 :])


def _batched(block: Block) -> Dimensions:
    """The dimensions after both axes were split in two: the first of each pair is a batch axis."""
    old = block.dimensions

    def moved(axes: tuple[int, ...], new_axis: int) -> tuple[int, ...]:
        return tuple(axis + (axis >= new_axis) for axis in axes)

    return Dimensions(
        old.lhs_rank + 1,
        old.rhs_rank + 1,
        moved(old.lhs_contracting, block.lhs),
        moved(old.rhs_contracting, block.rhs),
        (block.lhs, *moved(old.lhs_batch, block.lhs)),
        (block.rhs, *moved(old.rhs_batch, block.rhs)),
    )


# Scales are applied after the sum.


def with_scales(y: jax.Array, lhs: Any, rhs: Any, dimensions: Dimensions) -> jax.Array:
    """Multiplies a float contraction of codes by the scales of the operands that are QTensors."""
    left = dimensions.lhs_to_output(lhs.real_scale()) if isinstance(lhs, QTensor) else None
    right = dimensions.rhs_to_output(rhs.real_scale()) if isinstance(rhs, QTensor) else None
    return times_scales(y, left, right)


def times_scales(y: jax.Array, left: jax.Array | None, right: jax.Array | None) -> jax.Array:
    """Multiplies sums of codes by one or two scales, lined up with them, the left one first.

    A very large or small left scale is brought nearer to 1 by a power of two, which is applied
    last, so that no intermediate product is out of range if the result is not. Other scales do not
    change.
    """
    if left is None or right is None:
        scale = left if right is None else right
        return y if scale is None else y * scale.astype(y.dtype)
    left = left.astype(y.dtype)
    size = jnp.abs(lax.stop_gradient(left))
    large, small, unit = size > 2.0**64, size < 2.0**-64, jnp.ones((), y.dtype)
    nearer = jnp.where(large, unit * 2.0**-64, jnp.where(small, unit * 2.0**32, unit))
    back = jnp.where(large, unit * 2.0**64, jnp.where(small, unit * 2.0**-32, unit))
    return y * (left * nearer) * right.astype(y.dtype) * back
