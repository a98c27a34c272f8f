"""`train`: gradients through transforms and control flow, beside those of plain JAX."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jqx
from jqx.recipes import Products, Recipe

from ..arrays import normal

FINE = Recipe(
    "fine", {".*": Products(("int8:token", "int8:channel"), *[(jnp.float32, jnp.float32)] * 2)}
)
"""Gradients in float of the operands themselves, so that they equal those of a float layer."""

PRODUCTS = FINE.rules[0][1]

X, W, V = normal(0, 8, 32), normal(1, 32, 32), normal(2, 3, 32, 32) / 6


def planned(f, recipe, *args):
    return jqx.make_plan(f, recipe.policy)(*args)


FORMS = {
    "x w": (lambda w, x: x @ w, W, X),
    "x w.T": (lambda w, x: x @ w.T, W, X),
    "w x": (lambda w, x: w @ x.T, W, X),
    "heads": (lambda w, x: jnp.einsum("bi,hio->bho", x, w), V, X),
    "two summed axes": (lambda w, x: jnp.einsum("bhi,hio->bo", x, w), V, normal(3, 8, 3, 32)),
    "experts": (lambda w, x: jnp.einsum("ebi,eio->ebo", x, w), V, normal(4, 3, 8, 32)),
    "scan": (lambda w, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0], V, X),
    "remat": (jax.checkpoint(lambda w, x: jnp.tanh(x @ w)), W, X),
    "jit": (jax.jit(lambda w, x: jnp.tanh(x @ w)), W, X),
    "cond": (lambda w, x: lax.cond(x[0, 0] > 9, lambda: x @ w, lambda: x @ (2 * w)), W, X),
    "vmap": (lambda w, x: jax.vmap(lambda row: row @ w)(x), W, X),
    "experts with any number of rows": (
        lambda w, x: lax.ragged_dot(x, w, jnp.array([3, 0, 4])),  # and one row without an expert
        V,
        X,
    ),
    "convolution": (
        lambda w, x: lax.conv_general_dilated(
            x, w, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
        ),
        normal(5, 3, 3, 4, 16),
        normal(6, 2, 6, 5, 8),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_with_products_in_float_the_gradients_are_those_of_float(name):
    """The forward product alone is rounded: its result is that of `convert`."""
    f, w, x = FORMS[name]
    plan = planned(f, FINE, w, x)
    trained = jqx.train(f, plan, FINE)
    cotangent = jax.random.normal(jax.random.key(9), jax.eval_shape(f, w, x).shape)

    def loss(run):
        return lambda w, x: jnp.sum(run(w, x) * cotangent)

    out, found = jax.jit(
        jax.value_and_grad(lambda w, x: loss(lambda w, x: trained(w, {}, x))(w, x), (0, 1))
    )(w, x)
    expected, gradients = jax.jit(jax.value_and_grad(loss(f), (0, 1)))(w, x)
    limit = 0.05 if name in ("scan", "remat", "jit") else 1e-5  # tanh is at a rounded value
    for a, b in zip(found, gradients, strict=True):
        assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b)
    assert out != expected
    assert np.isfinite(out)


def test_each_step_of_a_scan_each_site_and_each_key_draws_numbers_of_its_own():
    recipe = jqx.recipes.nvfp4()
    w = jnp.stack([W, W])

    def f(w, x):
        _, outs = lax.scan(lambda h, w: (h, h @ w), x, w)
        return outs, x @ w[0]

    plan = planned(f, recipe, w, X)
    trained = jqx.train(f, plan, recipe)

    @jax.jit
    def gradients(key):
        _, pull = jax.vjp(lambda x: trained(w, {}, x, key=key), X)
        ones = (jnp.ones((2, 8, 32)).at[1].set(0), jnp.zeros((8, 32)))
        second = (jnp.ones((2, 8, 32)).at[0].set(0), jnp.zeros((8, 32)))
        outside = (jnp.zeros((2, 8, 32)), jnp.ones((8, 32)))
        return [pull(ct)[0] for ct in (ones, second, outside)]

    draws = [*gradients(jax.random.key(0)), gradients(jax.random.key(1))[0]]
    again = gradients(jax.random.key(0))
    assert all(bool((a == b).all()) for a, b in zip(draws[:3], again, strict=True))
    different = [bool((a != b).any()) for i, a in enumerate(draws) for b in draws[:i]]
    assert all(different)


def test_each_device_draws_numbers_of_its_own():
    """Two devices with the same rows; all rounding of results' gradients is stochastic."""
    dy = jqx.recipes.Rounded("int8:token", "stochastic")
    mine = Recipe("mine", {".*": Products(("int8", "int8"), (dy, "float32"), ("float32", dy))})
    f = lambda w, x: jnp.sum(jnp.tanh(x @ w))  # noqa: E731
    step = jqx.train(f, planned(f, mine, W, X), mine)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda w, x, key: jax.grad(lambda x: step(w, {}, x, key=key))(x),
        mesh=mesh,
        in_specs=(P(), P("d"), P()),
        out_specs=P("d"),
    )
    first, second = np.split(jax.jit(mapped)(W, jnp.tile(X, (2, 1)), jax.random.key(0)), 2)
    assert (first != second).any()
    assert np.linalg.norm(first - second) < 0.3 * np.linalg.norm(first)


