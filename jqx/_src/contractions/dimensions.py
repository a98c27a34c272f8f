"""The axes of a `lax.dot_general`, and the places of the operands' axes in its result."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import fail
from ..numerics.exact import common_dtype
from ..statistics.granularity import Groups
from ..tensor.layout import permuted_axis, taken
from ..tensor.qtensor import QTensor

# The roles of the axes of an operand in a contraction.


Axes = tuple[int, ...]


class OperandAxes(NamedTuple):
    """The axes of one operand.

    Attributes:
      contracted: the axes that are summed over.
      kept: the axes of the result; each of their indices may have its own scale.
      batch: those of the kept axes that are batch axes.
    """

    contracted: Axes
    kept: Axes
    batch: Axes = ()


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """Normalised dimension numbers of operands of known rank.

    The axes of the result are: batch axes, free axes of the left operand, then of the right one.
    """

    lhs_rank: int
    rhs_rank: int
    lhs_contracting: tuple[int, ...]
    rhs_contracting: tuple[int, ...]
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]

    @classmethod
    def of(cls, numbers: lax.DotDimensionNumbers, lhs_rank: int, rhs_rank: int) -> "Dimensions":
        """Reads dimension numbers in the form that `lax.dot_general` takes."""
        (lc, rc), (lb, rb) = numbers

        def normal(axes: Sequence[int], rank: int) -> tuple[int, ...]:
            for axis in axes:
                if axis not in range(-rank, rank):
                    problem = f"axis {axis} of `dimension_numbers` is out of range for rank {rank}."
                    fix = "name axes that the operands have."
                    raise fail("dot_general", problem, fix=fix, error=TypeError)
            return tuple(int(axis) % rank for axis in axes)

        return cls(
            lhs_rank,
            rhs_rank,
            normal(lc, lhs_rank),
            normal(rc, rhs_rank),
            normal(lb, lhs_rank),
            normal(rb, rhs_rank),
        )

    @functools.cached_property
    def axes(self) -> tuple[OperandAxes, OperandAxes]:
        """The roles of the axes of both operands."""
        return (
            OperandAxes(self.lhs_contracting, self.lhs_kept, self.lhs_batch),
            OperandAxes(self.rhs_contracting, self.rhs_kept, self.rhs_batch),
        )

    @functools.cached_property
    def numbers(self) -> lax.DotDimensionNumbers:
        """The dimension numbers as `lax.dot_general` takes them."""
        return (
            (self.lhs_contracting, self.rhs_contracting),
            (self.lhs_batch, self.rhs_batch),
        )

    @functools.cached_property
    def lhs_kept(self) -> tuple[int, ...]:
        """Axes of the left operand that the result has: batch axes and free ones."""
        return tuple(i for i in range(self.lhs_rank) if i not in self.lhs_contracting)

    @functools.cached_property
    def rhs_kept(self) -> tuple[int, ...]:
        """Axes of the right operand that the result has: batch axes and free ones."""
        return tuple(i for i in range(self.rhs_rank) if i not in self.rhs_contracting)

    @functools.cached_property
    def lhs_free(self) -> tuple[int, ...]:
        """Axes that only the left operand has."""
        return tuple(i for i in self.lhs_kept if i not in self.lhs_batch)

    @functools.cached_property
    def rhs_free(self) -> tuple[int, ...]:
        """Axes that only the right operand has."""
        return tuple(i for i in self.rhs_kept if i not in self.rhs_batch)

    @functools.cached_property
    def swapped(self) -> "Dimensions":
        """The dimensions of the operands in the other order."""
        return Dimensions(
            self.rhs_rank,
            self.lhs_rank,
            self.rhs_contracting,
            self.lhs_contracting,
            self.rhs_batch,
            self.lhs_batch,
        )

    def renamed(self, lhs: Sequence[int], rhs: Sequence[int]) -> "Dimensions":
        """The dimensions of operands whose axis `i` was moved to `lhs[i]`, `rhs[i]`."""

        def moved(axes: tuple[int, ...], to: Sequence[int]) -> tuple[int, ...]:
            return tuple(to[axis] for axis in axes)

        return dataclasses.replace(
            self,
            lhs_contracting=moved(self.lhs_contracting, lhs),
            rhs_contracting=moved(self.rhs_contracting, rhs),
            lhs_batch=moved(self.lhs_batch, lhs),
            rhs_batch=moved(self.rhs_batch, rhs),
        )

    def swap_output(self, y: jax.Array) -> jax.Array:
        """Reorders the result of the `swapped` contraction: left axes before right axes."""
        batch, left, right = len(self.lhs_batch), len(self.lhs_free), len(self.rhs_free)
        if not (left and right):
            return y
        rights, lefts = range(batch, batch + right), range(batch + right, batch + right + left)
        return jnp.transpose(y, (*range(batch), *lefts, *rights))

    def output_axis(self, rhs_axis: int) -> int:
        """Returns the place, in the result, of an axis that the right operand keeps."""
        if rhs_axis in self.rhs_batch:
            return self.rhs_batch.index(rhs_axis)
        return len(self.lhs_batch) + len(self.lhs_free) + self.rhs_free.index(rhs_axis)

    def partner(self, rhs_axis: int) -> int | None:
        """Returns the axis of the left operand that a contracted or batch axis is paired with."""
        lefts = (*self.lhs_contracting, *self.lhs_batch)
        rights = (*self.rhs_contracting, *self.rhs_batch)
        return dict(zip(rights, lefts, strict=True)).get(rhs_axis)

    def fits(self, lhs: Sequence[Any], rhs: Sequence[Any]) -> bool:
        """Whether operands of two shapes can be contracted: no axis is named twice, and paired axes
        have the same size.
        """
        lefts = (*self.lhs_contracting, *self.lhs_batch)
        rights = (*self.rhs_contracting, *self.rhs_batch)
        counts = len(self.lhs_batch) == len(self.rhs_batch) and len(lefts) == len(rights)
        distinct = len({*lefts}) == len(lefts) and len({*rights}) == len(rights)
        if not (counts and distinct):
            return False
        return all(lhs[i] == rhs[j] for i, j in zip(lefts, rights, strict=True))

    def result_shape(self, lhs: Sequence[Any], rhs: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the shape of the result of operands of two shapes."""
        left = (lhs[axis] for axis in (*self.lhs_batch, *self.lhs_free))
        return (*left, *(rhs[axis] for axis in self.rhs_free))

    def rows(self, lhs: Any) -> int:
        """Returns how many elements the free axes of the left operand have."""
        return math.prod(lhs.shape[axis] for axis in self.lhs_free)

    def columns(self, rhs: Any) -> int:
        """Returns how many elements the free axes of the right operand have."""
        return math.prod(rhs.shape[axis] for axis in self.rhs_free)

    def contracted_size(self, lhs: Any) -> int:
        """Returns the number of products that are summed for each element of the result."""
        return math.prod(lhs.shape[axis] for axis in self.lhs_contracting)

    def lhs_to_output(self, x: jax.Array) -> jax.Array:
        """Lines an array of the left rank, of size 1 along contracted axes, up with the result."""
        order = (*self.lhs_batch, *self.lhs_free)
        shape = tuple(x.shape[axis] for axis in order) + (1,) * len(self.rhs_free)
        return jnp.transpose(x, (*order, *self.lhs_contracting)).reshape(shape)

    def rhs_to_output(self, x: jax.Array) -> jax.Array:
        """Lines an array of the right rank, of size 1 along contracted axes, up with the result."""
        batch = tuple(x.shape[axis] for axis in self.rhs_batch)
        free = tuple(x.shape[axis] for axis in self.rhs_free)
        order = (*self.rhs_batch, *self.rhs_free, *self.rhs_contracting)
        return jnp.transpose(x, order).reshape(batch + (1,) * len(self.lhs_free) + free)


