"""Algorithms that scale channels, shift them and clip ranges: each leaves the function as it is, or
nearly, and loses less where its paper says so. Where a ReLU is clipped, sites clip their channels
anew.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jqx
import jqx.linen
import jqx.nnx
from jqx._src.algorithms.channels import at_most_one, clips_of
from jqx.algorithms import awq, bias_correction, chain, equalize, find_pairs, gptq, smooth_quant

from ..arrays import on_device
from ..models.layers import conv
from ..models.modules import LinenLayers, NnxLayers
from ..oracles.algorithms import assert_near, divided

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


def rewritten(algorithm, plan, f=f, params=PARAMS, batches=BATCHES):
    return algorithm.rewrite(f, plan, params, batches, progress=False)


def lost(policy, algorithm):
    quantize = jqx.ptq(f, policy, algorithm, target=False, progress=False)
    quantized = quantize(PARAMS, BATCHES)
    exact = f(PARAMS, TEST)
    return float(np.sum((quantized(TEST) - exact) ** 2) / np.sum(exact**2)), quantized


REWRITES = {
    "smooth_quant": smooth_quant(runtime_scales=False),
    "smooth_quant of weights": smooth_quant(strength=0, runtime_scales=False),
    "smooth_quant of activations": smooth_quant(strength=1.0, runtime_scales=False),
    "smooth_quant and what is kept": smooth_quant(0.85),
    "equalize": equalize(),
    "awq": awq(clip=False, steps=5, runtime_scales=False),
    "awq without duo": awq(clip=False, duo_scaling=False, steps=3, runtime_scales=False),
    "awq and what is kept": awq(clip=False, steps=5),
}


@pytest.mark.many
@pytest.mark.parametrize("name", REWRITES)
def test_the_function_stays_as_it_is(name):
    plan = plan_of(W8A8)
    params, _, maps = rewritten(REWRITES[name], plan)[:3]
    a, b = jax.jit(f)(PARAMS, TEST), jax.jit(jqx.map_channels(f, plan, maps))(params, TEST)
    assert_near(b, a)
    changed = {key for key in PARAMS if (np.asarray(PARAMS[key]) != np.asarray(params[key])).any()}
    gains = set() if name == "equalize" else {"gain", "gate"}
    kept = {"head"} if "and what is kept" in name else set()
    assert changed == {"up", "down"} | gains | kept
    assert set(maps) == {f"{path}:dot_general:lhs" for path in kept}


def test_activations_with_outliers_lose_less_after_smooth_quant():
    plain, smooth = (lost(W8A8, x)[0] for x in (NEAREST, smooth_quant()))
    assert smooth < 0.5 * plain


def kept_at_sites(groups):
    """A function whose sites come after a tanh: two of one value, a convolution, experts."""

    def g(p, x):
        h = jnp.tanh(x) * OUTLIERS[None]
        y = jnp.sin(h @ p["a"]) + jnp.sin(h @ p["b"])
        image = y.reshape(-1, 4, 4, H // 2 // 4) ** 3
        sizes = jnp.array([x.shape[0] // 4, x.shape[0] - x.shape[0] // 4], jnp.int32)
        z = conv(image, p["kernel"], feature_group_count=groups)
        return z, lax.ragged_dot(h, p["experts"], sizes)

    shapes = {"a": (D, 2 * H), "b": (D, 2 * H), "kernel": (3, 3, 3 // groups, 6)}
    return g, {name: normal(*shape) for name, shape in {**shapes, "experts": (2, D, 4)}.items()}


def test_scales_are_kept_where_nothing_takes_them():
    """Two sites of one value have one scale; a group of a convolution, and experts, have theirs."""

    g, params = kept_at_sites(groups=3)
    params["experts"] = params["experts"] / OUTLIERS[None, :, None]
    plan = jqx.make_plan(g, W8A8)(params, TEST)
    smooth = smooth_quant(strength=0.5)
    scaled, report, maps = rewritten(smooth, plan, g, params)[:3]
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
    assert_near(jqx.map_channels(g, plan, maps)(scaled, TEST), g(params, TEST))
    # Weights alone are not worth a product at run time: then there is nothing to do.
    weights = jqx.make_plan(g, W4)(params, TEST)
    with pytest.raises(ValueError, match=r"(?s)smooth_quant: no weight .+a:dot_general: tanh"):
        rewritten(smooth_quant(), weights, g, params)


def test_awq_keeps_scales_where_nothing_takes_them():
    """Also for weights alone; the report says so, and the error is that of the products."""

    g, params = kept_at_sites(groups=1)
    plan = jqx.make_plan(g, jqx.Policy({".*": "int3:channel"}))(params, TEST)
    scaled, report, maps = rewritten(awq(clip=False, steps=6), plan, g, params)[:3]
    by_site = {site: entry for entry in report for site in entry.sites}
    assert by_site["a:dot_general"].kept and "yes" in str(report).splitlines()[1]
    kept = {key: np.asarray(x.scale) for key, x in maps.items()}
    np.testing.assert_array_equal(kept["a:dot_general:lhs"], kept["b:dot_general:lhs"])
    assert {x.shape for x in kept.values()} <= {(D,), (3,)} and len(kept) >= 3
    assert_near(jqx.map_channels(g, plan, maps)(scaled, TEST), g(params, TEST))
    # The error after scaling is that of the products, by NumPy.
    h = np.tanh(np.concatenate(BATCHES)) * OUTLIERS * kept["a:dot_general:lhs"]
    codes = jqx.dequantize_params(jqx.quantize_params(scaled, plan))
    entry, error = by_site["a:dot_general"], 0.0
    assert entry.sites == ("a:dot_general", "b:dot_general")
    for path in "ab":
        error += ((h @ (np.asarray(codes[path]) - np.asarray(scaled[path]))) ** 2).sum() / len(h)
    np.testing.assert_allclose(entry.after, error, rtol=1e-4)
    assert entry.after < 0.8 * entry.before
    with pytest.raises(ValueError, match=r"(?s)awq: no weight .+a:dot_general: tanh"):
        rewritten(awq(clip=False, runtime_scales=False), plan, g, params)


def test_smooth_quant_is_the_formula_of_the_paper():
    plan, inputs = plan_of(W8A8), np.concatenate(BATCHES)
    codes = rewritten(smooth_quant(strength=0.7), plan).params
    weights = {name: np.asarray(x)[0] for name, x in PARAMS.items()}
    h = inputs / np.sqrt((inputs**2).mean(-1, keepdims=True) + 1e-6) * weights["gain"]
    largest = np.maximum(*(np.abs(weights[name]).max(1) for name in ("up", "gate")))
    scale = np.abs(h).max(0) ** 0.7 / largest**0.3
    np.testing.assert_allclose(codes["gain"][0], weights["gain"] / scale, rtol=1e-5)
    np.testing.assert_allclose(codes["gate"][0], weights["gate"] * scale[:, None], rtol=1e-5)


def test_the_plan_decides_the_strength():
    dynamic = jqx.presets.w8a8_dynamic()
    for policy, strength in ((W8A8, 0.85), (dynamic, 0.5), (jqx.presets.w8a16(), 0.5)):
        plan = plan_of(policy)
        a, b = (rewritten(x, plan) for x in (smooth_quant(), smooth_quant(strength)))
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
        args = plan, g, params, [x[:99], x[99:]]
        result = rewritten(smooth_quant(), *args)
        part = np.exp(np.mean([np.log(ratios[name]) for name in names]))
        assert abs(np.log(part / 0.3)) > 0.1
        sites = {f"w/{name}:dot_general" for name in names}
        assert result.report.left == (sites if part > 0.3 else set())
        same = rewritten(smooth_quant(0.85), *args).params if part < 0.3 else params
        jax.tree.map(np.testing.assert_array_equal, result.params, same)
        assert (", left" in str(result.report)) == (part > 0.3)
        outcomes.add(part > 0.3)
    assert outcomes == {True, False}


def test_rows_of_weight_0_are_left_out():
    is_row = lambda x: jnp.arange(x.shape[0]) < 16  # noqa: E731
    whole, part = ([x[:n] * c for x in BATCHES] for n, c in ((40, 1), (16, 1)))
    for algorithm in (smooth_quant(), smooth_quant(0.85), awq(clip=False, steps=3)):
        weighted = dataclasses.replace(algorithm, weight=is_row)
        plan = plan_of(W8A8)
        a = rewritten(weighted, plan, batches=whole).params
        b = rewritten(algorithm, plan, batches=part).params
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), a, b)


def test_equalized_channels_have_one_range_in_both_weights():
    """A chain of three: the middle weight is an end of two pairs."""

    def g(p, x):
        return jax.nn.relu(jax.nn.relu(x @ p["a"]) @ p["b"]) @ p["c"]

    params = {"a": normal(D, H) * 9, "b": normal(H, H), "c": normal(H, 4) / 7}
    plan = jqx.make_plan(g, jqx.presets.w8a16())(params, TEST)
    codes = rewritten(equalize(), plan, g, params).params
    size = {name: np.abs(np.asarray(x)) for name, x in codes.items()}
    for first, second in ("ab", "bc"):
        # The last factors changed by less than .001, and so have those of the pair beside since:
        # ranges differ by their squares at most.
        np.testing.assert_allclose(size[first].max(0), size[second].max(1), rtol=4e-3)
    assert_near(g(codes, TEST), g(params, TEST))
    report = rewritten(equalize(steps=1), plan, g, params).report
    assert str(find_pairs(g, plan)(params, TEST)) == str(report)


def test_awq_loses_less_than_rounding_and_its_report_says_how_much():
    algorithm = awq(clip=False, runtime_scales=False)
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
    x, weights = np.concatenate(BATCHES), PARAMS
    for i in range(LAYERS):
        h = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(weights["gain"][i])
        gate = h @ np.asarray(weights["gate"][i])
        h = gate / (1 + np.exp(-gate)) * (h @ np.asarray(weights["up"][i]))
        x = x + h @ np.asarray(weights["down"][i])
    error = ((h @ (nearest[1] - np.asarray(weights["down"][1]))) ** 2).sum() / len(h)
    np.testing.assert_allclose(entry.before, error, rtol=1e-5)


def test_ranges_are_clipped_where_that_loses_less_also_of_what_has_no_pair():
    plan = plan_of(jqx.Policy({".*": "int3"}))
    codes = rewritten(awq(steps=4), plan).params
    scaled = rewritten(awq(steps=4, clip=False), plan).params
    for name in ("up", "down", "head"):
        clipped_weights, whole_weights = (np.abs(np.asarray(x[name])) for x in (codes, scaled))
        assert (clipped_weights <= whole_weights * (1 + 1e-6)).all() and (
            clipped_weights < whole_weights
        ).any()
        assert (clipped_weights.max(-2) >= 0.5 * whole_weights.max(-2)).all()
    policy = jqx.Policy({".*": "int3"})
    clipped, whole_weights = (lost(policy, awq(steps=4, clip=x))[0] for x in (True, False))
    assert clipped < whole_weights


@pytest.mark.slow
def test_a_chain_goes_on_with_what_the_one_before_has_made():
    smooth = smooth_quant(runtime_scales=False)
    both = chain(smooth, gptq())
    policy = jqx.Policy([jqx.Rule(".*", weight="int4", activation="int8")])
    error, quantized = lost(policy, both)
    first = rewritten(smooth, quantized.plan).params
    codes = gptq().run(f, quantized.plan, first, BATCHES, progress=False)
    jax.tree.map(np.testing.assert_array_equal, codes.params, quantized.params)
    pairs, report = quantized.details
    assert len(pairs) == 2 and len(report) == 3 * LAYERS + 1
    assert error < lost(policy, gptq())[0]
    # Static scales are of the scaled function.
    stats = jqx.calibrate_batches(f, quantized.plan, first, BATCHES, progress=False)
    expected = jqx.affines(quantized.plan, stats)
    jax.tree.map(np.testing.assert_array_equal, dict(quantized.affines), dict(expected))


def test_a_function_without_pairs_is_an_error_that_says_why():
    def g(p, x):
        return jnp.tanh(x @ p["a"]) @ p["b"]

    params = {"a": normal(D, H), "b": normal(H, 4)}
    for algorithm in (
        smooth_quant(runtime_scales=False),
        equalize(),
        awq(clip=False, runtime_scales=False),
    ):
        with pytest.raises(ValueError, match=r"(?s)can be scaled.+b:dot_general: tanh.+fix:"):
            jqx.ptq(g, W8A8, algorithm, progress=False)(params, BATCHES)
    with pytest.raises(TypeError, match=r"(?s)jqx\.quantize_params: .+ needs the function"):
        jqx.quantize_params(PARAMS, plan_of(W4), algorithm=smooth_quant())


# Clipped channels

RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state
POLICY = jqx.Policy({".*": "int8:tensor"})
WIDTH, LIMITS = 8, np.float32([6, 1, 2, 6, 0.5, 3, 6, 4])


FORMS = {
    "min of max": lambda x: jnp.minimum(jnp.maximum(x, 0), 6.0),
    "max of min": lambda x: jnp.maximum(jnp.minimum(x, 6.0), 0),
    "clamp": lambda x: lax.clamp(0.0, x, 6.0),
    "relu6": jax.nn.relu6,
    "clip": lambda x: jnp.clip(x, 0, 6),
    "a limit for each channel": lambda x: jnp.clip(x, 0, jnp.broadcast_to(LIMITS, x.shape)),
    "twice": lambda x: jnp.minimum(jax.nn.relu6(x), 3.0),
    "from above alone": lambda x: jnp.minimum(x, 6.0),
}


def changed(f, params, *inputs):
    """The pairs of a function, other parameters, and the function of these with its maps."""
    plan = jqx.make_plan(f, POLICY)(params, *inputs)
    pairs = find_pairs(f, plan)(params, *inputs)
    factors = np.exp(2 * RNG.normal(size=pairs.folds.count))
    factors[0] = 1
    factors = at_most_one(pairs.folds, factors)
    maps = clips_of(pairs.folds, factors)
    assert bool(maps) == any(x.clipped for x in pairs)
    folded = pairs.folds.folded(params, factors)
    return pairs, folded, jqx.map_channels(f, plan, maps)


def check_identity(f, params, *inputs):
    """The function is the same with its maps, and another one without."""
    pairs, folded, mapped = changed(f, params, *inputs)
    run = jax.jit(lambda p, q, *x: (f(p, *x), mapped(q, *x), f(q, *x)))
    a, b, c = map(jax.tree.leaves, run(params, folded, *inputs))
    # float32: sums of up to 72 products of factors that were rounded once
    assert_near(b, a)
    assert any(np.abs(x - y).max() > 1e-3 * np.abs(x).max() for x, y in zip(a, c, strict=True))
    return pairs


def network(clip):
    """Expansion, depthwise, projection and a sum, as in MobileNet."""

    def layer(x, w, b, **options):
        return conv(x, w, **options) + b[None, None, None]

    def f(p, x):
        x = clip(layer(x, p["stem"], p["b0"]))
        h = clip(layer(x, p["expand"], p["b1"]))
        h = clip(layer(h, p["depthwise"], p["b2"], feature_group_count=WIDTH))
        h = x + layer(h, p["project"], p["b3"])
        h = lax.reduce_window(clip(h), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return h.reshape(h.shape[0], -1) @ p["head"]

    return f


def params_of_network():
    shapes = {
        "stem": (3, 3, 3, WIDTH),
        "expand": (1, 1, WIDTH, WIDTH),
        "depthwise": (3, 3, 1, WIDTH),
    }
    shapes |= {"project": (1, 1, WIDTH, WIDTH), "head": (9 * WIDTH, 4)}
    return {
        **{k: normal(*s) for k, s in shapes.items()},
        **{f"b{i}": normal(WIDTH) for i in range(4)},
    }


NETWORK, IMAGES = params_of_network(), 5 * normal(2, 6, 6, 3)


@pytest.mark.parametrize("form", FORMS)
def test_images_pass_clips_of_every_form(form):
    f = network(FORMS[form])
    pairs = check_identity(f, NETWORK, IMAGES)
    name = lambda x: x.split(":")[0]  # noqa: E731
    results = {" ".join(map(name, x.after)): " ".join(map(name, x.before)) for x in pairs}
    # What a clip stops is a sum with something else; the sum is clipped itself, and taken by
    # "head", with the factors of both members.
    expected = {"depthwise": "expand b1", "project": "depthwise b2"}
    assert results == expected and all(x.clipped and x.channels == WIDTH for x in pairs)
    assert "add of clipped values" in pairs.reasons["head:dot_general"]
    assert ", clipped" in str(pairs)


def test_sums_that_are_clipped_have_factors_of_all_their_members():
    def f(p, x):
        h = jnp.tanh(x) @ p["a"]
        return jax.nn.relu6(h + jax.nn.relu(x) @ p["b"]) @ p["c"], jax.nn.relu(h) @ p["d"]

    params = {name: normal(WIDTH, WIDTH) for name in "abcd"}
    (pair,) = check_identity(f, params, 4 * normal(5, WIDTH))
    assert pair.clipped and len(pair.before) == 2 and len(pair.after) == 2


def test_clips_step_with_scans_and_pass_vmap_branches_and_stacks():
    def f(p, x):
        def layer(x, p):
            return jnp.tanh(jax.nn.relu6(x @ p["up"]) @ p["down"]) * 3, None

        x = lax.scan(layer, x, p["layers"])[0]
        h = jax.vmap(lambda x: jax.nn.relu6(x @ p["a"]))(x[None])[0]
        h = lax.cond(x.sum() > 0, lambda h: h[::-1], lambda h: h, h)
        h = jnp.concatenate([jnp.stack([h, h]).max(0), jnp.where(h > 0, h, 0)], -1)
        return h @ p["b"]

    layers = {"up": 3 * normal(3, WIDTH, 6), "down": normal(3, 6, WIDTH)}
    params = {"layers": layers, "a": 3 * normal(WIDTH, 6), "b": normal(12, 4)}
    pairs = check_identity(f, params, normal(5, WIDTH))
    assert sum(x.channels for x in pairs if x.clipped) == 3 * 6 + 6
    plan = jqx.make_plan(f, POLICY)(params, normal(5, WIDTH))
    result = equalize().rewrite(f, plan, params, [normal(5, WIDTH)])
    shapes = {key.split(":")[0]: x.clip.shape for key, x in result.maps.items()}
    assert shapes == {"layers/down": (3, 6), "b": (12,)}


TWO = {"a": 3 * normal(WIDTH, WIDTH), "b": normal(WIDTH, WIDTH), "gain": normal(WIDTH)}
X = 2 * normal(16, WIDTH)


@settings(max_examples=15, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMS)),
    powers=st.lists(st.integers(0, 4), min_size=WIDTH, max_size=WIDTH),
    seed=st.integers(0, 99),
)
def test_a_clip_at_the_site_is_exact_for_scales_of_one_and_more(form, powers, seed):
    """Integers and powers of two: every number is a float32."""
    rng = np.random.default_rng(seed)
    a, b, x = (on_device(rng.integers(-4, 5, (WIDTH, WIDTH)), jnp.float32) for _ in range(3))
    clip = FORMS[form]
    f = lambda p, x: clip(x @ p["a"]) @ p["b"]  # noqa: E731
    params = {"a": a, "b": b}
    plan = jqx.make_plan(f, POLICY)(params, x)
    pairs, scales = find_pairs(f, plan)(params, x), {"b:dot_general:lhs": 2.0 ** np.array(powers)}
    folded, maps = divided(pairs, params, scales)
    assert bool(maps) == any(powers)
    np.testing.assert_array_equal(f(params, x), jqx.map_channels(f, plan, maps)(folded, x))


def behind(of=lambda h, x: h):
    """A function of what is clipped, before the second weight."""
    return lambda p, x: of(jax.nn.relu6(x @ p["a"]), x) @ p["b"]


def pairs_of(f, params=TWO, x=X):
    return find_pairs(f, jqx.make_plan(f, POLICY)(params, x))(params, x)


REFUSED = {
    "min with a constant that is not positive": lambda p, x: jnp.minimum(x @ p["a"], -6.0) @ p["b"],
    "clamp with a constant": lambda p, x: lax.clamp(-1.0, x @ p["a"], 6.0) @ p["b"],
    "max with a constant": lambda p, x: jnp.maximum(x @ p["a"], -6.0) @ p["b"],
    "min with an unscaled value": lambda p, x: jnp.minimum(x @ p["a"], x.max()) @ p["b"],
    "reduce_sum of clipped values": behind(lambda h, x: h.mean(0, keepdims=True)),
    "neg of clipped values": behind(lambda h, x: -h),
    "mul of clipped values": behind(lambda h, x: h * 0.5),
    "add of clipped values": behind(lambda h, x: h + h[::-1]),
    "a product of clipped values": behind(lambda h, x: jnp.tanh(x) @ h[:WIDTH]),
    "select_n of clipped values": behind(lambda h, x: jnp.where(x > 9, jnp.inf, h)),
    "where one is clipped and another not": behind(
        lambda h, x: jnp.where(x > 0, h, jnp.minimum(h, 3.0))
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_clip_does_not_commute_with_is_refused_and_the_table_says_so(reason):
    pairs = pairs_of(REFUSED[reason])
    assert not pairs.pairs and reason in pairs.reasons["b:dot_general"]
    assert f"none: {reason}" in str(pairs) or reason in str(pairs)


def test_a_limit_that_is_a_parameter_is_scaled_itself():
    f = lambda p, x: jnp.minimum(jax.nn.relu(x @ p["a"]), p["gain"][None]) @ p["b"]  # noqa: E731
    params = {**TWO, "gain": jnp.abs(TWO["gain"]) + 1}
    (pair,) = pairs_of(f, params)
    assert not pair.clipped and "gain" in pair.before


def test_clips_are_divided_as_their_channels():
    pairs, key = pairs_of(behind()), "b:dot_general:lhs"
    unchanged, maps = divided(pairs, TWO, {key: np.ones(WIDTH)})
    jax.tree.map(np.testing.assert_array_equal, unchanged, TWO)
    assert not maps
    folded, maps = divided(pairs, TWO, {key: np.full(WIDTH, 2.0)})
    np.testing.assert_array_equal(maps[key].clip, np.full(WIDTH, 3.0))
    np.testing.assert_array_equal(folded["a"], TWO["a"] / 2)


def test_factors_of_one_tensor_keep_their_ratios():
    folds = pairs_of(behind()).folds
    factors = np.r_[1.0, 2.0 ** np.arange(WIDTH)]
    np.testing.assert_array_equal(at_most_one(folds, factors)[1:], factors[1:] / 2 ** (WIDTH - 1))
    np.testing.assert_array_equal(at_most_one(folds, factors / 512), factors / 512)


def test_smooth_quant_and_awq_leave_clipped_pairs_alone():
    f = behind()
    policy = jqx.presets.w8a8()
    plan = jqx.make_plan(f, policy)(TWO, X)
    result = rewritten(smooth_quant(strength=0.85), plan, f, TWO, [X])
    assert set(result.maps) == {"a:dot_general:lhs", "b:dot_general:lhs"}
    assert all(x.clip is None for x in result.maps.values())
    assert_near(jqx.map_channels(f, plan, result.maps)(result.params, X), f(TWO, X))
    with pytest.raises(ValueError, match=r"(?s)awq: no weight .+it is clipped by a constant"):
        rewritten(awq(clip=False, runtime_scales=False), plan, f, TWO, [X])


def test_least_values_are_absorbed_where_nothing_pads():
    """In steps of a scan, groups, patches and behind a clip: the function stays as it is."""

    def f(p, x):
        layer = lambda x, w: (jax.nn.sigmoid(x @ w["a"]) @ w["b"], None)  # noqa: E731
        x = lax.scan(layer, x, p["layers"])[0]
        h = jax.nn.relu6(conv(x.reshape(-1, 4, 4, WIDTH), p["same"], "SAME") + 3.0)
        h = jax.nn.relu6(conv(h, p["valid"], "VALID", feature_group_count=2) + 3.0)
        return jnp.einsum("bhwc,hcd->bhwd", h, p["stack"])

    shapes = {
        "same": (3, 3, WIDTH, WIDTH),
        "valid": (3, 3, WIDTH // 2, WIDTH),
        "stack": (2, WIDTH, 3),
    }
    params = {name: normal(*shape) / 50 for name, shape in shapes.items()}
    params["layers"] = {"a": normal(2, WIDTH, WIDTH), "b": normal(2, WIDTH, WIDTH)}
    x, policy = normal(32, WIDTH), jqx.presets.w8a8()
    plan = jqx.make_plan(f, policy)(params, x)
    result = rewritten(equalize(), plan, f, params, [x[:16], x[16:]])
    shapes = {k: m.shift.shape for k, m in result.maps.items() if m.shift is not None}
    expected = {
        "layers/b:dot_general:lhs": (2, WIDTH),
        "layers/b:dot_general:out": (2, WIDTH),
        "valid:conv_general_dilated:lhs": (WIDTH,),
        "valid:conv_general_dilated:out": (WIDTH,),
        "stack:dot_general:rhs": (2, WIDTH),
        "stack:dot_general:out": (2, 3),
    }
    assert expected.items() <= shapes.items() and not any("same" in key for key in shapes)
    mapped = jqx.map_channels(f, plan, result.maps)
    for own in (x, 9 * normal(16, WIDTH)):  # seen, and not seen
        a, b = jax.jit(lambda p, q, x: (f(p, x), mapped(q, x)))(params, result.params, own)
        # float32: sums of 72 products, from which sums of the same size were taken
        assert_near(b, a)
    weights = jqx.make_plan(f, jqx.presets.w8a16())(params, x)
    for own, algorithm in ((plan, equalize(absorb=False)), (weights, equalize())):
        maps = rewritten(algorithm, own, f, params, [x]).maps
        assert all(m.shift is None for m in maps.values())


def test_a_channel_that_hardly_changes_loses_less_when_its_least_value_is_absorbed():
    f = behind(lambda h, x: h + jnp.float32([99] + [0] * (WIDTH - 1))[None])
    policy, exact = jqx.presets.w8a8(), f(TWO, X)

    def lost(algorithm):
        quantized = jqx.ptq(f, policy, algorithm, progress=False)(TWO, [X])
        return float(np.mean((quantized(X) - exact) ** 2))

    assert lost(equalize()) < lost(jqx.algorithms.nearest()) / 10
    with pytest.raises(ValueError, match=r"(?s)equalize: no weight .+fix:"):
        lost(equalize(absorb=False))


def wild(f, params, x):
    """Parameters whose channels differ in range by a factor of thousands."""
    folds = pairs_of(f, params, x).folds
    factors = np.exp(2.5 * RNG.normal(size=folds.count))
    factors[0] = 1
    return folds.folded(params, factors)


@pytest.mark.slow
def test_equalized_networks_lose_as_little_with_one_scale_as_with_one_a_channel():
    f = network(jax.nn.relu6)
    params, test = wild(f, NETWORK, IMAGES), 5 * normal(8, 6, 6, 3)
    exact = jax.jit(f)(params, test)

    def lost(policy, algorithm):
        quantized = jqx.ptq(f, policy, algorithm, progress=False)(params, [IMAGES])
        return float(np.mean((quantized(test) - exact) ** 2) / np.mean(exact**2))

    plain, channel = lost(POLICY, None), lost(jqx.Policy({".*": "int8"}), None)
    equal = lost(POLICY, equalize())
    assert equal < 2 * channel and equal < plain / 10


def test_files_keep_clips_and_every_bind_applies_them(tmp_path):
    algorithm = chain(equalize(), bias_correction())
    batches = [9 * X]
    f = behind()
    module, model = (
        LinenLayers((WIDTH, 4), jax.nn.relu6),
        NnxLayers((WIDTH, WIDTH, 4), jax.nn.relu6),
    )
    variables, args = jax.jit(module.init)(jax.random.key(0), X), (POLICY, algorithm)
    ways = {
        "function": (jqx.ptq(f, *args, progress=False)(TWO, batches), lambda x: x.bind(f)),
        "linen": (
            jqx.linen.ptq(module, *args, progress=False)(variables, batches),
            lambda x: jqx.linen.bind(x, module),
        ),
        "nnx": (
            jqx.nnx.ptq(model, *args, progress=False)(batches),
            lambda x: jqx.nnx.bind(x, model),
        ),
    }
    for name, (quantized, bind) in ways.items():
        clips = [x.clip for each in quantized.maps.values() for x in each if x.clip is not None]
        assert len(clips) == 1 and clips[0].shape == (WIDTH,), name
        jqx.save(tmp_path / name, quantized)
        again = bind(jqx.load(tmp_path / name))
        np.testing.assert_array_equal(again(9 * X), quantized(9 * X), name)
        jax.tree.map(np.testing.assert_array_equal, dict(again.maps), dict(quantized.maps))
