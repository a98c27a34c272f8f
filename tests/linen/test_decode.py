"""A linen decoder with weights of 4 bits and a cache of 8: attention of Flax, `decode=True`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jqx
import jqx.linen
from jqx.linen import Mode

LENGTH, WIDTH, LETTERS = 12, 128, 32
POLICY = jqx.presets.w4a16(block=32)
INT8 = {".*/cached_(key|value)": jqx.QSpec(jnp.int8, jqx.per_token())}


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(LETTERS, WIDTH, name="embed")(tokens)
        for i in range(2):
            attention = nn.MultiHeadAttention(num_heads=2, decode=True, name=f"attention{i}")
            x = x + attention(nn.LayerNorm(name=f"norm{i}")(x))
            x = x + nn.Dense(WIDTH, name=f"down{i}")(nn.gelu(nn.Dense(WIDTH, name=f"up{i}")(x)))
        return nn.Dense(LETTERS, name="head")(x)


@pytest.fixture(scope="module")
def variables():
    return jax.jit(Decoder().init)(jax.random.key(0), jnp.zeros((2, LENGTH), jnp.int32))


def greedy(module, variables):
    """Tokens, the cache after them, and how often a step was compiled."""
    fixed = {name: tree for name, tree in variables.items() if name != "cache"}

    @jax.jit
    def step(token, cache):
        logits, new = module.apply({**fixed, "cache": cache}, token[:, None], mutable=["cache"])
        return logits[:, -1].argmax(-1), new["cache"]

    token, cache, written = jnp.array([1, 2]), variables["cache"], []
    for _ in range(LENGTH - 2):
        token, cache = step(token, cache)
        written.append(token)
    return np.stack(written), cache, step._cache_size()


@pytest.mark.slow
def test_tokens_are_equal_under_simulate_on_integers_and_convert(variables):
    state = jqx.quantize_state(variables["cache"], INT8)
    quantized = jqx.linen.quantize(Decoder(), POLICY, backward=jnp.float32)
    integers = jqx.linen.quantize(Decoder(), POLICY, mode=Mode.CONVERT)
    token = jnp.zeros((2, 1), jnp.int32)
    converted = jax.jit(lambda known: jqx.linen.convert(integers, known, token))(variables)
    simulated, cache, compiled = greedy(quantized, {**variables, "cache": state})
    assert compiled == 1
    tokens, codes, compiled = greedy(integers, {**converted, "cache": state})
    assert compiled == 1
    np.testing.assert_array_equal(tokens, simulated)
    assert len(np.unique(tokens)) > 2
    assert jax.tree.structure(codes) == jax.tree.structure(cache) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(codes), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_cache_takes_little_more_than_a_quarter(variables):
    keys = variables["cache"]["attention0"]["cached_key"]
    assert keys.shape[-1] == 64
    state = jqx.quantize_state(variables["cache"], INT8)
    assert state["attention0"]["cached_key"].nbytes <= 0.27 * keys.nbytes
    assert state["attention0"]["cache_index"] is variables["cache"]["attention0"]["cache_index"]


@pytest.mark.parametrize("mode", [Mode.FLOAT, Mode.CALIBRATE])
def test_other_modes_keep_the_cache_quantized(variables, mode):
    module = jqx.linen.quantize(Decoder(), jqx.presets.w8a8(), mode=mode)
    state = jqx.quantize_state(variables["cache"], INT8)
    given, token = {**variables, "cache": state}, jnp.ones((2, 1), jnp.int32)
    written = ["cache", "quant_stats"]
    _, new = jax.jit(lambda given: module.apply(given, token, mutable=written))(given)
    assert jax.tree.structure(new["cache"]) == jax.tree.structure(state)
