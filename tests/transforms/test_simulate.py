import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.presets import w8a8, w8a8_dynamic, w8a16

from .models import close, mlp, mlp_params, normal, plan_of, quantized_mlp, relative

X = normal(3, 7, 16)


def test_simulation_equals_quantization_written_out_by_hand():
    params = mlp_params()
    policy = w8a8_dynamic(activation={"granularity": jqx.per_tensor()})
    out = jqx.simulate(mlp, plan_of(mlp, policy, params, X))(params, X)
    # Same codes; what differs is float32 accumulation over 24 products and three roundings.
    assert relative(out, quantized_mlp(params, X)) < 30 * 2.0**-24


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_given_scales_are_used(wrap):
    def f(w, x):
        return x @ w

    w = jnp.eye(4)
    plan = plan_of(f, w8a8(weight={"qtype": jnp.int16}), w, X[:, :4])
    affines = {":dot_general:lhs": jqx.calibrators.Affine(jnp.full((1, 1), 0.5))}
    out = wrap(jqx.simulate(f, plan, affines))(w, X[:, :4])
    assert close(out, jnp.round(X[:, :4] * 2) / 2)


def test_a_given_weight_scale_is_used():
    def f(w, x):
        return x @ w

    w = jnp.array([[0.4], [1.2]])
    plan = plan_of(f, w8a16(), w, jnp.eye(2))
    affine = jqx.calibrators.Affine(jnp.full((1, 1), 1.0))
    out = jqx.simulate(f, plan, {":weight": affine})(w, jnp.eye(2))
    assert jnp.array_equal(out, jnp.round(w))


def test_every_use_of_a_weight_sees_the_rounded_one():
    def f(w, x):
        return x @ w, w

    w = normal(0, 16, 4)
    plan = plan_of(f, w8a16(weight={"qtype": jnp.int4}), w, X)
    grid = jqx.QTensor.quantize(w, plan.weights[0].spec).dequantize()
    out, seen = jqx.simulate(f, plan)(w, X)
    assert jnp.array_equal(seen, grid) and jnp.array_equal(out, X @ grid)


def test_gradients_are_straight_through():
    params = mlp_params()
    plan = plan_of(mlp, w8a16(weight={"qtype": jnp.int4}), params, X)
    simulated = jqx.simulate(mlp, plan)
    got = jax.jit(jax.grad(lambda p: simulated(p, X).sum()))(params)
    q = jqx.quantize_params(params, plan)
    grid = {**params, "w": q["w"].dequantize(), "v": q["v"].dequantize()}
    # No weight is clipped under its own absmax, so the estimator passes every cotangent.
    expected = jax.jit(jax.grad(lambda p: mlp(p, X).sum()))(grid)
    for name in params:
        assert close(got[name], expected[name]), name


def test_gradients_reach_given_scales():
    def f(w, x):
        return (x @ w).sum()

    w, x = jnp.ones((2, 1)), jnp.array([[3.0, 0.25]])
    plan = plan_of(f, w8a8(), w, x)

    def loss(affines):
        return jqx.simulate(f, plan, affines)(w, x)

    affines = {":dot_general:lhs": jqx.calibrators.Affine(jnp.full((1, 1), 0.01))}
    gradient = jax.grad(loss)(affines)[":dot_general:lhs"].scale
    assert close(gradient, jnp.full((1, 1), 127.0))  # 3.0 is clipped to 127 * scale, 0.25 is inside


def test_bfloat16_functions_stay_bfloat16():
    def f(w, x):
        return x @ w

    w, x = normal(0, 16, 4).astype(jnp.bfloat16), X.astype(jnp.bfloat16)
    out = jqx.simulate(f, plan_of(f, w8a8_dynamic(), w, x))(w, x)
    assert out.dtype == jnp.bfloat16


def test_an_output_is_rounded_to_its_grid():
    def f(w, x):
        return x @ w

    rule = jqx.Rule(output=jqx.QSpec(jnp.int4, dynamic=True))
    out = jqx.simulate(f, plan_of(f, jqx.Policy([rule]), jnp.eye(16), X))(jnp.eye(16), X)
    assert len(np.unique(np.asarray(out))) <= 15


def test_asymmetric_activations_are_simulated():
    fields = {"qtype": jnp.uint8, "symmetric": False, "calibrator": jqx.calibrators.minmax}
    params = mlp_params()
    plan = plan_of(mlp, w8a8(activation=fields), params, X)
    affines = jqx.affines(plan, jqx.calibrate(mlp, plan)(params, X)[1])
    assert affines["v:dot_general:lhs"].zero_point == 0  # a relu's range starts at zero
    assert relative(jqx.simulate(mlp, plan, affines)(params, X), mlp(params, X)) < 0.02


def test_a_policy_stands_for_its_plan():
    params = mlp_params()
    plan = plan_of(mlp, w8a8_dynamic(), params, X)
    by_plan = jqx.simulate(mlp, plan)(params, X)
    assert jnp.array_equal(jqx.simulate(mlp, w8a8_dynamic())(params, X), by_plan)


@pytest.mark.parametrize("transform", [jqx.simulate, jqx.convert])
def test_affines_must_fit_the_plan(transform):
    params = mlp_params()
    plan = plan_of(mlp, w8a8(), params, X)
    affine = jqx.calibrators.Affine(jnp.ones((1, 1)))
    with pytest.raises(ValueError, match=r"missing: v:dot_general:lhs"):
        transform(mlp, plan, {"w:dot_general:lhs": affine})(params, X)
    with pytest.raises(ValueError, match=r"unknown: nothing"):
        transform(mlp, plan, {"nothing": affine})(params, X)


def test_simulation_under_vmap_equals_a_loop():
    params = mlp_params()
    plan = plan_of(mlp, w8a8_dynamic(), params, X[0][None])
    simulated = jqx.simulate(mlp, plan)
    mapped = jax.vmap(lambda x: simulated(params, x))(X[:, None])
    looped = jnp.stack([simulated(params, x[None]) for x in X])
    assert close(mapped, looped)
