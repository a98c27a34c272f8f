"""The three products of a layer, each with operands that are rounded for it: see
`tensor/products.py`, for x [batch, rows, inputs], w [batch, outputs, inputs] and
y [batch, rows, outputs].
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import QTensor, dot_general, per_block, per_tensor, ragged_dot
from ..contractions.formulation import is_using
from ..contractions.scaled import (
    SUM_LAST,
    exact_product,
    has_blocks_exact_in_bfloat16,
    has_scaled_bytes,
    scaled_product,
)
from ..statistics.granularity import PerBlock
from ..tensor.layout import swap_axes
from ..tensor.products import (
    BATCH,
    FIXED_SIGNS,
    KEPT,
    SUMMED,
    Operand,
    Product,
    Products,
    Rounded,
)
from ..transforms.convert import as_stored
from .operands import largest_magnitude, packed_axis, padded, quantized, remembered, rotated

_ANY = 1 << 20
"""A size that all blocks divide."""

Histories = Mapping[str, jax.Array]
"""The largest magnitudes of earlier steps, newest first, of `x`, `w` and `dy`: those that have
delayed scales.
"""


def prepared(
    x: jax.Array,
    product: Product,
    index: int,
    key: jax.Array | None,
    history: jax.Array | None = None,
    is_turned: bool = False,
) -> Any:
    """Returns an operand as its product multiplies it: a QTensor, or an array.

    Args:
      x: [batch, kept, summed].
      product: the product.
      index: 0 for its first operand, 1 for its second.
      key: the key of the product; both operands get the same, so that their transform is the same.
      history: the largest magnitudes of earlier steps, for delayed scales.
      is_turned: whether `x` is the transpose of what is in memory. Codes are then made and kept in
        the order of memory: XLA on CPU takes up to 16 times as long to round along columns of it.
        GPUs multiply codes of 8 bits along the last axis in memory alone, so they get a transpose.
    """
    operand = product.operands[index]
    size = product.hadamard
    exchanged = _with_axes_exchanged(operand) if is_turned and not size else None
    if exchanged is not None:

        def in_memory(x: jax.Array, history: Any) -> QTensor:
            return quantized(x.swapaxes(1, 2), exchanged, None, size, history)

        def transposed(x: jax.Array, history: Any) -> QTensor:
            assert isinstance(operand, Rounded)
            return quantized(x, operand, None, size, history).transpose(0, 2, 1)

        if packed_axis(exchanged.spec) is not None:  # multiplied as floats everywhere
            return swap_axes(in_memory(x, history))
        on_gpu = dict.fromkeys(("cuda", "rocm"), transposed)
        return swap_axes(lax.platform_dependent(x, history, default=in_memory, **on_gpu))
    if size:
        x = rotated(padded(x.astype(jnp.float32), size), size, _signs(product, key))
    if isinstance(operand, np.dtype):
        if is_turned and not size and x.shape[0] == 1:  # a transpose that XLA merges into a product
            return x.swapaxes(1, 2)[0].astype(operand).T[None]
        return x.astype(operand)
    own = None if key is None else jax.random.fold_in(key, 1 + index)
    return quantized(x, operand, own, size, history)


_EXCHANGED = {BATCH: BATCH, KEPT: SUMMED, SUMMED: KEPT}


def _with_axes_exchanged(operand: Operand) -> Rounded | None:
    """Returns how the transpose of an operand is rounded to the same numbers; `None` for floats,
    and for random numbers, which are drawn in the order of the operand.
    """
    if isinstance(operand, np.dtype) or operand.needs_key:
        return None
    granularity = operand.spec.granularity
    if granularity.is_relative:
        granularity = granularity.resolve(3, (BATCH, SUMMED))
    elif isinstance(granularity, PerBlock):
        sizes = {_EXCHANGED[axis]: size for axis, size in granularity.resolve(3, ()).sizes}
        granularity = per_block(sizes, tail=granularity.tail)
    elif granularity != per_tensor():
        return None
    spec = dataclasses.replace(operand.spec, granularity=granularity)
    return Rounded(spec, history=operand.history)


def _signs(product: Product, key: jax.Array | None) -> jax.Array:
    """Returns the signs of a transform."""
    if product.signs == "fixed":
        return jnp.asarray(FIXED_SIGNS, jnp.float32)
    assert key is not None
    return jax.random.rademacher(jax.random.fold_in(key, 0), (product.hadamard,), jnp.float32)


def multiplied(lhs: Any, rhs: Any, sizes: jax.Array | None = None) -> jax.Array:
    """Returns the product of two prepared operands, float32 [batch, kept of lhs, kept of rhs].

    With `sizes`, `lhs` is [1, rows, summed], and the rows of each group are multiplied by the
    matrix of the group, of `rhs` [groups, kept, summed]; the result is [1, rows, kept of rhs].
    """
    if not isinstance(lhs, QTensor) and not isinstance(rhs, QTensor):
        dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
        if sizes is None and lhs.shape[0] == 1:  # XLA merges transposes into products of matrices
            return jnp.matmul(lhs[0], rhs[0].T, preferred_element_type=jnp.float32)[None]
    in_blocks = sizes is None and all(map(has_blocks_exact_in_bfloat16, (lhs, rhs)))
    if in_blocks and not is_using("dot_general"):
        cuda = scaled_product if all(map(has_scaled_bytes, (lhs, rhs))) else exact_product
        return lax.platform_dependent(lhs, rhs, cpu=_in_float32, cuda=cuda, default=exact_product)
    if sizes is None:
        return _multiplied(lhs, rhs)
    rows, matrices = lhs.reshape(*lhs.shape[1:]), rhs.transpose(0, 2, 1)
    return ragged_dot(rows, matrices, sizes, preferred_element_type=jnp.float32)[None]


def _multiplied(lhs: Any, rhs: Any) -> jax.Array:
    """Returns a product as jqx chooses to compute it."""
    return dot_general(lhs, rhs, SUM_LAST, preferred_element_type=jnp.float32)


def _in_float32(*operands: QTensor) -> jax.Array:
    """Returns a product of dequantized operands, for which CPUs have the fastest instructions."""
    lhs, rhs = (q.astype(jnp.float32).dequantize() for q in operands)
    return lax.dot_general(lhs, rhs, SUM_LAST, preferred_element_type=jnp.float32)


def layer(
    x: jax.Array,
    w: jax.Array,
    products: Products,
    key: jax.Array | None,
    sizes: jax.Array | None = None,
    histories: Histories | None = None,
    turned: tuple[bool, bool] = (False, False),
) -> jax.Array:
    """Returns `x w`, whose derivative computes `dgrad` and `wgrad` on rounded operands.

    What is kept for the backward pass is `w` and `x` in the form in which it multiplies them; or,
    if it rounds what the forward product has rounded, the codes of that product.

    Args:
      x: [batch, rows, inputs], float.
      w: [batch, outputs, inputs], float.
      products: how the three products are computed.
      key: a random key, if one of them draws random numbers.
      sizes: how many rows each matrix multiplies, in a product of groups of rows: then `x` is
        [1, rows, inputs], and `w` is [groups, outputs, inputs].
      histories: for delayed scales; their gradients are the histories after this step.
      turned: whether `x` and `w` are transposes of what is in memory.
    """
    x, w = jnp.asarray(x), jnp.asarray(w)  # constants of a function may be arrays of NumPy
    return _layer(x, w, key, sizes, histories or {}, products, turned)


Turned = tuple[bool, bool]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _layer(
    x: Any, w: Any, key: Any, sizes: Any, histories: Histories, products: Products, turned: Turned
) -> jax.Array:
    return _forward(x, w, key, sizes, histories, products, turned)[0]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("array",), meta_fields=("dtype",))
@dataclasses.dataclass(frozen=True)
class _Bits:
    """An array that is kept for the backward pass; floats of 8 bits as integers. XLA on CPU
    computes with such floats in float16, even where a scan stacks what its steps keep.
    """

    array: jax.Array
    dtype: jnp.dtype

    @classmethod
    def of(cls, x: jax.Array) -> "_Bits":
        is_tiny = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits == 8
        return cls(lax.bitcast_convert_type(x, jnp.uint8) if is_tiny else x, x.dtype)

    def codes(self) -> jax.Array:
        """Returns the array as it was."""
        same = self.array.dtype == self.dtype
        return self.array if same else lax.bitcast_convert_type(self.array, self.dtype)


def _forward(
    x: Any, w: Any, key: Any, sizes: Any, histories: Histories, products: Products, turned: Turned
) -> tuple[jax.Array, Any]:
    """Returns the result, and what the backward pass needs."""
    keys = _keys(key)
    operands = {"x": x, "w": w}
    forward = [
        prepared(a, products.forward, i, keys[0], histories.get(name), turned[i])
        for i, (name, a) in enumerate(operands.items())
    ]
    forward = [_stored(a) if _is_kept(products, i) else a for i, a in enumerate(forward)]
    kept = tuple(
        forward[i] if _is_kept(products, i) else _turned(a, products, i, keys, histories, turned)
        for i, a in enumerate((x, w))
    )
    largest = {name: largest_magnitude(a) for name, a in operands.items() if name in histories}
    out = multiplied(forward[0], forward[1], sizes)
    like = [jnp.zeros((0, *a.shape), a.dtype) for a in (x, w)]  # the shapes and the dtypes
    return (
        out.astype(jnp.promote_types(x.dtype, w.dtype)),
        (jax.tree.map(_Bits.of, kept), keys, sizes, histories, largest, like),
    )


def _backward(products: Products, turned: Turned, residuals: Any, dy: jax.Array) -> Any:
    """Returns the gradients of both operands, and the new histories."""
    kept, keys, sizes, histories, largest, like = residuals
    kept = jax.tree.map(_Bits.codes, kept, is_leaf=lambda x: isinstance(x, _Bits))

    def multiplied_again(i: int, a: Any) -> Any:
        """Returns `x` or `w` as the backward pass multiplies it, from what was kept."""
        if _is_transpose(products, i):
            return swap_axes(a)
        if products.backward_from == "float":
            return a
        values = _unrotated(a, like[i], products.forward, keys[0])
        return _turned(values, products, i, keys, histories, turned)

    x, w = (multiplied_again(i, a) for i, a in enumerate(kept))
    history = histories.get("dy")
    largest = {**largest, "dy": largest_magnitude(dy)} if "dy" in histories else largest
    dx = multiplied(prepared(dy, products.dgrad, 0, keys[2], history), w, sizes)
    dy = prepared(dy.swapaxes(1, 2), products.wgrad, 1, keys[1], history, is_turned=True)
    if sizes is not None:
        dw = _summed_in_groups(dy, x, sizes)
    else:  # in the order of `w` in memory
        dw = multiplied(x, dy).swapaxes(1, 2) if turned[1] else multiplied(dy, x)
    new = {name: remembered(histories[name], largest[name]) for name in histories}
    return dx.astype(like[0].dtype), dw.astype(like[1].dtype), None, None, new


_layer.defvjp(_forward, _backward)


def _turned(
    a: jax.Array,
    products: Products,
    i: int,
    keys: Sequence[Any],
    histories: Histories,
    turned: Turned,
) -> Any:
    """Returns `x` as wgrad multiplies it, or `w` as dgrad does."""
    product, index = ((products.wgrad, 0), (products.dgrad, 1))[i]
    history = histories.get("xw"[i])
    return prepared(a.swapaxes(1, 2), product, index, keys[1 + i], history, not turned[i])


def _summed_in_groups(dy: Any, x: Any, sizes: jax.Array) -> jax.Array:
    """Returns the sums of `dy x` over the rows of each group, float32 [groups, outputs, inputs].

    Scales of rows differ within a group, and a block of rows may lie in two groups. So the operands
    are rounded, and multiplied in float.
    """
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1,)), ((), ())),
        lhs_ragged_dimensions=[1],
        rhs_group_dimensions=[],
    )
    lhs, rhs = (
        (a.dequantize() if isinstance(a, QTensor) else a).astype(jnp.float32)[0] for a in (dy, x)
    )
    return lax.ragged_dot_general(
        lhs,
        rhs,
        sizes,
        ragged_dot_dimension_numbers=numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _keys(key: jax.Array | None) -> Sequence[Any]:
    """Returns the keys of the forward product, of wgrad and of dgrad."""
    return (None, None, None) if key is None else tuple(jax.random.split(key, 3))


def _is_kept(products: Products, i: int) -> bool:
    """Whether the backward pass reads the codes of the forward pass, of `x` or of `w`."""
    return products.backward_from == "rounded" or _is_transpose(products, i)


def _stored(a: Any) -> Any:
    """Returns an operand whose codes are stored as codes for the backward pass."""
    return dataclasses.replace(a, values=as_stored(a.values)) if isinstance(a, QTensor) else a


def _is_transpose(products: Products, i: int) -> bool:
    """Whether `x`, or `w`, has the same codes in the backward pass, with its axes exchanged: with
    one scale for all of it, or in blocks that are as high as they are wide.
    """
    product, index = ((products.wgrad, 0), (products.dgrad, 1))[i]
    first, second = products.forward.operands[i], product.operands[index]
    if products.forward.hadamard or product.hadamard or first != second:
        return False
    if isinstance(first, np.dtype) or first.rounding != "nearest":
        return False
    spec = first.spec.resolve(3, (0, 1), stacked=(0,))
    scales = spec.granularity.groups((1, _ANY, _ANY)).scale_shape
    return scales[1] == scales[2]


def _unrotated(q: QTensor, like: jax.Array, product: Product, key: Any) -> jax.Array:
    """Returns the values that the forward product multiplied, as the operand that it was given."""
    values = q.dequantize()
    if product.hadamard:
        matrix = rotated(jnp.eye(product.hadamard)[None], product.hadamard, _signs(product, key))
        blocks = values.reshape(*values.shape[:-1], -1, product.hadamard)
        values = (blocks @ matrix[0].T).reshape(values.shape)
    return values[..., : like.shape[-1]].astype(like.dtype)
