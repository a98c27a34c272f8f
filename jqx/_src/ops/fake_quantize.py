"""OpenVINO FakeQuantize-1, with a gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .. import compat
from ..checks import as_like, as_real, called, check_dtype, check_integer
from ..errors import fail
from ..gradients.estimators import Gradient, Surrogate, check_estimator, check_key, ste, with_rule
from ..numerics.exact import (
    RoundMode,
    compute_dtype,
    divide,
    divide_by_steps,
    multiply,
    narrow,
    round_to_integer,
    widen,
)
from .affine import sum_to_shape

_LIMITS = ("input_low", "input_high", "output_low", "output_high")
_BROADCASTS = ("none", "numpy", "pdpd")


@called("fake_quantize")
def fake_quantize(
    x: ArrayLike,
    input_low: ArrayLike,
    input_high: ArrayLike,
    output_low: ArrayLike,
    output_high: ArrayLike,
    *,
    levels: int,
    auto_broadcast: str = "numpy",
    axis: int = -1,
    gradient: Gradient = ste,
    key: jax.Array | None = None,
) -> jax.Array:
    """Maps `x` from the input range onto `levels` equally spaced values of the output range.

    With `lo = min(input_low, input_high)` and `hi = max(input_low, input_high)`::

        y = output_low                     where x <= lo
        y = output_high                    where x > hi
        y = round((x - input_low) / (input_high - input_low) * (levels - 1)) / (levels - 1)
              * (output_high - output_low) + output_low                      elsewhere

    evaluated left to right, each step rounded once, `round` half to even. Inverted and degenerate
    ranges are allowed: where both limits are equal, `x` is compared with them.

    Args:
      x: real array, any shape; float16, bfloat16, float32 or float64. 16-bit floats are computed in
        float32 and narrowed once.
      input_low: dtype of `x`, broadcast to its shape as `auto_broadcast` says. A Python number
        takes the dtype of `x`.
      input_high: as `input_low`.
      output_low: as `input_low`.
      output_high: as `input_low`.
      levels: number of values of the output range, an integer of 2 or more.
      auto_broadcast: `"none"` (all shapes equal), `"numpy"` (aligned right, dims equal or 1) or
        `"pdpd"` (aligned at `axis`). Limits broadcast to `x`; `x` never broadcasts to them.
      axis: for `"pdpd"`, the axis of `x` that the first dim of a limit belongs to; -1 aligns right.
        Other modes take no axis.
      gradient: the gradient estimator, a value from `jqx.gradients` or your own.
      key: random key for an estimator that draws random numbers. Such an estimator also replaces
        the rounding in the forward pass.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      TypeError: `x` is not floating point, a limit has another dtype, `levels` is not an integer,
        or `gradient` is not an estimator.
      ValueError: `levels` is below 2, `auto_broadcast` is unknown, a limit does not broadcast to
        `x`, `axis` is out of range or given without `"pdpd"`, or `key` is missing or not used.

    Gradient: `gradient` defines the gradient of `x` and of all four limits. The default, `ste`,
      gives the derivative of the expression above without `round`, summed over broadcast axes.
      Where both input limits are equal, `x` and these limits get no gradient. A NaN in `x` makes
      the output and the gradients of the limits NaN.
    NaN and infinities: NaN in `x` gives NaN; infinities give `output_low` and `output_high`. A NaN
      `input_high` acts as `input_low`; a NaN `input_low` gives NaN.
    Source: OpenVINO opset1 FakeQuantize-1 and its broadcast rules. The text does not define ties;
      they follow the reference implementation (half to even).

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.fake_quantize(jnp.array([-1.0, 0.3, 0.5, 2.0]), 0.0, 1.0, 0.0, 10.0, levels=5)
      Array([ 0. ,  2.5,  5. , 10. ], dtype=float32)
    """
    x = as_real("fake_quantize", "x", x)
    if check_integer("fake_quantize", "levels", levels) < 2:
        problem = f"`levels` must be 2 or more, but is {levels}."
        fix = "pass the number of levels, such as levels=256."
        raise fail("fake_quantize", problem, fix=fix)
    check_estimator("fake_quantize", gradient)
    check_key("fake_quantize", gradient, key)
    if auto_broadcast not in _BROADCASTS:
        problem = f"{auto_broadcast!r} is not a member of AutoBroadcastType."
        fix = f'pass one of {", ".join(_BROADCASTS)}; "numpy" unless the model says otherwise.'
        raise fail("fake_quantize", problem, fix=fix)
    if auto_broadcast != "pdpd" and axis != -1:
        problem = f"`axis` ({axis!r}) has no meaning with auto_broadcast={auto_broadcast!r}."
        raise fail("fake_quantize", problem, fix='drop axis, or pass auto_broadcast="pdpd".')
    limits = []
    for name, limit in zip(_LIMITS, (input_low, input_high, output_low, output_high), strict=True):
        limit = as_like("fake_quantize", name, limit, x.dtype)
        check_dtype("fake_quantize", name, limit, x.dtype, of="input")
        shape = _aligned_shape(name, limit.shape, x.shape, auto_broadcast, axis)
        limits.append(limit.reshape(shape))
    return _evaluate(x, *limits, key, levels=int(levels), gradient=gradient)


def _aligned_shape(
    name: str, limit: tuple[int, ...], shape: tuple[int, ...], auto_broadcast: str, axis: int
) -> tuple[int, ...]:
    """Returns the shape of a limit at the rank of `x`, or raises if it does not fit `x`."""
    start, aligned = len(shape) - len(limit), limit
    is_axis = isinstance(axis, (int, np.integer)) and not isinstance(axis, bool) and axis >= -1
    if auto_broadcast == "pdpd" and is_axis and start >= 0:
        start = start if axis == -1 else int(axis)
        while aligned and aligned[-1] == 1:
            aligned = aligned[:-1]
    padded = (1,) * start + aligned + (1,) * (len(shape) - start - len(aligned))
    fits = len(limit) <= len(shape) == len(padded) and is_axis
    fits = fits and all(m in (1, n) for m, n in zip(padded, shape, strict=True))
    if not fits or (auto_broadcast == "none" and limit != shape):
        facts = f"{name}.shape == {limit}, x.shape == {shape}, "
        raise fail(
            "fake_quantize",
            f"Argument shapes are inconsistent. `{name}` does not broadcast to `x`.",
            given=f"{facts}auto_broadcast == {auto_broadcast!r}, axis == {axis!r}",
            fix=f"reshape {name} so that each dim is 1 or that of x, or pass another "
            "auto_broadcast or axis (-1 or more).",
        )
    return padded


@partial(jax.jit, static_argnames=("levels", "gradient"))
def _evaluate(x, il, ih, ol, oh, key, *, levels, gradient):
    if isinstance(gradient, Surrogate):
        return _with_surrogate(levels, gradient, key, x, il, ih, ol, oh)
    forward = partial(_fake_quantize, levels)
    rule = partial(_cotangents, levels, gradient)
    return with_rule(forward, rule)(compat.vary_alike(x, il, ih, ol, oh), None)


def _with_surrogate(levels, gradient, key, x, il, ih, ol, oh):
    """Maps the surrogate of the quantized `x` from the input range to the output range."""
    dtype, wide = x.dtype, compute_dtype(x.dtype)
    x, il, ih, ol, oh = (v.astype(wide) for v in (x, il, ih, ol, oh))
    low, high = _ordered(il, ih)
    c = gradient.surrogate(x, low, high, levels, key)
    span = jnp.where(ih == il, jnp.ones_like(il), ih - il)
    y = (c - il) * ((oh - ol) / span) + ol
    return jnp.where(ih == il, jnp.where(x <= il, ol, oh), y).astype(dtype)


def _fake_quantize(levels, operands, _):
    dtype = operands[0].dtype
    wide = compute_dtype(dtype)
    x, il, ih, ol, oh = map(widen, operands)
    steps = jnp.asarray(np.asarray(levels - 1, wide))
    u = divide(x - il, ih - il)
    u = divide_by_steps(round_to_integer(u * steps, RoundMode.NEAREST_TOWARD_EVEN), levels - 1)
    y = multiply(u, oh - ol) + ol
    low, high = _ordered(il, ih)
    y = jnp.where(x > high, oh, y)
    return narrow(jnp.where(x <= low, ol, y), dtype)


def _ordered(il: jax.Array, ih: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (min, max) as C++ computes them: a NaN `ih` acts as `il`, a NaN `il` stays NaN."""
    return jnp.where(ih < il, ih, il), jnp.where(ih > il, ih, il)


