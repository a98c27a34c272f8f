"""oneDNN Graph DynamicQuantize, and Quantize with its float8 formats.

    saturate(round_half_even(x / scale + float32(zp)))      zp is added BEFORE the rounding

all in float32 and without contraction.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._calls import called
from .._checks import as_dtype
from .._errors import fail
from ..numerics import format_of
from ..numerics._shared import RoundMode, divide
from ._onednn_operands import FLOAT8, attributes, check_type, operands_of, typed


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
        raise fail(
            function,
            "`zps` must be absent for float8.",
            given=f"zps with qtype {qtype.name}",
            expected="zps=None",
            fix="drop zps, or quantize to an integer type.",
        )
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
