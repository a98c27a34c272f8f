"""Traces a function of any pytrees: its array leaves, their names, and its jaxpr, without dead code
and with split scans where rules select steps.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import lax

from .. import compat
from ..checks import check_integer
from ..compat import Eqn
from ..errors import fail, some
from ..policy import Policy
from ..tensor.layout import check_dtypes
from ..tensor.qtensor import QTensor
from ..tensor.segments import Segments, check_read
from .arguments import evaluating
from .find import Found, check_split, contractions, origins_of, splits_of, with_reads
from .higher_order import FORMS, Records, Runner
from .paths import (
    AGAIN,
    EACH,
    Params,
    Part,
    Renamed,
    Split,
    Splits,
    Weights,
    check_same,
    cut_parts,
    flatten,
    is_whole,
    joined_parts,
    parameter_line,
    part_paths,
    path_of,
    positions_of,
    renamed,
    split_leaf,
    stack_leaf,
    stand_in,
)
from .rules import VIEWS, given_functions
from .views import Origin
from .walk import evaluate


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
    found: dict[Any, list[Found]]


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
      found: its contractions, once they are known, by the jaxpr and how its sites are counted.
        Calls of a function that is traced once share them.
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
    found: dict[Any, list[Found]] = dataclasses.field(default_factory=dict)

    @property
    def parts(self) -> dict[str, Part]:
        """The leaves that are parts of a parameter, by path."""
        return {part.path: part for split in self.splits for part in split.parts}


class TracedOnce:
    """A function that transforms trace only once for arguments of the same types. A plan, a
    calibration and a conversion then read the same jaxpr.

    It stores its traces, which may hold tracers of an enclosing trace. So it is made for one call,
    and does not outlive the call. One that is made of another shares its traces.
    """

    def __init__(self, f: Callable[..., Any]):
        self.f: Callable[..., Any] = f.f if isinstance(f, TracedOnce) else f
        self._traces: list[tuple[Any, Traced]] = f._traces if isinstance(f, TracedOnce) else []

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
        keys[2 if isinstance(params, int) else 1 :]
        if is_parameter(leaf) and keys[0].idx == 0 and keys[1].idx in positions
        else None
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
    named = zip(paths, leaves, strict=True)
    lines = tuple(parameter_line(path, leaf) for path, leaf in named if path is not None)
    if weights.lines is not None and lines != weights.lines:
        fix = _fix_of_parameters(function, weights, args, leaves)
        check_same(function, lines, weights.lines, fix)
    for leaf, path in zip(leaves, paths, strict=True):
        for part in filter(is_quantized, jax.tree.leaves(leaf, is_leaf=is_quantized)):
            check_dtypes(function, part, f" of {path!r}" if path else "")
    stand_ins = [stand_in(leaf) if is_array(leaf) else _Same(leaf) for _, leaf in flat]

    def trace() -> Traced:
        with evaluating(function, f.f if isinstance(f, TracedOnce) else f, args, kwargs):
            traced = _trace(f, tree, stand_ins)
            return traced._replace(jaxpr=with_reads(traced.jaxpr, origins_of(leaves, paths)))

    if isinstance(f, TracedOnce):
        types = [x if isinstance(x, _Same) else compat.type_of(x) for x in stand_ins]
        traced = f.trace((tree, types, paths), trace)
    else:
        traced = trace()
    paths_of_keys = [None if key is None else path_of(key) for key in keys]
    keys_of_arrays = [keys for keys, leaf in flat if is_array(leaf)]
    names = renamed(paths_of_keys, paths)
    out_tree, found = traced.out_tree, traced.found
    call = Call(*traced[:2], leaves, paths, names, out_tree, keys_of_arrays, lines, found=found)
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
    return Traced(live(_with_functions(jaxpr, given_functions())), consts, out_tree, {})


def _with_functions(jaxpr: Any, functions: Mapping[str, Callable[..., Any]]) -> Any:
    """Returns an open jaxpr in which jitted functions compute what is given for their names; the
    same object if none has such a name.
    """

    def changed(eqn: Eqn) -> Eqn:
        eqn = _only_call(eqn, functions)
        name = compat.name_of_jit(eqn)
        if name not in functions:
            return compat.with_bodies(eqn, lambda body: _with_functions(body, functions))
        f, operands = functions[name], [x.aval for x in eqn.invars]
        with evaluating("extend.primitive_rules", f, operands, {}), compat.equation_context(eqn):
            body = jax.make_jaxpr(f)(*operands)
        found, expected = (
            ", ".join(f"{x.dtype}{list(x.shape)}" for x in avals)
            for avals in (body.out_avals, [x.aval for x in eqn.outvars])
        )
        if found != expected:
            problem = f"the function for {name!r} does not return what the jitted one returns."
            fix = "return it; the dtype of a product is its preferred_element_type=."
            function = "extend.primitive_rules"
            raise fail(function, problem, given=found, expected=expected, fix=fix)
        # It has another name, so that it is not replaced where a transform of f is traced again.
        return eqn.replace(params={**eqn.params, "jaxpr": body, "name": f"{name}_rule"})

    eqns = list(map(changed, jaxpr.eqns)) if functions else []
    is_new = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=False))
    return jaxpr.replace(eqns=eqns) if is_new else jaxpr


def _only_call(eqn: Eqn, names: Container[str]) -> Eqn:
    """Returns the call of a jitted function with one of these names, if a `jax.custom_vjp` does
    nothing else: then derivatives are those of the function in its place.
    """
    if eqn.primitive.name != "custom_vjp_call":
        return eqn
    body, consts = compat.open_jaxpr(eqn.params["call_jaxpr"])
    if len(body.eqns) != 1 or consts or list(body.outvars) != list(body.eqns[0].outvars):
        return eqn
    inner, outer = body.eqns[0], dict(zip(body.invars, eqn.invars, strict=True))
    if compat.name_of_jit(inner) not in names or any(map(compat.is_literal, inner.invars)):
        return eqn
    return inner.replace(invars=[outer[x] for x in inner.invars], outvars=eqn.outvars)


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


# `unstack`: a traced function as a function of parts of its parameters. Each part of a weight that
# a scan steps over is an ordinary leaf, and a scan of its own steps over it.
#
# This rewrites the jaxpr before anything else reads it. A weight in parts passes through views part
# by part. A scan that steps over it is replaced by one scan for each part: carried values pass
# through them in order, and stacked results are joined. Wherever else the weight is read, it is
# joined first. `Segments` stand for such a weight while the jaxpr is rewritten, and in the trees of
# users; all other code sees the parts.


def unstack(function: str, call: Any, splits: Splits) -> Any:
    """Returns the function of parts, and the parts.

    Args:
      function: name of the calling function, for messages.
      call: the `Call` of a function and its arguments.
      splits: which parameters are split.

    Returns:
      A `Call` whose leaves are the parts, each with a path of its own; the same one if nothing is
      split.
    """
    is_planned = isinstance(splits, tuple)
    splits = splits if isinstance(splits, tuple) else _splits_by(function, call, splits)
    by_path = {split.path: split for split in splits}
    for leaf, path in zip(call.leaves, call.paths, strict=True):
        if isinstance(leaf, Segments) and path not in by_path:
            problem = f"there are Segments for {path!r}, which the plan does not split."
            fix = "quantize the parameters with this plan, or pass segments.dequantize()."
            raise fail(function, problem, given=f"{leaf!r}", fix=fix)
    if not splits:
        return call
    leaves, paths, keys, args = [], [], [], []
    whole = {}
    parameters = zip(call.jaxpr.invars, call.leaves, call.paths, call.keys, strict=True)
    for var, leaf, path, key in parameters:
        split = by_path.get(path)
        parts = split_leaf(function, leaf, split)
        leaves += parts
        paths += part_paths(path, split)
        keys += [key] * len(parts)
        args.append(stack_leaf(list(map(stand_in, parts)), split))
        if split is not None and is_planned and not isinstance(leaf, Segments):
            whole[var] = leaf
    as_given = {*call.jaxpr.invars} - {*whole}
    returned, out_tree = dict[int, Any](), None
    results_of = partial(_results_of_parts, function)

    def run(*flat: Any) -> list[Any]:
        nonlocal out_tree
        results, count = [], 0
        stacks = evaluate(call.jaxpr, call.consts, jax.tree.unflatten(tree, flat), results_of)
        for atom, x in zip(call.jaxpr.outvars, stacks, strict=True):
            var = None if compat.is_literal(atom) else atom
            results.append(x if var in as_given else joined_parts(x))
            if var in whole:
                returned[count] = whole[var]
            count += len(jax.tree.leaves(results[-1]))
        out, out_tree = jax.tree.flatten(jax.tree.unflatten(call.out_tree, results))
        return out

    stand_ins, tree = jax.tree.flatten(args)
    jaxpr, consts = compat.trace(run, *stand_ins)
    new = dataclasses.replace(
        call,
        jaxpr=with_reads(live(jaxpr), origins_of(leaves, paths)),
        consts=consts,
        out_tree=out_tree,
        leaves=leaves,
        paths=paths,
        keys=keys,
        splits=splits,
        returned=returned,
    )
    if not is_planned:
        check_split(function, contractions(new), new.splits)
    return new


def _splits_by(function: str, call: Any, by: Policy | Literal["each"]) -> tuple[Split, ...]:
    """Returns where the rules of a policy, or each step, split the scans of a function."""
    policy = None if by == EACH else by
    if isinstance(policy, Policy) and not any(rule.selector for rule in policy.rules):
        return ()
    named = zip(call.paths, call.leaves, strict=True)
    shapes = {path: tuple(leaf.shape) for path, leaf in named if path is not None}
    return splits_of(function, contractions(call), policy, shapes)


# The evaluation of a jaxpr of arrays, and of `Segments` for weights in parts.


_SIZES = ("new_sizes", "shape", "limit_indices", "slice_sizes")
"""Parameters of views that have a size for each axis of the result."""

_UNSPLIT = {
    "shard_map": "shard_map",
    "custom_jvp_call": "jax.custom_jvp",
    "custom_vjp_call": "jax.custom_vjp",
}
"""Forms that a weight cannot enter in parts."""


def _results_of_parts(function: str, index: int, eqn: Eqn, operands: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    parted = [x for x in operands if isinstance(x, Segments)]
    if not parted:
        return compat.bind(eqn, operands)
    if name in _UNSPLIT:
        problem = f"a scan cannot be split inside a `{_UNSPLIT[name]}`."
        details = f"a weight of the shape {list(parted[0].shape)} in parts with the bounds "
        details += f"{list(parted[0].bounds)}{compat.at_line_of(eqn)}"
        fix = "let the rules select whole weights there, or split the weights in f."
        raise fail(function, problem, given=details, fix=fix, error=NotImplementedError)
    if name == "scan":
        return _scan(eqn, operands, _PartsRunner(function, eqn))
    if name in FORMS:
        return FORMS[name](eqn, operands, _PartsRunner(function, eqn))[0]
    viewed = _view(eqn, operands, parted) if name in VIEWS else None
    return compat.bind(eqn, list(map(joined_parts, operands))) if viewed is None else viewed


def _scan(eqn: Eqn, operands: list[Any], runner: Runner) -> list[Any]:
    """Runs a scan over weights in parts as one scan for each part, in the order of its steps."""
    const_count, count = compat.scan_counts(eqn)
    fixed, carry = operands[:const_count], operands[const_count : const_count + count]
    xs = operands[const_count + count :]
    # Parts are useful only along the axis that the scan steps over.
    bounds_of_xs = {x.bounds for x in xs if isinstance(x, Segments) and x.axis == 0}
    if len(bounds_of_xs) != 1:
        return FORMS["scan"](eqn, [*fixed, *carry, *map(joined_parts, xs)], runner)[0]
    (bounds,) = bounds_of_xs
    parts_of_xs = zip(*(cut_parts(x, 0, bounds) for x in xs), strict=True)
    steps = list(zip(itertools.pairwise(bounds), parts_of_xs, strict=True))
    pieces: list[list[Any]] = []
    for (start, stop), parts in reversed(steps) if eqn.params["reverse"] else steps:
        part = eqn.replace(params={**eqn.params, "length": stop - start})
        with jax.named_scope(f"[{start}:{stop}]"):
            results, _ = FORMS["scan"](part, [*fixed, *carry, *parts], runner)
        carry = results[:count]
        pieces.append(results[count:])
    if eqn.params["reverse"]:
        pieces.reverse()
    return [*carry, *(lax.concatenate(ys, 0) for ys in zip(*pieces, strict=True))]


def _view(eqn: Eqn, operands: Sequence[Any], parted: Sequence[Segments]) -> list[Any] | None:
    """Evaluates a view part by part; `None` if a result does not have these parts."""
    if eqn.primitive.name == "optimization_barrier":
        leaves, tree = jax.tree.flatten(list(operands))
        return jax.tree.unflatten(tree, compat.bind(eqn, leaves))
    kinds = {(x.axis, x.bounds) if isinstance(x, Segments) else np.ndim(x) for x in operands}
    axis, bounds = parted[0].axis, parted[0].bounds
    if kinds - {0} != {(axis, bounds)}:
        return None
    if eqn.primitive.name == "slice":
        return _parts_in(eqn, parted[0])
    if eqn.primitive.name == "rev" and axis in eqn.params["dimensions"]:
        return None
    origins = [
        Origin.of_leaf(str(i), x.ndim) if isinstance(x, Segments) else None
        for i, x in enumerate(operands)
    ]
    axes = []
    for origin, var in zip(VIEWS[eqn.primitive.name].track(eqn, origins), eqn.outvars, strict=True):
        dims = () if origin is None else origin.dims
        holding = [i for i, held_axes in enumerate(dims) if axis in held_axes]
        if [dims[i] for i in holding] != [{axis}] or var.aval.shape[holding[0]] != bounds[-1]:
            return None
        axes += holding
    viewed = []
    for i, part in enumerate(parted[0].parts):
        parts_of_step = [x.parts[i] if isinstance(x, Segments) else x for x in operands]
        try:
            viewed.append(compat.bind(_of_size(eqn, axes[0], part.shape[axis]), parts_of_step))
        except (TypeError, ValueError):  # a custom primitive with other parameters for sizes
            return None
    return [
        Segments(parts, out_axis)
        for parts, out_axis in zip(zip(*viewed, strict=True), axes, strict=True)
    ]


def _parts_in(eqn: Eqn, x: Segments) -> list[Any] | None:
    """Returns the parts that a slice takes; `None` if it cuts one. A function that has been split,
    such as the result of `map_channels`, slices its weights, and here gets its parts again.
    """
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides, ends = eqn.params["strides"] or (1,) * x.ndim, (starts[x.axis], stops[x.axis])
    if strides[x.axis] != 1 or not {*ends} <= {*x.bounds}:
        return None
    selected = x.parts[x.bounds.index(ends[0]) : x.bounds.index(ends[1])]
    start = (*starts[: x.axis], 0, *starts[x.axis + 1 :])
    limits = [(*stops[: x.axis], p.shape[x.axis], *stops[x.axis + 1 :]) for p in selected]
    parts = [lax.slice(p, start, limit, strides) for p, limit in zip(selected, limits, strict=True)]
    return parts if len(parts) == 1 else [Segments(parts, x.axis)]


def _of_size(eqn: Eqn, axis: int, size: int) -> Eqn:
    """Returns a view for a part, with a given size along an axis of the result."""
    params = dict(eqn.params)
    for name in _SIZES:
        if isinstance(params.get(name), tuple):
            params[name] = (*params[name][:axis], size, *params[name][axis + 1 :])
    return eqn.replace(params=params)


@dataclasses.dataclass(frozen=True)
class _PartsRunner(Runner):
    """Evaluates the functions inside an equation."""

    function: str
    eqn: Eqn

    def run(
        self, jaxpr: Any, args: Sequence[Any], part: Any = (), site_inputs: Any = None
    ) -> tuple[list[Any], Records]:
        body, consts = compat.open_jaxpr(jaxpr)
        results = evaluate(body, consts, args, partial(_results_of_parts, self.function))
        loop = self.eqn.primitive.name in ("scan", "while")
        return [joined_parts(x) if loop else x for x in results], {}

    def common(self, forms: Sequence[Any]) -> Any:
        return next((x for x in forms if isinstance(x, Segments)), forms[0])

    def like(self, x: Any, example: Any) -> Any:
        x = joined_parts(x)
        if not isinstance(example, Segments):
            return x
        return Segments(cut_parts(x, example.axis, example.bounds), example.axis)


# The live part of a traced function: what its results and effects need, in loops and branches too.
#
# JAX drops dead code everywhere except in a `while` (before jax 0.11). There a carried value that
# nothing needs is passed on unchanged, so that the code that computes it is dead.


def live(jaxpr: Any) -> Any:
    """Returns an open jaxpr without dead code, with the same operands and results; the same object
    if nothing may be dead.
    """
    if not _may_hold_dead(jaxpr, {}):
        return jaxpr
    alive = compat.without_dead(jaxpr)
    with_loops = _with_live_loops(alive, {})
    return alive if with_loops is alive else compat.without_dead(with_loops)


def _may_hold_dead(jaxpr: Any, memo: dict[int, bool]) -> bool:
    """Whether there is a `while`, a result of an equation that nothing reads, or an operand that a
    function inside an equation does not read. If there is none, nothing is dead.
    """
    if id(jaxpr) not in memo:
        read = read_by(jaxpr)
        memo[id(jaxpr)] = any(
            eqn.primitive.name == "while"
            or not read.issuperset(map(id, eqn.outvars))
            or any(
                not read_by(body).issuperset(map(id, body.invars)) or _may_hold_dead(body, memo)
                for body in compat.sub_jaxprs(eqn)
            )
            for eqn in jaxpr.eqns
        )
    return memo[id(jaxpr)]


def read_by(jaxpr: Any) -> set[int]:
    """Returns the `id` of each value of an open jaxpr that its equations or results read."""
    return {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars} | set(map(id, jaxpr.outvars))


def _with_live_loops(jaxpr: Any, memo: dict[int, Any]) -> Any:
    """Returns an open jaxpr without dead code in its `while` loops; the same one without loops."""
    if id(jaxpr) not in memo:
        read = read_by(jaxpr)
        eqns = [_with_live_bodies(eqn, read, memo) for eqn in jaxpr.eqns]
        changed = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
        memo[id(jaxpr)] = jaxpr.replace(eqns=eqns) if changed else jaxpr
    return memo[id(jaxpr)]


def _with_live_bodies(eqn: Eqn, read: set[int], memo: dict[int, Any]) -> Eqn:
    """Returns an equation with live code in the `while` loops inside it, or that it is itself."""
    eqn = compat.with_bodies(eqn, lambda body: _with_live_loops(body, memo))
    if eqn.primitive.name != "while":
        return eqn
    closed, consts = eqn.params["body_jaxpr"], eqn.params["body_nconsts"]
    body, _ = compat.open_jaxpr(closed)
    condition, _ = compat.open_jaxpr(eqn.params["cond_jaxpr"])
    asked = compat.needed(condition)
    used = [id(result) in read for result in eqn.outvars]
    grown = [a or b for a, b in zip(used, asked[eqn.params["cond_nconsts"] :], strict=True)]
    while grown != used:
        used = grown
        needed = compat.needed(body, used)
        grown = [a or b for a, b in zip(used, needed[consts:], strict=True)]
    carried = zip(used, body.outvars, body.invars[consts:], strict=True)
    handed_on = body.replace(outvars=[new if live else old for live, new, old in carried])
    new_body = compat.with_body(closed, compat.without_dead(handed_on))
    return eqn.replace(params={**eqn.params, "body_jaxpr": new_body})
