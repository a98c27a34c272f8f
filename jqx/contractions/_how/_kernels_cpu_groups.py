"""Formulations by kernels of the package jqx-cpu for weights that are packed, in groups, or codes
of floats: see `_kernels_cpu.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import _package_cpu
from ...kernels._shared import decoded_product_cpu, float_product_cpu
from ...numerics import QType, format_of
from ...numerics._shared import E8M0, common_dtype
from ...tensor import QTensor
from ...tensor._shared import is_decoded, kernel_of
from .._integers._bytes import as_int8, is_byte, is_integer
from .._integers._integer import in_fitting_shapes, integer_blocks
from ._blocks import with_own_scales
from ._convert import is_exact_in
from ._formulation import CPU, formulation
from ._kernel_operands import precision_of
from ._kernels_cpu import as_output, by_kernel, in_groups, is_in_rows, left_of, rows_of, stored
from ._kernels_of_codes import derived_as
from ._scales import HowTo
from ._tiles import tangent_tiles, tiles

MOST = 16
"""Up to this number of rows of 16-bit floats, kernels for float32 are faster than XLA's 16-bit
products.
"""

FEW = 6
"""Up to this number of rows of bfloat16, digits are faster than products of bfloat16."""


def _reads(x: Any, q: QTensor, how: HowTo) -> bool:
    """Whether the package has a kernel for the stored codes of 8, 4 or 2 bits and their groups."""
    if not (_package_cpu.is_installed() and is_integer(q) and is_in_rows(x, q, how.dimensions)):
        return False
    bits = format_of(q.qtype).bits
    if bits == 8:
        is_stored = q.values.dtype == jnp.int8
    else:
        packing = None if q.layout is None else q.layout.packing
        is_stored = kernel_of(q) == "cpu" and packing is not None  # along the last axis
    return is_stored and _package_cpu.has_groups(q.shape[-1], q.groups.sizes[-1], bits)


def multiplies_floats(x: Any, q: QTensor, how: HowTo) -> bool:
    """Whether the package multiplies float rows by a weight of integers."""
    if isinstance(x, QTensor) or common_dtype(x.dtype, q.dtype) != jnp.float32:
        return False
    known = x.dtype == jnp.float32 or how.dimensions.rows(x) <= MOST
    known = known or (x.dtype == jnp.bfloat16 and _package_cpu.has_bfloats())
    return known and _reads(x, q, how)


@formulation(
    "float rows and integers of 8, 4 or 2 bits, the contracted axis last, if jqx-cpu is installed: "
    "its kernel multiplies the stored codes by three int8 digits of the rows, or two if the "
    "precision is set to the default; more than a few rows of bfloat16 are multiplied as such if "
    "the processor supports it",
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
    "codes of 8 bits without zero points, and integers of 8, 4 or 2 bits, packed or in groups, the "
    "contracted axis last, if jqx-cpu is installed: its kernel multiplies the stored codes exactly "
    "in each run of a group, and sums the runs in float32",
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
    """Returns the product of rows, floats or int8 codes, and a weight in groups. With `sizes`, each
    group of rows is multiplied by its own matrix.
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
        as_such = x.dtype == jnp.bfloat16 and how.dimensions.rows(x) > FEW
        as_such = as_such and _package_cpu.has_bfloats()
        rows, own = rows_of(x if as_such else x.astype(jnp.float32), how), None
    codes, step = stored(q, *stack)
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
    """Whether a precision is given, and is the fastest one."""
    return precision_of(precision) is lax.Precision.DEFAULT


def multiplies_decoded(x: Any, q: QTensor, how: HowTo) -> bool:
    """Whether the package multiplies float rows by codes that represent floats."""
    form = format_of(q.qtype)
    if isinstance(x, QTensor) or not (_package_cpu.is_installed() and is_decoded(form)):
        return False
    # XLA multiplies many rows of 16 bits by such codes faster than in float32.
    few = x.dtype == jnp.float32 or how.dimensions.rows(x) <= MOST
    return (
        kernel_of(q) == "cpu"
        and q.zero_point is None
        and is_in_rows(x, q, how.dimensions)
        and common_dtype(x.dtype, q.dtype) == jnp.float32
        and _package_cpu.has_groups(q.shape[-1], q.groups.sizes[-1], form.bits)
        and (few or how.block is not None or not is_exact_in(q, x.dtype))
    )


@formulation(
    "float rows and codes of 4 or 8 bits that represent floats, the contracted axis last, if "
    "jqx-cpu is installed: its kernel decodes them in registers, and multiplies in float32",
    CPU,
    lambda case: case.is_large and multiplies_decoded(case.lhs, case.rhs, case.how),
    linear=tangent_tiles,
    finds=True,
)
def package_decoded(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    kernel = functools.partial(decoded, how=how)
    return by_kernel(kernel, lambda x, q: tiles.compute(x, q, how), x, q)


def decoded(
    x: jax.Array, q: QTensor, *stack: jax.Array, how: HowTo, sizes: jax.Array | None = None
) -> jax.Array:
    """Returns the product of float rows and codes of floats, as `floats` does for integers."""
    q = with_own_scales(q, how.dimensions.rhs_kept)
    rows = rows_of(x.astype(jnp.float32), how)
    codes, step = stored(q, *stack)
    scale = q.scale
    if isinstance(scale, QTensor) or scale.dtype != E8M0:
        scale = q.real_scale()
    options = {"table": _table_of(format_of(q.qtype)), "step": step, "sizes": sizes}
    return as_output(decoded_product_cpu(rows, codes, in_groups(scale, q), **options), x, how)


@functools.cache
def _table_of(form: QType) -> tuple[float, ...]:
    """Returns the number that each code of a format represents."""
    with jax.ensure_compile_time_eval():
        return tuple(form.decode(jnp.arange(2**form.bits, dtype=jnp.uint8)).tolist())
