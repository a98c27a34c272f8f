"""A method of a module as a pure function of its weights."""

import contextlib
import dataclasses
import functools
from collections import abc
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from ..errors import fail, some
from ..tensor.qtensor import QTensor
from ..transforms.paths import nested
from .state import STATE, QParam, Run, State, Wrapper, as_float

Path = tuple[Any, ...]

LATER = (abc.Iterator, abc.AsyncIterator, abc.Coroutine, contextlib.AbstractContextManager)
"""Types that compute when they are used."""


@dataclasses.dataclass(frozen=True)
class PureCall:
    """A call of a method, split into its weights, its state and its other graph nodes.

    Attributes:
      function: `function(params, *args) -> (out, written)`, where `written` is the state of the
        variables that the method writes.
      params: weights by path, as nested dicts.
      args: the rest of the state and the arguments.
      graph: the nodes that `written` belongs to.
    """

    function: Callable[..., Any]
    params: dict[str, Any]
    args: tuple[Any, ...]
    graph: Any

    def finish(self, result: tuple[Any, Any]) -> Any:
        """Writes the variables that the method wrote; returns the result of the method."""
        out, written = result
        if written:
            nnx.update(self.graph, written)
        return paths_to_nodes(out, self.graph)

    def inside(self, path: tuple[str, ...]) -> "PureCall":
        """Returns the same call, with its weights at a path inside a larger tree."""

        def function(params: Any, *args: Any) -> Any:
            for name in path:
                params = params[name]
            return self.function(params, *args)

        params = self.params
        for name in reversed(path):
            params = {name: params}
        return dataclasses.replace(self, function=function, params=params)


def pure_call(
    module: Wrapper,
    name: str,
    run: Run,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    constant: bool,
) -> PureCall:
    """Returns a call of `run`, named `name`, on a module as an instance of its float class.

    Codes are constants, which no method writes; with `constant`, all weights are constants.
    """
    graph, leaves, insert = _split_nodes(module, args, kwargs)
    graphdef, weights, stats, others = nnx.split(graph, is_coded, _is_state, ...)
    caller = type(module).__name__

    def function(params: Any, others: Any, leaves: list[Any]) -> Any:
        # Work on a copy of the graph, so that the module stays as it is whatever `run` does.
        emptied = nnx.map_state(lambda _, variable: variable.replace({}), stats)
        copy = nnx.merge(graphdef, with_values(weights, {"0": params}), emptied, others)
        old = leaves_by_path(copy)
        inner, nodes = copy
        inner_args, inner_kwargs = insert(leaves, nodes)
        with as_float(_wrappers(inner)):
            out = run(inner, *inner_args, **inner_kwargs)
        out = nodes_to_paths(caller, name, out, copy)
        changed = [] if nnx.graphdef(copy) == graphdef else _changed_attributes(graph, copy)
        if changed:
            problem = f"`{name}` sets attributes that are not variables: {some(changed)}."
            fix = "call it before jqx.nnx.quantize, or use model.set_attributes."
            raise fail(caller, problem, fix=fix)

        def is_written(path: Path, variable: Any) -> bool:
            if isinstance(variable, QParam) or (constant and is_coded(path, variable)):
                return False
            return was_written(path, variable, old)

        return out, nnx.state(copy, is_written)

    return PureCall(function, values(weights).get("0", {}), (others, leaves), graph)


def _split_nodes(
    module: Wrapper, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, list[Any], Callable[[list[Any], list[Any]], Any]]:
    """Splits arguments into graph nodes and other leaves.

    Returns:
      The module and the other nodes; the other leaves, with `None` in place of nodes; and
      `insert(leaves, nodes) -> (args, kwargs)`, which puts new values in place of both.
    """

    def is_leaf(x: Any) -> bool:
        return isinstance(x, QTensor) or is_node(x)

    leaves, tree = jax.tree.flatten((args, dict(kwargs)), is_leaf=is_leaf)
    nodes = {i: leaf for i, leaf in enumerate(leaves) if is_node(leaf)}

    def insert(leaves: list[Any], new: list[Any]) -> Any:
        inserted = dict(zip(nodes, new, strict=True))
        return jax.tree.unflatten(tree, [inserted.get(i, x) for i, x in enumerate(leaves)])

    others = [None if i in nodes else leaf for i, leaf in enumerate(leaves)]
    return (module, [*nodes.values()]), others, insert


def _wrappers(module: Wrapper) -> list[nnx.Module]:
    """Returns a module and its parts."""
    parts = [part for _, part in nnx.iter_modules(module) if isinstance(part, Wrapper)]
    return [part for part in parts if part is module or not isinstance(part, State)]


@dataclasses.dataclass(frozen=True)
class _NodePath:
    """Stands for a module or a variable of a graph."""

    path: Path


