"""A method of a module as a pure function of its weights."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from .._errors import fail
from ..tensor import QTensor
from ..transforms._shared import nested
from ._classes import Over, Run, as_float
from ._outputs import Path, from_places, is_node, to_places
from ._state import OWN, State
from ._variables import QParam


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
        return from_places(out, self.graph)

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
    module: Over,
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
    graph, others, put_in = _apart(module, args, kwargs)
    graphdef, weights, own, rest = nnx.split(graph, is_coded, _is_own, ...)
    caller = type(module).__name__

    def function(params: Any, rest: Any, others: list[Any]) -> Any:
        # Work on a copy of the graph, so that the module stays as it is whatever `run` does.
        emptied = nnx.map_state(lambda _, variable: variable.replace({}), own)
        copy = nnx.merge(graphdef, with_values(weights, {"0": params}), emptied, rest)
        before = leaves_by_path(copy)
        inner, nodes = copy
        inner_args, inner_kwargs = put_in(others, nodes)
        with as_float(_quantized(inner)):
            out = run(inner, *inner_args, **inner_kwargs)
        out = to_places(caller, name, out, copy)
        _check_attributes(caller, name, graphdef, graph, copy)

        def is_written(path: Path, variable: Any) -> bool:
            if isinstance(variable, QParam) or (constant and is_coded(path, variable)):
                return False
            return was_written(path, variable, before)

        return out, nnx.state(copy, is_written)

    return PureCall(function, values(weights).get("0", {}), (rest, others), graph)


def _apart(
    module: Over, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, list[Any], Callable[[list[Any], list[Any]], Any]]:
    """Splits arguments into graph nodes and other leaves.

    Returns:
      The module and the other nodes; the other leaves, with `None` in the places of nodes; and
      `put_in(others, nodes) -> (args, kwargs)`, which puts new values in their places.
    """
    leaves, tree = jax.tree.flatten((args, dict(kwargs)), is_leaf=_is_whole)
    places = [place for place, leaf in enumerate(leaves) if is_node(leaf)]
    others = [None if place in places else leaf for place, leaf in enumerate(leaves)]

    def put_in(others: list[Any], nodes: list[Any]) -> Any:
        leaves = list(others)
        for place, node in zip(places, nodes, strict=True):
            leaves[place] = node
        return jax.tree.unflatten(tree, leaves)

    return (module, [leaves[place] for place in places]), others, put_in


def _quantized(module: Over) -> list[nnx.Module]:
    """Returns a module and its parts."""
    parts = [part for _, part in nnx.iter_modules(module) if isinstance(part, Over)]
    return [part for part in parts if part is module or not isinstance(part, State)]


def is_coded(path: Path, variable: Any) -> bool:
    """Returns whether a variable of `(module, others)` is a weight of the module."""
    inside = path[0] == 0 and path[1] not in OWN
    return inside and isinstance(variable, (nnx.Param, QParam))


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


def _is_own(path: Path, _: Any) -> bool:
    return path[0] == 0 and path[1] in OWN


def _is_whole(x: Any) -> bool:
    return isinstance(x, QTensor) or is_node(x)


def leaves_by_path(graph: Any) -> dict[Path, list[Any]]:
    """Returns the arrays of each variable of a graph."""
    return {
        path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(nnx.state(graph))
    }


def was_written(path: Path, variable: Any, before: Mapping[Path, list[Any]]) -> bool:
    """Returns whether a variable is new, or has other arrays than before."""
    given = before.get(path)
    return given is None or not _are_same(given, jax.tree.leaves(variable))


def _are_same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _check_attributes(caller: str, name: str, graphdef: Any, before: Any, after: Any) -> None:
    """Checks that a method has changed only variables."""
    if nnx.graphdef(after) == graphdef:
        return
    old, new = _attributes(before), _attributes(after)
    changed = [path for path in old if path not in new or new[path] != old[path]]
    changed += [path for path in new if path not in old]
    if changed:
        raise fail(
            caller,
            f"`{name}` sets attributes that are not variables.",
            given=f"{', '.join(changed[:4])}",
            expected="a method that writes only variables, since it is traced",
            fix="call it on the float model, before jqx.nnx.quantize; or use model.set_attributes.",
        )


def _attributes(graph: Any) -> dict[str, Any]:
    return {
        "/".join(map(str, (*path[1:], name))): value
        for path, node in nnx.iter_graph(graph)
        if isinstance(node, nnx.Pytree)
        for name, value in vars(node).items()
        if not name.startswith("_pytree__") and not _holds_data(value)
    }


def _holds_data(value: Any) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=nnx.is_data)
    return value is None or any(nnx.is_data(leaf) for leaf in leaves)
