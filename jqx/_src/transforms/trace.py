"""Traces a function of any pytrees: its array leaves, their names, and its jaxpr."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .. import compat
from ..checks import check_integer
from ..errors import fail, some
from ..tensor.layout import check_dtypes
from ..tensor.qtensor import QTensor
from ..tensor.segments import check_read
from .arguments import check_function as check_function
from .arguments import evaluating
from .find import origins_of, with_reads
from .live import live
from .paths import (
    AGAIN,
    Params,
    Part,
    Renamed,
    Split,
    Weights,
    check_same,
    flatten,
    is_whole,
    parameter_line,
    path_of,
    positions_of,
    renamed,
)
from .unstack import stand_in, unstack


def is_quantized(x: Any) -> bool:
    """Whether a leaf is a QTensor."""
    return isinstance(x, QTensor)


def is_array(x: Any) -> bool:
    """Whether a leaf is traced, because it has a shape and a dtype. All others are static."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)


def is_parameter(x: Any) -> bool:
    """Whether a leaf of the parameters belongs to a plan. A number does not: under `jax.jit` it is
    an array without axes, and elsewhere it may be static.
    """
    return is_array(x) and x.shape != ()


class Traced(NamedTuple):
    """The result of tracing a function, with fields of a `Call`."""

    jaxpr: Any
    consts: list[Any]
    out_tree: Any


@dataclasses.dataclass(frozen=True)
class Call:
    """A function traced at its arguments.

    Attributes:
      jaxpr: the jaxpr, without dead code; its invars are the array leaves of the arguments, in
        order.
      consts: values of the jaxpr's constvars.
      leaves: the array leaves; QTensors are leaves.
      paths: for each leaf the path of a weight, or `None` if it is not a parameter.
      names: the key paths of weights that have another name.
      out_tree: structure of the result; it holds what does not depend on a traced value.
      keys: for each leaf its keys inside `(args, kwargs)`.
      lines: the parameters as in a signature.
      splits: the parameters that are in parts; each part is a leaf.
      returned: the parameters whose parts are leaves, and which the function returns unchanged as
        they are given, by the index of the result.
    """

    jaxpr: Any
    consts: list[Any]
    leaves: list[Any]
    paths: list[str | None]
    names: Renamed
    out_tree: Any
    keys: Sequence[tuple[Any, ...]] = ()
    lines: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ()
    returned: Mapping[int, Any] = dataclasses.field(default_factory=dict)

    @property
    def parts(self) -> dict[str, Part]:
        """The leaves that are parts of a parameter, by path."""
        return {part.path: part for split in self.splits for part in split.parts}


