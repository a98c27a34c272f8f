"""The operations of oneDNN Graph: Quantize, Dequantize and their dynamic forms."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ..checks import as_array, as_dtype, called, check_integer, holds, name_of, normalize_axes
from ..errors import fail
from ..numerics.exact import RoundMode, divide, multiply, narrow, widen
from ..numerics.lookup import format_of

# oneDNN Graph DynamicQuantize, and Quantize with its float8 formats.
#
#     saturate(round_half_even(x / scale + float32(zp)))      zp is added BEFORE the rounding
#
# all in float32 and without contraction.

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@called("dynamic_quantize")
def dynamic_quantize(
    x: ArrayLike,
    scales: ArrayLike,
    zps: ArrayLike | None = None,
    *,
    qtype: DTypeLike = jnp.int8,
    granularity: str = "per_tensor",
    axis: int = 1,
) -> jax.Array:
    """Quantizes `x` as oneDNN does: `round(x / scale + zp)`, half to even, saturated to `qtype`.

    The zero point is added before the rounding, while `quantize` adds it after the rounding. With
    scale 1 and zero point 3, 0.5 becomes 4 here and 3 in `quantize`.

    Args:
      x: float32 array, any shape. (oneDNN: `src`.)
      scales: float32, 1-D: one element for `"per_tensor"`, `x.shape[axis]` for `"per_channel"`.
      zps: int8, uint8 or int32, shape of `scales`. They may be outside the range of `qtype`. `None`
        means zero everywhere.
      qtype: `jnp.int8` or `jnp.uint8`. (oneDNN: the type of `dst`.)
      granularity: `"per_tensor"` or `"per_channel"`. (oneDNN: the attribute `qtype`.)
      axis: channel axis in `[-rank, rank - 1]`; used only for `"per_channel"`.

    Returns:
      Array of the shape of `x` and dtype `qtype`.

    Raises:
      TypeError: an operand or `qtype` has an element type that the operation does not take.
      ValueError: `scales` or `zps` is not 1-D or has the wrong length, `axis` is out of range, or
        `granularity` is unknown.

    Gradient: none (integer result); see `quantize_dequantize`.
    NaN and infinities: a NaN quotient gives 0; infinities saturate.
    Source: oneDNN Graph DynamicQuantize. This is a true division, as in the specification; the
      oneDNN library multiplies by the reciprocal.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> x = jnp.array([[0.5, 1.5], [-0.5, 900.0]])
      >>> jqx.dynamic_quantize(x, jnp.array([1.0]), jnp.array([3], jnp.int8))
      Array([[  4,   4],
             [  2, 127]], dtype=int8)
    """
    function = "dynamic_quantize"
    x = typed(function, "x", x, ("float32",))
    qtype = as_dtype(function, "qtype", qtype)
    check_type(function, "qtype", qtype, ("int8", "uint8"))
    scales, zps = operands_of(
        function, x, scales, zps, ("float32",), ("int8", "uint8", "int32"), granularity, axis
    )
    return _quantize(x, scales, zps, qtype=qtype)


def onednn_quantize(
    x: ArrayLike,
    scales: Sequence[float] | np.ndarray,
    zps: Sequence[int] | np.ndarray | None = None,
    *,
    qtype: DTypeLike = jnp.int8,
    granularity: str = "per_tensor",
    axis: int = 1,
) -> jax.Array:
    """Quantizes `x` with scales known in advance, as `dynamic_quantize`, also to float8 formats.

    Args:
      x: float32 array, any shape.
      scales: numbers, one for `"per_tensor"`, `x.shape[axis]` for `"per_channel"`.
      zps: integers, as many as `scales`; `None` means zero everywhere, and is required for float8.
      qtype: `jnp.int8`, `jnp.uint8`, `jnp.float8_e4m3fn` or `jnp.float8_e5m2`.
      granularity: `"per_tensor"` or `"per_channel"`.
      axis: channel axis; used only for `"per_channel"`.

    Returns:
      Array of the shape of `x` and dtype `qtype`.

    Raises:
      TypeError, ValueError: as in `dynamic_quantize`; ValueError if `zps` is given for float8.

    Gradient: none for integers; JAX differentiates float8.
    NaN and infinities: as in `dynamic_quantize` for integers. float8 does not saturate: a number
      that is too large becomes NaN (e4m3fn) or infinity (e5m2).
    Source: oneDNN Graph Quantize. Deviation: e4m3fn is rounded once; the oneDNN library rounds to
      float16 first.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.onednn.onednn_quantize(jnp.array([0.3, -1.0]), [0.1], [2])
      Array([ 5, -8], dtype=int8)
    """
    function = "onednn.onednn_quantize"
    x = typed(function, "x", x, ("float32",))
    qtype = as_dtype(function, "qtype", qtype)
    check_type(function, "qtype", qtype, ("int8", "uint8", *FLOAT8))
    if zps is not None and qtype.name in FLOAT8:
        problem = f"`zps` must be absent for float8 ({qtype.name})."
        raise fail(function, problem, fix="drop zps, or quantize to an integer type.")
    operands = operands_of(
        function, x, *attributes(function, scales, zps), ("float32",), ("int32",), granularity, axis
    )
    return _quantize(x, *operands, qtype=qtype)


@partial(jax.jit, static_argnames=("qtype",))
def _quantize(x, scales, zps, *, qtype):
    y = divide(x, scales)
    if zps is not None:
        y = y + zps.astype(jnp.float32)
    if qtype.name in FLOAT8:
        return y.astype(qtype)
    return format_of(qtype).encode(y, RoundMode.NEAREST_TOWARD_EVEN)


# oneDNN Graph Dequantize and DynamicDequantize.
#
#     (float32(q) - float32(zp)) * scale
#
# all in float32, narrowed once.


def onednn_dequantize(
    q: ArrayLike,
    scales: Sequence[float] | np.ndarray,
    zps: Sequence[int] | np.ndarray | None = None,
    *,
    granularity: str = "per_tensor",
    axis: int = 1,
) -> jax.Array:
    """Dequantizes `q` to float32 with scales known in advance: `(q - zp) * scale`.

    Args:
      q: int8, uint8, float8_e4m3fn or float8_e5m2 array, any shape.
      scales: numbers, one for `"per_tensor"`, `q.shape[axis]` for `"per_channel"`.
      zps: integers, as many as `scales`; `None` means zero everywhere.
      granularity: `"per_tensor"` or `"per_channel"`.
      axis: channel axis; used only for `"per_channel"`.

    Returns:
      float32 array of the shape of `q`.

    Raises:
      TypeError, ValueError: as in `dynamic_quantize`.

    Gradient: JAX differentiates it for float8 `q`.
    NaN and infinities: IEEE arithmetic.
    Source: oneDNN Graph Dequantize.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.onednn.onednn_dequantize(jnp.array([5, -8], jnp.int8), [0.5], [2])
      Array([ 1.5, -5. ], dtype=float32)
    """
    function = "onednn.onednn_dequantize"
    q = typed(function, "q", q, ("int8", "uint8", *FLOAT8))
    operands = operands_of(
        function, q, *attributes(function, scales, zps), ("float32",), ("int32",), granularity, axis
    )
    return _dequantize(q, *operands)


def dynamic_dequantize(
    q: ArrayLike,
    scales: ArrayLike,
    zps: ArrayLike | None = None,
    *,
    granularity: str = "per_tensor",
    axis: int = 1,
    group_shape: Sequence[int] | None = None,
) -> jax.Array:
    """Dequantizes `q`: `(q - zp) * scale` in float32, narrowed once to the dtype of `scales`.

    Args:
      q: int8, uint8, int4 or uint4 array, any shape.
      scales: float32, float16 or bfloat16. 1-D with one element for `"per_tensor"`, 1-D with
        `q.shape[axis]` elements for `"per_channel"`, and the rank of `q` with one element per group
        for `"per_group"`.
      zps: int8, uint8, int4, uint4 or int32, shape of `scales`; `None` means zero everywhere.
      granularity: `"per_tensor"`, `"per_channel"` or `"per_group"`.
      axis: channel axis; used only for `"per_channel"`.
      group_shape: for `"per_group"`, the shape of a block of values that share a scale: one size
        per axis of `q`, which must divide that axis.

    Returns:
      Array of the shape of `q` and the dtype of `scales`.

    Raises:
      TypeError: an operand has an element type that the operation does not take.
      ValueError: a shape, `axis`, `group_shape` or `granularity` does not fit.

    Gradient: JAX differentiates it with respect to `scales`.
    NaN and infinities: IEEE arithmetic on `scales`.
    Source: oneDNN Graph DynamicDequantize (3.13).

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> q = jnp.array([[1, 2, 3, 4]], jnp.int4)
      >>> scales = jnp.array([[1.0, 10.0]])
      >>> jqx.onednn.dynamic_dequantize(q, scales, granularity="per_group", group_shape=(1, 2))
      Array([[ 1.,  2., 30., 40.]], dtype=float32)
    """
    function = "onednn.dynamic_dequantize"
    q = typed(function, "q", q, ("int8", "uint8", "int4", "uint4"))
    floats = ("float32", "float16", "bfloat16")
    integers = ("int8", "uint8", "int32", "int4", "uint4")
    if granularity == "per_group":
        scales, zps = group_operands(function, q, scales, zps, floats, integers, group_shape)
        return _dequantize(q, scales, zps)
    if group_shape is not None:
        problem = f"`group_shape` has no meaning for granularity={granularity!r}, without groups."
        raise fail(function, problem, fix='drop group_shape, or pass granularity="per_group".')
    scales, zps = operands_of(
        function, q, scales, zps, floats, integers, granularity, axis, per_group=True
    )
    return _dequantize(q, scales, zps)


@jax.jit
def _dequantize(q, scales, zps):
    y = q.astype(jnp.float32)
    if zps is not None:
        y = y - zps.astype(jnp.float32)
    return narrow(multiply(y, widen(scales)), scales.dtype)


# Operands of the oneDNN ops: element types, shapes, and how they line up with the values.


def check_type(function: str, argument: str, dtype: Any, allowed: tuple[str, ...]) -> None:
    if name_of(dtype) not in allowed:
        problem = f"`{argument}` has an element type that is not supported: {name_of(dtype)}."
        fix = f"convert {argument} to one of {', '.join(allowed)}."
        raise fail(function, problem, fix=fix, error=TypeError)


def typed(function: str, argument: str, x: ArrayLike, allowed: tuple[str, ...]) -> jax.Array:
    x = as_array(function, argument, x)
    check_type(function, argument, x.dtype, allowed)
    return x


def attributes(function: str, scales: Any, zps: Any) -> tuple[jax.Array, jax.Array | None]:
    """Checks the attributes of an op with fixed parameters, and returns them as arrays."""
    scales = jnp.asarray(scales, jnp.float32)
    if zps is None:
        return scales, None
    integers, info = np.asarray(zps), np.iinfo(np.int32)
    is_integer = integers.dtype.kind in "iu"
    if not is_integer or not np.all((integers >= info.min) & (integers <= info.max)):
        problem = f"`zps` must hold 32-bit integers, not others of {integers.dtype}."
        raise fail(function, problem, fix="round them, or pass None for zero.")
    return scales, jnp.asarray(zps, jnp.int32)


def operands_of(
    function: str,
    x: jax.Array,
    scales: ArrayLike,
    zps: ArrayLike | None,
    floats: tuple[str, ...],
    integers: tuple[str, ...],
    granularity: str,
    axis: int,
    per_group: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Checks 1-D scales and zero points and lines them up with `x`."""
    names = ("per_tensor", "per_channel", *(("per_group",) if per_group else ()))
    if granularity not in names:
        fix = f"pass one of {', '.join(names)}; oneDNN calls the attribute qtype."
        raise fail(function, f"`granularity` {granularity!r} is unknown.", fix=fix)
    shape = [1] * x.ndim
    if granularity == "per_channel":
        axis = check_integer(function, "axis", axis)
        (axis,) = normalize_axes(function, axis, x.ndim, argument="axis")
        shape[axis] = x.shape[axis]
    rule = f"be 1-D with one element per {granularity.removeprefix('per_')}"
    facts = f"x.shape == {x.shape}, axis == {axis}"
    expected = (math.prod(shape),), rule, facts
    scales = _parameter(function, "scales", scales, floats, *expected).reshape(shape)
    if zps is None:
        return scales, None
    return scales, _parameter(function, "zps", zps, integers, *expected).reshape(shape)


