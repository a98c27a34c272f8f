"""`jit`: the inside is jitted again, with the same name and shardings."""

from collections.abc import Sequence
from typing import Any

import jax

from ... import _compat
from ..._compat import Eqn
from .._counted import spread
from .._weight import is_coded
from ._form import Form, Records, Runner, as_function, looks_into
from ._shardings import sharded_as


def _apply(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    given, wanted = _compat.shardings_of(eqn)
    body = as_function(runner, eqn.params["jaxpr"])

    def run(given: Any, *args: Any) -> tuple[list[Any], Records]:
        results, records = body(given, *args)
        return list(map(spread, results)) if any(wanted) else results, records

    run.__name__ = str(eqn.params["name"])
    options: dict[str, Any] = {}
    operands = list(map(spread, operands)) if any(given) else operands
    if any(given):
        own = [
            sharded_as(x, sharding) if is_coded(x) and sharding else sharding
            for x, sharding in zip(operands, given, strict=True)
        ]
        options["in_shardings"] = (None, *own)
    if any(wanted):
        options["out_shardings"] = (wanted, None)
    return jax.jit(run, inline=eqn.params["inline"], **options)(runner.given, *operands)


JIT = dict.fromkeys(("jit", "pjit"), Form(looks_into("jaxpr"), _apply))
