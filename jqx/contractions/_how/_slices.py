"""A large operand in slices, one after another, so that no temporary is as large as the operand."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export, lax

from ... import _compat
from ...numerics import format_of
from ...tensor import QTensor
from ...tensor._shared import Layout, Packing, refine
from .._what._dimensions import Dimensions


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
    if cut is None or _compat.is_on_a_mesh(lhs, rhs.values):
        return compute(lhs, rhs)
    n = rhs.shape[cut.axis]
    left = _slices_of_array(lhs, dimensions.partner(cut.axis), cut, n)
    right = _slices_of_tensor(with_own_second_scales(rhs, cut.axis), cut)
    # Checkpointed, so that the backward pass does not store the slices.
    slice_at = jax.checkpoint(lambda i: compute(left.at(i), right.at(i)))
    rest = compute(left.rest(), right.rest()) if cut.full < n else None
    if cut.axis in dimensions.rhs_contracting:
        return _summed(slice_at, cut, rest)
    return _joined(slice_at, cut, rest, dimensions.output_axis(cut.axis))


class _Slices(NamedTuple):
    """An operand in slices: the slice with a number, and the rest after the full slices."""

    at: Callable[[Any], Any]
    rest: Callable[[], Any]


def _slices_of_array(x: jax.Array, axis: int | None, cut: Cut, n: int) -> _Slices:
    """Cuts an array along the partner, of size `n`, of the axis that is cut, if it has one."""
    if axis is None:
        return _Slices(lambda i: x, lambda: x)
    parts = _in_parts(x, axis, cut, n)
    return _Slices(lambda i: item_at(parts, i), lambda: lax.slice_in_dim(x, cut.full, n, axis=axis))


def _slices_of_tensor(q: QTensor, cut: Cut) -> _Slices:
    q = with_own_second_scales(q, cut.axis)
    parts = jax.tree.map(lambda leaf: _in_parts_of(leaf, cut, q), q)
    return _Slices(
        lambda i: _laid_out(jax.tree.map(lambda leaf: item_at(leaf, i), parts), cut, q),
        lambda: q[(slice(None),) * cut.axis + (slice(cut.full, None),)],
    )


def _summed(slice_at: Slice, cut: Cut, rest: jax.Array | None) -> jax.Array:
    """Returns the sum of the results of all slices and of the rest."""
    start = slice_at(0) if rest is None else rest + slice_at(0)
    steps = jnp.arange(1, cut.number)
    return lax.scan(lambda total, i: (total + slice_at(i), None), start, steps)[0]


def _joined(slice_at: Slice, cut: Cut, rest: jax.Array | None, at: int) -> jax.Array:
    """Returns the results of all slices and of the rest, joined along an axis."""
    _, parts = lax.scan(lambda carry, i: (carry, slice_at(i)), None, jnp.arange(cut.number))
    y = in_order(parts, cut, at)
    return y if rest is None else jnp.concatenate([y, rest], axis=at)


def with_own_second_scales(q: QTensor, axis: int) -> QTensor:
    """Gives each quantized scale along an axis its own second scale if they share these in blocks,
    because slices follow the scales, not the blocks of second scales.
    """
    if not isinstance(q.scale, QTensor) or not q.scale.groups.is_blocked(axis):
        return q
    return dataclasses.replace(q, scale=refine(q.scale, axis))


def in_order(parts: jax.Array, cut: Cut, at: int) -> jax.Array:
    """Joins the results of slices, stacked, along the axis `at` of a result."""
    shape = parts.shape[1:]
    parts = parts.reshape(cut.number, *shape[:at], cut.runs, cut.size, *shape[at + 1 :])
    return jnp.moveaxis(parts, 0, at + 1).reshape(*shape[:at], cut.full, *shape[at + 1 :])


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
    loop (see `_xla_cpu`).
    """
    narrow = x.dtype.itemsize == 1 and x.dtype not in (jnp.int8, jnp.uint8)
    return lax.optimization_barrier((x, jnp.asarray(step))) if narrow else (x, step)


def cut_of(q: QTensor, axis: int, count: int) -> Cut | None:
    """Returns how to cut an axis into about `count` slices, between blocks; `None` if it is too
    short, of a symbolic size, or packed so that it cannot be cut.
    """
    runs = _runs(q, axis)
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


def _runs(q: QTensor, axis: int) -> int | None:
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
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    parts = x.reshape(*before, cut.runs, cut.number, size, *after)
    parts = jnp.moveaxis(parts, axis + 1, 0)
    return parts.reshape(cut.number, *before, cut.runs * size, *after)


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
