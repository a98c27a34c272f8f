"""Pairs: what can be scaled with what, in any function; folding leaves the function as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.algorithms import find_pairs, rotate

from ..arrays import on_device
from .scales import divided

RNG = np.random.default_rng(0)
D, HEADS, KV, TOKENS, LAYERS = 8, 4, 2, 5, 3
POLICY = jqx.Policy([jqx.Rule(".*", weight="int8", tables=None)])


def normal(*shape):
    return on_device(np.float32(RNG.normal(size=shape)))


def found_in(f, params, *inputs):
    plan = jqx.make_plan(f, POLICY)(params, *inputs)
    return find_pairs(f, plan)(params, *inputs)


def table_of(pairs):
    """By names without operations: after -> (before, channels)."""
    name = lambda x: x.split(":")[0]  # noqa: E731
    return {
        " ".join(map(name, x.after)): (" ".join(map(name, x.before)), x.channels) for x in pairs
    }


def check_identity(f, params, *inputs, pairs=None):
    """All factors at once, each another one: the function is the same, and the weights are not."""
    pairs = pairs or found_in(f, params, *inputs)
    factors = np.exp(RNG.normal(size=pairs.folds.count))
    factors[0] = 1
    folded = pairs.folds.folded(params, factors)
    run = jax.jit(f)
    for a, b in zip(*(jax.tree.leaves(run(p, *inputs)) for p in (params, folded)), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()
    both = zip(*map(jax.tree.leaves, (params, folded)), strict=True)
    assert any([bool((a != b).any()) for a, b in both]) >= (len(pairs) > 0)
    return pairs


def row(v, x):
    """A vector as x has its channels."""
    return v.reshape((1,) * (x.ndim - v.ndim) + v.shape)


def norm(x, gain):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * row(gain, x)


def attention(p, x):
    """Two query heads share keys and values."""
    split = lambda w, heads: (x @ w).reshape(*x.shape[:2], heads, D // HEADS)  # noqa: E731
    q, k, v = split(p["q"], HEADS), split(p["k"], KV), split(p["v"], KV)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["o"]


def llama(p, tokens):
    """Layers in a scan, a table that is the head too."""

    def layer(x, p):
        x = x + attention(p, norm(x, p["first"]))
        h = norm(x, p["second"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    x, _ = lax.scan(layer, p["table"][tokens], p["layers"])
    return norm(x, p["last"]) @ p["table"].T


def layers_of_llama():
    shapes = {"q": (D, D), "k": (D, D // 2), "v": (D, D // 2), "o": (D, D), "first": (D,)}
    shapes |= {"gate": (D, 12), "up": (D, 12), "down": (12, D), "second": (D,)}
    return {name: normal(LAYERS, *shape) for name, shape in shapes.items()}


LLAMA = {"table": normal(11, D), "layers": layers_of_llama(), "last": normal(D)}
TOKEN_IDS = on_device(np.array([[1, 2, 3, 4, 5], [7, 7, 0, 10, 3]]))
OF_LLAMA = {
    "layers/q layers/k layers/v": ("layers/first", LAYERS * D),
    "layers/o": ("layers/v", LAYERS * D // 2),
    "layers/gate layers/up": ("layers/second", LAYERS * D),
    "layers/down": ("layers/up", LAYERS * 12),
}


def test_the_pairs_of_a_llama_are_those_of_registries_and_values_of_shared_heads():
    pairs = check_identity(llama, LLAMA, TOKEN_IDS)
    assert table_of(pairs) == OF_LLAMA and not pairs.reasons


def unrolled(p, tokens):
    x = p["table"][tokens]
    for i in range(LAYERS):
        own = jax.tree.map(lambda w: w[i], p["layers"])  # noqa: B023
        x = x + jax.checkpoint(attention)(own, norm(x, own["first"]))
        h = norm(x, own["second"])
        x = x + (jax.nn.silu(h @ own["gate"]) * (h @ own["up"])) @ own["down"]
    return norm(x, p["last"]) @ p["table"].T


def test_layers_one_by_one_have_the_pairs_of_a_scan():
    pairs = check_identity(unrolled, LLAMA, TOKEN_IDS)
    found = {}
    for x in pairs:
        key = " ".join(name.split(":")[0] for name in x.after)
        found[key] = found.get(key, 0) + x.channels
    assert found == {key: count for key, (_, count) in OF_LLAMA.items()}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_floats_of_two_bytes_have_the_pairs_and_rotations_of_four(dtype):
    def f(p, tokens):
        return jax.nn.relu(llama(p, tokens) @ p["up"]) @ p["down"]

    params, tables, reports = LLAMA | {"up": normal(11, 16), "down": normal(16, 3)}, [], []
    with jax.numpy_dtype_promotion("standard"):  # attention computes in float32
        for p in (params, jax.tree.map(lambda x: x.astype(dtype), params)):
            plan = jqx.make_plan(f, POLICY)(p, TOKEN_IDS)
            tables.append(table_of(find_pairs(f, plan)(p, TOKEN_IDS)))
            done = rotate(offline=True).rewrite(f, plan, p, [(TOKEN_IDS,)], progress=False)
            reports.append([(x.site, x.channels) for x in done.report if x.offline])
    assert tables[0] == tables[1] and tables[0]["down"] == ("up", 16)
    assert reports[0] == reports[1] != []


def test_values_of_a_cache_that_is_given_are_not_scaled_and_the_table_says_so():
    def f(p, x, cache, start):
        values = lax.dynamic_update_slice_in_dim(cache, x @ p["v"], start, axis=1)
        return jax.nn.softmax(x @ cache.mT) @ values @ p["o"]

    params = {name: normal(D, D) for name in "vo"}
    pairs = found_in(f, params, normal(2, 3, D), normal(2, TOKENS, D), np.int32(2))
    assert not pairs
    why = pairs.reasons["o:dot_general"].split("; ")
    assert len(why) == 2 and why[0].startswith("exp") and why[1] == "it is an argument"


def bert(p, tokens):
    """Norms behind the sums, biases, GELU."""

    def layer_norm(x, own):
        x = x - x.mean(-1, keepdims=True)
        return norm(x, own["gain"]) + row(own["bias"], x)

    x = layer_norm(p["table"][tokens] + p["places"][None], p["n0"])
    x = layer_norm(x + attention(p, x), p["n1"])
    return layer_norm(x + jax.nn.gelu(x @ p["up"]) @ p["down"], p["n2"])


def test_in_a_bert_values_are_scaled_alone_and_every_other_site_says_why():
    norms = {f"n{i}": {"gain": normal(D), "bias": normal(D)} for i in range(3)}
    own = {name: x[0] for name, x in LLAMA["layers"].items() if name in "q k v o up down".split()}
    params = {"table": normal(11, D), "places": normal(TOKENS, D), **norms, **own}
    pairs = check_identity(bert, params, TOKEN_IDS)
    assert table_of(pairs) == {"o": ("v", D // 2)}
    why = {name.split(":")[0]: reason for name, reason in pairs.reasons.items()}
    assert sorted(why) == ["down", "k", "q", "up", "v"]
    for name in ("q", "k", "v", "up"):  # the sum is read by a norm over its channels
        assert why[name].startswith(("the other factor of a product", "mul", "reduce_sum", "sub"))
    assert why["down"].startswith(("integer_pow", "tanh"))


def images(p, x):
    """Expansion, depthwise, projection, a sum; batch norms that are not folded; a pool; a head."""
    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def conv(x, w, **options):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", **numbers, **options)

    x = jax.nn.relu(conv(x, p["stem"]) + p["b0"][None, None, None])
    h = conv(x, p["expand"]) - row(p["mean"], x)
    h = jax.nn.relu(h * row(p["scale"], x) + row(p["b1"], x))
    h = jax.nn.leaky_relu(conv(h, p["depthwise"], feature_group_count=12))
    h = x + conv(h, p["project"])
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.concatenate([h, h], -1).mean((1, 2)) @ p["head"]


def test_images_are_scaled_through_clips_depthwise_kernels_sums_and_pools():
    params = {
        "stem": normal(3, 3, 3, 6),
        "expand": normal(1, 1, 6, 12),
        "depthwise": normal(3, 3, 1, 12),
        "project": normal(1, 1, 12, 6),
        "head": normal(12, 4),
        **{name: normal(12) for name in ("mean", "scale", "b1")},
        "b0": normal(6),
    }
    pairs = check_identity(images, params, normal(2, 6, 6, 3))
    assert table_of(pairs) == {
        "expand head": ("stem project b0", 6),
        "depthwise": ("expand mean b1", 12),
        "project": ("depthwise", 12),
    }
    assert pairs.reasons == {"stem:conv_general_dilated": "it is an argument"}


def test_experts_share_the_factors_of_their_rows():
    def f(p, x):
        h = norm(x, p["gain"])
        sizes = jnp.bincount(jnp.argmax(h @ p["router"], -1), length=3)
        return lax.ragged_dot(jax.nn.relu(lax.ragged_dot(h, p["up"], sizes)), p["down"], sizes)

    shapes = {"gain": (D,), "router": (D, 3), "up": (3, D, 6), "down": (3, 6, D)}
    params = {name: normal(*shape) for name, shape in shapes.items()}
    pairs = check_identity(f, params, normal(10, D))
    assert table_of(pairs) == {"router up": ("gain", D), "down": ("up", 6)}


TWO = {"a": normal(D, 6), "b": normal(6, D), "c": normal(6, 6), "gain": normal(6)}
X = normal(4, D)


def twice(p, x):
    h = x @ p["a"]
    return (jnp.abs(h) * 2) @ p["b"] + h @ p["b"]


def stacked(p, x):
    h = x @ p["a"]
    h = jnp.stack([h, 2 * h])[::-1]
    return jnp.where(h > 0, h, 0.1 * h).max(0) @ p["b"]


def chosen(p, x):
    return lax.cond(x.sum() > 0, lambda h: h * 2, lambda h: -h, x @ p["a"]) @ p["b"]


def in_a_loop(p, x):
    return lax.fori_loop(0, 3, lambda i, h: h * 2, x @ p["a"]) @ p["b"]


def in_many_steps(p, x):
    return lax.scan(lambda h, _: (h * 0.99, None), x @ p["a"], length=300)[0] @ p["b"]


def while_it_holds(p, x):
    return lax.while_loop(lambda h: h.max() < 10, lambda h: h * 2, jnp.abs(x @ p["a"])) @ p["b"]


def a_part_of_a_gain(p, x):
    return (x @ p["a"])[:, :3] * p["gain"][None, :3] @ p["b"][:3]


def with_a_constant(p, x):
    return jnp.maximum(x @ p["a"], 1.0) @ p["b"]


def in_between(p, x):
    h = x @ p["a"]
    return h @ p["b"], h


def joined(p, x):
    h = x @ p["a"]
    return (h + h @ p["c"]) @ p["b"]


def two_factors(p, x):
    h = x @ p["a"]
    return (h * h[:, ::-1]) @ p["b"]


def gated(p, x):
    """Either factor may take it."""
    return ((x @ p["a"]) * (x[:, :6] @ p["c"])) @ p["b"]


def rows_of_a_table(p, x):
    return p["b"].T[jnp.arange(4) % 3] @ p["c"]


def along_a_sum(p, x):
    h = x @ p["a"]
    return jnp.cumsum(h, 0) @ p["b"], jnp.sort(h, 1)


CASES = {
    twice: "has another use",
    stacked: {"b": ("a", 6)},
    chosen: {"b": ("a", 6)},
    in_a_loop: {"b": ("a", 6)},
    in_many_steps: "a scan of 300 steps",
    while_it_holds: "while",
    a_part_of_a_gain: "a part of it is not used here",
    with_a_constant: "max with a constant",
    in_between: "it is a result of the function",
    joined: {"c b": ("a c", 6)},
    two_factors: "the other factor of a product takes it",
    gated: {"b": ("a", 6)},
    along_a_sum: "sort",
}


@pytest.mark.parametrize("f", CASES, ids=lambda f: f.__name__)
def test_forms_and_what_stands_in_the_way(f):
    pairs, expected = check_identity(f, TWO, X), CASES[f]
    if isinstance(expected, dict):
        assert {key: count for key, (_, count) in table_of(pairs).items()} == {
            key: count for key, (_, count) in expected.items()
        }
        assert {before for before, _ in table_of(pairs).values()} == {
            before for before, _ in expected.values()
        }
        return
    assert not pairs and pairs.reasons
    assert any(expected in why for why in pairs.reasons.values())


def test_scales_are_what_sites_divide_by():
    pairs = found_in(llama, LLAMA, TOKEN_IDS)
    scale = np.exp(RNG.normal(size=(LAYERS, D)))
    keys = [f"layers/{name}:dot_general:lhs" for name in "qkv"]
    folded, _ = divided(pairs, LLAMA, {keys[0]: scale})
    every, _ = divided(pairs, LLAMA, dict.fromkeys(keys, scale))
    jax.tree.map(np.testing.assert_array_equal, folded, every)
    own, given = folded["layers"], LLAMA["layers"]
    np.testing.assert_allclose(own["first"], given["first"] / scale, rtol=2.0**-23)
    np.testing.assert_allclose(own["k"], given["k"] * scale[..., None], rtol=2.0**-23)
    assert all(own[name] is given[name] for name in ("o", "up", "second"))
    a, b = jax.jit(llama)(LLAMA, TOKEN_IDS), jax.jit(llama)(folded, TOKEN_IDS)
    assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()
    assert "layers/q:dot_general, layers/k:dot_general, layers/v:dot_general" in str(pairs)


def test_weights_may_stand_in_several_arguments():
    def f(b, x, a):
        return jax.nn.relu(x @ a["w"]) @ b

    args = TWO["b"], X, {"w": TWO["a"]}
    for positions in ((0, 2), (2, 0)):
        params = tuple(args[i] for i in positions)
        plan = jqx.make_plan(f, POLICY, params=positions)(*args)
        pairs = find_pairs(f, plan)(*args)
        key = next(x.key for x in plan.sites[1].operands if x.path is None)
        folded, _ = divided(pairs, params, {key: np.full(6, 4.0)})
        args_of = dict(zip(positions, folded, strict=True))
        np.testing.assert_array_equal(f(args_of[0], X, args_of[2]), f(*args))
