"""Attention of linen and of nnx that decodes: over a `jqx.KVCache`, and over arrays of codes in a
decoder with weights of 4 bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jqx
import jqx.linen
import jqx.nnx
from jqx.linen import Mode

from ..arrays import normal
from ..oracles.refusals import assert_error

BATCH, LENGTH, WIDTH = SHAPE = 2, 48, 64
POLICY = jqx.presets.w8a16()
X = normal(0, *SHAPE)
MASK = (jnp.arange(LENGTH) % 5 != 2)[None, None, None]
CAUSAL = MASK & jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH), bool))
EXACT = {"int4": 0.06, "int2": 0.4, "fp8": 0.06}
"""Of the largest result, what caches may lose: 3 to 4 bits of keys and values, and 2."""


class Linen:
    """Attention of linen with its variables."""

    key_heads, width = 2, WIDTH // 2
    jit, attend = staticmethod(jax.jit), staticmethod(nn.dot_product_attention)

    def __init__(self, format, mode=Mode.FLOAT, kind=jqx.linen.MultiHeadAttention, **options):
        options = {"decode": True, "normalize_qk": True, **options}
        self.layer = kind(2, cache=format, policy=POLICY, mode=mode, **options)
        self.plain = nn.MultiHeadDotProductAttention(2, **options)
        self.variables = self.layer.init(jax.random.key(0), X)
        self.run = functools.partial(self.layer.apply, mutable=["cache"])

    def __call__(self, x, mask=None):
        out, new = self.run(self.variables, x, mask=mask)
        self.variables = {**self.variables, **new}
        return out

    @property
    def cache(self):
        return self.variables["cache"]["kv_cache"]

    def names(self):
        return set(self.variables.get("cache", {}))

    def convert(self):
        self.variables = jqx.linen.convert(self.layer, self.variables, X[:, :1])

    def tokens(self, x=X, mask=MASK):
        """Results for one token after another."""
        fixed = {name: tree for name, tree in self.variables.items() if name != "cache"}

        def step(cache, x):
            known = {**fixed, "cache": cache}
            out, new = self.layer.apply(known, x[:, None], mask=mask, mutable=["cache"])
            return new["cache"], out[:, 0]

        scan = jax.jit(lambda cache, x: jax.lax.scan(step, cache, x))
        cache, out = scan(self.variables["cache"], x.swapaxes(0, 1))
        self.variables = {**fixed, "cache": cache}
        return out.swapaxes(0, 1)

    def of_flax(self, x, decode=False, mask=None):
        known = self.plain.init(jax.random.key(0), X)
        return self.plain.clone(decode=decode).apply(known, x, mask=mask, mutable=["cache"])[0]

    def weights(self):
        return self.variables["params"]

    def parts(self, p):
        """Projections to queries, keys and values, and of the result."""

        def project(name, x):
            y = jnp.einsum("btd,dhw->bthw", x, p[name]["kernel"])
            if name == "value":
                return y
            return nn.LayerNorm(use_bias=False).apply({"params": p[f"{name}_ln"]}, y)

        names = ("query", "key", "value")
        result = functools.partial(jnp.einsum, "bthw,hwd->btd")
        return *(functools.partial(project, name) for name in names), (
            lambda x: result(x, p["out"]["kernel"])
        )


class Nnx:
    """Attention of nnx, with two groups of heads."""

    key_heads, width = 2, WIDTH // 4
    jit, attend = staticmethod(nnx.jit), staticmethod(nnx.dot_product_attention)

    def __init__(self, format, mode=Mode.FLOAT, **options):
        options = {"num_kv_heads": 2, "decode": True, **options}
        self.layer = jqx.nnx.MultiHeadAttention(
            4, WIDTH, cache=format, policy=POLICY, mode=mode, rngs=nnx.Rngs(0), **options
        )
        self.plain = nnx.MultiHeadAttention(4, WIDTH, rngs=nnx.Rngs(0), **options)
        self.run = lambda layer, x, mask: layer(x, mask=mask)
        if options["decode"]:
            self.layer.init_cache(SHAPE)

    def __call__(self, x, mask=None):
        return self.run(self.layer, x, mask)

    @property
    def cache(self):
        assert self.layer.cached_key is None and isinstance(self.layer.kv_cache, nnx.Cache)
        return self.layer.kv_cache.get_value()

    def names(self):
        return set(nnx.state(self.layer, nnx.Cache))

    def convert(self):
        jqx.nnx.convert(self.layer, X[:, :1])

    def tokens(self, x=X, mask=MASK):
        """Results for one token after another."""

        @nnx.jit
        def run(layer, x):
            @nnx.scan(in_axes=(nnx.Carry, 1), out_axes=(nnx.Carry, 1))
            def step(layer, x):
                return layer, layer(x[:, None], mask=mask, decode=True)[:, 0]

            return step(layer, x)[1]

        return run(self.layer, x)

    def of_flax(self, x, decode=False, mask=None):
        if decode:
            self.plain.init_cache(SHAPE)
        return self.plain(x, decode=decode, mask=mask)

    def weights(self):
        self.graphdef, *states = nnx.split(self.layer)
        return states

    def parts(self, states):
        """Projections to queries, keys and values, and of the result."""
        layer = nnx.merge(self.graphdef, *states)
        return layer.query, layer.key, layer.value, layer.out


LIBRARIES = {"linen": Linen, "nnx": Nnx}
each = pytest.mark.parametrize("library", LIBRARIES)
SLOW = [
    pytest.param(library, format, marks=[pytest.mark.slow] if library == "nnx" else [])
    for library in LIBRARIES
    for format in EXACT
]


def relative(a, b):
    return jnp.abs(a - b).max() / jnp.abs(b).max()


@pytest.mark.parametrize(("library", "format"), SLOW)
def test_tokens_in_a_scan_agree_with_attention_over_all_of_them(library, format):
    layer = LIBRARIES[library](format)
    assert layer.names() == {"kv_cache"} and int(layer.cache.length) == 0
    out = layer.tokens()
    own = jqx.KVCache.empty(
        batch=BATCH, length=LENGTH, heads=layer.key_heads, width=layer.width, format=format
    )
    assert layer.cache.nbytes == own.nbytes and int(layer.cache.length) == LENGTH
    exact = layer.of_flax(X, mask=CAUSAL)
    assert 0 < relative(out, exact) < EXACT[format]
    if format != "fp8":  # its first tokens are rounded, too
        assert jnp.allclose(out[:, :16], exact[:, :16], atol=1e-5)


@each
def test_it_is_attention_by_hand_over_append_and_what_is_read(library):
    """To the bit of Flax's attention over what the cache reads; of `attend`, to float32."""
    options = {"kind": jqx.linen.MultiHeadDotProductAttention} if library == "linen" else {}
    layer = LIBRARIES[library]("int4", **options)
    hand, weights = layer.cache, layer.weights()
    layer.run = layer.jit(layer.run)

    @jax.jit
    def step(weights, hand, x):
        query, key, value, result = layer.parts(weights)
        hand = hand.append(key(x), value(x))
        seen = (jnp.arange(LENGTH) < hand.length)[None, None, None]
        one = layer.attend(query(x), hand.keys, hand.values, mask=seen)
        return hand, (result(one), result(hand.attend(query(x))))

    for i in range(36):
        hand, (one, other) = step(weights, hand, X[:, i : i + 1])
        out = layer(X[:, i : i + 1])
        assert (out == one).all()
        assert relative(other, out) <= 2.0**-20
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), hand, layer.cache))


