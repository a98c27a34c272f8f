"""The straight-through estimator with the clip mask.

    dx    = cotangent where low <= x <= high, else 0
    dlow  = cotangent where x < low,          else 0
    dhigh = cotangent where x > high,         else 0

It is the derivative of `clamp(x, low, high)`, that is, of the quantizer with its rounding deleted.

Source: Bengio, Leonard, Courville, "Estimating or Propagating Gradients Through Stochastic Neurons
for Conditional Computation", arXiv:1308.3432; with the clip mask of Hubara et al., "Binarized
Neural Networks", NeurIPS 2016.
"""

import dataclasses

import jax
import jax.numpy as jnp

# A limit computed from the data's own extreme lands on either side of it by one rounding, and the
# gradient of that extreme must not depend on which: this share of the range counts as inside.
_SLACK = 2.0**-20


@dataclasses.dataclass(frozen=True)
class StraightThrough:
    """Passes the cotangent to `x` inside the range, and to the limit that clips it outside."""

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`; a NaN in `x` gets none."""
        slack = (high - low) * jnp.asarray(_SLACK, x.dtype)
        slack = jnp.where(jnp.isfinite(slack), slack, jnp.zeros_like(slack))
        below, above = x < low - slack, x > high + slack
        zero = jnp.zeros_like(cotangent)
        dx = jnp.where(below | above | jnp.isnan(x), zero, cotangent)
        return dx, jnp.where(below, cotangent, zero), jnp.where(above, cotangent, zero)


ste = StraightThrough()
