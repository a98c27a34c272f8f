"""Splits the scans of a traced function by steps: each part is a scan, and its weights are leaves.

This rewrites the jaxpr before anything else reads it. A weight in parts passes through views part
by part. A scan that steps over it is replaced by one scan for each part: carried values pass
through them in order, and stacked results are joined. Wherever else the weight is read, it is
joined first.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from .. import compat
from ..compat import Eqn
from ..errors import fail
from ..tensor.qtensor import QTensor
from ..tensor.segments import Lazy, Segments, abstract, lazy_parts
from .higher_order import FORMS, Records, Runner
from .paths import Split
from .rules import VIEWS
from .views import Origin
from .walk import evaluate

# The live part of a traced function: what its results and effects need, in loops and branches too.
#
# JAX drops dead code everywhere except in a `while` (before jax 0.11). There a carried value that
# nothing needs is passed on unchanged, so that the code that computes it is dead.


def live(jaxpr: Any) -> Any:
    """Returns an open jaxpr without dead code, with the same operands and results; the same object
    if there is no dead code.
    """
    if not _may_hold_dead(jaxpr, {}):
        return jaxpr
    alive = compat.without_dead(jaxpr)
    size = _size(alive)
    if size.loops:
        alive = compat.without_dead(_with_live_loops(alive, {}))
        size = _size(alive)
    return jaxpr if size == _size(jaxpr) else alive


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


class _Size(NamedTuple):
    """The number of equations, including those inside others, and of `while` loops among them."""

    eqns: int
    loops: int


def _size(jaxpr: Any, memo: dict[int, _Size] | None = None) -> _Size:
    memo = {} if memo is None else memo
    if id(jaxpr) not in memo:
        parts = [_size(body, memo) for eqn in jaxpr.eqns for body in compat.sub_jaxprs(eqn)]
        parts += [_Size(1, eqn.primitive.name == "while") for eqn in jaxpr.eqns]
        memo[id(jaxpr)] = _Size(sum(p.eqns for p in parts), sum(p.loops for p in parts))
    return memo[id(jaxpr)]


def _with_live_loops(jaxpr: Any, memo: dict[int, Any]) -> Any:
    """Returns an open jaxpr without dead code in its `while` loops; the same object if none."""
    if id(jaxpr) not in memo:
        read = read_by(jaxpr)
        eqns = [_with_live_bodies(eqn, read, memo) for eqn in jaxpr.eqns]
        changed = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
        memo[id(jaxpr)] = jaxpr.replace(eqns=eqns) if changed else jaxpr
    return memo[id(jaxpr)]


def _with_live_bodies(eqn: Eqn, read: set[int], memo: dict[int, Any]) -> Eqn:
    eqn = compat.with_bodies(eqn, lambda body: _with_live_loops(body, memo))
    if eqn.primitive.name != "while":
        return eqn
    old = eqn.params["body_jaxpr"]
    new = _live_body(eqn, read, old)
    return eqn if new is old else eqn.replace(params={**eqn.params, "body_jaxpr": new})


def _live_body(eqn: Eqn, read: set[int], closed: Any) -> Any:
    """Returns the body of a `while` without dead code."""
    body, _ = compat.open_jaxpr(closed)
    condition, _ = compat.open_jaxpr(eqn.params["cond_jaxpr"])
    consts = eqn.params["body_nconsts"]
    asked = compat.needed(condition)
    used = [id(result) in read for result in eqn.outvars]
    grown = [a or b for a, b in zip(used, asked[eqn.params["cond_nconsts"] :], strict=True)]
    while grown != used:
        used = grown
        needed = compat.needed(body, used)
        grown = [a or b for a, b in zip(used, needed[consts:], strict=True)]
    carried = zip(used, body.outvars, body.invars[consts:], strict=True)
    handed_on = body.replace(outvars=[new if live else old for live, new, old in carried])
    new = compat.without_dead(handed_on)
    return closed if _size(new) == _size(body) else compat.with_body(closed, new)


_SIZES = ("new_sizes", "shape", "limit_indices", "slice_sizes")
"""Parameters of views that have a size for each axis of the result."""

_UNSPLIT = {
    "shard_map": "shard_map",
    "custom_jvp_call": "jax.custom_jvp",
    "custom_vjp_call": "jax.custom_vjp",
}
"""Forms that a weight cannot enter in parts."""


def split_leaf(function: str, leaf: Any, split: Split) -> list[Any]:
    """Returns the parts of a leaf: those of Segments, or slices of an array."""
    kind = abstract(leaf)
    if isinstance(kind, Segments):
        if (kind.axis, kind.bounds) != (split.axis, split.bounds):
            problem = f"the Segments {leaf!r} of {split.path!r} do not fit the plan."
            expected = f"parts with the bounds {list(split.bounds)} along axis {split.axis}"
            fix = "quantize the parameters with this plan: jqx.quantize_params(params, plan)."
            raise fail(function, problem, expected=expected, fix=fix)
        return lazy_parts(leaf) if isinstance(leaf, Lazy) else list(leaf.parts)
    return [_slice(leaf, split.axis, a, b) for a, b in itertools.pairwise(split.bounds)]


def _slice(x: Any, axis: int, start: int, stop: int) -> Any:
    if isinstance(x, Lazy):
        return x.then(partial(_slice, axis=axis, start=start, stop=stop), f"{axis} {start}:{stop}")
    if isinstance(x, jax.ShapeDtypeStruct):
        shape = (*x.shape[:axis], stop - start, *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype)
    if isinstance(x, (QTensor, np.ndarray)):
        return x[(slice(None),) * axis + (slice(start, stop),)]
    return lax.slice_in_dim(x, start, stop, axis=axis)


def rewritten(
    function: str,
    jaxpr: Any,
    consts: Sequence[Any],
    given_leaves: Sequence[Any],
    out: Callable[[list[Any]], Any],
) -> tuple[Any, list[Any], Any]:
    """Returns a traced function in which some leaves are in parts.

    Args:
      function: name of the calling function, for messages.
      jaxpr: the function.
      consts: values of its constvars.
      given_leaves: a stand-in for each operand, or `Segments` of stand-ins if it is in parts.
      out: makes the result of the function from the results of the jaxpr.

    Returns:
      The jaxpr, whose operands are the parts, its constants, and the structure of its result.
    """
    tree, out_tree = jax.tree.structure(list(given_leaves)), None

    def run(*flat: Any) -> list[Any]:
        nonlocal out_tree
        results = evaluated(function, jaxpr, consts, jax.tree.unflatten(tree, flat))
        leaves, out_tree = jax.tree.flatten(out(results))
        return leaves

    new, new_consts = compat.trace(run, *jax.tree.leaves(list(given_leaves)))
    return live(new), new_consts, out_tree


def evaluated(function: str, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr of arrays, and of `Segments` for weights in parts."""
    return evaluate(jaxpr, consts, args, partial(_results, function))


