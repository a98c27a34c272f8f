"""A static scale comes from a calibration, or is asked for from the values at hand; never else."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jqx

from ..models.transforms import mlp, mlp_params, normal, plan_of, relative

PARAMS = {"w": normal(0, 16, 32), "v": normal(1, 32, 8)}
X = normal(2, 4, 16)
OUTPUT = jqx.Policy([jqx.Rule(weight=jqx.QSpec(jnp.int8), output=jqx.QSpec(jnp.int8))])
STATIC = {"activations": jqx.presets.w8a8(), "results": OUTPUT}
TRANSFORMS = {
    "convert": jqx.convert,
    "simulate": jqx.simulate,
    "simulate on integers": partial(jqx.simulate, backward=jnp.float32),
    "compare": jqx.compare,
}


def f(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"]


def each(test):
    test = pytest.mark.parametrize("transform", TRANSFORMS)(test)
    return pytest.mark.parametrize("static", STATIC)(test)


@each
@pytest.mark.parametrize("given", ["plan", "policy"])
def test_a_forgotten_calibration_is_an_error_that_names_the_sites(transform, static, given):
    policy = STATIC[static]
    plan = plan_of(f, policy, PARAMS, X)
    with pytest.raises(ValueError, match="no scale") as error:
        TRANSFORMS[transform](f, plan if given == "plan" else policy)(PARAMS, X)
    text = str(error.value)
    assert text.startswith(f"jqx.{transform.split()[0]}: ")
    assert all(key in text for key in plan.static_specs())
    assert len(plan.static_specs()) == 2
    assert "calibrate_batches" in text and 'affines="dynamic"' in text


@pytest.mark.parametrize("transform", ["convert", "simulate"])
def test_the_same_holds_under_jit_and_for_shapes(transform):
    g = TRANSFORMS[transform](f, plan_of(f, STATIC["activations"], PARAMS, X))
    mapped = jax.vmap(g, (None, 0))
    for call in (jax.jit(g), partial(jax.eval_shape, g), lambda p, x: mapped(p, x[None])):
        with pytest.raises(ValueError, match="no scale"):
            call(PARAMS, X)


def test_rows_of_other_batches_do_not_change_a_row_under_calibrated_scales():
    plan = plan_of(f, jqx.presets.w8a8(), PARAMS, X)
    affines = jqx.affines(plan, jqx.calibrate(f, plan)(PARAMS, X)[1])
    run = jax.jit(jqx.convert(f, plan, affines))
    large = X.at[1:].multiply(100.0)
    assert (run(PARAMS, X)[0] == run(PARAMS, large)[0]).all()
    asked = jax.jit(jqx.convert(f, plan, "dynamic"))
    assert not (asked(PARAMS, X)[0] == asked(PARAMS, large)[0]).all()


@pytest.mark.parametrize("static", STATIC)
def test_dynamic_computes_scales_from_the_values_of_the_call(static):
    plan = plan_of(f, STATIC[static], PARAMS, X)
    for transform in ("convert", "simulate"):
        found = jax.jit(TRANSFORMS[transform](f, plan, "dynamic"))(PARAMS, X)
        assert relative(found, f(PARAMS, X)) < 0.02  # a largest value of 4 in steps of 1 / 32
    assert jqx.compare(f, plan, "dynamic")(PARAMS, X).sites


def test_what_has_no_static_scale_needs_none():
    for policy in (jqx.presets.w8a8_dynamic(), jqx.presets.w4a16(block=8)):
        plan = plan_of(f, policy, PARAMS, X)
        assert jqx.convert(f, plan)(PARAMS, X).shape == (4, 8)
        assert jqx.convert(f, plan, {})(PARAMS, X).shape == (4, 8)


@pytest.mark.parametrize("given", ["calibrated", 1.0, [("a", 1)]])
@pytest.mark.parametrize("transform", ["convert", "simulate", "compare"])
def test_other_values_of_affines_are_refused(transform, given):
    plan = plan_of(f, jqx.presets.w8a8(), PARAMS, X)
    with pytest.raises(TypeError, match="`affines` is not a dict of scales"):
        TRANSFORMS[transform](f, plan, given)(PARAMS, X)


def test_what_computes_nothing_and_what_calibrates_needs_no_scales():
    plan = plan_of(mlp, jqx.presets.w8a8(), mlp_params(), X)
    assert jqx.affines(plan, jqx.calibrate(mlp, plan)(mlp_params(), X)[1])
    assert len(jqx.explain(mlp, mlp_params(), X, plan=plan).sites) == 2


@pytest.mark.parametrize("split", [False, True])
def test_scales_of_weights_are_those_that_they_are_quantized_with(split):
    def scanned(p, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])[0] @ p["head"]

    params = {"layers": normal(0, 3, 16, 16), "head": normal(1, 16, 8)}
    policy = jqx.presets.w8a16("head") + jqx.presets.w4a16("layers", block=8)
    policy = jqx.presets.w8a16("layers[0]") + policy if split else policy
    plan = plan_of(scanned, policy, params, X)
    found = jqx.affines(plan, {}, params)
    assert set(found) == {weight.key for weight in plan.weights}
    expected = jqx.quantize_params(params, plan)
    again = jqx.quantize_params(params, plan, found)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), expected, again)
    assert jax.tree.all(same)
    assert jqx.affines(plan, {}) == {}
