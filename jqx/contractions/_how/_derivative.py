"""Derivatives of products that are computed in another way than they are differentiated."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...tensor import QTensor


def with_derivative(
    product: Callable[[Any, Any], Any], linear: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    """Gives a product of an array and a QTensor the derivative of another function, which is linear
    in the array and in the scale. Converted codes are not stored for the backward pass.
    """
    function = jax.custom_jvp(product)
    linear = jax.checkpoint(linear)

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (x, q), (dx, dq) = primals, tangents
        y = function(x, q)
        dy = jnp.zeros_like(y)
        if not _is_zero(dx):
            dy = dy + linear(dx, q)
        ds = _of_scale(q.scale, dq.scale)
        if ds is not None:
            dy = dy + linear(x, dataclasses.replace(q, scale=ds))
        return y, dy

    return function


def _of_scale(scale: Any, tangent: Any) -> Any:
    """Returns the tangent of a scale, or of the real values of a quantized scale; `None` if it is
    zero.
    """
    leaves, structure = jax.tree.flatten(tangent, is_leaf=_is_zero)
    if all(_is_zero(x) or x.dtype == jax.dtypes.float0 for x in leaves):
        return None
    if not isinstance(scale, QTensor):
        return tangent
    known = [_instantiated(x) for x in leaves]
    _, made = jax.jvp(lambda s: s.dequantize(), (scale,), (structure.unflatten(known),))
    return made


def _instantiated(tangent: Any) -> Any:
    if not _is_zero(tangent):
        return tangent
    aval = tangent.aval
    zeros = np.zeros if aval.dtype == jax.dtypes.float0 else jnp.zeros
    return zeros(aval.shape, aval.dtype)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)
