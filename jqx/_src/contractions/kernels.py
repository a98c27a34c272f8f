"""Formulations by kernels for products of floats and codes, for weights laid out by `pack_for`."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export, lax

from ..kernels.pallas import Table, scales
from ..kernels.products_gpu import products_gpu, weights_gpu
from ..kernels.products_tpu import products_tpu, weights_tpu
from ..numerics.blocks import Block
from ..numerics.exact import common_dtype, power_below
from ..numerics.lookup import E8M0, format_of
from ..numerics.minifloats import Minifloat
from ..numerics.qtype import Integer, QType
from ..tensor.qtensor import QTensor
from ..tensor.segments import codes_and_index
from ..tensor.targets import FLOAT8, kernel_of, layout_for_kernel
from .blocks import with_own_scales
from .formulation import (
    CPU,
    ELSEWHERE,
    formulation,
    formulation_of_kernels,
    of_slices,
)
from .integer_products import as_int8, integer
from .plain import convert, dequantize, is_exact_in, tiles
from .problem import INT32_MAX, HowTo, Pending, largest

# Operands of kernels: matrices, mapped over stacks, and parameters of weights.


def weights_on(target: str) -> Callable[..., jax.Array]:
    """Returns the kernel of a target that multiplies floats by a weight."""
    return weights_tpu if target == "tpu" else weights_gpu


def products_on(target: str) -> Callable[..., jax.Array]:
    """Returns the kernel of a target that multiplies codes, or floats that it quantizes."""
    return products_tpu if target == "tpu" else products_gpu


def rows_on(target: str, x: jax.Array) -> jax.Array:
    """Returns float rows in the dtype that kernels read: TPUs do not have float16."""
    return x.astype(jnp.float32) if target == "tpu" and x.dtype == jnp.float16 else x


def is_laid_out_for(target: str, x: Any, q: QTensor, how: HowTo) -> bool:
    """Whether this is a product of matrices, computed in float32, with a weight that is laid out
    for the kernels of a target.
    """
    dimensions = how.dimensions
    if kernel_of(q) != target:
        return False
    symbolic = any(export.is_symbolic_dim(n) for n in (*x.shape, *q.shape))
    matrices = dimensions.rhs_contracting == (q.ndim - 2,) and dimensions.rhs_free == (q.ndim - 1,)
    return (
        matrices
        and not symbolic
        and common_dtype(x.dtype, q.dtype) == jnp.float32
        and layout_for_kernel(q, -2, target, "") is not None
    )


def by_matrices(
    kernel: Callable[..., jax.Array],
    rows: Sequence[jax.Array],
    q: QTensor,
    how: HowTo,
    dtype: Any,
    **options: Any,
) -> jax.Array:
    """Returns the contraction of rows and a weight by a kernel of matrices, which reads the codes
    from the stack of the weight if it is a slice of a stack.

    Args:
      kernel: `(*rows, codes, scale, zero) -> [M, N]`, of matrices.
      rows: the left operand, and parameters of its rank, with its size or 1 along kept axes.
      q: the weight [..., K, N].
      how: the static arguments of the product.
      dtype: the dtype of rows that the weight is multiplied by.
      **options: of the kernel.
    """
    dimensions, (codes, step) = how.dimensions, codes_and_index(q)
    is_in_stack = step is not None and q.ndim == 2
    q = with_own_scales(q, (q.ndim - 1,))
    scale, zero, result_factor = parameters_of(q, dtype)
    options["dtype"] = jnp.float32 if how.dtype is None or result_factor is not None else how.dtype

    def run(*operands: jax.Array | None) -> jax.Array:
        if not is_in_stack:
            return kernel(*operands, **options)
        of_rows, parameters = operands[: len(rows)], operands[len(rows) + 1 :]
        return kernel(*of_rows, codes, *parameters, step=step, **options)

    x, left, right = rows[0], rows, (q.values, scale, zero)
    batch = tuple(q.shape[axis] for axis in dimensions.rhs_batch)
    free = tuple(x.shape[axis] for axis in dimensions.lhs_free)
    order = (*dimensions.lhs_batch, *dimensions.lhs_free, *dimensions.lhs_contracting)

    def as_rows(leaf: jax.Array) -> jax.Array:
        wide = jnp.transpose(leaf, order)
        wide = jnp.broadcast_to(wide, (*batch, *free, wide.shape[-1]))
        return wide.reshape(math.prod(batch), math.prod(free), wide.shape[-1])

    def columns(leaf: jax.Array | None) -> jax.Array | None:
        if leaf is None:
            return None
        leaf = jnp.transpose(leaf, (*dimensions.rhs_batch, leaf.ndim - 2, leaf.ndim - 1))
        full = jnp.broadcast_to(leaf, (*batch, *leaf.shape[-2:]))
        return full.reshape(math.prod(batch), *leaf.shape[-2:])

    operands = [*map(as_rows, left), *map(columns, right)]
    if batch:
        y = jax.vmap(run)(*operands)
    else:
        y = run(*(None if leaf is None else leaf[0] for leaf in operands))[None]
    factor = columns(result_factor)
    if factor is not None:
        y = y * factor
    return y.reshape(*batch, *free, q.shape[-1])


def precision_of(precision: Any) -> Any:
    """Returns the precision of the products in a kernel; `NotImplemented` for an algorithm."""
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if all(entry is None for entry in precisions):
        return None
    if any(isinstance(entry, (lax.DotAlgorithm, lax.DotAlgorithmPreset)) for entry in precisions):
        return NotImplemented
    named = [lax.Precision(entry) for entry in precisions if entry is not None]
    return max(named, key=list(lax.Precision).index)


def table_of(q: QTensor) -> Table:
    """Returns the numbers of codes that are looked up."""
    if q.layout is None or not q.layout.uint4:
        return None
    form = format_of(q.qtype)
    return numbers_of_codes(form.elements if isinstance(form, Block) else form)


@functools.cache
def numbers_of_codes(form: QType) -> tuple[float, ...]:
    """Returns the number that each code of a format represents."""
    with jax.ensure_compile_time_eval():
        return tuple(form.decode(jnp.arange(2**form.bits, dtype=jnp.uint8)).tolist())


class Parameters(NamedTuple):
    """The parameters of a weight for a kernel.

    Attributes:
      scale: [..., G, N], floats or the exponents of powers of two.
      zero: zero points of the same shape, or `None`.
      factor: a factor of the result, [..., 1, 1] or [..., 1, N], or `None`.
    """

    scale: jax.Array
    zero: jax.Array | None
    factor: jax.Array | None


def parameters_of(q: QTensor, dtype: Any) -> Parameters:
    """Returns the parameters of a weight [..., K, N] for a product with rows of a dtype."""
    scale, factor = _scale_of(q)
    unit = getattr(format_of(q.qtype), "unit", 1.0)
    if unit != 1.0:
        base = jnp.ones((1,) * q.ndim, jnp.float32) if factor is None else factor
        factor = base * jnp.float32(unit)
    if dtype == jnp.float16:
        scale, factor = _near_one(q, scale, factor)
    scale = jnp.broadcast_to(scale, (*scale.shape[:-1], q.shape[-1]))
    zero = q.zero_point
    if zero is not None:
        zero = jnp.broadcast_to(zero, (*zero.shape[:-2], *scale.shape[-2:]))
    return Parameters(scale, zero, factor)


def _scale_of(q: QTensor) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scale in its stored dtype, and a factor for a whole matrix, or `None`."""
    scale = q.scale
    if isinstance(scale, QTensor):
        plain = scale.layout is None and scale.zero_point is None and scale.offset is None
        if plain and scale.scale.shape[-2:] == (1, 1) and scale.qtype == jnp.float8_e4m3fn:
            return scale.values, scale.real_scale().astype(jnp.float32)
        return scale.dequantize().astype(jnp.float32), None
    return (scale if scale.dtype in (E8M0, jnp.bfloat16) else scale.astype(jnp.float32)), None


