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

from .. import package_cpu
from ..compat_kernels import alone_or_in_parts
from ..kernels import onednn
from ..kernels.products_cpu import decoded_product_cpu, float_product_cpu, product_cpu
from ..numerics.exact import common_dtype
from ..numerics.lookup import E8M0, format_of
from ..tensor.qtensor import QTensor
from ..tensor.segments import codes_and_index, without_stack
from ..tensor.targets import is_decoded, kernel_of
from .blocks import with_own_scales
from .formulation import CPU, formulation
from .integer_products import (
    accumulate,
    as_int8,
    by_onednn,
    fitting,
    in_fitting_shapes,
    in_onednn,
    integer_blocks,
    to_rows,
)
from .kernels import derived_as, numbers_of_codes, precision_of
from .plain import is_exact_in, tangent_tiles, tiles
from .problem import Dimensions, HowTo, Pending, Product, is_byte, is_integer, max_products_in_int32


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
        package_cpu.is_installed()
        and isinstance(x, QTensor)
        and how.block is None
        and is_byte(x)
        and is_byte(q)
        and q.size != 0
        and is_in_rows(x, q, how.dimensions)
        and x.scale.dtype in (E8M0, jnp.float32)
        and how.dimensions.contracted_size(x) <= max_products_in_int32(x, q)
    )


def _are_bytes(case: Any) -> bool:
    is_candidate = not case.is_beside_floats and case.is_large
    return is_candidate and multiplies_bytes(case.lhs, case.rhs, case.how)


CODES = (
    "codes times codes of 8 bits, the contracted axis last, if jqx-cpu is installed: its kernel "
    "multiplies them exactly, and scales the sums as it writes them"
)


