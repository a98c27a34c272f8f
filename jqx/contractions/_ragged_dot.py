"""`ragged_dot` on arrays and QTensors: groups of rows, each multiplied by its own matrix."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._calls import called
from .._checks import as_dtype, as_integers, as_real, check_real, name_of
from .._errors import fail
from ..tensor import QTensor
from ._dot_general import Operand, as_operand
from ._how._blocks import can_leave_sum
from ._how._formulation import Planner
from ._ragged_cpu import ragged_package
from ._ragged_kernels import ragged_kernel_gpu, ragged_kernel_tpu
from ._ragged_tiles import Args, Groups, ragged_tiles
from ._what._axes import OperandAxes

ROWS_OF_GROUPS = OperandAxes((1,), (0,)), OperandAxes((1,), (0, 2), (0,))
"""The roles of the axes of rows and matrices."""

GROUPS = Planner("ragged_dot", ragged_package, ragged_kernel_tpu, ragged_kernel_gpu, ragged_tiles)


@called("ragged_dot")
def ragged_dot(
    lhs: Operand,
    rhs: Operand,
    group_sizes: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: None = None,
) -> jax.Array:
    """Multiplies groups of rows by matrices, one per group; both sides may be quantized. Otherwise
    it is `jax.lax.ragged_dot`.

    The first `group_sizes[0]` rows are multiplied by `rhs[0]`, the next by `rhs[1]`, and so on
    (a mixture of experts, with tokens sorted by expert). Each product is that of `jqx.dot_general`:
    exact for two integer formats. Rows are contracted one tile at a time with the codes of one
    matrix. Tiles have at most twice as many rows as groups have on average (between 8 and 512), and
    each group has at most one tile that is not full. Two arrays are passed to `lax.ragged_dot`.
    `jqx.formulations` shows how tiles are contracted, and how many there are.

    Args:
      lhs: array or QTensor, shape (m, k), with rows sorted by group.
      rhs: array or QTensor, shape (g, k, n). The scales of both operands must not vary along `k`,
        except in blocks. Codes packed along `g` are all unpacked first.
      group_sizes: integers, shape (g,): the number of rows of each group. Rows beyond their sum are
        zero in the result; groups beyond the last row are truncated. A negative size counts as 0.
      precision: as in `jqx.dot_general`.
      preferred_element_type: floating point dtype of the result; `None` takes the promoted dtype of
        the operands.
      group_offset: `None`: `lax.ragged_dot` does not implement it either.

    Returns:
      Array of `preferred_element_type`, shape (m, n).

    Raises:
      ValueError: as in `dot_general`; ranks or sizes do not fit.
      TypeError: as in `dot_general`; `group_sizes` are not integers.
      NotImplementedError: a `group_offset` is given.

    Gradient: JAX differentiates it with respect to float operands and scales; codes have no
      gradient.
    NaN and infinities: as in `jqx.dot_general`; those of a row or a matrix only affect rows of
      the same group.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> experts = jnp.stack([jnp.eye(2), jnp.eye(2) * 3.0])
      >>> w = jqx.QTensor.quantize(experts, jqx.QSpec(jnp.int8, jqx.per_axis(0, 2)))
      >>> jqx.ragged_dot(jnp.ones((4, 2)), w, jnp.array([1, 2]))
      Array([[1., 1.],
             [3., 3.],
             [3., 3.],
             [0., 0.]], dtype=float32)
    """
    _check_offset(group_offset)
    left, right = as_operand(lhs), as_operand(rhs)
    sizes = as_integers("ragged_dot", "group_sizes", group_sizes)
    if not isinstance(left, QTensor) and not isinstance(right, QTensor):
        return lax.ragged_dot(
            left,
            right,
            sizes,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
    _check_shapes(left, right, sizes)
    _check_operand("lhs", left)
    _check_operand("rhs", right)
    if preferred_element_type is None:
        dtype = jnp.promote_types(left.dtype, right.dtype)
    else:
        dtype = as_dtype("ragged_dot", "preferred_element_type", preferred_element_type)
        check_real("ragged_dot", "`preferred_element_type`", dtype)
    if left.shape[0] == 0 or right.shape[0] == 0:
        return jnp.zeros((left.shape[0], right.shape[2]), dtype)
    return GROUPS.compute(Groups(left, right, Args(precision, dtype)), left, right, sizes)


def _check_offset(group_offset: Any) -> None:
    if group_offset is not None:
        raise fail(
            "ragged_dot",
            "`group_offset` is not supported.",
            given="a group_offset",
            expected="group_offset=None",
            fix="pass only the matrices, sizes and rows of the groups to compute.",
            error=NotImplementedError,
        )


def _check_shapes(lhs: Any, rhs: Any, sizes: jax.Array) -> None:
    given = (
        f"lhs.shape == {lhs.shape}, rhs.shape == {rhs.shape}, group_sizes.shape == {sizes.shape}"
    )
    if (lhs.ndim, rhs.ndim, sizes.ndim) != (2, 3, 1):
        raise fail(
            "ragged_dot",
            "an operand has the wrong rank.",
            given=given,
            expected="lhs (m, k), rhs (g, k, n), group_sizes (g,)",
            fix="reshape it, or map over batch axes with jax.vmap.",
        )
    if lhs.shape[1] != rhs.shape[1]:
        raise fail(
            "ragged_dot",
            "the contracted axes have different sizes.",
            given=given,
            expected=f"lhs.shape[1] == rhs.shape[1], that is {lhs.shape[1]} == {rhs.shape[1]}",
            fix="give rhs its axes in the order (g, k, n).",
        )
    if sizes.shape[0] != rhs.shape[0]:
        raise fail(
            "ragged_dot",
            "the numbers of group sizes and matrices differ.",
            given=given,
            expected=f"group_sizes.shape == ({rhs.shape[0]},)",
            fix="pass one size for each matrix of rhs, 0 for a group without rows.",
        )
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise fail(
            "ragged_dot",
            "`group_sizes` are not integers.",
            given=f"group_sizes.dtype == {name_of(sizes.dtype)}",
            expected="an integer dtype",
            fix="convert them: group_sizes.astype(jnp.int32).",
            error=TypeError,
        )


def _check_operand(name: str, operand: Any) -> None:
    if not isinstance(operand, QTensor):
        as_real("ragged_dot", name, operand)
        return
    if not can_leave_sum(operand.groups, (1,)):
        raise fail(
            "ragged_dot",
            f"the scale of `{name}` varies along the contracted axis, so it cannot leave the sum.",
            given=f"{name}.shape == {operand.shape}, scale {operand.scale.shape}",
            expected="a scale of size 1, or of blocks, along axis 1",
            fix="quantize with per_axis of the other axes, or with per_block({..., 1: size}).",
        )
