"""Algorithms that scale channels and clip ranges: each leaves the function as it is, or nearly, and
loses less where its paper says so.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.algorithms import awq, chain, equalize, find_pairs, gptq, smooth_quant

from ..arrays import on_device

RNG, NEAREST = np.random.default_rng(0), jqx.algorithms.nearest()
D, H, LAYERS = 16, 24, 2
W8A8, W4 = jqx.presets.w8a8(), jqx.Policy({".*": "int4:group=8:asymmetric"})


def normal(*shape):
    return on_device(np.float32(RNG.normal(size=shape)))


OUTLIERS = np.where(np.arange(D) % 5 == 0, 30.0, 1.0).astype(np.float32)
PARAMS = {
    "gain": on_device(np.stack([OUTLIERS] * LAYERS)),
    "up": normal(LAYERS, D, H) / OUTLIERS[None, :, None],
    "gate": normal(LAYERS, D, H) / OUTLIERS[None, :, None],
    "down": normal(LAYERS, H, D),
    "head": normal(D, 4),
}
BATCHES = [normal(32, D), normal(24, D)]
TEST = normal(40, D)


def f(p, x):
    """Norms with outliers in their gains, and gated perceptrons, in a scan; a head behind them."""

    def layer(x, p):
        h = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["gain"][None]
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    layers = {name: p[name] for name in ("gain", "up", "gate", "down")}
    return lax.scan(layer, x, layers)[0] @ p["head"]


def plan_of(policy):
    return jqx.make_plan(f, policy)(PARAMS, BATCHES[0])


def lost(policy, algorithm):
    quantize = jqx.ptq(f, policy, algorithm, target=False, progress=False)
    quantized = quantize(PARAMS, BATCHES)
    exact = f(PARAMS, TEST)
    return float(np.sum((quantized(TEST) - exact) ** 2) / np.sum(exact**2)), quantized


REWRITES = {
    "smooth_quant": smooth_quant(keep=False),
    "smooth_quant of weights": smooth_quant(strength=0, keep=False),
    "smooth_quant of activations": smooth_quant(strength=1.0, keep=False),
    "smooth_quant and what is kept": smooth_quant(0.85),
    "equalize": equalize(),
    "awq": awq(clip=False, steps=5, keep=False),
    "awq without duo": awq(clip=False, duo=False, steps=3, keep=False),
    "awq and what is kept": awq(clip=False, steps=5),
}


@pytest.mark.many
@pytest.mark.parametrize("name", REWRITES)
def test_the_function_stays_as_it_is(name):
    plan = plan_of(W8A8)
    found, _, maps = REWRITES[name].rewrite(f, plan, PARAMS, BATCHES, progress=False)[:3]
    a, b = jax.jit(f)(PARAMS, TEST), jax.jit(jqx.map_channels(f, plan, maps))(found, TEST)
    assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()
    changed = {key for key in PARAMS if (np.asarray(PARAMS[key]) != np.asarray(found[key])).any()}
    gains = set() if name == "equalize" else {"gain", "gate"}
    kept = {"head"} if "and what is kept" in name else set()
    assert changed == {"up", "down"} | gains | kept
    assert set(maps) == {f"{path}:dot_general:lhs" for path in kept}


def test_activations_with_outliers_lose_less_after_smooth_quant():
    plain, smooth = (lost(W8A8, x)[0] for x in (NEAREST, smooth_quant()))
    assert smooth < 0.5 * plain


def test_scales_are_kept_where_nothing_takes_them():
    """Two sites of one value have one scale; a group of a convolution, and experts, have theirs."""

    def g(p, x):
        h = jnp.tanh(x) * OUTLIERS[None]
        y = jnp.sin(h @ p["a"]) + jnp.sin(h @ p["b"])
        image = y.reshape(-1, 4, 4, H // 2 // 4) ** 3
        sizes = jnp.array([x.shape[0] // 4, x.shape[0] - x.shape[0] // 4], jnp.int32)
        options = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=3)
        z = lax.conv_general_dilated(image, p["kernel"], (1, 1), "SAME", **options)
        return z, lax.ragged_dot(h, p["experts"], sizes)

    shapes = {"a": (D, 2 * H), "b": (D, 2 * H), "kernel": (3, 3, 1, 6), "experts": (2, D, 4)}
    params = {name: normal(*shape) for name, shape in shapes.items()}
    params["experts"] = params["experts"] / OUTLIERS[None, :, None]
    plan = jqx.make_plan(g, W8A8)(params, TEST)
    smooth = smooth_quant(strength=0.5)
    found, report, maps = smooth.rewrite(g, plan, params, BATCHES, progress=False)[:3]
    assert "a:dot_general" in report.kept and "kept at the site: " in str(report)
    a, b, kernel, experts = (np.asarray(x.scale) for x in maps.values())
    np.testing.assert_array_equal(a, b)
    assert a.shape == experts.shape == (D,) and kernel.shape == (3,)
    h = np.tanh(np.concatenate(BATCHES)) * OUTLIERS
    w = np.maximum(*(np.abs(params[name]).max(1) for name in "ab"))
    np.testing.assert_allclose(1 / a, np.sqrt(np.abs(h).max(0) / w), rtol=1e-5)
    most = np.abs(params["experts"]).max((0, 2))
    # Few rows reach the first expert, so the largest input stays the same.
    scale = np.sqrt(np.abs(h).max(0) / most)
    scale *= (np.abs(h).max(0) / scale).max() / np.abs(h).max()
    np.testing.assert_allclose(1 / experts, scale, rtol=1e-5)
    own, other = g(params, TEST), jqx.map_channels(g, plan, maps)(found, TEST)
    for x, y in zip(own, other, strict=True):
        assert np.abs(x - y).max() <= 1e-5 * np.abs(x).max()
    # Weights alone are not worth a product at run time: then there is nothing to do.
    weights = jqx.make_plan(g, W4)(params, TEST)
    with pytest.raises(ValueError, match=r"(?s)smooth_quant: no weight .+a:dot_general: tanh"):
        smooth_quant().rewrite(g, weights, params, BATCHES, progress=False)


def test_awq_keeps_scales_where_nothing_takes_them():
    """Also for weights alone; the report says so, and the error is that of the products."""

    def g(p, x):
        h = jnp.tanh(x) * OUTLIERS[None]
        y = jnp.sin(h @ p["a"]) + jnp.sin(h @ p["b"])
        image = y.reshape(-1, 4, 4, H // 2 // 4) ** 3
        sizes = jnp.array([x.shape[0] // 4, x.shape[0] - x.shape[0] // 4], jnp.int32)
        options = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"))
        z = lax.conv_general_dilated(image, p["kernel"], (1, 1), "SAME", **options)
        return z, lax.ragged_dot(h, p["experts"], sizes)

    shapes = {"a": (D, 2 * H), "b": (D, 2 * H), "kernel": (3, 3, 3, 6), "experts": (2, D, 4)}
    params = {name: normal(*shape) for name, shape in shapes.items()}
    plan = jqx.make_plan(g, jqx.Policy({".*": "int3:channel"}))(params, TEST)
    given = g, plan, params, BATCHES
    found, report, maps = awq(clip=False, steps=6).rewrite(*given, progress=False)[:3]
    by_site = {site: entry for entry in report for site in entry.sites}
    assert by_site["a:dot_general"].kept and "yes" in str(report).splitlines()[1]
    kept = {key: np.asarray(x.scale) for key, x in maps.items()}
    np.testing.assert_array_equal(kept["a:dot_general:lhs"], kept["b:dot_general:lhs"])
    assert {x.shape for x in kept.values()} <= {(D,), (3,)} and len(kept) >= 3
    own, other = g(params, TEST), jqx.map_channels(g, plan, maps)(found, TEST)
    for x, y in zip(own, other, strict=True):
        assert np.abs(x - y).max() <= 1e-5 * np.abs(x).max()
    # The error after scaling is that of the products, by NumPy.
    h = np.tanh(np.concatenate(BATCHES)) * OUTLIERS * kept["a:dot_general:lhs"]
    codes = jqx.dequantize_params(jqx.quantize_params(found, plan))
    entry, error = by_site["a:dot_general"], 0.0
    assert entry.sites == ("a:dot_general", "b:dot_general")
    for path in "ab":
        error += ((h @ (np.asarray(codes[path]) - np.asarray(found[path]))) ** 2).sum() / len(h)
    np.testing.assert_allclose(entry.after, error, rtol=1e-4)
    assert entry.after < 0.8 * entry.before
    with pytest.raises(ValueError, match=r"(?s)awq: no weight .+a:dot_general: tanh"):
        awq(clip=False, keep=False).rewrite(*given, progress=False)


def test_smooth_quant_is_the_formula_of_the_paper():
    plan, inputs = plan_of(W8A8), np.concatenate(BATCHES)
    found = smooth_quant(strength=0.7).rewrite(f, plan, PARAMS, BATCHES, progress=False).params
    own = {name: np.asarray(x)[0] for name, x in PARAMS.items()}
    h = inputs / np.sqrt((inputs**2).mean(-1, keepdims=True) + 1e-6) * own["gain"]
    largest = np.maximum(*(np.abs(own[name]).max(1) for name in ("up", "gate")))
    scale = np.abs(h).max(0) ** 0.7 / largest**0.3
    np.testing.assert_allclose(found["gain"][0], own["gain"] / scale, rtol=1e-5)
    np.testing.assert_allclose(found["gate"][0], own["gate"] * scale[:, None], rtol=1e-5)


def test_the_plan_decides_the_strength():
    dynamic = jqx.presets.w8a8_dynamic()
    for policy, strength in ((W8A8, 0.85), (dynamic, 0.5), (jqx.presets.w8a16(), 0.5)):
        given = f, plan_of(policy), PARAMS, BATCHES
        a, b = (x.rewrite(*given, progress=False) for x in (smooth_quant(), smooth_quant(strength)))
        jax.tree.map(np.testing.assert_array_equal, a.params, b.params)
        assert not a.report.left


def test_channels_are_scaled_where_the_modelled_error_shrinks():
    """The errors of rounding and of saturation, in float64, decide for all channels of a plan."""
    rng = np.random.default_rng(5)
    sizes = {f"{i}": 2.0 ** (0.5 * i) for i in range(16)}
    gains = {name: np.where(np.arange(64) == 7, size, 1) for name, size in sizes.items()}
    weights = {name: rng.normal(size=(64, 32)) for name in sizes}
    x = np.float32(rng.normal(size=(256, 64)))

    def g(p, x):
        h = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return [(h * p["gain"][name][None]) @ p["w"][name] for name in sizes]

    as_float32 = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)  # noqa: E731
    params = as_float32({"gain": gains, "w": weights})
    h = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)

    def lost(a, w, scale):
        largest, w = np.abs(a).max(0), w * scale[:, None]
        step = np.abs(w).max(0) / 127.5
        error = (np.round(w / step) * step - w) ** 2
        reach = (largest / scale).max()
        cut = np.maximum(2 * largest / scale - reach, 0) ** 2
        per_channel = (reach / 127.5) ** 2 / 12 + 1e-5 * cut
        return (((a / scale) ** 2).mean(0) @ error).sum() + (per_channel @ w**2).sum()

    ratios = {}
    for name, w in weights.items():
        a = h * gains[name]
        scale = np.abs(a).max(0) ** 0.85 / np.abs(w).max(1) ** 0.15
        ratios[name] = lost(a, w, scale) / lost(a, w, np.ones(64))
    outcomes = set()
    for names in (["0", "1"], ["12"], ["0", "2"], ["4", "15"]):
        plan = jqx.make_plan(g, jqx.presets.w8a8(f"w/({'|'.join(names)})"))(params, x)
        given = g, plan, params, [x[:99], x[99:]]
        found = smooth_quant().rewrite(*given, progress=False)
        part = np.exp(np.mean([np.log(ratios[name]) for name in names]))
        assert abs(np.log(part / 0.3)) > 0.1
        sites = {f"w/{name}:dot_general" for name in names}
        assert found.report.left == (sites if part > 0.3 else set())
        same = smooth_quant(0.85).rewrite(*given, progress=False).params if part < 0.3 else params
        jax.tree.map(np.testing.assert_array_equal, found.params, same)
        assert (", left" in str(found.report)) == (part > 0.3)
        outcomes.add(part > 0.3)
    assert outcomes == {True, False}


def test_rows_of_weight_0_are_left_out():
    is_row = lambda x: jnp.arange(x.shape[0]) < 16  # noqa: E731
    whole, part = ([x[:n] * c for x in BATCHES] for n, c in ((40, 1), (16, 1)))
    for algorithm in (smooth_quant(), smooth_quant(0.85), awq(clip=False, steps=3)):
        weighted = dataclasses.replace(algorithm, weight=is_row)
        plan = plan_of(W8A8)
        a = weighted.rewrite(f, plan, PARAMS, whole, progress=False).params
        b = algorithm.rewrite(f, plan, PARAMS, part, progress=False).params
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), a, b)


def test_equalized_channels_have_one_range_in_both_weights():
    """A chain of three: the middle weight is an end of two pairs."""

    def g(p, x):
        return jax.nn.relu(jax.nn.relu(x @ p["a"]) @ p["b"]) @ p["c"]

    params = {"a": normal(D, H) * 9, "b": normal(H, H), "c": normal(H, 4) / 7}
    plan = jqx.make_plan(g, jqx.presets.w8a16())(params, TEST)
    found = equalize().rewrite(g, plan, params, BATCHES, progress=False).params
    size = {name: np.abs(np.asarray(x)) for name, x in found.items()}
    for first, second in ("ab", "bc"):
        # The last factors changed by less than .001, and so have those of the pair beside since:
        # ranges differ by their squares at most.
        np.testing.assert_allclose(size[first].max(0), size[second].max(1), rtol=4e-3)
    a, b = g(params, TEST), g(found, TEST)
    assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()
    assert str(find_pairs(g, plan)(params, TEST)) == str(
        equalize(steps=1).rewrite(g, plan, params, BATCHES).report
    )


def test_awq_loses_less_than_rounding_and_its_report_says_how_much():
    algorithm = awq(clip=False, keep=False)
    (plain, _), (scaled, quantized) = (lost(W4, x) for x in (NEAREST, algorithm))
    assert scaled < 0.8 * plain
    report = quantized.details
    assert len(report) == 2 * LAYERS and all(entry.after <= entry.before for entry in report)
    assert lost(W4, awq(clip=False))[0] < scaled and not any(entry.kept for entry in report)
    sites = [entry.sites for entry in report if entry.ratio > 0]
    assert ("gate:dot_general[0]", "up:dot_general[0]") in [tuple(sorted(x)) for x in sites]
    assert len(str(report).splitlines()) == len(report) + 1
    # The error of the report is that of the products, by NumPy.
    entry = next(x for x in report if "down:dot_general[1]" in x.sites)
    nearest = np.asarray(jqx.quantize_params(PARAMS, plan_of(W4))["down"].dequantize())
    x, own = np.concatenate(BATCHES), PARAMS
    for i in range(LAYERS):
        h = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(own["gain"][i])
        gate = h @ np.asarray(own["gate"][i])
        h = gate / (1 + np.exp(-gate)) * (h @ np.asarray(own["up"][i]))
        x = x + h @ np.asarray(own["down"][i])
    error = ((h @ (nearest[1] - np.asarray(own["down"][1]))) ** 2).sum() / len(h)
    np.testing.assert_allclose(entry.before, error, rtol=1e-5)


def test_ranges_are_clipped_where_that_loses_less_also_of_what_has_no_pair():
    plan = plan_of(jqx.Policy({".*": "int3"}))
    found = awq(steps=4).rewrite(f, plan, PARAMS, BATCHES, progress=False).params
    scaled = awq(steps=4, clip=False).rewrite(f, plan, PARAMS, BATCHES, progress=False).params
    for name in ("up", "down", "head"):
        own, whole = (np.abs(np.asarray(x[name])) for x in (found, scaled))
        assert (own <= whole * (1 + 1e-6)).all() and (own < whole).any()
        assert (own.max(-2) >= 0.5 * whole.max(-2)).all()
    clipped, kept = (
        lost(jqx.Policy({".*": "int3"}), awq(steps=4, clip=x))[0] for x in (True, False)
    )
    assert clipped < kept


@pytest.mark.slow
def test_a_chain_goes_on_with_what_the_one_before_has_made():
    smooth = smooth_quant(keep=False)
    both = chain(smooth, gptq())
    policy = jqx.Policy([jqx.Rule(".*", weight="int4", activation="int8")])
    error, quantized = lost(policy, both)
    first = smooth.rewrite(f, quantized.plan, PARAMS, BATCHES, progress=False).params
    codes = gptq().run(f, quantized.plan, first, BATCHES, progress=False)
    jax.tree.map(np.testing.assert_array_equal, codes.params, quantized.params)
    pairs, report = quantized.details
    assert len(pairs) == 2 and len(report) == 3 * LAYERS + 1
    assert error < lost(policy, gptq())[0]
    # Static scales are of the scaled function.
    stats = jqx.calibrate_batches(f, quantized.plan, first, BATCHES, progress=False)
    expected = jqx.affines(quantized.plan, stats)
    jax.tree.map(np.testing.assert_array_equal, dict(quantized.affines), dict(expected))


def test_what_means_nothing_is_refused():
    cases = (
        (lambda: smooth_quant(strength=1.5), ValueError, "0 or more and at most 1"),
        (lambda: smooth_quant(weight=3), TypeError, "`weight`"),
        (lambda: smooth_quant(keep=1), TypeError, "`keep`"),
        (lambda: equalize(steps=0), ValueError, "1 or more"),
        (lambda: awq(steps=1), ValueError, "2 or more"),
        (lambda: awq(clip=1), TypeError, "True or False"),
        (lambda: awq(keep=None), TypeError, "`keep`"),
        (lambda: chain(), ValueError, "there is none"),
        (lambda: chain(gptq(), awq()), ValueError, "in the wrong order"),
        (lambda: chain(3), TypeError, "argument 0"),
        (lambda: chain(chain(awq())), TypeError, "argument 0"),
    )
    for make, error, fact in cases:
        with pytest.raises(error, match=rf"(?s)jqx\.algorithms\.\w+: .*{fact}.*fix:"):
            make()
    with pytest.raises(TypeError, match=r"(?s)jqx\.quantize_params: .+ needs the function"):
        jqx.quantize_params(PARAMS, plan_of(W4), algorithm=smooth_quant())


def test_a_function_without_pairs_is_an_error_that_says_why():
    def g(p, x):
        return jnp.tanh(x @ p["a"]) @ p["b"]

    params = {"a": normal(D, H), "b": normal(H, 4)}
    for algorithm in (smooth_quant(keep=False), equalize(), awq(clip=False, keep=False)):
        with pytest.raises(ValueError, match=r"(?s)can be scaled.+b:dot_general: tanh.+fix:"):
            jqx.ptq(g, W8A8, algorithm, progress=False)(params, BATCHES)
