import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.presets import w8a8, w8a8_dynamic, w8a16

from ..models.transforms import MODELS, jitted, jitted_params, mlp, mlp_params, normal, plan_of

X = normal(3, 7, 16)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_calibration_returns_the_float_result(model, wrap):
    f, make = MODELS[model]
    params = make()
    plan = plan_of(f, w8a8(), params, X)
    out, _ = wrap(jqx.calibrate(f, plan))(params, X)
    assert jnp.array_equal(out, wrap(f)(params, X))


def test_statistics_are_those_of_each_operand():
    params = mlp_params()
    plan = plan_of(mlp, w8a8(), params, X)
    _, stats = jqx.calibrate(mlp, plan)(params, X)
    hidden = jax.nn.relu(X @ params["w"] + params["b"][None])
    assert set(stats) == {"w:dot_general:lhs", "v:dot_general:lhs"}
    assert stats["w:dot_general:lhs"].largest == jnp.abs(X).max()
    assert stats["v:dot_general:lhs"].largest == jnp.abs(hidden).max()


def test_statistics_of_a_helper_called_twice_are_kept_apart():
    params = jitted_params()
    plan = plan_of(jitted, w8a8(), params, X)
    _, stats = jax.jit(jqx.calibrate(jitted, plan))(params, X)
    assert set(stats) == {f"{name}:dot_general:lhs" for name in ("w", "b", "v")}


def test_statistics_of_tied_sites_are_numbered():
    def f(w, x):
        return (x @ w) @ w

    plan = plan_of(f, w8a8(), jnp.eye(2), jnp.ones((1, 2)))
    _, stats = jqx.calibrate(f, plan)(jnp.eye(2) * 3, jnp.ones((1, 2)))
    assert float(stats[":dot_general:lhs"].largest[0, 0]) == 1.0
    assert float(stats[":dot_general#1:lhs"].largest[0, 0]) == 3.0


@pytest.mark.parametrize("calibrator", [jqx.calibrators.absmax, jqx.calibrators.minmax], ids=str)
def test_merged_shards_equal_one_pass(calibrator):
    params = mlp_params()
    plan = plan_of(mlp, w8a8("w", activation={"calibrator": calibrator}), params, X)
    observe = jax.jit(jqx.calibrate(mlp, plan))
    whole = observe(params, X)[1]
    a, b, c = (observe(params, part)[1] for part in (X[:2], X[2:3], X[3:]))
    merge = jqx.merge_stats
    left, right = merge(plan, merge(plan, a, b), c), merge(plan, a, merge(plan, b, c))
    for merged in (left, right):
        scales = jqx.affines(plan, merged), jqx.affines(plan, whole)
        assert jax.tree.all(jax.tree.map(jnp.array_equal, *scales))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, left, right))


def test_scales_follow_the_largest_magnitude():
    params = mlp_params()
    plan = plan_of(mlp, w8a8(), params, X)
    affines = jqx.affines(plan, jqx.calibrate(mlp, plan)(params, X)[1])
    expected = np.float32(np.abs(np.asarray(X)).max()) / np.float32(127)
    assert affines["w:dot_general:lhs"].scale.shape == (1, 1)
    assert np.asarray(affines["w:dot_general:lhs"].scale)[0, 0] == expected


def test_an_output_spec_is_observed_too():
    rule = jqx.Rule("w", output=jqx.QSpec(jnp.int8))
    params = mlp_params()
    plan = plan_of(mlp, jqx.Policy([rule]), params, X)
    _, stats = jqx.calibrate(mlp, plan)(params, X)
    assert list(stats) == ["w:dot_general:out"]
    assert stats["w:dot_general:out"].largest == jnp.abs(X @ params["w"]).max()


@pytest.mark.parametrize("policy", [w8a8_dynamic(), w8a16()], ids=["dynamic", "weight only"])
def test_nothing_is_observed_where_nothing_is_static(policy):
    params = mlp_params()
    plan = plan_of(mlp, policy, params, X)
    assert jqx.calibrate(mlp, plan)(params, X)[1] == {}
    assert jqx.affines(plan, {}) == {}


def test_quantized_parameters_are_dequantized():
    params = mlp_params()
    plan = plan_of(mlp, w8a8(), params, X)
    q = jqx.quantize_params(params, plan)
    real = {**params, "w": q["w"].dequantize(), "v": q["v"].dequantize()}
    assert jnp.array_equal(jqx.calibrate(mlp, plan)(q, X)[0], mlp(real, X))


def test_the_float_function_is_left_as_it_was():
    f, params = jax.jit(jitted), jitted_params()
    before = f(params, X)
    plan = plan_of(f, w8a8(), params, X)
    affines = jqx.affines(plan, jqx.calibrate(f, plan)(params, X)[1])
    jqx.convert(f, plan, affines)(params, X)
    jqx.simulate(f, plan, affines)(params, X)
    assert f._cache_size() == 1
    assert jnp.array_equal(f(params, X), before) and f._cache_size() == 1


def test_never_observed_sites_are_named():
    params = mlp_params()
    plan = plan_of(mlp, w8a8(), params, X)
    empty = {
        key: spec.calibrator.empty(spec.granularity.scale_shape((7, 16)))
        for key, spec in plan.static_specs().items()
    }
    with pytest.raises(ValueError, match=r"never observed(.|\n)*w:dot_general:lhs"):
        jqx.affines(plan, empty)


def test_foreign_statistics_are_refused():
    params = mlp_params()
    plan = plan_of(mlp, w8a8(), params, X)
    _, stats = jqx.calibrate(mlp, plan)(params, X)
    partial = {"w:dot_general:lhs": stats["w:dot_general:lhs"]}
    with pytest.raises(ValueError, match="`stats` does not have the entries"):
        jqx.affines(plan, partial)
    with pytest.raises(ValueError, match="`b` does not have the entries"):
        jqx.merge_stats(plan, stats, {**stats, "other": stats["w:dot_general:lhs"]})


def test_a_plan_for_other_parameters_is_refused_by_the_first_difference():
    params = mlp_params()
    plan = plan_of(mlp, w8a8(), params, X)
    wider = {**params, "v": normal(4, 6, 24)}
    with pytest.raises(ValueError, match=r"parameter v: float32\[6, 24\](.|\n)*float32\[5, 24\]"):
        jqx.calibrate(mlp, plan)(wider, X)
    with pytest.raises(ValueError, match="another function"):
        jqx.calibrate(lambda p, x: mlp(p, x) @ p["v"], plan)(params, X)


def test_activations_beside_a_weight_that_is_quantized_already():
    def f(p, x):
        return jnp.tanh(x @ p["w"])

    w = jqx.QTensor.quantize(jnp.ones((32, 16)), "int8")
    plan = jqx.make_plan(f, jqx.Policy([jqx.Rule("w", activation="int8")]))(
        {"w": w}, jnp.ones((4, 32))
    )
    out, stats = jqx.calibrate(f, plan)({"w": w}, 3 * jnp.ones((4, 32)))
    assert out.shape == (4, 16)
    (affine,) = jqx.affines(plan, stats).values()
    assert affine.scale == jqx.QTensor.quantize(3 * jnp.ones((4, 32)), "int8").scale
