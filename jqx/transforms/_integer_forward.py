"""A contraction on integers, with the gradient of the dequantized contraction."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import _compat
from .._compat import Eqn
from .._errors import fail
from ..tensor import QTensor
from .primitives import CONTRACTIONS


def integer_forward(
    eqn: Eqn,
    codes: Sequence[Any],
    real: Sequence[jax.Array],
    count: int,
    dtype: DTypeLike,
) -> jax.Array:
    """Evaluates a contraction of QTensors, or of QTensors and arrays.

    Args:
      eqn: the contraction.
      codes: the operands, as they are contracted.
      real: the same as arrays; gradients are with respect to the first `count` of them.
      count: number of operands that can be quantized; these come first.
      dtype: dtype of the operands of the contractions in the backward pass.
    """

    family = CONTRACTIONS[eqn.primitive.name]

    @jax.custom_vjp
    def contract(real: Sequence[jax.Array], codes: Sequence[Any], others: Sequence[Any]) -> Any:
        return family.apply(eqn, [*codes, *others])

    def forward(real: Sequence[jax.Array], codes: Sequence[Any], others: Sequence[Any]) -> Any:
        result = _differentiable_once(lambda real: family.apply(eqn, [*codes, *others]), dtype)
        return result(real), (codes, others)

    def backward(kept: Any, cotangent: jax.Array) -> Any:
        codes, others = kept
        rounded = [x.dequantize() if isinstance(x, QTensor) else x for x in codes]

        def gradients(cotangent: jax.Array) -> list[jax.Array]:
            found = family.gradients(eqn, [*rounded, *others], cotangent, dtype)
            return [g.astype(x.dtype) for g, x in zip(found, rounded, strict=True)]

        return _differentiable_once(gradients, dtype)(cotangent), None, None

    contract.defvjp(forward, backward)
    parts = real[:count], codes[:count], real[count:]
    return contract(*_compat.vary_alike(*map(list, parts)))


def _differentiable_once(f: Callable[[Any], Any], dtype: DTypeLike) -> Callable[[Any], Any]:
    """Returns a function of a first derivative that raises where it is differentiated again. Codes
    have no derivative, so the result would lack the terms of the weights and activations.
    """
    function = jax.custom_jvp(f)

    @function.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        raise fail(
            "simulate",
            "`backward` has no second derivatives.",
            given=f"backward={jnp.dtype(dtype).name} in a derivative of a gradient",
            expected="first derivatives in reverse mode, such as jax.grad",
            fix="leave out backward= there: jqx.simulate(f, plan, affines).",
            error=NotImplementedError,
        )

    return function
