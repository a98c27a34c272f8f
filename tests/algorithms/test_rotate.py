"""Rotations: Hadamard matrices of many sizes, functions that stay as they are, and rotations in
weights alone of the residual stream and of the values of attention, in any function.
"""

import re
from functools import partial

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
from jqx._src.algorithms.hadamard import factors_of, hadamard, is_order, largest_block
from jqx.algorithms import chain, gptq, rotate

from ..arrays import on_device
from ..models.layers import (
    HEAD,
    HEADS,
    HIDDEN,
    KEYS,
    LAYERS,
    TOKENS,
    WIDTH,
    gains,
    llama,
    llama_params,
    rms_norm,
    rotary,
    sites_of_every_kind,
    unstacked,
    weights,
)
from ..oracles.algorithms import assert_near

RNG, NEAREST = np.random.default_rng(0), jqx.algorithms.nearest()
normal, gain = partial(weights, RNG), partial(gains, RNG)
POLICY = jqx.presets.w4a4()


def unscaled(*shape):
    return on_device(RNG.normal(size=shape), jnp.float32)


OUTLIERS = on_device(np.where(np.arange(WIDTH) % 11 == 0, 8.0, 1.0), jnp.float32)
CHAIN = {
    "up": unscaled(LAYERS, WIDTH, HIDDEN) / OUTLIERS[None, :, None],
    "down": unscaled(LAYERS, HIDDEN, WIDTH) / np.sqrt(HIDDEN),
    "kernel": unscaled(3, 3, 12, 4),
    "experts": unscaled(2, WIDTH, 4),
    "stack": unscaled(2, WIDTH, 5),
}
BATCHES = [unscaled(24, WIDTH), unscaled(16, WIDTH)]


loops = partial(sites_of_every_kind, before=lambda x: jnp.tanh(x) * OUTLIERS[None], groups=2)


def test_hadamard_matrices_are_orthogonal_and_of_ones():
    sizes = [n for n in (1, 2, *range(4, 257, 4)) if is_order(n)]
    assert {12, 20, 28, 36, 44, 60, 108, 140, 156, 172} < set(sizes)
    assert set(range(4, 257, 4)) - set(sizes) == {188, 236}
    for n in sizes:
        h = hadamard(n).astype(int)
        assert set(np.unique(h)) <= {-1, 1}
        np.testing.assert_array_equal(h @ h.T, n * np.eye(n, dtype=int))
    assert not any(map(is_order, (0, 3, 6, 10, 18, 188)))


def test_sizes_are_products_of_two_that_are_near_each_other():
    cases = {64: (64,), 576: (24, 24), 1536: (32, 48), 11008: (64, 172), 156: (156,), 49: ()}
    assert {n: factors_of(n) for n in cases} == cases
    assert [largest_block(n) for n in (576, 13696, 49, 98, 18)] == [576, 128, 1, 2, 2]


@pytest.mark.many
@pytest.mark.parametrize("block", [None, 4, 2])
def test_the_function_stays_as_it_is(block):
    plan = jqx.make_plan(loops, POLICY)(CHAIN, BATCHES[0])
    result, report, maps = rotate(block=block).rewrite(loops, plan, CHAIN, BATCHES, progress=False)[
        :3
    ]
    assert [(x.site.split(":")[0], x.channels) for x in report] == [
        *(
            ("up", WIDTH),
            ("down", HIDDEN),
            ("kernel", 12),
            ("experts", WIDTH),
            ("stack", WIDTH),
        ),
    ]
    blocks = [int(np.prod(x.factors)) for x in report]
    assert blocks == ([24, 40, 12, 24, 24] if block is None else [block] * 5)
    assert len(maps) == 5 and len(str(report).splitlines()) == 6
    mapped = jqx.map_channels(loops, plan, maps)
    assert_near(mapped(result, BATCHES[0]), loops(CHAIN, BATCHES[0]), 3e-6)
    changed = [np.abs(result[name] - CHAIN[name]).max() for name in CHAIN]
    assert min(changed) > 0.1


