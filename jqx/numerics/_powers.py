"""Powers of two, read from and written to the bits of floats: exact, unlike log2 and exp2."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_INTEGER = {"float32": (np.int32, 23, 127), "float64": (np.int64, 52, 1023)}


def exponent_of(x: jax.Array) -> jax.Array:
    """Returns `floor(log2(abs(x)))` as int32, for float32 or float64.

    Zero and subnormals give the smallest exponent of a normal number minus 1; infinity and NaN give
    the largest exponent plus 1.
    """
    integer, mantissa_bits, bias = _INTEGER[x.dtype.name]
    bits = lax.bitcast_convert_type(x, integer)
    field = lax.shift_right_logical(bits << 1, jnp.asarray(mantissa_bits + 1, integer))
    return field.astype(jnp.int32) - bias


def power_of_two(exponent: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns `2**exponent` for int32 exponents of normal numbers of `dtype`."""
    integer, mantissa_bits, bias = _INTEGER[jnp.dtype(dtype).name]
    return lax.bitcast_convert_type((exponent.astype(integer) + bias) << mantissa_bits, dtype)


def power_below(x: jax.Array) -> jax.Array:
    """Returns the largest power of two that is at most `abs(x)`, for float32 or float64. The result
    and its reciprocal are normal numbers. Differentiation treats it as a constant.
    """
    _, _, bias = _INTEGER[x.dtype.name]
    exponent = jnp.clip(exponent_of(lax.stop_gradient(x)), 1 - bias, bias - 1)
    return power_of_two(exponent, x.dtype)


def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns `x * 2**exponent` for int32 exponents in [-252, 254]; exact except for a subnormal
    result.

    It uses two factors: 2**-127 (and so 1 / 2**127) is not a normal float32, and XLA flushes
    subnormal numbers to zero.
    """
    half = exponent >> 1
    return x * power_of_two(half, x.dtype) * power_of_two(exponent - half, x.dtype)


def step_of(
    x: jax.Array, mantissa_bits: int, least: int, largest: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the spacing, at `x`, of floats with `mantissa_bits`, and its reciprocal.

    The exponent of `x` is clamped to `[least, largest]`; below `least`, floats are evenly spaced.
    """
    integer, bits, bias = _INTEGER[x.dtype.name]
    field = lax.bitcast_convert_type(x, integer) & integer(2 * bias + 1 << bits)
    low, high = (integer(exponent + bias << bits) for exponent in (least, largest))
    field = lax.clamp(low, field, high)
    step = field - integer(mantissa_bits << bits)
    twice = integer(2 * bias << bits - 1) * integer(2)  # wraps around; the difference wraps back
    return (
        lax.bitcast_convert_type(step, x.dtype),
        lax.bitcast_convert_type(twice - step, x.dtype),
    )
