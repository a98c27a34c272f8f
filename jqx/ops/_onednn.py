"""oneDNN Graph DynamicQuantize and its siblings Quantize, Dequantize and DynamicDequantize.

One arithmetic, all in float32 and without contraction:

    quantize:    saturate(round_half_even(x / scale + float32(zp)))   zp is added BEFORE rounding
    dequantize:  (float32(q) - float32(zp)) * scale, narrowed once
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._checks import as_dtype, name_of, normalize_axes, require, require_that
from ..numerics import RoundMode, divide, narrow, round_to_integer, saturating_sum

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


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

    The zero point is added before the one rounding, unlike `quantize`: with scale 1 and zero point
    3, 0.5 becomes 4 here and 3 there.

    Args:
      x: float32 array, any shape. (oneDNN: `src`.)
      scales: float32, 1-D: one element for `"per_tensor"`, `x.shape[axis]` for `"per_channel"`.
      zps: int8, uint8 or int32, shape of `scales`; need not lie in the range of `qtype`; `None`
        means zero everywhere.
      qtype: `jnp.int8` or `jnp.uint8`. (oneDNN: the type of `dst`.)
      granularity: `"per_tensor"` or `"per_channel"`. (oneDNN: the attribute `qtype`.)
      axis: channel axis in `[-rank, rank - 1]`; read for `"per_channel"` alone.

    Returns:
      Array of the shape of `x` and dtype `qtype`.

    Raises:
      TypeError: an operand or `qtype` has an element type that the operation does not take.
      ValueError: `scales` or `zps` is not 1-D or has the wrong length, `axis` is out of range, or
        `granularity` is unknown.

    Gradient: none (integer result); see `quantize_dequantize`.
    NaN and infinities: a NaN quotient gives 0; infinities saturate.
    Source: oneDNN Graph DynamicQuantize. Deviation from its library, not from its text: a true
      division where the library multiplies by the reciprocal.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> x = jnp.array([[0.5, 1.5], [-0.5, 900.0]])
      >>> jqx.dynamic_quantize(x, jnp.array([1.0]), jnp.array([3], jnp.int8))
      Array([[  4,   4],
             [  2, 127]], dtype=int8)
    """
    function = "dynamic_quantize"
    x = _typed(function, "x", x, ("float32",))
    qtype = as_dtype(function, "qtype", qtype)
    _check_type(function, "qtype", qtype, ("int8", "uint8"))
    scales, zps = _operands(
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
    """Quantizes `x` with scales known in advance: `dynamic_quantize`, and float8 formats besides.

    Args:
      x: float32 array, any shape.
      scales: numbers, one for `"per_tensor"`, `x.shape[axis]` for `"per_channel"`.
      zps: integers, as many as `scales`; `None` means zero everywhere, and is required for float8.
      qtype: `jnp.int8`, `jnp.uint8`, `jnp.float8_e4m3fn` or `jnp.float8_e5m2`.
      granularity: `"per_tensor"` or `"per_channel"`.
      axis: channel axis; read for `"per_channel"` alone.

    Returns:
      Array of the shape of `x` and dtype `qtype`.

    Raises:
      TypeError, ValueError: as `dynamic_quantize`; ValueError where float8 comes with `zps`.

    Gradient: none for integers; by JAX for float8.
    NaN and infinities: as `dynamic_quantize` for integers. float8 does not saturate: what is too
      large becomes NaN (e4m3fn) or infinity (e5m2).
    Source: oneDNN Graph Quantize. Deviation: e4m3fn is rounded once, the library rounds to float16
      first.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.onednn_quantize(jnp.array([0.3, -1.0]), [0.1], [2])
      Array([ 5, -8], dtype=int8)
    """
    function = "onednn_quantize"
    x = _typed(function, "x", x, ("float32",))
    qtype = as_dtype(function, "qtype", qtype)
    _check_type(function, "qtype", qtype, ("int8", "uint8", *_FLOAT8))
    require_that(
        zps is None or qtype.name not in _FLOAT8,
        error=ValueError,
        function=function,
        problem="`zps` must be absent for float8.",
        given=f"zps with qtype {qtype.name}",
        expected="zps=None",
        mend="drop zps, or quantize to an integer type.",
    )
    operands = _operands(
        function, x, *_attributes(scales, zps), ("float32",), ("int32",), granularity, axis
    )
    return _quantize(x, *operands, qtype=qtype)


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
      axis: channel axis; read for `"per_channel"` alone.

    Returns:
      float32 array of the shape of `q`.

    Raises:
      TypeError, ValueError: as `dynamic_quantize`.

    Gradient: by JAX, for float8 `q`.
    NaN and infinities: IEEE arithmetic.
    Source: oneDNN Graph Dequantize.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.onednn_dequantize(jnp.array([5, -8], jnp.int8), [0.5], [2])
      Array([ 1.5, -5. ], dtype=float32)
    """
    function = "onednn_dequantize"
    q = _typed(function, "q", q, ("int8", "uint8", *_FLOAT8))
    operands = _operands(
        function, q, *_attributes(scales, zps), ("float32",), ("int32",), granularity, axis
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
      scales: float32, float16 or bfloat16. 1-D with one element for `"per_tensor"` and
        `q.shape[axis]` for `"per_channel"`; of the rank of `q` for `"per_group"`, one per group.
      zps: int8, uint8, int4, uint4 or int32, shape of `scales`; `None` means zero everywhere.
      granularity: `"per_tensor"`, `"per_channel"` or `"per_group"`.
      axis: channel axis; read for `"per_channel"` alone.
      group_shape: for `"per_group"`, the shape of the block of values that shares a scale; one
        size per axis of `q`, each dividing it.

    Returns:
      Array of the shape of `q` and the dtype of `scales`.

    Raises:
      TypeError: an operand has an element type that the operation does not take.
      ValueError: a shape, `axis`, `group_shape` or `granularity` does not fit.

    Gradient: of `scales`, by JAX.
    NaN and infinities: IEEE arithmetic on `scales`.
    Source: oneDNN Graph DynamicDequantize (3.13).

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> q = jnp.array([[1, 2, 3, 4]], jnp.int4)
      >>> scales = jnp.array([[1.0, 10.0]])
      >>> jqx.dynamic_dequantize(q, scales, granularity="per_group", group_shape=(1, 2))
      Array([[ 1.,  2., 30., 40.]], dtype=float32)
    """
    function = "dynamic_dequantize"
    q = _typed(function, "q", q, ("int8", "uint8", "int4", "uint4"))
    floats, integers = (
        ("float32", "float16", "bfloat16"),
        ("int8", "uint8", "int32", "int4", "uint4"),
    )
    if granularity == "per_group":
        scales, zps = _group_operands(function, q, scales, zps, floats, integers, group_shape)
        return _dequantize(q, scales, zps)
    require_that(
        group_shape is None,
        error=ValueError,
        function=function,
        problem="`group_shape` has no meaning without groups.",
        given=f"group_shape == {group_shape!r}, granularity == {granularity!r}",
        expected="group_shape=None",
        mend='drop group_shape, or pass granularity="per_group".',
    )
    scales, zps = _operands(
        function, q, scales, zps, floats, integers, granularity, axis, per_group=True
    )
    return _dequantize(q, scales, zps)


@partial(jax.jit, static_argnames=("qtype",))
def _quantize(x, scales, zps, *, qtype):
    y = divide(x, scales)
    if zps is not None:
        y = y + zps.astype(jnp.float32)
    if qtype.name in _FLOAT8:
        return y.astype(qtype)
    return saturating_sum(round_to_integer(y, RoundMode.NEAREST_TOWARD_EVEN), None, qtype)


@jax.jit
def _dequantize(q, scales, zps):
    y = q.astype(jnp.float32)
    if zps is not None:
        y = y - zps.astype(jnp.float32)
    return narrow(y * scales.astype(jnp.float32), scales.dtype)


def _check_type(function: str, argument: str, dtype: Any, allowed: tuple[str, ...]) -> None:
    require_that(
        name_of(dtype) in allowed,
        error=TypeError,
        function=function,
        problem=f"`{argument}` has an element type that the operation does not take.",
        given=f"{argument}: {name_of(dtype)}",
        expected=f"one of {', '.join(allowed)}",
        mend=f"convert {argument} to one of these.",
    )


def _typed(function: str, argument: str, x: ArrayLike, allowed: tuple[str, ...]) -> jax.Array:
    x = jnp.asarray(x)
    _check_type(function, argument, x.dtype, allowed)
    return x


def _attributes(scales: Any, zps: Any) -> tuple[jax.Array, jax.Array | None]:
    return jnp.asarray(scales, jnp.float32), None if zps is None else jnp.asarray(zps, jnp.int32)


def _operands(
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
    scales = _typed(function, "scales", scales, floats)
    operands = {"scales": scales}
    if zps is not None:
        operands["zps"] = _typed(function, "zps", zps, integers)
    known = (
        ("per_tensor", "per_channel", "per_group") if per_group else ("per_tensor", "per_channel")
    )
    require_that(
        granularity in known,
        error=ValueError,
        function=function,
        problem="`granularity` is unknown.",
        given=f"granularity == {granularity!r}",
        expected=f"one of {', '.join(known)}",
        mend="pass one of these strings; oneDNN calls the attribute qtype.",
    )
    shape = [1] * x.ndim
    if granularity == "per_channel":
        (axis,) = normalize_axes(function, axis, x.ndim, argument="axis")
        shape[axis] = x.shape[axis]
    length = 1 if granularity == "per_tensor" else shape[axis]
    for name, operand in operands.items():
        require(
            chex.assert_shape,
            operand,
            (length,),
            error=ValueError,
            function=function,
            problem=f"`{name}` must be 1-D with one element per "
            f"{'tensor' if granularity == 'per_tensor' else 'channel'}.",
            given=f"{name}.shape == {operand.shape}, x.shape == {x.shape}, "
            f"granularity == {granularity!r}, axis == {axis}",
            expected=f"{name}.shape == ({length},)",
            mend=f"reshape {name}, or choose another granularity or axis.",
        )
    lined_up = [operand.reshape(shape) for operand in operands.values()]
    return lined_up[0], lined_up[1] if zps is not None else None


def _group_operands(
    function: str,
    q: jax.Array,
    scales: ArrayLike,
    zps: ArrayLike | None,
    floats: tuple[str, ...],
    integers: tuple[str, ...],
    group_shape: Sequence[int] | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Checks scales and zero points of groups and repeats each over its group."""
    group = tuple(group_shape) if group_shape is not None else ()
    require_that(
        len(group) == q.ndim
        and all(isinstance(g, (int, np.integer)) and g >= 1 for g in group)
        and all(n % g == 0 for n, g in zip(q.shape, group, strict=True)),
        error=ValueError,
        function=function,
        problem="`group_shape` does not divide the shape of `q`.",
        given=f"group_shape == {group_shape!r}, q.shape == {q.shape}",
        expected="one group size per axis of q, each dividing that axis",
        mend="pass for example group_shape=(1, 32) for blocks of 32 along the last of two axes.",
    )
    expected = tuple(n // g for n, g in zip(q.shape, group, strict=True))
    operands = {"scales": _typed(function, "scales", scales, floats)}
    if zps is not None:
        operands["zps"] = _typed(function, "zps", zps, integers)
    for name, operand in operands.items():
        require(
            chex.assert_shape,
            operand,
            expected,
            error=ValueError,
            function=function,
            problem=f"`{name}` must hold one element per group.",
            given=f"{name}.shape == {operand.shape}, q.shape == {q.shape}, group_shape == {group}",
            expected=f"{name}.shape == {expected}",
            mend=f"pass {name} with the shape of q divided by group_shape.",
        )
        for dim, size in enumerate(group):
            operands[name] = jnp.repeat(operands[name], size, axis=dim)
    return operands["scales"], operands.get("zps")
