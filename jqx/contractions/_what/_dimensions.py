"""The axes of a `lax.dot_general`, and the places of the operands' axes in its result."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._errors import fail
from ._axes import OperandAxes


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
                if not -rank <= axis < rank:
                    raise fail(
                        "dot_general",
                        f"axis {axis} of `dimension_numbers` is out of range.",
                        given=f"dimension_numbers == {numbers}, ranks {lhs_rank} and {rhs_rank}",
                        expected=f"an axis in [{-rank}, {rank - 1}]",
                        fix="name axes that the operands have.",
                        error=TypeError,
                    )
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

    @property
    def numbers(self) -> lax.DotDimensionNumbers:
        """The dimension numbers as `lax.dot_general` takes them."""
        return (
            (self.lhs_contracting, self.rhs_contracting),
            (self.lhs_batch, self.rhs_batch),
        )

    @property
    def lhs_kept(self) -> tuple[int, ...]:
        """Axes of the left operand that the result has: batch axes and free ones."""
        return tuple(i for i in range(self.lhs_rank) if i not in self.lhs_contracting)

    @property
    def rhs_kept(self) -> tuple[int, ...]:
        """Axes of the right operand that the result has: batch axes and free ones."""
        return tuple(i for i in range(self.rhs_rank) if i not in self.rhs_contracting)

    @property
    def lhs_free(self) -> tuple[int, ...]:
        """Axes that only the left operand has."""
        return tuple(i for i in self.lhs_kept if i not in self.lhs_batch)

    @property
    def rhs_free(self) -> tuple[int, ...]:
        """Axes that only the right operand has."""
        return tuple(i for i in self.rhs_kept if i not in self.rhs_batch)

    @property
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