@formulation(CODES, CPU, _are_bytes, reads_stack=True)
def package_codes(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    kernel = functools.partial(_scaled, how=how)
    plain = functools.partial(in_fitting_shapes, how=how)
    return derived_as(functools.partial(by_kernel, kernel, plain), plain)(lhs, rhs)


def _scaled(lhs: QTensor, rhs: QTensor, *stack: jax.Array, how: HowTo) -> jax.Array:
    left, (right, step) = left_of(as_int8(lhs), how), right_of(as_int8(rhs), how, *stack)
    return as_output(product_cpu(*left, *right, dtype=jnp.float32, step=step), lhs, how)


def _in_rows(q: QTensor, dimensions: Dimensions) -> tuple[tuple[int, ...], Dimensions]:
    """Returns the order of axes that makes a right operand [..., N, K], and the new dimensions."""
    order = (*dimensions.rhs_batch, *dimensions.rhs_free, *dimensions.rhs_contracting)
    new_axes = tuple(order.index(axis) for axis in range(q.ndim))
    return order, dimensions.renamed(range(dimensions.lhs_rank), new_axes)


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
    reads_stack=True,
)
def package_sums(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    def kernel(lhs: QTensor, rhs: QTensor, *stack: jax.Array) -> jax.Array:
        x, x_zero, w, w_zero, step = codes_of(lhs, rhs, how, *stack)
        return as_output(product_cpu(x, None, x_zero, w, None, w_zero, step=step), lhs, how)

    return by_kernel(kernel, functools.partial(plain_sums, how=how), *constant(lhs, rhs))


@formulation(
    "integers on CPUs with VNNI, if JAX stores no compiled programs: multiplied exactly by oneDNN, "
    "which is part of jaxlib; zero points and scales come after",
    CPU,
    lambda case: case.are_bytes and case.is_large and case.block is None and onednn.is_used(),
)
def integer_onednn(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    forms = (functools.partial(form, how=how) for form in (in_onednn, in_fitting_shapes))
    return _on_one_device(*forms)(lhs, rhs)


def _on_one_device(kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of two operands that calls oneDNN in programs for one device, and is
    `plain` elsewhere; its derivative is that of `plain`.
    """
    return derived_as(
        functools.partial(alone_or_in_parts, kernel, plain, in_shard_map=False), plain
    )


# Two batches of float matrices, such as the queries and keys of attention.


FEW, MANY = 8, 2**20
"""Rows and columns, and products of numbers, from which on oneDNN is faster than XLA."""


def are_float_batches(case: Product, many: int = MANY) -> bool:
    """Whether both operands are large batches of matrices of float32, of known sizes, with so many
    products of numbers.
    """
    d, x, y = case.dimensions, case.lhs, case.rhs
    dtypes = {jnp.dtype(z) for z in (x.dtype, y.dtype, case.how.dtype)}
    if dtypes != {jnp.dtype(jnp.float32)} or not d.lhs_batch:
        return False
    if any(map(export.is_symbolic_dim, (*x.shape, *y.shape))):
        return False
    columns = d.columns(y)
    is_large = x.size * columns >= many and min(d.rows(x), columns) >= FEW
    return is_large and isinstance(case.how.precision, (lax.Precision, tuple, type(None)))


def plain_float(lhs: jax.Array, rhs: jax.Array, how: HowTo) -> jax.Array:
    """Multiplies two arrays as JAX does."""
    return lax.dot_general(lhs, rhs, how.dimensions.numbers, how.precision, how.dtype)


@formulation(
    "two batches of float32 matrices on CPUs with VNNI, if JAX stores no compiled programs: "
    "multiplied by oneDNN, which is part of jaxlib",
    CPU,
    lambda case: are_float_batches(case) and onednn.is_used(),
    op="dot_general:float",
)
def float_onednn(lhs: jax.Array, rhs: jax.Array, how: HowTo) -> jax.Array:
    def kernel(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        dimensions, dtype = how.dimensions, jnp.float32
        return by_onednn(lhs, rhs, dimensions, left=False, right=False, dtype=dtype).total

    return _on_one_device(kernel, functools.partial(plain_float, how=how))(lhs, rhs)


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
    codes, step = codes_and_index(q)
    stack = () if step is None or q.ndim > 2 else (codes, step)

    def without(*operands: Any) -> jax.Array:
        return plain(*operands[: len(rows) + 1])

    arrays = *map(without_stack, rows), without_stack(q), *stack
    return alone_or_in_parts(kernel, without, *arrays)


def _quantizes(case: Product) -> bool:
    rows: Pending = case.lhs
    return rows.suits("cpu", case.rows) and multiplies_bytes(rows.codes, case.rhs, case.how)


@formulation(
    "a float operand to be quantized, and a weight that is laid out for jqx-cpu: its kernel "
    "quantizes the operand, multiplies codes exactly, and scales the sums as it writes them",
    CPU,
    _quantizes,
    op="dot_general:quantized",
    reads_stack=True,
)
def package_quantizing(lhs: Pending, rhs: QTensor, how: HowTo) -> jax.Array:
    form = format_of(lhs.spec.qtype)

    def kernel(lhs: Pending, q: QTensor, *stack: jax.Array) -> jax.Array:
        rows = rows_of(lhs.x.astype(jnp.float32), how)
        factor = _parameter(lhs.scale.astype(jnp.float32), lhs, how)
        weight, step = right_of(as_int8(q), how, *stack)
        options = {"low": float(form.low), "high": float(form.high), "step": step}
        y = product_cpu(rows, factor, None, *weight, **options, dtype=jnp.float32)
        return as_output(y, lhs, how)

    def plain(lhs: Pending, q: QTensor) -> jax.Array:
        return in_fitting_shapes(lhs.quantized(), q, how)

    return derived_as(functools.partial(by_kernel, kernel, plain), plain)(lhs, rhs)


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
        columns = 1 if x.shape[-2] == 1 else n
        return jnp.broadcast_to(x, (*batch, columns, 1)).reshape(math.prod(batch), columns)

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
    kept_axes = (*dimensions.lhs_batch, *dimensions.lhs_free)
    per_row = jnp.transpose(parameter, (*kept_axes, *dimensions.lhs_contracting))[..., 0]
    full = jnp.broadcast_to(per_row, [x.shape[axis] for axis in kept_axes])
    return full.reshape(batch, dimensions.rows(x))


def as_output(y: jax.Array, x: Any, how: HowTo) -> jax.Array:
    """Reshapes [B, M, N] to the axes of the result."""
    dimensions = how.dimensions
    kept_axes = (*dimensions.lhs_batch, *dimensions.lhs_free)
    return y.reshape(*(x.shape[axis] for axis in kept_axes), y.shape[-1])


# Weights that are packed, in groups, or codes of floats.


MOST = 16
"""Up to this number of rows of 16-bit floats, kernels for float32 are faster than XLA's 16-bit
products.
"""

FEW = 6
"""Up to this number of rows of bfloat16, digits are faster than products of bfloat16."""


def _reads(x: Any, q: QTensor, how: HowTo) -> bool:
    """Whether the package has a kernel for the stored codes of 8, 4 or 2 bits and their groups."""
    if not (package_cpu.is_installed() and is_integer(q) and is_in_rows(x, q, how.dimensions)):
        return False
    bits = format_of(q.qtype).bits
    if bits == 8:
        is_stored = q.values.dtype == jnp.int8
    else:
        packing = None if q.layout is None else q.layout.packing
        is_stored = kernel_of(q) == "cpu" and packing is not None  # along the last axis
    return is_stored and package_cpu.has_groups(q.shape[-1], q.groups.sizes[-1], bits)


def multiplies_floats(x: Any, q: QTensor, how: HowTo) -> bool:
    """Whether the package multiplies float rows by a weight of integers."""
    if isinstance(x, QTensor) or common_dtype(x.dtype, q.dtype) != jnp.float32:
        return False
    is_supported = x.dtype == jnp.float32 or how.dimensions.rows(x) <= MOST
    is_supported = is_supported or (x.dtype == jnp.bfloat16 and package_cpu.has_bfloats())
    return is_supported and _reads(x, q, how)


@formulation(
    "float rows and integers of 8, 4 or 2 bits, the contracted axis last, if jqx-cpu is installed: "
    "its kernel multiplies the stored codes by three int8 digits of the rows, or two if the "
    "precision is set to the default; more than a few rows of bfloat16 are multiplied as such if "
    "the processor supports it",
    CPU,
    lambda case: case.is_large and multiplies_floats(case.lhs, case.rhs, case.how),
    linear=tangent_tiles,
    reads_stack=True,
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
    is_scaled = x.scale.dtype in (E8M0, jnp.float32)
    return is_whole and is_plain and is_scaled and common_dtype(x.dtype, q.dtype) == jnp.float32


@formulation(
    "codes of 8 bits without zero points, and integers of 8, 4 or 2 bits, packed or in groups, the "
    "contracted axis last, if jqx-cpu is installed: its kernel multiplies the stored codes exactly "
    "in each run of a group, and sums the runs in float32",
    CPU,
    _are_in_groups,
    reads_stack=True,
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
        rows, row_scale, _ = left_of(x, how)
    else:
        as_such = x.dtype == jnp.bfloat16 and how.dimensions.rows(x) > FEW
        as_such = as_such and package_cpu.has_bfloats()
        rows, row_scale = rows_of(x if as_such else x.astype(jnp.float32), how), None
    codes, step = stored(q, *stack)
    y = float_product_cpu(
        rows,
        codes,
        row_scale,
        in_groups(q.real_scale(), q),
        zero,
        bits=form.bits,
        is_signed=is_signed,
        digits=2 if precision_of(how.precision) is lax.Precision.DEFAULT else 3,
        step=step,
        sizes=sizes,
    )
    return as_output(y, x, how)


def multiplies_decoded(x: Any, q: QTensor, how: HowTo) -> bool:
    """Whether the package multiplies float rows by codes that represent floats."""
    form = format_of(q.qtype)
    if isinstance(x, QTensor) or not (package_cpu.is_installed() and is_decoded(form)):
        return False
    # XLA multiplies many rows of 16 bits by such codes faster than in float32.
    is_fast = x.dtype == jnp.float32 or how.dimensions.rows(x) <= MOST
    return (
        kernel_of(q) == "cpu"
        and q.zero_point is None
        and is_in_rows(x, q, how.dimensions)
        and common_dtype(x.dtype, q.dtype) == jnp.float32
        and package_cpu.has_groups(q.shape[-1], q.groups.sizes[-1], form.bits)
        and (is_fast or how.block is not None or not is_exact_in(q, x.dtype))
    )


@formulation(
    "float rows and codes of 4 or 8 bits that represent floats, the contracted axis last, if "
    "jqx-cpu is installed: its kernel decodes them in registers, and multiplies in float32",
    CPU,
    lambda case: case.is_large and multiplies_decoded(case.lhs, case.rhs, case.how),
    linear=tangent_tiles,
    reads_stack=True,
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
    options = {"table": numbers_of_codes(format_of(q.qtype)), "step": step, "sizes": sizes}
    return as_output(decoded_product_cpu(rows, codes, in_groups(scale, q), **options), x, how)


PACKAGE = (package_codes, package_batches, package_floats, package_groups, package_decoded)
"""Products by kernels of jqx-cpu."""
