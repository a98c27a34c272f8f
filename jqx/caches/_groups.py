"""Groups of numbers as codes of few bits between the least and the largest of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..numerics._shared import pack_bits, unpack_bits


class Groups(NamedTuple):
    """Numbers `low + step * code` along the last axis.

    Attributes:
      codes: uint8 [..., size * bits / 8], packed.
      low: the least of each group, [...].
      step: between two codes, [...]; 0 where all of a group are alike.
    """

    codes: jax.Array
    low: jax.Array
    step: jax.Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...], bits: int, dtype: jnp.dtype) -> "Groups":
        """Returns groups of zeros; the last axis is that of a group."""
        *lead, size = shape
        low = jnp.zeros(lead, dtype)
        return cls(jnp.zeros((*lead, size * bits // 8), jnp.uint8), low, low)

    @classmethod
    def of(cls, x: jax.Array, bits: int) -> "Groups":
        """Rounds groups along the last axis to nearest, ties to even. A NaN or an infinity makes
        all of its group NaN.
        """
        real, most = x.astype(jnp.float32), 2**bits - 1
        low, high = real.min(-1), real.max(-1)
        step = ((high - low) / most).astype(x.dtype)
        # XLA on CPU may lose a NaN in the least and the largest of vectors.
        low = jnp.where(jnp.isnan(real).any(-1), jnp.nan, low).astype(x.dtype)
        by = jnp.where(step > 0, step, jnp.ones_like(step)).astype(jnp.float32)[..., None]
        codes = jnp.round((real - low.astype(jnp.float32)[..., None]) / by)
        codes = jnp.clip(jnp.nan_to_num(codes), 0, most).astype(jnp.uint8)
        return cls(pack_bits(codes, bits, codes.ndim - 1), low, step)

    def values(self, bits: int, size: int) -> jax.Array:
        """Returns the numbers, [..., size], of the dtype of the steps."""
        codes = unpack_bits(self.codes, bits, self.codes.ndim - 1, size)
        low, step = (x.astype(jnp.float32)[..., None] for x in (self.low, self.step))
        return (low + step * codes.astype(jnp.float32)).astype(self.step.dtype)

    def put(self, groups: "Groups", places: jax.Array, axis: int) -> "Groups":
        """Writes groups at places along an axis; those out of bounds are dropped."""

        def put(own: jax.Array, other: jax.Array) -> jax.Array:
            index = (slice(None),) * axis + (places,)
            return own.at[index].set(other, mode="drop", unique_indices=True)

        return Groups(*map(put, self, groups))
