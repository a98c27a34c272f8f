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
from typing import Any

import jax
import numpy as np
from jax import lax

from .. import _compat
from .._compat import Eqn
from .._errors import fail
from ..tensor import QTensor, Segments
from ..tensor._shared import Lazy, abstract, lazy_parts
from ._evaluate import evaluate
from ._live import live
from ._origin import Origin
from ._paths import Split
from .primitives import FORMS, VIEWS, Records

_SIZES = ("new_sizes", "shape", "limit_indices", "slice_sizes")
"""Parameters of views that have a size for each axis of the result."""

_REFUSED = {
    "shard_map": "a `shard_map`",
    "custom_jvp_call": "a `jax.custom_jvp`",
    "custom_vjp_call": "a `jax.custom_vjp`",
}
"""Forms that a weight cannot enter in parts."""


def parts_of(function: str, leaf: Any, split: Split) -> list[Any]:
    """Returns the parts of a leaf: those of Segments, or slices of an array."""
    kind = abstract(leaf)
    if isinstance(kind, Segments):
        if (kind.axis, kind.bounds) != (split.axis, split.bounds):
            raise fail(
                function,
                "Segments do not fit the plan.",
                given=f"{leaf!r} for the parameter {split.path!r}",
                expected=f"parts with the bounds {list(split.bounds)} along axis {split.axis}",
                fix="quantize the parameters with this plan: jqx.quantize_params(params, plan).",
            )
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
    given: Sequence[Any],
    out: Callable[[list[Any]], Any],
) -> tuple[Any, list[Any], Any]:
    """Returns a traced function in which some leaves are in parts.

    Args:
      function: name of the calling function, for messages.
      jaxpr: the function.
      consts: values of its constvars.
      given: a stand-in for each operand, or `Segments` of stand-ins if it is in parts.
      out: makes the result of the function from the results of the jaxpr.

    Returns:
      The jaxpr, whose operands are the parts, its constants, and the structure of its result.
    """
    tree, out_tree = jax.tree.structure(list(given)), None

    def run(*flat: Any) -> list[Any]:
        nonlocal out_tree
        results = evaluated(function, jaxpr, consts, jax.tree.unflatten(tree, flat))
        leaves, out_tree = jax.tree.flatten(out(results))
        return leaves

    new, new_consts = _compat.trace(run, *jax.tree.leaves(list(given)))
    return live(new), new_consts, out_tree


