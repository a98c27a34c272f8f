"""The leaves to write, by name: from nested dicts, or from an open archive."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from .._checks import require_that
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
        require_that(
            name not in leaves,
            error=ValueError,
            function="interop.write",
            problem=f"the name {name!r} exists twice.",
            given="two leaves whose joined keys are this name",
            expected="a name for each tensor",
            mend="rename one of them.",
        )
        leaves[name] = Leaf(leaf, partial(_same, leaf))
    return leaves


def _same(x: Any) -> Any:
    return x


def _walk(tree: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            require_that(
                isinstance(key, str),
                error=TypeError,
                function="interop.write",
                problem=f"a key of the dict at {'.'.join(keys)!r} is not a string.",
                given=f"a key of type {type(key).__name__}",
                expected="names of tensors, or parts of them",
                mend="use strings as keys, for example with jqx.interop.tree.",
            )
            yield from _walk(item, (*keys, key))
        return
    name = ".".join(keys)
    known = isinstance(tree, (QTensor, jax.Array, np.ndarray))
    known = known and not isinstance(tree, np.ma.MaskedArray)
    require_that(
        known and keys,
        error=TypeError,
        function="interop.write",
        problem=f"there is no tensor at {name!r}." if keys else "`tree` is not a dict of tensors.",
        given=f"an object of type {type(tree).__name__}",
        expected="arrays and QTensors, in dicts",
        mend="pass for example quantized.params by the names of the checkpoint; see "
        "jqx.interop.tree.",
    )
    require_that(
        isinstance(tree, QTensor) or stored_dtype(tree.dtype) is not None,
        error=ValueError,
        function="interop.write",
        problem=f"the array {name!r} has a dtype that files cannot hold.",
        given=str(getattr(tree, "dtype", "")),
        expected="numbers of JAX, or bool",
        mend="convert it.",
    )
    yield name, tree