# Contractions of QTensors with offsets and permuted axes, without dequantizing a weight. Offsets
# are moved out of the sum, and the other operand is permuted to the order of a permuted axis.
#
#     sum_k x[k] (c[k] s[g] + o[g])  =  sum_k x[k] c[k] s[g]  +  sum_g (sum_{k in g} x[k]) o[g]


def in_order(left: Any, right: Any, dimensions: Dimensions) -> tuple[Any, Any]:
    """Returns operands whose contracted axes have the same order, without an `order` field: the
    other operand of a permuted axis is permuted in the same way.
    """
    ordered = (
        _ordered_as(left, right, dimensions.swapped),
        _ordered_as(right, left, dimensions),
    )
    left, right = (_without_order(x) for x in ordered)
    return left, right


def _without_order(x: Any) -> Any:
    if not isinstance(x, QTensor) or x.order is None:
        return x
    return dataclasses.replace(x, order=None)


def _ordered_as(x: Any, q: Any, dimensions: Dimensions) -> Any:
    """Returns the right operand `x`, contracted with `q`, in its order."""
    order = q.order if isinstance(q, QTensor) else None
    axis = None if order is None else permuted_axis(order)
    if order is None or axis is None:
        return x
    axis %= q.ndim
    pairs = dict(zip(dimensions.lhs_contracting, dimensions.rhs_contracting, strict=True))
    batch = dict(zip(dimensions.lhs_batch, dimensions.rhs_batch, strict=True))
    order_axes = {i for i, n in enumerate(order.shape) if n != 1 and i != axis}
    plain = not isinstance(x, QTensor) or (x.order is None and not order_axes)
    if not (axis in pairs and order_axes <= {*batch} and plain):
        raise fail(
            "dot_general",
            f"axis {axis - q.ndim} of an operand is permuted, and cannot be contracted so.",
            given=f"{q!r}, contracted axes {tuple(pairs)}, batch axes {tuple(batch)}",
            fix="contract q.dequantize(), or the other axis.",
        )
    target = {i: pairs[i] if i == axis else batch[i] for i in (*order_axes, axis)}
    stored, by_target = sorted(target), sorted(target, key=target.__getitem__)
    indices = order.reshape([order.shape[i] for i in stored])
    indices = indices.transpose([stored.index(i) for i in by_target])
    shape = [1] * x.ndim
    for i in target:
        shape[target[i]] = order.shape[i]
    indices = indices.reshape(shape)
    if isinstance(x, QTensor):
        return x.take(indices.reshape(-1), pairs[axis])
    return taken(x, indices, pairs[axis])


