"""`dot_general` on arrays and QTensors."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._checks import as_dtype, as_real, check_real, require_that
from ..numerics import bit_width, common_dtype
from ..tensor import QTensor
from ._dimensions import Dimensions
from ._integer import integer_dot

Operand = ArrayLike | QTensor


def dot_general(
    lhs: Operand,
    rhs: Operand,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Contracts two operands, either of them quantized; as `jax.lax.dot_general` otherwise.

    Two QTensors are multiplied as integers: the int32 accumulator is exact, zero points are
    corrected with sums over the contracted axes, and the scales are multiplied in after, in
    float32. With one QTensor, its codes are converted to the other operand's dtype and contracted
    in floating point, zero point and scale after (weight-only quantization). Two arrays go to
    `lax.dot_general`.

    Args:
      lhs: array or QTensor. A scale must not vary along a contracted axis.
      rhs: array or QTensor, likewise.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`.
      precision: as in `jax.lax.dot_general`, where the contraction is one of floats; integer
        arithmetic is exact.
      preferred_element_type: floating point dtype of the result; `None` takes the promoted dtype of
        the operands.

    Returns:
      Array of `preferred_element_type`: batch axes, then those kept of `lhs`, then of `rhs`.

    Raises:
      ValueError: a scale varies along a contracted axis, or the int32 accumulator could overflow.
      TypeError: one operand is a QTensor and the other an integer array, or the result is asked for
        as integers; and from `lax.dot_general`, where shapes or dimension numbers do not fit.

    Gradient: by JAX, of float operands and of scales; none of codes.
    NaN and infinities: IEEE arithmetic on scales and float operands.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> w = jqx.QTensor.quantize(jnp.eye(2) * 3.0, jqx.QSpec(jnp.int8, jqx.per_axis(1)))
      >>> jqx.dot_general(jnp.ones((1, 2)), w, (((1,), (0,)), ((), ())))
      Array([[3., 3.]], dtype=float32)
    """
    left, right = as_operand(lhs), as_operand(rhs)
    if not isinstance(left, QTensor) and not isinstance(right, QTensor):
        return lax.dot_general(
            left,
            right,
            dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
    dimensions = Dimensions.of(dimension_numbers, left.ndim, right.ndim)
    _check_operand("lhs", left, dimensions.lhs_contracting)
    _check_operand("rhs", right, dimensions.rhs_contracting)
    if preferred_element_type is None:
        dtype = jnp.promote_types(left.dtype, right.dtype)
    else:
        dtype = as_dtype("dot_general", "preferred_element_type", preferred_element_type)
        check_real("dot_general", "`preferred_element_type`", dtype)
    if isinstance(left, QTensor) and isinstance(right, QTensor):
        total = integer_dot(
            left.values, left.zero_point, right.values, right.zero_point, dimensions
        )
        y = total.astype(common_dtype(left.scale.dtype, right.scale.dtype))
    else:
        y = _weight_only(left, right, dimensions, precision)
    if isinstance(left, QTensor):
        y = y * dimensions.lhs_to_output(left.scale).astype(y.dtype)
    if isinstance(right, QTensor):
        y = y * dimensions.rhs_to_output(right.scale).astype(y.dtype)
    return y.astype(dtype)


def as_operand(x: Operand) -> Any:
    """Returns an array, or the QTensor that was given."""
    return x if isinstance(x, QTensor) else jnp.asarray(x)


def _check_operand(name: str, operand: Any, contracting: tuple[int, ...]) -> None:
    """Checks that an array is real, and that the scale of a QTensor can leave the sum."""
    if not isinstance(operand, QTensor):
        as_real("dot_general", name, operand)
        return
    arrays = [operand.scale, *([] if operand.zero_point is None else [operand.zero_point])]
    require_that(
        all(array.shape[axis] == 1 for array in arrays for axis in contracting),
        error=ValueError,
        function="dot_general",
        problem=f"the scale of `{name}` varies along a contracted axis: it cannot leave the sum.",
        given=f"{name}.shape == {operand.shape}, scale {operand.scale.shape}, "
        f"contracted axes {contracting}",
        expected=f"a scale of size 1 along axes {contracting}",
        mend="quantize with per_channel() or with per_axis of axes that the contraction keeps.",
    )


def _weight_only(
    lhs: Any, rhs: Any, dimensions: Dimensions, precision: lax.PrecisionLike
) -> jax.Array:
    """Contracts a float operand with codes: zero point after, as a multiple of the float sums."""
    floats, codes = (rhs, lhs.values) if isinstance(lhs, QTensor) else (lhs, rhs.values)
    wide = common_dtype(lhs.dtype, rhs.dtype)
    # Codes of 8 bits are exact in every float dtype; longer ones need at least float32.
    exact = bit_width(codes.dtype) <= 8 and wide == jnp.float32
    dtype = floats.dtype if exact else wide
    left = (codes if isinstance(lhs, QTensor) else floats).astype(dtype)
    right = (codes if isinstance(rhs, QTensor) else floats).astype(dtype)
    y = lax.dot_general(
        left, right, dimensions.numbers, precision=precision, preferred_element_type=wide
    )
    if isinstance(lhs, QTensor) and lhs.zero_point is not None:
        sums = jnp.sum(floats, axis=dimensions.rhs_contracting, keepdims=True, dtype=wide)
        zero = dimensions.lhs_to_output(lhs.zero_point).astype(wide)
        y = y - zero * dimensions.rhs_to_output(sums)
    if isinstance(rhs, QTensor) and rhs.zero_point is not None:
        sums = jnp.sum(floats, axis=dimensions.lhs_contracting, keepdims=True, dtype=wide)
        zero = dimensions.rhs_to_output(rhs.zero_point).astype(wide)
        y = y - zero * dimensions.lhs_to_output(sums)
    return y
