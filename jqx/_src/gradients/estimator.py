"""The protocols of gradient estimators: a backward rule on real bounds, or a differentiable
surrogate of the quantizer.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import fail
from ..numerics.exact import divide


class GradientEstimator(Hashable, Protocol):
    """A hashable value that defines the gradient of a quantizer.

    The quantizer clamps `x` to `[low, high]` and rounds it to one of `levels` levels, the first of
    which is `low` and the last `high`. Every fake quantization in jqx reduces to this quantizer.
    The caller applies the chain rule around it and sums over broadcast axes.

    An estimator whose rule holds only for evenly spaced levels has the class attribute
    `uniform_only = True`. Using it with a float format or a codebook is an error.
    """

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`, each of the shape of `x`.

        `x` and `cotangent` have the same shape. `low` and `high` have the same rank, and size 1
        along each axis whose elements share a range, so that `x.size // low.size` elements share
        a range. All have the same dtype, float32 or float64; `low <= high` elementwise.
        """
        ...


@runtime_checkable
class Surrogate(Hashable, Protocol):
    """A hashable value that replaces the quantizer in simulation, forward and backward.

    With it, training sees noise, or a softened rounding, instead of the rounding itself. It does
    not change what `convert` and `QTensor.quantize` compute. The levels are evenly spaced.

    Attributes:
      needs_key: whether `surrogate` draws random numbers.
    """

    @property
    def needs_key(self) -> bool: ...

    def surrogate(
        self,
        x: jax.Array,
        low: jax.Array,
        high: jax.Array,
        levels: int,
        key: jax.Array | None,
    ) -> jax.Array:
        """Returns the replacement of the quantized `x`; JAX differentiates it.

        The operands are those of `GradientEstimator.bwd`; `key` is `None` unless `needs_key`.
        """
        ...


Gradient = GradientEstimator | Surrogate


def check_estimator(function: str, gradient: Any, *, uniform: bool = True) -> None:
    """Checks that `gradient` is an estimator, and that it fits a format whose levels are evenly
    spaced (`uniform`) or not.
    """
    rule = callable(getattr(gradient, "bwd", None))
    surrogate = callable(getattr(gradient, "surrogate", None))
    is_value = isinstance(gradient, Hashable) and not isinstance(gradient, type)
    if not is_value or not (rule or surrogate):
        kind = f"an object of type {type(gradient).__name__}"
        problem = f"`gradient` is not a gradient estimator, but {kind}."
        fix = "pass a value of jqx.gradients, such as jqx.gradients.ste, or a hashable value with "
        fix += "a method bwd(x, low, high, levels, cotangent)."
        raise fail(function, problem, fix=fix, error=TypeError)
    if not uniform and (surrogate or getattr(gradient, "uniform_only", False)):
        problem = f"the gradient estimator {gradient} is only for evenly spaced levels."
        raise fail(function, problem, fix="pass jqx.gradients.ste, or an integer format.")


@functools.lru_cache
def draws(gradient: Gradient) -> bool:
    """Whether an estimator draws random numbers, and so needs a key."""
    return isinstance(gradient, Surrogate) and gradient.needs_key


def check_key(function: str, gradient: Gradient, key: Any) -> None:
    """Checks that a random key is given if and only if the estimator draws random numbers."""
    if draws(gradient) and key is None:
        problem = f"the gradient estimator {gradient} draws random numbers, but no key is given."
        raise fail(function, problem, fix="pass key=jax.random.key(0), a new one for each step.")
    if key is not None and not draws(gradient):
        problem = f"`key` is not used: the gradient estimator {gradient} draws no random numbers."
        raise fail(function, problem, fix="drop key.")


# Whether an estimator has a gradient for the limits of a range, and so for a scale.


_LEVELS = 16


class MovesLimits(NamedTuple):
    """From which values the limits of a range get a gradient.

    Attributes:
      inside: whether they get one from values inside of the range, or at its ends.
      outside: whether they get one from values that are clipped.
    """

    inside: bool
    outside: bool


@functools.lru_cache
def moves_limits(gradient: Gradient) -> MovesLimits:
    """Returns from which values an estimator has a gradient for limits, found by an example."""

    def moved(inside: jax.Array, outside: jax.Array) -> jax.Array:
        x, cotangent = jnp.stack([inside, outside]), 1 + jnp.stack([inside, inside]) / 4
        low, high = -jnp.ones((2, 1), x.dtype), jnp.ones((2, 1), x.dtype)
        if isinstance(gradient, Surrogate):
            key = jax.random.key(0) if gradient.needs_key else None
            surrogate = gradient.surrogate
            _, pull = jax.vjp(lambda a, b: surrogate(x, a, b, _LEVELS, key), low, high)
            ends = pull(cotangent)
        else:
            ends = gradient.bwd(x, low, high, _LEVELS, cotangent)[1:]
        return jnp.stack([jnp.any(end != 0, axis=1) for end in ends]).any(axis=0)

    inside = np.linspace(-1, 1, 41, dtype=np.float32)
    outside = inside + np.sign(inside + np.float32(0.01))
    # Compiled first: that gives values also where another program is traced.
    moved_limits = np.asarray(jax.jit(moved).lower(inside, outside).compile()(inside, outside))
    return MovesLimits(bool(moved_limits[0]), bool(moved_limits[1]))


# The levels of a uniform quantizer, computed from its bounds.


def grid(low: jax.Array, high: jax.Array, levels: int) -> tuple[jax.Array, jax.Array]:
    """Returns `origin` and `step`: the levels are `origin + k * step` for integers `k`.

    The origin is zero where zero is a level, and `low` elsewhere. Zero is then exact, and a tie
    goes to the even multiple of the scale, as in `round(x / scale)`. If the bounds are multiples
    of a scale, `step` equals that scale up to one rounding. Where the range is empty, `step` is 1.

    Args:
      low: float32 or float64, any shape.
      high: shape and dtype of `low`.
      levels: number of levels, 2 or more.
    """
    step = divide(high - low, jnp.asarray(levels - 1, low.dtype))
    step = jnp.where(step > 0, step, jnp.ones_like(step))
    farther = jnp.where(-low > high, low, high)
    count, exact = jnp.round(divide(farther, step)), divide(low, step)
    # The bounds and the step have one rounding error each, so `low` may differ from a multiple of
    # the step by this much.
    slack = 4 * levels * float(jnp.finfo(low.dtype).eps)
    is_integral = (jnp.abs(exact - jnp.round(exact)) <= slack) & (high > low)
    step = jnp.where(is_integral & (count != 0), divide(farther, count), step)
    return jnp.where(is_integral, jnp.zeros_like(low), low), step


def rounding_error(x: jax.Array, low: jax.Array, high: jax.Array, levels: int) -> jax.Array:
    """Returns nearest level minus `x`, in steps: `round(v) - v`; 0 where `x` is not finite."""
    origin, step = grid(low, high, levels)
    v = divide(x - origin, step)
    error = jnp.round(v) - v
    return jnp.where(jnp.isfinite(error), error, jnp.zeros_like(error))


# A function whose derivative in reverse mode is a given rule, and which forward mode passes over
# when it differentiates a gradient, as in `jax.jvp(jax.grad(f))` and `jax.hessian(f)`.
#
# Forward mode then needs the tangent of the value that reverse mode keeps. It is the transpose of
# the rule. A rule that is not linear in the cotangent, as that of `ewgs`, has none; its linear part
# at a cotangent of zero is transposed instead.


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
        lambda primals, cotangent: (rule(primals[0], primals[1], cotangent), None),
    )
    return function
