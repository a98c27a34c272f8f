"""Rules on steps of a scan: `layers[0]`, `layers[-2:]`. Each part is a site of its own."""

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src.policy import Selector
from jqx._src.transforms.trace import trace_call
from jqx._src.transforms.walk import evaluate

from ..arrays import assert_same, normal, on_device
from ..oracles.contractions import gamma
from ..roundings import exactly

L, K, ROWS = 5, 8, 3
STEP = jqx.QSpec(jnp.int8, calibrator=jqx.calibrators.fixed(-4, 4))


def stack(seed=0):
    rng = np.random.default_rng(seed)
    return on_device(rng.normal(size=(L, K, K)) / 3, jnp.float32)


NORMS = on_device(np.linspace(0.5, 1.5, L * K).reshape(L, K), jnp.float32)
PARAMS = {"layers": {"a": stack(0), "b": stack(1), "n": NORMS}, "head": normal(2, K, K) / 3}
X = normal(3, ROWS, K)


def layer(h, w, each):
    h = jnp.tanh((h * w["n"][None]) @ w["a"]) @ w["b"] + each
    return h, (h.sum(), w["n"] * 2)


def plain(p, x, reverse=False):
    each = jnp.arange(L, dtype=jnp.float32)
    h, ys = lax.scan(lambda h, w: layer(h, *w), x, (p["layers"], each), reverse=reverse)
    return h @ p["head"], ys


def unrolled(p, x, reverse=False):
    """The layers one by one: of a list of dicts."""
    ys = [None] * L
    for i in reversed(range(L)) if reverse else range(L):
        x, ys[i] = layer(x, p["layers"][i], float(i))
    return x @ p["head"], jax.tree.map(lambda *y: jnp.stack(y), *ys)


def of_weights(q, reverse=False):
    """What `plain` is of the weights of `q`, and the sum of each layer, with their roundings."""
    p, h, sums = jqx.dequantize_params(q), exactly(X), {}
    a, b, n = (np.float64(p["layers"][name]) for name in "abn")
    for i in reversed(range(L)) if reverse else range(L):
        h = ((h * n[i]) @ a[i]).tanh() @ b[i] + i
        sums[i] = h.sum()
    return h @ p["head"], [sums[i] for i in range(L)]


def cast(p, x):
    """Views before the scan, which leave the steps apart."""
    w = p["layers"]
    a = jnp.swapaxes(jnp.swapaxes(w["a"], 1, 2).reshape(L, K * K).reshape(L, K, K), 1, 2)
    w = {**w, "a": jnp.moveaxis(jnp.moveaxis(a, 0, 2), 2, 0).astype(jnp.float32) * 1.0}
    return plain({**p, "layers": w}, x)


def consts(p, x):
    """The whole scan stands in a branch, and in another scan, to which the weights are one."""
    one = lambda x: plain(p, x)  # noqa: E731
    again, ys = lax.scan(lambda h, _: (one(h)[0], one(h)[1]), x, None, length=2)
    return lax.cond(x.sum() > 1e9, one, lambda x: (again, jax.tree.map(lambda y: y[1], ys)), x)


def looped(p, x):
    def body(_, before):
        p, h, _ = before
        return p, *plain(p, h)

    return lax.fori_loop(0, 2, body, (p, *plain(p, x)))[1:]


FORMS = {
    "plain": plain,
    "reverse": functools.partial(plain, reverse=True),
    "jit": jax.jit(plain),
    "remat": jax.checkpoint(plain),
    "body in jit and remat": lambda p, x: jax.checkpoint(jax.jit(cast))(p, x),
    "cond and outer scan": consts,
    "loop": looped,
}
WHOLE = jqx.Policy({".*": "int4"})
PARTS = jqx.Policy({"layers[0]": "int4", "layers[-2:]/a": "int4", ".*": "int4"})
MIXED = jqx.Policy({"layers[0]": "int8", "layers[-1]/.*": "float", ".*": "int4"})


