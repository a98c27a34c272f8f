"""Calls of functions, and scans."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import _compat
from ..._compat import Eqn
from ._steps import At, Steps


def called(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Calls of functions."""
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    body, consts = _compat.open_jaxpr(next(eqn.params[n] for n in names if n in eqn.params))
    return steps.run(body, consts, xs)


def scanned(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Scans over layers, and over positions, of which one step is evaluated."""
    consts, carries = _compat.scan_counts(eqn)
    carry, rest = xs[consts : consts + carries], xs[consts + carries :]
    if any(isinstance(x, At) and x.axis == 0 for x in rest):
        return _recurrent(steps, eqn, xs[:consts], carry, rest)
    body, known = _compat.open_jaxpr(eqn.params["jaxpr"])
    axes: list[int | None] = [x.axis if isinstance(x, At) else None for x in carry]
    inner = [x.axis - 1 if isinstance(x, At) else None for x in rest]
    values = [_value(steps, x, None) for x in rest]
    seen: list[int | None] = []

    def layer(kept: Any, before: Sequence[Any], number: Any, parts: Sequence[Any]) -> Any:
        """Returns what is carried, results, and what is kept, of one step of the scan."""
        loops = (*steps.loops, number)
        own = Steps(steps.rules, steps.place, steps.length, steps.turned, kept, loops)
        args = [*xs[:consts], *map(_placed, before, axes), *map(_placed, parts, inner)]
        found = own.run(body, known, args)
        seen[:] = [y.axis if isinstance(y, At) else None for y in found]
        after = [_value(steps, y, axis) for y, axis in zip(found[:carries], axes, strict=True)]
        return after, [_value(steps, y, None) for y in found[carries:]], own.new

    def first() -> list[Any]:
        return [_value(steps, x, axis) for x, axis in zip(carry, axes, strict=True)]

    while True:  # until what is carried has positions in every step
        parts = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in values]
        kinds = jax.eval_shape(lambda before, x: layer(None, before, 0, x), first(), parts)
        both = list(zip(axes, seen, strict=False))
        if any(new not in (None, old) for old, new in both if old is not None):
            raise steps.unable(eqn, "a scan carries positions along another axis")
        wider = [new if old is None else old for old, new in both]
        if wider == axes:
            break
        axes = wider
    numbers = jnp.arange(eqn.params["length"])
    options = {"length": eqn.params["length"], "reverse": eqn.params["reverse"]}
    if steps.kept is None:

        def step(before: Any, x: Any) -> Any:
            after, ys, new = layer(None, before, *x)
            return after, (ys, new)

        after, (ys, new) = lax.scan(step, first(), (numbers, values), **options)
    else:
        stacks = [steps.kept.pop(0) for _ in kinds[2]]

        def step(before: Any, x: Any) -> Any:
            after, ys, new = layer(list(before[1]), before[0], *x)
            return (after, new), ys

        (after, new), ys = lax.scan(step, (first(), stacks), (numbers, values), **options)
    steps.new += new
    outer = [None if axis is None else axis + 1 for axis in seen[carries:]]
    return [*map(_placed, after, axes), *map(_placed, ys, outer)]


def _recurrent(
    steps: Steps, eqn: Eqn, consts: Sequence[Any], carry: Sequence[Any], rest: Sequence[Any]
) -> list[Any]:
    """A scan over positions."""
    p = eqn.params
    own = [isinstance(x, At) for x in (*consts, *carry)]
    if any(own) or p["reverse"] or p["length"] != steps.length:
        raise steps.unable(eqn, "a scan runs over positions, and something else")
    body, known = _compat.open_jaxpr(p["jaxpr"])
    parts = [x.value[0] if isinstance(x, At) else steps.at(x, 0)[0] for x in rest]
    stacked = [steps.next(x) for x in carry]
    states = stacked if steps.kept is None else list(map(steps.own, stacked))
    found = steps.run(body, known, [*consts, *states, *parts])
    after = found[: len(states)]
    for old, new in zip(stacked, after, strict=True):
        steps.keep(old, new, [0] * jnp.ndim(new))
    return [*after, *(At(y[None], 0) for y in found[len(states) :])]


def _placed(x: Any, axis: int | None) -> Any:
    """Returns a value at one position, along an axis; without one, the value."""
    return x if axis is None else At(x, axis)


def _value(steps: Steps, x: Any, axis: int | None) -> Any:
    """Returns the array of a value; of one at all positions with an axis, its part at this one."""
    if isinstance(x, At):
        return x.value
    return x if axis is None else steps.at(x, axis)


_CALLS = """
checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit pjit remat2
"""

SCANS: dict[str, Any] = {**dict.fromkeys(_CALLS.split(), called), "scan": scanned}
