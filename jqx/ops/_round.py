"""`round`: the nine round modes on real arrays."""

from typing import Any

import jax
from jax.typing import ArrayLike

from .._calls import called
from .._checks import as_real, check_instance
from ..numerics import round_to_integer
from ..numerics._shared import RoundMode, widen


@called("round", "pass a mode: jqx.round(x, jqx.RoundMode.NEAREST_TOWARD_EVEN).")
def round(x: ArrayLike, mode: RoundMode) -> jax.Array:
    """Rounds real numbers to integers by one of the nine nGraph modes, exactly.

    Args:
      x: real array, any shape; float16, bfloat16, float32 or float64.
      mode: a `RoundMode`, which includes the rule for ties.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      TypeError: `x` is not floating point, or `mode` is not a `RoundMode`.

    Gradient: zero almost everywhere; see `quantize_dequantize` for rounding that can be trained.
    NaN and infinities: unchanged.
    Source: round modes of nGraph Quantize (v0).

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.round(jnp.array([2.5, -2.5, 2.4]), jqx.RoundMode.NEAREST_UPWARD)
      Array([ 3., -2.,  2.], dtype=float32)
    """
    x = as_real("round", "x", x)
    check_round_mode("round", mode, argument="mode")
    return round_to_integer(widen(x), mode).astype(x.dtype)


def check_round_mode(function: str, mode: Any, argument: str = "round_mode") -> None:
    """Checks that `mode` is a `RoundMode`."""
    names = ", ".join(mode.name for mode in RoundMode)
    check_instance(
        function,
        argument,
        mode,
        RoundMode,
        fix=f"pass jqx.RoundMode.NEAREST_TOWARD_EVEN or another of {names}.",
    )
