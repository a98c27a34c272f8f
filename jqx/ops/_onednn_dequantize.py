"""oneDNN Graph Dequantize and DynamicDequantize.

    (float32(q) - float32(zp)) * scale

all in float32, narrowed once.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._errors import fail
from ..numerics._shared import multiply, narrow, widen
from ._onednn_operands import FLOAT8, attributes, group_operands, operands_of, typed


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
    floats, integers = (
        ("float32", "float16", "bfloat16"),
        ("int8", "uint8", "int32", "int4", "uint4"),
    )
    if granularity == "per_group":
        scales, zps = group_operands(function, q, scales, zps, floats, integers, group_shape)
        return _dequantize(q, scales, zps)
    if group_shape is not None:
        raise fail(
            function,
            "`group_shape` has no meaning without groups.",
            given=f"group_shape == {group_shape!r}, granularity == {granularity!r}",
            expected="group_shape=None",
            fix='drop group_shape, or pass granularity="per_group".',
        )
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
