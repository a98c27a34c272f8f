"""Calls of functions, and scans."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ... import _compat
from ..._compat import Eqn
from ._steps import At, Steps


def called(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Calls of functions."""
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    body, consts = _compat.open_jaxpr(next(eqn.params[n] for n in names if n in eqn.params))
    return steps.run(body, consts, xs)


def scanned(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Scans over layers, which are evaluated one by one, and over positions."""
    p, (consts, carries) = eqn.params, _compat.scan_counts(eqn)
    fixed, carry, stacks = xs[:consts], xs[consts : consts + carries], xs[consts + carries :]
    if any(isinstance(x, At) and x.axis == 0 for x in stacks):
        return _recurrent(steps, eqn, [*fixed, *carry], stacks, carries)
    body, known = _compat.open_jaxpr(p["jaxpr"])
    order, results = range(p["length"]), []
    for i in reversed(order) if p["reverse"] else order:
        parts = [
            At(x.value[i], x.axis - 1, x.product) if isinstance(x, At) else steps.part(x, i)
            for x in stacks
        ]
        found = steps.run(body, known, [*fixed, *carry, *parts])
        carry = found[:carries]
        results.append(found[carries:])
    return [*carry, *map(_stacked, zip(*results[:: -1 if p["reverse"] else 1], strict=True))]


def _stacked(each: Sequence[Any]) -> Any:
    """Stacks the results of the steps of a scan."""
    first = each[0]
    if not isinstance(first, At):
        return jnp.stack(each)
    return At(jnp.stack([x.value for x in each]), first.axis + 1, first.product)


def _recurrent(
    steps: Steps, eqn: Eqn, values: Sequence[Any], stacks: Sequence[Any], carries: int
) -> list[Any]:
    """A scan over positions, whose state is kept."""
    p = eqn.params
    if any(isinstance(x, At) for x in values) or p["reverse"] or p["length"] != steps.length:
        raise steps.unable(eqn, "a scan runs over positions, and something else")
    body, known = _compat.open_jaxpr(p["jaxpr"])
    parts = [x.value[0] if isinstance(x, At) else steps.at(x, 0)[0] for x in stacks]
    consts, first = values[: len(values) - carries], values[len(values) - carries :]

    def step(state: Sequence[Any]) -> list[Any]:
        return steps.run(body, known, [*consts, *state, *parts])

    results: list[Any] = []

    def change(state: Sequence[Any]) -> list[Any]:
        results[:] = step(state)
        return results[:carries]

    after = steps.keep(first, change)
    results = results or step(first)
    return [*after, *(At(x[None], 0) for x in results[carries:])]


_CALLS = """
checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit pjit remat2
"""

SCANS: dict[str, Any] = {**dict.fromkeys(_CALLS.split(), called), "scan": scanned}
