"""Parameterized clipping activation (PACT): a learned upper limit.

    y = 0.5 * (|x| - |x - alpha| + alpha), which is clip(x, 0, alpha), then rounded
    d y / d alpha = 1 where x >= alpha, else 0
    d y / d x     = 1 where 0 <= x < alpha, else 0

Here `alpha` is `high` and 0 is `low`, which is not learned and gets no gradient.

Source: Choi et al., "PACT: Parameterized Clipping Activation for Quantized Neural Networks", 2018,
arXiv:1805.06085.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ParameterizedClipping:
    """Passes the cotangent to `x` inside the range, and to `high` at and above it."""

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`; a NaN in `x` gets none."""
        zero = jnp.zeros_like(cotangent)
        dx = jnp.where((low <= x) & (x < high), cotangent, zero)
        return dx, zero, jnp.where(x >= high, cotangent, zero)


pact: ParameterizedClipping = ParameterizedClipping()
