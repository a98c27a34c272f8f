"""Formulations by kernels of the package jqx-cpu, which are tried first on CPU if it is installed.

Weights are stored as [..., N, K], with the contracted axis last. If a compiler partitions a program
over devices, and in exported functions outside of `jqx.kernels_in_exports`, the form without
kernels is used.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax

from ... import _package_cpu
from ..._compat_kernels import alone_or_in_parts
from ...kernels._shared import product_cpu
from ...numerics import QType
from ...numerics._shared import E8M0
from ...tensor import QTensor
from ...tensor._shared import alone, found
from .._integers._bytes import as_int8, is_byte, longest
from .._integers._integer import accumulate, in_fitting_shapes
from .._integers._products import fitting, to_rows
from .._what._dimensions import Dimensions
from ._blocks import with_own_scales
from ._formulation import CPU, formulation
from ._kernels_of_codes import derived_as
from ._scales import HowTo


def is_in_rows(x: Any, q: QTensor, dimensions: Dimensions) -> bool:
    """Whether a weight is [..., N, K], the contracted axis last, and all sizes are known."""
    return (
        dimensions.rhs_contracting == (q.ndim - 1,)
        and dimensions.rhs_free == (q.ndim - 2,)
        and dimensions.rhs_batch == tuple(range(q.ndim - 2))
        and len(dimensions.lhs_contracting) == 1
        and not any(export.is_symbolic_dim(n) for n in (*x.shape, *q.shape))
        and q.scale.dtype in (E8M0, jnp.float32)
    )


def multiplies_bytes(x: Any, q: QTensor, how: HowTo) -> bool:
    """Whether the package multiplies the codes as they are stored. The left operand may be given by
    shapes only.
    """
    is_int8 = q.values.dtype == jnp.int8 and (q.layout is None or q.layout.packing is None)
    return is_int8 and _multiplies(x, q, how)


def _multiplies(x: Any, q: QTensor, how: HowTo) -> bool:
    return (
        _package_cpu.is_installed()
        and isinstance(x, QTensor)
        and how.block is None
        and is_byte(x)
        and is_byte(q)
        and q.size != 0
        and is_in_rows(x, q, how.dimensions)
        and x.scale.dtype in (E8M0, jnp.float32)
        and how.dimensions.contracted_size(x) <= longest(x, q)
    )


def _are_bytes(case: Any) -> bool:
    own = not case.is_beside_floats and case.is_large
    return own and multiplies_bytes(case.lhs, case.rhs, case.how)


CODES = (
    "codes times codes of 8 bits, the contracted axis last, if jqx-cpu is installed: its kernel "
    "multiplies them exactly, and scales the sums as it writes them"
)


@formulation(CODES, CPU, _are_bytes, finds=True)
def package_codes(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    kernel, plain = (
        functools.partial(_scaled, how=how),
        functools.partial(in_fitting_shapes, how=how),
    )
    return derived_as(functools.partial(by_kernel, kernel, plain), plain)(lhs, rhs)


def _scaled(lhs: QTensor, rhs: QTensor, *stack: jax.Array, how: HowTo) -> jax.Array:
    left, (right, step) = left_of(as_int8(lhs), how), right_of(as_int8(rhs), how, *stack)
    return as_output(product_cpu(*left, *right, dtype=jnp.float32, step=step), lhs, how)


def _in_rows(q: QTensor, dimensions: Dimensions) -> tuple[tuple[int, ...], Dimensions]:
    """Returns the order of axes that makes a right operand [..., N, K], and the new dimensions."""
    order = (*dimensions.rhs_batch, *dimensions.rhs_free, *dimensions.rhs_contracting)
    places = tuple(order.index(axis) for axis in range(q.ndim))
    return order, dimensions.renamed(range(dimensions.lhs_rank), places)


def _are_batches(case: Any) -> bool:
    if case.is_beside_floats or not case.is_large or not case.dimensions.rhs_batch:
        return False
    _, dimensions = _in_rows(case.rhs, case.dimensions)
    how = case.how._replace(dimensions=dimensions)
    return case.rhs.layout is None and _multiplies(case.lhs, case.rhs, how)


@formulation(
    "batches of codes times codes of 8 bits, as in attention, if jqx-cpu is installed: the codes "
    "of the right operand are transposed for its kernel",
    CPU,
    _are_batches,
)
def package_batches(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    order, dimensions = _in_rows(rhs, how.dimensions)

    def kernel(lhs: QTensor, rhs: QTensor) -> jax.Array:
        return _scaled(lhs, rhs.transpose(order), how=how._replace(dimensions=dimensions))

    plain = functools.partial(in_fitting_shapes, how=how)
    return derived_as(functools.partial(by_kernel, kernel, plain), plain)(lhs, rhs)


@formulation(
    "sums to be requantized, where `package_codes` is the form of the product",
    CPU,
    _are_bytes,
    op="dot_general:int32",
    finds=True,
)
def package_sums(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    def kernel(lhs: QTensor, rhs: QTensor, *stack: jax.Array) -> jax.Array:
        x, x_zero, w, w_zero, step = codes_of(lhs, rhs, how, *stack)
        return as_output(product_cpu(x, None, x_zero, w, None, w_zero, step=step), lhs, how)

    return by_kernel(kernel, functools.partial(plain_sums, how=how), *constant(lhs, rhs))


def codes_of(lhs: QTensor, rhs: QTensor, how: HowTo, *stack: jax.Array) -> tuple[Any, ...]:
    """Returns codes and zero points of rows and of a weight, and the index in a stack."""
    x, _, x_zero = left_of(as_int8(lhs), how)
    (w, _, w_zero), step = right_of(as_int8(rhs), how, *stack)
    return x, x_zero, w, w_zero, step


def constant(*operands: Any) -> Any:
    """Returns operands of integer arithmetic as constants, because it has no derivative."""
    return jax.tree.map(lax.stop_gradient, operands)


def plain_sums(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    """Returns the int32 sums of products of codes minus zero points, without a kernel."""
    return accumulate(as_int8(lhs), as_int8(rhs), how.dimensions, fitting)


def by_kernel(kernel: Callable[..., Any], plain: Callable[..., Any], *operands: Any) -> jax.Array:
    """Runs a kernel if a program is for one device, and else the form without kernels. If the last
    operand, a weight, is a slice of a stack, the kernel gets the codes of the stack and the index.
    """
    *rows, q = operands
    codes, step = found(q)
    stack = () if step is None or q.ndim > 2 else (codes, step)

    def without(*operands: Any) -> jax.Array:
        return plain(*operands[: len(rows) + 1])

    given = *map(alone, rows), alone(q), *stack
    return alone_or_in_parts(kernel, without, *given)


def quantizing(
    x: jax.Array, scale: jax.Array, q: QTensor, *stack: jax.Array, how: HowTo, form: QType
) -> jax.Array:
    """Returns the product of floats, quantized to a format with their scale, and a weight."""
    rows = rows_of(x.astype(jnp.float32), how)
    own = _parameter(scale.astype(jnp.float32), x, how)
    weight, step = right_of(as_int8(q), how, *stack)
    options = {"low": float(form.low), "high": float(form.high), "step": step}
    return as_output(product_cpu(rows, own, None, *weight, **options, dtype=jnp.float32), x, how)


def in_groups(parameter: jax.Array, q: QTensor) -> jax.Array:
    """Returns scales or zero points of a weight [..., N, K] as [B, G, N]."""
    groups = q.shape[-1] // q.groups.sizes[-1]
    shape = (*q.shape[:-1], groups)
    return jnp.broadcast_to(parameter, shape).swapaxes(-1, -2).reshape(-1, groups, q.shape[-2])


def left_of(q: QTensor, how: HowTo) -> tuple[Any, Any, Any]:
    """Returns codes [B, M, K], scales and zero points [B, M or 1] of rows."""
    q = with_own_scales(q, how.dimensions.lhs_kept)
    zero = q.zero_point
    if zero is not None:
        zero = _parameter(zero.astype(jnp.int32), q, how)
    return rows_of(q.values, how), _parameter(q.real_scale(), q, how), zero


def right_of(q: QTensor, how: HowTo, *stack: jax.Array) -> tuple[tuple[Any, Any, Any], Any]:
    """Returns codes [B, N, K], scales and zero points [B, N or 1] of a weight, and `None`. For a
    slice of a stack, it returns the codes of the stack, and the index.
    """
    q = with_own_scales(q, how.dimensions.rhs_kept)
    batch, n = q.shape[:-2], q.shape[-2]

    def parameter(x: jax.Array) -> jax.Array:
        own = 1 if x.shape[-2] == 1 else n
        return jnp.broadcast_to(x, (*batch, own, 1)).reshape(math.prod(batch), own)

    zero = None if q.zero_point is None else parameter(q.zero_point.astype(jnp.int32))
    codes, step = stored(q, *stack)
    return (codes, parameter(q.real_scale()), zero), step


def stored(q: QTensor, *stack: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns the codes of a weight as [B, N, bytes], and `None`. For a slice of a stack, it
    returns the codes of the stack, and the index.
    """
    if stack:
        codes, step = stack
        return codes, step
    return q.values.reshape(-1, *q.values.shape[-2:]), None