@pytest.mark.slow
def test_outliers_lose_less_and_more_so_with_gptq():
    def lost(algorithm):
        quantized = jqx.ptq(loops, POLICY, algorithm, progress=False)(CHAIN, BATCHES)
        exact, result = (f(BATCHES[0])["x"] for f in (partial(loops, CHAIN), quantized))
        return float(jnp.sum((exact - result) ** 2) / jnp.sum(exact**2))

    plain, rotated, both = map(lost, (NEAREST, rotate(), chain(rotate(), gptq())))
    assert rotated < 0.8 * plain and both < rotated


def test_sites_of_one_value_share_a_rotation():
    g = lambda p, x: jnp.tanh(x @ p["a"]) + x @ p["b"]  # noqa: E731
    params = {"a": unscaled(WIDTH, 4), "b": unscaled(WIDTH, 4)}
    quantized = jqx.ptq(g, POLICY, rotate(seed=3), progress=False)(params, BATCHES)
    (a,), (b,) = quantized.maps.values()
    jax.tree.map(np.testing.assert_array_equal, a, b)
    (other,) = jqx.ptq(g, POLICY, rotate(), progress=False)(params, BATCHES).maps[
        "a:dot_general:lhs"
    ]
    assert (other.scale != a.scale).any()


def test_sizes_without_a_rotation_are_refused():
    with pytest.raises(ValueError, match=r"(?s)jqx\.algorithms\.rotate: .*does not divide.*fix:"):
        jqx.ptq(loops, POLICY, rotate(block=16), progress=False)(CHAIN, BATCHES)
    odd = lambda w, x: x[:, :7] @ w  # noqa: E731
    with pytest.raises(ValueError, match=r"(?s)no site can be rotated.*a divisor of 7.*fix:"):
        jqx.ptq(odd, POLICY, rotate(), progress=False)(unscaled(7, 2), BATCHES)


def scores_of(p, x):
    q, k, v = (x.reshape(2, -1, WIDTH) @ p[name] for name in "qkv")
    q, k = (jnp.concatenate([-y[..., 12:], y[..., :12]], -1) + y for y in (q, k))  # as RoPE does
    with jax.named_scope("scores"):
        weights = jax.nn.softmax(q @ k.mT / 9)
    with jax.named_scope("mixed"):
        return weights @ v


QKV = {name: unscaled(WIDTH, WIDTH) / WIDTH for name in "qkv"}
QKV["q"] = QKV["q"] * OUTLIERS[None]
INT4 = jqx.QSpec("int4", jqx.per_token(), dynamic=True)
SCORES = jqx.Policy([jqx.Rule("scores", activation=INT4), jqx.Rule("[qkv]", weight="int8")])


def test_queries_and_keys_are_rotated_alike():
    plan = jqx.make_plan(scores_of, SCORES)(QKV, BATCHES[0])
    chosen = rotate(products="scores:dot_general").rewrite(
        scores_of, plan, QKV, BATCHES[:1], progress=False
    )
    keys = {f"scores:dot_general:{side}" for side in ("lhs", "rhs")}
    assert keys < set(chosen.maps)
    (entry,) = (x for x in chosen.report if x.site == "scores:dot_general")
    assert (entry.channels, entry.factors) == (WIDTH, (WIDTH,))
    mapped = jqx.map_channels(scores_of, plan, chosen.maps)
    for x in BATCHES:  # of any number of tokens
        # float32: sums of 24 products, rotated twice
        assert_near(mapped(chosen.params, x), scores_of(QKV, x))

    def lost(algorithm):
        quantized = jqx.ptq(scores_of, SCORES, algorithm, progress=False)(QKV, BATCHES[:1])
        return float(((quantized(BATCHES[0]) - scores_of(QKV, BATCHES[0])) ** 2).mean())

    assert lost(rotate(products="scores:dot_general")) < 0.5 * lost(rotate())
    for pattern, error, fact in (
        ("mixed:.*", ValueError, "which matches none"),
        (".*", ValueError, "also matches other sites(.|\n)+'scores:dot_general'"),
        ("(", ValueError, "not a regular expression"),
        (3, TypeError, "`products`"),
    ):
        with pytest.raises(error, match=fact) as info:
            algorithm = rotate(products=pattern)
            algorithm.rewrite(scores_of, plan, QKV, BATCHES[:1], progress=False)
        assert "fix:" in str(info.value)