@pytest.mark.slow
@each
def test_modes_agree_and_several_tokens_are_causal(library):
    make = functools.partial(LIBRARIES[library], "int4")
    simulated, integers = make(Mode.SIMULATE), make(Mode.CONVERT)
    integers.convert()
    assert int(integers.cache.length) == 0
    out, other = simulated.tokens(), integers.tokens()
    assert relative(other, out) <= 2.0**-16
    assert jax.tree.structure(integers.cache) == jax.tree.structure(simulated.cache)
    # Up to 31 tokens are in float: however they come, they give the same.
    whole, single = make(), make()
    last = single.tokens(X[:, :20], MASK.astype(jnp.float32))
    assert relative(last, whole(X[:, :20], MASK)) <= 2.0**-18
    assert int(whole.cache.length) == int(single.cache.length) == 20
    assert relative(out[:, :20], whole.of_flax(X, mask=CAUSAL)[:, :20]) <= 0.1


@pytest.mark.parametrize(("format", "decode"), [(None, True), ("int4", False)])
@each
def test_without_decode_or_a_format_it_is_the_layer_of_flax(library, format, decode):
    layer = LIBRARIES[library](format, decode=decode)
    assert layer.names() == ({"cached_key", "cached_value", "cache_index"} if decode else set())
    x = X[:, :1] if decode else X
    assert (layer(x) == layer.of_flax(x, decode)).all()


@each
def test_what_does_not_fit_is_refused(library):
    make = LIBRARIES[library]
    layer, other = make("int4"), make("fp8")
    if library == "linen":
        other.variables = layer.variables
        init = functools.partial(layer.layer.init, jax.random.key(0), X[None])
    else:
        other.layer.kv_cache = layer.layer.kv_cache
        init = functools.partial(layer.layer.init_cache, (3, *SHAPE))
        assert layer.layer.attention_fn is nnx.dot_product_attention
        empty = make("int4", decode=False).layer
        with pytest.raises(ValueError, match=r"(?s)cache is not initialized.*init_cache"):
            empty(X[:, :1], decode=True)
    for run, facts in (
        (lambda: make("int8"), "`cache` is unknown|'int8'|'fp8'"),
        (lambda: make(4), "`cache` is unknown|4"),
        (init, "one sequence axis"),
        (lambda: other(X[:, :1]), "has the format 'int4'|layer 'fp8'"),
        (lambda: layer(X[:, :1].repeat(49, 1)), "the cache is full|49 new"),
    ):
        assert_error(run, *facts.split("|"))
    if library == "linen":
        layer.variables = {**layer.variables, "cache": {"kv_cache": X}}
        assert_error(lambda: layer(X[:, :1]), "not a KVCache", error=TypeError)


