"""`jax.custom_jvp` and `jax.custom_vjp`: the value is quantized, the rule of the user is kept.

The rule receives the inputs of the float function, and the same information on what is
differentiated as in float. Derivatives of higher order are those of the rule. Scales that are used
inside get no gradient from it.
If a QTensor is among the operands, or nothing is differentiated, the body is evaluated as if there
were no rule.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ... import _compat
from ..._compat import Eqn
from ...gradients import straight_through
from ...tensor import QTensor
from .._weight import Trainable
from ._form import Form, Records, Runner, as_function, looks_into


def _apply_jvp(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    run = as_function(runner, eqn.params["call_jaxpr"])
    if not runner.differentiable or any(isinstance(x, QTensor) for x in operands):
        return run(runner.given, *operands)
    operands = [runner.dense(x) if isinstance(x, Trainable) else x for x in operands]
    function = jax.custom_jvp(run)

    def rule(primals: Any, tangents: Any) -> Any:
        (_, *args), (_, *moves) = primals, tangents
        results, records = run(*primals)
        moved = {i: x for i, x in enumerate(moves) if not isinstance(x, SymbolicZero)}
        at = {i: args[i] for i in moved}
        real, changes = jax.jvp(_function_of(eqn, args), (at,), (moved,))
        results = list(map(straight_through, results, real))
        return (results, records), (changes, jax.tree.map(_no_tangent, records))

    function.defjvp(rule, symbolic_zeros=True)
    return function(runner.given, *operands)


def _apply_vjp(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    run = as_function(runner, eqn.params["call_jaxpr"])
    if not runner.differentiable or any(isinstance(x, QTensor) for x in operands):
        return run(runner.given, *operands)
    operands = [runner.dense(x) if isinstance(x, Trainable) else x for x in operands]
    function = jax.custom_vjp(run)

    def forward(given: Any, *primals: Any) -> Any:
        given, args = jax.tree.map(lambda x: x.value, (given, list(primals)))
        at = {i: args[i] for i, x in enumerate(primals) if x.perturbed}
        real, pull = jax.vjp(_function_of(eqn, args), at)
        results, records = run(given, *args)
        return (list(map(straight_through, results, real)), records), pull

    def backward(pull: Any, cotangents: Any) -> Any:
        (found,) = pull([_compat.cotangent(x) for x in cotangents[0]])
        return (None, *(found.get(i) for i in range(len(operands))))

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function(runner.given, *operands)


def _function_of(eqn: Eqn, args: Sequence[Any]) -> Callable[[dict[int, Any]], list[Any]]:
    """Returns an equation as a function of some of its operands, by index. Those that are not
    differentiated are constants, so a rule receives the same information as in float.
    """
    return lambda some: _compat.bind(eqn, [some.get(i, x) for i, x in enumerate(args)])


def _no_tangent(x: Any) -> Any:
    dtype = jnp.result_type(x)
    real = jnp.issubdtype(dtype, jnp.inexact)
    return jnp.zeros_like(x) if real else np.zeros(jnp.shape(x), jax.dtypes.float0)


CUSTOM_DERIVATIVE = {
    "custom_jvp_call": Form(looks_into("call_jaxpr"), _apply_jvp),
    "custom_vjp_call": Form(looks_into("call_jaxpr"), _apply_vjp),
}