def test_a_plan_shows_the_products_and_is_stored_with_them():
    recipe = jqx.recipes.nvfp4(exclude="head")
    params = {"a": W, "head": normal(7, 32, 4)}
    plan = planned(lambda p, x: (x @ p["a"]) @ p["head"], recipe, params, X)
    assert str(plan.sites[0].products) == str(recipe.rules[1][1])
    lines = str(plan).splitlines()[-3:]
    assert [line.split()[:3] for line in lines] == [
        ["rule", "1", name] for name in ("forward", "dgrad", "wgrad")
    ]
    assert "stochastic x nvfp4_16x16" in lines[1]
    assert "stochastic, hadamard 16" in lines[2]
    stored = json.dumps(plan.to_dict())
    assert jqx.Plan.from_dict(json.loads(stored)) == plan
    floats = planned(lambda w, x: x @ w, FINE, W, X)
    assert jqx.Plan.from_dict(json.loads(json.dumps(floats.to_dict()))) == floats


def test_a_weight_that_a_function_closes_over_is_rounded_as_any_other_in_a_loop():
    """XLA on CPU evaluates what depends on constants alone before the program runs."""
    recipe = jqx.recipes.fp8_rowwise()
    plan = planned(lambda w, x: x @ w, recipe, W, X)
    step = jqx.train(lambda w, x: x @ w, plan, recipe)
    rows = X.reshape(2, 4, 32)
    weight = np.asarray(W)

    def gradients(w):
        return lax.map(
            lambda x: jax.vjp(lambda x: step(w, {}, x), x)[1](jnp.ones((4, 32)))[0], rows
        )

    expected = jax.jit(gradients)(W)
    for constant in (weight, jnp.asarray(weight)):
        found = jax.jit(lambda: gradients(constant))()  # noqa: B023
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_layers_that_a_recipe_leaves_out_are_in_float():
    params = {"a": W, "head": normal(7, 32, 4)}
    f = lambda p, x: (x @ p["a"]) @ p["head"]  # noqa: E731
    recipe = jqx.recipes.fp8(exclude="head")
    plan = planned(f, recipe, params, X)
    assert [site.path for site in plan.sites] == ["a"]
    assert jqx.recipes.fp8(exclude=".*").rules == ((".*", None),)
    text = str(jax.make_jaxpr(jqx.train(f, plan, recipe))(params, {}, X))
    assert "f8_e4m3fn" in text and text.count("custom_vjp_call") == 1


def test_a_lookup_stays_in_float_and_so_does_a_head_that_is_tied_to_its_table():
    recipe, tokens = jqx.recipes.int8(), jnp.array([3, 0, 31])
    params = {"embed": normal(7, 32, 32), "w": W}
    f = lambda p, tokens: jnp.tanh(p["embed"][tokens] @ p["w"])  # noqa: E731
    plan = planned(f, recipe, params, tokens)
    assert [site.path for site in plan.sites] == ["w"]
    assert [item.reason for item in plan.skipped] == ["rule 0 leaves lookups in float"]
    found = jax.grad(lambda p: jqx.train(f, plan, recipe)(p, {}, tokens).sum())(params)
    exact = jax.grad(lambda p: f(p, tokens).sum())(params)
    for name in params:
        error = jnp.linalg.norm(found[name] - exact[name])
        assert error < 0.05 * jnp.linalg.norm(exact[name])
    tied = planned(lambda p, tokens: f(p, tokens) @ p["embed"].T, recipe, params, tokens)
    assert [site.path for site in tied.sites] == ["w"]
    assert "lookup of 'embed'" in str(tied)


