"""QTensor as a pytree: which of its fields are leaves, and which are static."""

import functools
from typing import Any

import jax

from ._export import make_exportable

_STATIC = ("qtype", "dtype", "blocks", "layout")
_LEAVES = ("values", "scale", "zero_point")
_MORE = ("offset", "order")
"""Leaves that few arrays have: without both of them, a QTensor has three children."""


def register(cls: type) -> None:
    """Registers QTensor with JAX and with `jax.export`. (Its file imports this one.)"""

    unflatten = functools.partial(rebuilt, cls)
    jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, unflatten, flatten)
    make_exportable(cls)


def rebuilt(cls: type, static: Any, leaves: Any) -> Any:
    """Rebuilds without checks: a tree may hold anything in place of its arrays."""
    q = object.__new__(cls)
    leaves = (*leaves, *(None,) * (len(_LEAVES) + len(_MORE) - len(leaves)))
    for name, value in zip((*_LEAVES, *_MORE, *_STATIC), (*leaves, *static), strict=True):
        object.__setattr__(q, name, value)
    return q


def flatten(q: Any) -> tuple[tuple, tuple]:
    """Returns the leaves of a QTensor, and its static fields."""
    names = _names(q)
    return tuple(getattr(q, name) for name in names), tuple(getattr(q, n) for n in _STATIC)


def _names(q: Any) -> tuple[str, ...]:
    return _LEAVES if q.offset is None and q.order is None else (*_LEAVES, *_MORE)


def _flatten_with_keys(q: Any) -> tuple[tuple, tuple]:
    leaves, static = flatten(q)
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in _names(q))
    return tuple(zip(keys, leaves, strict=True)), static
