"""`affine_from_range`: the scale and zero point that cover a range of real values."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..checks import as_like, as_real, called, check_dtype, holds
from ..errors import fail
from ..numerics.blocks import Block
from ..numerics.exact import compute_dtype, divide, narrow, round_to_integer, saturating_sum
from ..numerics.lookup import as_qtype, format_of
from ..numerics.qtype import Integer, QType
from ..numerics.runtimes import Numerics, SymmetricRange, ngraph


@called("affine_from_range", 'pass for example jqx.affine_from_range(-1.0, 1.0, qtype="int8").')
def affine_from_range(
    low: ArrayLike,
    high: ArrayLike,
    *,
    qtype: DTypeLike | QType,
    symmetric: bool = False,
    numerics: Numerics = ngraph,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scale and zero point with which `qtype` covers the real range `[low, high]`.

    The range always includes zero, so that zero is represented exactly::

        symmetric:   scale = max(|low|, |high|) / qmax, no zero point (MX formats: their own rule)
        asymmetric:  scale = (max(high, 0) - min(low, 0)) / (qmax - qmin)
                     zero_point = round_half_even(qmin - min(low, 0) / scale), saturated

    Args:
      low: real array, any shape; float16, bfloat16, float32 or float64; a Python number is float32.
      high: dtype and shape of `low`.
      qtype: a number format. Only integer formats have zero points, and only signed integer formats
        can be symmetric.
      symmetric: whether the zero point is zero.
      numerics: the runtime whose arithmetic is followed, for integer formats.

    Returns:
      `(scale, zero_point)`, of the shape of `low`. The scale has the dtype of `low` (for an MX
      format float8_e8m0fnu). The zero point has the dtype of the codes; it is `None` (zero
      everywhere) if `symmetric`.

    Raises:
      TypeError: a limit is not floating point, the limits differ in dtype, or `qtype` is not a
        format.
      ValueError: the shapes differ, `symmetric` is True for an unsigned `qtype`, or `symmetric` is
        False for a format without zero points.

    Gradient: JAX differentiates the scale; the zero point has no gradient.
    NaN and infinities: they appear only in the scale of their own element. An empty range (both
      limits zero) gives scale 1, or the smallest scale of a block format.
    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
      Integer-Arithmetic-Only Inference", arXiv:1712.05877, section 3.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.affine_from_range(-1.0, 3.0, qtype=jnp.uint8)
      (Array(0.01568628, dtype=float32), Array(64, dtype=uint8))
    """
    function = "affine_from_range"
    qtype = as_qtype(function, "qtype", qtype, "Output")
    low = as_real(function, "low", as_like(function, "low", low, jnp.float32))
    high = as_like(function, "high", high, low.dtype)
    check_dtype(function, "high", high, low.dtype, of="`low`")
    if not holds("assert_equal_shape", [low, high]):
        problem = "`low` and `high` must have the same shape."
        facts = f"low.shape == {low.shape}, high.shape == {high.shape}"
        raise fail(function, problem, given=facts, fix="broadcast one to the other first.")
    check_symmetric(function, qtype, symmetric)
    dtype, wide = low.dtype, compute_dtype(low.dtype)
    low, high = low.astype(wide), high.astype(wide)
    form = format_of(qtype)
    if not isinstance(form, Integer):
        scale = form.scale_of(jnp.maximum(jnp.abs(low), jnp.abs(high)))
        return (scale if isinstance(form, Block) else _usable(scale, dtype, ngraph)), None
    if symmetric:
        return _usable(_symmetric_scale(low, high, form, numerics), dtype, numerics), None
    low, high = jnp.minimum(low, jnp.zeros_like(low)), jnp.maximum(high, jnp.zeros_like(high))
    half = jnp.asarray(0.5, wide)  # exact, and the extent of a finite range stays finite
    steps = (form.high - form.low) / 2
    scale = _usable(_per_step(high * half - low * half, steps, numerics), dtype, numerics)
    offset, lowest = divide(low, scale.astype(wide)), jnp.asarray(form.low, wide)
    if numerics.rounded_offset:
        zero_point = lowest - round_to_integer(offset, numerics.round_mode)
    else:
        zero_point = round_to_integer(lowest - offset, numerics.round_mode)
    return scale, saturating_sum(zero_point, None, form.low, form.high, form.storage)


def _symmetric_scale(
    low: jax.Array, high: jax.Array, form: Integer, numerics: Numerics
) -> jax.Array:
    match numerics.symmetric_range:
        case SymmetricRange.SIGNED:
            below = jnp.abs(low)
            return _per_step(jnp.where(below >= high, below, -high), -form.low, numerics)
        case SymmetricRange.COVER:
            below = _per_step(jnp.minimum(low, jnp.zeros_like(low)), form.low, numerics)
            above = _per_step(jnp.maximum(high, jnp.zeros_like(high)), form.high, numerics)
            return jnp.maximum(below, above)
        case SymmetricRange.HALF:
            steps = (form.high - form.low) / 2
        case SymmetricRange.LIMIT:
            steps = form.high
    return _per_step(jnp.maximum(jnp.abs(low), jnp.abs(high)), steps, numerics)


def _per_step(extent: jax.Array, steps: float, numerics: Numerics) -> jax.Array:
    if numerics.reciprocal_steps:
        kind = extent.dtype.type
        return extent * jnp.asarray(kind(1) / kind(steps))
    return divide(extent, jnp.asarray(steps, extent.dtype))


def check_symmetric(function: str, qtype: DTypeLike | QType, symmetric: bool) -> None:
    """Checks that a format can be symmetric about zero, or can have a zero point."""
    form = format_of(qtype)
    if not form.signed and symmetric and isinstance(form, Integer):
        problem = f"an unsigned format ({form.name}) cannot be symmetric about zero."
        fix = f"pass a signed qtype such as {form.name.removeprefix('u')}, or symmetric=False."
        raise fail(function, problem, fix=fix)
    if not symmetric:
        check_zero_point(function, form)


def check_zero_point(function: str, form: QType) -> None:
    """Checks that a format has zero points."""
    if not isinstance(form, Integer):
        fix = "drop the zero point (pass symmetric=True), or choose an integer qtype."
        raise fail(function, f"{form.name} has no zero point.", fix=fix)


def _usable(scale: jax.Array, dtype: jnp.dtype, numerics: Numerics) -> jax.Array:
    """Narrows a scale to `dtype` and replaces scales that are too small, zero among them."""
    scale = narrow(scale, dtype)
    small = (jnp.abs(scale) < numerics.min_scale) | (scale == 0)
    return jnp.where(small, jnp.asarray(numerics.small_scale, dtype), scale)
