"""E8M0: powers of two from 2**-127 to 2**127, and NaN; the scale format of OCP Microscaling.

Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.4.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._powers import exponent_of, power_of_two, times_power_of_two
from ._qtype import QType
from ._rounding import RoundMode

E8M0 = jnp.dtype(jnp.float8_e8m0fnu)


@dataclasses.dataclass(frozen=True)
class PowerOfTwo(QType):
    """The 8 exponent bits of a float32, without sign and mantissa; stored as float8_e8m0fnu.

    There is neither zero nor infinity. Numbers that are too small, including zero, become 2**-127;
    numbers that are too large become 2**127. Negative numbers and NaN become NaN. Nearest modes
    round to the nearest value, with ties at 1.5 * 2**n; the even neighbour is the one with the even
    code.
    """

    @property
    def name(self) -> str:
        return E8M0.name

    @property
    def bits(self) -> int:
        return 8

    @property
    def storage(self) -> jnp.dtype:
        return E8M0

    @property
    def low(self) -> float:
        return 2.0**-127

    @property
    def high(self) -> float:
        return 2.0**127

    @property
    def levels(self) -> int:
        return 255

    def round(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        codes = self.encode(y, mode)
        if y.dtype == jnp.float32:
            return self.decode(codes)
        nan = jnp.full(y.shape, jnp.nan, y.dtype)
        return jnp.where(jnp.isnan(codes), nan, power_of_two(exponent_of_e8m0(codes), y.dtype))

    def encode(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        exponent = jnp.clip(exponent_of(y), -127, 127)
        fraction = times_power_of_two(y, -exponent)
        one, tie = np.asarray(1, y.dtype), np.asarray(1.5, y.dtype)
        match mode:
            case RoundMode.UP | RoundMode.TOWARD_INFINITY:
                up = fraction > one
            case RoundMode.DOWN | RoundMode.TOWARD_ZERO:
                up = jnp.zeros(y.shape, bool)
            case RoundMode.NEAREST_UPWARD | RoundMode.NEAREST_TOWARD_INFINITY:
                up = fraction >= tie
            case RoundMode.NEAREST_DOWNWARD | RoundMode.NEAREST_TOWARD_ZERO:
                up = fraction > tie
            case RoundMode.NEAREST_TOWARD_EVEN:
                odd = (exponent & 1) == 0  # the code is exponent + 127
                up = (fraction > tie) | ((fraction == tie) & odd)
        code = jnp.clip(exponent + up.astype(jnp.int32) + 127, 0, 254)
        code = jnp.where((y >= 0) & ~jnp.isnan(y), code, 255)
        return lax.bitcast_convert_type(code.astype(jnp.uint8), E8M0)

    def decode(self, codes: jax.Array) -> jax.Array:
        code = self.to_bits(codes).astype(jnp.int32)
        # 2**-127 is a subnormal float32, and 255 the exponent of infinity.
        bits = jnp.where(code == 0, 1 << 22, jnp.where(code == 255, 0x7FC00000, code << 23))
        return lax.bitcast_convert_type(bits, jnp.float32)


e8m0 = PowerOfTwo()


def exponent_of_e8m0(scale: jax.Array) -> jax.Array:
    """Returns the exponents, from -127 to 127, of powers of two; 128 for NaN."""
    return lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32) - 127


def times_e8m0(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `x * scale`, exact except for a subnormal result; `scale` broadcasts to `x`.

    2**-127, which XLA would flush to zero, is applied in two factors.
    """
    code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
    bits = jnp.where(code == 255, 0x7FC00000, jnp.maximum(code, 1) << 23)
    y = x * lax.bitcast_convert_type(bits, jnp.float32).astype(x.dtype)
    return jnp.where(code == 0, y * np.asarray(0.5, x.dtype), y)
