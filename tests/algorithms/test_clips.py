"""Scales through clipped ReLUs: sites clip their channels anew; the function stays as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jqx
import jqx.linen
import jqx.nnx
from jqx._src.algorithms.channels import at_most_one, clips_of
from jqx.algorithms import awq, bias_correction, chain, equalize, find_pairs, smooth_quant

from ..arrays import on_device
from .scales import divided

RNG = np.random.default_rng(0)
POLICY = jqx.Policy({".*": "int8:tensor"})
D, LIMITS = 8, np.float32([6, 1, 2, 6, 0.5, 3, 6, 4])


def normal(*shape):
    return on_device(np.float32(RNG.normal(size=shape)))


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
    a, b, c = jax.jit(lambda p, q, *x: (f(p, *x), mapped(q, *x), f(q, *x)))(params, folded, *inputs)
    a, b, c = map(jax.tree.leaves, (a, b, c))

    def apart(x, y):
        return max(np.abs(x - y).max() / np.abs(x).max() for x, y in zip(x, y, strict=True))

    # float32: sums of up to 72 products of factors that were rounded once
    assert apart(a, b) <= 1e-5 and apart(a, c) > 1e-3
    return pairs


def network(clip):
    """Expansion, depthwise, projection and a sum, as in MobileNet."""
    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def conv(x, w, b, **options):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", **numbers, **options)
        return y + b[None, None, None]

    def f(p, x):
        x = clip(conv(x, p["stem"], p["b0"]))
        h = clip(conv(x, p["expand"], p["b1"]))
        h = clip(conv(h, p["depthwise"], p["b2"], feature_group_count=D))
        h = x + conv(h, p["project"], p["b3"])
        h = lax.reduce_window(clip(h), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return h.reshape(h.shape[0], -1) @ p["head"]

    return f


def params_of_network():
    shapes = {"stem": (3, 3, 3, D), "expand": (1, 1, D, D), "depthwise": (3, 3, 1, D)}
    shapes |= {"project": (1, 1, D, D), "head": (9 * D, 4)}
    return {**{k: normal(*s) for k, s in shapes.items()}, **{f"b{i}": normal(D) for i in range(4)}}


NETWORK, IMAGES = params_of_network(), 5 * normal(2, 6, 6, 3)


@pytest.mark.parametrize("form", FORMS)
def test_images_pass_clips_of_every_form(form):
    f = network(FORMS[form])
    pairs = check_identity(f, NETWORK, IMAGES)
    name = lambda x: x.split(":")[0]  # noqa: E731
    found = {" ".join(map(name, x.after)): " ".join(map(name, x.before)) for x in pairs}
    # What a clip stops is a sum with something else; the sum is clipped itself, and taken by
    # "head", with the factors of both members.
    expected = {"depthwise": "expand b1", "project": "depthwise b2"}
    assert found == expected and all(x.clipped and x.channels == D for x in pairs)
    assert "add of clipped values" in pairs.reasons["head:dot_general"]
    assert ", clipped" in str(pairs)


def test_sums_that_are_clipped_have_factors_of_all_their_members():
    def f(p, x):
        h = jnp.tanh(x) @ p["a"]
        return jax.nn.relu6(h + jax.nn.relu(x) @ p["b"]) @ p["c"], jax.nn.relu(h) @ p["d"]

    params = {name: normal(D, D) for name in "abcd"}
    (pair,) = check_identity(f, params, 4 * normal(5, D))
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

    layers = {"up": 3 * normal(3, D, 6), "down": normal(3, 6, D)}
    params = {"layers": layers, "a": 3 * normal(D, 6), "b": normal(12, 4)}
    pairs = check_identity(f, params, normal(5, D))
    assert sum(x.channels for x in pairs if x.clipped) == 3 * 6 + 6
    plan = jqx.make_plan(f, POLICY)(params, normal(5, D))
    found = equalize().rewrite(f, plan, params, [normal(5, D)])
    shapes = {key.split(":")[0]: x.clip.shape for key, x in found.maps.items()}
    assert shapes == {"layers/down": (3, 6), "b": (12,)}


TWO = {"a": 3 * normal(D, D), "b": normal(D, D), "gain": normal(D)}
X = 2 * normal(16, D)


@settings(max_examples=15, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMS)),
    powers=st.lists(st.integers(0, 4), min_size=D, max_size=D),
    seed=st.integers(0, 99),
)
def test_a_clip_at_the_site_is_exact_for_scales_of_one_and_more(form, powers, seed):
    """Integers and powers of two: every number is a float32."""
    rng = np.random.default_rng(seed)
    a, b, x = (on_device(rng.integers(-4, 5, (D, D)), jnp.float32) for _ in range(3))
    clip = FORMS[form]
    f = lambda p, x: clip(x @ p["a"]) @ p["b"]  # noqa: E731
    params = {"a": a, "b": b}
    plan = jqx.make_plan(f, POLICY)(params, x)
    pairs, scales = find_pairs(f, plan)(params, x), {"b:dot_general:lhs": 2.0 ** np.array(powers)}
    folded, maps = divided(pairs, params, scales)
    assert bool(maps) == any(powers)
    np.testing.assert_array_equal(f(params, x), jqx.map_channels(f, plan, maps)(folded, x))


def behind(of):
    """A function of what is clipped, before the second weight."""
    return lambda p, x: of(jax.nn.relu6(x @ p["a"]), x) @ p["b"]


REFUSED = {
    "min with a constant that is not positive": lambda p, x: jnp.minimum(x @ p["a"], -6.0) @ p["b"],
    "clamp with a constant": lambda p, x: lax.clamp(-1.0, x @ p["a"], 6.0) @ p["b"],
    "max with a constant": lambda p, x: jnp.maximum(x @ p["a"], -6.0) @ p["b"],
    "min with an unscaled value": lambda p, x: jnp.minimum(x @ p["a"], x.max()) @ p["b"],
    "reduce_sum of clipped values": behind(lambda h, x: h.mean(0, keepdims=True)),
    "neg of clipped values": behind(lambda h, x: -h),
    "mul of clipped values": behind(lambda h, x: h * 0.5),
    "add of clipped values": behind(lambda h, x: h + h[::-1]),
    "a product of clipped values": behind(lambda h, x: jnp.tanh(x) @ h[:D]),
    "select_n of clipped values": behind(lambda h, x: jnp.where(x > 9, jnp.inf, h)),
    "where one is clipped and another not": behind(
        lambda h, x: jnp.where(x > 0, h, jnp.minimum(h, 3.0))
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_clip_does_not_commute_with_is_refused_and_the_table_says_so(reason):
    f = REFUSED[reason]
    plan = jqx.make_plan(f, POLICY)(TWO, X)
    pairs = find_pairs(f, plan)(TWO, X)
    assert not pairs.pairs and reason in pairs.reasons["b:dot_general"]
    assert f"none: {reason}" in str(pairs) or reason in str(pairs)


def test_a_limit_that_is_a_parameter_is_scaled_itself():
    f = lambda p, x: jnp.minimum(jax.nn.relu(x @ p["a"]), p["gain"][None]) @ p["b"]  # noqa: E731
    params = {**TWO, "gain": jnp.abs(TWO["gain"]) + 1}
    plan = jqx.make_plan(f, POLICY)(params, X)
    (pair,) = find_pairs(f, plan)(params, X)
    assert not pair.clipped and "gain" in pair.before


def test_clips_are_divided_as_their_channels():
    f = behind(lambda h, x: h)
    plan = jqx.make_plan(f, POLICY)(TWO, X)
    pairs, key = find_pairs(f, plan)(TWO, X), "b:dot_general:lhs"
    unchanged, maps = divided(pairs, TWO, {key: np.ones(D)})
    jax.tree.map(np.testing.assert_array_equal, unchanged, TWO)
    assert not maps
    folded, maps = divided(pairs, TWO, {key: np.full(D, 2.0)})
    np.testing.assert_array_equal(maps[key].clip, np.full(D, 3.0))
    np.testing.assert_array_equal(folded["a"], TWO["a"] / 2)


def test_factors_of_one_tensor_keep_their_ratios():
    f = behind(lambda h, x: h)
    plan = jqx.make_plan(f, POLICY)(TWO, X)
    folds = find_pairs(f, plan)(TWO, X).folds
    factors = np.r_[1.0, 2.0 ** np.arange(D)]
    np.testing.assert_array_equal(at_most_one(folds, factors)[1:], factors[1:] / 2 ** (D - 1))
    np.testing.assert_array_equal(at_most_one(folds, factors / 512), factors / 512)


def test_smooth_quant_and_awq_leave_clipped_pairs_alone():
    f = behind(lambda h, x: h)
    policy = jqx.presets.w8a8()
    plan = jqx.make_plan(f, policy)(TWO, X)
    found = smooth_quant(strength=0.85).rewrite(f, plan, TWO, [X], progress=False)
    assert set(found.maps) == {"a:dot_general:lhs", "b:dot_general:lhs"}
    assert all(x.clip is None for x in found.maps.values())
    a, b = f(TWO, X), jqx.map_channels(f, plan, found.maps)(found.params, X)
    assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()
    with pytest.raises(ValueError, match=r"(?s)awq: no weight .+it is clipped by a constant"):
        awq(clip=False, keep=False).rewrite(f, plan, TWO, [X], progress=False)


def test_least_values_are_absorbed_where_nothing_pads():
    """In steps of a scan, groups, patches and behind a clip: the function stays as it is."""
    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def conv(x, w, pad, **options):
        return lax.conv_general_dilated(x, w, (1, 1), pad, **numbers, **options)

    def f(p, x):
        layer = lambda x, w: (jax.nn.sigmoid(x @ w["a"]) @ w["b"], None)  # noqa: E731
        x = lax.scan(layer, x, p["layers"])[0]
        h = jax.nn.relu6(conv(x.reshape(-1, 4, 4, D), p["same"], "SAME") + 3.0)
        h = jax.nn.relu6(conv(h, p["valid"], "VALID", feature_group_count=2) + 3.0)
        return jnp.einsum("bhwc,hcd->bhwd", h, p["stack"])

    shapes = {"same": (3, 3, D, D), "valid": (3, 3, D // 2, D), "stack": (2, D, 3)}
    params = {name: normal(*shape) / 50 for name, shape in shapes.items()}
    params["layers"] = {"a": normal(2, D, D), "b": normal(2, D, D)}
    x, policy = normal(32, D), jqx.presets.w8a8()
    plan = jqx.make_plan(f, policy)(params, x)
    given = f, plan, params, [x[:16], x[16:]]
    found = equalize().rewrite(*given, progress=False)
    shapes = {k: m.shift.shape for k, m in found.maps.items() if m.shift is not None}
    expected = {
        "layers/b:dot_general:lhs": (2, D),
        "layers/b:dot_general:out": (2, D),
        "valid:conv_general_dilated:lhs": (D,),
        "valid:conv_general_dilated:out": (D,),
        "stack:dot_general:rhs": (2, D),
        "stack:dot_general:out": (2, 3),
    }
    assert expected.items() <= shapes.items() and not any("same" in key for key in shapes)
    mapped = jqx.map_channels(f, plan, found.maps)
    for own in (x, 9 * normal(16, D)):  # seen, and not seen
        a, b = jax.jit(lambda p, q, x: (f(p, x), mapped(q, x)))(params, found.params, own)
        # float32: sums of 72 products, from which sums of the same size were taken
        assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()
    weights = jqx.make_plan(f, jqx.presets.w8a16())(params, x)
    for own, algorithm in ((plan, equalize(absorb=False)), (weights, equalize())):
        maps = algorithm.rewrite(f, own, params, [x], progress=False).maps
        assert all(m.shift is None for m in maps.values())
    with pytest.raises(TypeError, match=r"(?s)equalize: .*absorb.+fix:"):
        equalize(absorb=2)


def test_a_channel_that_hardly_changes_loses_less_when_its_least_value_is_absorbed():
    f = behind(lambda h, x: h + jnp.float32([99] + [0] * (D - 1))[None])
    policy, exact = jqx.presets.w8a8(), f(TWO, X)

    def lost(algorithm):
        quantized = jqx.ptq(f, policy, algorithm, progress=False)(TWO, [X])
        return float(np.mean((quantized(X) - exact) ** 2))

    assert lost(equalize()) < lost(jqx.algorithms.nearest()) / 10
    with pytest.raises(ValueError, match=r"(?s)equalize: no weight .+fix:"):
        lost(equalize(absorb=False))


def wild(f, params, x):
    """Parameters whose channels differ in range by a factor of thousands."""
    plan = jqx.make_plan(f, POLICY)(params, x)
    folds = find_pairs(f, plan)(params, x).folds
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


class Linen(linen.Module):
    """Two layers, and a clip between them."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(4)(jax.nn.relu6(linen.Dense(D)(x)))


