"""Formulations by kernels for products of codes; `_pending.py` has those that quantize rows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels._shared import products_gpu, products_tpu
from ...numerics import Integer, QType, format_of
from ...numerics._shared import common_dtype
from ...tensor import QTensor
from .._integers._bytes import ACCUMULATOR, as_int8, largest
from .._integers._integer import integer
from ._blocks import with_own_scales
from ._convert import convert
from ._formulation import CPU, ELSEWHERE, formulation, of_slices
from ._kernel_operands import dtype_of, in_stack, is_laid_out_for, over_matrices, parameters_of
from ._scales import HowTo
from ._tiles import tiles

FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
LEAST = 16
"""Elements of the smallest group that matrix units of a GPU multiply."""


def multiplies_codes(platform: str, x: QTensor, q: QTensor, how: HowTo) -> bool:
    """Whether a kernel multiplies the codes of two operands. The left one may be given by shapes
    only.
    """
    if not is_laid_out_for(platform, x, q, how):
        return False
    (axis,) = how.dimensions.lhs_contracting
    size, whole = q.groups.sizes[-2], q.shape[-2]
    shared = x.groups.sizes[axis]
    in_step = shared == whole or shared == size
    if not in_step or x.zero_point is not None or x.offset is not None or x.order is not None:
        return False
    if platform == "gpu" and size % LEAST:
        return False
    left, right = format_of(x.qtype), format_of(q.qtype)
    if isinstance(left, Integer) and isinstance(right, Integer):
        narrow = right.bits <= 4 or (right.signed and q.zero_point is None)
        fits = size * largest(x) * largest(q) <= ACCUMULATOR if left.bits <= 8 else False
        return left.signed and narrow and fits
    both = (x.qtype, q.qtype)
    return all(isinstance(t, jnp.dtype) and t in FLOAT8 for t in both) and q.zero_point is None


def _is_for(platform: str) -> Callable[[Any], bool]:
    """Returns the condition of the kernels of a platform for products of codes in groups. With one
    scale per channel, XLA is as fast.
    """

    def applies(case: Any) -> bool:
        codes = isinstance(case.lhs, QTensor) and case.block is not None
        return codes and multiplies_codes(platform, case.lhs, case.rhs, case.how)

    return applies


CODES = (
    "codes and a weight in groups that is laid out for a kernel: each group is multiplied as "
    "codes, integers exactly, and then by its scales in float32"
)


@formulation(CODES, ("tpu",), _is_for("tpu"), finds=True)
def kernel_of_codes_tpu(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return _of_codes(lhs, rhs, how, products_tpu)


@formulation(CODES, ("cuda",), _is_for("gpu"), finds=True)
def kernel_of_codes_gpu(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return _of_codes(lhs, rhs, how, products_gpu)


def _are_floats(case: Any) -> bool:
    """Whether codes are 8-bit floats that a kernel multiplies on its own platform."""
    x, q = case.lhs, case.rhs
    if case.block is None or not isinstance(x, QTensor) or q.layout is None:
        return False
    integers = isinstance(format_of(q.qtype), Integer)
    return not integers and multiplies_codes(q.layout.kernel, x, q, case.how)


FLOATS = (
    "8-bit floats in groups, and a weight that is laid out for a kernel of another platform: the "
    "smaller operand is dequantized"
)


@formulation(FLOATS, CPU, _are_floats)
def float8_groups_in_tiles(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return tiles.compute(_real(lhs, rhs), rhs, how)


@formulation(FLOATS, ELSEWHERE, _are_floats)
def float8_groups(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return convert.compute(_real(lhs, rhs), rhs, how)


def _real(lhs: QTensor, rhs: QTensor) -> jax.Array:
    return lhs.astype(common_dtype(lhs.dtype, rhs.dtype)).dequantize()


def _of_codes(
    lhs: QTensor, rhs: QTensor, how: HowTo, kernel: Callable[..., jax.Array]
) -> jax.Array:
    if isinstance(format_of(lhs.qtype), Integer):
        lhs = as_int8(lhs)

    def run(lhs: QTensor, rhs: QTensor) -> jax.Array:
        return products(lhs.values, lhs.real_scale(), rhs, how, format_of(lhs.qtype), kernel)

    return derived_as(run, functools.partial(_plain, how=how))(lhs, rhs)


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
        return y, jax.jvp(of_slices(plain), primals, tangents)[1].astype(y.dtype)

    return function


def products(
    x: jax.Array,
    x_scale: jax.Array,
    q: QTensor,
    how: HowTo,
    form: QType,
    kernel: Callable[..., jax.Array],
) -> jax.Array:
    """Returns the product of rows and a weight by a kernel that multiplies codes.

    Args:
      x: floats to be quantized, or codes.
      x_scale: their scale, of the same rank.
      q: the weight, laid out for the kernel.
      how: the contraction.
      form: the format of rows.
      kernel: `products_tpu`, or `products_gpu`.
    """
    kernel = in_stack(kernel, q, 2)
    q = with_own_scales(q, (q.ndim - 1,))
    parameters = parameters_of(q, jnp.float32)
    run = functools.partial(kernel, form=form, dtype=dtype_of(how, parameters))
    rows, weight = [x, x_scale.astype(jnp.float32)], [q.values, parameters.scale, parameters.zero]
    return over_matrices(run, how.dimensions, rows, weight, parameters.after)
