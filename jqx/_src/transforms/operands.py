"""The forms of an operand while a function is evaluated: codes, with or without float values, and
values with a count for each element. Codes are those of a weight of the plan, or quantized state: a
QTensor that the caller passed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat
from ..contractions.cache import is_like, quantized_like
from ..gradients.estimators import straight_through
from ..tensor.qtensor import QTensor
from ..tensor.segments import Segments


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


def as_like(x: Any, example: Any, dense: Callable[[Any], jax.Array]) -> Any:
    """Returns a value in the form of another: an array made by `dense`, or quantized to the format
    of the other.
    """
    if not is_coded(example):
        return dense(x) if is_coded(x) else x
    if type(x) is type(example) and is_like(codes_of(x), codes_of(example)):
        return dataclasses.replace(x, is_state=example.is_state) if isinstance(x, Trainable) else x
    real = dense(x) if is_coded(x) else x
    return with_codes(quantized_like(codes_of(example), real), lambda: real, [example])


# Values with a count for each element: how much the rows of the batch that it comes from count, by
# the weight of an observer.


@partial(jax.tree_util.register_dataclass, data_fields=("value", "counts"), meta_fields=("lost",))
@dataclasses.dataclass(frozen=True)
class Counted:
    """An array that depends on a batch. Values made of parameters alone are plain arrays.

    Attributes:
      value: the array.
      counts: how much its elements count, float32, with its rank and size 1 along an axis whose
        elements all count the same; infinite for elements that no value of a batch has reached.
        `None` if it is unknown.
      lost: why it is unknown.
    """

    value: Any
    counts: Any
    lost: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the counts of the elements are known."""
        return self.counts is not None


class Lost(Exception):
    """Raised if the counts of a value that a loop carries are known before its first step, but not
    after a step.

    Attributes:
      reason: the reason that they are unknown.
      index: index of the value among those that are carried.
    """

    index: int = -1

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def value_of(x: Any) -> Any:
    """Returns the plain value."""
    return x.value if isinstance(x, Counted) else x


def is_counted(x: Any) -> bool:
    """Whether a value is a `Counted`, with known or unknown counts."""
    return isinstance(x, Counted)


def counts_of(x: Any) -> jax.Array:
    """Returns how much each element of a value counts, in the shape of the value."""
    value = value_of(x)
    has_counts = is_counted(x) and x.is_known
    counts = x.counts if has_counts else jnp.full((1,) * jnp.ndim(value), jnp.inf, jnp.float32)
    return jnp.broadcast_to(counts, jnp.shape(value))


def opened(x: Any) -> Any:
    """Returns a value with a count for each of its elements, if they can be known: all values that
    a loop carries have this form.
    """
    if is_coded(x) or (is_counted(x) and not x.is_known):
        return x
    value = value_of(x)
    return Counted(value, compat.vary(counts_of(x), compat.varies_along(value)))


def spread(x: Any) -> Any:
    """Returns a `Counted` value with a count for each of its elements, so that both can be split
    along the axes of the value. Other values are returned unchanged.
    """
    return opened(x) if is_counted(x) else x


def common(forms: Sequence[Any]) -> Any:
    """Returns the form in which all of several values of one shape can be expressed."""
    unknown = next((x for x in forms if is_counted(x) and not x.is_known), None)
    counted = next(filter(is_counted, forms), None)
    if unknown is not None or counted is None:
        return forms[0] if unknown is None else unknown
    shape = jax.ShapeDtypeStruct(jnp.shape(counted.value), jnp.float32)
    return Counted(counted.value, shape)


def alike(values: Sequence[Any]) -> list[Any]:
    """Returns values of one shape, all in the form in which each can be expressed."""
    form = common(values)
    return [counted_like(x, form) for x in values] if is_counted(form) else list(values)


def counted_like(x: Any, example: Counted) -> Counted:
    """Returns a value in the form of another."""
    if not example.is_known:
        return Counted(value_of(x), None, example.lost)
    if is_counted(x) and not x.is_known:
        raise Lost(x.lost)
    return opened(x)
