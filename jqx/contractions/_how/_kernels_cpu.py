"""Kernels of the package jqx-cpu as formulations: they stand first on CPU where it is installed.

Weights lie [..., N, K], the contracted axis last. Where a compiler parts a program over devices,
and in what `jax.export` writes, the form without kernels is computed.
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
from ...kernels._shared import float_product_cpu, product_cpu
from ...numerics import QType, format_of
from ...numerics._shared import E8M0, common_dtype
from ...tensor import QTensor
from ...tensor._shared import alone, found, kernel_of
from .._integers._bytes import as_int8, is_byte, is_integer, longest
from .._integers._integer import accumulate, in_fitting_shapes, integer_blocks
from .._integers._products import fitting, to_rows
from .._what._dimensions import Dimensions
from ._blocks import with_own_scales
from ._formulation import CPU, formulation
from ._kernel_operands import precision_of
from ._kernels_of_codes import derived_as
from ._scales import HowTo
from ._tiles import tangent_tiles, tiles

MOST = 16
"""Rows of floats of 16 bits up to which digits are faster than what XLA multiplies as such."""


def lies_in_rows(x: Any, q: QTensor, dimensions: Dimensions) -> bool:
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
    """Whether the package multiplies codes, of which the left ones may be told by shapes alone."""
    return (
        _package_cpu.is_installed()
        and how.block is None
        and is_byte(x)
        and is_byte(q)
        and q.values.dtype == jnp.int8
        and q.size != 0
        and (q.layout is None or q.layout.packing is None)
        and lies_in_rows(x, q, how.dimensions)
        and x.scale.dtype in (E8M0, jnp.float32)
        and how.dimensions.contracted_size(x) <= longest(x, q)
    )


def _are_bytes(case: Any) -> bool:
    own = not case.is_beside_floats and case.is_large
    return own and multiplies_bytes(case.lhs, case.rhs, case.how)


CODES = (
    "codes beside codes of 8 bits, the contracted axis last, where jqx-cpu is installed: its "
    "kernel multiplies them exactly, and scales the sums as it writes them"
)


@formulation(CODES, CPU, _are_bytes, finds=True)
def package_codes(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    def kernel(lhs: QTensor, rhs: QTensor, *stack: jax.Array) -> jax.Array:
        left, (right, step) = left_of(as_int8(lhs), how), right_of(as_int8(rhs), how, *stack)
        return as_output(product_cpu(*left, *right, dtype=jnp.float32, step=step), lhs, how)

    plain = functools.partial(in_fitting_shapes, how=how)
    return derived_as(functools.partial(by_kernel, kernel, plain), plain)(lhs, rhs)


def _in_rows(q: QTensor, dimensions: Dimensions) -> tuple[tuple[int, ...], Dimensions]:
    """Returns the order of axes in which a right operand lies [..., N, K], and the axes of that."""
    order = (*dimensions.rhs_batch, *dimensions.rhs_free, *dimensions.rhs_contracting)
    places = tuple(order.index(axis) for axis in range(q.ndim))
    return order, dimensions.renamed(range(dimensions.lhs_rank), places)


def _are_batches(case: Any) -> bool:
    if case.is_beside_floats or not case.is_large or not case.dimensions.rhs_batch:
        return False
    _, dimensions = _in_rows(case.rhs, case.dimensions)
    how = case.how._replace(dimensions=dimensions)
    return case.rhs.layout is None and multiplies_bytes(case.lhs, case.rhs, how)


@formulation(
    "batches of codes beside codes of 8 bits, as in attention, where jqx-cpu is installed: the "
    "codes of the right operand are turned for its kernel",
    CPU,
    _are_batches,
)
def package_batches(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    order, dimensions = _in_rows(rhs, how.dimensions)
    how = how._replace(dimensions=dimensions)
    return package_codes.compute(lhs, rhs.transpose(order), how)


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
    """Returns codes and zero points of rows, those of a weight, and which of a stack it is."""
    x, _, x_zero = left_of(as_int8(lhs), how)
    (w, _, w_zero), step = right_of(as_int8(rhs), how, *stack)
    return x, x_zero, w, w_zero, step


def constant(*operands: Any) -> Any:
    """Returns operands of integer arithmetic, which has no derivative."""
    return jax.tree.map(lax.stop_gradient, operands)


def plain_sums(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    """Returns the int32 sums of products of codes, each less its zero point, without a kernel."""
    return accumulate(as_int8(lhs), as_int8(rhs), how.dimensions, fitting)


def by_kernel(kernel: Callable[..., Any], plain: Callable[..., Any], *operands: Any) -> jax.Array:
    """Returns what a kernel does where a program is for one device, and else the plain form. The
    kernel is given the codes that the last operand, a weight, is one of, and which, where there
    are any.
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
    """Returns the product of floats, rounded to codes of a format by their scale, and a weight."""
    rows = rows_of(x.astype(jnp.float32), how)
    own = _parameter(scale.astype(jnp.float32), x, how)
    weight, step = right_of(as_int8(q), how, *stack)
    options = {"low": float(form.low), "high": float(form.high), "step": step}
    return as_output(product_cpu(rows, own, None, *weight, **options, dtype=jnp.float32), x, how)


