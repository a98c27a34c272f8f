"""The affine quantizer on scales that broadcast (keepdims): what every affine op reduces to.

    quantize:        saturate(round(x / scale) + zero_point)
    dequantize:      (q - zero_point) * scale
    fake quantize:   dequantize(quantize(x)), differentiable

Jitted with static formats, so that one trace and one kernel serve every call of a shape.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..gradients import GradientEstimator
from ..numerics import (
    RoundMode,
    common_dtype,
    compute_dtype,
    difference,
    divide,
    float_difference,
    holds_codes,
    integer_range,
    multiply,
    narrow,
    round_to_integer,
    saturating_float_sum,
    saturating_sum,
    widen,
)
from ._broadcast import sum_to_shape


@partial(jax.jit, static_argnames=("qtype", "round_mode"))
def affine_quantize(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    *,
    qtype: DTypeLike,
    round_mode: RoundMode,
) -> jax.Array:
    """Quantizes `x`; `scale` and `zero_point` broadcast to its shape, axis by axis."""
    return saturating_sum(_rounded_quotient(x, scale, round_mode), zero_point, qtype)


@partial(jax.jit, static_argnames=("dtype",))
def affine_dequantize(
    q: jax.Array, scale: jax.Array, zero_point: jax.Array | None, *, dtype: DTypeLike
) -> jax.Array:
    """Dequantizes `q` to `dtype`; the difference is first rounded to the dtype of `scale`."""
    d = difference(q, zero_point, scale.dtype)
    return narrow(multiply(d, widen(scale)), dtype)


@partial(jax.jit, static_argnames=("qtype", "round_mode", "gradient"))
def affine_fake_quantize(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    *,
    qtype: DTypeLike,
    round_mode: RoundMode,
    gradient: GradientEstimator,
) -> jax.Array:
    """Returns `dequantize(quantize(x))` in the dtype of `x`, with the gradient of an estimator."""
    return _fake_quantize(qtype, round_mode, gradient, x, scale, zero_point)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _fake_quantize(qtype, round_mode, gradient, x, scale, zero_point):
    wide = compute_dtype(scale.dtype)
    if not holds_codes(wide, qtype):
        q = affine_quantize(x, scale, zero_point, qtype=qtype, round_mode=round_mode)
        return affine_dequantize(q, scale, zero_point, dtype=x.dtype)
    # The same values without the detour through integers, which costs XLA its vectors on CPU.
    r = _rounded_quotient(x, scale, round_mode)
    codes = saturating_float_sum(r, zero_point, qtype).astype(wide)
    d = float_difference(codes, zero_point, scale.dtype)
    return narrow(multiply(d, widen(scale)), x.dtype)


def _rounded_quotient(x, scale, round_mode):
    wide = common_dtype(x.dtype, scale.dtype)
    return round_to_integer(divide(widen(x).astype(wide), widen(scale).astype(wide)), round_mode)


def _forward(qtype, round_mode, gradient, x, scale, zero_point):
    y = _fake_quantize(qtype, round_mode, gradient, x, scale, zero_point)
    return y, (x, scale, zero_point)


def _backward(qtype, round_mode, gradient, residuals, cotangent):
    x, scale, zero_point = residuals
    q_low, q_high = integer_range(qtype)
    wide = common_dtype(x.dtype, scale.dtype)
    s = scale.astype(wide)
    z = jnp.zeros_like(s) if zero_point is None else zero_point.astype(wide)
    # The real range is [from_low * scale, from_high * scale]; a negative scale turns it round.
    from_low, from_high = jnp.asarray(q_low, wide) - z, jnp.asarray(q_high, wide) - z
    from_low, from_high = (
        jnp.where(s < 0, from_high, from_low),
        jnp.where(s < 0, from_low, from_high),
    )
    dx, dlow, dhigh = gradient.bwd(
        x.astype(wide),
        jnp.broadcast_to(from_low * s, x.shape),
        jnp.broadcast_to(from_high * s, x.shape),
        q_high - q_low + 1,
        cotangent.astype(wide),
    )
    shape = np.broadcast_shapes(s.shape, z.shape)
    dscale = sum_to_shape(dlow, shape) * from_low + sum_to_shape(dhigh, shape) * from_high
    return dx.astype(x.dtype), sum_to_shape(dscale, s.shape).astype(scale.dtype), None


_fake_quantize.defvjp(_forward, _backward)
