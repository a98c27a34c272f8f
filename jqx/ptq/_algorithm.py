"""Algorithms: what chooses the codes of weights, where rounding to nearest is not enough."""

from typing import Any, Protocol

import jax

from .._checks import require_that
from ..transforms import Plan, dequantize_params, quantize_params
from ..transforms._shared import is_quantized


class Algorithm(Protocol):
    """Chooses the codes of the weights of a plan, or other weights that round better.

    Any function of these arguments is one.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> def halve(plan, params, stats):
      ...     return params / 2
      >>> quantize = jqx.ptq(lambda w, x: x @ w, jqx.presets.w8a16(), halve, progress=False)
      >>> quantize(jnp.eye(2), [jnp.ones((1, 2))]).params.dequantize()[0, 0]
      Array(0.5, dtype=float32)
    """

    def __call__(self, plan: Plan, params: Any, stats: Any) -> Any:
        """Returns the parameters, each planned weight as a QTensor of the plan's format, or as
        floats, which are rounded to nearest then; `stats` are those of the calibration.
        """
        ...


def with_codes(plan: Plan, params: Any, algorithm: Algorithm | None, stats: Any) -> Any:
    """Returns the parameters with every planned weight as a QTensor, as an algorithm chooses it."""
    if algorithm is None:
        return quantize_params(params, plan)
    chosen = algorithm(plan, params, stats)
    rounded = quantize_params(dequantize_params(chosen), plan)

    def pick(own: Any, nearest: Any) -> Any:
        if not is_quantized(own):
            return nearest
        require_that(
            jax.tree.structure(own) == jax.tree.structure(nearest)
            and own.scale.shape == nearest.scale.shape,
            error=ValueError,
            function="ptq",
            problem="the algorithm chose codes that are not of the plan.",
            given=repr(own),
            expected=repr(nearest),
            mend="return QTensors of the formats and granularities of plan.weights.",
        )
        return own

    return jax.tree.map(pick, chosen, rounded, is_leaf=is_quantized)
