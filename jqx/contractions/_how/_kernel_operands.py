"""Operands of kernels: matrices, mapped over stacks, and parameters of weights."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from ...kernels._shared import Table, scales
from ...numerics import Block, format_of
from ...numerics._shared import E8M0, common_dtype, power_below
from ...tensor import QTensor
from ...tensor._shared import found, kernel_of, layout_for_kernel
from .._what._dimensions import Dimensions
from ._scales import HowTo


def is_laid_out_for(platform: str, x: Any, q: QTensor, how: HowTo) -> bool:
    """Whether this is a product of matrices, computed in float32, with a weight that is laid out
    for the kernels of a platform.
    """
    dimensions = how.dimensions
    if kernel_of(q) != platform:
        return False
    symbolic = any(export.is_symbolic_dim(n) for n in (*x.shape, *q.shape))
    matrices = dimensions.rhs_contracting == (q.ndim - 2,) and dimensions.rhs_free == (q.ndim - 1,)
    return (
        matrices
        and not symbolic
        and common_dtype(x.dtype, q.dtype) == jnp.float32
        and layout_for_kernel(q, -2, platform, "") is not None
    )


def over_matrices(
    run: Callable[..., jax.Array],
    dimensions: Dimensions,
    left: Sequence[jax.Array],
    right: Sequence[jax.Array | None],
    after: jax.Array | None = None,
) -> jax.Array:
    """Returns the contraction of operands by a function of matrices.

    Args:
      run: `(*left, *right) -> [M, N]`, of matrices.
      dimensions: of the contraction.
      left: the left operand, and parameters of its rank, with its size or 1 along kept axes.
      right: the right operand [..., K, N], and parameters of its rank.
      after: a factor of the results, of the rank of the right operand, or `None`.
    """
    x, q = left[0], right[0]
    assert q is not None
    batch = tuple(q.shape[axis] for axis in dimensions.rhs_batch)
    free = tuple(x.shape[axis] for axis in dimensions.lhs_free)
    order = (*dimensions.lhs_batch, *dimensions.lhs_free, *dimensions.lhs_contracting)

    def rows(leaf: jax.Array) -> jax.Array:
        wide = jnp.transpose(leaf, order)
        wide = jnp.broadcast_to(wide, (*batch, *free, wide.shape[-1]))
        return wide.reshape(math.prod(batch), math.prod(free), wide.shape[-1])

    def columns(leaf: jax.Array | None) -> jax.Array | None:
        if leaf is None:
            return None
        leaf = jnp.transpose(leaf, (*dimensions.rhs_batch, leaf.ndim - 2, leaf.ndim - 1))
        full = jnp.broadcast_to(leaf, (*batch, *leaf.shape[-2:]))
        return full.reshape(math.prod(batch), *leaf.shape[-2:])

    operands = [*map(rows, left), *map(columns, right)]
    if batch:
        y = jax.vmap(run)(*operands)
    else:
        y = run(*(None if leaf is None else leaf[0] for leaf in operands))[None]
    factor = columns(after)
    if factor is not None:
        y = y * factor
    return y.reshape(*batch, *free, q.shape[-1])


def in_stack(kernel: Callable[..., jax.Array], q: QTensor, place: int) -> Callable[..., jax.Array]:
    """Returns a kernel of matrices that reads the codes, the operand number `place`, from the stack
    of a weight, if the weight is a slice of a stack.
    """
    codes, step = found(q)
    if step is None or q.ndim > 2:
        return kernel

    def run(*operands: jax.Array | None, **options: Any) -> jax.Array:
        return kernel(*operands[:place], codes, *operands[place + 1 :], step=step, **options)

    return run


def precision_of(precision: Any) -> Any:
    """Returns the precision of the products in a kernel; `NotImplemented` for an algorithm."""
    both = precision if isinstance(precision, tuple) else (precision,)
    if all(one is None for one in both):
        return None
    if any(isinstance(one, (lax.DotAlgorithm, lax.DotAlgorithmPreset)) for one in both):
        return NotImplemented
    known = [lax.Precision(one) for one in both if one is not None]
    return max(known, key=list(lax.Precision).index)


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
    """The parameters of a weight for a kernel.

    Attributes:
      scale: [..., G, N], floats or the exponents of powers of two.
      zero: zero points of the same shape, or `None`.
      after: a factor of the result, [..., 1, 1] or [..., 1, N], or `None`.
    """

    scale: jax.Array
    zero: jax.Array | None
    after: jax.Array | None


def dtype_of(how: HowTo, parameters: Parameters) -> Any:
    """Returns the dtype that a kernel writes: that of the result, if no factor follows."""
    return how.dtype if how.dtype is not None and parameters.after is None else jnp.float32


def parameters_of(q: QTensor, dtype: Any) -> Parameters:
    """Returns the parameters of a weight [..., K, N] for a product with rows of a dtype."""
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
    """Returns the scale in its stored dtype, and a factor for a whole matrix, or `None`."""
    scale = q.scale
    if isinstance(scale, QTensor):
        plain = scale.layout is None and scale.zero_point is None and scale.offset is None
        if plain and scale.scale.shape[-2:] == (1, 1) and scale.qtype == jnp.float8_e4m3fn:
            return scale.values, scale.real_scale().astype(jnp.float32)
        return scale.dequantize().astype(jnp.float32), None
    return (scale if scale.dtype in (E8M0, jnp.bfloat16) else scale.astype(jnp.float32)), None


def _near_one(q: QTensor, scale: jax.Array, after: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns scales for which float16 represents all weights of a column, and the remaining power
    of two, a factor of the result.
    """
    form, real = format_of(q.qtype), scales(scale)
    largest = jnp.max(jnp.abs(lax.stop_gradient(real)), axis=-2, keepdims=True)
    highest = max(abs(form.low), abs(form.high)) * (1 if q.zero_point is None else 2)
    power = power_below(largest * jnp.float32(highest))
    return real / power, power if after is None else after * power
