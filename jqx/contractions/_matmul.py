"""`matmul` on arrays and QTensors."""

from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._calls import called
from .._errors import fail
from ..tensor import QTensor
from ._dot_general import Operand, as_operand, dot_general
from ._output import Asked, Output


@overload
def matmul(
    lhs: Operand,
    rhs: Operand,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    output: None = None,
) -> jax.Array: ...
@overload
def matmul(
    lhs: Operand,
    rhs: Operand,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    output: Asked,
) -> QTensor: ...
@called("matmul")
def matmul(
    lhs: Operand,
    rhs: Operand,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    output: Output = None,
) -> Any:
    """Multiplies matrices; both may be quantized. Otherwise it is `jax.numpy.matmul`.

    Args:
      lhs: array or QTensor of one axis or more; contracted along its last axis.
      rhs: array or QTensor of one axis or more; contracted along its second last, or only axis.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of the result; `None` takes the promoted dtype of the operands.
      output: how to quantize the result, as in `jqx.dot_general`.

    Returns:
      Array, or a QTensor if `output` is given; leading axes broadcast as in `jax.numpy.matmul`.

    Raises:
      ValueError: as in `dot_general`; an operand has no axes; leading axes do not broadcast.

    Gradient: as in `dot_general`.
    NaN and infinities: as in `dot_general`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> w = jqx.QTensor.quantize(jnp.eye(2) * 3.0, jqx.QSpec(jnp.int8))
      >>> jnp.ones((4, 2)) @ w == jqx.matmul(jnp.ones((4, 2)), w)
      Array([[ True,  True],
             [ True,  True],
             [ True,  True],
             [ True,  True]], dtype=bool)
    """
    left, right = as_operand(lhs), as_operand(rhs)
    options: dict[str, Any] = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }
    if not isinstance(left, QTensor) and not isinstance(right, QTensor) and output is None:
        return jnp.matmul(left, right, **options)
    options["output"] = output
    if not (left.ndim >= 1 and right.ndim >= 1):
        raise fail(
            "matmul",
            "an operand has no axis to contract.",
            given=f"lhs.shape == {left.shape}, rhs.shape == {right.shape}",
            expected="operands of one axis or more",
            fix="give it an axis, or multiply by the scalar before quantizing.",
        )
    if right.ndim <= 2:
        return dot_general(left, right, (((left.ndim - 1,), (0,)), ((), ())), **options)
    if left.ndim > 1:
        batch = _broadcast_shapes(left.shape, right.shape)
        left, right = _broadcast_leading(left, batch), _broadcast_leading(right, batch)
    axes = tuple(range(right.ndim - 2)) if left.ndim > 1 else ()
    numbers = (((left.ndim - 1,), (right.ndim - 2,)), (axes, axes))
    return dot_general(left, right, numbers, **options)


def _broadcast_shapes(lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(lhs[:-2], rhs[:-2])
    except ValueError:
        raise fail(
            "matmul",
            "the leading axes do not broadcast.",
            given=f"lhs.shape == {lhs}, rhs.shape == {rhs}",
            expected="leading axes that are equal or 1, aligned right",
            fix="reshape an operand, or contract with jqx.dot_general.",
        ) from None


def _broadcast_leading(x: Any, batch: tuple[int, ...]) -> Any:
    """Broadcasts all axes except the last two to `batch`; a shared scale stays shared."""
    shape = (*batch, *x.shape[-2:])
    return x.broadcast_to(shape) if isinstance(x, QTensor) else jnp.broadcast_to(x, shape)