def quantized(f, policy, p=PARAMS, x=X):
    plan = jqx.make_plan(f, policy)(p, x)
    return plan, jqx.quantize_params(p, plan)


SLOW = ("jit", "remat", "loop")


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=pytest.mark.slow if f in SLOW else ()) for f in FORMS]
)
def test_parts_of_one_spec_have_the_bits_of_the_whole_scan(form):
    f = FORMS[form]
    whole, parts = quantized(f, WHOLE), quantized(f, PARTS)
    assert [split.bounds for split in parts[0].splits] == [(0, 1, 3, 5)] * 2
    assert [split.path for split in parts[0].splits] == ["layers/a", "layers/b"]
    run = jax.jit(lambda p, q, x: (jqx.convert(f, whole[0])(p, x), jqx.convert(f, parts[0])(q, x)))
    a, b = run(whole[1], parts[1], X)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    a, b = whole[1]["layers"]["a"].dequantize(), parts[1]["layers"]["a"].dequantize()
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("reverse", [False, True])
def test_mixed_layers_equal_an_unrolled_oracle(reverse):
    f, oracle = (functools.partial(g, reverse=reverse) for g in (plain, unrolled))
    plan, q = quantized(f, MIXED)
    layers = [jax.tree.map(lambda w, i=i: w[i], PARAMS["layers"]) for i in range(L)]
    apart = {"layers": layers, "head": PARAMS["head"]}
    by_hand = jqx.Policy({"layers/0/.*": "int8", f"layers/{L - 1}/.*": "float", ".*": "int4"})
    own, weights = quantized(oracle, by_hand, apart)
    for name in "ab":
        kept = q["layers"][name].dequantize()
        for i, layer in enumerate(weights["layers"]):
            w = layer[name] if i == L - 1 else layer[name].dequantize()
            np.testing.assert_array_equal(kept[i], w)
        np.testing.assert_array_equal(kept[-1], PARAMS["layers"][name][-1])
    run = jax.jit(lambda q, w, x: (jqx.convert(f, plan)(q, x), jqx.convert(oracle, own)(w, x)))
    y, sums = of_weights(q, reverse)
    for found, (found_sums, twice) in run(q, weights, X):
        y.check(found)
        for total, each in zip(sums, found_sums, strict=True):
            total.check(each)
        np.testing.assert_array_equal(twice, 2 * PARAMS["layers"]["n"])
    assert q["layers"]["n"] is PARAMS["layers"]["n"]


def test_the_function_of_parts_has_ordinary_leaves():
    plan, q = quantized(plain, MIXED)
    for params in (q, jqx.dequantize_params(q)):
        call = trace_call("convert", plain, plan.parameters, (params, X), {})
        parts = [f"layers/{name}[{part}]" for name in "ab" for part in ("0:1", "1:4", "4:5")]
        assert call.paths == ["head", *parts, "layers/n", None]
        assert not any(isinstance(leaf, jqx.Segments) for leaf in call.leaves)
        leaves = [jqx.dequantize_params(leaf) for leaf in call.leaves]
        of_weights(q)[0].check(evaluate(call.jaxpr, call.consts, leaves)[0])


