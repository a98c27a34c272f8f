"""The affine quantizer on scales that broadcast (keepdims). Every affine op reduces to it.

    quantize:        encode(round(x / scale)), or saturate(round(x / scale) + zero_point)
    dequantize:      decode(q) * scale, or (q - zero_point) * scale
    fake quantize:   dequantize(quantize(x)), differentiable

A scale is a float, or a power of two in float8_e8m0fnu. The functions are jitted with static
formats, so that all calls with one shape share one trace and one kernel.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .. import compat
from ..checks import as_like, as_real, called, check_dtype, holds
from ..errors import fail
from ..gradients.estimators import Gradient, Surrogate, with_rule
from ..numerics.blocks import Block
from ..numerics.exact import (
    RoundMode,
    common_dtype,
    compute_dtype,
    difference,
    divide,
    float_difference,
    holds_codes,
    multiply,
    narrow,
    round_to_integer,
    saturating_float_sum,
    saturating_sum,
    times_power_of_two,
    widen,
)
from ..numerics.lookup import E8M0, as_qtype, exponent_of_e8m0, format_of, times_e8m0
from ..numerics.qtype import Integer, QType
from ..numerics.runtimes import Numerics, SymmetricRange, ngraph

# Lining parameters up with the array they belong to, and summing cotangents back.


def expand_to_axes(parameter: jax.Array, axes: Sequence[int], rank: int) -> jax.Array:
    """Reshapes a parameter with one dim per axis of `axes` (increasing) to `rank` dims."""
    shape = [1] * rank
    for axis, size in zip(axes, parameter.shape, strict=True):
        shape[axis] = size
    return parameter.reshape(shape)


def sum_to_shape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Sums `x` over the axes along which `shape`, of equal rank, has been broadcast to it."""
    axes = tuple(i for i, (n, m) in enumerate(zip(x.shape, shape, strict=True)) if n != m)
    return jnp.sum(x, axis=axes, keepdims=True) if axes else x


@partial(jax.jit, static_argnames=("qtype", "round_mode", "numerics", "as_bits"))
def affine_quantize(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    *,
    qtype: DTypeLike | QType,
    round_mode: RoundMode,
    numerics: Numerics = ngraph,
    as_bits: bool = False,
) -> jax.Array:
    """Quantizes `x`. `scale` and `zero_point` broadcast to its shape, axis by axis.

    With `as_bits`, codes of up to 8 bits are returned as uint8, ready to be packed.
    """
    form = format_of(qtype)
    if not isinstance(form, Integer):
        encode = form.encode_bits if as_bits else form.encode
        return encode(_safe_quotient(x, scale), round_mode)
    r, zero_point, form = _rounded(x, scale, zero_point, form, round_mode, numerics)
    if as_bits:
        return form.sum_to_bits(r, zero_point)
    storage = format_of(qtype).storage
    return saturating_sum(r, zero_point, form.low, form.high, storage)


@partial(jax.jit, static_argnames=("qtype", "dtype"))
def affine_dequantize(
    q: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    *,
    qtype: DTypeLike | QType,
    dtype: DTypeLike,
) -> jax.Array:
    """Dequantizes `q` to `dtype`. A difference of integers is first rounded to the dtype of
    `scale`.
    """
    form = format_of(qtype)
    if isinstance(form, Integer):
        values = difference(q, zero_point, _real(scale.dtype))
    else:
        values = form.decode(q)
    return _scaled(values, scale, dtype)


@partial(jax.jit, static_argnames=("qtype", "round_mode", "gradient", "numerics"))
def affine_fake_quantize(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    key: jax.Array | None = None,
    *,
    qtype: DTypeLike | QType,
    round_mode: RoundMode,
    gradient: Gradient,
    numerics: Numerics = ngraph,
) -> jax.Array:
    """Returns `dequantize(quantize(x))` in the dtype of `x`, with the gradient of an estimator."""
    if isinstance(gradient, Surrogate):
        low, high, _, _ = _bounds(x, scale, zero_point, qtype)
        wide, levels = x.astype(low.dtype), format_of(qtype).levels
        return gradient.surrogate(wide, low, high, levels, key).astype(x.dtype)
    x, scale, zero_point = compat.vary_alike(x, scale, zero_point)
    forward = partial(_fake_quantize, qtype, round_mode, numerics)
    return with_rule(forward, partial(_cotangents, qtype, gradient))((x, scale), zero_point)


