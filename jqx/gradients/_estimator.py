"""The contract that every gradient estimator obeys: one backward rule on real bounds."""

from collections.abc import Hashable
from typing import Any, Protocol

import jax

from .._checks import require_that


class GradientEstimator(Hashable, Protocol):
    """A hashable value that says what flows backward through a uniform quantizer.

    The quantizer has `levels` equally spaced levels from `low` to `high` inclusive: it clamps `x`
    to that range and rounds it to the nearest level. Every fake quantization in jqx reduces to it;
    the chain rule around it and the sums over broadcast axes are done by the caller.
    """

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`, each of the shape of `x`.

        All arrays have one shape and one dtype, float32 or float64; `low <= high` elementwise.
        """
        ...


def check_estimator(function: str, gradient: Any) -> None:
    """Checks that `gradient` is a hashable value with a backward rule."""
    require_that(
        callable(getattr(gradient, "bwd", None))
        and not isinstance(gradient, type)
        and _is_hashable(gradient),
        error=TypeError,
        function=function,
        problem="`gradient` is not a gradient estimator.",
        given=f"an object of type {type(gradient).__name__}",
        expected="a hashable value with a method bwd(x, low, high, levels, cotangent)",
        mend="pass one of jqx.gradients, such as jqx.gradients.ste, or a value of your own.",
    )


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