def test_each_part_is_planned_as_a_site_of_its_own():
    plan, q = quantized(plain, MIXED)
    known = {site.path: (site.rule, site.loops[0].length) for site in plan.sites[:-1]}
    assert known == {
        f"layers/{name}[{part}]": (rule, steps)
        for name in "ab"
        for part, rule, steps in (("0:1", 0, 1), ("1:4", 2, 3))
    }
    assert {skip.path for skip in plan.skipped} == {"layers/a[4:5]", "layers/b[4:5]"}
    assert plan["layers/a[0:1]"][0].operands[1].path == "layers/a[0:1]"
    assert jqx.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    again = jqx.make_plan(plain, MIXED)(PARAMS, X)
    assert again == plan and hash(again) == hash(plan)
    whole = jqx.make_plan(plain, WHOLE)(PARAMS, X)
    assert whole.fingerprint != plan.fingerprint and "splits" not in whole.to_dict()
    assert repr(q["layers"]["a"]) == (
        "Segments(float32[5, 8, 8] along axis 0: [0:1] int8 per_axis(2), "
        "[1:4] int4 per_axis(0, 2), [4:5] float32, 640 bytes)"
    )
    shapes = jax.eval_shape(lambda p: p, PARAMS)
    abstract = jqx.quantize_params(shapes, jqx.make_plan(plain, MIXED)(shapes, X))
    assert jax.tree.structure(abstract) == jax.tree.structure(q)
    jax.tree.map(
        lambda x, y: np.testing.assert_equal((x.shape, x.dtype), (y.shape, y.dtype)), abstract, q
    )
    printed = str(plan)
    paths = [line.split()[0] for line in printed.splitlines()[2:6]]
    picked = jqx.Policy({path: "int8" for path in paths[:1]})  # what is printed is a path again
    (site,) = jqx.make_plan(plain, picked)(PARAMS, X).sites
    assert site.path == paths[0] == "layers/a[0:1]"


def test_training_calibration_and_vmap():
    policy = jqx.Policy(
        [
            jqx.Rule("layers[:2]/.*", weight="int8", activation=STEP, output=None),
            jqx.Rule(weight="int4", activation="int8"),
        ]
    )
    plan = jqx.make_plan(plain, policy)(PARAMS, X)
    whole = jqx.make_plan(plain, jqx.Policy([jqx.Rule(weight="int8", activation="int8")]))
    calibrated, unsplit = jax.jit(
        lambda p, x: (jqx.calibrate(plain, plan)(p, x), jqx.calibrate(plain, whole(p, x))(p, x))
    )(PARAMS, X)
    jax.tree.map(np.testing.assert_array_equal, calibrated[0], unsplit[0])
    stats = calibrated[1]
    for name in "ab":
        both = [stats[f"layers/{name}[{part}]:dot_general:lhs"] for part in ("0:2", "2:5")]
        joined = unsplit[1][f"layers/{name}:dot_general:lhs"].largest
        np.testing.assert_array_equal(both[1].largest, joined[2:])
        assert jax.tree.leaves(both[0])[0].shape[0] == 2
    scales = jax.jit(lambda s: jqx.affines(plan, jqx.merge_stats(plan, s, s)))(stats)
    simulate = jqx.simulate(plain, plan, scales, backward=jnp.float32)
    q = jqx.quantize_params(PARAMS, plan)
    convert = jqx.convert(plain, plan, scales)

    def all_of(p, q, xs):
        loss = lambda p: jnp.sum(simulate(p, xs[0])[0] ** 2)  # noqa: E731
        each = [convert(q, x) for x in xs]
        mapped = jax.vmap(convert, in_axes=(None, 0))(q, xs)
        return simulate(p, xs[0]), each, mapped, jax.grad(loss)(p), simulate(q, xs[0])

    xs = np.stack([X, X * 0.5])
    same, each, mapped, gradient, of_codes = jax.jit(all_of)(PARAMS, q, xs)
    jax.tree.map(np.testing.assert_array_equal, same, each[0])
    jax.tree.map(np.testing.assert_array_equal, of_codes, each[0])
    (y, ys), (each_y, each_ys) = mapped, jax.tree.map(lambda *y: np.stack(y), *each)
    np.testing.assert_array_equal(y, each_y)  # sums of integers
    np.testing.assert_array_equal(ys[1], each_ys[1])
    # A sum of floats may be in another order: of what a tanh, on a grid, times b is, plus i.
    b = np.abs(jqx.dequantize_params(q)["layers"]["b"])
    most = (1 + 4 / 254) * b.sum((1, 2)) + K * np.arange(L)
    assert np.all(np.abs(ys[0] - each_ys[0]) <= 2 * gamma(ROWS * K) * ROWS * most)
    for g, w in zip(jax.tree.leaves(gradient), jax.tree.leaves(PARAMS), strict=True):
        g = np.asarray(g)
        assert g.shape == w.shape and np.isfinite(g).all()
        assert g.ndim < 3 or (np.abs(g).reshape(L, -1).max(1) > 0).all()


