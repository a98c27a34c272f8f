"""The axes of a `lax.dot_general`, and where each operand's axes stand in its result."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import require_that


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """Normalised dimension numbers of operands of known rank.

    The axes of the result are: batch axes, then what the left operand keeps, then the right.
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
                require_that(
                    -rank <= axis < rank,
                    error=TypeError,
                    function="dot_general",
                    problem=f"axis {axis} of `dimension_numbers` is out of range.",
                    given=f"dimension_numbers == {numbers}, ranks {lhs_rank} and {rhs_rank}",
                    expected=f"an axis in [{-rank}, {rank - 1}]",
                    mend="name axes that the operands have.",
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
        """Axes of the left operand alone."""
        return tuple(i for i in self.lhs_kept if i not in self.lhs_batch)

    @property
    def rhs_free(self) -> tuple[int, ...]:
        """Axes of the right operand alone."""
        return tuple(i for i in self.rhs_kept if i not in self.rhs_batch)

    def contracted_size(self, lhs: Any) -> int:
        """Returns how many products each element of the result sums."""
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
