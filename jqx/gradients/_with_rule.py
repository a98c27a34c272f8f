"""A function whose derivative in reverse mode is a given rule, and which forward mode passes over
when it differentiates a gradient, as in `jax.jvp(jax.grad(f))` and `jax.hessian(f)`.

Forward mode then needs the tangent of the value that reverse mode keeps. It is the transpose of the
rule. A rule that is not linear in the cotangent, as that of `ewgs`, has none; its linear part at a
cotangent of zero is transposed instead.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def with_rule(
    f: Callable[[Any, Any], jax.Array], rule: Callable[[Any, Any, jax.Array], Any]
) -> Callable[[Any, Any], jax.Array]:
    """Returns `f` with a derivative rule.

    Args:
      f: a function of a pytree of float arrays, and of a pytree of other values that have no
        derivative; it returns one array.
      rule: returns the cotangents of the first pytree, from both pytrees and the cotangent of the
        result.
    """

    @jax.custom_jvp
    def value(operands: Any, others: Any) -> jax.Array:
        return f(operands, others)

    def value_and_tangent(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        y, (operands, others) = f(*primals), primals
        _, pull = jax.linearize(lambda ct: rule(operands, others, ct), jnp.zeros_like(y))
        (moved,) = jax.linear_transpose(pull, y)(tangents[0])
        return y, moved

    value.defjvp(value_and_tangent)
    function = jax.custom_vjp(f)
    function.defvjp(
        lambda operands, others: (value(operands, others), (operands, others)),
        lambda kept, cotangent: (rule(kept[0], kept[1], cotangent), None),
    )
    return function
