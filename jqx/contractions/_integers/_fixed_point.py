"""Integers times a real factor, by integer arithmetic: `factor = multiplier * 2**(shift - 31)`.

JAX does not enable int64 by default, so a product of two int32 is held in two words of 32 bits.

Sources: TensorFlow Lite, tflite/kernels/internal/quantization_util.cc (QuantizeMultiplier) and
common.cc (MultiplyByQuantizedMultiplier); gemmlowp, fixedpoint/fixedpoint.h
(SaturatingRoundingDoublingHighMul, RoundingDivideByPOT); B. Jacob et al., "Quantization and
Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", arXiv:1712.05877; the
high word of a product from H. S. Warren, "Hacker's Delight", section 8-2.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._checks import as_like, as_real
from ..._compat import is_concrete
from ..._errors import fail

LEAST_SHIFT, LARGEST_SHIFT = -31, 30
_LOWEST, _LARGEST = -(2**31), 2**31 - 1


class FixedPointRounding(enum.Enum):
    """How often the product of an integer and a multiplier is rounded.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> single = jqx.tflite.FixedPointRounding.SINGLE
      >>> r = jqx.tflite.Requantization.of(0.25, 1.0, 1.0, qtype=jnp.int8, rounding=single)
      >>> jqx.tflite.requantize(jnp.array([-6, -2, 2, 6]), r).values  # -1.5, -0.5, 0.5 and 1.5
      Array([-1,  0,  1,  2], dtype=int8)
    """

    DOUBLE = "double"
    """Twice: when 31 bits are dropped, with halves up, and by the shift, with halves away from
    zero. A positive shift moves the integer to the left first. This is the rounding of gemmlowp and
    of the reference kernels of TFLite."""
    SINGLE = "single"
    """Once, with halves up. This is the rounding of TFLite if it is built with
    TFLITE_SINGLE_ROUNDING."""


def known_scale(function: str, argument: str, scale: Any) -> jax.Array:
    """Returns a scale as an array whose values Python can read."""
    if not is_concrete(scale):
        raise fail(
            function,
            f"`{argument}` is traced and has no value.",
            given="an array inside jit, vmap or grad",
            expected="an array with values: a multiplier is computed on the host, in float64",
            fix="create the Requantization outside and pass it in (it is a pytree), or quantize "
            "the "
            "float result with a QSpec.",
            error=TypeError,
        )
    scale = as_like(function, argument, scale, jnp.float32)
    return as_real(function, argument, scale)


def factor_of(function: str, scales: dict[str, jax.Array]) -> np.ndarray:
    """Returns `lhs_scale * rhs_scale / output_scale` in float64."""
    lhs, rhs, output = (np.asarray(scale).astype(np.float64) for scale in scales.values())
    shapes = ", ".join(f"{name}.shape == {scale.shape}" for name, scale in scales.items())
    if not (all(np.isfinite(scale).all() for scale in (lhs, rhs, output)) and (output != 0).all()):
        raise fail(
            function,
            "a scale is not finite, or `output_scale` is zero.",
            given=shapes,
            expected="finite scales, and output_scale != 0",
            fix="look for NaN and infinities in the data that the scales were calibrated on.",
        )
    try:
        factor = np.asarray(lhs * rhs / output)
    except ValueError:
        raise fail(
            function,
            "the scales do not broadcast.",
            given=shapes,
            expected="shapes that broadcast by NumPy's rules",
            fix="line them up with the result: its size along their own axes, 1 elsewhere.",
        ) from None
    largest = np.max(np.abs(factor), initial=0)
    if not (np.isfinite(largest) and quantize_multiplier(largest)[1] <= LARGEST_SHIFT):
        raise fail(
            function,
            "lhs_scale * rhs_scale / output_scale is too large.",
            given=f"up to {largest:.3g}",
            expected=f"less than 2**{LARGEST_SHIFT}",
            fix="calibrate output_scale: every accumulator except 0 would saturate.",
        )
    return factor


def quantize_multiplier(factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nearest int32 `(multiplier, shift)` of float64 factors, computed in NumPy."""
    mantissa, shift = np.frexp(factor)
    scaled = np.ldexp(mantissa, 31)
    multiplier = np.trunc(scaled + np.copysign(0.5, scaled))  # halves away from zero
    carry = multiplier == 2.0**31
    multiplier, shift = np.where(carry, 2.0**30, multiplier), shift + carry
    tiny = shift < LEAST_SHIFT
    multiplier, shift = np.where(tiny, 0, multiplier), np.where(tiny, 0, shift)
    return multiplier.astype(np.int32), shift.astype(np.int32)


def multiply_fixed_point(
    x: jax.Array, multiplier: jax.Array, shift: jax.Array, rounding: FixedPointRounding
) -> jax.Array:
    """Returns `x * multiplier * 2**(shift - 31)`, rounded; all int32, of the same rank.

    Overflow of int32 wraps around: in double rounding that of the shift to the left, in single
    rounding that of the result.
    """
    if rounding is FixedPointRounding.SINGLE:
        return _rounding_shift(_product(x, multiplier), 31 - shift)
    zero = jnp.zeros_like(shift)
    x = x << jnp.maximum(shift, zero)
    return _divide_by_power(_doubling_high_product(x, multiplier), jnp.maximum(-shift, zero))


def _doubling_high_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `a * b / 2**31`, halves up; the only result out of range, 2**31, is reduced by 1."""
    y = _rounding_shift(_product(a, b), jnp.full_like(b, 31))
    return jnp.where((a == _LOWEST) & (b == _LOWEST), jnp.int32(_LARGEST), y)


def _divide_by_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns `x / 2**exponent`, exponent from 0 to 31, halves away from zero."""
    mask = (jnp.ones_like(exponent) << exponent) - 1
    half = (mask >> 1) + (x < 0).astype(jnp.int32)
    return (x >> exponent) + ((x & mask) > half).astype(jnp.int32)


def _product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the product of int32 in 64 bits: the high word, int32, and the low, uint32."""
    a_high, a_low = a >> 16, a & 0xFFFF
    b_high, b_low = b >> 16, b & 0xFFFF
    lowest = a_low.astype(jnp.uint32) * b_low.astype(jnp.uint32)
    first = a_high * b_low + (lowest >> 16).astype(jnp.int32)
    second = a_low * b_high + (first & 0xFFFF)
    high = a_high * b_high + (first >> 16) + (second >> 16)
    return high, lax.bitcast_convert_type(a * b, jnp.uint32)


def _rounding_shift(product: tuple[jax.Array, jax.Array], n: jax.Array) -> jax.Array:
    """Returns `(product + 2**(n - 1)) >> n`, n from 1 to 62: its low word; halves round up."""
    return _shifted(product, n) + (_shifted(product, n - 1) & 1)


def _shifted(product: tuple[jax.Array, jax.Array], n: jax.Array) -> jax.Array:
    """Returns the low word of `product >> n`, n from 0 to 62, as int32."""
    high, low = product
    near, far = jnp.minimum(n, 31), jnp.maximum(n - 32, 0)  # no word is shifted by 32
    left_of_low = lax.bitcast_convert_type(low >> near.astype(jnp.uint32), jnp.int32)
    moved_in = high << 1 << (31 - near)  # by 32 - near bits, which leaves 0 if near is 0
    return jnp.where(n < 32, left_of_low | moved_in, high >> far)