def group_operands(
    function: str,
    q: jax.Array,
    scales: ArrayLike,
    zps: ArrayLike | None,
    floats: tuple[str, ...],
    integers: tuple[str, ...],
    group_shape: Sequence[int] | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Checks scales and zero points of groups and repeats each over its group."""
    group = tuple(group_shape) if isinstance(group_shape, Sequence) else ()
    if len(group) != q.ndim or not all(
        isinstance(g, (int, np.integer)) and not isinstance(g, bool) and g >= 1 and n % g == 0
        for n, g in zip(q.shape, group, strict=True)
    ):
        problem = "`group_shape` does not divide the shape of `q`."
        facts = f"group_shape == {group_shape!r}, q.shape == {q.shape}"
        fix = "pass one size per axis: (1, 32) for blocks of 32 along the last of two axes."
        raise fail(function, problem, given=facts, fix=fix)
    shape = tuple(n // g for n, g in zip(q.shape, group, strict=True))
    facts = f"q.shape == {q.shape}, group_shape == {group}"
    expected = shape, "hold one element per group", facts
    scales = _parameter(function, "scales", scales, floats, *expected)
    if zps is not None:
        zps = _parameter(function, "zps", zps, integers, *expected)
    for axis, size in enumerate(group):
        scales = jnp.repeat(scales, size, axis=axis)
        zps = None if zps is None else jnp.repeat(zps, size, axis=axis)
    return scales, zps


def _parameter(
    function: str,
    name: str,
    x: ArrayLike,
    allowed: tuple[str, ...],
    shape: tuple[int, ...],
    rule: str,
    facts: str,
) -> jax.Array:
    """Returns scales or zero points as an array, after checking its element type and its shape,
    which `rule` describes in words.
    """
    x = typed(function, name, x, allowed)
    if not holds("assert_shape", x, shape):
        facts = f"{name}.shape == {x.shape}, {facts}"
        fix = f"pass {name}.shape == {shape}, or choose another granularity."
        raise fail(function, f"`{name}` must {rule}.", given=facts, fix=fix)
    return x
