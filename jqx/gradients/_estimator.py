"""The contracts of gradient estimators: a backward rule on real bounds, or a differentiable
stand-in for the quantizer.
"""

import functools
from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

import jax

from .._checks import require_that


class GradientEstimator(Hashable, Protocol):
    """A hashable value that says what flows backward through a quantizer.

    The quantizer clamps `x` to `[low, high]` and rounds it to one of `levels` levels, the first of
    which is `low` and the last `high`. Every fake quantization in jqx reduces to it; the chain rule
    around it and the sums over broadcast axes are done by the caller.

    An estimator whose rule holds for evenly spaced levels alone says so with a class attribute
    `uniform_only = True`; it is then refused for float formats and codebooks.
    """

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`, each of the shape of `x`.

        `x` and `cotangent` have one shape; `low` and `high` have another of its rank, of size 1
        along each axis whose elements share a range, so that `x.size // low.size` elements share
        one. All have one dtype, float32 or float64; `low <= high` elementwise.
        """
        ...


@runtime_checkable
class Surrogate(Hashable, Protocol):
    """A hashable value that stands for the quantizer in simulation, forward and backward.

    Where training is to see noise, or a softened rounding, in place of the rounding itself. What
    `convert` and `QTensor.quantize` compute is not affected. Levels are evenly spaced.

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
        """Returns what stands for the quantized `x`; JAX differentiates it.

        Operands as in `GradientEstimator.bwd`; `key` is `None` unless `needs_key`.
        """
        ...


Gradient = GradientEstimator | Surrogate


def check_estimator(function: str, gradient: Any, *, uniform: bool = True) -> None:
    """Checks that `gradient` is an estimator, and fits a format with or without uniform levels."""
    rule = callable(getattr(gradient, "bwd", None))
    surrogate = callable(getattr(gradient, "surrogate", None))
    require_that(
        (rule or surrogate) and not isinstance(gradient, type) and _is_hashable(gradient),
        error=TypeError,
        function=function,
        problem="`gradient` is not a gradient estimator.",
        given=f"an object of type {type(gradient).__name__}",
        expected="a hashable value with a method bwd(x, low, high, levels, cotangent)",
        mend="pass one of jqx.gradients, such as jqx.gradients.ste, or a value of your own.",
    )
    require_that(
        uniform or not (surrogate or getattr(gradient, "uniform_only", False)),
        error=ValueError,
        function=function,
        problem="the gradient estimator is for evenly spaced levels alone.",
        given=f"gradient {gradient} for a format whose numbers are not evenly spaced",
        expected="an integer format, or an estimator such as ste",
        mend="pass gradient=jqx.gradients.ste, or an integer qtype.",
    )


@functools.lru_cache
def draws(gradient: Gradient) -> bool:
    """Whether an estimator draws random numbers, and so needs a key."""
    return isinstance(gradient, Surrogate) and gradient.needs_key


def check_key(function: str, gradient: Gradient, key: Any) -> None:
    """Checks that a random key is given where, and only where, the estimator draws numbers."""
    needed = draws(gradient)
    if needed == (key is not None):  # nearly always: spares tracing the words below
        return
    require_that(
        False,
        error=ValueError,
        function=function,
        problem="the gradient estimator draws random numbers and there is no key."
        if needed
        else "`key` has no use: the gradient estimator draws no random numbers.",
        given=f"gradient {gradient}, key {'not given' if key is None else 'given'}",
        expected="a key from jax.random.key(...)" if needed else "key=None",
        mend="pass key=jax.random.key(0), a new one for each step." if needed else "drop key.",
    )


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
