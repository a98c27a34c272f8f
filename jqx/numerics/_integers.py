"""Integer formats of 2 to 32 bits, signed or unsigned, with an optional narrow range.

Only these formats have zero points. Ternary is the narrow 2-bit format.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .._checks import check_instance, check_integer
from .._errors import fail
from ._exact import saturating_float_sum, saturating_sum
from ._qtype import QType
from ._rounding import RoundMode, round_to_integer

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
        object.__setattr__(self, "bits", check_integer("numerics.Integer", "bits", self.bits))
        for field in ("signed", "narrow"):
            value = getattr(self, field)
            check_instance(
                "numerics.Integer", field, value, bool, fix=f"pass {field}=True or {field}=False."
            )
        if not 2 <= self.bits <= 8 and self.bits not in _NATIVE:
            raise fail(
                "numerics.Integer",
                "the number of bits is not supported.",
                given=f"bits == {self.bits}",
                expected="2 to 8, 16 or 32",
                fix="choose one of these; for one bit, use jqx.numerics.binary.",
            )
        if not self.signed and self.narrow:
            raise fail(
                "numerics.Integer",
                "an unsigned format has no negative code to exclude.",
                given="signed == False, narrow == True",
                expected="narrow=False",
                fix="drop narrow, or pass signed=True.",
            )

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