# In weights alone


def rewritten(f, params, *batch, policy=POLICY, **options):
    """The parameters, report and maps of a rotation; checks that the function stays as it is."""
    plan = jqx.make_plan(f, policy)(params, *batch)
    algorithm = rotate(**{"offline": True, **options})
    changed, report, maps = algorithm.rewrite(f, plan, params, [batch], progress=False)[:3]
    assert_near(jqx.map_channels(f, plan, maps)(changed, *batch), f(params, *batch))
    return changed, report, maps


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
    params = llama_params(biases=biases)
    changed, report, maps = rewritten(llama, params, PROMPT)
    assert where(report) == (OFFLINE, ["down"])
    sizes = {x.site.split(":")[0]: x.factors for x in report}
    assert sizes["layers/q"] == (WIDTH,) and sizes["layers/down"] == (HIDDEN,)
    assert sizes["layers/out"] == (HEAD,)  # of no Hadamard matrix: a random orthogonal one
    assert list(maps) == ["layers/down:dot_general:lhs"] and not report.edges
    assert report.gains == ("layers/norm", "layers/norm2", "norm")
    for name in ("norm", "norm2"):
        assert np.all(changed["layers"][name] == 1)
    assert "run time  layers/down:dot_general (mul at " in str(report)
    same = [name for name, x in params["layers"].items() if np.all(changed["layers"][name] == x)]
    assert same == (["gate_bias"] if biases else [])


def test_layers_may_stand_in_a_list_and_in_nested_calls():
    params = unstacked(llama_params(biases=True))
    f = lambda p, tokens: llama(p, tokens, checkpointed=True)  # noqa: E731
    _, report, maps = rewritten(f, params, PROMPT)
    offline, online = where(report)
    assert len(offline) == 6 * LAYERS + 1
    assert online == ["0/down", "1/down"] and len(maps) == 2


def test_a_tied_table_after_a_gain_stays_and_the_stream_is_rotated_there():
    params = llama_params(tied=True)
    changed, report, maps = rewritten(llama, params, PROMPT)
    assert where(report) == (OFFLINE[:-1], ["down"])
    np.testing.assert_array_equal(changed["table"], params["table"])
    assert np.all(changed["norm"] == 1)
    assert len(maps) == 3 and set(report.edges) < set(maps)
    (head, lookup) = report.edges
    assert "looked up" in report.edges[head] and "after a gain" in report.edges[lookup]
    assert all(f"run time  {key} (" in str(report) for key in report.edges)


