"""Finds which argument of a function says what is padding."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..tensor._shared import has_lazy
from ..transforms._shared import arrays_of, inputs_of, placed
from ._hoisted import Own

_NEAR = 1e-5
"""How much results may differ, relative to the largest, if padding has other values."""


class Padding(NamedTuple):
    """Which array among the inputs says what is padding: the `weight` of an algorithm.

    Attributes:
      place: its number among the leaves of the inputs.
      name: its path, as text.
    """

    place: int
    name: str

    def __call__(self, *inputs: Any) -> Any:
        """Returns how much rows count: those of padding do not."""
        return jax.tree.leaves(inputs)[self.place]

    def __repr__(self) -> str:
        return "padding"

    def __str__(self) -> str:
        return f"rows where input {self.name} is 0 are padding, and left out"


def padding_of(own: Own, batches: Iterable[Any]) -> Padding | None:
    """Returns the array that says what is padding, if one does.

    An array of zeros and ones, [rows, length], is the mask if results do not depend on the values
    of other arrays that begin with its shape where it is 0, and depend on them where it is 1. Each
    array is tried once, with the first batch in which it has both.

    Args:
      own: the function and its parameters.
      batches: the batches to look at.
    """
    if has_lazy(own.params):
        return None
    tried: set[int] = set()
    for inputs in map(inputs_of, batches):
        paths, _ = jax.tree_util.tree_flatten_with_path(tuple(inputs))
        shapes = [np.shape(x)[:2] for _, x in paths]
        for place, (path, x) in enumerate(paths):
            if place in tried or shapes.count(shapes[place]) < 2 or not is_mask(x):
                continue
            if _is_padding(own, inputs, place):
                return Padding(place, jax.tree_util.keystr(path, simple=True, separator="/"))
            tried.add(place)
    return None


def is_mask(x: Any) -> bool:
    """Whether an array holds zeros and ones, [rows, length], and both."""

    def has_no_others(x: np.ndarray) -> bool:
        return bool(((x == 0) | (x == 1)).all())

    if np.ndim(x) != 2 or not hasattr(x, "dtype") or not has_no_others(np.asarray(x[:1])):
        return False
    x = np.asarray(x)
    return has_no_others(x) and bool((x == 0).any() and (x == 1).any())


def _is_padding(own: Own, inputs: Sequence[Any], place: int) -> bool:
    """Whether results depend on what other arrays hold where a mask is 1, and nowhere else."""
    values, tree = jax.tree.flatten(inputs)
    mask = np.asarray(values[place]).astype(bool)

    def changed(where: np.ndarray) -> list[Any]:
        """Returns arrays whose rows in some places are those of others."""
        sources = np.random.default_rng(0).permutation(
            np.resize(np.flatnonzero(~where), where.size)
        )

        def of(i: int, x: Any) -> Any:
            if i == place or np.shape(x)[:2] != mask.shape or is_mask(x):
                return x
            rows = np.asarray(x).reshape(where.size, -1)
            return np.where(where.reshape(-1, 1), rows[sources], rows).reshape(x.shape)

        return [of(i, x) for i, x in enumerate(values)]

    _, filled = arrays_of((own.params, inputs))
    run = jax.jit(lambda arrays: jax.tree.leaves(own.f(*placed(own.places, *filled(arrays)))))
    results = [
        run(arrays_of((own.params, tree.unflatten(x)))[0])
        for x in (values, changed(~mask), changed(mask))
    ]

    def is_same(others: Sequence[Any]) -> bool:
        return all(_is_near(a, b, mask) for a, b in zip(results[0], others, strict=True))

    return is_same(results[1]) and not is_same(results[2])


def _is_near(a: Any, b: Any, mask: np.ndarray) -> bool:
    """Whether two results are the same, where they are not those of padding."""
    kind = np.float64 if jnp.issubdtype(a.dtype, jnp.inexact) else None
    a, b = (np.abs(x) if jnp.iscomplexobj(x) else np.asarray(x, kind) for x in (a, b))
    if a.shape[:2] == mask.shape:
        a, b = a[mask], b[mask]
    if kind is None:
        return np.array_equal(a, b)
    most = np.abs(a[np.isfinite(a)]).max(initial=0)
    return np.allclose(a, b, rtol=0, atol=_NEAR * most, equal_nan=True)
