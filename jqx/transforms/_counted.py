"""Values of which it is known how much their elements count: as the rows of a batch that they are
of, by the weight of an observer.
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
    """An array that depends on a batch. What parameters alone have made is an array as it is.

    Attributes:
      value: the array.
      counts: how much its elements count, float32, of its rank, size 1 where all along an axis
        count alike, infinite where nothing of a batch has reached them; `None` where it is not
        known.
      lost: why it is not known.
    """

    value: Any
    counts: Any
    lost: str = ""

    @property
    def is_known(self) -> bool:
        """Whether it is known how much its elements count."""
        return self.counts is not None


class Lost(Exception):
    """Raised where it is not known how much the elements of a value count that a loop carries, and
    before its first step it is.

    Attributes:
      why: it is not known.
      place: of the value among those that are carried.
    """

    place: int = -1

    def __init__(self, why: str):
        super().__init__(why)
        self.why = why


def value_of(x: Any) -> Any:
    """Returns a value as it is."""
    return x.value if isinstance(x, Counted) else x


def is_counted(x: Any) -> bool:
    """Whether something is said of how much the elements of a value count."""
    return isinstance(x, Counted)


def counts_of(x: Any) -> jax.Array:
    """Returns how much each element of a value counts, of its shape."""
    value = value_of(x)
    known = is_counted(x) and x.is_known
    counts = x.counts if known else jnp.full((1,) * jnp.ndim(value), jnp.inf, jnp.float32)
    return jnp.broadcast_to(counts, jnp.shape(value))


def opened(x: Any) -> Any:
    """Returns a value with how much each of its elements counts, where that may be known: what
    loops carry has one form.
    """
    if is_coded(x) or (is_counted(x) and not x.is_known):
        return x
    value = value_of(x)
    return Counted(value, _compat.vary(counts_of(x), _compat.varies_along(value)))


def spread(x: Any) -> Any:
    """Returns a value with how much each of its elements counts, where something is said of it:
    it is split along the axes of the value.
    """
    return opened(x) if is_counted(x) else x


def common(forms: Sequence[Any]) -> Any:
    """Returns the form in which all of several values of one shape can be said."""
    lost = next((x for x in forms if is_counted(x) and not x.is_known), None)
    known = next(filter(is_counted, forms), None)
    if lost is not None or known is None:
        return forms[0] if lost is None else lost
    shape = jax.ShapeDtypeStruct(jnp.shape(known.value), jnp.float32)
    return Counted(known.value, shape)


def alike(values: Sequence[Any]) -> list[Any]:
    """Returns values of one shape, each in the form in which all of them can be said."""
    form = common(values)
    return [counted_like(x, form) for x in values] if is_counted(form) else list(values)


def counted_like(x: Any, like: Counted) -> Counted:
    """Returns a value in the form of another."""
    if not like.is_known:
        return Counted(value_of(x), None, like.lost)
    if is_counted(x) and not x.is_known:
        raise Lost(x.lost)
    return opened(x)
