"""The straight-through estimator, with the clip mask (`ste`) and without (`ste_unclipped`).

                  ste                                          ste_unclipped
    dx    =       cotangent where low <= x <= high, else 0     cotangent
    dlow  =       cotangent where x < low,          else 0     0
    dhigh =       cotangent where x > high,         else 0     0

The first is the derivative of `clamp(x, low, high)`, that is, of the quantizer without its
rounding. The second is the derivative of the identity.

Source: Bengio, Leonard, Courville, "Estimating or Propagating Gradients Through Stochastic Neurons
for Conditional Computation", arXiv:1308.3432; the clip mask is from Hubara et al., "Binarized
Neural Networks", NeurIPS 2016.
"""

import dataclasses

import jax
import jax.numpy as jnp

# A limit computed from the extreme of the data can be on either side of it, by one rounding error.
# The gradient of the extreme must not depend on the side, so this fraction of the range outside of
# the limits still counts as inside.
_SLACK = 2.0**-20


@dataclasses.dataclass(frozen=True)
class StraightThrough:
    """Passes the cotangent to `x` inside the range, and to the limit that clips `x` outside."""

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`; a NaN in `x` gets none."""
        below, above = _outside(x, low, high)
        zero = jnp.zeros_like(cotangent)
        dx = jnp.where(below | above | jnp.isnan(x), zero, cotangent)
        return dx, jnp.where(below, cotangent, zero), jnp.where(above, cotangent, zero)


@dataclasses.dataclass(frozen=True)
class StraightThroughUnclipped:
    """Passes the cotangent to `x`, inside the range and outside; the limits get none."""

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`; a NaN in `x` gets none."""
        zero = jnp.zeros_like(cotangent)
        return jnp.where(jnp.isnan(x), zero, cotangent), zero, zero


ste: StraightThrough = StraightThrough()
ste_unclipped: StraightThroughUnclipped = StraightThroughUnclipped()


@jax.custom_jvp
def straight_through(value: jax.Array, through: jax.Array) -> jax.Array:
    """Returns `value`, with the derivative of `through`.

    Args:
      value: array of any shape and dtype; no gradient passes through it.
      through: array of the same shape and dtype.

    Gradient: `through` gets the cotangent.
    NaN and infinities: those of `value` are kept.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jqx.gradients import straight_through
      >>> f = lambda x: straight_through(jnp.round(x), x)
      >>> f(1.7), jax.grad(f)(1.7)
      (Array(2., dtype=float32, weak_type=True), Array(1., dtype=float32, weak_type=True))
    """
    return value


@straight_through.defjvp
def _tangent(primals, tangents):
    return straight_through(*primals), tangents[1]


def clamp(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns `x` clamped to `[low, high]`, with the derivative of `ste`."""
    below, above = _outside(x, low, high)
    inside = jnp.where(jnp.isnan(x), jax.lax.stop_gradient(x), x)
    through = jnp.where(below, low, jnp.where(above, high, inside))
    return straight_through(jnp.clip(x, low, high), through)


def _outside(x: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns where `x` is below and where it is above the range."""
    share = jnp.asarray(_SLACK, x.dtype)
    slack = high * share - low * share  # finite for any finite range
    slack = jnp.where(jnp.isfinite(slack), slack, jnp.zeros_like(slack))
    return x < low - slack, x > high + slack
