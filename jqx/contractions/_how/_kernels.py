"""Formulations by kernels for products of floats and codes, for weights laid out by `pack_for`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels._shared import weights_gpu, weights_tpu
from ...numerics import Block, Minifloat, format_of
from ...numerics._shared import E8M0
from ...tensor import QTensor
from ...tensor._shared import kernel_of
from ._blocks import with_own_scales
from ._convert import dequantize, is_exact_in
from ._formulation import formulation
from ._kernel_operands import (
    dtype_of,
    in_stack,
    is_laid_out_for,
    over_matrices,
    parameters_of,
    precision_of,
    table_of,
)
from ._scales import HowTo

REASON = (
    "a float operand and a weight that is laid out for a kernel: the stored codes are scaled in "
    "float32 in registers, rounded to the dtype of the operand, and multiplied"
)


def _is_for(platform: str) -> Callable[[Any], bool]:
    """Returns the condition of the kernels of a platform for products with floats.

    With one scale per channel, the scale can leave the product, and codes that compilers convert
    need no kernel.
    """

    def applies(case: Any) -> bool:
        if not case.is_beside_floats or precision_of(case.how.precision) is NotImplemented:
            return False
        needs = case.block is not None or is_looked_up(case.rhs)
        return needs and is_laid_out_for(platform, case.lhs, case.rhs, case.how)

    return applies


def is_looked_up(q: QTensor) -> bool:
    """Whether only a kernel converts the codes."""
    return q.values.dtype in (jnp.uint4, jnp.float4_e2m1fn) and q.zero_point is None


@formulation(REASON, ("tpu",), _is_for("tpu"), linear=dequantize.linear, finds=True)
def kernel_tpu(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    # TPUs do not have float16.
    wide = jnp.float32 if x.dtype == jnp.float16 else x.dtype
    return _weights(x.astype(wide), q, how, weights_tpu)


@formulation(REASON, ("cuda",), _is_for("gpu"), linear=dequantize.linear, finds=True)
def kernel_gpu(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    return _weights(x, q, how, weights_gpu)


def _weights(x: jax.Array, q: QTensor, how: HowTo, kernel: Callable[..., jax.Array]) -> jax.Array:
    kernel = in_stack(kernel, q, 1)
    q = with_own_scales(q, (q.ndim - 1,))
    parameters = parameters_of(q, x.dtype)
    run = functools.partial(
        kernel,
        table=table_of(q),
        precision=precision_of(how.precision),
        dtype=dtype_of(how, parameters),
    )
    weight = [q.values, parameters.scale, parameters.zero]
    return over_matrices(run, how.dimensions, [x], weight, parameters.after)


def as_activation(q: QTensor, beside: QTensor, wide: Any) -> jax.Array:
    """Returns the real values of an operand in a wide dtype, for a product with the codes of
    `beside`. They are bfloat16 if that is exact (8-bit floats times powers of two) and a kernel
    reads the codes.
    """
    element = format_of(q.qtype)
    element = element.elements if isinstance(element, Block) else element
    exact = isinstance(element, Minifloat) and is_exact_in(q, jnp.bfloat16)
    scale: Any = q.scale
    if kernel_of(beside) and exact and scale.dtype == E8M0:
        wide = jnp.bfloat16
    return q.astype(wide).dequantize()
