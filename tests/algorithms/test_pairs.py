"""Pairs: what can be scaled with what, in any function, and however tables are looked up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.algorithms import find_pairs, rotate

from ..arrays import on_device
from ..models.layers import (
    HEAD,
    HIDDEN,
    KEYS,
    LAYERS,
    TOKENS,
    WIDTH,
    attention,
    conv,
    llama,
    llama_params,
    rms_norm,
    unstacked,
)
from ..oracles.algorithms import assert_near, divided

RNG = np.random.default_rng(0)
D = 8
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
    assert_near(run(folded, *inputs), run(params, *inputs))
    both = zip(*map(jax.tree.leaves, (params, folded)), strict=True)
    assert any([bool((a != b).any()) for a, b in both]) >= (len(pairs) > 0)
    return pairs


def row(v, x):
    """A vector as x has its channels."""
    return v.reshape((1,) * (x.ndim - v.ndim) + v.shape)


LLAMA = llama_params(tied=True)
TOKEN_IDS = on_device(np.array([[1, 2, 3, 4, 5], [7, 7, 0, 10, 3]]))
OF_LLAMA = {
    "layers/q layers/k layers/v": ("layers/norm", LAYERS * WIDTH),
    "layers/out": ("layers/v", LAYERS * KEYS * HEAD),
    "layers/gate layers/up": ("layers/norm2", LAYERS * WIDTH),
    "layers/down": ("layers/up", LAYERS * HIDDEN),
}


def test_the_pairs_of_a_llama_are_those_of_registries_and_values_of_shared_heads():
    pairs = check_identity(llama, LLAMA, TOKEN_IDS)
    assert table_of(pairs) == OF_LLAMA and not pairs.reasons


def test_weights_that_are_multiplied_by_numbers_have_the_pairs_of_others():
    """The layers of haliax multiply each weight by a number, which is 1 or from muP."""

    def f(p, tokens):
        numbers = {"q": 2.0, "v": 0.5, "out": -1.0, "gate": 1.0, "down": jnp.float32(3)}
        layers = {name: w * numbers.get(name, 1.0) for name, w in p["layers"].items()}
        return llama({**p, "layers": layers | {"up": p["layers"]["up"] / 2.0}}, tokens)

    pairs = check_identity(f, LLAMA, TOKEN_IDS)
    assert table_of(pairs) == OF_LLAMA and not pairs.reasons
    plan = jqx.make_plan(f, POLICY)(LLAMA, TOKEN_IDS)
    done = rotate(offline=True).rewrite(f, plan, LLAMA, [TOKEN_IDS], progress=False)
    assert sum(x.offline for x in done.report) >= 6
    mapped = jqx.map_channels(f, plan, done.maps)
    assert_near(mapped(done.params, TOKEN_IDS), f(LLAMA, TOKEN_IDS), 3e-6)


def unrolled(p, tokens):
    return llama(unstacked(p), tokens, checkpointed=True)


def test_layers_one_by_one_have_the_pairs_of_a_scan():
    pairs = check_identity(unrolled, LLAMA, TOKEN_IDS)
    result = {}
    for x in pairs:
        key = " ".join(name.split(":")[0] for name in x.after)
        result[key] = result.get(key, 0) + x.channels
    assert result == {key: count for key, (_, count) in OF_LLAMA.items()}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_floats_of_two_bytes_have_the_pairs_and_rotations_of_four(dtype):
    def f(p, tokens):
        return jax.nn.relu(llama(p, tokens) @ p["up"]) @ p["down"]

    more = {"up": normal(TOKENS, 16), "down": normal(16, 3)}
    params, tables, reports = LLAMA | more, [], []
    with jax.numpy_dtype_promotion("standard"):  # attention computes in float32
        cast = lambda p: jax.tree.map(lambda x: x.astype(dtype), p)  # noqa: E731
        in_f = lambda p, tokens: f(cast(p), tokens)  # noqa: E731
        for g, p in ((f, params), (f, cast(params)), (in_f, params)):
            plan = jqx.make_plan(g, POLICY)(p, TOKEN_IDS)
            tables.append(table_of(find_pairs(g, plan)(p, TOKEN_IDS)))
            done = rotate(offline=True).rewrite(g, plan, p, [(TOKEN_IDS,)], progress=False)
            reports.append([(x.site, x.channels) for x in done.report if x.offline])
    assert tables[0] == tables[1] == tables[2] and tables[0]["down"] == ("up", 16)
    assert reports[0] == reports[1] == reports[2] != []


def test_values_of_a_cache_that_is_given_are_not_scaled_and_the_table_says_so():
    def f(p, x, cache, start):
        values = lax.dynamic_update_slice_in_dim(cache, x @ p["v"], start, axis=1)
        return jax.nn.softmax(x @ cache.mT) @ values @ p["o"]

    params = {name: normal(D, D) for name in "vo"}
    pairs = found_in(f, params, normal(2, 3, D), normal(2, 5, D), np.int32(2))
    assert not pairs
    why = pairs.reasons["o:dot_general"].split("; ")
    assert len(why) == 2 and why[0].startswith("exp") and why[1] == "it is an argument"


def bert(p, tokens):
    """Norms behind the sums, biases, GELU."""

    def layer_norm(x, weights):
        x = x - x.mean(-1, keepdims=True)
        return rms_norm(x, weights["gain"]) + row(weights["bias"], x)

    x = layer_norm(p["table"][tokens] + p["places"][None], p["n0"])
    x = layer_norm(x + attention(x, p), p["n1"])
    return layer_norm(x + jax.nn.gelu(x @ p["up"]) @ p["down"], p["n2"])


def test_in_a_bert_values_are_scaled_alone_and_every_other_site_says_why():
    norms = {f"n{i}": {"gain": normal(WIDTH), "bias": normal(WIDTH)} for i in range(3)}
    weights = {name: LLAMA["layers"][name][0] for name in ("q", "k", "v", "out", "up", "down")}
    params = {"table": LLAMA["table"], "places": normal(5, WIDTH), **norms, **weights}
    pairs = check_identity(bert, params, TOKEN_IDS)
    assert table_of(pairs) == {"out": ("v", KEYS * HEAD)}
    why = {name.split(":")[0]: reason for name, reason in pairs.reasons.items()}
    assert sorted(why) == ["down", "k", "q", "up", "v"]
    for name in ("q", "k", "v", "up"):  # the sum is read by a norm over its channels
        assert why[name].startswith(("the other factor of a product", "mul", "reduce_sum", "sub"))
    assert why["down"].startswith(("integer_pow", "tanh"))


def images(p, x):
    """Expansion, depthwise, projection, a sum; batch norms that are not folded; a pool; a head."""
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
        h = rms_norm(x, p["gain"])
        sizes = jnp.bincount(jnp.argmax(h @ p["router"], -1), length=3)
        return lax.ragged_dot(jax.nn.relu(lax.ragged_dot(h, p["up"], sizes)), p["down"], sizes)

    shapes = {"gain": (D,), "router": (D, 3), "up": (3, D, 6), "down": (3, 6, D)}
    params = {name: normal(*shape) for name, shape in shapes.items()}
    pairs = check_identity(f, params, normal(10, D))
    assert table_of(pairs) == {"router up": ("gain", D), "down": ("up", 6)}


TWO = {"a": normal(D, 6), "b": normal(6, D), "c": normal(6, 6), "gain": normal(6)}
X = normal(4, D)


def stacked(h, p, x):
    h = jnp.stack([h, 2 * h])[::-1]
    return jnp.where(h > 0, h, 0.1 * h).max(0) @ p["b"]


def many_steps(h, p, x):
    return lax.scan(lambda h, _: (h * 0.99, None), h, length=300)[0] @ p["b"]


def while_it_is_small(h, p, x):
    return lax.while_loop(lambda h: h.max() < 10, lambda h: h * 2, jnp.abs(h)) @ p["b"]


A_AND_B = {"b": ("a", 6)}
CASES = {
    "another use": (lambda h, p, x: (jnp.abs(h) * 2) @ p["b"] + h @ p["b"], "has another use"),
    "a stack": (stacked, A_AND_B),
    "branches": (
        lambda h, p, x: lax.cond(x.sum() > 0, lambda h: h * 2, lambda h: -h, h) @ p["b"],
        A_AND_B,
    ),
    "a loop": (lambda h, p, x: lax.fori_loop(0, 3, lambda i, h: h * 2, h) @ p["b"], A_AND_B),
    "many steps": (many_steps, "a scan of 300 steps"),
    "while": (while_it_is_small, "while"),
    "a part of a gain": (
        lambda h, p, x: h[:, :3] * p["gain"][None, :3] @ p["b"][:3],
        "a part of it is not used here",
    ),
    "a constant": (lambda h, p, x: jnp.maximum(h, 1.0) @ p["b"], "max with a constant"),
    "a result": (lambda h, p, x: (h @ p["b"], h), "it is a result of the function"),
    "joined": (lambda h, p, x: (h + h @ p["c"]) @ p["b"], {"c b": ("a c", 6)}),
    "two factors": (
        lambda h, p, x: (h * h[:, ::-1]) @ p["b"],
        "the other factor of a product takes it",
    ),
    "either factor": (lambda h, p, x: (h * (x[:, :6] @ p["c"])) @ p["b"], A_AND_B),
    "along a sum": (lambda h, p, x: (jnp.cumsum(h, 0) @ p["b"], jnp.sort(h, 1)), "sort"),
}


@pytest.mark.parametrize("name", CASES)
def test_forms_and_what_stands_in_the_way(name):
    of, expected = CASES[name]
    pairs = check_identity(lambda p, x: of(x @ p["a"], p, x), TWO, X)
    if isinstance(expected, dict):
        assert table_of(pairs) == expected
    else:
        assert not pairs and any(expected in why for why in pairs.reasons.values())


def test_scales_are_what_sites_divide_by():
    pairs = found_in(llama, LLAMA, TOKEN_IDS)
    scale = np.exp(RNG.normal(size=(LAYERS, WIDTH)))
    keys = [f"layers/{name}:dot_general:lhs" for name in "qkv"]
    folded, _ = divided(pairs, LLAMA, {keys[0]: scale})
    every, _ = divided(pairs, LLAMA, dict.fromkeys(keys, scale))
    jax.tree.map(np.testing.assert_array_equal, folded, every)
    scaled, layers = folded["layers"], LLAMA["layers"]
    np.testing.assert_allclose(scaled["norm"], layers["norm"] / scale, rtol=2.0**-23)
    np.testing.assert_allclose(scaled["k"], layers["k"] * scale[..., None], rtol=2.0**-23)
    assert all(scaled[name] is layers[name] for name in ("out", "up", "norm2"))
    run = jax.jit(llama)
    assert_near(run(folded, TOKEN_IDS), run(LLAMA, TOKEN_IDS))
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


# Lookups

ROWS, STEPS = 11, 3
DECODER = {
    "table": normal(ROWS, D),
    "gains": normal(STEPS, D),
    "up": normal(STEPS, D, 12),
    "down": normal(STEPS, 12, D),
    "last": normal(D),
    "head": normal(D, ROWS),
}
LOOKED_UP = on_device(RNG.integers(0, ROWS, (2, 3)), jnp.int32)
LOOKUPS = {
    "index": lambda t, i: t[i],
    "index in two maps": lambda t, i: jax.vmap(jax.vmap(lambda i: t[i]))(i),
    "dynamic index in two maps": lambda t, i: jax.vmap(
        jax.vmap(lambda i: lax.dynamic_index_in_dim(t, i, keepdims=False))
    )(i),
    "batch last": lambda t, i: jax.vmap(lambda i: t[i], out_axes=1)(i).swapaxes(0, 1),
    "columns first": lambda t, i: jnp.moveaxis(
        jax.vmap(lambda i: t[i], out_axes=-1)(i.ravel()), -1, 0
    ).reshape(*i.shape, D),
    "two rows at once": lambda t, i: jax.vmap(
        lambda i: lax.dynamic_slice(t, (i, np.int32(0)), (2, D))
    )(i[:, 0]),
}


@pytest.mark.many
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", LOOKUPS)
def test_any_lookup(form, tied):
    def f(p, tokens):
        x = LOOKUPS[form](p["table"], tokens)
        for gain, up, down in zip(p["gains"], p["up"], p["down"], strict=True):
            x = x + jax.nn.relu(rms_norm(x, gain) @ up) @ down
        return rms_norm(x, p["last"]) @ (p["table"].T if tied else p["head"])

    plan = jqx.make_plan(f, jqx.Policy({"up|down|head": "int8"}))(DECODER, LOOKED_UP)
    pairs = find_pairs(f, plan)(DECODER, LOOKED_UP)
    factors = np.r_[1, 2.0 ** RNG.uniform(-2, 2, pairs.folds.count - 1)]
    folded = pairs.folds.folded(DECODER, factors)
    rotated = rotate(offline=True).rewrite(f, plan, DECODER, [(LOOKED_UP,)], progress=False)
    mapped = jqx.map_channels(f, plan, rotated.maps)
    every = jax.jit(lambda p, q, r, x: (f(p, x), f(q, x), mapped(r, x)))
    exact, *results = every(DECODER, folded, rotated.params, LOOKED_UP)
    for result in results:  # float32: sums of at most 12 products, through three layers
        assert_near(result, exact)
    is_plain = form != "two rows at once"
    for row in rotated.report:
        whole = is_plain and not row.site.startswith("down")
        assert row.offline == whole and bool(row.why) != whole, row
    # Behind a gain, a table that is the head stays as it is: its rows are rotated as looked up.
    assert len(rotated.report.edges) == (2 if tied and is_plain else 0)
