"""Functions that the plans of `version_0_1_0` were made for: one for each thing that plans say."""

import jax
import jax.numpy as jnp
from jax import lax


def dense(p, x):
    """Two products, one of a transposed weight."""
    return jax.nn.relu(x @ p["a"]) @ p["b"].T


def scanned(p, x):
    """A scan that steps over its weights."""
    return lax.scan(lambda c, w: (jnp.clip(c @ w, -2, 2), None), x, p["layers"])[0]


def tied(p, tokens):
    """A table that is looked up, and multiplied with."""
    return jnp.take(p["table"], tokens, axis=0) @ p["table"].T


def joined(p, x):
    """Two weights, joined into one operand."""
    return x @ jnp.concatenate([p["a"], p["b"].T], axis=1)


def convolved(p, x):
    """A convolution."""
    return lax.conv_general_dilated(
        x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def attended(p, x):
    """A product of activations, which stays in float, between two that are quantized."""
    q = x @ p["query"]
    return jax.nn.softmax(q @ x.T) @ x @ p["out"][0]


FUNCTIONS = {f.__name__: f for f in (dense, scanned, tied, joined, convolved, attended)}
