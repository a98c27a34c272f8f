"""DoReFa-Net: a fixed range, and a map of weights into it.

    quantize_k(r_i) = round((2^k - 1) * r_i) / (2^k - 1) for r_i in [0, 1]; backward: d r_o = d r_i
    f_w^k(w) = 2 * quantize_k(tanh(w) / (2 * max|tanh(w)|) + 1/2) - 1

The second is `fake_quantize(dorefa_weights(w), -1, 1, -1, 1, levels=2**k, gradient=dorefa)`.

Source: Zhou et al., "DoReFa-Net: Training Low Bitwidth Convolutional Neural Networks with Low
Bitwidth Gradients", 2016, arXiv:1606.06160.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._checks import as_real
from ._ste import ste


@dataclasses.dataclass(frozen=True)
class FixedRange:
    """Passes the cotangent to `x` inside the range. The limits are fixed and get none."""

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`; a NaN in `x` gets none."""
        dx, dlow, dhigh = ste.bwd(x, low, high, levels, cotangent)
        return dx, jnp.zeros_like(dlow), jnp.zeros_like(dhigh)


dorefa: FixedRange = FixedRange()


def dorefa_weights(w: ArrayLike) -> jax.Array:
    """Returns `tanh(w) / max|tanh(w)|`, in `[-1, 1]`; zeros if all of `w` is zero.

    Args:
      w: weights, any shape; float16, bfloat16, float32 or float64.

    Returns:
      Array of the shape and dtype of `w`.

    Raises:
      TypeError: `w` is not floating point.

    Gradient: JAX differentiates it, including the maximum.
    NaN and infinities: one NaN makes all elements NaN; infinities give -1 and 1.
    Source: DoReFa-Net, equation 9.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.gradients.dorefa_weights(jnp.array([-1.0, 0.0, 1.0]))
      Array([-1.,  0.,  1.], dtype=float32)
    """
    t = jnp.tanh(as_real("gradients.dorefa_weights", "w", w))
    largest = jnp.max(jnp.abs(t), initial=0)
    return t / jnp.where(largest == 0, jnp.ones_like(largest), largest)
