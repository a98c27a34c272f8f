"""The interface of a number format: which real numbers its codes represent."""

import abc
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from ._exact import divide
from ._rounding import RoundMode


class QType(abc.ABC):
    """A number format: a frozen, hashable value that every `qtype=` argument accepts.

    A code represents a real number; with a scale, it represents that number times the scale. A
    subclass is a frozen dataclass that defines `name`, `bits`, `storage`, `low`, `high`, `round`,
    `encode` and `decode`. You can define your own formats as subclasses.

    Attributes:
      uniform: whether the numbers are evenly spaced, as estimators that learn a step size require.
    """

    uniform: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the format."""

    @property
    @abc.abstractmethod
    def bits(self) -> int:
        """Bits of one code."""

    @property
    @abc.abstractmethod
    def storage(self) -> jnp.dtype:
        """The dtype of arrays that hold one code per element."""

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
        """The number of codes."""
        return 2**self.bits

    @property
    def code_range(self) -> tuple[int, int] | None:
        """The smallest and the largest code; `None` if codes are not integers."""
        if not jnp.issubdtype(self.storage, jnp.integer):
            return None
        negative = 2 ** (self.bits - 1) if jnp.issubdtype(self.storage, jnp.signedinteger) else 0
        return -negative, 2**self.bits - 1 - negative

    @property
    def signed(self) -> bool:
        """Whether the format has negative numbers."""
        return self.low < 0

    def scale_of(self, largest: jax.Array) -> jax.Array:
        """Returns the smallest scale at which `largest`, a magnitude, is in range with either sign;
        0 for 0. If all numbers of the format have the same sign, only that sign counts.
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
        """Returns the numbers that codes represent, as float32."""

    def encode_bits(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        """Returns `to_bits(encode(y, mode))`, without an array of a type of less than 8 bits."""
        return self.to_bits(self.encode(y, mode))

    def to_bits(self, codes: jax.Array) -> jax.Array:
        """Returns codes as uint8 below `2**bits`, ready to be packed."""
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
        """Returns codes from the result of `to_bits`, one per byte; `decode` accepts them."""
        if not jnp.issubdtype(self.storage, jnp.signedinteger):
            return bits
        sign = jnp.uint8(2 ** (self.bits - 1))  # (x ^ sign) - sign extends the sign bit
        return lax.bitcast_convert_type((bits ^ sign) - sign, jnp.int8)

    def __str__(self) -> str:
        return self.name


def _unsigned(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")
