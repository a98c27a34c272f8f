"""Element-wise gradient scaling (EWGS): a gradient scaled by the rounding error.

    x_n = (clip(x, l, u) - l) / (u - l),   x_q = round((levels - 1) * x_n) / (levels - 1)
    G_xn = G_xq * (1 + delta * sign(G_xq) * (x_n - x_q))

Let `y = l + (u - l) * x_q`, let `g` be the cotangent of y and `h` the same scaled as above. Inside
the range, the chain rule gives

    dx = h,   dl = g * (1 - x_q) - h * (1 - x_n),   du = g * x_q - h * x_n

and `delta = 0` gives LSQ without its gradient scale. Outside the range, the rule is that of `ste`.
The paper derives delta from the Hessian; here it is fixed, as in the authors' code by default.

Source: Lee, Kim, Ham, "Network Quantization with Element-wise Gradient Scaling", CVPR 2021,
arXiv:2104.00903.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._checks import check_instance
from .._errors import fail
from ._grid import rounding_error
from ._ste import ste


@dataclasses.dataclass(frozen=True)
class ElementwiseGradientScaling:
    """Enlarges a gradient whose descent moves `x` to its level, and shrinks one that moves it away.

    Attributes:
      delta: the scaling factor, 0 or more.
    """

    delta: float = 1e-3
    uniform_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        fix = "pass a small number, such as delta=1e-3."
        check_instance(type(self).__name__, "delta", self.delta, (int, float), fix=fix)
        if not 0 <= self.delta < math.inf:
            raise fail(
                type(self).__name__,
                "`delta` is not a finite number of 0 or more.",
                given=f"delta == {self.delta}",
                expected="0 <= delta",
                fix=fix,
            )

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`; a NaN in `x` gets none."""
        dx, dlow, dhigh = ste.bwd(x, low, high, levels, cotangent)
        span = jnp.where(high > low, high - low, jnp.ones_like(low))
        x_n = jnp.clip((jnp.nan_to_num(x) - low) / span, 0, 1)
        error = -rounding_error(x, low, high, levels) / (levels - 1)  # x_n - x_q
        # With h = dx + extra: g * (1 - x_q) - h * (1 - x_n) = dx * error - extra * (1 - x_n).
        extra = self.delta * jnp.abs(dx) * error
        return dx + extra, dlow + dx * error - extra * (1 - x_n), dhigh - dx * error - extra * x_n


ewgs: ElementwiseGradientScaling = ElementwiseGradientScaling()
