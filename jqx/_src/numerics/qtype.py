"""The interface of a number format: which real numbers its codes represent."""

import abc
import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from ..checks import check_fields, check_integer, flag, shown
from ..errors import fail
from .exact import RoundMode, divide, round_to_integer, saturating_float_sum, saturating_sum


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
        has_both_signs = self.low < 0 < self.high
        limit = min(-self.low, self.high) if has_both_signs else max(-self.low, self.high)
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


def neighbour(form: QType, y: jax.Array, noise: jax.Array) -> jax.Array:
    """Returns one of the two numbers of a format next to each element of `y`: with noise that is
    uniform in [0, 1), the one whose mean is `y` within the range of the format.
    """
    low, high = form.round(y, RoundMode.DOWN), form.round(y, RoundMode.UP)
    return jnp.where(noise * (high - low) < y - low, high, low)


def _unsigned(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")


# Integer formats of 2 to 32 bits, signed or unsigned, with an optional narrow range.
#
# Only these formats have zero points. Ternary is the narrow 2-bit format.


_NATIVE = (2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Integer(QType):
    """Integers of `bits` bits. Real numbers beyond the range saturate; NaN gives 0.

    Attributes:
      bits: 2 to 8, 16 or 32.
      signed: if True, two's complement, `-2**(bits - 1)` to `2**(bits - 1) - 1`; else 0 to
        `2**bits - 1`.
      narrow: excludes the smallest code, so that the range is symmetric (-127 to 127).

    Raises:
      TypeError: a field has the wrong type.
      ValueError: `bits` is not supported, or `narrow` is True for an unsigned format.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> int3 = jqx.numerics.Integer(3)
      >>> jqx.quantize(jnp.array([-9.0, 0.3, 2.6]), 1.0, qtype=int3)
      Array([-4,  0,  3], dtype=int8)
    """

    uniform = True

    bits: int = 8  # type: ignore[assignment]
    signed: bool = True  # type: ignore[assignment]
    narrow: bool = False

    def __post_init__(self) -> None:
        name = "numerics.Integer"
        object.__setattr__(self, "bits", check_integer(name, "bits", self.bits))
        check_fields(name, self, signed=flag(), narrow=flag())
        if not 2 <= self.bits <= 8 and self.bits not in _NATIVE:
            fix = "pass 2 to 8, 16 or 32; for one bit, use jqx.numerics.binary."
            raise fail(name, f"bits == {shown(self.bits)} is not supported.", fix=fix)
        if not self.signed and self.narrow:
            problem = "an unsigned format has no negative code to exclude."
            raise fail(name, problem, fix="drop narrow, or pass signed=True.")

    @property
    def name(self) -> str:
        if self.narrow and self.bits == 2:
            return "ternary"
        return f"{'' if self.signed else 'u'}int{self.bits}{'_narrow' if self.narrow else ''}"

    @property
    def storage(self) -> jnp.dtype:
        bits = self.bits if self.bits in _NATIVE and not self.narrow else max(8, self.bits)
        return jnp.dtype(f"{'' if self.signed else 'u'}int{bits}")

    @property
    def low(self) -> int:
        return -(2 ** (self.bits - 1)) + self.narrow if self.signed else 0

    @property
    def high(self) -> int:
        return 2 ** (self.bits - self.signed) - 1

    @property
    def levels(self) -> int:
        return self.high - self.low + 1

    @property
    def code_range(self) -> tuple[int, int]:
        return self.low, self.high

    def round(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        return saturating_float_sum(round_to_integer(y, mode), None, self.low, self.high)

    def encode(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        r = round_to_integer(y, mode)
        return saturating_sum(r, None, self.low, self.high, self.storage)

    def encode_bits(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        return self.sum_to_bits(round_to_integer(y, mode), None)

    def sum_to_bits(self, r: jax.Array, zero_point: jax.Array | None) -> jax.Array:
        """Returns the bits of `r + zero_point`, saturated; `r` holds integers as floats."""
        byte = jnp.int8 if self.signed else jnp.uint8
        return self.to_bits(saturating_sum(r, zero_point, self.low, self.high, byte))

    def decode(self, codes: jax.Array) -> jax.Array:
        return codes.astype(jnp.float32)


@functools.cache
def integer_of(dtype: jnp.dtype) -> Integer:
    """Returns the format of an integer dtype."""
    info = jnp.iinfo(dtype)
    return Integer(int(info.bits), signed=int(info.min) < 0)


INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in _NATIVE)
"""Names of the integer formats with a JAX dtype."""

int3: Integer = Integer(3)
int5: Integer = Integer(5)
int6: Integer = Integer(6)
int7: Integer = Integer(7)
uint3: Integer = Integer(3, signed=False)
uint5: Integer = Integer(5, signed=False)
uint6: Integer = Integer(6, signed=False)
uint7: Integer = Integer(7, signed=False)
ternary: Integer = Integer(2, narrow=True)
