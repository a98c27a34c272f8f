"""Several weights joined into one operand: each keeps its scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx

from ..models.forms import ACTIVATION, POLICIES, STEP, WEIGHT, K, act, rows, weights

BOTH = POLICIES["weights and activations"]


def params():
    """Two weights [K, K] with channels that reach 1.75, the other's twice that."""
    w = weights()
    return {"a": w[0], "b": 2 * w[1]}


def on_grid(params):
    return {"a": jnp.round(params["a"] * 4) / 4, "b": jnp.round(params["b"] * 2) / 2}


def on_steps(x):
    return jqx.quantize_dequantize(x, jnp.float32(STEP), qtype=jnp.int8)


def fused(p, x):
    a, b = jnp.split(x @ jnp.concatenate([p["a"], p["b"]], axis=1), 2, axis=1)
    return a - b


def fused_and_turned(p, x):
    return x @ jnp.concatenate([p["a"].T, p["b"][::-1].T], axis=0).T


def above_each_other(p, x):
    return jnp.concatenate([x, x[:, ::-1]], axis=1) @ jnp.concatenate([p["a"], p["b"]])


def stacked(p, x):
    return lax.scan(lambda c, w: (act(c @ w), c), x, jnp.stack([p["a"], p["b"]]))


FUNCTIONS = {f.__name__: f for f in (fused, fused_and_turned, above_each_other, stacked)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_weights_that_are_joined_are_quantized_each_by_itself(name):
    f, p, x = FUNCTIONS[name], params(), rows()
    plan = jqx.make_plan(f, POLICIES["weights"])(p, x)
    assert [site.path for site in plan.sites] == ["a+b"] and plan.skipped == ()
    assert {(weight.path, weight.sites) for weight in plan.weights} == {("a", 1), ("b", 1)}
    expected = f(on_grid(p), x)
    assert not np.array_equal(jax.tree.leaves(expected)[0], jax.tree.leaves(f(p, x))[0])
    q = jqx.quantize_params(p, plan)
    np.testing.assert_array_equal(q["b"].dequantize(), on_grid(p)["b"])
    for found in (
        jax.jit(jqx.simulate(f, plan, "dynamic"))(p, x),
        jax.jit(jqx.convert(f, plan, "dynamic"))(q, x),
    ):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_activations_beside_joined_weights_are_quantized():
    p, x = params(), rows()
    plan = jqx.make_plan(fused, BOTH)(p, x)
    assert list(plan.static_specs()) == ["a+b:dot_general:lhs"]
    expected = fused(on_grid(p), on_steps(x))
    np.testing.assert_array_equal(jqx.simulate(fused, plan, "dynamic")(p, x), expected)
    np.testing.assert_array_equal(
        jax.jit(jqx.convert(fused, plan, "dynamic"))(jqx.quantize_params(p, plan), x), expected
    )


def test_scales_that_differ_along_the_sum_stay_apart():
    """`a` above `b` along the contracted axis: a scale for each, in blocks of K."""
    p, x = params(), rows()
    plan = jqx.make_plan(above_each_other, BOTH)(p, x)
    wide = jnp.concatenate([x, x[:, ::-1]], axis=1)
    w = on_grid(p)
    expected = on_steps(wide) @ jnp.concatenate([w["a"], w["b"]])
    q = jqx.quantize_params(p, plan)
    joined = jqx.QTensor.concatenate([q["a"], q["b"]])
    assert joined.scale.shape == (2, K)
    np.testing.assert_array_equal(
        jax.jit(jqx.convert(above_each_other, plan, "dynamic"))(q, x), expected
    )


def test_rules_that_part_joined_weights_leave_them_in_float():
    policy = jqx.Policy([jqx.Rule("b", weight=jqx.QSpec(jnp.int8)), *POLICIES["weights"].rules])
    plan = jqx.make_plan(fused, policy)(params(), rows())
    assert plan.sites == () and plan.weights == ()
    assert [skip.reason for skip in plan.skipped] == [
        "the weights 'a' and 'b' are joined, but fall under different rules"
    ]


def test_a_weight_joined_with_an_activation_is_no_weight():
    def f(p, x):
        return x @ jnp.concatenate([p["a"], x[:, :K]])[:K] + x @ p["b"]

    plan = jqx.make_plan(f, POLICIES["weights"])(params(), rows())
    assert [site.path for site in plan.sites] == ["b"]
    assert "no weight reaches it" in plan.skipped[0].reason


def test_views_of_one_weight_that_are_joined_are_that_weight():
    f = lambda w, x: x @ jnp.roll(w, 1, axis=1)  # noqa: E731
    plan = jqx.make_plan(f, jqx.Policy([jqx.Rule(weight=WEIGHT, activation=ACTIVATION)]))(
        weights()[0], rows()
    )
    assert [(weight.path, weight.sites) for weight in plan.weights] == [("", 1)]
    w = weights()[0]
    found = jax.jit(jqx.convert(f, plan, "dynamic"))(jqx.quantize_params(w, plan), rows())
    np.testing.assert_array_equal(found, f(jnp.round(w * 4) / 4, on_steps(rows())))
