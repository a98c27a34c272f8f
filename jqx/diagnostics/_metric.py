"""Metrics: how far a result is from the float result."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import fail, some

Metric = Callable[[Any, Any], Any]


def relative_error(quantized: Any, plain: Any) -> jax.Array:
    """Returns the energy of the difference of two results, divided by that of the second: the
    inverse of the signal-to-noise ratio, for each channel (the last axis), averaged. All channels
    count the same, so a large one does not hide the others. All floating-point leaves count the
    same.

    The energy of one row of mean size is added to the energy of each channel, so that a channel
    that is zero or rarely active does not dominate. A difference from zeros is not divided.
    """
    pairs = zip(jax.tree.leaves(quantized), jax.tree.leaves(plain), strict=True)
    real = [(z, y) for z, y in pairs if jnp.issubdtype(jnp.result_type(y), jnp.floating)]
    return jnp.mean(jnp.stack([_error_of_channels(z, y) for z, y in real]))


def _error_of_channels(quantized: Any, plain: Any) -> jax.Array:
    """Returns the relative error of a channel of one array, on average. An array of one axis or
    none is one channel.
    """
    y = jnp.asarray(plain, jnp.float32)
    noise = jnp.square(jnp.asarray(quantized, jnp.float32) - y)
    shape = (-1, y.shape[-1]) if y.ndim > 1 else (-1, 1)
    signal, noise = (jnp.mean(x.reshape(shape), 0) for x in (jnp.square(y), noise))
    rows = y.size // max(1, signal.size)
    mean_size = jnp.square(jnp.mean(jnp.sqrt(signal)))
    energy = (rows * signal + mean_size) / (rows + 1)
    return jnp.mean(noise / jnp.where(energy == 0, 1, energy))


def check_floats(caller: str, result: Any) -> None:
    """Checks that `relative_error` can compare results."""
    kinds = [jnp.result_type(y).name for y in jax.tree.leaves(result)]
    if not any(jnp.issubdtype(kind, jnp.floating) for kind in kinds):
        raise fail(
            caller,
            "the result of `f` has no floats, so the default metric cannot compare it.",
            given=f"results of {some(dict.fromkeys(kinds))}",
            expected="floats, such as the logits of a class or of a token",
            fix="return what the integers are chosen by, or pass "
            "metric=lambda y, exact: jnp.mean(y != exact).",
        )