@pytest.mark.parametrize("tied", [False, True])
def test_only_offline_rotates_no_operand_of_a_site_at_run_time(tied):
    """At the ends of a stream with a tied table it is rotated, and rotated back."""
    params = llama_params(tied=tied)
    changed, report, maps = rewritten(llama, params, PROMPT, offline="only")
    names = [x.site.split(":")[0].removeprefix("layers/") for x in report if x.offline]
    assert names == (OFFLINE[:-1] if tied else OFFLINE)
    (down,) = (x for x in report if not x.offline)
    assert "layers/down" in down.site and not down.factors and "mul at " in down.why
    assert set(maps) == set(report.edges) and len(maps) == 2 * tied
    whole, _, _ = rewritten(llama, params, PROMPT)
    for name in ("q", "v", "up"):
        np.testing.assert_array_equal(changed["layers"][name], whole["layers"][name])
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
    changed, report, maps = rewritten(f, params, PROMPT)
    assert where(report) == (["up"], ["down"]) and len(maps) == 1 and not report.edges
    for name in ("table", "place"):
        assert np.abs(changed[name] - params[name]).max() > 0.1
        norms = [np.linalg.norm(x[name], axis=1) for x in (changed, params)]
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
        q, k = rotary(norm(q, p["q_norm"])), rotary(norm(k, p["k_norm"]))
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
    changed, report, _ = rewritten(f, params, PROMPT)
    assert where(report) == (["qkv", "out", "router", "up", "head"], ["down"])
    assert not any(np.any(changed[name]) for name in ("norm", "norm2", "norm3"))
    np.testing.assert_array_equal(changed["q_norm"], params["q_norm"])


def test_a_block_is_rotated_as_numpy_says():
    """An oracle in float64: what the weights of a perceptron in a stream become."""

    def f(params, tokens):
        x = params["table"][tokens]
        x = x + jnp.tanh(rms_norm(x, params["norm"]) @ params["up"]) @ params["down"]
        return rms_norm(x, params["norm2"]) @ params["head"]

    params = {"table": normal(TOKENS, 20), "norm": gain(20), "up": normal(20, 8)}
    params |= {"down": normal(8, 20), "norm2": gain(20), "head": normal(20, 7)}
    policy = jqx.Policy([jqx.Rule("up|head", weight="int4", activation="int4:dynamic:token")])
    changed, report, maps = rewritten(f, params, PROMPT, policy=policy, seed=5)
    assert where(report) == (["up", "head"], []) and not maps
    exact = {name: np.asarray(x, np.float64) for name, x in params.items()}
    signs = np.random.default_rng((5, 20)).choice([-1.0, 1.0], 20)
    rotation = signs[:, None] * hadamard(20) / np.sqrt(20)
    for name, wanted in {
        "table": exact["table"] @ rotation,
        "up": rotation.T @ (exact["norm"][:, None] * exact["up"]),
        "down": exact["down"] @ rotation,
        "head": rotation.T @ (exact["norm2"][:, None] * exact["head"]),
    }.items():
        np.testing.assert_allclose(changed[name], wanted, rtol=0, atol=3e-7 * np.abs(wanted).max())


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
        changed, report, _ = rewritten(f, params, x)
        (row,) = (row for row in report if row.site.startswith(name))
        assert not row.offline and re.search(why, row.why), (f.__name__, row)
        assert not report.edges and not report.gains
        np.testing.assert_array_equal(changed["table"], params["table"])


def test_blocks_that_divide_no_head_rotate_values_at_run_time():
    _, report, _ = rewritten(llama, llama_params(), PROMPT, block=4)
    assert where(report) == ([x for x in OFFLINE if x != "out"], ["out", "down"])
    assert {x.factors for x in report} == {(4,)}
    assert "not a multiple of `block`" in str(report)


@pytest.mark.slow
def test_the_rest_of_the_library_takes_it(tmp_path):
    """Plans, statistics, GPTQ, files and binding."""
    params, batches = llama_params(tied=True), [PROMPT, PROMPT[::-1]]
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
    variables = jax.jit(module.init)(jax.random.key(0), PROMPT)
    quantize = jqx.linen.ptq(module, policy, algorithm, progress=False)
    of_linen = quantize(variables, [PROMPT]), module.apply(variables, PROMPT)
    of_nnx = jqx.nnx.ptq(model, policy, algorithm, progress=False)([PROMPT]), model(PROMPT)
    for quantized, exact in (of_linen, of_nnx):
        assert [x.offline for x in quantized.details] == [True, False, True]
        assert len(quantized.maps) == 1
        error = np.linalg.norm(quantized(PROMPT) - exact) / np.linalg.norm(exact)
        assert error < 0.02  # of 8 bits on both sides
