"""Names of the leaves of parameters: their key paths, or names that the user gives; the parts of
parameters that are split. Errors for a call whose leaves or contractions differ from the planned
ones.
"""

import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import dtypes, lax
from jax.tree_util import FlattenedIndexKey, keystr, tree_flatten_with_path

from ..errors import fail, some
from ..policy import Policy
from ..tensor.qtensor import QTensor
from ..tensor.segments import Lazy, Segments, abstract
from ..tensor.shardings import sharding_of

Params = int | tuple[int, ...]
"""Position, or positions, of the arguments that hold weights."""

Names = Mapping[str, str | None] | Callable[[tuple[Any, ...]], str] | None
"""The user's names, by path or as a function of the keys; `None` for what is not a weight."""

Renamed = tuple[tuple[str, str | None], ...]
"""Paths with another name, each with that name; `None` for paths that are not weights."""


class Part(NamedTuple):
    """Consecutive steps of a weight that a scan steps over.

    Attributes:
      path: path of the part, such as `layers/w[0:1]`.
      whole: path of the weight.
      start: the first step.
      stop: the end of the last step.
      length: total number of steps.
    """

    path: str
    whole: str
    start: int
    stop: int
    length: int


class Split(NamedTuple):
    """The split of a weight and of the scans that step over it.

    Attributes:
      path: path of the weight.
      axis: axis of the weight that the scans step over.
      bounds: the starts of the parts, and the end of the last one.
    """

    path: str
    axis: int
    bounds: tuple[int, ...]

    @property
    def parts(self) -> list[Part]:
        """The parts, in order."""
        return [
            Part(f"{self.path}[{a}:{b}]", self.path, a, b, self.bounds[-1])
            for a, b in itertools.pairwise(self.bounds)
        ]


EACH = "each"
"""Splits every scan over weights at each of its steps."""

Splits = tuple[Split, ...] | Policy | Literal["each"]
"""How weights are split: as in a plan, by the rules of a policy, or at each step."""


class Hoisting(NamedTuple):
    """How `jqx.hoist` split the function of a plan.

    Attributes:
      what: `"all"` or `"weights"`, as in `jqx.hoist`.
      params: position, or positions, of the parameters in the function before it was split.
      names: its parameters that have other names than their key paths.
    """

    what: str
    params: Params
    names: Renamed = ()


@dataclasses.dataclass(frozen=True)
class Weights:
    """The arguments that hold weights, and the names of the weights.

    Attributes:
      params: position, or positions.
      names: the user's names; those of a plan are `Renamed`.
      lines: the parameters that a plan was made for, as in its signature; `None` for any.
      splits: how weights are split.
    """

    params: Params
    names: Names | Renamed = None
    lines: tuple[str, ...] | None = None
    splits: Splits = ()

    def name(self, function: str, keys: Sequence[tuple[Any, ...] | None]) -> list[str | None]:
        """Returns the name of each leaf, given by its keys inside the parameters. `None` stays
        `None`, which is also the name of what is not a weight.
        """
        paths = [None if key is None else path_of(key) for key in keys]
        if self.names is None:
            return paths
        if callable(self.names):
            names = [
                (path, self.names(key))
                for key, path in zip(keys, paths, strict=True)
                if key is not None
            ]
            _check_names(function, names, str)
            iterator = iter(names)
            return [None if key is None else next(iterator)[1] for key in keys]
        table = dict(self.names)
        if isinstance(self.names, Mapping):
            _check_table(function, table, [path for path in paths if path is not None])
            return [None if path is None else _named(path, table) for path in paths]
        return [None if path is None else table.get(path, path) for path in paths]

    def named(
        self, function: str, tree: Any, is_leaf: Callable[[Any], bool] | None = None
    ) -> list[tuple[str | None, Any]]:
        """Returns the leaves of the result of `by_argument`, each with its name."""
        flat = flatten(tree, is_leaf or is_whole)
        names = self.name(function, [keys for keys, _ in flat])
        return [(name, leaf) for name, (_, leaf) in zip(names, flat, strict=True)]


