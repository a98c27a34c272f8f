"""`ranges`: bounds of the accumulators of a function, found without running it."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .. import compat
from ..calibrators.calibrator import Affine
from ..errors import fail
from ..policy import Policy
from ..table import Table, Tabular, finite
from ..transforms.arguments import check_function
from ..transforms.plan import Plan
from ..transforms.plan_call import as_plan, params_of
from ..transforms.quantize_weight import quantize_weight
from ..transforms.trace import Call, is_array, is_quantized, trace_call
from .accumulators import Accumulator, not_reached
from .interval_walk import Follower, Notes, Overflow
from .intervals import Interval, anything, flushed, is_integer, limits, of_value

Bound = tuple[float, float]
"""The minimum and the maximum of the elements of an argument."""


@dataclasses.dataclass(frozen=True)
class Ranges(Tabular):
    """The result of `ranges`. Prints as a table; `to_dict` and `to_markdown` return data and text.

    Attributes:
      sites: an accumulator for each site, in the order of the plan.
      overflows: integer results of the function itself that their dtype may not be able to hold.
      unknown: a source line for each primitive without a rule: its results may have any value of
        their dtype.
      results: the minimum and the maximum of each array that the function returns.
    """

    sites: tuple[Accumulator, ...]
    overflows: tuple[Overflow, ...]
    unknown: Mapping[str, str]
    results: tuple[tuple[Any, Any], ...]

    def table(self) -> Table:
        """Returns the rows as text."""
        rows = [
            (
                row.label or row.path,
                row.op,
                _ends(row.lhs),
                _ends(row.rhs),
                f"{row.products:,}" if row.products else "-",
                _ends(row.sums),
                str(row.bits or "-"),
                row.dtype or "-",
                "-" if row.used is None else f"{100 * row.used:.3g} %",
                row.how,
            )
            for row in self.sites
        ]
        head = ("path", "op", "lhs codes", "rhs codes", "products", "sums", "bits", "dtype")
        lines = [
            f"may overflow: {x.primitive} in {x.dtype}, {_ends((x.low, x.high))}, at {x.line}"
            for x in self.overflows
        ]
        lines += [f"unknown: {name}, at {line}" for name, line in self.unknown.items()]
        footer = "\n".join(lines) or "no integer of the function leaves its dtype"
        return Table((*head, "share of int32", "summed in"), tuple(rows), footer, texts=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict for `json.dumps`; infinite values are `None`."""
        sites = [
            {**dataclasses.asdict(x), "bits": x.bits, "dtype": x.dtype, "used": x.used}
            for x in self.sites
        ]
        overflows = [dataclasses.asdict(x) for x in self.overflows]
        data = {"sites": sites, "overflows": overflows, "unknown": dict(self.unknown)}
        return finite({**data, "results": self.results})


