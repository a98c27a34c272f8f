"""`unstack`: a traced function as a function of parts of its parameters. Each part of a weight that
a scan steps over is an ordinary leaf, and a scan of its own steps over it.

This rewrites the jaxpr before anything else reads it. A weight in parts passes through views part
by part. A scan that steps over it is replaced by one scan for each part: carried values pass
through them in order, and stacked results are joined. Wherever else the weight is read, it is
joined first. `Segments` stand for such a weight while the jaxpr is rewritten, and in the trees of
users; all other code sees the parts.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jax import lax

from .. import compat
from ..compat import Eqn
from ..errors import fail
from ..policy import Policy
from ..tensor.qtensor import QTensor
from ..tensor.segments import Lazy, Segments, abstract
from ..tensor.shardings import sharding_of
from .find import check_split, contractions, origins_of, splits_of, with_reads
from .higher_order import FORMS, Records, Runner
from .live import live
from .paths import EACH, Split, Splits, is_whole
from .rules import VIEWS
from .views import Origin
from .walk import evaluate

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
    return _cut(leaf, split.axis, split.bounds)


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


def _joined(x: Any) -> Any:
    """Returns a weight in parts as one array; other values are unchanged."""
    return lax.concatenate(x.parts, x.axis) if isinstance(x, Segments) else x


def _cut(x: Any, axis: int, bounds: tuple[int, ...]) -> list[Any]:
    """Returns the parts of a value with these bounds: its own, or slices."""
    if isinstance(x, Segments) and (x.axis, x.bounds) != (axis, bounds):
        x = _joined(x)
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


# The function of parts, and its leaves.


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

    def run(*flat: Any) -> list[Any]:
        nonlocal out_tree
        results, count = [], 0
        stacks = _evaluated(function, call.jaxpr, call.consts, jax.tree.unflatten(tree, flat))
        for atom, x in zip(call.jaxpr.outvars, stacks, strict=True):
            var = None if compat.is_literal(atom) else atom
            results.append(x if var in as_given else _joined(x))
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


def _evaluated(function: str, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return evaluate(jaxpr, consts, args, partial(_results, function))


def _results(function: str, index: int, eqn: Eqn, operands: list[Any]) -> list[Any]:
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
        return _scan(eqn, operands, _Runner(function, eqn))
    if name in FORMS:
        return FORMS[name](eqn, operands, _Runner(function, eqn))[0]
    viewed = _view(eqn, operands, parted) if name in VIEWS else None
    return compat.bind(eqn, list(map(_joined, operands))) if viewed is None else viewed


def _scan(eqn: Eqn, operands: list[Any], runner: Runner) -> list[Any]:
    """Runs a scan over weights in parts as one scan for each part, in the order of its steps."""
    const_count, count = compat.scan_counts(eqn)
    fixed, carry = operands[:const_count], operands[const_count : const_count + count]
    xs = operands[const_count + count :]
    # Parts are useful only along the axis that the scan steps over.
    bounds_of_xs = {x.bounds for x in xs if isinstance(x, Segments) and x.axis == 0}
    if len(bounds_of_xs) != 1:
        return FORMS["scan"](eqn, [*fixed, *carry, *map(_joined, xs)], runner)[0]
    (bounds,) = bounds_of_xs
    parts_of_xs = zip(*(_cut(x, 0, bounds) for x in xs), strict=True)
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
class _Runner(Runner):
    """Evaluates the functions inside an equation."""

    function: str
    eqn: Eqn

    def run(
        self, jaxpr: Any, args: Sequence[Any], part: Any = (), site_inputs: Any = None
    ) -> tuple[list[Any], Records]:
        body, consts = compat.open_jaxpr(jaxpr)
        results = _evaluated(self.function, body, consts, args)
        loop = self.eqn.primitive.name in ("scan", "while")
        return [_joined(x) if loop else x for x in results], {}

    def common(self, forms: Sequence[Any]) -> Any:
        return next((x for x in forms if isinstance(x, Segments)), forms[0])

    def like(self, x: Any, example: Any) -> Any:
        x = _joined(x)
        if not isinstance(example, Segments):
            return x
        return Segments(_cut(x, example.axis, example.bounds), example.axis)
