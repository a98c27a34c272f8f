"""`ptq` with rules for layers of a scan is `ptq` of the function whose scans are split by hand."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import presets
from jqx.algorithms import (
    adaround,
    auto_round,
    awq,
    bias_correction,
    chain,
    eora,
    equalize,
    find_pairs,
    gptq,
    loftq,
    nearest,
    rotate,
    smooth_quant,
)

from ..arrays import normal, on_device

L, K, ROWS = 4, 8, 24
X = on_device(np.asarray(normal(5, ROWS, K)) * np.linspace(0.2, 5, K), jnp.float32)
BATCHES = [X, on_device(0.8 * np.asarray(X)[::-1], jnp.float32)]


def loop(step, carry, layers, reverse=False):
    """One scan over stacked layers, or one for each part of a tuple."""
    if not isinstance(layers, tuple):
        return lax.scan(step, carry, layers, reverse=reverse)
    parts, out = reversed(layers) if reverse else layers, []
    for part in parts:
        carry, ys = lax.scan(step, carry, part, reverse=reverse)
        out.append(ys)
    out = out[::-1] if reverse else out
    return carry, jax.tree.map(lambda *ys: jnp.concatenate(ys), *out)


def norm(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def mlp(h, w):
    up = jax.nn.relu((norm(h) * w["gain"][None]) @ w["up"] + w["bias"][None])
    return h + up @ w["down"] + w["shift"][None], h.sum(0)


def relus(p, x):
    def step(h, w):
        h = jax.nn.relu((h * w["gain"][None]) @ w["up"] + w["bias"][None])
        return jax.nn.relu(h @ w["down"] + w["shift"][None]), None

    return loop(step, x, p["layers"])[0] @ p["head"]


def twice(p, x):
    step = lambda h, w: (norm(mlp(h, w)[0]), None)  # noqa: E731
    h = loop(step, x, p["layers"])[0]
    return loop(step, 1 + h, p["layers"])[0] @ p["head"]


def back(p, x):
    h = loop(lambda h, w: (norm(h + h @ w["up"] @ w["down"]), None), x, p["layers"])[0]
    turned = lambda h, w: (norm(h + h @ w["down"].T @ w["up"].T), None)  # noqa: E731
    return loop(turned, h, p["layers"], reverse=True)[0] @ p["head"]


def nested(p, x):
    inner = lambda h, w: (mlp(h, w)[0], None)  # noqa: E731
    outer = lambda h, w: (lax.scan(inner, h, w)[0], None)  # noqa: E731
    return loop(outer, x, p["layers"])[0] @ p["head"]


def tied(p, x):
    h = x + p["head"].T[jnp.argsort(x[:, 0]) % K]
    step = lambda h, w: (mlp(h, w)[0] + jnp.tanh(h @ p["mix"]), None)  # noqa: E731
    return loop(step, h, p["layers"])[0] @ p["mix"] @ p["head"]


def tables(p, x):
    step = lambda h, w: (mlp(h + w["table"][jnp.argsort(x[:, 0]) % 6], w)[0], None)  # noqa: E731
    return loop(step, x, p["layers"])[0] @ p["head"]


def gated(p, x):
    def step(h, w):
        n = norm(h) * w["gain"][None]
        return h + (jax.nn.silu(n @ w["up"]) * (n @ w["gate"] + w["bias"][None])) @ w["down"], None

    return loop(step, x, p["layers"])[0] @ p["head"]


def attention(p, x):
    def step(h, w):
        q, k, v = jnp.split((norm(h) * w["gain"][None]) @ w["qkv"], 3, -1)
        q, k, v = (y.reshape(3, K, 2, K // 2) for y in (q, k, v))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        h = h + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(ROWS, K) @ w["out"]
        return mlp(h, w)[0], None

    return loop(step, x, p["layers"])[0] @ p["head"]


def convolved(p, x):
    def step(h, w):
        y = jax.nn.relu(h + w["shift"][None, None])
        dims = ("NHC", "HIO", "NHC")
        return h + lax.conv_general_dilated(y, w["kernel"], (1,), "SAME", dimension_numbers=dims), 0

    return loop(step, x.reshape(3, K, K), p["layers"])[0] @ p["head"]


def plain(p, x, step=mlp, **options):
    h, sums = loop(step, x, p["layers"], **options)
    return h @ p["head"], sums


MODELS = {
    "plain": plain,
    "relus": relus,
    "reverse": lambda p, x: plain(p, x, reverse=True),
    "remat": jax.jit(lambda p, x: plain(p, x, jax.checkpoint(mlp))),
    "two scans": twice,
    "forth and back": back,
    "nested": nested,
    "tied": tied,
    "tables": tables,
    "gated": gated,
    "attention": attention,
    "convolved": convolved,
}
MORE = {
    "tables": {"table": (6, K)},
    "gated": {"gate": (K, 2 * K)},
    "attention": {"qkv": (K, 3 * K), "out": (K, K)},
    "convolved": {"kernel": (3, K, K)},
}
SHAPES = {"up": (K, 2 * K), "down": (2 * K, K), "bias": (2 * K,), "shift": (K,), "gain": (K,)}


def params_of(model):
    shapes = {**SHAPES, **MORE.get(model, {})}
    layers = {
        name: np.asarray(normal(i, L, *shape)) / (2 * shape[0] ** 0.5) + (name == "gain")
        for i, (name, shape) in enumerate(shapes.items())
    }
    if model == "nested":
        layers = jax.tree.map(lambda w: np.stack([w, 1.1 * w[::-1]], 1), layers)
    layers = jax.tree.map(lambda w: on_device(w, jnp.float32), layers)
    return {"layers": layers, "head": normal(20, K, K) / 3, "mix": normal(21, K, K) / 3}


def steps(text):
    """Which layers a rule selects."""
    ends = text[1:-1].split(":")
    chosen = range(L)[slice(*(int(x) if x else None for x in ends))] if len(ends) > 1 else None
    chosen = [range(L)[int(ends[0])]] if chosen is None else chosen
    return set(chosen)


POLICIES = {
    "first": ({"[0]": presets.w8a8()}, presets.w4a8()),
    "ends": ({"[0]": presets.w8a8(), "[-1]": presets.w8a8_dynamic()}, presets.w4a8()),
    "range": ({"[1:3]": presets.w4a16()}, presets.w8a8()),
    "last in float": ({"[-1:]": "float"}, presets.w8a8()),
    "two and two": ({"[:2]": presets.w4a4()}, presets.fp8()),
    "each": (
        {"[0]": presets.w8a8(), "[1]": presets.w4a8(), "[2]": presets.w8a16()},
        presets.mxfp8(),
    ),
    "tables too": (
        {"[0]": jqx.Policy([jqx.Rule(weight="int8", tables="int4")])},
        jqx.Policy([jqx.Rule(weight="int4", activation="int8", tables="int8")]),
    ),
}
ALGORITHMS = {
    "default": None,
    "nearest": nearest(),
    "smooth_quant": smooth_quant(strength=0.85),
    "awq": awq(),
    "equalize": equalize(),
    "rotate": rotate(),
    "rotate offline": rotate(offline=True),
    "eora": eora(rank=2),
    "loftq": loftq(rank=2, rounds=2),
    "bias_correction": bias_correction(),
    "gptq": gptq(),
    "qep": gptq(propagation="qep"),
    "one pass": gptq(sequential=False),
    "adaround": adaround(steps=5),
    "auto_round": auto_round(steps=3),
    "chain": chain(smooth_quant(strength=0.85), gptq(), bias_correction()),
    "rotated chain": chain(rotate(), equalize(), adaround(steps=2), eora(rank=2)),
}


def both(model, policy):
    """Returns the two functions with policies and parameters, and a map from names of the second to
    those of the first.
    """
    f, p = MODELS[model], params_of(model)
    rules, rest = POLICIES[policy]
    ends = {0, L} | {x for text in rules for x in (min(steps(text)), max(steps(text)) + 1)}
    parts = list(itertools.pairwise(sorted(ends)))
    named = {f"layers{text}": rule for text, rule in rules.items()}
    by_steps = jqx.Policy({**named, "layers/.*": rest, ".*": presets.w8a8()})
    each = {}
    for i, (a, b) in enumerate(parts):
        fitting = [rule for text, rule in rules.items() if {*range(a, b)} <= steps(text)]
        each[f"layers/{i}/.*"] = [*fitting, rest][0]
    cut = tuple(jax.tree.map(lambda w, a=a, b=b: w[a:b], p["layers"]) for a, b in parts)
    by_hand = jqx.Policy({**each, ".*": presets.w8a8()})
    split = jqx.make_plan(f, by_steps)(p, X).splits
    assert {x.bounds for x in split} == {tuple(sorted(ends))}
    whole = {x.path for x in split}

    def renamed(text):
        def name(match):
            path, (a, b) = f"layers/{match[2]}", parts[int(match[1])]
            return f"{path}[{a}:{b}]" if path in whole else path

        return re.sub(r"layers/(\d+)/(\w+)", name, text)

    return (f, by_steps, p), (f, by_hand, {**p, "layers": cut}), parts, renamed


def same(a, b):
    assert type(a) is type(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def same_params(params, by_hand, parts):
    """Codes, scales and floats are those of the parts, bit for bit."""
    for name, leaf in params["layers"].items():
        each = leaf.parts if isinstance(leaf, jqx.Segments) else [leaf[a:b] for a, b in parts]
        for result, layer in zip(each, by_hand["layers"], strict=True):
            same(result, layer[name])
    for name in ("head", "mix"):
        same(params[name], by_hand[name])


@pytest.mark.many
@pytest.mark.parametrize("model", MODELS)
def test_channels_and_rotations_pass_through_parts(model):
    (f, by_steps, p), (g, by_hand, q), parts, renamed = both(model, "ends")
    plans = [jqx.make_plan(f, by_steps)(p, X), jqx.make_plan(g, by_hand)(q, X)]
    pairs, oracle = find_pairs(f, plans[0])(p, X), find_pairs(g, plans[1])(q, X)
    one = lambda x: (tuple(map(renamed, x.before)), tuple(map(renamed, x.after)), x.channels)  # noqa: E731
    assert {*map(one, pairs)} == {*map(one, oracle)}
    assert pairs.reasons.keys() == {*map(renamed, oracle.reasons)}
    rewrite = rotate(offline=True).rewrite
    done, expected = rewrite(f, plans[0], p, [X]), rewrite(g, plans[1], q, [X])
    same_params(done.params, expected.params, parts)
    assert jax.tree.structure(done.params) == jax.tree.structure(p)
    maps = {renamed(key): x for key, x in expected.maps.items()}
    jax.tree.map(np.testing.assert_array_equal, dict(done.maps), maps)


SOME = [
    ("plain", "first", "default"),
    ("relus", "first", "equalize"),
    ("gated", "ends", "awq"),
    ("two scans", "range", "bias_correction"),
    ("tables", "tables too", "loftq"),
]
EVERY = [
    case
    for case in itertools.product(MODELS, POLICIES, ALGORITHMS)
    if case not in SOME and not (case[0] == "forth and back" and case[1] in ("each", "range"))
]
CASES = [
    *(pytest.param(*case, marks=pytest.mark.slow if i else ()) for i, case in enumerate(SOME)),
    *(pytest.param(*case, marks=pytest.mark.sweep) for case in EVERY),
]


@pytest.mark.parametrize(("model", "policy", "algorithm"), CASES)
def test_layers_are_quantized_as_if_split_by_hand(model, policy, algorithm, tmp_path):
    result, done, (by_steps, by_hand, parts, renamed) = [], [], both(model, policy)
    for f, rules, p in (by_steps, by_hand):
        quantize = jqx.ptq(f, rules, ALGORITHMS[algorithm], progress=False, target=False)
        try:
            result.append(quantize(p, BATCHES))
            done.append(jax.jit(result[-1].function)(result[-1].params, X))
        except ValueError as error:
            result.append(type(error))
    if isinstance(result[1], type):  # the algorithm has nothing to do
        assert result[0] is result[1]
        return
    a, b = result
    same_params(a.params, b.params, parts)
    assert a.report.codes == b.report.codes
    assert [x.path for x in a.report.weights] == [renamed(x.path) for x in b.report.weights]
    same({**a.maps}, {renamed(key): x for key, x in b.maps.items()})
    same({**a.affines}, {renamed(key): x for key, x in b.affines.items()})
    # Products of codes are exact; where a side stays in float, XLA may sum in another order.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-4), *done)
    jqx.save(tmp_path / "model.safetensors", a)
    loaded = jqx.load(tmp_path / "model.safetensors").bind(by_steps[0], target=False)
    mapped = jqx.map_channels(by_steps[0], a.plan, a.maps)
    simulate = jqx.simulate(mapped, a.plan, a.affines)
    real = jqx.dequantize_params(a.params)

    @jax.jit
    def of(q, p, x):
        loss = lambda p: sum(jnp.sum(y**2) for y in jax.tree.leaves(simulate(p, x)))  # noqa: E731
        return loaded.function(q, x), jax.grad(loss)(p)

    again, gradient = of(loaded.params, real, X)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-4), again, done[0])
    for g, w in zip(jax.tree.leaves(gradient), jax.tree.leaves(real), strict=True):
        assert g.shape == w.shape and np.isfinite(g).all()
    assert any(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))


def test_an_algorithm_of_a_user_sees_parts_as_parameters():
    w, seen = normal(0, 3, K, K) / 3, {}

    def f(p, x):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])[0]

    def choose(weight, x):
        seen[weight.path] = x.shape
        return jqx.QTensor.quantize(x, weight.spec)

    class Doubled:
        def rewrite(self, f, plan, params, batches, *, progress=True):
            assert plan.splits == () and jax.tree.map(jnp.shape, params) == {
                "layers": ((1, K, K), (2, K, K))
            }
            np.testing.assert_array_equal(f(params, batches[0]), once)
            return jax.tree.map(lambda w: 2 * w, params)

    class Chosen:
        def __call__(self, plan, params, stats):
            return plan.map_weights(choose, params)

    once = f({"layers": w}, X)
    policy = jqx.Policy({"layers[0]": "int8", ".*": "int4"})
    quantize = jqx.ptq(f, policy, chain(Doubled(), Chosen()), progress=False, target=False)
    codes = quantize({"layers": w}, [X]).params["layers"]
    assert seen == {"layers[0:1]": (1, K, K), "layers[1:3]": (2, K, K)}
    plan = jqx.make_plan(f, policy)({"layers": w}, X)
    same(codes, jqx.quantize_params({"layers": 2 * w}, plan)["layers"])


def test_a_split_parameter_is_returned_as_it_is_given():
    """Algorithms that add maps at sites see the whole parameter, and return it whole."""
    p = {"s": normal(20, 3, K, K), "v": normal(21, K, K)}
    policy = jqx.Policy({"s[0]": jqx.Rule(weight="int8"), ".*": jqx.Rule(weight="int4")})

    def step(h, w):
        return h + jnp.tanh(norm(h) @ w), None

    def f(p, x):
        return lax.scan(step, x, p["s"])[0] @ p["v"], p["s"]

    for algorithm in (nearest(), eora(rank=2)):
        q = jqx.ptq(f, policy, algorithm, target=False, progress=False)(p, BATCHES)
        assert bool(q.maps) == (algorithm != nearest())
        y, same = q.function(q.params, X)
        assert isinstance(same, jqx.Segments)
        np.testing.assert_array_equal(same.dequantize(), q.params["s"].dequantize())
        exact = np.asarray(f(p, X)[0])
        assert np.linalg.norm(y - exact) < 0.3 * np.linalg.norm(exact)
    mapped = jqx.map_channels(f, q.plan, q.maps)(p, X)[1]
    assert mapped is p["s"]

    def turned(p, x):
        return f(p, x)[0], jnp.swapaxes(p["s"], 1, 2)

    with pytest.raises(NotImplementedError, match=r"'s\[0:1\]', .* is joined with others of"):
        jqx.make_plan(turned, policy)(p, X)