def _ends(ends: tuple[float, float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:,} to {ends[1]:,}"


def ranges(
    f: Callable[..., Any],
    plan: Plan | Policy,
    affines: Mapping[str, Affine] | None = None,
    *,
    bounds: Mapping[int | str, Any] | None = None,
) -> Callable[..., Ranges]:
    """Returns a function that bounds the accumulators of `f` at each site, and its own integer
    arithmetic. Nothing is run: intervals are followed through its jaxpr.

    Weights are known, channel by channel. Other arguments may have any value of their dtype, or lie
    within `bounds`. The bounds of one contraction are attained by some operands; later bounds may
    be too wide, since intervals do not represent dependencies between values. So a result that is
    reported to fit does fit, but a reported overflow may be impossible: pass `bounds` or `affines`
    to narrow the intervals.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with (its parameters are argument 0 then).
      affines: scales from `jqx.affines`; without them an activation may have any codes with its
        sign.
      bounds: the `(low, high)` of the elements of an argument without weights, keyed by its
        position or name, or a pytree of such pairs that is a prefix of the argument.

    Returns:
      `found(*args, **kwargs) -> Ranges`. Arguments may be `jax.ShapeDtypeStruct`; abstract weights
      may have any codes. Only the shapes of other arguments are used.

    Raises:
      TypeError: if `f` is not a function, `plan` is not a plan, or `bounds` is not a mapping.
      ValueError: if the plan was made for another function, `affines` does not fit it, `bounds`
        does not fit an argument, names none or one of weights, or a weight is traced.

    NaN, infinity: nothing is stated about NaN. A float without bounds has infinite bounds.
    Rounding: bounds of floats are widened by the possible rounding error of the dtype of each
      result. A TPU that multiplies float32 as bfloat16 may exceed them. Sums of codes are exact.
    Integers: only final results count, since partial sums that wrap around do no harm. The
      arithmetic inside jqx, which wraps around on purpose, is not listed.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> from jqx.diagnostics import ranges
      >>> w, x = jnp.eye(64) * 127.0, jax.ShapeDtypeStruct((1, 64), jnp.float32)
      >>> f = lambda w, x: x @ w
      >>> found = ranges(f, jqx.presets.w8a8_dynamic(), bounds={1: (0.0, 1.0)})(w, x)
      >>> found.sites[0].sums, found.sites[0].dtype
      ((0, 16129), 'int16')
    """
    check_function("diagnostics.ranges", f)
    params = params_of("diagnostics.ranges", plan)
    if bounds is not None and not isinstance(bounds, Mapping):
        problem = f"`bounds` is not a mapping, but of type {type(bounds).__name__}."
        fix = "pass positions or names of arguments, for example bounds={1: (0.0, 1.0)}."
        raise fail("diagnostics.ranges", problem, fix=fix, error=TypeError)

    def found(*args: Any, **kwargs: Any) -> Ranges:
        call = trace_call("diagnostics.ranges", f, params, args, kwargs)
        call_plan = as_plan("diagnostics.ranges", plan, call, params)
        scales = call_plan.check_affines("diagnostics.ranges", affines)
        notes = Notes()
        leaves = _leaves(call, call_plan, scales, args, kwargs, bounds or {})
        results = Follower(call_plan, scales, notes).run(call.jaxpr, leaves, consts=call.consts)
        return Ranges(
            sites=tuple(notes.sites.get(s.address, not_reached(s)) for s in call_plan.sites),
            overflows=tuple(notes.overflows.values()),
            unknown=dict(notes.unknown),
            results=tuple((x.low, x.high) for x in results),
        )

    return found


def _leaves(
    call: Call,
    plan: Plan,
    scales: Mapping[str, Affine],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    bounds: Mapping[int | str, Any],
) -> list[Interval]:
    """Returns the intervals of the arrays among the arguments."""
    positions = (plan.params,) if isinstance(plan.params, int) else plan.params
    arguments = {**dict(enumerate(args)), **kwargs}
    inputs = [name for name in arguments if name not in positions]
    for name in bounds:
        if name not in inputs:
            kind = "an argument of weights, which are known" if name in arguments else "no argument"
            names = ", ".join(map(repr, inputs)) or "no arguments"
            fix = f"pass one of {names}, counted from 0 as in f(*args), or by keyword."
            raise fail("diagnostics.ranges", f"bounds[{name!r}] names {kind}.", fix=fix)
    pairs = {name: iter(_pairs(name, bounds[name], arguments[name])) for name in bounds}

    def interval(keys: Any, x: Any, path: str | None) -> Interval:
        name = keys[1].idx if keys[0].idx == 0 else keys[1].key
        if name in pairs:
            return _bounded(name, x, next(pairs[name]))
        return _parameter(x, path, plan, scales) if name in positions else anything(x)

    return [interval(*leaf) for leaf in zip(call.keys, call.leaves, call.paths, strict=True)]


def _parameter(x: Any, path: str | None, plan: Plan, scales: Mapping[str, Affine]) -> Interval:
    """Returns a known parameter: a weight of the plan with the values of its codes."""
    arrays = jax.tree.leaves(x)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arrays):
        return anything(x)
    if not all(map(compat.is_concrete, arrays)):
        problem = f"the parameter {path!r} is traced, so that its values are not known."
        fix = "call it outside jax.jit, or pass jax.ShapeDtypeStructs for weights that may be "
        fix += "anything."
        raise fail("diagnostics.ranges", problem, fix=fix)
    weight = plan.weight_at(path)
    q = x if is_quantized(x) else None
    if weight is not None and q is None:
        q = quantize_weight(x, weight.spec, scales.get(weight.key))
    if q is None:
        return of_value(x)
    values = of_value(q.dequantize())
    return values if weight is None else dataclasses.replace(values, codes=q)


def _is_pair(x: Any) -> bool:
    number = (int, float, np.number)
    return isinstance(x, tuple) and len(x) == 2 and all(isinstance(end, number) for end in x)


def _pairs(name: int | str, bounds: Any, argument: Any) -> list[Bound]:
    """Returns the bounds of each array of an argument."""
    leaves = jax.tree.leaves(argument, is_leaf=is_quantized)
    try:
        tree = jax.tree.broadcast(bounds, argument, lambda x: _is_pair(x) or is_quantized(x))
    except ValueError:
        tree = None
    pairs = jax.tree.leaves(tree, is_leaf=_is_pair)
    fits = len(pairs) == len(leaves) and all(map(_is_pair, pairs))
    pairs = [pair for pair, x in zip(pairs, leaves, strict=False) if is_array(x)]
    if not (fits and pairs and all(low <= high for low, high in pairs)):
        counts = f"{len(leaves)} leaves, {sum(map(is_array, leaves))} of them arrays"
        problem = f"`bounds` does not fit the argument {name!r} of {counts}."
        pair = f"bounds={{{name!r}: (0.0, 1.0)}}"
        fix = f"pass a pair with low <= high, such as {pair}, or a pytree of pairs for its arrays."
        raise fail("diagnostics.ranges", problem, fix=fix)
    return pairs


def _bounded(name: int | str, x: Any, pair: Bound) -> Interval:
    low, high = (float(end) for end in pair)
    if not is_integer(x.dtype):
        return flushed(low, high, x.dtype)
    smallest, largest = limits(x.dtype)
    if low < smallest or high > largest:
        problem = f"`bounds` of the argument {name!r} exceed its dtype: {pair} for {x.dtype}."
        fix = f"pass bounds of at least {smallest} and at most {largest}."
        raise fail("diagnostics.ranges", problem, fix=fix)
    return Interval(math.ceil(pair[0]), math.floor(pair[1]))