def _results(function: str, index: int, eqn: Eqn, operands: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if not any(isinstance(x, Segments) for x in operands):
        return compat.bind(eqn, operands)
    if name in _UNSPLIT:
        segments = next(x for x in operands if isinstance(x, Segments))
        problem = f"a scan cannot be split inside a `{_UNSPLIT[name]}`."
        details = f"a weight of the shape {list(segments.shape)} in parts with the bounds "
        details += f"{list(segments.bounds)}{compat.at_line_of(eqn)}"
        fix = "let the rules select whole weights there, or split the weights in f."
        raise fail(function, problem, given=details, fix=fix, error=NotImplementedError)
    if name == "scan":
        return _scan(function, eqn, operands)
    if name in FORMS:
        return FORMS[name](eqn, operands, _Runner(function, eqn))[0]
    if name in VIEWS:
        viewed = _view(eqn, operands)
        if viewed is not None:
            return viewed
    return compat.bind(eqn, [joined(x) for x in operands])


def joined(x: Any) -> Any:
    """Returns a weight in parts as one array; other values are unchanged."""
    return lax.concatenate(x.parts, x.axis) if isinstance(x, Segments) else x


def _scan(function: str, eqn: Eqn, operands: list[Any]) -> list[Any]:
    """Runs a scan over weights in parts as one scan for each part, in the order of its steps."""
    consts, count = compat.scan_counts(eqn)
    xs_start = consts + count
    fixed, carry = operands[:consts], operands[consts:xs_start]
    # Parts are useful only along the axis that the scan steps over.
    xs = [joined(x) if isinstance(x, Segments) and x.axis else x for x in operands[xs_start:]]
    bounds = {x.bounds for x in xs if isinstance(x, Segments)}
    apply, runner = FORMS["scan"], _Runner(function, eqn)
    if len(bounds) != 1:
        return apply(eqn, [*fixed, *carry, *map(joined, xs)], runner)[0]
    (cuts,) = bounds
    pieces: list[list[Any]] = []
    steps = list(enumerate(itertools.pairwise(cuts)))
    for i, (start, stop) in reversed(steps) if eqn.params["reverse"] else steps:
        parts_of_xs = [
            x.parts[i] if isinstance(x, Segments) else _slice(x, 0, start, stop) for x in xs
        ]
        params = {**eqn.params, "length": stop - start}
        with jax.named_scope(f"[{start}:{stop}]"):
            results, _ = apply(eqn.replace(params=params), [*fixed, *carry, *parts_of_xs], runner)
        carry = results[:count]
        pieces.append(results[count:])
    if eqn.params["reverse"]:
        pieces.reverse()
    return [*carry, *(lax.concatenate(ys, 0) for ys in zip(*pieces, strict=True))]


def _view(eqn: Eqn, operands: Sequence[Any]) -> list[Any] | None:
    """Evaluates a view part by part; `None` if a result does not have these parts."""
    parted = [x for x in operands if isinstance(x, Segments)]
    if eqn.primitive.name == "optimization_barrier":
        leaves, tree = jax.tree.flatten(list(operands))
        return jax.tree.unflatten(tree, compat.bind(eqn, leaves))
    if len({(x.bounds, x.axis) for x in parted}) > 1 or any(
        np.ndim(x) for x in operands if not isinstance(x, Segments)
    ):
        return None
    axis, length = parted[0].axis, parted[0].shape[parted[0].axis]
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
        dims = origin.dims if origin is not None else ()
        axes_of_dims = [i for i, axes_of_dims in enumerate(dims) if axis in axes_of_dims]
        if (
            len(axes_of_dims) != 1
            or len(dims[axes_of_dims[0]]) > 1
            or var.aval.shape[axes_of_dims[0]] != length
        ):
            return None
        axes.append(axes_of_dims[0])
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
        results = evaluated(self.function, body, consts, args)
        loop = self.eqn.primitive.name in ("scan", "while")
        return [joined(x) if loop else x for x in results], {}

    def dense(self, x: Any) -> Any:
        return joined(x)

    def common(self, forms: Sequence[Any]) -> Any:
        return next((x for x in forms if isinstance(x, Segments)), forms[0])

    def like(self, x: Any, example: Any) -> Any:
        x = joined(x)
        if not isinstance(example, Segments):
            return x
        intervals = itertools.pairwise(example.bounds)
        return Segments([_slice(x, example.axis, a, b) for a, b in intervals], example.axis)