def check_names(function: str, names: Any) -> None:
    """Checks that names are a dict of strings, or a function."""
    if names is not None and not callable(names) and not isinstance(names, Mapping):
        problem = f"`names` is neither a dict nor a function, but of type {type(names).__name__}."
        fix = 'pass for example names={"0": "embed", "1": "head"}.'
        raise fail(function, problem, fix=fix, error=TypeError)
    if isinstance(names, Mapping):
        _check_names(function, names.items(), (str, type(None)))
        _check_names(function, ((path, path) for path in names), str)


def path_of(keys: tuple[Any, ...]) -> str:
    """Returns the path for a tuple of keys."""
    return keystr(keys, simple=True, separator="/")


def by_argument(argnums: Params, params: Any) -> Any:
    """Returns parameters under the paths that a plan uses: the paths in one of several arguments
    begin with its position.
    """
    return params if isinstance(argnums, int) else dict(zip(argnums, params, strict=True))


def positions_of(argnums: Params) -> tuple[int, ...]:
    """Returns the positions of the arguments that hold weights."""
    return (argnums,) if isinstance(argnums, int) else argnums


def as_arguments(argnums: Params, tree: Any) -> Any:
    """Returns parameters as they are passed, given the result of `by_argument`."""
    return tree if isinstance(argnums, int) else tuple(tree[argnum] for argnum in argnums)


def insert_params(argnums: Params, params: Any, others: Sequence[Any]) -> list[Any]:
    """Returns arguments: the parameters at their positions, and the others in between."""
    values = (params,) if isinstance(argnums, int) else params
    arguments = list(others)
    for argnum, value in sorted(
        zip(positions_of(argnums), values, strict=True), key=lambda pair: pair[0]
    ):
        arguments.insert(argnum, value)
    return arguments


def is_whole(x: Any) -> bool:
    """Whether a node represents one array: a QTensor, or Segments."""
    return isinstance(x, (QTensor, Segments))


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] = is_whole
) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the leaves of a pytree, each with its keys; QTensors and Segments are leaves. The key
    of the value of an `nnx.Variable` is left out, and that of the only child of a node without
    names, such as the array of a `haliax.NamedArray`.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:  # Flax is not imported, so there are no variables
        return _without_only_children(tree_flatten_with_path(tree, is_leaf=is_leaf)[0])

    def is_variable(x: Any) -> bool:
        return isinstance(x, nnx.Variable)

    leaves = []
    flat, _ = tree_flatten_with_path(tree, is_leaf=lambda x: is_leaf(x) or is_variable(x))
    for keys, leaf in flat:
        if is_leaf(leaf) or not is_variable(leaf):
            leaves.append((keys, leaf))
            continue
        inside, _ = tree_flatten_with_path(leaf, is_leaf=is_leaf)
        leaves += [((*keys, *inner[1:]), value) for inner, value in inside]
    return _without_only_children(leaves)


def _without_only_children(
    leaves: list[tuple[tuple[Any, ...], Any]],
) -> list[tuple[tuple[Any, ...], Any]]:
    """Leaves out the positions of children that have no siblings."""
    children: dict[tuple[Any, ...], set[int]] = {}
    for keys, _ in leaves:
        for place, key in enumerate(keys):
            if isinstance(key, FlattenedIndexKey):
                children.setdefault(keys[:place], set()).add(key.key)
    if not children:
        return leaves
    only = {place for place, indices in children.items() if len(indices) == 1}
    return [
        (tuple(key for place, key in enumerate(keys) if keys[:place] not in only), leaf)
        for keys, leaf in leaves
    ]


def renamed(paths: Sequence[str | None], names: Sequence[str | None]) -> Renamed:
    """Returns the paths that have another name, without those that have no path."""
    pairs = zip(paths, names, strict=True)
    return tuple((path, name) for path, name in pairs if path is not None and path != name)


def _named(path: str, table: Mapping[str, str | None]) -> str | None:
    """Returns a path in which the longest prefix that has a name is replaced by that name; `None`
    if it is not a weight.
    """
    parts = path.split("/")
    for count in range(len(parts), 0, -1):
        front = "/".join(parts[:count])
        if front in table:
            name = table[front]
            if name is None:
                return None
            return "/".join(part for part in (name, *parts[count:]) if part)
    return path


