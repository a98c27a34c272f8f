"""`simulate(..., backward=)`: forward on integers, backward in float."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..arrays import on_device
from ..models.forms import FORMS, POLICIES, WHILES, function, reference, rows, together, weights
from ..models.transforms import eighths, mlp, mlp_params, normal
from . import test_shard_map as devices
from .test_forms import CUSTOM, assert_same, plan_of

BOTH = "weights and activations"
slow = pytest.mark.slow


def gradients(*functions):
    """The gradients of several functions in their first two arguments, of one program."""

    def gradient(f):
        total = lambda *args: sum(jnp.sum(y) for y in jax.tree.leaves(f(*args)))  # noqa: E731
        return jax.grad(total, (0, 1))

    return together(*map(gradient, functions))


@pytest.mark.many
@pytest.mark.parametrize("name", FORMS)
def test_the_forward_pass_is_on_integers(name):
    """By jaxpr: no contraction of floats is left, but inside custom derivatives."""
    f = jqx.simulate(function(name), plan_of(name), "dynamic", backward=jnp.float32)
    w, x = weights(), rows()
    assert_same(*together(f, reference(name, BOTH))(w, x))
    text = jax.jit(f).lower(w, x).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    if name not in CUSTOM:
        assert products and not any("xf32" in line.split("->")[0] for line in products)


@pytest.mark.many
@pytest.mark.parametrize("name", [n for n in FORMS if FORMS[n] not in WHILES and n not in CUSTOM])
@pytest.mark.parametrize("policy", [pytest.param("weights", marks=slow), BOTH])
def test_gradients_are_those_of_what_is_quantized_by_hand(name, policy):
    f = jqx.simulate(function(name), plan_of(name, policy), "dynamic", backward=jnp.float32)
    w, x = weights(), rows()
    assert_same(*gradients(f, reference(name, policy))(w, x))


@pytest.mark.parametrize("name", CUSTOM)
def test_the_derivative_rule_of_the_user_is_kept(name):
    f, w, x = function(name), weights(), rows()
    plan = plan_of(name)
    own = jqx.simulate(f, plan, "dynamic", backward=jnp.float32)
    assert_same(*gradients(own, jqx.simulate(f, plan, "dynamic"))(w, x))


def test_the_backward_pass_contracts_in_the_dtype_asked_for():
    plan = jqx.make_plan(mlp, jqx.presets.w8a8())(mlp_params(), normal(3, 4, 16))
    f = jqx.simulate(mlp, plan, "dynamic", backward=jnp.bfloat16)
    loss = lambda p, x: jnp.sum(f(p, x) ** 2)  # noqa: E731
    text = jax.jit(jax.grad(loss)).lower(mlp_params(), normal(3, 4, 16)).as_text()
    products = [line.split(":")[-1] for line in text.splitlines() if "dot_general" in line]
    kinds = [
        "".join(k for k in ("xi8>", "xbf16>", "xf32>") if k in p.split("->")[0]) for p in products
    ]
    assert sorted(kinds) == ["xbf16>"] * 3 + ["xi8>"] * 2


def test_learned_scales_get_the_same_gradients():
    spec = jqx.QSpec(jnp.int8, gradient=jqx.gradients.lsq)
    weight = jqx.QSpec(jnp.int4, jqx.per_channel(), gradient=jqx.gradients.lsq)
    policy = jqx.Policy([jqx.Rule(weight=weight, activation=spec)])
    plan = jqx.make_plan(function("scan_xs"), policy)(weights(), rows())
    (key,) = plan.static_specs()
    affines = {
        key: jqx.calibrators.Affine(on_device([[[2.0**-7]], [[2.0**-6]]], np.float32)),
        ":weight": jqx.calibrators.Affine(on_device(np.full((2, 1, 6), 0.25, np.float32))),
    }

    def gradient(**options):
        def loss(affines):
            y, _ = jqx.simulate(function("scan_xs"), plan, affines, **options)(weights(), rows())
            return jnp.sum(y)

        return jax.grad(loss)

    expected, found = together(gradient(), gradient(backward=jnp.float32))(affines)
    assert all(np.any(np.asarray(g.scale)) for g in expected.values())
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", devices.FORMS)
def test_devices_each_contract_integers(name):
    f, w, x = devices.function(name), devices.weights(), eighths(1, devices.ROWS, devices.K)
    plan = jqx.make_plan(f, POLICIES[BOTH])(w, x)
    run = jqx.simulate(f, plan, "dynamic", backward=jnp.float32)
    functions = run, devices.reference(name, BOTH)
    assert_same(*together(*functions)(w, x))
    if name != "loops_inside":
        assert_same(*gradients(*functions)(w, x))


def test_quantized_weights_may_be_given():
    w, x, plan = weights(), rows(), plan_of("scan_xs")
    f = jqx.simulate(function("scan_xs"), plan, "dynamic", backward=jnp.float32)
    given = lambda w, x: f(jqx.quantize_params(w, plan), x)  # noqa: E731
    assert_same(*together(given, reference("scan_xs", BOTH))(w, x))


def test_weights_used_elsewhere_are_real_there():
    f = lambda w, x: (jnp.sum(x @ w[0]) + jnp.sum(w**2), w)  # noqa: E731
    w, x = weights(), rows()
    plan = jqx.make_plan(f, POLICIES[BOTH], unsupported="dequantize")(w, x)
    own = jqx.simulate(f, plan, "dynamic", backward=jnp.float32)
    assert_same(*together(own, jqx.simulate(f, plan, "dynamic"))(w, x))


def test_bad_arguments_are_refused():
    plan = plan_of("jitted")
    for dtype, fact in [(jnp.int8, "floating point"), ("fast", "not a dtype")]:
        with pytest.raises(TypeError, match=fact):
            jqx.simulate(function("jitted"), plan, "dynamic", backward=dtype)
    noisy = jqx.QSpec(jnp.int8, gradient=jqx.gradients.stochastic)
    policy = jqx.Policy([jqx.Rule(activation=noisy)])
    with pytest.raises(ValueError, match="which this estimator does not use"):
        jqx.simulate(function("jitted"), policy, "dynamic", backward=jnp.float32)(weights(), rows())


PRODUCTS = {
    "x @ w": ("bk,kn->bn", (6, 8), (8, 5)),
    "a tied head": ("bk,nk->bn", (6, 8), (5, 8)),
    "a tied head of sequences": ("btk,nk->btn", (2, 3, 8), (5, 8)),
    "heads": ("btk,khd->bthd", (2, 3, 8), (8, 2, 5)),
    "heads, joined": ("bthd,hdk->btk", (2, 3, 2, 5), (2, 5, 8)),
    "heads first": ("btk,hdk->bhtd", (2, 3, 8), (2, 5, 8)),
    "experts": ("ebk,ekn->ebn", (3, 4, 8), (3, 8, 5)),
    "experts last": ("bke,nek->ben", (4, 8, 3), (5, 3, 8)),
    "columns first": ("kb,kn->nb", (8, 6), (8, 5)),
    "two sums": ("jbk,nkj->bn", (3, 6, 8), (5, 8, 3)),
    "a row": ("k,kn->n", (8,), (8, 5)),
    "a column": ("bk,k->b", (6, 8), (8,)),
    "outer": ("b,n->bn", (6,), (5,)),
}


def of_products(p, x):
    """One result of each: of all patterns, a convolution, groups of rows, loops and remat."""
    found = {
        name: jnp.einsum(pattern, x[name], p[name]) for name, (pattern, *_) in PRODUCTS.items()
    }
    image, rows = x["heads first"][..., None], x["columns first"].T
    found["conv"] = jax.lax.conv(image.transpose(0, 3, 1, 2), p["conv"], (1, 1), "SAME")
    if "ragged" in p:
        sizes = jnp.array([2, 4], jnp.int32)
        found["ragged"] = jax.lax.ragged_dot(rows, p["ragged"], sizes)
    step = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w.T), None))
    found["scan"] = jax.lax.scan(step, rows, p["scan"])[0]
    found["vmap"] = jax.vmap(lambda row, w: row @ w.T, (0, None))(rows, p["scan"][0])
    return found


@pytest.mark.parametrize("around", ["jit", "vmap"])
def test_a_backward_pass_in_bfloat16_runs_for_every_order_of_dimensions(around):
    x = {name: normal(i, *shape) for i, (name, (_, shape, _)) in enumerate(PRODUCTS.items())}
    p = {name: normal(50 + i, *shape) for i, (name, (*_, shape)) in enumerate(PRODUCTS.items())}
    p |= {"conv": normal(80, 4, 1, 3, 3), "scan": normal(82, 2, 8, 8)}
    if around == "jit":  # JAX maps the backward pass of no other
        p["ragged"] = normal(81, 2, 8, 5)
    plan = jqx.make_plan(of_products, jqx.presets.w8a8_dynamic())(p, x)

    def gradients(dtype):
        simulated = jqx.simulate(of_products, plan, backward=dtype)
        loss = lambda p, x: sum(jnp.sum(jnp.sin(y)) for y in simulated(p, x).values())  # noqa: E731
        return jax.grad(loss, (0, 1))

    def both(p, x):
        return gradients(jnp.bfloat16)(p, x), gradients(jnp.float32)(p, x)

    if around == "vmap":
        both = jax.vmap(both, ({name: -1 for name in p}, None))
        p = jax.tree.map(lambda w: jnp.stack([w, 2 * w], -1), p)
    for own, right in zip(*map(jax.tree.leaves, jax.jit(both)(p, x)), strict=True):
        size = np.abs(right).max()
        assert np.abs(own - right).max() <= 2**-6 * size  # of products of two rounded factors
        assert np.linalg.norm(own - right) <= 2**-7 * np.linalg.norm(right)
