"""Converted functions: integer products, other programs and batches, weights of checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import QTensor
from jqx.presets import w8a8, w8a8_dynamic, w8a16

from ..arrays import assert_same
from ..models.transforms import (
    MODELS,
    close,
    mlp,
    mlp_params,
    normal,
    plan_of,
    product,
    quantized_mlp,
    relative,
)
from ..oracles.contractions import dtypes, equations_of
from ..tensor.test_offset_and_order import matrix

X, PARAMS = normal(3, 7, 16), mlp_params()
MINMAX = {"symmetric": False, "calibrator": jqx.calibrators.minmax}
POLICIES = {
    "w8a8": w8a8(),
    "w8a8 asymmetric": w8a8(weight=MINMAX, activation={**MINMAX, "qtype": jnp.uint8}),
    "w8a8 dynamic": w8a8_dynamic(),
    "w4a8 dynamic": w8a8_dynamic(weight={"qtype": jnp.int4}),
    "w2a4 dynamic": w8a8_dynamic(weight={"qtype": jnp.int2}, activation={"qtype": jnp.int4}),
    "w8a16": w8a16(),
    "w8a16 asymmetric": w8a16(weight={**MINMAX, "qtype": jnp.uint8}),
    "w8a8 per tensor": w8a8_dynamic(
        weight={"granularity": jqx.per_tensor()}, activation={"granularity": jqx.per_tensor()}
    ),
}


def dots(f, *args):
    """Returns (lhs dtype, rhs dtype, result dtype) of every dot in the jaxpr of `f`."""
    equations = [e for e in equations_of(f, *args) if e.primitive.name == "dot_general"]
    return [tuple(dtypes([*e.invars, *e.outvars])) for e in equations]


def prepared(model, policy):
    f, make = MODELS[model]
    params = make()
    plan = plan_of(f, policy, params, X)
    find_affines = jax.jit(
        lambda params, x: jqx.affines(plan, jqx.calibrate(f, plan)(params, x)[1])
    )
    return f, params, plan, find_affines(params, X)


@pytest.mark.many
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_converted_and_simulated_agree_eagerly_and_under_jit(model, policy):
    f, params, plan, affines = prepared(model, POLICIES[policy])
    q = jqx.quantize_params(params, plan)
    simulate, convert = (t(f, plan, affines) for t in (jqx.simulate, jqx.convert))
    run = lambda params, q, x: (simulate(params, x), convert(q, x), convert(params, x))  # noqa: E731
    simulated, *converted = jax.jit(run)(params, q, X)
    # Equal codes at every site, unless rounding in the layer before tips a value over a tie: that
    # moves one code of 7 * 24, by one step of at least 1/7 of the range (int4 activations).
    tie = 0.05 if "a4" in policy else 1e-3
    for out in (*converted, convert(q, X)):
        assert out.dtype == simulated.dtype
        assert relative(out, simulated) <= tie


@pytest.mark.parametrize("policy", ["w8a8", "w8a8 asymmetric", "w8a8 dynamic", "w4a8 dynamic"])
@pytest.mark.parametrize("model", MODELS)
def test_every_planned_contraction_multiplies_int8_into_int32(model, policy):
    f, params, plan, affines = prepared(model, POLICIES[policy])
    q = jqx.quantize_params(params, plan)
    actual = dots(jqx.convert(f, plan, affines), q, X)
    assert actual == [("int8", "int8", "int32")] * len(plan.sites)


@pytest.mark.parametrize(("transform", "roundings"), [(jqx.convert, 8), (jqx.simulate, 30)])
def test_results_equal_quantization_written_out_by_hand(transform, roundings):
    """The accumulators of integers are exact; in simulation float32 sums 24 products of them."""
    policy = w8a8_dynamic(activation={"granularity": jqx.per_tensor()})
    plan = plan_of(mlp, policy, PARAMS, X)
    out = transform(mlp, plan)(jqx.quantize_params(PARAMS, plan), X)
    assert relative(out, quantized_mlp(PARAMS, X)) < roundings * 2.0**-24


def test_the_optimized_hlo_holds_integer_dots_and_no_float_weight():
    plan = plan_of(mlp, w8a8_dynamic(), PARAMS, X)
    q = jqx.quantize_params(PARAMS, plan)
    text = jax.jit(jqx.convert(mlp, plan)).lower(q, X).compile().as_text()
    assert sum("= s32[" in line and " dot(" in line for line in text.splitlines()) == 2
    assert not any("= f32[" in line and " dot(" in line for line in text.splitlines())
    assert "f32[16,24]" not in text and "f32[5,24]" not in text


def test_weight_only_conversion_leaves_activations_in_float():
    plan = plan_of(mlp, w8a16(), PARAMS, X)
    q = jqx.quantize_params(PARAMS, plan)
    products = [e for e in equations_of(jqx.convert(mlp, plan), q, X) if "dot" in e.primitive.name]
    assert {tuple(dtypes([*e.invars, *e.outvars])) for e in products} == {("float32",) * 3}
    real = {**PARAMS, "w": q["w"].dequantize(), "v": q["v"].dequantize()}
    # The scale is applied after the sum instead of before: a few float32 roundings.
    assert relative(jqx.convert(mlp, plan)(q, X), mlp(real, X)) < 40 * 2.0**-24


def test_a_quantized_activation_meets_a_float_weight():
    spec = jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True)
    w = normal(0, 16, 4)
    plan = plan_of(product, jqx.Policy([jqx.Rule(activation=spec)]), w, X)
    grid = jqx.QTensor.quantize(X, jqx.QSpec(jnp.int8, jqx.per_axis(0))).dequantize()
    assert plan.weights == ()
    assert relative(jqx.convert(product, plan)(w, X), grid @ w) < 40 * 2.0**-24


def test_two_activations_are_multiplied_as_integers_where_a_rule_says_so():
    def f(w, x):
        h = x @ w
        return h @ h.T

    spec = jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True)
    w = normal(0, 16, 8)
    plan = plan_of(f, jqx.Policy([jqx.Rule(activation=spec)]), w, X)
    assert dots(jqx.convert(f, plan), w, X)[-1] == ("int8", "int8", "int32")
    assert relative(jqx.convert(f, plan)(w, X), f(w, X)) < 0.02


def test_stacked_models_are_vmapped_over_their_quantized_weights():
    w = normal(0, 3, 16, 4)
    plan = plan_of(product, w8a8_dynamic(), w[0], X)
    q = jax.vmap(lambda w: jqx.quantize_params(w, plan))(w)
    assert q.values.shape == (3, 16, 4) and q.scale.shape == (3, 1, 4)
    out = jax.vmap(jqx.convert(product, plan), in_axes=(0, None))(q, X)
    second_model = jqx.convert(product, plan)(jqx.quantize_params(w[1], plan), X)
    assert close(out[1], second_model)


def test_gradients_flow_to_float_arguments_of_a_weight_only_function():
    def f(w, x):
        return jnp.tanh(x @ w).sum()

    w = normal(0, 16, 4)
    plan = plan_of(f, w8a16(), w, X)
    q = jqx.quantize_params(w, plan)
    got = jax.grad(lambda x: jqx.convert(f, plan)(q, x))(X)
    expected = jax.grad(lambda x: f(q.dequantize(), x))(X)
    assert close(got, expected)


def test_errors_of_contractions_and_views_name_their_place():
    """Such as those of arguments that are quantized in a way that the function cannot use."""

    def convolve(params, x):
        return jax.lax.conv_general_dilated(
            x, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def merge(params, x):
        with jax.named_scope("head"):
            return x.reshape(96, 6) @ params["kernel"]

    cases = {
        "at path 'kernel', rule 0": (convolve, (3, 3, 64, 8), (1, 4, 4, 64), 3),
        "reshape of a quantized array, scope head": (merge, (6, 4), (2, 48, 6), 1),
    }
    policy = jqx.Policy([jqx.Rule(weight=jqx.QSpec(jnp.int8, jqx.per_channel()))])
    for address, (f, shape, x_shape, axis) in cases.items():
        params, x = {"kernel": normal(0, *shape)}, normal(1, *x_shape)
        plan = plan_of(f, policy, params, x)
        state = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_axis(axis)))
        for call in (jqx.convert(f, plan), jax.jit(jqx.convert(f, plan))):
            with pytest.raises(ValueError, match="scale") as error:
                call(jqx.quantize_params(params, plan), state)
            assert [address in note for note in error.value.__notes__[:1]] == [True]


def test_a_kernel_in_blocks_that_a_convolution_cannot_use_is_listed():
    def convolve(params, x):
        return jax.lax.conv_general_dilated(
            x, params, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    kernel, x = normal(0, 3, 3, 64, 8), normal(1, 1, 4, 4, 64)
    weight = jqx.QSpec(jnp.int4, jqx.per_group(32, tail=True))
    activation = jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True)
    plan = plan_of(
        convolve, jqx.Policy([jqx.Rule(weight=weight, activation=activation)]), kernel, x
    )
    assert [item.reason for item in plan.skipped] == [
        "the scale of `rhs` varies along an axis that is summed"
    ]
    assert jnp.array_equal(jqx.convert(convolve, plan)(kernel, x), convolve(kernel, x))


def test_a_quantized_weight_is_returned_as_it_was_given():
    f = lambda w, x: (x @ w, w)  # noqa: E731
    w = normal(0, 16, 4)
    plan = plan_of(f, w8a16(), w, X)
    q = jqx.quantize_params(w, plan)
    for unsupported in ("error", "dequantize"):
        _, returned = jax.jit(jqx.convert(f, plan, unsupported=unsupported))(q, X)
        assert_same(returned, q)


def test_foreign_quantized_weights_are_refused():
    plan = plan_of(mlp, w8a8_dynamic(), PARAMS, X)
    q = jqx.quantize_params(PARAMS, plan)
    int4 = jqx.QTensor.quantize(PARAMS["w"], jqx.QSpec(jnp.int4, jqx.per_axis(1)))
    coarse = jqx.QTensor.quantize(PARAMS["w"], jqx.QSpec(jnp.int8))
    for wrong in (int4, coarse):
        with pytest.raises(ValueError, match="does not fit the plan") as info:
            jqx.convert(mlp, plan)({**q, "w": wrong}, X)
        assert "'w'" in str(info.value) and "int8 per_axis(1)" in str(info.value)
    bias = jqx.QTensor.quantize(PARAMS["b"], jqx.QSpec(jnp.int8))
    with pytest.raises(NotImplementedError, match="a quantized array reaches `add`"):
        jqx.convert(mlp, plan)({**q, "b": bias}, X)


def test_unknown_choices_are_refused():
    with pytest.raises(ValueError, match="`unsupported` is unknown"):
        jqx.convert(mlp, w8a16(), unsupported="ignore")


def decoder(p, ids):
    """A table that is looked up and multiplied by, and a scan over layers."""

    def layer(x, w):
        return x + jax.nn.silu(x @ w["up"].T) @ w["down"].T, None

    x, _ = jax.lax.scan(layer, p["table"][ids], p["layers"])
    return x @ p["table"].T


def coded(**parts):
    def stack(shape):
        return QTensor.stack([matrix(shape, 32, seed=i, **parts) for i in range(3)])

    layers = {"up": stack((128, 64)).pack(), "down": stack((64, 128))}
    return {"table": matrix((50, 64), 32, **parts), "layers": layers}


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_a_decoder_runs_on_the_codes(offset, order):
    p, ids = coded(offset=offset, order=order), jnp.array([[1, 2, 3, 49]])
    nothing = jqx.Policy([])
    with jax.default_matmul_precision("highest"):
        expected = decoder(jqx.dequantize_params(p), ids)
        actual = jax.jit(jqx.convert(decoder, nothing))(p, ids)
        simulated = jax.jit(jqx.simulate(decoder, nothing))(p, ids)
    size = np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, atol=1e-4 * size)
    np.testing.assert_allclose(simulated, expected, atol=1e-4 * size)


def test_a_plan_takes_no_offset_for_a_weight_without_one():
    p = matrix((8, 64), 32)
    plan = jqx.make_plan(lambda w, x: x @ w.T, jqx.presets.w4a16(block=32))(
        jnp.ones((8, 64)), jnp.ones((1, 64))
    )
    with pytest.raises(ValueError, match="does not fit the plan"):
        jqx.convert(lambda w, x: x @ w.T, plan)(p, jnp.ones((1, 64)))


def test_a_file_keeps_offset_and_order(tmp_path):
    p = coded()
    jqx.save(tmp_path / "a", p)
    assert_same(jqx.load(tmp_path / "a"), p)
