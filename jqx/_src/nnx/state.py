"""The variables of quantized nnx modules, a method as a pure function that returns what it writes,
and classes that wrap a float class.
"""

import contextlib
import dataclasses
import functools
import types
from collections import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from .. import compat
from ..errors import fail, some
from ..modules.layers import forwards, read
from ..modules.quantized_function import QuantizedFunction, Search, holds_codes, overlay
from ..tensor.qtensor import QTensor
from ..transforms.paths import nested
from ..transforms.plan import Plan
from ..transforms.walk import passed_through

Run = Callable[..., Any]
"""A function of a float module and of arguments."""

QuantizedCall = tuple[QuantizedFunction, dict[str, Any], Any]
"""A call of a function of weights, the weights as nested dicts, and the graph that it may write."""

CONTAINERS = {*nnx.List.__mro__, *nnx.Dict.__mro__}
"""Bases of modules whose methods compute nothing."""

STATE = ("quant_stats", "quant_scales", "learned_scales", "quant_rng", "quant_found")
"""Attributes of quantized modules that hold variables."""


class QParam(nnx.Variable[Any]):
    """A quantized weight: a `jqx.QTensor`, where the float module has an `nnx.Param`.

    It is not an `nnx.Param`, so that gradients with respect to `nnx.Param` leave it out.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = jqx.nnx.Linear(4, 2, policy=jqx.presets.w8a16(), rngs=nnx.Rngs(0))
      >>> jqx.nnx.convert(layer, jnp.ones((1, 4)))
      >>> isinstance(layer.kernel, jqx.nnx.QParam)
      True
      >>> list(nnx.state(layer, nnx.Param))
      ['bias']
    """


class Stat(nnx.Variable[Any]):
    """Statistics of activations, written in `Mode.CALIBRATE`. They are nested dicts, initially
    empty, with each entry at the path of its weight, such as `kernel:dot_general:lhs`.

    Under `nnx.scan` and `nnx.vmap` over layers, statistics need the axis of the layers, as
    parameters do: Flax drops writes to variables with axis `None`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.w8a8(), "mode": jqx.nnx.Mode.CALIBRATE}
      >>> layer = jqx.nnx.Linear(4, 2, **options, rngs=nnx.Rngs(0))
      >>> out = layer(jnp.ones((1, 4)))
      >>> list(layer.quant_stats)
      ['kernel:dot_general:lhs']
    """


class Scale(nnx.Variable[Any]):
    """Fixed scales of activations, from `fix_scales` or `convert`: nested dicts as in `Stat`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = jqx.nnx.Linear(4, 2, policy=jqx.presets.w8a8(), rngs=nnx.Rngs(0))
      >>> jqx.nnx.fix_scales(layer, jnp.full((1, 4), 127.0), scales="dynamic")
      >>> layer.quant_scales["kernel:dot_general:lhs"].scale
      Array([[1.]], dtype=float32)
    """


class SearchResult(nnx.Variable[Any]):
    """What a run of `convert`, `fix_scales` or `learn_scales` finds for one module: codes, scales
    and learned scales, by these names. Only the copy that is run has this variable.
    """

    search: Search


class Wrapper(nnx.Module):
    """Base of the classes that wrap a float class: whole quantized modules and their parts."""

    _q_is_part: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Calls Flax's hook, but not the float class's, which is for its own subclasses."""
        hook: Any = nnx.Module.__init_subclass__
        hook.__func__(cls, **kwargs)

    def _q_is_plain(self) -> bool:
        """Returns whether a call runs the method of the float class unchanged."""
        raise NotImplementedError

    def _q_function(
        self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> QuantizedCall:
        """Returns `run`, a function of the float module, as one of weights."""
        raise NotImplementedError

    def _q_call(self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a function of the float module through the transforms."""
        raise NotImplementedError

    def _q_evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Runs the method `name` of the float class."""
        if self._q_is_plain():
            return getattr(super(), name)(*args, **kwargs)
        return self._q_call(name, method(name), args, kwargs)

    def _q_read(self, name: str) -> Any:
        """Reads the property `name` of the float class, in float if it contracts nothing."""
        run = functools.partial(read, float_class(type(self)), name=name)
        if not self._q_is_plain():
            call, params, _ = self._q_function(name, run, (), {})
            with contextlib.suppress(jax.errors.ConcretizationTypeError):
                if call.plan(params).sites:
                    return self._q_call(name, run, (), {})
        return run(self)

    def _q_plan(self, name: str, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan of a call of a method."""
        call, params, _ = self._q_function(name, method(name), args, kwargs)
        return call.plan(params)


