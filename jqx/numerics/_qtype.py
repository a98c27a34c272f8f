"""The contract of a number format: which real numbers its codes stand for."""

import abc
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from ._exact import divide
from ._rounding import RoundMode


class QType(abc.ABC):
    """A number format: a frozen, hashable value that every `qtype=` argument takes.

    A code stands for a real number; with a scale it stands for that number times the scale. A
    subclass is a frozen dataclass that says `name`, `bits`, `storage`, `low`, `high`, and how to
    `round`, `encode` and `decode`; a format of your own is one more.

    Attributes:
      uniform: whether the numbers are evenly spaced, as estimators that learn a step size require.
    """

    uniform: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What the format is called."""

    @property
    @abc.abstractmethod
    def bits(self) -> int:
        """Bits of one code."""

    @property
    @abc.abstractmethod
    def storage(self) -> jnp.dtype:
        """The dtype of arrays that hold one code an element."""

    @property
    @abc.abstractmethod
    def low(self) -> float:
        """The smallest finite number."""

    @property
    @abc.abstractmethod
    def high(self) -> float:
        """The largest finite number."""

    @property
    def levels(self) -> int:
        """How many codes there are."""
        return 2**self.bits

    @property
    def code_range(self) -> tuple[int, int] | None:
        """The smallest and the largest code; `None` where codes are no integers."""
        if not jnp.issubdtype(self.storage, jnp.integer):
            return None
        negative = 2 ** (self.bits - 1) if jnp.issubdtype(self.storage, jnp.signedinteger) else 0
        return -negative, 2**self.bits - 1 - negative

    @property
    def signed(self) -> bool:
        """Whether there are negative numbers."""
        return self.low < 0

    def scale_of(self, largest: jax.Array) -> jax.Array:
        """Returns the least scale at which `largest`, a magnitude, is in range with either sign; 0
        for 0. Where all numbers have one sign, that sign alone counts.
        """
        both = self.low < 0 < self.high
        limit = min(-self.low, self.high) if both else max(-self.low, self.high)
        return divide(largest, jnp.asarray(limit, largest.dtype))

    @abc.abstractmethod
    def round(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        """Rounds float32 or float64 values to numbers of the format, of the same dtype."""

    @abc.abstractmethod
    def encode(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        """Returns the codes of `round(y, mode)`, of dtype `storage`."""

    @abc.abstractmethod
    def decode(self, codes: jax.Array) -> jax.Array:
        """Returns the numbers that codes stand for, as float32."""

    def encode_bits(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        """Returns `to_bits(encode(y, mode))`, without making an array of a type below a byte."""
        return self.to_bits(self.encode(y, mode))

    def to_bits(self, codes: jax.Array) -> jax.Array:
        """Returns codes as uint8 below `2**bits`: what packing packs."""
        if codes.dtype == jnp.uint8:
            return codes
        if jnp.issubdtype(codes.dtype, jnp.floating):
            return lax.bitcast_convert_type(codes, _unsigned(codes.dtype)).astype(jnp.uint8)
        mask = jnp.uint8(2**self.bits - 1)
        return lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8) & mask

    def from_bits(self, bits: jax.Array) -> jax.Array:
        """Inverts `to_bits`."""
        if jnp.issubdtype(self.storage, jnp.floating):
            return lax.bitcast_convert_type(bits.astype(_unsigned(self.storage)), self.storage)
        return self.widen_bits(bits).astype(self.storage)

    def widen_bits(self, bits: jax.Array) -> jax.Array:
        """Returns codes, from `to_bits`, in a byte each: what `decode` takes as well."""
        if not jnp.issubdtype(self.storage, jnp.signedinteger):
            return bits
        sign = jnp.uint8(2 ** (self.bits - 1))  # (x ^ sign) - sign extends the sign bit
        return lax.bitcast_convert_type((bits ^ sign) - sign, jnp.int8)

    def __str__(self) -> str:
        return self.name


def _unsigned(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")
