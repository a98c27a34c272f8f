"""Functions that know nothing of quantization, and one with it written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np

import jqx

from ..arrays import normal as normal
from ..arrays import on_device


def product(w, x):
    return x @ w


def mlp(params, x):
    """Two layers at top level."""
    h = jax.nn.relu(x @ params["w"] + params["b"][None])
    return h @ params["v"].T


def eighths(seed, *shape):
    """Multiples of 1/8 in [-1, 1]: float32 holds sums of their products exactly, in any order."""
    return on_device(np.random.default_rng(seed).integers(-8, 9, shape) / 8, jnp.float32)


@jax.jit
def _layer(w, x):
    return jnp.tanh(x @ w)


def jitted(params, x):
    """A jitted helper called twice, inside another jit; the second call sees another weight."""

    @jax.jit
    def body(params, x):
        return _layer(params["w"], x) + _layer(params["b"], x)

    return body(params, x) @ params["v"].T


def mlp_params():
    """Parameters of `mlp`."""
    return {"w": normal(0, 16, 24) / 4, "b": normal(1, 24), "v": normal(2, 5, 24) / 5}


def jitted_params():
    """Parameters of `jitted`."""
    return {"w": normal(0, 16, 24) / 4, "b": normal(1, 16, 24) / 4, "v": normal(2, 5, 24) / 5}


MODELS = {"mlp": (mlp, mlp_params), "jitted": (jitted, jitted_params)}


def int8_grid(x, axes):
    """Values on the symmetric int8 grid that shares a scale along `axes`, in NumPy float32."""
    x = np.asarray(x, np.float32)
    largest = np.max(np.abs(x), axis=axes, keepdims=True).astype(np.float32)
    scale = largest / np.float32(127)
    scale = np.where(scale == 0, np.float32(1), scale)
    return np.clip(np.round(x / scale), -128, 127).astype(np.int64), scale


def quantized_mlp(params, x):
    """`mlp` under `w8a8` with scales from the values at hand, in float64."""

    def dot(x, w):
        (a, s), (b, t) = int8_grid(x, (0, 1)), int8_grid(w, (0,))
        return (a @ b).astype(np.float64) * s * t

    h = np.maximum(dot(x, params["w"]) + np.asarray(params["b"], np.float64), 0)
    return dot(h, np.asarray(params["v"]).T)


def plan_of(f, policy, *args, **kwargs):
    """`jqx.make_plan` in one call."""
    return jqx.make_plan(f, policy)(*args, **kwargs)


def relative(a, b):
    """Relative L2 difference."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def close(a, b, terms=24):
    """Whether two float32 results differ by no more than their sums' order of evaluation explains.

    Sums here have at most `terms` terms and stand at most three deep; each term may round once more
    or less, in the product, the sum and a scale: 3 * 3 * `terms` roundings of 2**-24 of the largest
    value.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    allowed = 9 * terms * 2.0**-24 * np.max(np.abs(b))
    return a.shape == b.shape and np.max(np.abs(a - b)) <= allowed
