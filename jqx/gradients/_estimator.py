"""The protocols of gradient estimators: a backward rule on real bounds, or a differentiable
surrogate of the quantizer.
"""

import functools
from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

import jax

from .._errors import fail


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
    if not ((rule or surrogate) and not isinstance(gradient, type) and _is_hashable(gradient)):
        raise fail(
            function,
            "`gradient` is not a gradient estimator.",
            given=f"an object of type {type(gradient).__name__}",
            expected="a hashable value with a method bwd(x, low, high, levels, cotangent)",
            fix="pass a value of jqx.gradients, such as jqx.gradients.ste, or your own.",
            error=TypeError,
        )
    if not uniform and (surrogate or getattr(gradient, "uniform_only", False)):
        raise fail(
            function,
            "the gradient estimator is only for evenly spaced levels.",
            given=f"gradient {gradient} for a format whose numbers are not evenly spaced",
            expected="an integer format, or an estimator such as ste",
            fix="pass gradient=jqx.gradients.ste, or an integer qtype.",
        )


@functools.lru_cache
def draws(gradient: Gradient) -> bool:
    """Whether an estimator draws random numbers, and so needs a key."""
    return isinstance(gradient, Surrogate) and gradient.needs_key


def check_key(function: str, gradient: Gradient, key: Any) -> None:
    """Checks that a random key is given if and only if the estimator draws random numbers."""
    needed = draws(gradient)
    if needed == (key is not None):  # nearly always true: skips formatting the message below
        return
    raise fail(
        function,
        "the gradient estimator draws random numbers, but no key is given."
        if needed
        else "`key` is not used: the gradient estimator draws no random numbers.",
        given=f"gradient {gradient}, key {'not given' if key is None else 'given'}",
        expected="a key from jax.random.key(...)" if needed else "key=None",
        fix="pass key=jax.random.key(0), a new one for each step." if needed else "drop key.",
    )


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
