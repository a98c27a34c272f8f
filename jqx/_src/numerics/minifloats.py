"""Floating point formats of up to 8 bits: any exponent and mantissa width, and four families of
special values.

    value = (-1)**sign * 2**(exponent - bias) * 1.mantissa          exponent field > 0
          = (-1)**sign * 2**(1 - bias) * 0.mantissa                 exponent field = 0

Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0 for e4m3fn and e5m2; OCP Microscaling
Formats (MX) 1.0 for e2m3, e3m2 and e2m1; Noune et al., "8-bit Numerical Formats for Deep Neural
Networks", arXiv:2206.02915, for the fnuz formats.
"""

import dataclasses
import enum
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import check_fields, flag, instance, nothing, shown, whole
from ..errors import fail
from .exact import RoundMode, round_to_integer, step_of
from .qtype import QType


class Specials(enum.Enum):
    """Which codes of a minifloat are not finite numbers; the value is the suffix of its name."""

    INFINITY_AND_NAN = ""
    """The largest exponent holds infinity and NaN, as in IEEE 754."""
    NAN = "fn"
    """The code with all bits set is NaN; there is no infinity."""
    NEGATIVE_ZERO_IS_NAN = "fnuz"
    """The code of negative zero is NaN; there is no infinity and no negative zero."""
    NONE = "finite"
    """Every code is a finite number."""


