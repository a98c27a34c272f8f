"""Kernels as formulations: of weights that `pack_for` has laid out for one, on their platform.

What a kernel is given are matrices: stacks are mapped over, other axes are merged.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from ...kernels._shared import Table, scales, weights_gpu, weights_tpu
from ...numerics import Block, Minifloat, format_of
from ...numerics._shared import E8M0, common_dtype, power_below
from ...tensor import QTensor
from ...tensor._shared import layout_for_kernel
from ._blocks import with_own_scales
from ._convert import dequantize, is_exact_in
from ._formulation import formulation
from ._scales import HowTo

REASON = (
    "a float operand beside a weight that is laid out for a kernel: codes are read as they lie, "
    "scaled in float32 in registers, rounded to the dtype of the operand, and multiplied"
)


def _is_for(platform: str) -> Callable[[Any], bool]:
    """Returns the condition of kernels of a platform beside floats."""

    def applies(case: Any) -> bool:
        return case.is_beside_floats and has_kernel(case.lhs, case.rhs, case.how, platform)

    return applies


def has_kernel(x: Any, q: QTensor, how: HowTo, platform: str) -> bool:
    """Whether a kernel of a platform multiplies matrices by those of a weight that lie for it."""
    dimensions, layout = how.dimensions, q.layout
    if layout is None or layout.kernel != platform:
        return False
    symbolic = any(export.is_symbolic_dim(n) for n in (*x.shape, *q.shape))
    matrices = dimensions.rhs_contracting == (q.ndim - 2,) and dimensions.rhs_free == (q.ndim - 1,)
    return (
        matrices
        and not symbolic
        and common_dtype(x.dtype, q.dtype) == jnp.float32
        and precision_of(how.precision) is not NotImplemented
        and layout_for_kernel(q, -2, platform, "") is not None
    )


def precision_of(precision: Any) -> Any:
    """Returns the precision of the products in a kernel; `NotImplemented` for an algorithm."""
    both = precision if isinstance(precision, tuple) else (precision,)
    if all(one is None for one in both):
        return None
    if any(isinstance(one, (lax.DotAlgorithm, lax.DotAlgorithmPreset)) for one in both):
        return NotImplemented
    known = [lax.Precision(one) for one in both if one is not None]
    return max(known, key=list(lax.Precision).index)


@formulation(REASON, ("tpu",), _is_for("tpu"), linear=dequantize.linear)
def kernel_tpu(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    # There is no float16 on a TPU: float32 holds it.
    return _matrices(x.astype(_without_half(x.dtype)), q, how, weights_tpu)


@formulation(REASON, ("cuda",), _is_for("gpu"), linear=dequantize.linear)
def kernel_gpu(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    return _matrices(x, q, how, weights_gpu)


def _without_half(dtype: Any) -> Any:
    return jnp.float32 if dtype == jnp.float16 else dtype


def _matrices(x: jax.Array, q: QTensor, how: HowTo, kernel: Callable[..., jax.Array]) -> jax.Array:
    """Contracts matrices, one after another where there are stacks of them."""
    dimensions, n = how.dimensions, q.shape[-1]
    q = with_own_scales(q, (q.ndim - 1,))
    told = parameters_of(q, x.dtype)
    batch = tuple(q.shape[axis] for axis in dimensions.rhs_batch)
    order = (*dimensions.lhs_batch, *dimensions.lhs_free, *dimensions.lhs_contracting)
    free = tuple(x.shape[axis] for axis in dimensions.lhs_free)
    rows = jnp.transpose(x, order).reshape(math.prod(batch), math.prod(free), x.shape[order[-1]])

    def stacked(leaf: jax.Array | None) -> jax.Array | None:
        """Returns a leaf as [stack, ..., ...], the stack in the order of the result."""
        if leaf is None:
            return None
        order = (*dimensions.rhs_batch, leaf.ndim - 2, leaf.ndim - 1)
        leaf = jnp.transpose(leaf, order)
        full = jnp.broadcast_to(leaf, (*batch, *leaf.shape[-2:]))
        return full.reshape(rows.shape[0], *leaf.shape[-2:])

    run = functools.partial(kernel, table=table_of(q), precision=precision_of(how.precision))
    operands = rows, stacked(q.values), stacked(told.scale), stacked(told.zero)
    if batch:
        y = jax.vmap(run)(*operands)
    else:
        y = run(*(None if leaf is None else leaf[0] for leaf in operands))[None]
    factor = stacked(told.after)
    if factor is not None:
        y = y * factor
    return y.reshape(*batch, *free, n)


def as_activation(q: QTensor, beside: QTensor, wide: Any) -> jax.Array:
    """Returns the real values of an operand beside another that stays codes, in a wide dtype; in
    bfloat16 where that has them exactly (8-bit floats times powers of two) and a kernel reads the
    other.
    """
    element = format_of(q.qtype)
    element = element.elements if isinstance(element, Block) else element
    exact = isinstance(element, Minifloat) and is_exact_in(q, jnp.bfloat16)
    scale: Any = q.scale
    if beside.layout is not None and beside.layout.kernel and exact and scale.dtype == E8M0:
        wide = jnp.bfloat16
    return q.astype(wide).dequantize()


def table_of(q: QTensor) -> Table:
    """Returns the numbers of codes that are looked up."""
    return _entries(format_of(q.qtype)) if q.layout is not None and q.layout.uint4 else None


@functools.cache
def _entries(form: Any) -> tuple[float, ...]:
    form = form.elements if isinstance(form, Block) else form
    with jax.ensure_compile_time_eval():
        numbers = form.decode(jnp.arange(2**form.bits, dtype=jnp.uint8))
    return tuple(np.asarray(numbers).tolist())


class Parameters(NamedTuple):
    """What a kernel is told of a weight.

    Attributes:
      scale: [..., G, N], floats or the exponents of powers of two.
      zero: zero points of the same shape, or `None`.
      after: what the result is multiplied by, [..., 1, 1] or [..., 1, N], or `None`.
    """

    scale: jax.Array
    zero: jax.Array | None
    after: jax.Array | None


def parameters_of(q: QTensor, dtype: Any) -> Parameters:
    """Returns the parameters of a weight [..., K, N] beside rows of a dtype."""
    scale, after = _scale_of(q)
    unit = getattr(format_of(q.qtype), "unit", 1.0)
    if unit != 1.0:
        one = jnp.ones((1,) * q.ndim, jnp.float32) if after is None else after
        after = one * jnp.float32(unit)
    if dtype == jnp.float16:
        scale, after = _near_one(q, scale, after)
    scale = jnp.broadcast_to(scale, (*scale.shape[:-1], q.shape[-1]))
    zero = q.zero_point
    if zero is not None:
        zero = jnp.broadcast_to(zero, (*zero.shape[:-2], *scale.shape[-2:]))
    return Parameters(scale, zero, after)


def _scale_of(q: QTensor) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scale in the bits that it has, and a factor for all of a matrix, or `None`."""
    scale = q.scale
    if isinstance(scale, QTensor):
        plain = scale.layout is None and scale.zero_point is None and scale.offset is None
        if plain and scale.scale.shape[-2:] == (1, 1) and scale.qtype == jnp.float8_e4m3fn:
            return scale.values, scale.real_scale().astype(jnp.float32)
        return scale.dequantize().astype(jnp.float32), None
    if scale.dtype == E8M0:
        return lax.bitcast_convert_type(scale, jnp.uint8), None
    return (scale if scale.dtype == jnp.bfloat16 else scale.astype(jnp.float32)), None


def _near_one(q: QTensor, scale: jax.Array, after: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns scales with which float16 holds all weights of a column, and the power of two that
    is left for the result.
    """
    form, real = format_of(q.qtype), scales(scale)
    largest = jnp.max(jnp.abs(lax.stop_gradient(real)), axis=-2, keepdims=True)
    highest = max(abs(form.low), abs(form.high)) * (1 if q.zero_point is None else 2)
    power = power_below(largest * jnp.float32(highest))
    return real / power, power if after is None else after * power