def evaluated(function: str, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr of arrays, and of `Segments` for weights in parts."""
    return evaluate(jaxpr, consts, args, partial(_results, function))


def _results(function: str, eqn: Eqn, operands: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if not any(isinstance(x, Segments) for x in operands):
        return _compat.bind(eqn, operands)
    if name in _REFUSED:
        _refuse(function, eqn, operands)
    if name == "scan":
        return _scan(function, eqn, operands)
    if name in FORMS:
        return FORMS[name].apply(eqn, operands, _Runner(function, eqn))[0]
    if name in VIEWS:
        seen = _view(eqn, operands)
        if seen is not None:
            return seen
    return _compat.bind(eqn, [joined(x) for x in operands])


def joined(x: Any) -> Any:
    """Returns a weight in parts as one array; other values are unchanged."""
    return lax.concatenate(x.parts, x.axis) if isinstance(x, Segments) else x


def _scan(function: str, eqn: Eqn, operands: list[Any]) -> list[Any]:
    """Runs a scan over weights in parts as one scan for each part, in the order of its steps."""
    consts, count = _compat.scan_counts(eqn)
    first = consts + count
    fixed, carry = operands[:consts], operands[consts:first]
    # Parts are useful only along the axis that the scan steps over.
    xs = [joined(x) if isinstance(x, Segments) and x.axis else x for x in operands[first:]]
    bounds = {x.bounds for x in xs if isinstance(x, Segments)}
    apply, runner = FORMS["scan"].apply, _Runner(function, eqn)
    if len(bounds) != 1:
        return apply(eqn, [*fixed, *carry, *map(joined, xs)], runner)[0]
    (places,) = bounds
    pieces: list[list[Any]] = []
    steps = list(enumerate(itertools.pairwise(places)))
    for i, (start, stop) in reversed(steps) if eqn.params["reverse"] else steps:
        own = [x.parts[i] if isinstance(x, Segments) else _slice(x, 0, start, stop) for x in xs]
        params = {**eqn.params, "length": stop - start}
        with jax.named_scope(f"[{start}:{stop}]"):
            results, _ = apply(eqn.replace(params=params), [*fixed, *carry, *own], runner)
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
        return jax.tree.unflatten(tree, _compat.bind(eqn, leaves))
    if len({(x.bounds, x.axis) for x in parted}) > 1 or any(
        np.ndim(x) for x in operands if not isinstance(x, Segments)
    ):
        return None
    axis, length = parted[0].axis, parted[0].shape[parted[0].axis]
    if eqn.primitive.name == "slice":
        return _parts_in(eqn, parted[0])
    if eqn.primitive.name == "rev" and axis in eqn.params["dimensions"]:
        return None
    known = [
        Origin.of_leaf(str(i), x.ndim) if isinstance(x, Segments) else None
        for i, x in enumerate(operands)
    ]
    axes = []
    for origin, var in zip(VIEWS[eqn.primitive.name].track(eqn, known), eqn.outvars, strict=True):
        dims = origin.dims if origin is not None else ()
        held = [i for i, held in enumerate(dims) if axis in held]
        if len(held) != 1 or len(dims[held[0]]) > 1 or var.aval.shape[held[0]] != length:
            return None
        axes.append(held[0])
    each = []
    for i, part in enumerate(parted[0].parts):
        own = [x.parts[i] if isinstance(x, Segments) else x for x in operands]
        try:
            each.append(_compat.bind(_of_size(eqn, axes[0], part.shape[axis]), own))
        except (TypeError, ValueError):  # a custom primitive with other parameters for sizes
            return None
    return [Segments(parts, at) for parts, at in zip(zip(*each, strict=True), axes, strict=True)]


def _parts_in(eqn: Eqn, x: Segments) -> list[Any] | None:
    """Returns the parts that a slice takes; `None` if it cuts one. A function that has been split,
    such as the result of `map_channels`, slices its weights, and here gets its parts again.
    """
    first, last = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides, ends = eqn.params["strides"] or (1,) * x.ndim, (first[x.axis], last[x.axis])
    if strides[x.axis] != 1 or not {*ends} <= {*x.bounds}:
        return None
    chosen = x.parts[x.bounds.index(ends[0]) : x.bounds.index(ends[1])]
    start = (*first[: x.axis], 0, *first[x.axis + 1 :])
    limits = [(*last[: x.axis], p.shape[x.axis], *last[x.axis + 1 :]) for p in chosen]
    parts = [lax.slice(p, start, limit, strides) for p, limit in zip(chosen, limits, strict=True)]
    return parts if len(parts) == 1 else [Segments(parts, x.axis)]


def _of_size(eqn: Eqn, axis: int, size: int) -> Eqn:
    """Returns a view for a part, with a given size along an axis of the result."""
    params = dict(eqn.params)
    for name in _SIZES:
        if isinstance(params.get(name), tuple):
            params[name] = (*params[name][:axis], size, *params[name][axis + 1 :])
    return eqn.replace(params=params)


@dataclasses.dataclass(frozen=True)
class _Runner:
    """Evaluates the functions inside an equation; sites get nothing, and nothing is recorded."""

    function: str
    eqn: Eqn
    given: tuple[()] = ()
    differentiable: bool = True
    is_counting: bool = False

    def run(
        self, jaxpr: Any, args: Sequence[Any], part: Any = (), given: Any = None
    ) -> tuple[list[Any], Records]:
        body, consts = _compat.open_jaxpr(jaxpr)
        results = evaluated(self.function, body, consts, args)
        loop = self.eqn.primitive.name in ("scan", "while")
        return [joined(x) if loop else x for x in results], {}

    def split(self, length: int) -> tuple[Any, Any]:
        return (), ()

    def join(self, step: Any, shared: Any) -> Any:
        return ()

    def numbered(self, given: Any, step: Any) -> Any:
        return ()

    def unseen(self) -> Records:
        return {}

    def merge(self, a: Records, b: Records) -> Records:
        return {}

    def dense(self, x: Any) -> Any:
        return joined(x)

    def carried(self, x: Any) -> Any:
        return x

    def common(self, forms: Sequence[Any]) -> Any:
        return next((x for x in forms if isinstance(x, Segments)), forms[0])

    def like(self, x: Any, other: Any) -> Any:
        x = joined(x)
        if not isinstance(other, Segments):
            return x
        places = itertools.pairwise(other.bounds)
        return Segments([_slice(x, other.axis, a, b) for a, b in places], other.axis)


def _refuse(function: str, eqn: Eqn, operands: Sequence[Any]) -> None:
    given = next(x for x in operands if isinstance(x, Segments))
    raise fail(
        function,
        f"a scan cannot be split inside {_REFUSED[eqn.primitive.name]}.",
        given=f"a weight of the shape {list(given.shape)} in parts with the bounds "
        f"{list(given.bounds)}{_compat.at_line_of(eqn)}",
        expected="a scan inside jit, remat, cond, while or other scans only",
        fix="let the rules select whole weights there, or split the weights in f.",
        error=NotImplementedError,
    )