def _check_table(function: str, table: Iterable[str], paths: Sequence[str]) -> None:
    parts = [path.split("/") for path in paths]
    fitting = {"/".join(keys[:n]) for keys in parts for n in range(1, len(keys) + 1)}
    unknown = [path for path in table if path not in fitting]
    if unknown:
        problem = f"`names` has paths that the parameters do not have: {some(map(repr, unknown))}."
        fix = "take the paths, or prefixes, that a plan without names= lists: "
        fix += f"{some(map(repr, paths))}."
        raise fail(function, problem, fix=fix)


def _check_names(function: str, named: Iterable[tuple[Any, Any]], kinds: Any) -> None:
    wrong = [(path, name) for path, name in named if not isinstance(name, kinds)]
    if wrong:
        path, name = wrong[0]
        problem = f"`names` gives a name that is not a string: {name!r} for {path!r}."
        fix = 'pass a dict such as {"0": "embed"}, or a function of the keys that returns strings.'
        raise fail(function, problem, fix=fix, error=TypeError)


def nested(leaves: Iterable[tuple[Sequence[str], Any]]) -> dict[str, Any]:
    """Returns nested dicts of leaves with the keys that lead to each; no leaf is above another."""
    tree: dict[str, Any] = {}
    for (*outer, leaf_key), leaf in leaves:
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
        node[leaf_key] = leaf
    return tree


# Errors for a call that differs from the planned one: the first difference, and its meaning.


AGAIN = "make the plan again with jqx.make_plan(f, policy)(*args)."


def type_text(x: Any) -> str:
    """Returns the dtype that an array has inside JAX, and its shape, as text; "none" for `None`."""
    if x is None:
        return "none"
    # Typed keys of random numbers have an extended dtype.
    return f"{dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)}{list(x.shape)}"


def parameter_line(path: str, leaf: Any) -> str:
    """The line of a signature that describes one parameter."""
    return f"parameter {path}: {type_text(leaf)}"


def line_of(path: str, dtype: Any, shape: Sequence[int]) -> str:
    """The line of a parameter of a dtype, or of the name of one, and a shape."""
    return f"parameter {path}: {dtype}{list(shape)}"


def parameter_of(line: str) -> tuple[str, str, tuple[int, ...]]:
    """Returns the path, name of the dtype and shape of the parameter that a line describes."""
    path, dtype, sizes = re.fullmatch(r"parameter (.*): (\S+)\[(.*)\]", line, re.DOTALL).groups()  # type: ignore[union-attr]
    return path, dtype, tuple(int(size) for size in sizes.split(",") if size)


def is_parameter_line(line: str) -> bool:
    """Whether the line of a signature describes a parameter."""
    return line.startswith("parameter ")


_CONTRACTION = re.compile(r"contraction \(([0-9, ]*)\) ")
"""The start of a line that describes a contraction, with its address."""


def addresses_of(signature: Sequence[str]) -> list[tuple[int, ...]]:
    """Returns the addresses of the contractions in a signature, in order."""
    addresses = [match[1] for line in signature if (match := _CONTRACTION.match(line))]
    return [tuple(int(part) for part in text.split(",") if part.strip()) for text in addresses]


def without_addresses(signature: Sequence[str]) -> list[str]:
    """Returns a signature that does not depend on the calls, loops and branches around each
    contraction.
    """
    return [_CONTRACTION.sub("contraction ", line, count=1) for line in signature]


def check_same(
    function: str, signature: Sequence[str], planned: Sequence[str], fix: str = AGAIN
) -> None:
    """Raises if a function, or its parameters, are not those that the plan was made for."""
    lines = itertools.zip_longest(signature, planned, fillvalue="(nothing)")
    differing = next(((line, old) for line, old in lines if line != old), None)
    if differing is None:
        return
    line, old = differing
    if is_parameter_line(old) and re.sub(r"\[\d+(, )?(.*)\]$", r"[\2]", old) == line:
        fix = "map over the other arguments alone: jax.vmap(..., in_axes=(None, 0))."
    problem = "the plan was made for another function or other parameters."
    raise fail(function, problem, given=line, expected=old, fix=fix)