class Nnx(nnx.Module):
    """The same."""

    def __init__(self):
        self.a, self.b = nnx.Linear(D, D, rngs=nnx.Rngs(0)), nnx.Linear(D, 4, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.b(nnx.relu6(self.a(x)))


def test_files_keep_clips_and_every_bind_applies_them(tmp_path):
    algorithm = chain(equalize(), bias_correction())
    batches = [9 * X]
    f = behind(lambda h, x: h)
    module, model = Linen(), Nnx()
    variables = module.init(jax.random.key(0), X)
    ways = {
        "function": (jqx.ptq(f, POLICY, algorithm, progress=False)(TWO, batches),
                     lambda x: x.bind(f)),
        "linen": (jqx.linen.ptq(module, POLICY, algorithm, progress=False)(variables, batches),
                  lambda x: jqx.linen.bind(x, module)),
        "nnx": (jqx.nnx.ptq(model, POLICY, algorithm, progress=False)(batches),
                lambda x: jqx.nnx.bind(x, Nnx())),
    }  # fmt: skip
    for name, (quantized, bind) in ways.items():
        clips = [x.clip for each in quantized.maps.values() for x in each if x.clip is not None]
        assert len(clips) == 1 and clips[0].shape == (D,), name
        jqx.save(tmp_path / name, quantized)
        again = bind(jqx.load(tmp_path / name))
        np.testing.assert_array_equal(again(9 * X), quantized(9 * X), name)
        jax.tree.map(np.testing.assert_array_equal, dict(again.maps), dict(quantized.maps))
