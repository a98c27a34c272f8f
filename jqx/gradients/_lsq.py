"""Learned step size quantization (LSQ): a gradient of the scale that includes the rounding error.

    v_bar = round(clip(v / s, -Q_N, Q_P)),   v_hat = v_bar * s
    d v_hat / d v = 1 where -Q_N <= v / s <= Q_P, else 0
    d v_hat / d s = round(v / s) - v / s there, -Q_N below, Q_P above
    g = 1 / sqrt(N * Q_P) multiplies the gradient of s; N elements share s

In real bounds, `low = -Q_N * s` and `high = Q_P * s`, with `e = round(v / s) - v / s`:

    d v_hat / d low = -e / (levels - 1),   d v_hat / d high = e / (levels - 1)   inside
    and 1 for the bound that clips outside; the chain rule `-Q_N * dlow + Q_P * dhigh` gives ds.

`Q_P` is read from the bounds, and is at least 1. Rounding is to nearest, whatever the round mode of
the quantizer. The paper has an open interval inside, its pseudo-code a closed one as here.

Source: Esser et al., "Learned Step Size Quantization", ICLR 2020, arXiv:1902.08153.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._added import added
from .._checks import check_instance, check_integer
from .._errors import fail
from ._grid import grid, rounding_error
from ._ste import ste


@dataclasses.dataclass(frozen=True)
class LearnedStep:
    """Passes the rounding error to the limits, in addition to the cotangent of clipped elements.

    Attributes:
      gradient_scale: whether `g` multiplies the gradients of the limits.
      elements: the number `N` in `g`. `None` counts the elements of `x` that share a range. Pass it
        where a call sees only a part of the batch: micro-batches, steps of a scan, `jax.vmap` over
        examples, or one device of a `jax.shard_map`. Otherwise the gradients of the parts do not
        add up to that of the batch.
    """

    gradient_scale: bool = True
    elements: int | None = added(None)
    uniform_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_instance(
            type(self).__name__,
            "gradient_scale",
            self.gradient_scale,
            bool,
            fix="pass gradient_scale=True or gradient_scale=False.",
        )
        if self.elements is None:
            return
        number = check_integer(type(self).__name__, "elements", self.elements)
        object.__setattr__(self, "elements", number)
        if not self.elements >= 1:
            raise fail(
                type(self).__name__,
                "`elements` must be 1 or more.",
                given=f"elements == {self.elements}",
                expected="a number of elements, or None",
                fix="pass the number of elements of the whole batch that share a scale, or None.",
            )
        if not self.gradient_scale:
            raise fail(
                type(self).__name__,
                "`elements` has no effect.",
                given=f"elements == {self.elements} and gradient_scale=False",
                expected="elements=None, because only the gradient scale reads it",
                fix="leave out elements, or gradient_scale=False.",
            )

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`; a NaN in `x` gets none."""
        dx, dlow, dhigh = ste.bwd(x, low, high, levels, cotangent)
        share = dx * rounding_error(x, low, high, levels) / (levels - 1)
        dlow, dhigh = dlow - share, dhigh + share
        if self.gradient_scale:
            n = self.elements or max(x.size // max(low.size, 1), 1)
            g = jax.lax.rsqrt(float(n) * jnp.maximum(self.largest_code(low, high, levels), 1))
            dlow, dhigh = g * dlow, g * dhigh
        return dx, dlow, dhigh

    def largest_code(self, low: jax.Array, high: jax.Array, levels: int) -> jax.Array:
        """Returns `Q_P`: the number of steps from zero to `high`."""
        _, step = grid(low, high, levels)
        return high / step


lsq: LearnedStep = LearnedStep()