def test_observers_of_a_weight_are_those_of_its_parts():
    plan = jqx.make_plan(plain, PARTS)(PARAMS, X)

    def kinds(*patterns):
        calibrate = jqx.calibrate(plain, plan, observers=dict.fromkeys(patterns, mean))
        return {key: x.total.shape for key, x in jax.eval_shape(calibrate, PARAMS, X)[1].items()}

    mean = jqx.extend.mean
    assert kinds("layers/a") == kinds("layers/a.0:1.", "layers/a.1:3.", "layers/a.3:5.")
    assert len(kinds("layers/a")) == 3


def test_a_scan_along_another_axis_splits_that_axis():
    def f(p, x):
        return lax.scan(lambda h, w: (h @ w, None), x, jnp.moveaxis(p, 1, 0))[0]

    p = jnp.moveaxis(PARAMS["layers"]["a"], 0, 1)
    plan = jqx.make_plan(f, jqx.Policy({"[0]": "int8", "": "int4"}))(p, X)
    q = jqx.quantize_params(p, plan)
    assert (q.axis, q.bounds, q.shape) == (1, (0, 1, L), p.shape)
    both = lambda p, q, x: (jqx.simulate(f, plan)(p, x), jqx.convert(f, plan)(q, x))  # noqa: E731
    h = exactly(X)
    for w in np.moveaxis(np.asarray(q.dequantize()), 1, 0):
        h = h @ w
    h.check(*jax.jit(both)(p, q, X))


def test_segments_are_a_tree_that_is_saved(tmp_path):
    _, q = quantized(plain, MIXED)
    segments = q["layers"]["a"]
    flat, tree = jax.tree.flatten(segments)
    again = jax.tree.unflatten(tree, flat)
    assert again.bounds == segments.bounds and tree == jax.tree.structure(again)
    jqx.save(tmp_path / "model.safetensors", q)
    read = jqx.load(tmp_path / "model.safetensors")
    assert_same(read, q)
    dense = jqx.dequantize_params(q)
    assert jax.tree.structure(dense) == jax.tree.structure(PARAMS)
    packed = jqx.pack_for(q, "cpu")["layers"]["a"]
    np.testing.assert_array_equal(packed.dequantize(), segments.dequantize())
    assert packed.parts[1].layout is not None
    assert "Segments" in repr(jax.tree.map(lambda x: None, segments))


def test_an_algorithm_is_given_the_parts():
    policy = jqx.Policy({"layers[0]/a": "int8", "layers[1:]/a": "int4", "layers/b": "float"})
    plan, q = quantized(plain, policy)[:2]
    seen = {}

    def choose(weight, x):
        seen[weight.path] = x.shape
        return jqx.QTensor.quantize(x, weight.spec)

    mapped = plan.map_weights(choose, PARAMS)
    assert seen == {"layers/a[0:1]": (1, K, K), "layers/a[1:5]": (L - 1, K, K)}
    assert_same(mapped, q)
    assert mapped["layers"]["b"] is PARAMS["layers"]["b"]
    seen.clear()
    plan.map_weights(lambda weight, part: seen.setdefault(weight.path, part), q)
    assert all(isinstance(part, jqx.QTensor) for part in seen.values()) and len(seen) == 2


