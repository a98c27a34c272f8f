"""Results of traced methods: arrays, values, and modules of the graph that was passed in."""

import contextlib
import dataclasses
import functools
from collections import abc
from typing import Any

import jax
from flax import nnx

from .._errors import fail

Path = tuple[Any, ...]

LATER = (abc.Iterator, abc.AsyncIterator, abc.Coroutine, contextlib.AbstractContextManager)
"""Types that compute when they are used."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands for a module or a variable of a graph."""

    path: Path


def is_node(x: Any) -> bool:
    """Returns whether `x` is a module, a variable or another node of a graph."""
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def to_places(function: str, name: str, out: Any, graph: Any) -> Any:
    """Returns a result in which placeholders replace the nodes of `graph`."""

    def place(leaf: Any) -> Any:
        if not is_node(leaf):
            _check_runs_now(function, name, leaf)
            return leaf
        paths = [path for path, node in nnx.iter_graph(graph) if node is leaf]
        if not paths:
            raise fail(
                function,
                f"`{name}` returns a new {type(leaf).__name__}.",
                given=f"a new {type(leaf).__name__}",
                expected="arrays, or modules and variables that the model has",
                fix="call it on the float model, before jqx.nnx.quantize.",
            )
        return _Place(paths[0])

    return jax.tree.map(place, out, is_leaf=lambda x: is_node(x) or isinstance(x, LATER))


def from_places(out: Any, graph: Any) -> Any:
    """Inverts `to_places`, with the nodes of another graph of the same structure."""
    if not any(isinstance(leaf, _Place) for leaf in jax.tree.leaves(out)):
        return out
    nodes = {path: node for path, node in nnx.iter_graph(graph) if is_node(node)}
    return jax.tree.map(lambda leaf: nodes[leaf.path] if isinstance(leaf, _Place) else leaf, out)


def _check_runs_now(function: str, name: str, leaf: Any) -> None:
    held = [getattr(leaf, "__self__", None)]
    if isinstance(leaf, functools.partial):
        held += [leaf.func, leaf.args, leaf.keywords, getattr(leaf.func, "__self__", None)]
    for cell in getattr(leaf, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            held.append(cell.cell_contents)
    nodes = [x for x in jax.tree.leaves(held, is_leaf=is_node) if is_node(x)]
    if not (not isinstance(leaf, LATER) and not nodes):
        raise fail(
            function,
            f"`{name}` returns a lazy value, which is not traced.",
            given=f"a {type(leaf).__name__}",
            expected="arrays, values, or modules and variables that the model has",
            fix="compute in a method that returns arrays, or return the module itself.",
        )
