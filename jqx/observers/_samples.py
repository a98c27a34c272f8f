"""A sample of the rows of an operand that does not depend on the order or grouping of batches.

Source: Cohen and Kaplan, "Summarizing Data using Bottom-k Sketches", PODC 2007.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_integer
from .._errors import fail
from ._hessian import check_rows
from ._observer import ObservedSite, serializable
from ._weighted import Weighted

_NONE = np.uint32(2**32 - 1)
"""The number of an empty slot."""


@serializable
class SamplesStats(NamedTuple):
    """A sample of the distinct rows of an operand.

    Attributes:
      rows: float32 [*batch, count, channels], for a `ragged_dot` [experts, count, channels]; 0 in
        empty slots.
      weights: how often each row was seen, or the sum of its weights, float32 [..., count]; 0 in
        empty slots.
      numbers: the hashes by which rows were chosen, uint32 [..., count, 2], in ascending order.
    """

    rows: jax.Array
    weights: jax.Array
    numbers: jax.Array


@dataclasses.dataclass(frozen=True)
class Samples(Weighted):
    """Keeps a sample of the distinct rows of an activation that is multiplied by a weight.

    Rows are those of `hessian`. Each row has a number that is a hash of its values, and the rows
    with the smallest numbers are kept. So all distinct rows are equally likely to be kept, and the
    sample is the same however rows are split into batches, devices and steps. `weights` has how
    often each was seen: a token that begins every sequence takes one slot.

    Attributes:
      count: number of rows to keep, at least 1.

    Raises:
      TypeError: if `count` is not an integer, or `weight` is not a function.
      ValueError: if `count` is less than 1.
      NotImplementedError: as for `hessian`.
    """

    count: int

    def __post_init__(self) -> None:
        super().__post_init__()
        count = check_integer("observers.samples", "count", self.count)
        if not count >= 1:
            raise fail(
                "observers.samples",
                "`count` is out of range.",
                given=f"count == {count}",
                expected="at least 1",
                fix="pass the number of rows to keep.",
            )

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> SamplesStats:
        """Returns empty slots."""
        check_rows("observers.samples", site)
        *stack, _, size = jax.eval_shape(site.rows, operand).shape
        stack += [] if site.experts is None else [site.experts]
        return SamplesStats(
            jnp.zeros((*stack, self.count, size), jnp.float32),
            jnp.zeros((*stack, self.count), jnp.float32),
            jnp.full((*stack, self.count, 2), _NONE),
        )

    def observe(self, x: jax.Array, site: ObservedSite) -> SamplesStats:
        """Returns a sample of the rows of one operand."""
        check_rows("observers.samples", site)
        rows, weights = site.rows(x).astype(jnp.float32), site.row_weights(x)
        if weights is None:
            weights = jnp.ones(rows.shape[:-1], jnp.float32)
        given = SamplesStats(rows, weights, _numbers(rows))
        if site.sizes is None:
            return self._kept(given)
        expert = site.expert_of_rows(len(x))

        def of_expert(own: jax.Array) -> SamplesStats:
            return self._kept(given._replace(weights=jnp.where(expert == own, weights, 0)))

        return lax.map(of_expert, jnp.arange(len(site.sizes), dtype=jnp.int32))

    def merge(self, a: SamplesStats, b: SamplesStats) -> SamplesStats:
        """Returns a sample of the rows of both."""
        parts = zip(a, b, (-2, -1, -2), strict=True)
        return self._kept(SamplesStats(*(jnp.concatenate([x, y], axis) for x, y, axis in parts)))

    def _kept(self, given: SamplesStats) -> SamplesStats:
        one = partial(_smallest, count=self.count)
        for _ in given.weights.shape[:-1]:
            one = jax.vmap(one)
        return one(given)

    def __str__(self) -> str:
        return f"samples({self.count})"


samples = Samples


def _numbers(rows: jax.Array) -> jax.Array:
    """Returns two uint32 hashes of the values of each row."""
    bits = lax.bitcast_convert_type(rows, jnp.uint32)
    place = lax.broadcasted_iota(jnp.uint32, rows.shape, rows.ndim - 1)

    def number(salt: int) -> jax.Array:
        salted = bits ^ (place * np.uint32(0x9E3779B9) + np.uint32(salt))
        total = jnp.sum(_mixed(salted), axis=-1, dtype=jnp.uint32)
        return jnp.minimum(_mixed(total), _NONE - np.uint32(1))

    return jnp.stack([number(0x2545F491), number(0x6C078965)], axis=-1)


def _mixed(x: jax.Array) -> jax.Array:
    """Returns 32 bits, each of which depends on all input bits (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _smallest(given: SamplesStats, count: int) -> SamplesStats:
    """Returns the rows with the smallest numbers, each once."""
    # One empty row is appended, because indices need an element to point to.
    rows, weights, numbers = (jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1)) for x in given)
    is_row = weights > 0
    first, second = (jnp.where(is_row, x, _NONE) for x in numbers.T)
    place = lax.iota(jnp.int32, len(weights))
    first, second, order = lax.sort((first, second, place), num_keys=2)
    is_new = (first != jnp.roll(first, 1)) | (second != jnp.roll(second, 1))
    which = jnp.cumsum(is_new.at[0].set(True)) - 1
    total = jax.ops.segment_sum(jnp.where(is_row, weights, 0)[order], which, count)
    start = jnp.minimum(jax.ops.segment_min(place, which, count), len(weights) - 1)
    kept, found = order[start], total > 0
    return SamplesStats(
        jnp.where(found[:, None], rows[kept], 0),
        total,
        jnp.where(found[:, None], numbers[kept], _NONE),
    )
