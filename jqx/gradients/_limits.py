"""Whether an estimator has a gradient for the limits of a range, and so for a scale."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._estimator import Gradient, Surrogate

_LEVELS = 16


class MovesLimits(NamedTuple):
    """From which values the limits of a range get a gradient.

    Attributes:
      inside: whether they get one from values inside of the range, or at its ends.
      outside: whether they get one from values that are clipped.
    """

    inside: bool
    outside: bool


@functools.lru_cache
def moves_limits(gradient: Gradient) -> MovesLimits:
    """Returns from which values an estimator has a gradient for limits, found by an example."""

    def moved(inside: jax.Array, outside: jax.Array) -> jax.Array:
        x, cotangent = jnp.stack([inside, outside]), 1 + jnp.stack([inside, inside]) / 4
        low, high = -jnp.ones((2, 1), x.dtype), jnp.ones((2, 1), x.dtype)
        if isinstance(gradient, Surrogate):
            key = jax.random.key(0) if gradient.needs_key else None
            surrogate = gradient.surrogate
            _, pull = jax.vjp(lambda a, b: surrogate(x, a, b, _LEVELS, key), low, high)
            ends = pull(cotangent)
        else:
            ends = gradient.bwd(x, low, high, _LEVELS, cotangent)[1:]
        return jnp.stack([jnp.any(each != 0, axis=1) for each in ends]).any(axis=0)

    inside = np.linspace(-1, 1, 41, dtype=np.float32)
    outside = inside + np.sign(inside + np.float32(0.01))
    # Compiled first: that gives values also where another program is traced.
    found = np.asarray(jax.jit(moved).lower(inside, outside).compile()(inside, outside))
    return MovesLimits(bool(found[0]), bool(found[1]))