class TracedOnce:
    """A function that transforms trace only once for arguments of the same types. A plan, a
    calibration and a conversion then read the same jaxpr.

    It stores its traces, which may hold tracers of an enclosing trace. So it is made for one call,
    and does not outlive the call.
    """

    def __init__(self, f: Callable[..., Any]):
        self.f = f
        self._traces: list[tuple[Any, Traced]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.f(*args, **kwargs)

    def trace(self, kind: Any, trace: Callable[[], Traced]) -> Traced:
        """Returns the result of `trace`, or the stored one for arguments of this kind."""
        for example, traced in self._traces:
            if example == kind:
                return traced
        self._traces.append((kind, trace()))
        return self._traces[-1][1]


def trace_call(
    function: str,
    f: Callable[..., Any],
    params: Params | Weights,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    lazy: bool = False,
) -> Call:
    """Traces `f(*args, **kwargs)`; QTensors are replaced by the float arrays that they represent.

    Leaves without shape and dtype are static: they reach `f`, and are returned by it, unchanged.
    With `lazy`, leaves may be `Lazy`, because nothing is computed on them; otherwise these are an
    error.
    """
    weights = params if isinstance(params, Weights) else Weights(params)
    params = weights.params
    positions = positions_of(params)
    if not all(0 <= position < len(args) for position in positions):
        problem = "`params` names an argument that does not exist."
        details = f"params == {params!r} and {len(args)} positional arguments"
        fix = "pass the weights as a positional argument, and its position as params=."
        raise fail(function, problem, given=details, fix=fix)
    arguments = (tuple(args), dict(kwargs))
    flat, tree = flatten(arguments), jax.tree.structure(arguments, is_leaf=is_whole)
    leaves = [leaf for _, leaf in flat if is_array(leaf)]
    keys = [
        _weight_keys(keys, params, positions) if is_parameter(leaf) else None
        for keys, leaf in flat
        if is_array(leaf)
    ]
    paths = weights.name(function, keys)
    if twice := [path for path, n in Counter(paths).items() if path is not None and n > 1]:
        problem = f"two weights have the same path: {some(map(repr, twice))}."
        fix = "rename one, or pass names=: a key that contains '/' looks like a nested key."
        raise fail(function, problem, fix=fix)
    if not lazy:
        check_read(function, zip(paths, leaves, strict=True))
    _check_parameters(function, weights, args, leaves, paths)
    for leaf, path in zip(leaves, paths, strict=True):
        for part in filter(is_quantized, jax.tree.leaves(leaf, is_leaf=is_quantized)):
            check_dtypes(function, part, f" of {path!r}" if path else "")
    stand_ins = [stand_in(leaf) if is_array(leaf) else _Same(leaf) for _, leaf in flat]

    def trace() -> Traced:
        paths_of_keys = f.f if isinstance(f, TracedOnce) else f
        with evaluating(function, paths_of_keys, args, kwargs):
            traced = _trace(f, tree, stand_ins)
            return traced._replace(jaxpr=with_reads(traced.jaxpr, origins_of(leaves, paths)))

    if isinstance(f, TracedOnce):
        types = [x if isinstance(x, _Same) else compat.type_of(x) for x in stand_ins]
        traced = f.trace((tree, types, paths), trace)
    else:
        traced = trace()
    paths_of_keys = [None if key is None else path_of(key) for key in keys]
    keys_of_arrays = [keys for keys, leaf in flat if is_array(leaf)]
    named = zip(paths, leaves, strict=True)
    lines = tuple(parameter_line(path, leaf) for path, leaf in named if path is not None)
    names = renamed(paths_of_keys, paths)
    call = Call(*traced[:2], leaves, paths, names, traced.out_tree, keys_of_arrays, lines)
    return unstack(function, call, weights.splits)


def _trace(f: Callable[..., Any], tree: Any, arrays_given: Sequence[Any]) -> Traced:
    """Traces a function at the leaves of `(args, kwargs)`, in which static ones are marked."""
    out_tree = None

    def flat_f(*arrays: Any) -> list[Any]:
        nonlocal out_tree
        iterator = iter(arrays)
        filled = [x.value if isinstance(x, _Same) else next(iterator) for x in arrays_given]
        inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
        result = jax.tree.map(_Static.unless_traced, f(*inner_args, **inner_kwargs))
        out, out_tree = jax.tree.flatten(result)
        return out

    arrays = [x for x in arrays_given if not isinstance(x, _Same)]
    jaxpr, consts = compat.trace(flat_f, *arrays)
    return Traced(live(jaxpr), consts, out_tree)


def as_params(function: str, params: Any) -> Params:
    """Returns a position, or several as a tuple, after checking that they are integers."""
    if not isinstance(params, Iterable) or isinstance(params, str):
        return check_integer(function, "params", params)
    positions = tuple(check_integer(function, "params", position) for position in params)
    if len(set(positions)) != len(positions):
        problem = f"`params` names an argument twice: {params!r}."
        raise fail(function, problem, fix="name each argument that holds weights once.")
    return positions


class _Same:
    """A static leaf of the arguments: it equals only itself, whatever its class defines."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, value: object) -> bool:
        return isinstance(value, _Same) and self.value is value.value

    def __hash__(self) -> int:
        return id(self.value)


class _Static:
    """A leaf of the result that does not depend on a traced value: part of the structure."""

    def __init__(self, value: Any):
        self.value = value

    @classmethod
    def unless_traced(cls, leaf: Any) -> Any:
        return cls(leaf) if compat.is_concrete(leaf) else leaf


jax.tree_util.register_pytree_node(
    _Static, lambda static: ((), static.value), lambda value, _: value
)


def _check_parameters(
    function: str,
    weights: Weights,
    args: Sequence[Any],
    leaves: Sequence[Any],
    paths: Sequence[str | None],
) -> None:
    """Raises if parameters are not those of the plan; names the argument that has them."""
    named = zip(paths, leaves, strict=True)
    lines = [parameter_line(path, leaf) for path, leaf in named if path is not None]
    if weights.lines is None or lines == [*weights.lines]:
        return
    fix = _fix_of_parameters(function, weights, args, leaves)
    check_same(function, lines, weights.lines, fix)


def _fix_of_parameters(
    function: str, weights: Weights, args: Sequence[Any], leaves: Sequence[Any]
) -> str:
    """Returns what to do about parameters that are not those of the plan."""
    argnums = positions_of(weights.params)
    planned, count = [*(weights.lines or ())], 0
    for argnum, arg in enumerate(args):
        flat = [(keys, leaf) for keys, leaf in flatten(arg) if is_parameter(leaf)]
        count += len(flat) if argnum in argnums else 0
        names = weights.name(function, [keys for keys, _ in flat])
        pairs = zip(names, flat, strict=True)
        lines = [parameter_line(name, leaf) for name, (_, leaf) in pairs if name is not None]
        if lines == planned and isinstance(weights.params, int):
            return f"argument {argnum} has them: pass the arguments in the order of f."
    is_input = count < 2 and count != len(planned)  # one array in place of the parameters
    if not is_input or any(map(is_whole, leaves)):
        return AGAIN
    fix = f"argument {argnums[0]} holds the parameters: pass them too, as in "
    return f"{fix}quantized.function(quantized.params, x); quantized(x) has them already."


def _weight_keys(
    keys: tuple[Any, ...], params: Params, positions: tuple[int, ...]
) -> tuple[Any, ...] | None:
    """Returns the keys inside the parameters of a leaf of `(args, kwargs)`."""
    in_args = keys[0].idx == 0
    if not in_args or keys[1].idx not in positions:
        return None
    return keys[2:] if isinstance(params, int) else keys[1:]
