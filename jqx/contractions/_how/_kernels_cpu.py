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
from jax import export

from ... import _package_cpu
from ..._compat_kernels import alone_or_in_parts
from ...kernels._shared import decoded_product_cpu, float_product_cpu, product_cpu
from ...numerics import QType, format_of
from ...numerics._shared import E8M0, common_dtype
from ...tensor import QTensor
from ...tensor._shared import alone, found, is_decoded, kernel_of
from .._integers._bytes import as_int8, is_byte, is_integer, longest
from .._integers._integer import accumulate, in_fitting_shapes
from .._integers._products import fitting, to_rows
from .._what._dimensions import Dimensions
from ._blocks import with_own_scales
from ._convert import is_exact_in
from ._formulation import CPU, formulation
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
        left, (right, step) = _left(as_int8(lhs), how), _right(as_int8(rhs), how, *stack)
        return _as_output(product_cpu(*left, *right, dtype=jnp.float32, step=step), lhs, how)

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
        (x, _, x_zero), (right, step) = _left(as_int8(lhs), how), _right(as_int8(rhs), how, *stack)
        w, _, w_zero = right
        return _as_output(product_cpu(x, None, x_zero, w, None, w_zero, step=step), lhs, how)

    def plain(lhs: QTensor, rhs: QTensor) -> jax.Array:
        return accumulate(as_int8(lhs), as_int8(rhs), how.dimensions, fitting)

    return by_kernel(kernel, plain, lhs, rhs)


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
    rows = _rows(x.astype(jnp.float32), how)
    own = _parameter(scale.astype(jnp.float32), x, how)
    weight, step = _right(as_int8(q), how, *stack)
    options = {"low": float(form.low), "high": float(form.high), "step": step}
    return _as_output(product_cpu(rows, own, None, *weight, **options, dtype=jnp.float32), x, how)


def _are_floats(case: Any) -> bool:
    x, q, how = case.lhs, case.rhs, case.how
    if not (
        _package_cpu.is_installed() and case.is_beside_floats and case.is_large and is_integer(q)
    ):
        return False
    dimensions, bits = how.dimensions, format_of(q.qtype).bits
    if not lies_in_rows(x, q, dimensions) or common_dtype(x.dtype, q.dtype) != jnp.float32:
        return False
    if bits == 8:
        lies = q.values.dtype == jnp.int8
    else:
        lies = kernel_of(q) == "cpu" and q.layout.packing is not None  # along the last axis
    return (
        lies
        and _package_cpu.has_groups(q.shape[-1], q.groups.sizes[-1], bits)
        and (x.dtype == jnp.float32 or case.rows <= MOST)
    )


@formulation(
    "float rows beside integers of 8, 4 or 2 bits, the contracted axis last, where jqx-cpu is "
    "installed: its kernel multiplies codes as they lie by three int8 digits of the rows",
    CPU,
    _are_floats,
    linear=tangent_tiles,
    finds=True,
)
def package_floats(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    def kernel(x: jax.Array, q: QTensor, *stack: jax.Array) -> jax.Array:
        form = format_of(q.qtype)
        q = as_int8(q) if form.bits == 8 else q
        q = with_own_scales(q, how.dimensions.rhs_kept)
        is_signed = form.bits == 8 or bool(form.signed)
        zero, middle = q.zero_point, 0 if is_signed else 2 ** (form.bits - 1)
        if zero is not None or middle:
            zero = jnp.int32(0) if zero is None else zero.astype(jnp.int32)
            zero = _in_groups((zero - jnp.int32(middle)).astype(jnp.int8), q)
        rows = _rows(x.astype(jnp.float32), how)
        codes, step = stack or (q.values.reshape(-1, *q.values.shape[-2:]), None)
        options = {"bits": form.bits, "is_signed": is_signed, "step": step}
        scale = _in_groups(q.real_scale(), q)
        return _as_output(float_product_cpu(rows, codes, scale, zero, **options), x, how)

    return by_kernel(kernel, lambda x, q: tiles.compute(x, q, how), x, q)


def _are_decoded(case: Any) -> bool:
    x, q = case.lhs, case.rhs
    if not (_package_cpu.is_installed() and case.is_beside_floats and case.is_large):
        return False
    form = format_of(q.qtype)
    # XLA multiplies many rows of 16 bits by such codes faster than in float32.
    multiplies_as_such = case.block is None and is_exact_in(q, x.dtype)
    return (
        is_decoded(form)
        and kernel_of(q) == "cpu"
        and q.zero_point is None
        and lies_in_rows(x, q, case.how.dimensions)
        and common_dtype(x.dtype, q.dtype) == jnp.float32
        and _package_cpu.has_groups(q.shape[-1], q.groups.sizes[-1], form.bits)
        and (x.dtype == jnp.float32 or case.rows <= MOST or not multiplies_as_such)
    )


@formulation(
    "float rows beside codes of 4 or 8 bits that stand for floats, the contracted axis last, where "
    "jqx-cpu is installed: its kernel decodes them in registers, and multiplies in float32",
    CPU,
    _are_decoded,
    linear=tangent_tiles,
    finds=True,
)
def package_decoded(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    def kernel(x: jax.Array, q: QTensor, *stack: jax.Array) -> jax.Array:
        q = with_own_scales(q, how.dimensions.rhs_kept)
        rows = _rows(x.astype(jnp.float32), how)
        codes, step = stack or (q.values.reshape(-1, *q.values.shape[-2:]), None)
        scale = q.scale
        if isinstance(scale, QTensor) or scale.dtype != E8M0:
            scale = q.real_scale()
        scale, table = _in_groups(scale, q), _table_of(format_of(q.qtype))
        return _as_output(decoded_product_cpu(rows, codes, scale, table=table, step=step), x, how)

    return by_kernel(kernel, lambda x, q: tiles.compute(x, q, how), x, q)


@functools.cache
def _table_of(form: QType) -> tuple[float, ...]:
    """Returns what each code of a format stands for."""
    with jax.ensure_compile_time_eval():
        return tuple(form.decode(jnp.arange(2**form.bits, dtype=jnp.uint8)).tolist())


def _in_groups(parameter: jax.Array, q: QTensor) -> jax.Array:
    """Returns scales or zero points of a weight [..., N, K] as [B, G, N]."""
    groups = q.shape[-1] // q.groups.sizes[-1]
    shape = (*q.shape[:-1], groups)
    return jnp.broadcast_to(parameter, shape).swapaxes(-1, -2).reshape(-1, groups, q.shape[-2])


def _left(q: QTensor, how: HowTo) -> tuple[Any, Any, Any]:
    """Returns codes [B, M, K], scales and zero points [B, M or 1] of rows."""
    q = with_own_scales(q, how.dimensions.lhs_kept)
    zero = q.zero_point
    if zero is not None:
        zero = _parameter(zero.astype(jnp.int32), q, how)
    return _rows(q.values, how), _parameter(q.real_scale(), q, how), zero


def _right(q: QTensor, how: HowTo, *stack: jax.Array) -> tuple[tuple[Any, Any, Any], Any]:
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


def _rows(x: jax.Array, how: HowTo) -> jax.Array:
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


def _as_output(y: jax.Array, x: Any, how: HowTo) -> jax.Array:
    """Returns [B, M, N] with the axes that the result has."""
    dimensions = how.dimensions
    kept = (*dimensions.lhs_batch, *dimensions.lhs_free)
    return y.reshape(*(x.shape[axis] for axis in kept), y.shape[-1])