def of_offset(x: Any, q: QTensor, dimensions: Dimensions) -> jax.Array:
    """Returns the term that the offset of a QTensor adds to its contraction with `x`, an array or
    QTensor on the left: sums over groups, times the offset of each group.

    It is computed in float32 on every platform: it is cheap compared to the codes, and often
    cancels most of their sum.
    """
    offset = q.real_offset()
    assert offset is not None
    wide = common_dtype(x.dtype, offset.dtype)
    x = x.astype(wide)
    x, offset = x.dequantize() if isinstance(x, QTensor) else x, offset.astype(wide)
    sizes = [1] * x.ndim
    for mine, axis in zip(dimensions.lhs_contracting, dimensions.rhs_contracting, strict=True):
        sizes[mine] = q.shape[axis] if offset.shape[axis] == 1 else q.groups.sizes[axis]
    sums = Groups(x.shape, tuple(sizes)).reduce(jnp.sum, x, 0)
    for axis in dimensions.rhs_kept:
        n = q.shape[axis]
        if offset.shape[axis] != n:
            size = n if offset.shape[axis] == 1 else q.groups.sizes[axis]
            offset = jnp.take(offset, np.arange(n, dtype=np.int32) // size, axis, mode="clip")
    return lax.dot_general(
        sums,
        offset,
        dimensions.numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=wide,
    )


def check_bare(function: str, *operands: Any, context: str = "") -> None:
    """Checks that operands have neither an offset nor a permuted axis."""
    for q in operands:
        if isinstance(q, QTensor) and not (q.offset is None and q.order is None):
            problem = f"an operand has a float offset, or a permuted axis{context}."
            raise fail(function, problem, given=repr(q), fix="pass q.dequantize().")