def _near_one(
    q: QTensor, scale: jax.Array, factor: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns scales for which float16 represents all weights of a column, and the remaining power
    of two, a factor of the result.
    """
    form, real = format_of(q.qtype), scales(scale)
    largest = jnp.max(jnp.abs(lax.stop_gradient(real)), axis=-2, keepdims=True)
    highest = max(abs(form.low), abs(form.high)) * (1 if q.zero_point is None else 2)
    power = power_below(largest * jnp.float32(highest))
    return real / power, power if factor is None else factor * power


DECODING = (
    "a float operand and a weight that is laid out for a kernel: the stored codes are scaled in "
    "float32 in registers, rounded to the dtype of the operand, and multiplied"
)


def _multiplies_floats(target: str, case: Any) -> bool:
    """Whether a kernel of a target computes a product with floats.

    With one scale per channel, the scale can leave the product, and codes that compilers convert
    need no kernel.
    """
    if not case.is_beside_floats or precision_of(case.how.precision) is NotImplemented:
        return False
    needs = case.block is not None or is_looked_up(case.rhs)
    return needs and is_laid_out_for(target, case.lhs, case.rhs, case.how)


def is_looked_up(q: QTensor) -> bool:
    """Whether only a kernel converts the codes."""
    return q.values.dtype in (jnp.uint4, jnp.float4_e2m1fn) and q.zero_point is None


@formulation_of_kernels(DECODING, _multiplies_floats, linear=dequantize.linear)
def kernel(target: str, x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    x = rows_on(target, x)
    options = {"table": table_of(q), "precision": precision_of(how.precision)}
    return by_matrices(weights_on(target), [x], q, how, x.dtype, **options)


def as_activation(q: QTensor, weight: QTensor, wide: Any) -> jax.Array:
    """Returns the real values of an operand in a wide dtype, for a product with the codes of
    `weight`. They are bfloat16 if that is exact (8-bit floats times powers of two) and a kernel
    reads the codes.
    """
    element = format_of(q.qtype)
    element = element.elements if isinstance(element, Block) else element
    exact = isinstance(element, Minifloat) and is_exact_in(q, jnp.bfloat16)
    scale: Any = q.scale
    if kernel_of(weight) and exact and scale.dtype == E8M0:
        wide = jnp.bfloat16
    return q.astype(wide).dequantize()


# Formulations by kernels for products of codes, or of floats that the kernel quantizes.


LEAST = 16
"""Elements of the smallest group that matrix units of a GPU multiply."""


def multiplies_codes(target: str, x: QTensor, q: QTensor, how: HowTo) -> bool:
    """Whether a kernel multiplies the codes of two operands. The left one may be given by shapes
    only.

    A new pair of formats also needs a form on the other platforms (`_are_floats_of_a_kernel`), or
    an operand is dequantized on all; and a layout of the weight (`layout_for_kernel`).
    """
    if not is_laid_out_for(target, x, q, how):
        return False
    (axis,) = how.dimensions.lhs_contracting
    size, length = q.groups.sizes[-2], q.shape[-2]
    shared = x.groups.sizes[axis]
    in_step = shared == length or shared == size
    if not in_step or x.zero_point is not None or x.offset is not None or x.order is not None:
        return False
    if target == "gpu" and size % LEAST:
        return False
    left, right = format_of(x.qtype), format_of(q.qtype)
    if isinstance(left, Integer) and isinstance(right, Integer):
        narrow = right.bits <= 4 or (right.signed and q.zero_point is None)
        fits = size * largest(x) * largest(q) <= INT32_MAX if left.bits <= 8 else False
        return left.signed and narrow and fits
    qtypes = (x.qtype, q.qtype)
    return all(isinstance(t, jnp.dtype) and t in FLOAT8 for t in qtypes) and q.zero_point is None


def _multiplies_groups(target: str, case: Any) -> bool:
    """Whether a kernel computes a product of codes in groups. With one scale per channel, XLA is as
    fast.
    """
    codes = isinstance(case.lhs, QTensor) and case.block is not None
    return codes and multiplies_codes(target, case.lhs, case.rhs, case.how)


CODES_IN_GROUPS = (
    "codes and a weight in groups that is laid out for a kernel: each group is multiplied as "
    "codes, integers exactly, and then by its scales in float32"
)


@formulation_of_kernels(CODES_IN_GROUPS, _multiplies_groups)
def kernel_of_codes(target: str, lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return products(target, lhs, rhs, how, plain=_plain)


def _are_floats_of_a_kernel(case: Any) -> bool:
    """Whether a kernel of the platform of the weight multiplies these 8-bit floats, so that other
    platforms need a form without kernels.
    """
    x, q = case.lhs, case.rhs
    if case.block is None or not isinstance(x, QTensor) or q.layout is None:
        return False
    integers = isinstance(format_of(q.qtype), Integer)
    return not integers and multiplies_codes(q.layout.kernel, x, q, case.how)


FLOATS = (
    "8-bit floats in groups, and a weight that is laid out for a kernel of another platform: the "
    "left operand is dequantized"
)


@formulation(FLOATS, CPU, _are_floats_of_a_kernel)
def float8_groups_in_tiles(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return tiles.compute(_real(lhs, rhs), rhs, how)


@formulation(FLOATS, ELSEWHERE, _are_floats_of_a_kernel)
def float8_groups(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return convert.compute(_real(lhs, rhs), rhs, how)


KERNELS = (*kernel, *kernel_of_codes, float8_groups_in_tiles, float8_groups)
"""Products with a weight that is laid out for a kernel."""


def _real(lhs: QTensor, rhs: QTensor) -> jax.Array:
    return lhs.astype(common_dtype(lhs.dtype, rhs.dtype)).dequantize()


def _plain(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    if isinstance(format_of(lhs.qtype), Integer):
        return integer.compute(lhs, rhs, how)
    return convert.compute(_real(lhs, rhs), rhs, how)


def derived_as(f: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function the derivative of another one, which computes the same result."""
    function = jax.custom_jvp(f)

    @function.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        y = function(*primals)
        tangent = jax.jvp(of_slices(plain), primals, tangents)[1]
        return y, jax.tree.map(lambda x, like: x.astype(like.dtype), tangent, y)

    return function


class Rows(NamedTuple):
    """The left operand of a kernel that multiplies codes.

    Attributes:
      x: codes, or floats that the kernel quantizes.
      scale: their scale, of the same rank.
      form: the format of the codes.
    """

    x: jax.Array
    scale: jax.Array
    form: QType

    @classmethod
    def of(cls, target: str, x: QTensor | Pending) -> "Rows":
        """Returns codes as they are, integers as int8, or floats that are still to be quantized."""
        if isinstance(x, Pending):
            return cls(rows_on(target, x.x), x.scale, format_of(x.spec.qtype))
        q = as_int8(x) if isinstance(format_of(x.qtype), Integer) else x
        return cls(q.values, q.real_scale(), format_of(q.qtype))


def products(
    target: str,
    lhs: QTensor | Pending,
    rhs: QTensor,
    how: HowTo,
    plain: Callable[..., jax.Array],
) -> jax.Array:
    """Returns the product of codes, or of floats to be quantized, and a weight by the kernel of a
    target. Its derivative is that of `plain(lhs, rhs, how)`, which computes the same result.
    """

    def run(lhs: QTensor | Pending, q: QTensor) -> jax.Array:
        rows = Rows.of(target, lhs)
        left = [rows.x, rows.scale.astype(jnp.float32)]
        return by_matrices(products_on(target), left, q, how, jnp.float32, form=rows.form)

    return derived_as(run, functools.partial(plain, how=how))(lhs, rhs)
