"""Rotations in weights alone: the residual stream and the values of attention, in any function."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jqx
import jqx.linen
import jqx.nnx
from jqx._src.algorithms.hadamard import hadamard
from jqx.algorithms import chain, gptq, rotate

from ..arrays import on_device

RNG = np.random.default_rng(0)
TOKENS, WIDTH, HEADS, KEYS, HEAD, HIDDEN, LAYERS = 17, 24, 4, 2, 6, 40, 2
POLICY = jqx.presets.w4a4()


def normal(*shape):
    scale = np.sqrt(shape[-2]) if len(shape) > 1 else 1
    return on_device(RNG.normal(size=shape) / scale, jnp.float32)


def gain(*shape):
    return on_device(RNG.uniform(0.7, 1.4, size=shape), jnp.float32)


def parameters(*, tied=False, biases=False, width=WIDTH):
    """Of a Llama; those of layers are stacked."""
    layers = {
        "norm": gain(LAYERS, width),
        "q": normal(LAYERS, width, HEADS * HEAD),
        "k": normal(LAYERS, width, KEYS * HEAD),
        "v": normal(LAYERS, width, KEYS * HEAD),
        "out": normal(LAYERS, HEADS * HEAD, width),
        "norm2": gain(LAYERS, width),
        "gate": normal(LAYERS, width, HIDDEN),
        "up": normal(LAYERS, width, HIDDEN),
        "down": normal(LAYERS, HIDDEN, width),
    }
    if biases:
        layers |= {"v_bias": normal(LAYERS, KEYS * HEAD), "out_bias": normal(LAYERS, width)}
        layers |= {"down_bias": normal(LAYERS, width), "gate_bias": normal(LAYERS, HIDDEN)}
    params = {"table": normal(TOKENS, width), "layers": layers, "norm": gain(width)}
    return params if tied else params | {"head": normal(width, TOKENS)}


def unstacked(params):
    """The same in a list of layers."""
    each = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(LAYERS)]
    return params | {"layers": each}


def rms_norm(x, scale):
    core = x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)
    return core * jnp.broadcast_to(scale, x.shape)


def turned(x):
    """Rotary embedding of x (batch, time, heads, head)."""
    angles = jnp.arange(float(x.shape[1]))[None, :, None, None] * jnp.array([[[[0.5, 0.3, 0.1]]]])
    a, b, cos, sin = x[..., ::2], x[..., 1::2], jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def plus(x, w, name):
    """Adds a bias, where there is one."""
    return x + jnp.broadcast_to(w[name], x.shape) if name in w else x


def attention(h, w):
    q, k, v = (h @ w[name] for name in "qkv")
    q, k, v = (x.reshape(*h.shape[:2], -1, HEAD) for x in (q, k, plus(v, w, "v_bias")))
    mixed = jax.nn.dot_product_attention(turned(q), turned(k), v, is_causal=True)
    return plus(mixed.reshape(*h.shape[:2], -1) @ w["out"], w, "out_bias")


def layer(x, w):
    x = x + attention(rms_norm(x, w["norm"]), w)
    h = rms_norm(x, w["norm2"])
    gate = jax.nn.silu(plus(h @ w["gate"], w, "gate_bias"))
    return plus(x + (gate * (h @ w["up"])) @ w["down"], w, "down_bias")


def llama(params, tokens, checkpointed=False):
    body = jax.checkpoint(jax.jit(layer)) if checkpointed else layer
    x = params["table"][tokens]
    if isinstance(params["layers"], list):
        for w in params["layers"]:
            x = body(x, w)
    else:
        x = lax.scan(lambda x, w: (body(x, w), None), x, params["layers"])[0]
    return rms_norm(x, params["norm"]) @ params.get("head", params["table"].T)


def rewritten(f, params, *batch, policy=POLICY, **options):
    """The parameters, report and maps of a rotation; checks that the function stays as it is."""
    plan = jqx.make_plan(f, policy)(params, *batch)
    algorithm = rotate(**{"offline": True, **options})
    found, report, maps = algorithm.rewrite(f, plan, params, [batch], progress=False)[:3]
    exact, own = f(params, *batch), jqx.map_channels(f, plan, maps)(found, *batch)
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(own), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()
    return found, report, maps


def where(report):
    """The sites that are rotated offline, and those that are at run time, by name."""
    names = {True: [], False: []}
    for x in report:
        assert x.factors, x
        names[x.offline].append(x.site.split(":")[0].removeprefix("layers/"))
    return names[True], names[False]


PROMPT = on_device(RNG.integers(0, TOKENS, (2, 7)), jnp.int32)
OFFLINE = ["q", "k", "v", "out", "gate", "up", "head"]


@pytest.mark.many
@pytest.mark.parametrize("biases", [False, True])
def test_a_llama_is_rotated_in_its_weights(biases):
    params = parameters(biases=biases)
    found, report, maps = rewritten(llama, params, PROMPT)
    assert where(report) == (OFFLINE, ["down"])
    sizes = {x.site.split(":")[0]: x.factors for x in report}
    assert sizes["layers/q"] == (WIDTH,) and sizes["layers/down"] == (HIDDEN,)
    assert sizes["layers/out"] == (HEAD,)  # of no Hadamard matrix: a random orthogonal one
    assert list(maps) == ["layers/down:dot_general:lhs"] and not report.edges
    assert report.gains == ("layers/norm", "layers/norm2", "norm")
    for name in ("norm", "norm2"):
        assert np.all(found["layers"][name] == 1)
    assert "run time  layers/down:dot_general (mul at " in str(report)
    same = [name for name, x in params["layers"].items() if np.all(found["layers"][name] == x)]
    assert same == (["gate_bias"] if biases else [])


def test_layers_may_stand_in_a_list_and_in_nested_calls():
    params = unstacked(parameters(biases=True))
    f = lambda p, tokens: llama(p, tokens, checkpointed=True)  # noqa: E731
    _, report, maps = rewritten(f, params, PROMPT)
    offline, online = where(report)
    assert len(offline) == 6 * LAYERS + 1
    assert online == ["0/down", "1/down"] and len(maps) == 2


def test_a_tied_table_after_a_gain_stays_and_the_stream_is_rotated_there():
    params = parameters(tied=True)
    found, report, maps = rewritten(llama, params, PROMPT)
    assert where(report) == (OFFLINE[:-1], ["down"])
    np.testing.assert_array_equal(found["table"], params["table"])
    assert np.all(found["norm"] == 1)
    assert len(maps) == 3 and set(report.edges) < set(maps)
    (head, lookup) = report.edges
    assert "looked up" in report.edges[head] and "after a gain" in report.edges[lookup]
    assert all(f"run time  {key} (" in str(report) for key in report.edges)


@pytest.mark.parametrize("tied", [False, True])
def test_only_offline_rotates_no_operand_of_a_site_at_run_time(tied):
    """At the ends of a stream with a tied table it is rotated, and rotated back."""
    params = parameters(tied=tied)
    found, report, maps = rewritten(llama, params, PROMPT, offline="only")
    names = [x.site.split(":")[0].removeprefix("layers/") for x in report if x.offline]
    assert names == (OFFLINE[:-1] if tied else OFFLINE)
    (down,) = (x for x in report if not x.offline)
    assert "layers/down" in down.site and not down.factors and "mul at " in down.why
    assert set(maps) == set(report.edges) and len(maps) == 2 * tied
    whole, _, _ = rewritten(llama, params, PROMPT)
    for name in ("q", "v", "up"):
        np.testing.assert_array_equal(found["layers"][name], whole["layers"][name])
    with pytest.raises(ValueError, match=r"no site can be rotated(?s:.*)w:dot"):
        rewritten(
            lambda p, x: jnp.tanh(x @ p["w"]), {"w": normal(4, 4)}, normal(2, 4), offline="only"
        )


def test_a_stream_stays_where_its_ends_cost_as_many_products_as_it_saves():
    def f(params, tokens):
        x = params["table"][tokens]
        x = x + jnp.tanh(rms_norm(x, params["norm"]) @ params["up"]) @ params["down"]
        return rms_norm(x, params["norm2"]) @ params["table"].T

    params = {"table": normal(TOKENS, WIDTH), "norm": gain(WIDTH), "norm2": gain(WIDTH)}
    params |= {"up": normal(WIDTH, HIDDEN), "down": normal(HIDDEN, WIDTH)}
    _, report, maps = rewritten(f, params, PROMPT)
    assert where(report) == ([], ["up", "down"]) and len(maps) == 2
    assert report[0].why == "that would save no product at run time"


def test_a_tied_table_without_a_gain_is_rotated_once():
    def f(params, tokens):
        x = params["table"][tokens] + params["place"][jnp.arange(tokens.shape[1])][None]
        h = rms_norm(x, params["norm"])
        x = x + jax.nn.relu(h @ params["up"]) @ params["down"]
        return (x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))) @ params["table"].T

    params = {"table": normal(TOKENS, WIDTH), "place": normal(9, WIDTH), "norm": gain(WIDTH)}
    params |= {"up": normal(WIDTH, HIDDEN), "down": normal(HIDDEN, WIDTH)}
    found, report, maps = rewritten(f, params, PROMPT)
    assert where(report) == (["up"], ["down"]) and len(maps) == 1 and not report.edges
    for name in ("table", "place"):
        assert np.abs(found[name] - params[name]).max() > 0.1
        norms = [np.linalg.norm(x[name], axis=1) for x in (found, params)]
        np.testing.assert_allclose(*norms, rtol=1e-5)


def test_joined_weights_gains_of_heads_experts_and_masks():
    """Gains as 1 + g, norms of heads, joined weights, experts, masks, a mean over tokens."""

    def norm(x, scale):
        core = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)
        return core * jnp.broadcast_to(1.0 + scale, x.shape)

    def f(p, tokens):
        x = p["table"][tokens] * 4.0
        qkv = norm(x, p["norm"]) @ p["qkv"]
        q, k, v = jnp.split(qkv, [HEADS * HEAD, (HEADS + KEYS) * HEAD], -1)
        q, k, v = (y.reshape(*x.shape[:2], -1, HEAD) for y in (q, k, v))
        q, k = turned(norm(q, p["q_norm"])), turned(norm(k, p["k_norm"]))
        mixed = jax.nn.dot_product_attention(q, k, v)
        x = x + jnp.einsum("bthd,hdc->btc", mixed, p["out"])
        h = norm(x, p["norm2"])
        shares = jax.nn.softmax(h @ p["router"])
        y = jax.nn.relu(jnp.einsum("btc,ecm->betm", h, p["up"]))
        y = jnp.einsum("betm,emc->betc", y, p["down"])
        x = jnp.where((tokens > 3)[..., None], x + jnp.einsum("betc,bte->btc", y, shares), 0.0)
        return norm(x, p["norm3"]).mean(1) @ p["head"]

    params = {
        "table": normal(TOKENS, WIDTH),
        "qkv": normal(WIDTH, (HEADS + 2 * KEYS) * HEAD),
        "out": normal(HEADS, HEAD, WIDTH),
        "router": normal(WIDTH, 5),
        "up": normal(5, WIDTH, 8),
        "down": normal(5, 8, WIDTH),
        "head": normal(WIDTH, TOKENS),
        **{name: gain(WIDTH) - 1 for name in ("norm", "norm2", "norm3")},
        **{name: normal(HEAD) for name in ("q_norm", "k_norm")},
    }
    found, report, _ = rewritten(f, params, PROMPT)
    assert where(report) == (["qkv", "out", "router", "up", "head"], ["down"])
    assert not any(np.any(found[name]) for name in ("norm", "norm2", "norm3"))
    np.testing.assert_array_equal(found["q_norm"], params["q_norm"])


def test_a_block_is_rotated_as_numpy_says():
    """An oracle in float64: what the weights of a perceptron in a stream become."""

    def f(params, tokens):
        x = params["table"][tokens]
        x = x + jnp.tanh(rms_norm(x, params["norm"]) @ params["up"]) @ params["down"]
        return rms_norm(x, params["norm2"]) @ params["head"]

    params = {"table": normal(TOKENS, 20), "norm": gain(20), "up": normal(20, 8)}
    params |= {"down": normal(8, 20), "norm2": gain(20), "head": normal(20, 7)}
    policy = jqx.Policy([jqx.Rule("up|head", weight="int4", activation="int4:dynamic:token")])
    found, report, maps = rewritten(f, params, PROMPT, policy=policy, seed=5)
    assert where(report) == (["up", "head"], []) and not maps
    own = {name: np.asarray(x, np.float64) for name, x in params.items()}
    signs = np.random.default_rng((5, 20)).choice([-1.0, 1.0], 20)
    rotation = signs[:, None] * hadamard(20) / np.sqrt(20)
    for name, wanted in {
        "table": own["table"] @ rotation,
        "up": rotation.T @ (own["norm"][:, None] * own["up"]),
        "down": own["down"] @ rotation,
        "head": rotation.T @ (own["norm2"][:, None] * own["head"]),
    }.items():
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=3e-7 * np.abs(wanted).max())


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([2, 6, 8, 12, 18, 20, 36]), st.integers(0, 9), st.booleans())
def test_any_width_and_seed_is_an_identity(width, seed, tied):
    def f(params, tokens):
        x = params["table"][tokens]
        h = rms_norm(x, params["norm"])
        x = x + (jax.nn.silu(h @ params["a"]) * (h @ params["b"])) @ params["down"]
        return rms_norm(x, params["norm"] if tied else params["norm2"]) @ params["head"]

    params = {"table": normal(5, width), "norm": gain(width), "norm2": gain(width)}
    params |= {name: normal(width, 8) for name in ("a", "b")}
    params |= {"down": normal(8, width), "head": normal(width, 5)}
    _, report, maps = rewritten(f, params, PROMPT % 5, seed=seed)
    assert where(report) == (["a", "b", "head"], ["down"]) and len(maps) == 1


def test_what_cannot_be_rotated_says_why():
    params = {"table": normal(TOKENS, WIDTH), "up": normal(WIDTH, 8), "down": normal(8, WIDTH)}
    params |= {"norm": gain(WIDTH), "head": normal(WIDTH, 5)}
    unit = jnp.ones(WIDTH)

    def perceptron(p, x):
        return jnp.tanh(x @ p["up"]) @ p["down"]

    def mean_first(p, tokens):  # as LayerNorm does
        x = p["table"][tokens]
        x = x - x.mean(-1, keepdims=True)
        return rms_norm(x + perceptron(p, x), unit) @ p["head"]

    def norm_last(p, tokens):  # as BERT does
        x = p["table"][tokens]
        x = rms_norm(x + perceptron(p, x), p["norm"]) + x
        return x @ p["head"]

    def nonlinear(p, tokens):
        return jnp.sin(p["table"][tokens]) @ p["head"]

    def returned(p, tokens):
        x = p["table"][tokens]
        return x, rms_norm(x, p["norm"]) @ p["head"]

    def shared_gain(p, tokens):
        x = p["table"][tokens]
        return (rms_norm(x, p["norm"]) @ p["head"]) * jnp.sum(p["norm"])

    def argument(p, x):
        return rms_norm(x + perceptron(p, x), p["norm"]) @ p["head"]

    image = on_device(RNG.normal(size=(2, 3, WIDTH)), jnp.float32)
    cases = [
        (mean_first, PROMPT, "head", "reduce_sum over channels"),
        (norm_last, PROMPT, "head", "add after a gain"),
        (nonlinear, PROMPT, "head", "^sin at "),
        (returned, PROMPT, "head", "it is a result of the function"),
        (shared_gain, PROMPT, "head", "its gain norm has another use"),
        (argument, image, "up", "it is an argument"),
    ]
    for f, x, name, why in cases:
        found, report, _ = rewritten(f, params, x)
        (row,) = (row for row in report if row.site.startswith(name))
        assert not row.offline and re.search(why, row.why), (f.__name__, row)
        assert not report.edges and not report.gains
        np.testing.assert_array_equal(found["table"], params["table"])


def test_blocks_and_flags():
    _, report, _ = rewritten(llama, parameters(), PROMPT, block=4)
    assert where(report) == ([x for x in OFFLINE if x != "out"], ["out", "down"])
    assert {x.factors for x in report} == {(4,)}
    assert "not a multiple of `block`" in str(report)
    message = r"(?s)jqx\.algorithms\.rotate: .*`offline`.*fix:"
    with pytest.raises(TypeError, match=message):
        rotate(offline=1)


@pytest.mark.slow
def test_the_rest_of_the_library_takes_it(tmp_path):
    """Plans, statistics, GPTQ, files and binding."""
    params, batches = parameters(tied=True), [PROMPT, PROMPT[::-1]]
    algorithm = chain(rotate(offline=True), gptq())
    quantized = jqx.ptq(llama, POLICY, algorithm, progress=False)(params, batches)
    report, matrices = quantized.details
    assert len(report) == 7 and len(matrices) and len(quantized.maps) == 3
    jqx.save(tmp_path / "model.safetensors", quantized)
    again = jqx.load(tmp_path / "model.safetensors").bind(llama)
    np.testing.assert_array_equal(again(PROMPT), quantized(PROMPT))
    exact = llama(params, PROMPT)
    error = np.linalg.norm(quantized(PROMPT) - exact) / np.linalg.norm(exact)
    assert error < 0.5  # 4 bits on both sides; without the gain at the head it is 1 and more


@pytest.mark.slow
def test_modules_of_flax_are_rotated_as_functions_are():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(TOKENS, WIDTH)(tokens)
            h = nn.RMSNorm()(x)
            x = x + nn.Dense(WIDTH)(nn.silu(nn.Dense(HIDDEN)(h)))
            return nn.Dense(TOKENS, use_bias=False)(nn.RMSNorm()(x))

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
            self.norm, self.last = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
            self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
            self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, TOKENS, rngs=rngs)
            self.norm.scale.set_value(gain(WIDTH))

        def __call__(self, tokens):
            x = self.embed(tokens)
            x = x + self.down(nnx.silu(self.up(self.norm(x))))
            return self.head(self.last(x))

    policy = jqx.Policy([jqx.Rule(".*", weight="int8", activation="int8:dynamic:token")])
    algorithm = rotate(offline=True)
    module, model = Linen(), Nnx(nnx.Rngs(0))
    variables = module.init(jax.random.key(0), PROMPT)
    ways = (
        (jqx.linen.ptq(module, policy, algorithm, progress=False)(variables, [PROMPT]),
         module.apply(variables, PROMPT)),
        (jqx.nnx.ptq(model, policy, algorithm, progress=False)([PROMPT]),
         model(PROMPT)),
    )  # fmt: skip
    for quantized, exact in ways:
        assert [x.offline for x in quantized.details] == [True, False, True]
        assert len(quantized.maps) == 1
        error = np.linalg.norm(quantized(PROMPT) - exact) / np.linalg.norm(exact)
        assert error < 0.02  # of 8 bits on both sides