def test_a_few_steps_of_training_follow_those_of_float():
    import optax

    x = jax.random.normal(jax.random.key(0), (64, 32))
    y = jnp.sin(x @ W / 6)
    params = {"a": normal(1, 32, 64) / 6, "b": normal(2, 64, 32) / 8}

    def loss(p, x, y):
        return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2)

    def final(step_loss):
        tx = optax.adam(1e-2)

        def step(carry, key):
            params, state = carry
            value, grads = jax.value_and_grad(step_loss)(params, key)
            updates, state = tx.update(grads, state)
            return (optax.apply_updates(params, updates), state), value

        keys = jax.random.split(jax.random.key(3), 60)
        with jax.numpy_dtype_promotion("standard"):  # optax adds Python numbers
            return jax.jit(lambda: lax.scan(step, (params, tx.init(params)), keys)[1][-1])()

    start, plain = loss(params, x, y), final(lambda p, key: loss(p, x, y))
    for name, least in (("int8", 0.99), ("mxfp8", 0.98)):
        recipe = getattr(jqx.recipes, name)()
        trained = jqx.train(loss, planned(loss, recipe, params, x, y), recipe)
        end = final(lambda p, key: trained(p, {}, x, y, key=key))  # noqa: B023
        assert start - end > least * (start - plain)


@pytest.mark.parametrize("name", ["int8", "mxfp8"])
def test_a_step_is_exported_for_several_platforms(name):
    """JAX 0.10.2 does not export `scaled_dot`, which a GPU runs for MXFP8."""
    recipe = getattr(jqx.recipes, name)()
    f = lambda w, x: jnp.sum((x @ w) ** 2)  # noqa: E731
    step = jax.jit(jax.grad(jqx.train(f, planned(f, recipe, W, X), recipe)))
    exported = export.export(step, platforms=("cpu", "cuda", "tpu"))(W, {}, X)
    np.testing.assert_array_equal(exported.call(W, {}, X), step(W, {}, X))


def test_calls_that_make_no_sense_are_refused():
    f, recipe = (lambda w, x: x @ w), jqx.recipes.int8()
    plan = planned(f, recipe, W, X)
    other = jqx.make_plan(f, jqx.presets.w8a8())(W, X)
    rule = jqx.Rule(weight="int8", activation="int8:channel:dynamic", output="int8:dynamic")
    rounded = jqx.make_plan(f, jqx.Policy([rule]))(W, X)
    squared = lambda w, x: w @ w.T  # noqa: E731
    experts = lambda w, x: lax.ragged_dot(x, w, jnp.array([3, 0, 5]))  # noqa: E731
    nvfp4 = jqx.recipes.nvfp4()
    cases = [
        (lambda: jqx.train(f, plan, "int8"), "pass a value of jqx.recipes"),
        (lambda: jqx.Rule(products=recipe), "pass a value of jqx.recipes.Products"),
        (lambda: jqx.Rule(weight="int4", products=PRODUCTS), "`weight` is not that of `products`"),
        (lambda: jqx.train(f, plan, recipe)(W), "the state is missing"),
        (lambda: jqx.train(f, plan, recipe)(W, X), "state"),
        (lambda: jqx.train(f, plan, jqx.recipes.nvfp4())(W, {}, X), "no key is given"),
        (lambda: jqx.train_state(recipe, plan), "pass the result of jqx.make_plan"),
        (
            lambda: jqx.train(squared, recipe.policy, recipe)(W, {}, X),
            "is not a product of an activation",
        ),
        (
            lambda: jqx.train(f, plan, jqx.recipes.fp8(exclude="other"))(W, {}, X),
            "the plan has other products",
        ),
        (
            lambda: jqx.train(experts, nvfp4.policy, nvfp4)(V, {}, X, key=jax.random.key(0)),
            "would mix the rows of experts",
        ),
        (lambda: jqx.train(f, rounded, recipe)(W, {}, X), "the plan has other products"),
        (lambda: jqx.train(f, other, jqx.recipes.fp8())(W, {}, X), "the plan has other products"),
    ]
    for call, text in cases:
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=text):
            call()
