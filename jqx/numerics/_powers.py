"""Powers of two, taken from and put into the bits of floats: exact, where log2 and exp2 are not."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_INTEGER = {"float32": (np.int32, 23, 127), "float64": (np.int64, 52, 1023)}


def exponent_of(x: jax.Array) -> jax.Array:
    """Returns `floor(log2(abs(x)))` as int32, for float32 or float64.

    Zero and subnormals give the least exponent of a normal number less 1; infinity and NaN the
    largest plus 1.
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
    """Returns the largest power of two that is at most `abs(x)`, for float32 or float64: a normal
    number of which the reciprocal is one too. It is a constant to differentiation.
    """
    _, _, bias = _INTEGER[x.dtype.name]
    exponent = jnp.clip(exponent_of(lax.stop_gradient(x)), 1 - bias, bias - 1)
    return power_of_two(exponent, x.dtype)


def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns `x * 2**exponent` for int32 exponents in [-252, 254]; exact but for a subnormal
    result.

    In two factors: 2**-127, and 1 / 2**127, are no normal float32, and XLA flushes the rest.
    """
    half = exponent >> 1
    return x * power_of_two(half, x.dtype) * power_of_two(exponent - half, x.dtype)


def step_of(
    x: jax.Array, mantissa_bits: int, least: int, largest: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the spacing, at `x`, of floats of `mantissa_bits`, and its reciprocal.

    The exponent of `x` counts as at least `least`, below which floats are evenly spaced, and at
    most `largest`.
    """
    integer, bits, bias = _INTEGER[x.dtype.name]
    field = lax.bitcast_convert_type(x, integer) & integer(2 * bias + 1 << bits)
    low, high = (integer(exponent + bias << bits) for exponent in (least, largest))
    field = lax.clamp(low, field, high)
    step = field - integer(mantissa_bits << bits)
    twice = integer(2 * bias << bits - 1) * integer(2)  # wraps round, and back with the difference
    return (
        lax.bitcast_convert_type(step, x.dtype),
        lax.bitcast_convert_type(twice - step, x.dtype),
    )
