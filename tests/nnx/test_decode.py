"""An nnx decoder with weights of 4 bits and a cache of 8: attention of Flax, `decode=True`."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.nnx import Mode

LENGTH, WIDTH, LETTERS = 12, 128, 32
POLICY = jqx.presets.w4a16(block=32)
INT8 = {".*/cached_(key|value)": jqx.QSpec(jnp.int8, jqx.per_token())}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=True, rngs=rngs)
        self.up, self.down = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(LETTERS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, LETTERS, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def decoder(**options):
    """A quantized decoder with an empty cache of int8."""
    model = Decoder(nnx.Rngs(0))
    for block in model.blocks:
        block.attention.init_cache((2, LENGTH, WIDTH))
    nnx.update(model, jqx.quantize_state(nnx.state(model, nnx.Cache), INT8))
    return jqx.nnx.quantize(model, options.pop("policy", POLICY), **options)


def caches(model):
    return [leaf for block in model.blocks for leaf in cache_of(block.attention)]


def cache_of(attention):
    return attention.cached_key.get_value(), attention.cached_value.get_value()


def greedy(model):
    """Tokens, and how often a step was traced."""
    traces = []

    @nnx.jit
    def step(model, token):
        traces.append(token)
        return model(token[:, None])[:, -1].argmax(-1)

    token, written = jnp.array([1, 2]), []
    for _ in range(LENGTH - 2):
        token = step(model, token)
        written.append(token)
    return np.stack(written), len(traces)


@pytest.mark.slow
def test_tokens_are_equal_under_simulate_on_integers_and_convert():
    simulated, integers = decoder(backward=jnp.float32), decoder()
    jqx.nnx.convert(integers, jnp.zeros((2, 1), jnp.int32))
    expected, traces = greedy(simulated)
    assert traces == 1
    tokens, traces = greedy(integers)
    assert traces == 1
    np.testing.assert_array_equal(tokens, expected)
    assert len(np.unique(tokens)) > 2
    for a, b in zip(caches(integers), caches(simulated), strict=True):
        assert isinstance(a, jqx.QTensor)
        np.testing.assert_array_equal(a.values, b.values)
        assert a.values.any() and a.nbytes <= 0.27 * 4 * a.size


@pytest.mark.parametrize("mode", [Mode.FLOAT, Mode.CALIBRATE])
def test_other_modes_keep_the_cache_quantized(mode):
    model = decoder(policy=jqx.presets.w8a8(), mode=mode)
    model(jnp.ones((2, 1), jnp.int32))
    assert all(isinstance(q, jqx.QTensor) and q.values.any() for q in caches(model))
