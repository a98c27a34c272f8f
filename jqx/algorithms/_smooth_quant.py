"""SmoothQuant: channels of activations are divided where they are large, weights multiplied."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .._calls import called
from .._checks import require_that, shown
from ..observers import absmax
from ..observers._shared import check_weight
from ..transforms import Plan
from ..transforms._shared import Chosen
from ._scaled import Scaled

_LEAST = 1e-5
"""Below it a magnitude is none."""


@called("algorithms.smooth_quant", "options go by name: jqx.algorithms.smooth_quant(strength=.8).")
@dataclasses.dataclass(frozen=True)
class SmoothQuant:
    """Divides channels of activations by `a**strength / w**(1 - strength)`, `a` the largest
    magnitude that batches have there and `w` that of the weights, and multiplies the weights by it:
    an algorithm of `jqx.ptq` that changes weights and leaves the function as it is.

    The division is folded into what makes the channels, as `find_pairs` finds it. A site that has
    no pair is left as it is; the report, `Pairs`, says why. It is for plans that quantize
    activations.

    Attributes:
      strength: 0 leaves weights with one largest magnitude for all channels, 1 activations.
      weight: how much the rows of the inputs count, as that of `jqx.observers.absmax`: those of
        weight 0 are left out.

    Raises:
      TypeError: `weight` is no function.
      ValueError: `strength` is out of range; when it runs, nothing can be scaled.

    Source: Xiao et al., arXiv:2211.10438.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"]
      >>> p = {"up": jnp.eye(4) * jnp.array([1.0, 1.0, 1.0, 64.0]), "down": jnp.ones((4, 2))}
      >>> smooth = jqx.algorithms.smooth_quant()
      >>> quantized = jqx.ptq(f, jqx.presets.w8a8(), smooth, progress=False)(p, [jnp.ones((1, 4))])
      >>> quantized.params["down"].dequantize()[:, 0].round(1)
      Array([1., 1., 1., 8.], dtype=float32)
    """

    strength: float = 0.5
    weight: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        require_that(
            isinstance(self.strength, (int, float)) and 0 <= self.strength <= 1,
            error=ValueError,
            function="algorithms.smooth_quant",
            problem="`strength` is out of range.",
            given=f"strength == {shown(self.strength)}",
            expected="a number from 0 to 1",
            mend="leave it out: 0.5 is that of the paper.",
        )
        check_weight("algorithms.smooth_quant", self.weight)

    def rewrite(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
    ) -> Chosen:
        """Returns the parameters with their channels scaled."""
        observer = absmax(weight=self.weight)
        given = f, plan, params, list(batches), (observer,), progress
        scaled = Scaled.of("algorithms.smooth_quant", *given)
        folds = scaled.folds
        seen = ((x, scaled.observed(x, observer).largest) for x in scaled.met)
        a = folds.largest((folds.inputs(x), scaled.per_channel(x, most)) for x, most in seen)
        w = scaled.largest_weights()
        known = (a > _LEAST) & (w > _LEAST)
        known[0] = False
        a, w = np.where(known, a, 1), np.where(known, w, 1)
        factors = w ** (1 - self.strength) / a**self.strength
        return Chosen(folds.folded(params, factors), scaled.pairs)


smooth_quant = SmoothQuant
