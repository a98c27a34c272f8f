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
from jax.typing import DTypeLike

from .. import compat
from ..gradients.estimator import Gradient, Surrogate, with_rule
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
from ..numerics.lookup import E8M0, exponent_of_e8m0, format_of, times_e8m0
from ..numerics.qtype import Integer, QType
from ..numerics.runtimes import Numerics, ngraph

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
