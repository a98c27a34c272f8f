"""A contraction on integers, with the gradient of the dequantized contraction."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from .. import _compat
from .._compat import Eqn
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

    @jax.custom_vjp
    def contract(real: Sequence[jax.Array], codes: Sequence[Any], others: Sequence[Any]) -> Any:
        return CONTRACTIONS[eqn.primitive.name].apply(eqn, [*codes, *others])

    def forward(real: Sequence[jax.Array], codes: Sequence[Any], others: Sequence[Any]) -> Any:
        return contract(real, codes, others), (codes, others)

    def backward(kept: Any, cotangent: jax.Array) -> Any:
        codes, others = kept
        rounded = [x.dequantize() if isinstance(x, QTensor) else x for x in codes]
        family = CONTRACTIONS[eqn.primitive.name]
        found = family.gradients(eqn, [*rounded, *others], cotangent, dtype)
        return [g.astype(x.dtype) for g, x in zip(found, rounded, strict=True)], None, None

    contract.defvjp(forward, backward)
    parts = real[:count], codes[:count], real[count:]
    return contract(*_compat.vary_alike(*map(list, parts)))