def test_a_weight_that_is_read_whole_is_refused_or_dequantized():
    def f(p, x):
        y, _ = plain(p, x)
        return y + x @ p["layers"]["a"].sum(0)

    policy = jqx.Policy({"layers[0]": "int8", ".*": "int4"})
    with pytest.raises(NotImplementedError, match=r"layers/a\[0:1\]"):
        jqx.make_plan(f, policy)(PARAMS, X)
    plan = jqx.make_plan(f, policy, unsupported="dequantize")(PARAMS, X)
    q = jqx.quantize_params(PARAMS, plan)
    both = lambda p, q, x: (  # noqa: E731
        jqx.convert(f, plan, unsupported="dequantize")(q, x),
        jqx.simulate(f, plan)(p, x),
    )
    a = jqx.dequantize_params(q)["layers"]["a"].reshape(L * K, K)
    y = exactly(np.tile(X, (1, L))) @ a  # rounds no less often than x @ a.sum(0)
    (y + of_weights(q)[0]).check(*jax.jit(both)(PARAMS, q, X))


def test_a_weight_that_is_handed_on_stays_in_parts():
    f = lambda p, x: (p, plain(p, x)[0])  # noqa: E731
    plan, q = quantized(f, MIXED)
    out, _ = jax.jit(jqx.convert(f, plan))(q, X)
    assert_same(out, q)
    same, _ = jqx.convert(f, plan)(PARAMS, X)  # float weights are returned as they are given
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a is b, same, PARAMS)))


@pytest.mark.parametrize("length", [1, 2, 7])
def test_steps_are_those_that_python_selects(length):
    ends = [None, *range(-length - 1, length + 2)]
    shown = lambda x: "" if x is None else str(x)  # noqa: E731
    texts = {shown(i): slice(i, None if i == -1 else i + 1) for i in ends if i is not None}
    texts |= {f"{shown(a)}:{shown(b)}": slice(a, b) for a, b in itertools.product(ends, ends)}
    for text, key in texts.items():
        selector = Selector.of(f"layers[{text}]/w")
        wanted = range(length)[key]
        outside = any(x is not None and not -length <= x <= length for x in (key.start, key.stop))
        if len(wanted) == 0 or outside:
            with pytest.raises(ValueError, match="steps that the scan does not have"):
                selector.resolve("make_plan", "layers/w", length)
        else:
            found = range(*selector.resolve("make_plan", "layers/w", length))
            assert found == wanted, text


@pytest.mark.parametrize(
    ("path", "whole"),
    {
        "layers[0]": ["layers", "layers/a", "layers/a/b"],
        "layers[-1]/a": ["layers/a"],
        "(enc|dec)/layers[1:]/.*": ["enc/layers/a", "dec/layers/b/c"],
        ".*[0]": ["layers", "a/b"],
        "[0]": ["", "/a"],
    }.items(),
)
def test_what_a_path_with_steps_matches(path, whole):
    selector = Selector.of(path)
    assert all(map(selector.matches, whole))
    assert not selector.matches("layers0") or path == ".*[0]"


@pytest.mark.parametrize(
    "path", ["layer[0-9]/w", "layer[12]+", r"layer\[0\]", "layer[ab]", "layers", "x[0]y", "[-]"]
)
def test_other_brackets_select_no_steps(path):
    assert Selector.of(path) is None


def test_what_matches_as_a_regular_expression_stays_one():
    def f(p, x):
        h, _ = plain(p, x)
        return h @ p["layers0"] @ p["layers1"]

    p = {**PARAMS, "layers0": PARAMS["head"], "layers1": PARAMS["head"]}
    policy = jqx.Policy({"layers[01]": "int8", "layers[1]": "int8", ".*": "int4"})
    policy = jqx.Policy([*policy.rules[:1], *policy.rules[2:]])
    plan = jqx.make_plan(f, policy)(p, X)
    assert plan.splits == () and {plan[f"layers{i}"][0].rule for i in (0, 1)} == {0}
    plan = jqx.make_plan(f, jqx.Policy({"layers[1]": "int8", ".*": "int4"}))(p, X)
    assert plan.splits == () and plan["layers1"][0].rule == 0


