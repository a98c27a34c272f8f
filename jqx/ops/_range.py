"""`affine_from_range`: the scale and zero point that cover a range of real values."""

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .._checks import as_like, as_real, check_dtype, require, require_that
from ..numerics import (
    RoundMode,
    as_quantized_type,
    compute_dtype,
    divide,
    integer_range,
    is_signed,
    narrow,
    round_to_integer,
    saturating_sum,
)


def affine_from_range(
    low: ArrayLike, high: ArrayLike, *, qtype: DTypeLike, symmetric: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scale and zero point with which `qtype` covers the real range `[low, high]`.

    Zero is always in the range, so that it is represented exactly:

        symmetric:   scale = max(|low|, |high|) / qmax, no zero point
        asymmetric:  scale = (max(high, 0) - min(low, 0)) / (qmax - qmin)
                     zero_point = round_half_even(qmin - min(low, 0) / scale), saturated

    Args:
      low: real array, any shape; float16, bfloat16, float32 or float64; a Python number is float32.
      high: dtype and shape of `low`.
      qtype: integer dtype of up to 32 bits; signed where `symmetric`.
      symmetric: whether the zero point is zero.

    Returns:
      `(scale, zero_point)`, of the shape of `low`; the scale has its dtype, the zero point `qtype`,
      or is `None` (zero everywhere) where `symmetric`.

    Raises:
      TypeError: a limit is not floating point, or they differ in dtype; `qtype` is no integer
        format.
      ValueError: shapes differ, or `qtype` is unsigned and `symmetric`.

    Gradient: of the scale, by JAX; none for the zero point.
    NaN and infinities: they appear in the scale of their own element alone. A range without extent
      (both limits zero) gives scale 1.
    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
      Integer-Arithmetic-Only Inference", arXiv:1712.05877, section 3.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.affine_from_range(-1.0, 3.0, qtype=jnp.uint8)
      (Array(0.01568628, dtype=float32), Array(64, dtype=uint8))
    """
    function = "affine_from_range"
    qtype = as_quantized_type(function, "qtype", qtype, "Output")
    low = as_real(function, "low", as_like(function, "low", low, jnp.float32))
    high = as_like(function, "high", high, low.dtype)
    check_dtype(function, "high", high, low.dtype, of="`low`")
    require(
        chex.assert_equal_shape,
        (low, high),
        error=ValueError,
        function=function,
        problem="`low` and `high` must have one shape.",
        given=f"low.shape == {low.shape}, high.shape == {high.shape}",
        expected="equal shapes",
        mend="broadcast one to the other first.",
    )
    require_that(
        is_signed(qtype) or not symmetric,
        error=ValueError,
        function=function,
        problem=f"an unsigned format ({qtype.name}) cannot be symmetric about zero.",
        given=f"qtype {qtype.name}, symmetric=True",
        expected="a signed qtype, or symmetric=False",
        mend=f"pass qtype=jnp.{qtype.name.removeprefix('u')}, or symmetric=False.",
    )
    dtype, wide = low.dtype, compute_dtype(low.dtype)
    low, high = low.astype(wide), high.astype(wide)
    q_low, q_high = integer_range(qtype)
    if symmetric:
        scale = divide(jnp.maximum(jnp.abs(low), jnp.abs(high)), jnp.asarray(q_high, wide))
        return _usable(scale, dtype), None
    low, high = jnp.minimum(low, jnp.zeros_like(low)), jnp.maximum(high, jnp.zeros_like(high))
    half = jnp.asarray(0.5, wide)  # exact, and the extent of a finite range stays finite
    extent = high * half - low * half
    scale = _usable(divide(extent, jnp.asarray((q_high - q_low) / 2, wide)), dtype)
    offset = jnp.asarray(q_low, wide) - divide(low, scale.astype(wide))
    return scale, saturating_sum(
        round_to_integer(offset, RoundMode.NEAREST_TOWARD_EVEN), None, qtype
    )


def _usable(scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Narrows a scale to `dtype`; zero, which divides nothing, becomes 1."""
    scale = narrow(scale, dtype)
    return jnp.where(scale == 0, jnp.ones_like(scale), scale)
