"""Another function of the weights that one was quantized on."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

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
    quantized = jqx.ptq(score, jqx.presets.w8a8(), smooth_quant(0.85), progress=False)(PARAMS, [X])
    assert quantized.maps
    bound = quantized.bind(step)
    assert bound.params is quantized.params and bound.plan == quantized.plan
    assert np.array_equal(bound(X[:1], 1.0), quantized(X[:1]) + 1.0)
    assert np.array_equal(bound.bind(score)(X), quantized(X))


def layers(params, x, around=lambda f: f, part=lambda f: f):
    """A lookup, a scan over weights and a branch, with calls around all of it and its parts."""

    def f(params, x):
        h = params["a"][jnp.arange(5)] + jnp.tile(x, (1, 2))
        h = lax.scan(part(lambda h, w: (jnp.tanh(h @ w), None)), h, params["s"])[0]
        right = part(lambda h: jnp.sin(h) @ params["b"])
        return lax.cond(x[0, 0] > 0, lambda h: h @ params["b"], right, h)

    return around(f)(params, x)


CALLS = {
    "plain": {},
    "jit": {"around": jax.jit},
    "remat": {"around": jax.checkpoint},
    "jit of jit": {"around": lambda f: jax.jit(jax.jit(f))},
    "jit of parts": {"part": jax.jit},
    "jit of remat of parts": {"around": jax.jit, "part": jax.checkpoint},
}


@pytest.mark.parametrize("planned", ["plain", "jit of remat of parts"])
def test_a_function_with_calls_elsewhere_is_the_same_function(planned, tmp_path):
    params = {**PARAMS, "s": jnp.stack([jnp.eye(32), -jnp.eye(32)])}
    fs = {
        name: lambda params, x, calls=calls: layers(params, x, **calls)
        for name, calls in CALLS.items()
    }
    policy = jqx.Policy([jqx.Rule(".*", weight="int8", activation="int8", tables="weight")])
    quantize = jqx.ptq(fs[planned], policy, jqx.algorithms.nearest(), progress=False)
    quantized = quantize(params, [X, -X])
    assert len(quantized.plan.sites) == 4
    jqx.save(tmp_path / "model", quantized, progress=False)
    unbound = jqx.load(tmp_path / "model", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        every = [unbound.bind(f, check="function") for f in fs.values()]
    every += [quantized.bind(f) for f in fs.values()]
    expected, *results = jax.jit(lambda x: [q(x) for q in (quantized, *every)])(X)
    for result in results:
        np.testing.assert_array_equal(result, expected)
    mapped = [jqx.calibrate(f, quantized.plan)(params, X)[1] for f in fs.values()]
    assert all(stats.keys() == mapped[0].keys() for stats in mapped)

    def in_a_branch(params, x):
        return lax.cond(x[0, 0] > 0, fs["plain"], lambda params, x: x, params, x)

    def in_a_loop(params, x):
        return lax.fori_loop(0, 1, lambda _, h: fs["plain"](params, h), x)

    for other in (in_a_branch, in_a_loop):
        with pytest.raises(ValueError, match="the plan was made for another function"):
            quantized.bind(other)(X)


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
