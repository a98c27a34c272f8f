"""The three products of a layer, each with operands that are rounded for it.

    forward:  y  = x w        sums over the inputs
    dgrad:    dx = dy w       sums over the outputs
    wgrad:    dw = x dy       sums over the rows

for x [batch, rows, inputs], w [batch, outputs, inputs] and y [batch, rows, outputs].
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import QTensor, dot_general, ragged_dot
from ..checks import check_instance
from ..errors import fail
from .operands import (
    FIXED_SIGNS,
    Operand,
    OperandLike,
    Rounded,
    as_operand,
    padded,
    quantized,
    rotated,
)

Signs = Literal["random", "fixed"]

_SUM_LAST = (((2,), (2,)), ((0,), (0,)))
"""The contraction of all products: the last axis of both operands, for each index of the first."""

_ANY = 1 << 20
"""A size that all blocks divide."""

_LEAST_EDEN = 32
"""The least block of the transform at which EDEN is unbiased: measured, 16 is not."""


@dataclasses.dataclass(frozen=True, init=False)
class Product:
    """How both operands of a product are rounded.

    Attributes:
      lhs: the first operand; a `Rounded`, a `QSpec`, a scheme, or a float dtype.
      rhs: the second operand.
      hadamard: the size of the blocks of a Hadamard transform along the summed axis of both
        operands, which cancels in the product; 0 means none.
      signs: its signs: `"random"`, drawn in each step, or `"fixed"`, those of NVIDIA's recipe.
    """

    lhs: Operand
    rhs: Operand
    hadamard: int
    signs: Signs

    def __init__(
        self, lhs: OperandLike, rhs: OperandLike, hadamard: int = 0, signs: Signs = "random"
    ) -> None:
        object.__setattr__(self, "lhs", as_operand("recipes.Product", "lhs", lhs))
        object.__setattr__(self, "rhs", as_operand("recipes.Product", "rhs", rhs))
        object.__setattr__(self, "hadamard", hadamard)
        object.__setattr__(self, "signs", signs)
        has_eden = any(isinstance(x, Rounded) and x.rounding == "eden" for x in self.operands)
        is_power = type(self.hadamard) is int and self.hadamard & (self.hadamard - 1) == 0
        if not is_power or self.hadamard < 0:
            problem = f"`hadamard` is not a power of two: {self.hadamard!r}."
            raise fail("recipes.Product", problem, fix="pass 16, 32, 64 or 128; or 0 for none.")
        if self.signs not in ("random", "fixed"):
            problem = f"`signs` is unknown: {self.signs!r}."
            raise fail("recipes.Product", problem, fix="pass 'random' or 'fixed'.")
        if has_eden and self.hadamard < _LEAST_EDEN:
            problem = "EDEN needs a Hadamard transform in blocks of 32 or more: it is biased below."
            facts = f"hadamard == {self.hadamard}"
            raise fail("recipes.Product", problem, given=facts, fix="pass hadamard=128, or 32.")
        if has_eden and self.signs != "random":
            problem = "EDEN needs random signs: it is biased for each fixed transform."
            raise fail("recipes.Product", problem, fix='pass signs="random".')
        if self.signs == "fixed" and self.hadamard not in (0, len(FIXED_SIGNS)):
            problem = f"there are 16 fixed signs, and blocks of {self.hadamard}."
            raise fail("recipes.Product", problem, fix='pass hadamard=16, or signs="random".')

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """Both operands."""
        return self.lhs, self.rhs

    @property
    def draws_signs(self) -> bool:
        """Whether its transform draws random numbers."""
        return bool(self.hadamard) and self.signs == "random"

    @property
    def needs_key(self) -> bool:
        """Whether the product draws random numbers."""
        rounded = [x for x in self.operands if isinstance(x, Rounded)]
        return self.draws_signs or any(x.needs_key for x in rounded)

    def __str__(self) -> str:
        names = [x.name if isinstance(x, np.dtype) else str(x) for x in self.operands]
        transform = f", hadamard {self.hadamard}" if self.hadamard else ""
        return " x ".join(names) + transform


def prepared(x: jax.Array, product: Product, index: int, key: jax.Array | None) -> Any:
    """Returns an operand as its product multiplies it: a QTensor, or an array.

    Args:
      x: [batch, kept, summed].
      product: the product.
      index: 0 for its first operand, 1 for its second.
      key: the key of the product; both operands get the same, so that their transform is the same.
    """
    operand = product.operands[index]
    size = product.hadamard
    if size:
        x = rotated(padded(x.astype(jnp.float32), size), size, _signs(product, key))
    if isinstance(operand, np.dtype):
        return x.astype(operand)
    own = None if key is None else jax.random.fold_in(key, 1 + index)
    return quantized(x, operand, own, size)


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
    if sizes is None:
        return dot_general(lhs, rhs, _SUM_LAST, preferred_element_type=jnp.float32)
    rows, matrices = lhs.reshape(*lhs.shape[1:]), rhs.transpose(0, 2, 1)
    return ragged_dot(rows, matrices, sizes, preferred_element_type=jnp.float32)[None]


ProductLike = Product | tuple[OperandLike, OperandLike]
"""What is given as a product: also a pair of operands."""


@dataclasses.dataclass(frozen=True, init=False)
class Products:
    """How the three products of a layer are computed in training.

    Attributes:
      forward: `x w`, activations times weights; a `Product`, or a pair of operands.
      dgrad: `dy w`, the gradient of the activations.
      wgrad: `x dy`, the gradient of the weights.
      backward_from: what `dgrad` and `wgrad` round: the operands as `"float"`, or as the forward
        product has `"rounded"` them, which is what the gradient of the rounded layer is.
    """

    forward: Product
    dgrad: Product
    wgrad: Product
    backward_from: Literal["float", "rounded"]

    def __init__(
        self,
        forward: ProductLike,
        dgrad: ProductLike,
        wgrad: ProductLike,
        backward_from: Literal["float", "rounded"] = "float",
    ) -> None:
        for name, value in (("forward", forward), ("dgrad", dgrad), ("wgrad", wgrad)):
            product = Product(*value) if isinstance(value, tuple) else value
            fix = "pass a Product, or a pair of operands."
            check_instance("recipes.Products", name, product, Product, fix=fix)
            object.__setattr__(self, name, product)
        object.__setattr__(self, "backward_from", backward_from)
        if self.backward_from not in ("float", "rounded"):
            problem = f"`backward_from` is unknown: {self.backward_from!r}."
            raise fail("recipes.Products", problem, fix="pass 'float' or 'rounded'.")

    @property
    def needs_key(self) -> bool:
        """Whether one of the products draws random numbers."""
        return any(x.needs_key for x in (self.forward, self.dgrad, self.wgrad))

    def __str__(self) -> str:
        names = ("forward", "dgrad", "wgrad")
        return "\n".join(f"{name:7}  {getattr(self, name)}" for name in names)


def layer(
    x: jax.Array,
    w: jax.Array,
    products: Products,
    key: jax.Array | None,
    sizes: jax.Array | None = None,
) -> jax.Array:
    """Returns `x w`, whose derivative computes `dgrad` and `wgrad` on rounded operands.

    What is kept for the backward pass is `w` and `x` in the form in which it multiplies them.

    Args:
      x: [batch, rows, inputs], float.
      w: [batch, outputs, inputs], float.
      products: how the three products are computed.
      key: a random key, if one of them draws random numbers.
      sizes: how many rows each matrix multiplies, in a product of groups of rows: then `x` is
        [1, rows, inputs], and `w` is [groups, outputs, inputs].
    """
    return _layer(x, w, key, sizes, products)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _layer(x: Any, w: Any, key: Any, sizes: Any, products: Products) -> jax.Array:
    return _forward(x, w, key, sizes, products)[0]


def _forward(x: Any, w: Any, key: Any, sizes: Any, products: Products) -> tuple[jax.Array, Any]:
    """Returns the result, and what the backward pass multiplies."""
    keys = _keys(key)
    forward = [prepared(a, products.forward, i, keys[0]) for i, a in enumerate((x, w))]
    kept = []
    for i, (a, product, index) in enumerate(((x, products.wgrad, 0), (w, products.dgrad, 1))):
        if _is_same(products.forward.operands[i], product.operands[index], product, products):
            kept.append(forward[i].transpose(0, 2, 1))
            continue
        is_rounded = products.backward_from == "rounded" and isinstance(forward[i], QTensor)
        source = _unrotated(forward[i], a, products.forward, keys[0]) if is_rounded else a
        kept.append(prepared(source.swapaxes(1, 2), product, index, keys[1 + i]))
    out = multiplied(forward[0], forward[1], sizes)
    like = jnp.zeros((), x.dtype), jnp.zeros((), w.dtype)
    return out.astype(jnp.promote_types(x.dtype, w.dtype)), (*kept, keys, sizes, like)


def _backward(products: Products, residuals: Any, dy: jax.Array) -> Any:
    """Returns the gradients of both operands."""
    x, w, keys, sizes, like = residuals
    dx = multiplied(prepared(dy, products.dgrad, 0, keys[2]), w, sizes)
    turned = prepared(dy.swapaxes(1, 2), products.wgrad, 1, keys[1])
    dw = multiplied(turned, x) if sizes is None else _summed_in_groups(turned, x, sizes)
    return dx.astype(like[0].dtype), dw.astype(like[1].dtype), None, None


_layer.defvjp(_forward, _backward)


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


def _is_same(first: Operand, second: Operand, product: Product, products: Products) -> bool:
    """Whether an operand has the same codes in its second product, with its axes exchanged: with
    one scale for all of it, or in blocks that are as high as they are wide.
    """
    if products.forward.hadamard or product.hadamard or first != second:
        return False
    if isinstance(first, np.dtype) or first.rounding != "nearest":
        return False
    spec = first.spec.resolve(3, (0, 1), stacked=(0,))
    scales = spec.granularity.groups((1, _ANY, _ANY)).scale_shape
    return scales[1] == scales[2]


def _unrotated(q: QTensor, x: jax.Array, product: Product, key: Any) -> jax.Array:
    """Returns the values that the forward product multiplied, in the form of the operand."""
    values = q.dequantize()
    if product.hadamard:
        matrix = rotated(jnp.eye(product.hadamard)[None], product.hadamard, _signs(product, key))
        blocks = values.reshape(*values.shape[:-1], -1, product.hadamard)
        values = (blocks @ matrix[0].T).reshape(values.shape)
    return values[..., : x.shape[-1]]