ERRORS = {
    "layers[5]": "steps that the scan does not have",
    "layers[-6:]": "steps that the scan does not have",
    "layers[2:2]": "steps that the scan does not have",
    "layers[::2]": "every other step",
    "layers[0]/.*[1]": "selects steps twice",
    "head[0]": "no scan steps over a weight at 'head",
}


@pytest.mark.parametrize("path", ERRORS)
def test_steps_that_are_not_there_are_errors(path):
    policy = jqx.Policy({path: "int8", ".*": "int4"})
    with pytest.raises(ValueError, match=re.escape(ERRORS[path])) as caught:
        jqx.make_plan(plain, policy)(PARAMS, X)
    assert "fix" in str(caught.value) and path in str(caught.value)
    rules = [jqx.Rule(path, weight="int8", optional=True), jqx.Rule(weight="int4")]
    assert jqx.make_plan(plain, jqx.Policy(rules))(PARAMS, X).splits == ()


def test_a_rule_hidden_by_an_earlier_one_is_an_error():
    for rules in (
        {".*": "int4", "layers[0]": "int8"},
        {"layers[:2]": "int8", ".*": "int4", "layers/a": "int2"},
    ):
        with pytest.raises(ValueError, match="that an earlier rule has not taken"):
            jqx.make_plan(plain, jqx.Policy(rules))(PARAMS, X)


def test_scans_that_cannot_be_split_are_errors():
    policy = jqx.Policy({"layers[0]": "int8", ".*": "int4"})
    rule = jax.custom_vjp(lambda p, x: plain(p, x)[0])
    rule.defvjp(lambda p, x: (plain(p, x)[0], None), lambda _, g: (None, g))
    with pytest.raises(NotImplementedError, match=r"inside a `jax.custom_vjp`"):
        jqx.make_plan(rule, policy)(PARAMS, X)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        lambda p, x: plain(p, x)[0], mesh=mesh, in_specs=(spec, spec), out_specs=spec
    )
    with pytest.raises(NotImplementedError, match="inside a `shard_map`"):
        jqx.make_plan(mapped, policy)(PARAMS, X)

    def half(p, x):
        w = jax.tree.map(lambda w: w[1:], p["layers"])
        return lax.scan(lambda h, w: (h @ w["a"], None), x, w)[0]

    with pytest.raises(ValueError, match="not steps of one axis"):
        jqx.make_plan(half, policy)(PARAMS, X)

    def turned(p, x):
        return lax.scan(lambda h, w: (h @ w, None), x, p["layers"]["a"][::-1])[0]

    with pytest.raises(NotImplementedError, match="an operation that mixes them"):
        jqx.make_plan(turned, policy)(PARAMS, X)


def test_segments_of_another_plan_are_errors():
    plan, q = quantized(plain, MIXED)
    whole = jqx.make_plan(plain, WHOLE)(PARAMS, X)
    other = jqx.make_plan(plain, PARTS)(PARAMS, X)
    with pytest.raises(ValueError, match="the plan does not split"):
        jqx.convert(plain, whole)(q, X)
    with pytest.raises(ValueError, match="do not fit the plan"):
        jqx.convert(plain, other)(q, X)
    with pytest.raises(ValueError, match="quantized already"):
        jqx.quantize_params(q, plan)
    with pytest.raises(TypeError, match="Segments are not an array"):
        np.asarray(q["layers"]["a"])
    with pytest.raises(ValueError, match="there are no parts"):
        jqx.Segments([])
    with pytest.raises(TypeError, match="neither a QTensor nor an array"):
        jqx.Segments([3.0])
    with pytest.raises(ValueError, match="parts differ"):
        jqx.Segments([jnp.zeros((2, 3)), jnp.zeros((2, 4))])