def rows_of(x: jax.Array, how: HowTo) -> jax.Array:
    """Returns a left operand as [B, M, K]."""
    rows = to_rows(x, how.dimensions)
    return rows.reshape(math.prod(rows.shape[:-2]), *rows.shape[-2:])


def _parameter(parameter: jax.Array, x: Any, how: HowTo) -> jax.Array:
    """Returns a parameter of the left operand as [B, M or 1]."""
    dimensions = how.dimensions
    batch = math.prod(x.shape[axis] for axis in dimensions.lhs_batch)
    if parameter.size == 1:
        return jnp.broadcast_to(parameter.reshape(1, 1), (batch, 1))
    kept = (*dimensions.lhs_batch, *dimensions.lhs_free)
    own = jnp.transpose(parameter, (*kept, *dimensions.lhs_contracting))[..., 0]
    full = jnp.broadcast_to(own, [x.shape[axis] for axis in kept])
    return full.reshape(batch, dimensions.rows(x))


def as_output(y: jax.Array, x: Any, how: HowTo) -> jax.Array:
    """Reshapes [B, M, N] to the axes of the result."""
    dimensions = how.dimensions
    kept = (*dimensions.lhs_batch, *dimensions.lhs_free)
    return y.reshape(*(x.shape[axis] for axis in kept), y.shape[-1])
