"""The leaves to write, by name: from nested dicts, or from an open archive."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from .._errors import fail
from ..tensor import QTensor
from ._archive import Archive
from ._safetensors import stored_dtype


class Leaf(NamedTuple):
    """A leaf of the tree: abstract, or itself, and a function that reads it."""

    spec: Any
    read: Callable[[], Any]


def leaves_of(tree: Any) -> dict[str, Leaf]:
    """Returns the leaves of a tree by name; a dict of `Leaf`s is returned unchanged."""
    if isinstance(tree, Mapping) and tree and all(isinstance(x, Leaf) for x in tree.values()):
        return dict(tree)
    if isinstance(tree, Archive):
        return {path: Leaf(tree.spec(path), partial(tree.read, path)) for path in tree.paths}
    leaves: dict[str, Leaf] = {}
    for name, leaf in _walk(tree, ()):
        if name in leaves:
            raise fail(
                "interop.write",
                f"the name {name!r} exists twice.",
                given="two leaves whose joined keys are this name",
                expected="a name for each tensor",
                fix="rename one of them.",
            )
        leaves[name] = Leaf(leaf, partial(_same, leaf))
    return leaves


def _same(x: Any) -> Any:
    return x


def _walk(tree: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            if not isinstance(key, str):
                raise fail(
                    "interop.write",
                    f"a key of the dict at {'.'.join(keys)!r} is not a string.",
                    given=f"a key of type {type(key).__name__}",
                    expected="names of tensors, or parts of them",
                    fix="use strings as keys, for example with jqx.interop.tree.",
                    error=TypeError,
                )
            yield from _walk(item, (*keys, key))
        return
    name = ".".join(keys)
    known = isinstance(tree, (QTensor, jax.Array, np.ndarray))
    known = known and not isinstance(tree, np.ma.MaskedArray)
    if not (known and keys):
        raise fail(
            "interop.write",
            f"there is no tensor at {name!r}." if keys else "`tree` is not a dict of tensors.",
            given=f"an object of type {type(tree).__name__}",
            expected="arrays and QTensors, in dicts",
            fix="pass for example quantized.params by the names of the checkpoint; see "
            "jqx.interop.tree.",
            error=TypeError,
        )
    if not isinstance(tree, QTensor) and stored_dtype(tree.dtype) is None:
        raise fail(
            "interop.write",
            f"the array {name!r} has a dtype that files cannot hold.",
            given=str(getattr(tree, "dtype", "")),
            expected="numbers of JAX, or bool",
            fix="convert it.",
        )
    yield name, tree