@functools.cache
def wrapper_class(kind: type[nnx.Module], base: type[Wrapper], name: str) -> type[Any]:
    """Returns a class with bases `base` and `kind`, whose every public method and property goes
    through `base`.
    """
    namespace = {**forwards(kind, CONTAINERS), "__doc__": kind.__doc__}
    namespace |= {"__module__": kind.__module__}
    options = {"pytree": getattr(kind, "_pytree__is_pytree", True)}
    wrapper = types.new_class(name, (base, kind), options, lambda space: space.update(namespace))
    wrapper._pytree__nodes = kind._pytree__nodes
    return wrapper


def float_class(kind: type) -> type:
    """Returns the float class that a quantized class is made from."""
    return next(base for base in kind.__mro__ if not issubclass(base, Wrapper))


def method(name: str) -> Run:
    """Returns a function that calls a method of a module."""
    return lambda module, *args, **kwargs: getattr(module, name)(*args, **kwargs)


def with_classes(graph: Any, classes: Mapping[int, type]) -> Any:
    """Returns a graph in which modules are instances of other classes, by the `id` of the module,
    with the attributes that they have. The graph is changed, and is not to be used any more.
    """
    modules = [node for _, node in nnx.iter_graph(graph) if id(node) in classes]
    new = {id(module): object.__new__(classes[id(module)]) for module in modules}
    replace_nodes(graph, new)
    for module in modules:
        vars(new[id(module)]).update(vars(module))
    return jax.tree.map(lambda x: new.get(id(x), x), graph, is_leaf=is_node)


# A module as a pure function of the values of its variables.


Path = tuple[Any, ...]

LATER = (abc.Iterator, abc.AsyncIterator, abc.Coroutine, contextlib.AbstractContextManager)
"""Types that compute when they are used."""


