"""Values with a count for each element: how much the rows of the batch that it comes from count, by
the weight of an observer.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from ._weight import is_coded


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
      why: the reason that they are unknown.
      place: index of the value among those that are carried.
    """

    place: int = -1

    def __init__(self, why: str):
        super().__init__(why)
        self.why = why


def value_of(x: Any) -> Any:
    """Returns the plain value."""
    return x.value if isinstance(x, Counted) else x


def is_counted(x: Any) -> bool:
    """Whether a value is a `Counted`, with known or unknown counts."""
    return isinstance(x, Counted)


def counts_of(x: Any) -> jax.Array:
    """Returns how much each element of a value counts, in the shape of the value."""
    value = value_of(x)
    known = is_counted(x) and x.is_known
    counts = x.counts if known else jnp.full((1,) * jnp.ndim(value), jnp.inf, jnp.float32)
    return jnp.broadcast_to(counts, jnp.shape(value))


def opened(x: Any) -> Any:
    """Returns a value with a count for each of its elements, if they can be known: all values that
    a loop carries have this form.
    """
    if is_coded(x) or (is_counted(x) and not x.is_known):
        return x
    value = value_of(x)
    return Counted(value, _compat.vary(counts_of(x), _compat.varies_along(value)))


def spread(x: Any) -> Any:
    """Returns a `Counted` value with a count for each of its elements, so that both can be split
    along the axes of the value. Other values are returned unchanged.
    """
    return opened(x) if is_counted(x) else x


def common(forms: Sequence[Any]) -> Any:
    """Returns the form in which all of several values of one shape can be expressed."""
    lost = next((x for x in forms if is_counted(x) and not x.is_known), None)
    known = next(filter(is_counted, forms), None)
    if lost is not None or known is None:
        return forms[0] if lost is None else lost
    shape = jax.ShapeDtypeStruct(jnp.shape(known.value), jnp.float32)
    return Counted(known.value, shape)


def alike(values: Sequence[Any]) -> list[Any]:
    """Returns values of one shape, all in the form in which each can be expressed."""
    form = common(values)
    return [counted_like(x, form) for x in values] if is_counted(form) else list(values)


def counted_like(x: Any, like: Counted) -> Counted:
    """Returns a value in the form of another."""
    if not like.is_known:
        return Counted(value_of(x), None, like.lost)
    if is_counted(x) and not x.is_known:
        raise Lost(x.lost)
    return opened(x)
