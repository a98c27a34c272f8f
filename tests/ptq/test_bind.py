"""Another function of the weights that one was quantized on."""

import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.algorithms import smooth_quant

A = jnp.linspace(-1, 1, 16 * 32, dtype=jnp.float32).reshape(16, 32)
PARAMS = {"a": A, "b": -A.reshape(32, 16)}
X = jnp.asarray(np.linspace(-3, 3, 5 * 16).reshape(5, 16) ** 3, jnp.float32)


def score(params, x):
    return jnp.sin(x @ params["a"]) @ params["b"]


def step(params, token, bias):
    return score(params, token) + bias


def test_it_is_the_function_with_what_is_kept_at_sites():
    """SmoothQuant keeps the scales of `x` at its site, as nothing comes before it."""
    quantized = jqx.ptq(score, jqx.presets.w8a8(), smooth_quant(), progress=False)(PARAMS, [X])
    assert quantized.maps
    bound = quantized.bind(step)
    assert bound.params is quantized.params and bound.plan == quantized.plan
    assert np.array_equal(bound(X[:1], 1.0), quantized(X[:1]) + 1.0)
    assert np.array_equal(bound.bind(score)(X), quantized(X))


def test_a_function_of_other_contractions_is_refused():
    quantized = jqx.ptq(score, jqx.presets.w8a16(), progress=False)(PARAMS, [X])
    with pytest.raises(ValueError, match="the plan was made for another function"):
        quantized.bind(lambda params, x: x @ params["a"])(X)
    with pytest.raises(
        ValueError, match=r"another number of axes[\s\S]*result\.bind\(jax\.vmap\(f, in_axes"
    ):
        quantized.bind(score)(X[0])
    with pytest.raises(TypeError, match="`f` is not a function of its weights"):
        quantized.bind(3)