def _fake_quantize(qtype, round_mode, numerics, operands, zero_point):
    (x, scale), form = operands, format_of(qtype)
    if not isinstance(form, Integer):
        return _scaled(form.round(_safe_quotient(x, scale), round_mode), scale, x.dtype)
    wide = compute_dtype(_real(scale.dtype))
    if not holds_codes(wide, form.storage):
        q = affine_quantize(
            x, scale, zero_point, qtype=qtype, round_mode=round_mode, numerics=numerics
        )
        return affine_dequantize(q, scale, zero_point, qtype=qtype, dtype=x.dtype)
    # The same values, without integers in between: they would keep XLA on CPU from vectorizing.
    r, added, form = _rounded(x, scale, zero_point, form, round_mode, numerics)
    codes = saturating_float_sum(r, added, form.low, form.high).astype(wide)
    return _scaled(float_difference(codes, zero_point, _real(scale.dtype)), scale, x.dtype)


def _rounded(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    form: Integer,
    round_mode: RoundMode,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array | None, Integer]:
    """Returns the rounded quotient, the zero point that is still to be added, and the format with
    the range to saturate to.
    """
    if zero_point is None and numerics.narrow and form.signed:
        form = dataclasses.replace(form, narrow=True)
    y = _quotient(x, scale, numerics.reciprocal)
    if zero_point is not None and numerics.zero_point_first:
        return round_to_integer(y + zero_point.astype(y.dtype), round_mode), None, form
    return round_to_integer(y, round_mode), zero_point, form


def _real(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that products with a scale are computed for."""
    return jnp.dtype(jnp.float32) if dtype == E8M0 else dtype


def _quotient(x: jax.Array, scale: jax.Array, reciprocal: bool = False) -> jax.Array:
    wide = common_dtype(x.dtype, scale.dtype)
    x = widen(x).astype(wide)
    if scale.dtype == E8M0:
        return times_power_of_two(x, -exponent_of_e8m0(scale))
    scale = widen(scale).astype(wide)
    return multiply(x, divide(jnp.ones_like(scale), scale)) if reciprocal else divide(x, scale)


def _safe_quotient(x: jax.Array, scale: jax.Array) -> jax.Array:
    """The quotient, with 0 / 0 = 0, so that formats with a NaN do not encode it as NaN."""
    y = _quotient(x, scale)
    return jnp.where((x == 0) & ~jnp.isnan(scale), jnp.zeros_like(y), y)


def _scaled(values: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Multiplies by the scale and rounds once to `dtype`."""
    if scale.dtype == E8M0:
        return narrow(times_e8m0(values, scale), dtype)
    wide = common_dtype(values.dtype, scale.dtype)
    return narrow(multiply(values.astype(wide), widen(scale).astype(wide)), dtype)


def _bounds(
    x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, qtype: DTypeLike | QType
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the real range `[low, high]`, and the factor of the scale in each limit."""
    form = format_of(qtype)
    wide = common_dtype(x.dtype, scale.dtype)
    s = scale.astype(wide)
    z = jnp.zeros_like(s) if zero_point is None else zero_point.astype(wide)
    from_low, from_high = jnp.asarray(form.low, wide) - z, jnp.asarray(form.high, wide) - z
    # A negative scale swaps the limits.
    from_low, from_high = (
        jnp.where(s < 0, from_high, from_low),
        jnp.where(s < 0, from_low, from_high),
    )
    return from_low * s, from_high * s, from_low, from_high


def _cotangents(qtype, gradient, operands, zero_point, cotangent):
    x, scale = operands
    low, high, from_low, from_high = _bounds(x, scale, zero_point, qtype)
    wide = low.dtype
    levels = format_of(qtype).levels
    dx, dlow, dhigh = gradient.bwd(x.astype(wide), low, high, levels, cotangent.astype(wide))
    dscale = sum_to_shape(dlow, low.shape) * from_low + sum_to_shape(dhigh, low.shape) * from_high
    return dx.astype(x.dtype), sum_to_shape(dscale, scale.shape).astype(scale.dtype)


# `affine_from_range`: the scale and zero point that cover a range of real values.


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
