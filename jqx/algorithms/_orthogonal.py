"""Random orthogonal matrices, float64 on the host: Hadamard matrices where available."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ..transforms import ChannelMap
from ._hadamard import factors_of, orthogonal
from ._labels import Array


@dataclasses.dataclass(frozen=True)
class Orthogonal:
    """A matrix `Q`: signs, then a Kronecker product of matrices for each block of as many channels
    as it has rows.

    Attributes:
      signs: signs of all channels, 1 or -1.
      factors: square matrices.
    """

    signs: Array
    factors: tuple[Array, ...]

    @classmethod
    def hadamard(cls, count: int, sizes: Sequence[int], seed: int) -> "Orthogonal":
        """Returns a product of Hadamard matrices of some sizes, with random signs."""
        return cls(signs_of(count, seed), tuple(map(orthogonal, sizes)))

    @classmethod
    def any(cls, count: int, seed: int) -> "Orthogonal":
        """Returns a matrix that mixes all channels; random if no Hadamard matrix is available."""
        if sizes := factors_of(count):
            return cls.hadamard(count, sizes, seed)
        q, r = np.linalg.qr(np.random.default_rng((seed, count)).normal(size=(count, count)))
        return cls(np.ones(count), (q * np.sign(np.diag(r)),))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of its factors."""
        return tuple(map(len, self.factors))

    def times(self, x: Array) -> Array:
        """Returns `x Q` along the last axis of an array, for each block of channels."""
        parts = x.reshape(*x.shape[:-1], -1, len(self.signs)) * self.signs
        blocks = parts.reshape(*x.shape[:-1], -1, *self.sizes)
        for i, factor in enumerate(self.factors):
            axis = i - len(self.factors)
            blocks = np.moveaxis(np.moveaxis(blocks, axis, -1) @ factor, -1, axis)
        return blocks.reshape(x.shape)

    def map(self, shape: Sequence[int], loops: Sequence[int]) -> ChannelMap:
        """Returns the rotation of a value at a site, in each step of the loops around it.

        Args:
          shape: [*batch, channels] of the value.
          loops: lengths of the loops.
        """
        return ChannelMap(
            scale=_float(np.broadcast_to(self._repeated(shape[-1]), (*loops, *shape))),
            factors=tuple(_steps(x, loops) for x in self.factors),
        )

    def inverse(self, gain: Array, loops: Sequence[int]) -> tuple[ChannelMap, ChannelMap]:
        """Returns a map that rotates a value back, and one that multiplies it by a gain after that.

        Args:
          gain: [*loops, *batch, channels].
          loops: lengths of the loops.
        """
        back = ChannelMap(factors=tuple(_steps(x.T, loops) for x in self.factors))
        return back, ChannelMap(scale=_float(gain * self._repeated(gain.shape[-1])))

    def _repeated(self, count: int) -> Array:
        return np.tile(self.signs, count // len(self.signs))


def signs_of(count: int, seed: int) -> Array:
    """Returns random signs for a number of channels."""
    return np.random.default_rng((seed, count)).choice(np.array([-1.0, 1.0]), count)


def _steps(x: Array, loops: Sequence[int]) -> "jnp.ndarray":
    return _float(np.broadcast_to(x, (*loops, *x.shape)))


def _float(x: Array) -> "jnp.ndarray":
    return jnp.asarray(x, jnp.float32)
