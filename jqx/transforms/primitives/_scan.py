"""`scan`: each step gets a slice of quantized xs, or, if a kernel reads them, one of the stack.
Constants are shared, and carried values keep their format.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ... import _compat
from ..._compat import Eqn
from ...tensor._shared import OneOf, alone, kernel_of, sliceable
from .._counted import spread
from .._origin import Loop, Origin
from .._weight import is_coded, map_codes
from ._carry import Carry, settled, unchanged
from ._form import Finder, Form, Records, Runner


def _track(eqn: Eqn, known: Sequence[Origin | None], finder: Finder) -> Sequence[Origin | None]:
    consts, count = _compat.scan_counts(eqn)
    first = consts + count
    carried = unchanged(eqn.params["jaxpr"], consts, count)
    loop = Loop(finder.here, eqn.params["length"])
    inside = [
        *known[:consts],
        *(known[consts + i] if i in carried else None for i in range(count)),
        *(None if origin is None else origin.step_of(loop) for origin in known[first:]),
    ]
    finder.enter(eqn.params["jaxpr"], inside)
    results: list[Origin | None] = [None] * len(eqn.outvars)
    for i in carried:
        results[i] = known[consts + i]
    return results


def _apply(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    at, count = _compat.scan_counts(eqn)
    first = at + count
    consts, xs = operands[:at], [_sliceable(x) for x in operands[first:]]
    sliced = [None if kernel_of(x) else x for x in xs]
    stacks = [x if kernel_of(x) else None for x in xs]
    numbers = jnp.arange(length) if any(map(kernel_of, xs)) else None
    steps, given = runner.split(length)

    def loop(carry: Carry) -> tuple[list[Any], Records]:
        def step(before: Any, x: Any) -> Any:
            values, seen = before
            own, parts, number = x
            known = [
                part if stack is None else OneOf.of(stack, number)
                for part, stack in zip(parts, stacks, strict=True)
            ]
            args = [*consts, *carry.state(values), *known]
            results, records = runner.run(body, args, given=runner.join(own, given))
            ours = {key: record for key, record in records.items() if key in seen}
            each = {key: record for key, record in records.items() if key not in seen}
            values = carry.changing(results[:count])
            return (values, runner.merge(seen, ours)), (results[count:], each)

        (values, seen), (ys, each) = lax.scan(
            step,
            (carry.start(), runner.unseen()),
            (steps, sliced, numbers),
            length=length,
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*carry.state(values), *ys], seen | each

    return settled(Carry.of(body, at, operands[at:first], runner), loop)


def _sliceable(x: Any) -> Any:
    """Gives each index of the leading axis of a weight its own scales."""
    return map_codes(lambda q: sliceable(alone(q), 0), x) if is_coded(x) else spread(x)


SCAN = {"scan": Form(_track, _apply)}
