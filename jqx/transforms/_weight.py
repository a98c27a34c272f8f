"""The forms of a quantized array while a function is evaluated: codes, with or without float
values. It is a weight of the plan, or quantized state: a QTensor that the caller passed.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from ..contractions._shared import is_like, quantized_like
from ..gradients import straight_through
from ..tensor import QTensor, Segments


@partial(jax.tree_util.register_dataclass, data_fields=("codes", "real"), meta_fields=("is_state",))
@dataclasses.dataclass(frozen=True)
class Trainable:
    """A quantized array in training.

    Attributes:
      codes: the operand of contractions on integers.
      real: the dequantized values, through which gradients pass.
      is_state: whether the caller passed codes, and receives codes if it is a result.
    """

    codes: QTensor
    real: jax.Array
    is_state: bool = False

    @classmethod
    def state(cls, q: QTensor) -> "Trainable":
        """Quantized state that the caller passed."""
        return cls(q, q.dequantize(), is_state=True)


def is_coded(x: Any) -> bool:
    """Whether a value represents an array without being one: it is quantized, or in parts."""
    return isinstance(x, (QTensor, Trainable, Segments))


def codes_of(x: Any) -> Any:
    """Returns the codes of a quantized array; arrays are unchanged."""
    return x.codes if isinstance(x, Trainable) else x


def real_of(x: Any) -> Any:
    """Returns the dequantized values of a quantized array; other values are unchanged."""
    if isinstance(x, QTensor):
        return x.dequantize()
    return x.real if isinstance(x, Trainable) else x


def map_codes(f: Callable[[QTensor], Any], x: Any, real: Any = None) -> Any:
    """Applies `f` to the codes of a quantized array. Its float values, if any, stay, or are
    replaced by `real`.
    """
    if not isinstance(x, Trainable):
        return f(x)
    return dataclasses.replace(x, codes=f(x.codes), real=x.real if real is None else real)


def with_codes(codes: Any, real: Callable[[], jax.Array], operands: Any) -> Any:
    """Returns the result of an operation on operands: only its codes, or, if an operand has float
    values with its codes, both. `real` computes the result in float, and gives the gradient.
    """
    trainable = [x for x in operands if isinstance(x, Trainable)]
    if not trainable or not isinstance(codes, QTensor):
        return codes
    is_state = any(x.is_state for x in trainable)
    return Trainable(codes, straight_through(codes.dequantize(), real()), is_state)


def as_like(x: Any, like: Any, dense: Callable[[Any], jax.Array]) -> Any:
    """Returns a value in the form of another: an array made by `dense`, or quantized to the format
    of the other.
    """
    if not is_coded(like):
        return dense(x) if is_coded(x) else x
    if type(x) is type(like) and is_like(codes_of(x), codes_of(like)):
        return dataclasses.replace(x, is_state=like.is_state) if isinstance(x, Trainable) else x
    real = dense(x) if is_coded(x) else x
    return with_codes(quantized_like(codes_of(like), real), lambda: real, [like])
