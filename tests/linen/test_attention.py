"""Attention of linen that decodes: over a `jqx.KVCache`, and over arrays of codes in a decoder with
weights of 4 bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jqx
import jqx.linen
from jqx.linen import Mode

from ..arrays import normal
from ..oracles.refusals import assert_error

BATCH, LENGTH, WIDTH, HEADS = 2, 48, 64, 2
POLICY = jqx.presets.w8a16()
X = normal(0, BATCH, LENGTH, WIDTH)
MASK = (jnp.arange(LENGTH) % 5 != 2)[None, None, None]
KINDS = (jqx.linen.MultiHeadDotProductAttention, jqx.linen.MultiHeadAttention)
EXACT = {"int4": 0.06, "int2": 0.4, "fp8": 0.06}
"""Of the largest result, what caches may lose: 3 to 4 bits of keys and values, and 2."""


def attention(format, mode=Mode.FLOAT, kind=KINDS[1], **options):
    options = {"decode": True, "normalize_qk": True, **options}
    return kind(HEADS, cache=format, policy=POLICY, mode=mode, **options)


def variables(layer):
    return layer.init(jax.random.key(0), X)


def tokens(layer, known, x=X, mask=MASK):
    """Results of a layer for one token after another, and the cache behind them."""
    fixed = {name: tree for name, tree in known.items() if name != "cache"}

    def step(cache, x):
        out, new = layer.apply({**fixed, "cache": cache}, x[:, None], mask=mask, mutable=["cache"])
        return new["cache"], out[:, 0]

    cache, out = jax.jit(lambda cache, x: jax.lax.scan(step, cache, x))(
        known["cache"], x.swapaxes(0, 1)
    )
    return out.swapaxes(0, 1), cache


@pytest.mark.parametrize("format", EXACT)
def test_tokens_in_a_scan_agree_with_attention_over_all_of_them(format):
    layer = attention(format)
    known = variables(layer)
    assert list(known["cache"]) == ["kv_cache"]
    assert int(known["cache"]["kv_cache"].length) == 0
    out, cache = tokens(layer, known)
    own = jqx.KVCache.empty(
        batch=BATCH, length=LENGTH, heads=HEADS, width=WIDTH // HEADS, format=format
    )
    assert cache["kv_cache"].nbytes == own.nbytes and int(cache["kv_cache"].length) == LENGTH
    plain = nn.MultiHeadDotProductAttention(HEADS, normalize_qk=True)
    mask = MASK & jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH), bool))
    exact = plain.apply({"params": known["params"]}, X, mask=mask)
    error = jnp.abs(out - exact).max() / jnp.abs(exact).max()
    assert 0 < error < EXACT[format]
    if format != "fp8":  # its first tokens are rounded, too
        assert jnp.allclose(out[:, :16], exact[:, :16], atol=1e-5)


def test_it_is_attention_by_hand_over_append_and_what_is_read():
    """To the bit of Flax's attention over what the cache reads; of `attend`, to float32."""
    layer = attention("int4", kind=KINDS[0])
    known = variables(layer)
    p = known["params"]

    def project(name, x):
        return jnp.einsum("btd,dhw->bthw", x, p[name]["kernel"])

    norm = {name: nn.LayerNorm(use_bias=False).bind({"params": p[name]}) for name in LAYERS}

    @jax.jit
    def step(cache, x):
        query = norm["query_ln"](project("query", x))
        cache = cache.append(norm["key_ln"](project("key", x)), project("value", x))
        seen = (jnp.arange(LENGTH) < cache.length)[None, None, None]
        one = nn.dot_product_attention(query, cache.keys, cache.values, mask=seen)
        both = (one, cache.attend(query))
        return cache, [jnp.einsum("bthw,hwd->btd", y, p["out"]["kernel"]) for y in both]

    @jax.jit
    def own_step(cache, x):
        out, new = layer.apply({**known, "cache": cache}, x, mutable=["cache"])
        return new["cache"], out

    hand, cache = known["cache"]["kv_cache"], known["cache"]
    for i in range(36):
        hand, (one, other) = step(hand, X[:, i : i + 1])
        cache, out = own_step(cache, X[:, i : i + 1])
        assert (out == one).all()
        assert jnp.abs(out - other).max() <= 2.0**-20 * jnp.abs(out).max()
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), hand, cache["kv_cache"]))


LAYERS = ("query_ln", "key_ln")


@pytest.mark.slow
def test_modes_agree_and_several_tokens_are_causal():
    simulated, integers = (attention("int4", mode) for mode in (Mode.SIMULATE, Mode.CONVERT))
    known = variables(simulated)
    converted = jqx.linen.convert(integers, known, X[:, :1])
    assert int(converted["cache"]["kv_cache"].length) == 0
    a, cache = tokens(simulated, known)
    b, other = tokens(integers, converted)
    assert jnp.abs(a - b).max() <= 2.0**-16 * jnp.abs(a).max()
    assert jax.tree.structure(cache) == jax.tree.structure(other)
    # Up to 31 tokens are in float: however they come, they give the same.
    float_ = attention("int4")
    out, new = float_.apply(known, X[:, :20], mask=MASK, mutable=["cache"])
    single, last = tokens(float_, known, X[:, :20], MASK.astype(jnp.float32))
    assert jnp.abs(out - single).max() <= 2.0**-18 * jnp.abs(out).max()
    assert int(new["cache"]["kv_cache"].length) == int(last["kv_cache"].length) == 20


