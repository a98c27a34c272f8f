"""Attention of nnx that decodes: over a `jqx.KVCache`, and over arrays of codes in a decoder with
weights of 4 bits.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.nnx import Mode

from ..arrays import normal
from ..oracles.refusals import assert_error

BATCH, LENGTH, WIDTH, HEADS, GROUPS = 2, 48, 64, 4, 2
SHAPE = (BATCH, LENGTH, WIDTH)
X = normal(0, *SHAPE)
MASK = (jnp.arange(LENGTH) % 5 != 2)[None, None, None]
EXACT = {"int4": 0.06, "int2": 0.4, "fp8": 0.06}
"""Of the largest result, what caches may lose: 3 to 4 bits of keys and values, and 2."""


def attention(format, **options):
    options = {"num_kv_heads": GROUPS, "policy": jqx.presets.w8a16(), "mode": Mode.FLOAT, **options}
    return jqx.nnx.MultiHeadAttention(HEADS, WIDTH, cache=format, rngs=nnx.Rngs(0), **options)


def tokens(layer, x=X, mask=MASK):
    """Results of a layer for one token after another."""

    @nnx.jit
    def run(layer, x):
        @nnx.scan(in_axes=(nnx.Carry, 1), out_axes=(nnx.Carry, 1))
        def step(layer, x):
            return layer, layer(x[:, None], mask=mask, decode=True)[:, 0]

        return step(layer, x)[1]

    return run(layer, x)


@pytest.mark.slow
@pytest.mark.parametrize("format", EXACT)
def test_tokens_in_a_scan_agree_with_attention_over_all_of_them(format):
    layer = attention(format, decode=True)
    layer.init_cache(SHAPE)
    assert layer.cached_key is None and isinstance(layer.kv_cache, nnx.Cache)
    out = tokens(layer)
    own = jqx.KVCache.empty(
        batch=BATCH, length=LENGTH, heads=GROUPS, width=WIDTH // HEADS, format=format
    )
    cache = layer.kv_cache.get_value()
    assert cache.nbytes == own.nbytes and int(cache.length) == LENGTH
    causal = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH), bool))
    exact = layer(X, decode=False, mask=MASK & causal)
    error = jnp.abs(out - exact).max() / jnp.abs(exact).max()
    assert 0 < error < EXACT[format]
    if format != "fp8":  # its first tokens are rounded, too
        assert jnp.allclose(out[:, :16], exact[:, :16], atol=1e-5)


def test_it_is_attention_by_hand_over_append_and_what_is_read():
    """To the bit of Flax's attention over what the cache reads; of `attend`, to float32."""
    layer = attention("int4", decode=True)
    layer.init_cache(SHAPE)
    hand = layer.kv_cache.get_value()

    @nnx.jit
    def step(layer, hand, x):
        hand = hand.append(layer.key(x), layer.value(x))
        query = layer.query(x)
        seen = (jnp.arange(LENGTH) < hand.length)[None, None, None]
        one = nnx.dot_product_attention(query, hand.keys, hand.values, mask=seen)
        return hand, (layer.out(one), layer.out(hand.attend(query)))

    own = nnx.jit(lambda layer, x: layer(x))
    for i in range(36):
        hand, (one, other) = step(layer, hand, X[:, i : i + 1])
        out = own(layer, X[:, i : i + 1])
        assert (out == one).all()
        assert jnp.abs(out - other).max() <= 2.0**-20 * jnp.abs(out).max()
    assert repr(layer.kv_cache.get_value()) == repr(hand)


@pytest.mark.slow
def test_modes_agree():
    results = []
    for mode in (Mode.FLOAT, Mode.SIMULATE, Mode.CONVERT):
        layer = attention("int4", decode=True, mode=mode)
        layer.init_cache(SHAPE)
        if mode is Mode.CONVERT:
            jqx.nnx.convert(layer, X[:, :1])
            assert int(layer.kv_cache.get_value().length) == 0
        results.append(tokens(layer))
    exact, simulated, integers = results
    assert jnp.abs(simulated - integers).max() <= 2.0**-16 * jnp.abs(exact).max()
    assert jnp.abs(exact - integers).max() <= 0.1 * jnp.abs(exact).max()


def test_without_decode_or_a_format_it_is_the_layer_of_flax():
    options = {"num_kv_heads": GROUPS, "decode": True, "rngs": nnx.Rngs(0)}
    plain, layer = nnx.MultiHeadAttention(HEADS, WIDTH, **options), attention(None, decode=True)
    for each in (plain, layer):
        each.init_cache(SHAPE)
    assert layer.kv_cache is None and (layer(X[:, :1]) == plain(X[:, :1])).all()
    assert (layer.cached_key[...] == plain.cached_key[...]).all()
    unused = attention("int4", decode=False)
    assert (unused(X) == plain(X, decode=False)).all() and unused.kv_cache is None


def test_what_does_not_fit_is_refused():
    layer, other = attention("int4", decode=True), attention("fp8", decode=True)
    with pytest.raises(ValueError, match=r"(?s)cache is not initialized.*init_cache"):
        layer(X[:, :1])
    layer.init_cache(SHAPE)
    other.kv_cache = layer.kv_cache
    for run, facts in (
        (lambda: attention("int8"), "`cache` is unknown|'int8'|'fp8'"),
        (lambda: layer.init_cache((3, *SHAPE)), "one sequence axis"),
        (lambda: other(X[:, :1]), "has the format 'int4'|layer 'fp8'"),
        (lambda: layer(X[:, :1].repeat(49, 1)), "the cache is full|49 new"),
    ):
        assert_error(run, *facts.split("|"))
    assert layer.attention_fn is nnx.dot_product_attention


STEPS, FEATURES, LETTERS = 12, 128, 32
W4A16 = jqx.presets.w4a16(block=32)
INT8 = {".*/cached_(key|value)": jqx.QSpec(jnp.int8, jqx.per_token())}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, FEATURES, decode=True, rngs=rngs)
        self.up, self.down = (nnx.Linear(FEATURES, FEATURES, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(LETTERS, FEATURES, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(FEATURES, LETTERS, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def decoder(**options):
    """A quantized decoder with an empty cache of int8."""
    model = Decoder(nnx.Rngs(0))
    for block in model.blocks:
        block.attention.init_cache((2, STEPS, FEATURES))
    nnx.update(model, jqx.quantize_state(nnx.state(model, nnx.Cache), INT8))
    return jqx.nnx.quantize(model, options.pop("policy", W4A16), **options)


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
    for _ in range(STEPS - 2):
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
