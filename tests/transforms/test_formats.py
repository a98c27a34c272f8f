"""Every number format in a policy, through all transforms and views: they must agree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import numerics
from jqx.numerics import Block, format_of

from ..models.transforms import close, normal, plan_of, product

pytestmark = pytest.mark.slow

FORMATS = {
    "int3": numerics.int3,
    "int5": numerics.int5,
    "ternary": numerics.ternary,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "float6": numerics.float6_e2m3fn,
    "nf4": numerics.nf4,
    "mxfp8": numerics.mxfp8_e4m3,
    "mxfp6": numerics.mxfp6_e3m2,
    "mxfp4": numerics.mxfp4,
    "mxint8": numerics.mxint8,
    "nvfp4": numerics.nvfp4,
}
BLOCKS = {name: form for name, form in FORMATS.items() if isinstance(form, Block)}
ACTIVATIONS = {
    "float": None,
    "int8 static": jqx.QSpec(jnp.int8),
    "e4m3 per token": jqx.QSpec(jnp.float8_e4m3fn, jqx.per_token(), dynamic=True),
    "mxfp8": jqx.QSpec(numerics.mxfp8_e4m3, jqx.per_group(32, tail=True), dynamic=True),
}
TERMS = 100  # the longest sum here


def group_of(form, tail=False):
    return jqx.per_group(getattr(form, "size", 32), tail)


def policy_of(form, granularity, activation=None):
    return jqx.Policy([jqx.Rule(weight=jqx.QSpec(form, granularity), activation=activation)])


def one_layer(params, x):
    """One layer, so that no rounding of a first one tips a code of the second."""
    return x @ params["w"] + params["b"]


def two_layers(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"].T


def params_for(k):
    return {"w": normal(0, k, 8) / 8, "b": normal(1, 1, 8), "v": normal(2, 5, 8)}


def granularities():
    for name, form in FORMATS.items():
        if name not in BLOCKS:
            yield pytest.param(form, jqx.per_channel(), 64, id=f"{name} per channel")
        yield pytest.param(form, group_of(form), 64, id=f"{name} in groups")
        yield pytest.param(form, group_of(form, tail=True), 100, id=f"{name} with a tail")


def everything(f, policy, params, x):
    """Plan, scales, quantized parameters, and what is simulated and converted."""
    plan = plan_of(f, policy, params, x)
    affines = jqx.affines(plan, jqx.calibrate(f, plan)(params, x)[1])
    q = jqx.quantize_params(params, plan)
    simulated = jax.jit(jqx.simulate(f, plan, affines))(params, x)
    return plan, affines, q, simulated, jax.jit(jqx.convert(f, plan, affines))(q, x)


def dequantized(q):
    is_quantized = lambda leaf: isinstance(leaf, jqx.QTensor)  # noqa: E731
    return jax.tree.map(
        lambda leaf: leaf.dequantize() if is_quantized(leaf) else leaf, q, is_leaf=is_quantized
    )


@pytest.mark.parametrize(("form", "granularity", "k"), list(granularities()))
def test_a_weight_format_is_planned_quantized_simulated_and_converted(form, granularity, k):
    params, x = params_for(k), normal(3, 7, k)
    plan, _, q, simulated, converted = everything(
        one_layer, policy_of(form, granularity), params, x
    )
    (weight,) = plan.weights
    assert (weight.path, weight.spec.qtype) == ("w", jqx.QSpec(form, granularity).qtype)
    assert weight.spec.granularity == granularity.resolve(2, (1,))
    expected = jqx.QTensor.quantize(params["w"], weight.spec)
    assert jax.tree.structure(q["w"]) == jax.tree.structure(expected)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, q["w"], expected))
    abstract = jqx.quantize_params(jax.eval_shape(lambda p: p, params), plan)
    shapes = jax.eval_shape(lambda q: q, q)
    assert jax.tree.structure(abstract) == jax.tree.structure(shapes)
    assert jax.tree.leaves(abstract) == jax.tree.leaves(shapes)
    assert close(simulated, one_layer(dequantized(q), x), TERMS)
    assert close(converted, simulated, TERMS)
    on_the_fly = jax.jit(jqx.convert(one_layer, plan))(params, x)
    assert close(on_the_fly, simulated, TERMS)


TAILS = ["int3", "e4m3", "nf4", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "float"])
@pytest.mark.parametrize(
    ("name", "k"), [*((name, 64) for name in FORMATS), *((name, 100) for name in TAILS)]
)
def test_a_weight_format_meets_quantized_activations(name, k, activation):
    """Groups of 100 elements have a tail."""
    form, params, x = FORMATS[name], params_for(k), normal(3, 7, k)
    policy = policy_of(form, group_of(form, tail=k == 100), ACTIVATIONS[activation])
    plan, affines, q, simulated, converted = everything(one_layer, policy, params, x)
    assert set(affines) == ({"w:dot_general:lhs"} if "static" in activation else set())
    (site,) = plan.sites
    grid = jqx.QTensor.quantize(x, site.operands[0].spec, affines.get("w:dot_general:lhs"))
    assert close(simulated, one_layer(dequantized(q), grid.dequantize()), TERMS)
    assert close(converted, simulated, TERMS)


@pytest.mark.parametrize("name", FORMATS)
def test_two_layers_with_tails_of_their_own_are_converted(name):
    """The second contracts 8 elements: less than a group."""
    form, params, x = FORMATS[name], params_for(100), normal(3, 7, 100)
    policy = policy_of(form, group_of(form, tail=True))
    plan, _, q, simulated, converted = everything(two_layers, policy, params, x)
    assert [weight.path for weight in plan.weights] == ["w", "v"]
    assert close(simulated, two_layers(dequantized(q), x), TERMS)
    assert close(converted, simulated, TERMS)


SITES = {
    "w @ x": (lambda w, x: w @ x, (6, 64), (64, 3), (1,)),
    "x @ w": (lambda w, x: x @ w, (64, 6), (3, 64), (0,)),
    "x @ w.T": (lambda w, x: x @ w.T, (6, 64), (3, 64), (1,)),
    "bd,dhk->bhk": (lambda w, x: jnp.einsum("bd,dhk->bhk", x, w), (64, 2, 5), (3, 64), (0,)),
    "bhk,hkd->bd": (lambda w, x: jnp.einsum("bhk,hkd->bd", x, w), (2, 64, 5), (3, 2, 64), (0, 1)),
    "bhk,dhk->bd": (lambda w, x: jnp.einsum("bhk,dhk->bd", x, w), (5, 2, 64), (3, 2, 64), (1, 2)),
    "gbd,gdk->gbk": (lambda w, x: jnp.einsum("gbd,gdk->gbk", x, w), (2, 64, 5), (2, 3, 64), (1,)),
}


@pytest.mark.parametrize("name", ["int3", "nf4", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("site", SITES)
def test_groups_lie_along_the_contracted_axes(site, name):
    """One scale for each run along the last of them, whatever else the weight has."""
    f, shape, x_shape, contracted = SITES[site]
    form, w, x = FORMATS[name], normal(0, *shape), normal(1, *x_shape)
    size = getattr(form, "size", 32)
    _, _, q, simulated, converted = everything(f, policy_of(form, group_of(form)), w, x)
    last = contracted[-1]
    assert q.scale.shape == (*shape[:last], shape[last] // size, *shape[last + 1 :])
    assert close(simulated, f(q.dequantize(), x), 2 * 64)
    assert close(converted, simulated, 2 * 64)


VIEWS = {
    "transposed": (lambda w: w.T, (6, 64)),
    "split in blocks and merged": (lambda w: w.reshape(2, 32, 6).reshape(64, 6), (64, 6)),
    "kept axes merged": (lambda w: w.reshape(64, 6), (64, 2, 3)),
    "kept axes split": (lambda w: w.reshape(64, 2, 3)[:, 1], (64, 6)),
    "contracted axes merged": (lambda w: w.reshape(64, 6), (2, 32, 6)),
    "contracted axis split": (lambda w: w.reshape(2, 64, 6)[1], (128, 6)),
    "sliced at a block": (lambda w: w[32:96], (128, 6)),
    "columns": (lambda w: w[:, 1:5], (64, 6)),
    "a layer": (lambda w: w[1], (3, 64, 6)),
    "broadcast": (lambda w: jnp.broadcast_to(w, (2, 64, 6)), (64, 6)),
    "expanded": (lambda w: w[None], (64, 6)),
    "halved": (lambda w: w * 0.5, (64, 6)),
    "times 3": (lambda w: 3.0 * w, (64, 6)),
    "by 7": (lambda w: w / 7.0, (64, 6)),
    "scaled and transposed": (lambda w: (w * 0.3).T, (6, 64)),
}
X = normal(3, 5, 64)


@pytest.mark.parametrize("name", ["int3", "nf4", "mxfp4", "mxint8", "nvfp4"])
@pytest.mark.parametrize("view", VIEWS)
def test_blocks_follow_a_weight_through_views(view, name):
    see, shape = VIEWS[view]
    form, w = FORMATS[name], normal(0, *shape)

    def f(w, x):
        return x @ see(w)

    _, _, q, simulated, converted = everything(f, policy_of(form, group_of(form)), w, X)
    assert q.scale.shape != (1,) * w.ndim
    assert close(simulated, X @ see(q.dequantize()), TERMS)
    assert close(converted, simulated, TERMS)


@pytest.mark.parametrize("cut", [slice(8, 72), slice(None, None, 2)])
def test_a_slice_that_cuts_blocks_along_a_contracted_axis_is_contracted_in_smaller_ones(cut):

    def f(w, x):
        return x @ w[cut]

    w = normal(0, 128, 6)
    plan = plan_of(f, policy_of(jnp.int4, jqx.per_group(32)), w, X)
    q = jqx.quantize_params(w, plan)
    assert close(jqx.simulate(f, plan)(w, X), f(q.dequantize(), X), TERMS)
    assert close(jqx.convert(f, plan)(q, X), f(q.dequantize(), X), TERMS)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_a_scaled_weight_of_a_block_format_keeps_its_codes(name):
    form, w = FORMATS[name], normal(0, 64, 6)
    plan = plan_of(product, policy_of(form, group_of(form)), w, X)
    q = jqx.quantize_params(w, plan)
    scaled = q.scaled(0.3)
    assert jnp.array_equal(scaled.values, q.values)
    assert close(scaled.dequantize(), 0.3 * q.dequantize())


def test_the_format_of_a_foreign_block_is_refused():
    """Scales of one shape, in one number, of another format."""
    w = normal(0, 64, 6)
    plans = [
        plan_of(product, policy_of(numerics.mxfp4, jqx.per_group(32)), w, X),
        plan_of(product, policy_of(numerics.mxfp8_e4m3, jqx.per_group(32)), w, X),
    ]
    with pytest.raises(ValueError, match="does not fit the plan"):
        jqx.convert(product, plans[0])(jqx.quantize_params(w, plans[1]), X)


def activations_in(group):
    return jqx.Policy([jqx.Rule(activation=jqx.QSpec(jnp.int8, group, dynamic=True))])


DIVIDE = ["divide", "tail=True"]
REFUSED = {
    **{
        f"{name} in groups": (policy_of(FORMATS[name], group_of(FORMATS[name])), 100, DIVIDE)
        for name in ("int3", "nf4", "mxfp4", "nvfp4")
    },
    "activations in groups": (activations_in(jqx.per_group(48)), 64, DIVIDE[:1]),
    **{
        f"blocks of {sizes}": (
            policy_of(numerics.mxfp4, jqx.per_block(sizes)),
            64,
            ["mxfp4 has blocks of 32"],
        )
        for sizes in ({0: 16, 1: 1}, {0: 32}, {1: 32}, {0: 64, 1: 1})
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_blocks_that_do_not_fit_are_refused_where_they_are_planned(name):
    policy, k, facts = REFUSED[name]
    f = lambda p, x: x @ p["layer"]["w"]  # noqa: E731
    with pytest.raises(ValueError) as error:
        plan_of(f, policy, {"layer": {"w": normal(0, k, 64)}}, normal(3, 7, k))
    text = "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])
    assert all(fact in text for fact in (*facts, "layer/w")), text


@pytest.mark.parametrize("granularity", [jqx.per_group(16), jqx.per_channel(), jqx.per_tensor()])
def test_a_block_format_without_its_blocks_is_no_spec(granularity):
    with pytest.raises(ValueError, match=r"mxfp4 has blocks of 32"):
        jqx.QSpec(numerics.mxfp4, granularity)


def test_blocks_of_both_axes_of_a_weight_are_converted():
    """32 elements in blocks of 8 by 4, also along the axis that is kept."""
    w = normal(0, 64, 8)
    for form, sizes in ((numerics.mxfp4, {0: 8, 1: 4}), (jnp.int8, {0: 16, 1: 2})):
        *_, q, simulated, converted = everything(
            product, policy_of(form, jqx.per_block(sizes)), w, X
        )
        assert q.scale.shape == tuple(n // sizes[i] for i, n in enumerate(w.shape))
        assert close(converted, simulated, TERMS)


def test_gradients_reach_a_weight_in_blocks_and_its_input():
    """Straight through: no weight is clipped under a scale that covers it."""
    w = normal(0, 64, 6)
    for form in (numerics.int5, jnp.float8_e4m3fn):
        plan = plan_of(product, policy_of(form, jqx.per_group(32)), w, X)
        loss = lambda w, x, plan=plan: jqx.simulate(product, plan)(w, x).sum()  # noqa: E731
        dw, dx = jax.jit(jax.grad(loss, (0, 1)))(w, X)
        assert close(dw, jnp.broadcast_to(X.sum(0)[:, None], w.shape), TERMS)
        grid = jqx.quantize_params(w, plan).dequantize()
        assert close(dx, jnp.broadcast_to(grid.sum(1), X.shape), TERMS)


def test_specs_say_their_format_in_the_table_of_a_plan():
    params = params_for(100)
    for form in FORMATS.values():
        spec = jqx.QSpec(form, group_of(form, tail=True))
        plan = plan_of(one_layer, jqx.Policy([jqx.Rule(weight=spec)]), params, normal(3, 7, 100))
        assert format_of(spec.qtype).name in str(plan)
        assert hash(plan) == hash(dataclasses.replace(plan))
        assert np.all([weight.spec.granularity.tail for weight in plan.weights])