def test_without_decode_or_a_format_it_is_the_layer_of_flax():
    plain = nn.MultiHeadDotProductAttention(HEADS, normalize_qk=True, decode=True)
    known = plain.init(jax.random.key(0), X)
    for format, decode in ((None, True), ("int4", False)):
        layer = attention(format, decode=decode)
        own = variables(layer)
        names = {"cached_key", "cached_value", "cache_index"} if decode else set()
        assert set(own.get("cache", {})) == names
        x = X[:, :1] if decode else X
        expected = plain.clone(decode=decode).apply(known, x, mutable=["cache"])
        assert (layer.apply(own, x, mutable=["cache"])[0] == expected[0]).all()


def test_what_does_not_fit_is_refused():
    layer = attention("int4")
    known = variables(layer)
    state = {"params": known["params"]}
    for run, error, facts in (
        (lambda: attention("int8"), ValueError, "`cache` is unknown|'int8'|'fp8'"),
        (lambda: attention(4), ValueError, "`cache` is unknown|4"),
        (lambda: layer.init(jax.random.key(0), X[None]), ValueError, "one sequence axis"),
        (
            lambda: attention("fp8").apply(known, X[:, :1], mutable=["cache"]),
            ValueError,
            "has the format 'int4'|layer 'fp8'",
        ),
        (
            lambda: layer.apply({**state, "cache": {"kv_cache": X}}, X[:, :1], mutable=["cache"]),
            TypeError,
            "not a KVCache",
        ),
        (
            lambda: layer.apply(known, X[:, :1].repeat(49, 1), mutable=["cache"]),
            ValueError,
            "the cache is full|49 new",
        ),
    ):
        assert_error(run, *facts.split("|"), error=error)


STEPS, FEATURES, LETTERS = 12, 128, 32
W4A16 = jqx.presets.w4a16(block=32)
INT8 = {".*/cached_(key|value)": jqx.QSpec(jnp.int8, jqx.per_token())}


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(LETTERS, FEATURES, name="embed")(tokens)
        for i in range(2):
            attention = nn.MultiHeadAttention(num_heads=2, decode=True, name=f"attention{i}")
            x = x + attention(nn.LayerNorm(name=f"norm{i}")(x))
            x = x + nn.Dense(FEATURES, name=f"down{i}")(
                nn.gelu(nn.Dense(FEATURES, name=f"up{i}")(x))
            )
        return nn.Dense(LETTERS, name="head")(x)


@pytest.fixture(scope="module")
def decoder_variables():
    return jax.jit(Decoder().init)(jax.random.key(0), jnp.zeros((2, STEPS), jnp.int32))


def greedy(module, decoder_variables):
    """Tokens, the cache after them, and how often a step was compiled."""
    fixed = {name: tree for name, tree in decoder_variables.items() if name != "cache"}

    @jax.jit
    def step(token, cache):
        logits, new = module.apply({**fixed, "cache": cache}, token[:, None], mutable=["cache"])
        return logits[:, -1].argmax(-1), new["cache"]

    token, cache, written = jnp.array([1, 2]), decoder_variables["cache"], []
    for _ in range(STEPS - 2):
        token, cache = step(token, cache)
        written.append(token)
    return np.stack(written), cache, step._cache_size()


@pytest.mark.slow
def test_tokens_are_equal_under_simulate_on_integers_and_convert(decoder_variables):
    state = jqx.quantize_state(decoder_variables["cache"], INT8)
    quantized = jqx.linen.quantize(Decoder(), W4A16, backward=jnp.float32)
    integers = jqx.linen.quantize(Decoder(), W4A16, mode=Mode.CONVERT)
    token = jnp.zeros((2, 1), jnp.int32)
    converted = jax.jit(lambda known: jqx.linen.convert(integers, known, token))(decoder_variables)
    simulated, cache, compiled = greedy(quantized, {**decoder_variables, "cache": state})
    assert compiled == 1
    tokens, codes, compiled = greedy(integers, {**converted, "cache": state})
    assert compiled == 1
    np.testing.assert_array_equal(tokens, simulated)
    assert len(np.unique(tokens)) > 2
    assert jax.tree.structure(codes) == jax.tree.structure(cache) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(codes), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_cache_takes_little_more_than_a_quarter(decoder_variables):
    keys = decoder_variables["cache"]["attention0"]["cached_key"]
    assert keys.shape[-1] == 64
    state = jqx.quantize_state(decoder_variables["cache"], INT8)
    assert state["attention0"]["cached_key"].nbytes <= 0.27 * keys.nbytes
    assert (
        state["attention0"]["cache_index"]
        is decoder_variables["cache"]["attention0"]["cache_index"]
    )


@pytest.mark.parametrize("mode", [Mode.FLOAT, Mode.CALIBRATE])
def test_other_modes_keep_the_cache_quantized(decoder_variables, mode):
    module = jqx.linen.quantize(Decoder(), jqx.presets.w8a8(), mode=mode)
    state = jqx.quantize_state(decoder_variables["cache"], INT8)
    given, token = {**decoder_variables, "cache": state}, jnp.ones((2, 1), jnp.int32)
    written = ["cache", "quant_stats"]
    _, new = jax.jit(lambda given: module.apply(given, token, mutable=written))(given)
    assert jax.tree.structure(new["cache"]) == jax.tree.structure(state)
