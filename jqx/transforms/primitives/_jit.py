"""`jax.jit` inside of a function: the call of a jitted function that interprets the body."""

from collections.abc import Sequence
from typing import Any

import jax

from ... import _compat
from ..._compat import Eqn
from ..._errors import message
from ._form import Form, Records, Runner, as_function, looks_into


def _apply(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    if _compat.has_shardings(eqn):
        raise NotImplementedError(
            message(
                "transforms",
                f"the jitted function {eqn.params['name']!r} fixes shardings: not supported yet.",
                given="jax.jit(..., in_shardings=... or out_shardings=...) inside f",
                expected="a nested jit without shardings",
                mend="use jax.lax.with_sharding_constraint inside f, or shard the outer jit.",
            )
        )
    run = as_function(runner, eqn.params["jaxpr"])
    run.__name__ = str(eqn.params["name"])
    return jax.jit(run, inline=eqn.params["inline"])(runner.given, *operands)


JIT = dict.fromkeys(("jit", "pjit"), Form(looks_into("jaxpr"), _apply))
