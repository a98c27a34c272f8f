"""Stochastic rounding to a neighbouring number of any format, without bias."""

import dataclasses

import jax
import jax.numpy as jnp

from ..gradients import ste, stochastic_round
from ..numerics._shared import RoundMode
from ..tensor import QSpec
from ..tensor._shared import rounded_to


def rounded(x: jax.Array, scale: jax.Array, spec: QSpec, key: jax.Array) -> jax.Array:
    """Returns numbers of the format times the scale of each group; their mean over keys is `x`.

    Args:
      x: float32, any shape.
      scale: of a calibrator that clips nothing; broadcasts to `x`.
      spec: a symmetric one; its gradient estimator is not used.
      key: a key, a new one for each call.
    """
    below, above = (
        rounded_to(x, scale, None, dataclasses.replace(spec, round_mode=mode, gradient=ste))
        for mode in (RoundMode.DOWN, RoundMode.UP)
    )
    gap = above - below
    chance = jnp.where(gap > 0, (x - below) / gap, jnp.zeros_like(x))
    return jnp.where(stochastic_round(chance, key) > 0, above, below)