def _reads(x: Any, q: QTensor, how: HowTo) -> bool:
    """Whether the package has a kernel for codes of 8, 4 or 2 bits as they lie, in their groups."""
    if not (_package_cpu.is_installed() and is_integer(q) and lies_in_rows(x, q, how.dimensions)):
        return False
    bits = format_of(q.qtype).bits
    if bits == 8:
        lies = q.values.dtype == jnp.int8
    else:
        packing = None if q.layout is None else q.layout.packing
        lies = kernel_of(q) == "cpu" and packing is not None  # along the last axis
    return lies and _package_cpu.has_groups(q.shape[-1], q.groups.sizes[-1], bits)


def multiplies_floats(x: Any, q: QTensor, how: HowTo) -> bool:
    """Whether the package multiplies float rows by a weight of integers."""
    if isinstance(x, QTensor) or common_dtype(x.dtype, q.dtype) != jnp.float32:
        return False
    few = x.dtype == jnp.float32 or how.dimensions.rows(x) <= MOST
    return few and _reads(x, q, how)


@formulation(
    "float rows beside integers of 8, 4 or 2 bits, the contracted axis last, where jqx-cpu is "
    "installed: its kernel multiplies codes as they lie by three int8 digits of the rows, or two "
    "where the precision is told to be the default one",
    CPU,
    lambda case: case.is_large and multiplies_floats(case.lhs, case.rhs, case.how),
    linear=tangent_tiles,
    finds=True,
)
def package_floats(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    kernel = functools.partial(floats, how=how)
    return by_kernel(kernel, lambda x, q: tiles.compute(x, q, how), x, q)


def _are_in_groups(case: Any) -> bool:
    x, q, how = case.lhs, case.rhs, case.how
    if case.is_beside_floats or not (case.is_large and is_byte(x) and _reads(x, q, how)):
        return False
    axis = how.dimensions.lhs_contracting[0]
    is_whole = x.groups.sizes[axis] == x.shape[axis]
    is_plain = x.zero_point is None and bool(format_of(x.qtype).signed)
    known = x.scale.dtype in (E8M0, jnp.float32)
    return is_whole and is_plain and known and common_dtype(x.dtype, q.dtype) == jnp.float32


@formulation(
    "codes of 8 bits without zero points beside integers of 8, 4 or 2 bits, packed or in groups, "
    "the contracted axis last, where jqx-cpu is installed: its kernel multiplies them as they lie, "
    "exactly in each run of a group, and sums these in float32",
    CPU,
    _are_in_groups,
    finds=True,
)
def package_groups(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    def kernel(lhs: QTensor, rhs: QTensor, *stack: jax.Array) -> jax.Array:
        return floats(as_int8(lhs), rhs, *stack, how=how)

    def plain(lhs: QTensor, rhs: QTensor) -> jax.Array:
        in_turn = in_fitting_shapes if how.block is None else integer_blocks.compute
        return in_turn(lhs, rhs, how)

    return derived_as(functools.partial(by_kernel, kernel, plain), plain)(lhs, rhs)


def floats(
    x: Any, q: QTensor, *stack: jax.Array, how: HowTo, sizes: jax.Array | None = None
) -> jax.Array:
    """Returns the product of rows, floats or int8 codes, and a weight in groups; of rows in groups
    of sizes, each group's.
    """
    form = format_of(q.qtype)
    q = as_int8(q) if form.bits == 8 else q
    q = with_own_scales(q, how.dimensions.rhs_kept)
    is_signed = form.bits == 8 or bool(form.signed)
    zero, middle = q.zero_point, 0 if is_signed else 2 ** (form.bits - 1)
    if zero is not None or middle:
        zero = jnp.int32(0) if zero is None else zero.astype(jnp.int32)
        zero = in_groups((zero - jnp.int32(middle)).astype(jnp.int8), q)
    if isinstance(x, QTensor):
        rows, own, _ = left_of(x, how)
    else:
        rows, own = rows_of(x.astype(jnp.float32), how), None
    codes, step = stack or (q.values.reshape(-1, *q.values.shape[-2:]), None)
    y = float_product_cpu(
        rows,
        codes,
        own,
        in_groups(q.real_scale(), q),
        zero,
        bits=form.bits,
        is_signed=is_signed,
        digits=2 if _is_default(how.precision) else 3,
        step=step,
        sizes=sizes,
    )
    return as_output(y, x, how)


def _is_default(precision: lax.PrecisionLike) -> bool:
    """Whether a precision is told, and is the fastest one."""
    return precision_of(precision) is lax.Precision.DEFAULT


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
    """Returns codes [B, N, K], scales and zero points [B, N or 1] of a weight, and `None`; of one
    of a stack the codes of all, and which it is.
    """
    q = with_own_scales(q, how.dimensions.rhs_kept)
    batch, n = q.shape[:-2], q.shape[-2]

    def parameter(x: jax.Array) -> jax.Array:
        own = 1 if x.shape[-2] == 1 else n
        return jnp.broadcast_to(x, (*batch, own, 1)).reshape(math.prod(batch), own)

    zero = None if q.zero_point is None else parameter(q.zero_point.astype(jnp.int32))
    codes, step = stack or (q.values.reshape(-1, *q.values.shape[-2:]), None)
    return (codes, parameter(q.real_scale()), zero), step


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
    """Returns [B, M, N] with the axes that the result has."""
    dimensions = how.dimensions
    kept = (*dimensions.lhs_batch, *dimensions.lhs_free)
    return y.reshape(*(x.shape[axis] for axis in kept), y.shape[-1])
