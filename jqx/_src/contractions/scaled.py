"""Products of two operands in MX or NVFP4 blocks. GPUs get products that their matrix units have:
of the codes with their scales, or of bfloat16, which holds elements of few bits times such scales.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compat_kernels import alone_or_in_parts
from ..numerics.blocks import Block
from ..numerics.exact import common_dtype
from ..numerics.lookup import format_of
from ..numerics.minifloats import Minifloat
from ..tensor.qtensor import QTensor
from ..tensor.targets import kernel_of
from .blocks import with_own_scales
from .formulation import ELSEWHERE, Formulation, formulation
from .kernels import derived_as
from .plain import is_exact_in
from .problem import Dimensions, HowTo, Product

SUM_LAST = (((2,), (2,)), ((0,), (0,)))
"""The contraction of [batch, rows, summed] and [batch, columns, summed]."""


def has_blocks_exact_in_bfloat16(q: Any) -> bool:
    """Whether bfloat16 holds all elements of a block format times their scales, which are powers of
    two, or floats of few bits under a float32 scale.
    """
    form = format_of(q.qtype) if isinstance(q, QTensor) else None
    if not isinstance(form, Block) or not is_exact_in(q, jnp.bfloat16):
        return False
    if not form.two_level:
        return True
    element, scale = form.elements, format_of(form.scale_qtype)
    if not isinstance(element, Minifloat) or not isinstance(scale, Minifloat):
        return False
    return element.mantissa_bits + scale.mantissa_bits + 1 <= jnp.finfo(jnp.bfloat16).nmant


def has_scaled_bytes(q: QTensor) -> bool:
    """Whether an operand [batch, rows, summed] is 8-bit floats under powers of two, in whole blocks
    of 32.
    """
    form = format_of(q.qtype)
    is_scaled = isinstance(form, Block) and not form.two_level and form.bits == 8
    floats = jnp.issubdtype(q.codes.dtype, jnp.floating)
    return is_scaled and floats and q.shape[-1] == 32 * q.scale.shape[-1]


def _has_scaled_nibbles(q: QTensor) -> bool:
    """Whether an operand [batch, rows, summed] is NVFP4, in whole blocks of 16."""
    scale = q.scale
    if q.codes.dtype != jnp.float4_e2m1fn or not isinstance(scale, QTensor):
        return False
    return scale.codes.dtype == jnp.float8_e4m3fn and q.shape[-1] == 16 * scale.shape[-1]


def scaled_product(lhs: QTensor, rhs: QTensor) -> jax.Array:
    """Returns a product whose scales the matrix units of Blackwell apply. XLA computes it in
    bfloat16, as `exact_product`, on GPUs without such units. XLA of jaxlib 0.10.2 does not compile
    it for several devices, and JAX does not export it for several platforms.
    """

    def on_one_device(lhs: Any, rhs: Any) -> jax.Array:
        return lax.scaled_dot(
            lhs.codes,
            rhs.codes,
            lhs_scale=lhs.scale,
            rhs_scale=rhs.scale,
            dimension_numbers=SUM_LAST,
            preferred_element_type=jnp.float32,
        )

    return alone_or_in_parts(on_one_device, exact_product, lhs, rhs, in_shard_map=False)


def exact_product(*operands: QTensor) -> jax.Array:
    """Returns a product of operands in blocks, which are exact in bfloat16 but for scales of all of
    them. Units multiply that faster than float32, and XLA has no product of such codes.
    """
    (lhs, rhs), second_scales = _without_second_scales(operands)
    left, right = (dataclasses.replace(q, dtype=jnp.bfloat16).dequantize() for q in (lhs, rhs))
    y = lax.dot_general(left, right, SUM_LAST, preferred_element_type=jnp.float32)
    return functools.reduce(jnp.multiply, second_scales, y)


def _cudnn_product(lhs: QTensor, rhs: QTensor) -> jax.Array:
    """Returns the product that cuDNN has for Blackwell, for MXFP8 and NVFP4."""
    (lhs, rhs), second_scales = _without_second_scales((lhs, rhs))
    codes = [q.scale.codes if isinstance(q.scale, QTensor) else q.scale for q in (lhs, rhs)]
    y = jax.nn.scaled_matmul(
        lhs.codes, rhs.codes, codes[0], codes[1], preferred_element_type=jnp.float32
    )
    return functools.reduce(jnp.multiply, second_scales, y)


def _without_second_scales(operands: tuple[QTensor, ...]) -> tuple[list[QTensor], list[jax.Array]]:
    """Returns operands without the scales of their scales, and these."""
    second_scales, bare = [], []
    for q in operands:
        if isinstance(q.scale, QTensor):
            second_scales.append(q.scale.real_scale())
            one = jnp.ones_like(second_scales[-1])
            q = dataclasses.replace(q, scale=dataclasses.replace(q.scale, scale=one))
        bare.append(q)
    return bare, second_scales


# The same for any axes.


def are_blocks(case: Product) -> bool:
    """Whether both operands are in blocks along the one contracted axis, and exact in bfloat16."""
    block = case.block
    if block is None or len(case.dimensions.lhs_contracting) != 1 or not case.is_large:
        return False
    return all(
        has_blocks_exact_in_bfloat16(q)
        and not kernel_of(q)
        and (not isinstance(q.scale, QTensor) or q.scale.real_scale().size == 1)
        for q in (case.lhs, case.rhs)
    )


def _matrices(lhs: QTensor, rhs: QTensor, dimensions: Dimensions) -> tuple[QTensor, QTensor]:
    """Returns operands as [batch, rows, summed] and [batch, columns, summed]."""
    d = dimensions
    orders = (
        (d.lhs_batch, d.lhs_free, d.lhs_contracting),
        (d.rhs_batch, d.rhs_free, d.rhs_contracting),
    )
    matrices = []
    for q, order in zip((lhs, rhs), orders, strict=True):
        sizes = [math.prod(q.shape[axis] for axis in axes) for axes in order]
        q = with_own_scales(q.unpack(), itertools.chain(*order[:2]))
        matrices.append(q.transpose(*itertools.chain(*order)).reshape(*sizes))
    return matrices[0], matrices[1]


def _have(form: Callable[[QTensor], bool]) -> Callable[[Product], bool]:
    """Returns the condition that both operands, in order, are of a form."""

    def applies(case: Product) -> bool:
        if not are_blocks(case):
            return False
        in_order = functools.partial(_matrices, dimensions=case.dimensions)
        return all(map(form, jax.eval_shape(in_order, case.lhs, case.rhs)))

    return applies


def _of_any_axes(product: Callable[[QTensor, QTensor], jax.Array]) -> Callable[..., jax.Array]:
    """Returns a formulation by a product of matrices, with the derivative of real operands."""

    def compute(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
        def own(lhs: QTensor, rhs: QTensor) -> jax.Array:
            y = product(*_matrices(lhs, rhs, how.dimensions))
            y = y.reshape(how.dimensions.result_shape(lhs.shape, rhs.shape))
            return y.astype(common_dtype(lhs.dtype, rhs.dtype))

        return derived_as(own, functools.partial(_plain, how=how))(lhs, rhs)

    return compute


def _plain(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    """Returns the product of the real operands."""
    wide = common_dtype(lhs.dtype, rhs.dtype)
    left, right = (q.astype(wide).dequantize() for q in (lhs, rhs))
    numbers = how.dimensions.numbers
    return lax.dot_general(left, right, numbers, how.precision, preferred_element_type=wide)


GPUS = ("cuda",)


@formulation(
    "two operands of MXFP8, on GPUs: the matrix units of Blackwell apply the scales; others "
    "multiply them as bfloat16, which is exact",
    GPUS,
    _have(has_scaled_bytes),
)
def scaled_blocks(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return _of_any_axes(scaled_product)(lhs, rhs, how)


@formulation(
    "two operands in MX or NVFP4 blocks, on GPUs and TPUs: as bfloat16, which holds elements times "
    "scales",
    ELSEWHERE,
    are_blocks,
)
def exact_blocks(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    return _of_any_axes(exact_product)(lhs, rhs, how)


cudnn_blocks: Formulation = Formulation(
    name="cudnn_blocks",
    reason="two operands of MXFP8 or NVFP4, on Blackwell: cuDNN multiplies codes and scales",
    platforms=GPUS,
    applies=_have(lambda q: has_scaled_bytes(q) or _has_scaled_nibbles(q)),
    compute=_of_any_axes(_cudnn_product),
)
"""A formulation for `using`: products of two operands of MXFP8, or of NVFP4, on GPUs, by the kernel
of cuDNN for Blackwell (`jax.nn.scaled_matmul`). On other GPUs XLA multiplies such operands one by
one, so it is not chosen by itself. Programs on several devices are partitioned as
`jax.nn.scaled_matmul` says.

Example:
  >>> import jqx, jax.numpy as jnp
  >>> from jqx import numerics
  >>> from jqx.extend import cudnn_blocks, using
  >>> spec = jqx.QSpec(numerics.nvfp4, jqx.per_block({0: 1, 1: 16}))
  >>> q = jqx.QTensor.quantize(jnp.ones((128, 128)), spec)
  >>> with using(cudnn_blocks):
  ...     (chosen,) = jqx.formulations(lambda x, w: jqx.matmul(x, w.T))(q, q)
  >>> chosen.cuda.name
  'cudnn_blocks'
"""

SCALED_PRODUCTS = (scaled_blocks, exact_blocks)
"""Products of two operands in blocks."""