def is_node(x: Any) -> bool:
    """Returns whether `x` is a module, a variable or another node of a graph."""
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def nodes_to_paths(function: str, name: str, out: Any, graph: Any) -> Any:
    """Returns a result in which placeholders replace the nodes of `graph`."""

    def replaced(leaf: Any) -> Any:
        if not is_node(leaf):
            _check_runs_now(function, name, leaf)
            return leaf
        paths = [path for path, node in nnx.iter_graph(graph) if node is leaf]
        if not paths:
            problem = (
                f"`{name}` returns a new {type(leaf).__name__}, which the model does not have."
            )
            fix = "call it on the float model, before jqx.nnx.quantize."
            raise fail(function, problem, fix=fix)
        return _NodePath(paths[0])

    return jax.tree.map(replaced, out, is_leaf=lambda x: is_node(x) or isinstance(x, LATER))


def paths_to_nodes(out: Any, graph: Any) -> Any:
    """Inverts `nodes_to_paths`, with the nodes of another graph of the same structure."""
    if not any(isinstance(leaf, _NodePath) for leaf in jax.tree.leaves(out)):
        return out
    nodes = {path: node for path, node in nnx.iter_graph(graph) if is_node(node)}
    return jax.tree.map(lambda leaf: nodes[leaf.path] if isinstance(leaf, _NodePath) else leaf, out)


def _check_runs_now(function: str, name: str, leaf: Any) -> None:
    """Checks that a result computes nothing later, as iterators and closures over modules do."""
    parts = [getattr(leaf, "__self__", None)]
    if isinstance(leaf, functools.partial):
        parts += [leaf.func, leaf.args, leaf.keywords, getattr(leaf.func, "__self__", None)]
    for cell in getattr(leaf, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            parts.append(cell.cell_contents)
    if isinstance(leaf, LATER) or any(map(is_node, jax.tree.leaves(parts, is_leaf=is_node))):
        problem = f"`{name}` returns a lazy value, a {type(leaf).__name__}, which is not traced."
        fix = "compute in a method that returns arrays, or return the module itself."
        raise fail(function, problem, fix=fix)


def _changed_attributes(old_graph: Any, new_graph: Any) -> list[str]:
    """Returns the paths of attributes without data that differ between two graphs."""
    old, new = _attributes(old_graph), _attributes(new_graph)
    absent = object()
    return [path for path in {**old, **new} if old.get(path, absent) != new.get(path, absent)]


def _attributes(graph: Any) -> dict[str, Any]:
    """Returns the attributes of all nodes that hold no data, by path."""

    def holds_data(value: Any) -> bool:
        leaves = jax.tree.leaves(value, is_leaf=nnx.is_data)
        return value is None or any(map(nnx.is_data, leaves))

    return {
        "/".join(map(str, (*path[1:], name))): value
        for path, node in nnx.iter_graph(graph)
        if isinstance(node, nnx.Pytree)
        for name, value in vars(node).items()
        if not name.startswith("_pytree__") and not holds_data(value)
    }


def is_coded(path: Path, variable: Any) -> bool:
    """Returns whether a variable of `(module, others)` is a weight of the module."""
    return path[0] == 0 and path[1] not in STATE and isinstance(variable, (nnx.Param, QParam))


def _is_state(path: Path, _: Any) -> bool:
    return path[0] == 0 and path[1] in STATE


def leaves_by_path(graph: Any) -> dict[Path, list[Any]]:
    """Returns the arrays of each variable of a graph."""
    return {
        path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(nnx.state(graph))
    }


def was_written(path: Path, variable: Any, old: Mapping[Path, list[Any]]) -> bool:
    """Returns whether a variable is new, or has other arrays than before."""
    leaves, old_leaves = jax.tree.leaves(variable), old.get(path)
    if old_leaves is None or len(leaves) != len(old_leaves):
        return True
    return any(x is not y for x, y in zip(leaves, old_leaves, strict=True))


def values(state: Any) -> dict[str, Any]:
    """Returns the values of variables, and arrays that are attributes, as nested dicts by name."""
    return nested(
        (
            [*map(str, path)],
            variable.get_value() if isinstance(variable, nnx.Variable) else variable,
        )
        for path, variable in nnx.to_flat_state(state)
    )


def with_values(state: Any, params: Any) -> Any:
    """Returns a state with other values, given as nested dicts."""

    def replaced(path: Path, variable: Any) -> Any:
        value = params
        for part in path:
            value = value[str(part)]
        return replaced_by(variable, value)

    return nnx.map_state(replaced, state)


def replaced_by(variable: Any, value: Any) -> Any:
    """Returns a variable with another value; for an array that is an attribute the value itself."""
    return variable.replace(value) if isinstance(variable, nnx.Variable) else value


def variable_at(node: Any, path: Path) -> nnx.Variable[Any]:
    """Returns the variable at a path of a graph."""
    for key in path:
        node = getattr(node, str(key)) if isinstance(node, nnx.Pytree) else node[key]
    return node


def replace_variables(model: nnx.Module, new: Mapping[int, nnx.Variable[Any]]) -> None:
    """Replaces variables everywhere in the model."""

    def replaced(x: Any) -> Any:
        return new.get(id(x), x)

    for _, node in list(nnx.iter_graph(model)):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                leaves = jax.tree.leaves(value, is_leaf=is_node)
                if any(id(leaf) in new for leaf in leaves):
                    setattr(node, name, jax.tree.map(replaced, value, is_leaf=is_node))