STEPS, FEATURES, LETTERS = 12, 128, 32
W4A16 = jqx.presets.w4a16(block=32)
INT8 = {".*/cached_(key|value)": jqx.QSpec(jnp.int8, jqx.per_token())}
START = jnp.zeros((2, 1), jnp.int32)


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(LETTERS, FEATURES, name="embed")(tokens)
        for i in range(2):
            attention = nn.MultiHeadAttention(num_heads=2, decode=True, name=f"attention{i}")
            x = x + attention(nn.LayerNorm(name=f"norm{i}")(x))
            up = nn.gelu(nn.Dense(FEATURES, name=f"up{i}")(x))
            x = x + nn.Dense(FEATURES, name=f"down{i}")(up)
        return nn.Dense(LETTERS, name="head")(x)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, FEATURES, decode=True, rngs=rngs)
        self.attention.init_cache((2, STEPS, FEATURES))
        self.up, self.down = (nnx.Linear(FEATURES, FEATURES, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class OfNnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(LETTERS, FEATURES, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(FEATURES, LETTERS, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LinenDecoder:
    """A quantized decoder with an empty cache of int8."""

    def __init__(self, policy=W4A16, mode=Mode.SIMULATE, **options):
        self.module = jqx.linen.quantize(OfLinen(), policy, mode=mode, **options)
        floats = jax.jit(OfLinen().init)(jax.random.key(0), jnp.zeros((2, STEPS), jnp.int32))
        self.variables = {**floats, "cache": jqx.quantize_state(floats["cache"], INT8)}

    def convert(self):
        self.module = self.module.clone(mode=Mode.CONVERT)
        self.variables = jax.jit(lambda v: jqx.linen.convert(self.module, v, START))(self.variables)

    def stepping(self, f):
        """A jitted step, a function of logits, which keeps what the model writes."""

        @jax.jit
        def step(variables, token):
            written = ["cache", "quant_stats"]
            logits, new = self.module.apply(variables, token[:, None], mutable=written)
            return f(logits), new

        def kept(token):
            out, new = step(self.variables, token)
            self.variables = {**self.variables, "cache": new["cache"]}
            return out

        return kept

    def caches(self):
        cache = self.variables["cache"]
        assert cache["attention0"]["cache_index"].dtype == jnp.int32
        return [cache[f"attention{i}"][f"cached_{x}"] for i in (0, 1) for x in ("key", "value")]


class NnxDecoder:
    """A quantized decoder with an empty cache of int8."""

    def __init__(self, policy=W4A16, mode=Mode.SIMULATE, **options):
        model = OfNnx(nnx.Rngs(0))
        nnx.update(model, jqx.quantize_state(nnx.state(model, nnx.Cache), INT8))
        self.model = jqx.nnx.quantize(model, policy, mode=mode, **options)

    def convert(self):
        jqx.nnx.convert(self.model, START)

    def stepping(self, f):
        """A jitted step, a function of logits."""
        step = nnx.jit(lambda model, token: f(model(token[:, None])))
        return functools.partial(step, self.model)

    def caches(self):
        attentions = [block.attention for block in self.model.blocks]
        both = [(attention.cached_key, attention.cached_value) for attention in attentions]
        return [leaf.get_value() for pair in both for leaf in pair]


DECODERS = {"linen": LinenDecoder, "nnx": NnxDecoder}


def greedy(decoder):
    """Tokens, and how often a step was traced."""
    traces = []

    def best(logits):
        traces.append(logits)
        return logits[:, -1].argmax(-1)

    step, token, written = decoder.stepping(best), jnp.array([1, 2]), []
    for _ in range(STEPS - 2):
        token = step(token)
        written.append(token)
    return np.stack(written), len(traces)


@pytest.mark.slow
@each
def test_tokens_are_equal_under_simulate_on_integers_and_convert(library):
    simulated, integers = DECODERS[library](backward=jnp.float32), DECODERS[library]()
    integers.convert()
    (expected, one), (tokens, other) = greedy(simulated), greedy(integers)
    assert one == other == 1
    np.testing.assert_array_equal(tokens, expected)
    assert len(np.unique(tokens)) > 2
    for a, b in zip(integers.caches(), simulated.caches(), strict=True):
        assert isinstance(a, jqx.QTensor) and jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(x, y)
        # Codes, and a scale for each token of a head: little more than a quarter of the floats.
        assert a.values.any() and a.shape[-1] == 64 and a.nbytes <= 0.27 * 4 * a.size


@pytest.mark.parametrize("mode", [Mode.FLOAT, Mode.CALIBRATE])
@each
def test_other_modes_keep_the_cache_quantized(library, mode):
    decoder = DECODERS[library](jqx.presets.w8a8(), mode)
    decoder.stepping(lambda logits: logits)(jnp.ones(2, jnp.int32))
    for q in decoder.caches():
        assert isinstance(q, jqx.QTensor) and q.values.any() and q.nbytes <= 0.27 * 4 * q.size