def check_ranks(function: str, plan: Any, items: Sequence[Any]) -> None:
    """Raises if the operands of a contraction have another number of axes than when planned."""
    shapes = {(item.address, item.op): item.shapes for item in (*plan.skipped, *plan.sites)}
    for item in items:
        operand_shapes = tuple(tuple(atom.aval.shape) for atom in item.eqn.invars[:2])
        planned = shapes.get((item.address, item.op)) if item.address else None
        if planned is None or [*map(len, operand_shapes)] == [*map(len, planned)]:
            continue
        where = f" at path {item.path!r}" if item.path else ""
        problem = "an argument has another number of axes than when the plan was made."
        details = f"{item.op} of {_shown(operand_shapes)}{where}"
        fix = "give it the axes that it had, such as x[None] for one example of a batch, or make "
        fix += "the plan for such an argument. To map over examples what jqx.ptq returned, map "
        fix += "inside: result.bind(jax.vmap(f, in_axes=(None, 0)))(x)."
        expected = f"{_shown(planned)}, with any batch size"
        raise fail(function, problem, given=details, expected=expected, fix=fix)


def _shown(shapes: Sequence[Sequence[Any]]) -> str:
    return " x ".join("[" + ", ".join(map(str, shape)) + "]" for shape in shapes)


# The parts of one parameter.


def part_paths(path: str | None, split: Split | None) -> list[str | None]:
    """Returns the paths of the parts of a parameter; its own path if it is not split."""
    return [path] if split is None else [part.path for part in split.parts]


def split_leaf(function: str, leaf: Any, split: Split | None) -> list[Any]:
    """Returns the parts of a parameter: those of Segments, or slices of an array. A parameter that
    is not split is its only part.
    """
    if split is None:
        return [leaf]
    kind = abstract(leaf)
    if isinstance(kind, Segments) and (kind.axis, kind.bounds) != (split.axis, split.bounds):
        problem = f"the Segments {leaf!r} of {split.path!r} do not fit the plan."
        expected = f"parts with the bounds {list(split.bounds)} along axis {split.axis}"
        fix = "quantize the parameters with this plan: jqx.quantize_params(params, plan)."
        raise fail(function, problem, expected=expected, fix=fix)
    return cut_parts(leaf, split.axis, split.bounds)


def stack_leaf(parts: Sequence[Any], split: Split | None) -> Any:
    """Returns the parameter with these parts."""
    if split is None:
        return parts[0]
    if not all(isinstance(x, Lazy) for x in parts):
        return Segments(parts, split.axis)
    sources = [x.source for x in parts]
    source = "\n".join([f"along {split.axis}", *sources]) if all(sources) else ""
    spec = Segments([x.spec for x in parts], split.axis)
    return Lazy(spec, lambda: Segments([x.read() for x in parts], split.axis), source)


def joined_parts(x: Any) -> Any:
    """Returns a weight in parts as one array; other values are unchanged."""
    return lax.concatenate(x.parts, x.axis) if isinstance(x, Segments) else x


def cut_parts(x: Any, axis: int, bounds: tuple[int, ...]) -> list[Any]:
    """Returns the parts of a value with these bounds: its own, or slices."""
    if isinstance(x, Segments) and (x.axis, x.bounds) != (axis, bounds):
        x = joined_parts(x)
    return [_slice(x, axis, start, stop) for start, stop in itertools.pairwise(bounds)]


def _slice(x: Any, axis: int, start: int, stop: int) -> Any:
    if isinstance(x, Lazy):
        return x.then(partial(_slice, axis=axis, start=start, stop=stop), f"{axis} {start}:{stop}")
    if isinstance(x, Segments):
        return x.parts[x.bounds.index(start)]
    if isinstance(x, jax.ShapeDtypeStruct):
        shape = (*x.shape[:axis], stop - start, *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype)
    if isinstance(x, (QTensor, np.ndarray)):
        return x[(slice(None),) * axis + (slice(start, stop),)]
    return lax.slice_in_dim(x, start, stop, axis=axis)


def stand_in(leaf: Any) -> Any:
    """Returns what a function is traced with in place of a leaf."""
    if not (is_whole(leaf) or isinstance(leaf, Lazy)):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(leaf))
