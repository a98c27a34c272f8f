"""Maps of channels at sites: through every control-flow form, and what they leave as it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx

from ..arrays import normal, on_device
from ..models.forms import ALL, FORMS, WHILES, K, function, rows, together, weights
from ..models.transforms import product

SCALE = on_device(2.0 ** np.array([1, 0, -1, 2, 0, 1]), jnp.float32)
ROTATION = on_device([[1, 1], [1, -1]], jnp.float32)
SHIFT = on_device([1, 0, -2, 0, 3, 0], jnp.float32)
CLIP = on_device([1, np.inf, 0.5, 2, -1, 0], jnp.float32)


def by_hand(x, w):
    """A product whose left operand is scaled and clipped, and rotated in blocks of two, and its
    result moved. All is exact in float32.
    """
    y = jnp.minimum(x * SCALE[None], CLIP[None]).reshape(-1, K // 2, 2) @ ROTATION[None]
    return y.reshape(x.shape) @ w + SHIFT.reshape((1,) * (jnp.ndim(x) - 1) + (K,))


def plan_of(name):
    return jqx.make_plan(function(name), jqx.presets.w8a16())(weights(), rows())


def maps_of(plan):
    """The same at each site, in each step of the loops around it."""
    maps = {}
    for site in plan.sites:
        steps = tuple(loop.length for loop in site.loops)
        in_each_step = lambda x, steps=steps: jnp.broadcast_to(x, (*steps, *x.shape))  # noqa: E731
        (key,) = (x.key for x in site.operands if x.path is None)
        scale, rotation = (
            jqx.ChannelMap(in_each_step(SCALE), clip=in_each_step(CLIP)),
            jqx.ChannelMap(factors=(in_each_step(ROTATION),)),
        )
        maps[key] = scale, rotation
        maps[site.output_key] = jqx.ChannelMap(shift=in_each_step(SHIFT))
    return maps


@pytest.mark.parametrize("part", range(3))
def test_every_control_flow_form_is_mapped_exactly(part):
    names = [f.__name__ for f in ALL if f.__name__ != "vmapped"][part::3]
    w, x = weights(), rows()
    actual, expected = [], []
    for name in names:
        plan = plan_of(name)
        mapped = jqx.map_channels(function(name), plan, maps_of(plan))
        actual.append(mapped)
        expected.append(functools.partial(FORMS[name], by_hand))
        assert jqx.make_plan(mapped, jqx.presets.w8a16())(w, x) == plan, name
    a, b = together(*actual)(w, x), together(*expected)(w, x)
    for name, own, reference in zip(names, a, b, strict=True):
        jax.tree.map(np.testing.assert_array_equal, own, reference), name


def test_gradients_pass_the_maps_and_reach_their_arrays():
    names = [f.__name__ for f in (*ALL[:4], *ALL[-11:-5]) if f not in WHILES]
    names = [name for name in names if "vmapped" not in name and "custom" not in name]
    w, x = weights(), rows()

    def lost(form, w, x):
        return sum(jnp.sum(y**2) for y in jax.tree.leaves(form(w, x)))

    for name in names[::3]:
        plan = plan_of(name)
        maps = maps_of(plan)

        def own(w, x, maps, name=name, plan=plan):
            return lost(jqx.map_channels(function(name), plan, maps), w, x)

        reference = functools.partial(lost, functools.partial(FORMS[name], by_hand))
        a, b = (
            jax.jit(jax.grad(own, (0, 1, 2)))(w, x, maps),
            jax.jit(jax.grad(reference, (0, 1)))(w, x),
        )
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), a[:2], b)
        assert all(np.asarray(x).any() for x in jax.tree.leaves(a[2])), name


def test_batches_of_matrices_convolutions_experts_and_tables_have_channels():
    stack, image = normal(0, 3, 8, 5), normal(1, 2, 6, 6, 8)
    kernel, table, router = normal(2, 3, 3, 4, 6), normal(3, 7, 8), normal(4, 3, 8, 5)

    def f(p, x, image, ids):
        y = jnp.einsum("bsk,bkn->bsn", x, p["stack"])
        z = lax.conv_general_dilated(
            image, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=2,
        )  # fmt: skip
        rows = lax.ragged_dot(x[0], p["experts"], jnp.array([1, 2, 1], jnp.int32))
        turned = jnp.einsum("nk,sk->ns", p["table"], x[0])
        return y, z, rows, p["table"][ids], turned

    params = {"stack": stack, "kernel": kernel, "experts": router, "table": table}
    x, ids = normal(5, 3, 4, 8), jnp.array([2, 6])
    shapes = {"stack": (3, 8), "kernel": (8,), "experts": (8,), "gather": (8,), "table": (8,)}
    scale = {name: jnp.exp2(jnp.round(normal(8, *shape))) for name, shape in shapes.items()}
    policy = jqx.Policy([jqx.Rule("table", weight=None), jqx.Rule(".*", weight="int8")])
    plan = jqx.make_plan(f, policy)(params, x, image, ids)
    maps = {
        "stack:dot_general:lhs": scale["stack"],
        "kernel:conv_general_dilated:lhs": scale["kernel"],
        "experts:ragged_dot:lhs": scale["experts"],
    }
    for i, skip in enumerate(plan.skipped):
        side = "out" if skip.op == "gather" else "rhs"
        maps[f"{plan.name_of_skipped(i)}:{side}"] = scale["gather" if side == "out" else "table"]
    channel_maps = {key: jqx.ChannelMap(scale=x) for key, x in maps.items()}
    actual = jax.jit(jqx.map_channels(f, plan, channel_maps))(params, x, image, ids)
    groups = zip(jnp.split(kernel, 2, 3), jnp.split(scale["kernel"], 2), strict=True)
    folded = {
        "stack": stack * scale["stack"][:, :, None],
        "kernel": jnp.concatenate([k * s[None, None, :, None] for k, s in groups], 3),
        "experts": router * scale["experts"][None, :, None],
        "table": table * scale["gather"][None],
    }
    expected = f(folded, x, image, ids)
    expected = (
        *expected[:4],
        f({**params, "table": table * scale["table"][None]}, x, image, ids)[4],
    )
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_rotations_are_kronecker_products_and_no_contractions_of_the_plan():
    w, x = normal(0, 12, 4), normal(1, 5, 12)
    a, b = (np.linalg.qr(np.asarray(normal(i, n, n)))[0] for i, n in ((2, 2), (3, 3)))
    policy = jqx.Policy([jqx.Rule(".*", weight="int8", activation="int8:token:dynamic")])
    plan = jqx.make_plan(product, policy)(w, x)
    maps = {":dot_general:lhs": jqx.ChannelMap(factors=(on_device(a), on_device(b)))}
    mapped = jqx.map_channels(product, plan, maps)
    whole = np.kron(np.eye(2), np.kron(a, b))
    np.testing.assert_allclose(mapped(w, x), x @ whole @ w, rtol=1e-5, atol=1e-5)
    assert jqx.make_plan(mapped, policy)(w, x) == plan
    turned = on_device(whole.T @ np.asarray(w), jnp.float32)
    np.testing.assert_allclose(mapped(turned, x), x @ w, rtol=1e-5, atol=1e-5)
    converted = jax.jit(jqx.convert(mapped, plan))
    codes = jqx.quantize_params(turned, plan)
    error = np.abs(converted(codes, x) - x @ w).max() / np.abs(x @ w).max()
    assert 0 < error < 0.03


def test_a_low_rank_product_is_added_in_the_axes_of_the_result():
    """Of a stack of matrices, with the weight on either side, two axes of channels, in a scan."""

    def f(p, x):
        def layer(x, w):
            return jnp.tanh(jnp.einsum("ij,btj->bti", w, x)), None

        x = lax.scan(layer, x, p["layers"])[0]
        heads = jnp.einsum("btd,dhk->bthk", x, p["heads"])
        return jnp.einsum("bthk,hkd->btd", heads, p["out"]), jnp.einsum(
            "btd,bde->bte", x, p["stack"]
        )

    shapes = {"layers": (3, 6, 6), "heads": (6, 2, 4), "out": (2, 4, 6), "stack": (2, 6, 5)}
    low = {"layers": ((3, 6, 2), (3, 2, 6)), "heads": ((6, 2), (2, 8)), "out": ((8, 2), (2, 6))}
    low["stack"] = (2, 6, 2), (2, 2, 5)
    params = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    x = normal(9, 2, 5, 6)
    plan = jqx.make_plan(f, jqx.presets.w8a16())(params, x)
    pairs = {
        name: [normal(i, *shape) for i, shape in enumerate(both)] for name, both in low.items()
    }
    maps = {f"{name}:dot_general:out": jqx.LowRank(*pair) for name, pair in pairs.items()}
    mapped = jqx.map_channels(f, plan, maps)
    whole = {name: np.asarray(a) @ np.asarray(b) for name, (a, b) in pairs.items()}
    whole["layers"] = whole["layers"].swapaxes(1, 2)
    own = {name: params[name] + whole[name].reshape(shape) for name, shape in shapes.items()}
    for a, b in zip(jax.jit(mapped)(params, x), f(own, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert jqx.make_plan(mapped, jqx.presets.w8a16())(params, x) == plan


def test_a_scale_costs_no_pass_over_memory():
    """XLA joins it with the quantization of the operand: it is no operation of its own."""
    w, x = normal(0, 256, 256), normal(1, 512, 256)
    f = lambda w, x: jnp.tanh(x) @ w  # noqa: E731
    plan = jqx.make_plan(f, jqx.presets.w8a8_dynamic())(w, x)
    maps = {":dot_general:lhs": jqx.ChannelMap(scale=on_device(np.full(256, 0.5), jnp.float32))}
    codes = jqx.quantize_params(w, plan, target="cpu")
    sizes = []
    for g in (f, jqx.map_channels(f, plan, maps)):
        compiled = jax.jit(jqx.convert(g, plan)).lower(codes, x).compile()
        text = compiled.as_text().split("ENTRY")[1]
        sizes.append((text.count("fusion("), compiled.memory_analysis().temp_size_in_bytes))
    assert sizes[0] == sizes[1]


def test_what_does_not_fit_is_refused():
    f = lambda p, x: lax.scan(lambda x, w: (x @ w, None), x, p["w"])[0] @ p["v"]  # noqa: E731
    params, x = {"w": normal(0, 2, 4, 4), "v": normal(1, 4, 4)}, normal(2, 3, 4)
    plan = jqx.make_plan(f, jqx.Policy({"v": "float", ".*": "int8"}))(params, x)
    good = jqx.ChannelMap(scale=jnp.ones((2, 4)))
    key = "w:dot_general:lhs"
    cases = (
        (lambda: jqx.map_channels(f, plan, [good]), TypeError, "`maps` is not a Mapping"),
        (lambda: jqx.map_channels(f, plan, {key: 2.0}), TypeError, "not a ChannelMap"),
        (lambda: jqx.map_channels(f, plan, {"w": good}), ValueError, "not in the plan"),
        (lambda: jqx.map_channels(f, plan, {key: jqx.ChannelMap(jnp.ones((2, 3)))})(params, x),
         ValueError, r"shape \(3,\)"),
        (lambda: jqx.map_channels(f, plan, {key: jqx.ChannelMap(clip=jnp.ones((2, 5)))})(params, x),
         ValueError, r"clip of shape \(5,\)"),
        (lambda: jqx.map_channels(f, plan, {key: jqx.ChannelMap(factors=(jnp.ones((2, 3, 3)),))})(
            params, x), ValueError, "a size that divides 4"),
        (lambda: jqx.map_channels(f, plan, {"v:dot_general~0:rhs": good})(params, x),
         ValueError, "for a weight"),
        (lambda: jqx.map_channels(f, plan, {key: jqx.LowRank(jnp.ones((4, 1)), jnp.ones((1, 4)))})(
            params, x), ValueError, "does not step"),
        (lambda: jqx.map_channels(f, plan, {key: jqx.LowRank(
            jnp.ones((2, 4, 1)), jnp.ones((2, 1, 4)))})(params, x), ValueError, "is not possible"),
        (lambda: jqx.map_channels(f, plan, {"v:dot_general~0:out": jqx.LowRank(
            jnp.ones((4, 1)), jnp.ones((1, 3)))})(params, x), ValueError, r"\(1, 4\)"),
        (lambda: jqx.map_channels(lambda p, x: x @ p["v"], plan, {key: good})(
            {"v": params["v"]}, x), ValueError, "another function"),
    )  # fmt: skip
    for call, error, fact in cases:
        with pytest.raises(error, match=rf"(?s)jqx\.map_channels: .*{fact}.*fix:"):
            call()