def _cotangents(levels, gradient, operands, _, cotangent):
    """The chain rule around the estimator: `y = ol + u * (oh - ol)`, `u = (c - il) / (ih - il)`.

    `c` is `x` clamped to the input range by the quantizer that the estimator differentiates.
    """
    wide = compute_dtype(operands[0].dtype)
    x, il, ih, ol, oh = (v.astype(wide) for v in operands)
    cotangent = cotangent.astype(wide)
    zero = jnp.zeros_like(cotangent)
    low, high = _ordered(il, ih)
    below, above = x <= low, x > high
    span = ih - il
    flat = span == 0
    span = jnp.where(flat, jnp.ones_like(span), span)
    ratio = jnp.where(flat, jnp.zeros_like(span), (oh - ol) / span)
    u = (x - il) / span
    u = jnp.where(below, zero, jnp.where(above, jnp.ones_like(u), u))
    # An inverted range does not clamp: outside of it the output is the constant of the other end.
    inverted = ih < il
    dc = jnp.where(inverted & (below | above), zero, cotangent * ratio)
    dx, dlow, dhigh = gradient.bwd(x, low, high, levels, dc)
    d_il = jnp.where(inverted, dhigh, dlow) + (u - jnp.ones_like(u)) * dc
    d_ih = jnp.where(inverted, dlow, dhigh) - u * dc
    d_ol, d_oh = (jnp.ones_like(u) - u) * cotangent, u * cotangent
    gradients = zip((dx, d_il, d_ih, d_ol, d_oh), operands, strict=True)
    return tuple(sum_to_shape(g, v.shape).astype(v.dtype) for g, v in gradients)