@dataclasses.dataclass(frozen=True)
class Minifloat(QType):
    """A float with 1 sign bit, `exponent_bits` and `mantissa_bits`; at most 8 bits.

    Attributes:
      exponent_bits: 1 to 7.
      mantissa_bits: 0 or more.
      specials: which codes are infinity or NaN.
      bias: the bias of the exponent; `None` means `2**(exponent_bits - 1) - 1`, plus 1 if negative
        zero is NaN.
      saturate: whether values beyond the largest finite number, including infinity, become that
        number. Otherwise, values that would round beyond it become infinity, or NaN in a format
        without infinity.

    A NaN stays NaN, or becomes 0 in a format without NaN. Codes are stored in the JAX dtype of the
    format if there is one, else as bit patterns in uint8.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: the widths do not fit, or `saturate=False` for a format without infinity and NaN.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> e3m2 = jqx.numerics.Minifloat(3, 2, jqx.numerics.Specials.NONE)
      >>> e3m2.high, e3m2.bits
      (28.0, 6)
      >>> jqx.quantize_dequantize(jnp.array([1.1, 3.3, 99.0]), 1.0, qtype=e3m2)
      Array([ 1. ,  3.5, 28. ], dtype=float32)
    """

    exponent_bits: int
    mantissa_bits: int
    specials: Specials = Specials.INFINITY_AND_NAN
    bias: int = None  # type: ignore[assignment]  # resolved below
    saturate: bool = True

    def __post_init__(self) -> None:
        function = "numerics.Minifloat"
        check_fields(
            function,
            self,
            "pass for example Minifloat(4, 3, jqx.numerics.Specials.NAN).",
            exponent_bits=whole(1, 7),
            mantissa_bits=whole(0, 6),
            specials=instance(Specials),
            bias=whole(-(2**31), 2**31) | nothing(),
            saturate=flag(),
        )
        e, m = self.exponent_bits, self.mantissa_bits
        ieee, fn = (self.specials is s for s in (Specials.INFINITY_AND_NAN, Specials.NAN))
        if e + m > 7 or (m == 0 and ieee) or (e + m == 1 and fn):
            problem = f"{e} exponent bits, {m} mantissa bits and {self.specials} are no valid "
            problem += "format of at most 8 bits with the sign."
            fix = "choose 1 to 7 exponent bits; infinity and NaN need a mantissa bit."
            raise fail(function, problem, fix=fix)
        if self.bias is None:
            object.__setattr__(self, "bias", self._usual_bias)
        smallest_bias = 1 - m  # the steps of the smallest numbers must not exceed 1
        if not smallest_bias <= self.bias <= 100:
            problem = f"bias == {shown(self.bias)} takes numbers out of the normal float32 range."
            fix = f"choose a bias in [{smallest_bias}, 100]; the scale takes the power of two."
            raise fail(function, problem, fix=fix)
        if not self.saturate and self.specials is Specials.NONE:
            problem = "a format without infinity and NaN must saturate."
            raise fail(function, problem, fix="pass saturate=True, or other specials.")

    @property
    def name(self) -> str:
        e, m, specials = self.exponent_bits, self.mantissa_bits, self.specials
        suffix = specials.value
        if specials is Specials.NONE:
            suffix = "fn" if self.bits < 8 else "_finite"
        bias = "" if self.bias == self._usual_bias else f"b{self.bias}"
        overflow = "" if self.saturate else "_nonsaturating"
        return f"float{self.bits}_e{e}m{m}{bias}{suffix}{overflow}"

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def storage(self) -> jnp.dtype:
        return jnp.dtype(_DTYPES.get(dataclasses.replace(self, saturate=True), "uint8"))

    @property
    def high(self) -> float:
        return float(_number(self, self._largest))

    @property
    def low(self) -> float:
        return -self.high

    @property
    def levels(self) -> int:
        return 2 * self._largest + 1

    @property
    def _largest(self) -> int:
        """The code of the largest finite number."""
        match self.specials:
            case Specials.INFINITY_AND_NAN:
                return ((2**self.exponent_bits - 1) << self.mantissa_bits) - 1
            case Specials.NAN:
                return 2 ** (self.bits - 1) - 2
            case _:
                return 2 ** (self.bits - 1) - 1

    @property
    def _usual_bias(self) -> int:
        fnuz = self.specials is Specials.NEGATIVE_ZERO_IS_NAN
        return 2 ** (self.exponent_bits - 1) - 1 + fnuz

    @property
    def _least_exponent(self) -> int:
        """The exponent of the smallest normal number, and of all subnormal ones."""
        return 1 - self.bias

    def round(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        high = jnp.asarray(self.high, y.dtype)
        x = lax.clamp(-high, y, high) if self.saturate else y
        top = math.frexp(self.high)[1]  # the exponent from which on every value overflows
        step, inverse = step_of(x, self.mantissa_bits, self._least_exponent, top)
        r = round_to_integer(x * inverse, mode) * step
        if self.specials is Specials.NEGATIVE_ZERO_IS_NAN:
            r = jnp.where(r == 0, jnp.zeros_like(r), r)
        if not self.saturate:
            ieee = self.specials is Specials.INFINITY_AND_NAN
            beyond = jnp.copysign(jnp.asarray(jnp.inf if ieee else jnp.nan, y.dtype), r)
            r = jnp.where(jnp.abs(r) > high, beyond, r)
        if self.specials is Specials.NONE:
            r = jnp.where(jnp.isnan(y), jnp.zeros_like(r), r)
        return r

    def encode(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        return self.from_bits(self.encode_bits(y, mode))

    def encode_bits(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        """Rounds half to even on the bits of a float32; other modes call `round` first.

        A normal number is rounded by an integer rounding of its lowest bits, and its exponent gets
        the new bias. A subnormal number is rounded by adding the power of two whose last place is
        the step. Numbers beyond the largest have larger codes, and saturate as integers. (Without
        mantissa bits, an even code is not an even number of steps.)
        """
        in_bits = mode is RoundMode.NEAREST_TOWARD_EVEN and self.mantissa_bits > 0
        if not in_bits or not self.saturate or y.dtype != jnp.float32:
            y = self.round(y, mode).astype(jnp.float32)
        m, least_exponent = self.mantissa_bits, self._least_exponent
        bits = lax.bitcast_convert_type(y, jnp.int32)
        size = bits & 0x7FFFFFFF
        shift = 23 - m
        even = ((size >> shift) & 1) + ((1 << (shift - 1)) - 1 - ((126 + least_exponent) << 23))
        normal = lax.shift_right_logical(size + even, jnp.int32(shift))
        magic = np.float32(2.0 ** (least_exponent - m + 23))
        rounded = lax.bitcast_convert_type(size, jnp.float32) + magic
        subnormal = lax.bitcast_convert_type(rounded, jnp.int32) - int(magic.view(np.int32))
        infinite = self.specials is Specials.INFINITY_AND_NAN and not self.saturate
        code = jnp.where(size < (127 + least_exponent) << 23, subnormal, normal)
        code = jnp.minimum(code, self._largest + infinite)
        top = self.bits - 1
        sign = lax.shift_right_logical(bits, jnp.int32(31 - top)) & (1 << top)
        if self.specials is Specials.NEGATIVE_ZERO_IS_NAN:
            code = jnp.where(code == 0, 0, code | sign)
        else:
            code = code | sign
        return jnp.where(size > _INFINITY, self._nan or 0, code).astype(jnp.uint8)

    @property
    def _nan(self) -> int | None:
        """The code of NaN."""
        match self.specials:
            case Specials.INFINITY_AND_NAN:
                return self._largest + 1 + max(1, 1 << (self.mantissa_bits - 1))
            case Specials.NAN:
                return 2 ** (self.bits - 1) - 1
            case Specials.NEGATIVE_ZERO_IS_NAN:
                return 2 ** (self.bits - 1)
            case _:
                return None

    def to_bits(self, codes: jax.Array) -> jax.Array:
        if codes.dtype.name == "float4_e2m1fn":
            # XLA on CPU (jaxlib 0.10.2) cannot compile its bitcast inside a loop.
            return self.encode_bits(codes.astype(jnp.float32), RoundMode.NEAREST_TOWARD_EVEN)
        return super().to_bits(codes)

    def from_bits(self, bits: jax.Array) -> jax.Array:
        if self.storage.name == "float4_e2m1fn":
            return self.decode(bits).astype(self.storage)
        return super().from_bits(bits)

    def decode(self, codes: jax.Array) -> jax.Array:
        if codes.dtype.name == "float4_e2m1fn":
            return codes.astype(jnp.float32)
        code = self.to_bits(codes).astype(jnp.int32)
        m, least_exponent, top = self.mantissa_bits, self._least_exponent, self.bits - 1
        size = code & ((1 << top) - 1)
        sign = (code & (1 << top)) << (31 - top)
        moved = size << (23 - m)
        # A subnormal number is 2**least * 1.mantissa - 2**least.
        one = np.float32(2.0**least_exponent)
        tiny = lax.bitcast_convert_type(moved + ((127 + least_exponent) << 23), jnp.float32) - one
        normal = moved + ((127 - self.bias) << 23)
        value = jnp.where(size < 1 << m, lax.bitcast_convert_type(tiny, jnp.int32), normal)
        if self.specials is Specials.INFINITY_AND_NAN:
            value = jnp.where(size > self._largest, _INFINITY, value)
            value = jnp.where(size > self._largest + 1, _NAN, value)
        elif self.specials is Specials.NAN:
            value = jnp.where(size > self._largest, _NAN, value)
        value = value | sign
        if self.specials is Specials.NEGATIVE_ZERO_IS_NAN:
            value = jnp.where(code == self._nan, _NAN, value)
        return lax.bitcast_convert_type(value, jnp.float32)


_INFINITY, _NAN = 0x7F800000, 0x7FC00000  # as bits of a float32


def _number(qtype: Minifloat, code: int) -> float:
    """The number of a positive finite code."""
    exponent, mantissa = divmod(code, 2**qtype.mantissa_bits)
    fraction = mantissa / 2**qtype.mantissa_bits + (exponent > 0)
    return fraction * 2.0 ** (max(exponent, 1) - qtype.bias)


_DTYPES = {
    Minifloat(4, 3, Specials.NAN): "float8_e4m3fn",
    Minifloat(4, 3): "float8_e4m3",
    Minifloat(4, 3, Specials.NEGATIVE_ZERO_IS_NAN): "float8_e4m3fnuz",
    Minifloat(4, 3, Specials.NEGATIVE_ZERO_IS_NAN, bias=11): "float8_e4m3b11fnuz",
    Minifloat(5, 2): "float8_e5m2",
    Minifloat(5, 2, Specials.NEGATIVE_ZERO_IS_NAN): "float8_e5m2fnuz",
    Minifloat(3, 4): "float8_e3m4",
    Minifloat(2, 1, Specials.NONE): "float4_e2m1fn",
}
_FORMATS = {name: qtype for qtype, name in _DTYPES.items()}


@functools.cache
def minifloat_of(dtype: jnp.dtype) -> Minifloat | None:
    """Returns the format of a float dtype of up to 8 bits; `None` for another dtype."""
    return _FORMATS.get(dtype.name)


MINIFLOATS = tuple(_FORMATS)
"""Names of the minifloats with a JAX dtype."""

float6_e2m3fn: Minifloat = Minifloat(2, 3, Specials.NONE)
float6_e3m2fn: Minifloat = Minifloat(3, 2, Specials.NONE)
