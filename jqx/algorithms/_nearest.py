"""Rounding to nearest, for when `ptq` should not choose an algorithm itself."""

import dataclasses
from typing import Any, ClassVar

from .._calls import called
from ..transforms import Plan


@called("algorithms.nearest", "it has no options: jqx.algorithms.nearest().")
@dataclasses.dataclass(frozen=True)
class Nearest:
    """Rounds weights to nearest, and changes nothing else: an algorithm of `jqx.ptq`. Without an
    algorithm, `jqx.ptq` takes the one that measured best for the plan.

    It reads batches only if activations have static scales.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f, policy = lambda w, x: x @ w, jqx.Policy({".*": "int4"})
      >>> quantize = jqx.ptq(f, policy, jqx.algorithms.nearest(), progress=False)
      >>> quantize(jnp.array([[7.0], [2.4]]), [jnp.ones((1, 2))]).params.dequantize()[:, 0]
      Array([7., 2.], dtype=float32)
    """

    lazy: ClassVar[bool] = True

    def __call__(self, plan: Plan, params: Any, stats: Any) -> Any:
        """Returns the parameters unchanged; weights without chosen codes are rounded later."""
        return params


nearest = Nearest