def split_call(
    graph: Any, is_param: Callable[[Path, Any], bool], run: Run
) -> tuple[Callable[..., tuple[Any, Any]], dict[str, Any], Any]:
    """Splits the call of a function of a graph of modules into a pure function and its data.

    Args:
      graph: the modules.
      is_param: whether a variable, at a path, is a parameter.
      run: `run(graph, *args, **kwargs)`.

    Returns:
      `function(params, rest, *args, **kwargs) -> (out, written)`, which works on a copy of the
      graph, and where `written` is the state of the variables that `run` writes; `params`, the
      values of the parameters as nested dicts; and `rest`, the state of the other variables.
    """
    graphdef, state, rest = nnx.split(graph, is_param, ...)
    # The function holds no values of parameters.
    empty = nnx.map_state(lambda _, variable: replaced_by(variable, None), state)

    def function(params: Any, rest: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        rest = jax.tree.map(lambda x: x, rest)  # variables of this trace
        copy = nnx.merge(graphdef, with_values(empty, params), rest)
        old = leaves_by_path(copy)
        out = run(copy, *args, **kwargs)
        return out, nnx.state(copy, lambda path, variable: was_written(path, variable, old))

    return function, values(state), rest


def unchanged(
    call: Callable[..., tuple[Any, Any]], params: Any, rest: Any, *args: Any, **kwargs: Any
) -> set[Path]:
    """Returns the paths of the variables that a call of `split_call` writes, but with the values
    that they had: a checkpointed function returns all variables of the modules that it is given.
    """
    leaves, structure = jax.tree.flatten((params, rest))
    numbers, numbers_of_rest = jax.tree.unflatten(structure, range(len(leaves)))
    of_rest = dict(nnx.to_flat_state(numbers_of_rest))
    before: list[tuple[Path, list[int]]] = []

    def after(*leaves: Any) -> list[Any]:
        _, state = call(*jax.tree.unflatten(structure, leaves), *args, **kwargs)
        written = nnx.to_flat_state(state)
        for path, _ in written:
            before.append((path, jax.tree.leaves(of_rest.get(path, value_at(numbers, path)))))
        return [jax.tree.leaves(variable) for _, variable in written]

    jaxpr, _ = compat.trace(lambda *leaves: jax.tree.leaves(after(*leaves)), *leaves)
    found = iter(passed_through(jaxpr))
    return {path for path, old in before if [next(found) for _ in old] == old}


def quantized_call(
    module: Wrapper,
    name: str,
    run: Run,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    constant: bool = False,
    prefix: Path = (),
    **options: Any,
) -> QuantizedCall:
    """Returns a call of `run`, named `name`, on a module as an instance of its float class. Its
    result is for `write_back`.

    Codes are constants, which no method writes; with `constant`, all weights are constants. The
    weights are at the path `prefix` of a larger tree. `options` are those of a `QuantizedFunction`.
    """
    graph, leaves, insert = split_nodes(module, args, kwargs)
    floats = nnx.clone(graph)
    # Scans of the float model may name the axis of an `nnx.Param`.
    codes = {path: x for path, x in nnx.iter_graph(floats) if isinstance(x, QParam)}
    replace_nodes(floats, {id(x): nnx.Param(x.get_value()) for x in codes.values()})
    floats = with_classes(floats, {id(x): float_class(type(x)) for x in _wrappers(floats[0])})
    graphdef = nnx.graphdef(floats)

    def run_on(copy: Any, leaves: list[Any]) -> Any:
        inner, nodes = copy
        inner_args, inner_kwargs = insert(leaves, nodes)
        out = run(inner, *inner_args, **inner_kwargs)
        if nnx.graphdef(copy) != graphdef and (changed := _changed_attributes(floats, copy)):
            problem = f"`{name}` sets attributes that are not variables: {some(changed)}."
            fix = "call it before jqx.nnx.quantize, or use model.set_attributes."
            raise fail(type(module).__name__, problem, fix=fix)
        return nodes_to_paths(type(module).__name__, name, out, copy)

    call, params, rest = split_call(floats, is_weight, run_on)
    rest = nnx.map_state(lambda path, x: x.replace({}) if _is_state(path, x) else x, rest)

    def may_write(path: Path, variable: Any) -> bool:
        return path not in codes and not (constant and is_weight(path, variable))

    def function(params: Any, *args: Any) -> Any:
        out, written = call({"0": value_at(params, prefix)}, *args)
        return out, nnx.filter_state(written, may_write)

    quantized = QuantizedFunction(
        function=function,
        args=(rest, leaves),
        caller=type(module).__name__,
        converts="jqx.nnx.convert(model, ...)",
        **options,
    )
    weights = params.get("0", {})
    return quantized, nested([(prefix, weights)]) if prefix else weights, graph


def write_back(graph: Any, result: tuple[Any, Any]) -> Any:
    """Writes the variables that a call has written; returns the result of the method."""
    out, written = result
    if written:
        nnx.update(graph, written)
    return paths_to_nodes(out, graph)


def split_nodes(
    module: nnx.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
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
    """Returns a module and its parts, without quantized modules that are attributes of it."""
    parts = [part for _, part in nnx.iter_modules(module) if isinstance(part, Wrapper)]
    return [part for part in parts if part is module or part._q_is_part]


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


def is_weight(path: Path, variable: Any) -> bool:
    """Returns whether a variable of `(module, others)` is a weight of the module."""
    return path[0] == 0 and path[1] not in STATE and isinstance(variable, (nnx.Param, QParam))


def _is_state(path: Path, _: Any) -> bool:
    return path[0] == 0 and path[1] in STATE


def is_random(_: Path, variable: Any) -> bool:
    """Returns whether a variable belongs to a stream of random numbers, or an array is a key: files
    store neither.
    """
    dtype = getattr(variable, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return isinstance(variable, nnx.RngState) or is_key


def stream_of(variable: Any) -> str | None:
    """Returns the name of the stream of random numbers that a variable belongs to."""
    return variable.tag if isinstance(variable, nnx.RngState) else None


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
    return nnx.map_state(lambda path, x: replaced_by(x, value_at(params, path)), state)


def value_at(tree: Any, path: Path, default: Any = None) -> Any:
    """Returns the value at a path of nested dicts."""
    for name in path:
        if not isinstance(tree, Mapping) or str(name) not in tree:
            return default
        tree = tree[str(name)]
    return tree


def replaced_by(variable: Any, value: Any) -> Any:
    """Returns a variable with another value; for an array that is an attribute the value itself."""
    return variable.replace(value) if isinstance(variable, nnx.Variable) else value


def write_values(module: Any, new: Mapping[str, Any]) -> dict[int, QParam]:
    """Writes values, given as nested dicts, into the variables of a module. Returns a `QParam` for
    each variable that gets codes, by the `id` of the variable, for `replace_nodes`.
    """
    codes, written = {}, []
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        value = value_at(new, path, ...)
        if isinstance(value, Mapping):
            value = overlay(variable.get_value(), value)
        if holds_codes(value):
            codes[id(variable_at(module, path))] = QParam(value)
        elif value is not ...:
            written.append((path, replaced_by(variable, value)))
    nnx.update(module, nnx.from_flat_state(written))
    return codes


def variable_at(node: Any, path: Iterable[Any]) -> Any:
    """Returns the variable, or another node, at a path of a graph."""
    for key in path:
        if isinstance(node, nnx.Pytree):
            node = getattr(node, str(key))
        else:
            node = node[int(key) if isinstance(node, (list, tuple)) else key]
    return node


def replace_nodes(graph: Any, new: Mapping[int, Any]) -> None:
    """Replaces modules and variables, by their `id`, in the attributes of a graph's modules."""

    def replaced(x: Any) -> Any:
        return new.get(id(x), x)

    for _, node in list(nnx.iter_graph(graph)):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                leaves = jax.tree.leaves(value, is_leaf=is_node)
                if any(id(leaf) in new for leaf in leaves):
                    vars(node)[name] = jax.tree.map(replaced, value, is_leaf=is_node)
