"""`jax.custom_jvp` and `jax.custom_vjp`: the value is quantized, the rule stays the user's.

The rule sees what the function saw in float; scales that are used inside get no gradient from it.
Where a QTensor is among the operands, or nothing is to be differentiated, the body is evaluated as
if the rule were not there.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import _compat
from ..._compat import Eqn
from ...tensor import QTensor
from .._weight import Trainable
from ._form import Form, Records, Runner, as_function, looks_into


def _apply_jvp(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    run = as_function(runner, eqn.params["call_jaxpr"])
    if not runner.differentiable or any(isinstance(x, QTensor) for x in operands):
        return run(runner.given, *operands)
    operands = [runner.dense(x) if isinstance(x, Trainable) else x for x in operands]
    function = jax.custom_jvp(run)

    @function.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (_, *args), (_, *moves) = primals, tangents
        results, records = run(*primals)
        _, changes = jax.jvp(lambda *args: _compat.bind(eqn, args), args, moves)
        return (results, records), (changes, jax.tree.map(_no_tangent, records))

    return function(runner.given, *operands)


def _apply_vjp(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    run = as_function(runner, eqn.params["call_jaxpr"])
    if not runner.differentiable or any(isinstance(x, QTensor) for x in operands):
        return run(runner.given, *operands)
    operands = [runner.dense(x) if isinstance(x, Trainable) else x for x in operands]
    function = jax.custom_vjp(run)

    def forward(given: Any, *args: Any) -> Any:
        _, pull = jax.vjp(lambda *args: _compat.bind(eqn, args), *args)
        return run(given, *args), (given, pull)

    def backward(kept: Any, cotangents: Any) -> Any:
        given, pull = kept
        return (jax.tree.map(_no_tangent, given), *pull(cotangents[0]))

    function.defvjp(forward, backward)
    return function(runner.given, *operands)


def _no_tangent(x: Any) -> Any:
    dtype = jnp.result_type(x)
    real = jnp.issubdtype(dtype, jnp.inexact)
    return jnp.zeros_like(x) if real else np.zeros(jnp.shape(x), jax.dtypes.float0)


CUSTOM_DERIVATIVE = {
    "custom_jvp_call": Form(looks_into("call_jaxpr"), _apply_jvp),
    "custom_vjp_call": Form(looks_into("call_jaxpr"), _apply_vjp),
}
