"""Groups of numbers as codes of few bits between the minimum and the maximum of each group."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..numerics._shared import pack_bits, unpack_bits

_PARTS = {4: (1.0,), 2: (1.0, 0.9, 0.8, 0.7)}
"""The parts of the range of a group that are tried, by bits."""


class Groups(NamedTuple):
    """Numbers `low + step * code` along the last axis.

    Attributes:
      codes: uint8 [..., size * bits / 8], packed.
      low: the number of code 0, float16 [...].
      step: the distance of two codes, float16 [...]; 0 if all numbers of a group are equal.
    """

    codes: jax.Array
    low: jax.Array
    step: jax.Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...], bits: int) -> "Groups":
        """Returns groups of zeros; the last axis of `shape` is that of a group."""
        *lead, size = shape
        low = jnp.zeros(lead, jnp.float16)
        return cls(jnp.zeros((*lead, size * bits // 8), jnp.uint8), low, low)

    @classmethod
    def of(cls, x: jax.Array, bits: int) -> "Groups":
        """Quantizes groups along the last axis, rounding to nearest, ties to even.

        Codes span the range from the minimum to the maximum, or a part of it if that loses less. A
        NaN, an infinity, or a number beyond the range of float16 makes its whole group NaN.
        """
        real = x.astype(jnp.float32)
        low, high = real.min(-1), real.max(-1)
        # XLA on CPU may lose a NaN in the minimum and maximum of vectors.
        low = jnp.where(jnp.isnan(real).any(-1), jnp.nan, low)
        found, lost = None, jnp.inf
        for part in _PARTS[bits]:
            cut = (high - low) * ((1 - part) / 2)
            own = cls._between(real, low + cut, high - cut, bits)
            error = jnp.square(own.values(bits, real.shape[-1]) - real).sum(-1)
            if found is None:
                found, lost = own, error
                continue
            better = error < lost
            pairs = zip(found, own, strict=True)
            found = cls(*(jnp.where(_spread(better, a), b, a) for a, b in pairs))
            lost = jnp.where(better, error, lost)
        assert found is not None
        return found

    @classmethod
    def _between(cls, x: jax.Array, low: jax.Array, high: jax.Array, bits: int) -> "Groups":
        most = 2**bits - 1
        step, low = ((high - low) / most).astype(jnp.float16), low.astype(jnp.float16)
        by = jnp.where(step > 0, step, jnp.ones_like(step)).astype(jnp.float32)[..., None]
        codes = jnp.round((x - low.astype(jnp.float32)[..., None]) / by)
        codes = jnp.clip(jnp.nan_to_num(codes), 0, most).astype(jnp.uint8)
        return cls(pack_bits(codes, bits, codes.ndim - 1), low, step)

    def values(self, bits: int, size: int) -> jax.Array:
        """Returns the numbers, float32 [..., size]."""
        codes = unpack_bits(self.codes, bits, self.codes.ndim - 1, size)
        low, step = (x.astype(jnp.float32)[..., None] for x in (self.low, self.step))
        return low + step * codes.astype(jnp.float32)

    def put(self, groups: "Groups", places: jax.Array, axis: int) -> "Groups":
        """Writes groups at positions along an axis; drops those out of bounds."""

        def put(own: jax.Array, other: jax.Array) -> jax.Array:
            index = (slice(None),) * axis + (places,)
            return own.at[index].set(other, mode="drop", unique_indices=True)

        return Groups(*map(put, self, groups))


def _spread(is_better: jax.Array, x: jax.Array) -> jax.Array:
    return is_better[(..., *(None,) * (x.ndim - is_better.ndim))]
