"""`dot_general` on arrays and QTensors."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._checks import as_dtype, as_real, check_real, require_that
from ..numerics import Integer, common_dtype, format_of
from ..tensor import QTensor
from ._blocks import can_leave_sum, find_block, split_block, with_own_scales
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
    in floating point, zero point and scale after (weight-only quantization); so are float formats
    and codebooks, in float32. Where scales are given in blocks along a contracted axis, each block
    is contracted by itself, and the products are summed in float32. Two arrays go to
    `lax.dot_general`.

    Args:
      lhs: array or QTensor. A scale must not vary along a contracted axis but in blocks.
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
    return _contract(left, right, dimensions, precision).astype(dtype)


def _contract(
    left: Any, right: Any, dimensions: Dimensions, precision: lax.PrecisionLike
) -> jax.Array:
    """Contracts two operands, one of them a QTensor, in the float dtype of computation."""
    block = find_block(left, right, dimensions)
    if block is not None:
        parts = [_contract(*part, precision) for part in split_block(left, right, block)]
        summed = [jnp.sum(part, axis=0) for part in parts]
        return summed[0] if len(summed) == 1 else summed[0] + summed[1]
    left = with_own_scales(left, dimensions.lhs_kept)
    right = with_own_scales(right, dimensions.rhs_kept)
    if _is_integer(left) and _is_integer(right):
        total = integer_dot(left, right, dimensions)
        y = total.astype(common_dtype(left.real_scale().dtype, right.real_scale().dtype))
    else:
        y = _float_dot(left, right, dimensions, precision)
    if isinstance(left, QTensor):
        y = y * dimensions.lhs_to_output(left.real_scale()).astype(y.dtype)
    if isinstance(right, QTensor):
        y = y * dimensions.rhs_to_output(right.real_scale()).astype(y.dtype)
    return y


def _is_integer(x: Any) -> bool:
    return isinstance(x, QTensor) and isinstance(format_of(x.qtype), Integer)


def as_operand(x: Operand) -> Any:
    """Returns an array, or the QTensor that was given, unpacked."""
    return x.unpack() if isinstance(x, QTensor) else jnp.asarray(x)


def _check_operand(name: str, operand: Any, contracting: tuple[int, ...]) -> None:
    """Checks that an array is real, and that the scale of a QTensor can leave the sum."""
    if not isinstance(operand, QTensor):
        as_real("dot_general", name, operand)
        return
    require_that(
        can_leave_sum(operand.groups, contracting),
        error=ValueError,
        function="dot_general",
        problem=f"the scale of `{name}` varies along a contracted axis: it cannot leave the sum.",
        given=f"{name}.shape == {operand.shape}, scale {operand.scale.shape}, "
        f"contracted axes {contracting}",
        expected=f"a scale of size 1, or of blocks, along axes {contracting}",
        mend="quantize with per_channel() or per_group(...), or with per_axis of axes that the "
        "contraction keeps.",
    )


def _float_dot(
    lhs: Any, rhs: Any, dimensions: Dimensions, precision: lax.PrecisionLike
) -> jax.Array:
    """Contracts numbers of formats, and floats, without the scales.

    A zero point beside floats is corrected after, as a multiple of their sums.
    """
    wide = common_dtype(lhs.dtype, rhs.dtype)
    left, right = _numbers(lhs, rhs, wide), _numbers(rhs, lhs, wide)
    if left.dtype != right.dtype:
        left, right = left.astype(wide), right.astype(wide)
    y = lax.dot_general(
        left, right, dimensions.numbers, precision=precision, preferred_element_type=wide
    )
    if isinstance(lhs, QTensor) and lhs.zero_point is not None:
        sums = jnp.sum(right, axis=dimensions.rhs_contracting, keepdims=True, dtype=wide)
        zero = dimensions.lhs_to_output(lhs.zero_point).astype(wide)
        y = y - zero * dimensions.rhs_to_output(sums)
    if isinstance(rhs, QTensor) and rhs.zero_point is not None:
        sums = jnp.sum(left, axis=dimensions.lhs_contracting, keepdims=True, dtype=wide)
        zero = dimensions.rhs_to_output(rhs.zero_point).astype(wide)
        y = y - zero * dimensions.lhs_to_output(sums)
    return y


def _numbers(x: Any, other: Any, wide: jnp.dtype) -> jax.Array:
    """Returns a float operand, or the numbers of a QTensor: in the dtype of a float operand beside
    it, where that holds them.
    """
    if not isinstance(x, QTensor):
        return x
    form = format_of(x.qtype)
    if not isinstance(form, Integer):
        return form.decode(x.codes).astype(wide)
    # Codes of 8 bits are exact in every float dtype; longer ones need at least float32.
    exact = form.bits <= 8 and wide == jnp.float32 and not isinstance(other, QTensor)
    return x.codes.astype(other.dtype if exact else wide)
