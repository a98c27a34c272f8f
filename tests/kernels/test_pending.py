"""Converted functions whose activations a kernel quantizes on the way, beside the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..arrays import normal
from .stepwise import on

K, N = 256, 128
DEEPSEEK = {  # 8-bit floats: 128 x 128 weights, 1 x 128 activations share a scale
    "weight": jqx.QSpec(jnp.float8_e4m3fn, jqx.per_block({0: 128, 1: 128})),
    "activation": jqx.QSpec(jnp.float8_e4m3fn, jqx.per_block({0: 1, 1: 128}), dynamic=True),
}
GROUPED = jqx.per_block({0: 64, 1: 1})
POLICIES = {
    "int8 a channel": jqx.presets.w8a8_dynamic(),
    "int8 a channel, static": jqx.presets.w8a8(),
    "int4 a channel": jqx.presets.w4a8(),
    "int4 beside int4": jqx.presets.w4a4(),
    "fp8 a channel": jqx.presets.fp8(),
    "int8 in groups": jqx.Policy(
        [
            jqx.Rule(
                weight=jqx.QSpec(jnp.int8, GROUPED),
                activation=jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True),
            )
        ]
    ),
    "uint4 with zero points in groups": jqx.Policy(
        [
            jqx.Rule(
                weight=jqx.QSpec(
                    jnp.uint4, GROUPED, symmetric=False, calibrator=jqx.calibrators.minmax
                ),
                activation=jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True),
            )
        ]
    ),
    "blocks in two dimensions": jqx.Policy([jqx.Rule(**DEEPSEEK)]),
}


def f(w, x):
    return x @ w


def converted(policy, w, x):
    plan = jqx.make_plan(f, policy)(w, x)
    stats = jqx.calibrate_batches(f, plan, w, [x], progress=False)
    return jqx.convert(f, plan, jqx.affines(plan, stats)), jqx.quantize_params(w, plan)


def has_kernel(name, target):
    """On a GPU a scale a channel is left to the compiler."""
    return target == "tpu" or ("channel" not in name and "beside" not in name)


@pytest.mark.many
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_the_result_is_that_of_codes_made_before(target, name):
    w, x = normal(1, K, N), normal(0, 5, K)
    run, q = converted(POLICIES[name], w, x)
    laid = q.pack_for(target)
    plain = jax.jit(run)(q, x)
    with on(target):
        (chosen,) = jqx.formulations(run)(laid, x)
        found = jax.jit(lambda q, x: run(q, x))(laid, x)
    assert ("kernel_quantizing" in chosen.cpu.name) == has_kernel(name, target)
    if "channel" in name and "int" in name:
        np.testing.assert_array_equal(found, plain)
    else:  # sums of float32 in another order
        bound = 64 * 2.0**-24 * np.max(np.abs(x)) * np.max(np.abs(w)) * K
        np.testing.assert_allclose(found, plain, rtol=0, atol=bound)


@pytest.mark.parametrize("name", ["int8 in groups", "blocks in two dimensions"])
@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_rows_that_are_codes_already_are_multiplied_as_such(target, name):
    rule = POLICIES[name].rules[0]
    q = jqx.QTensor.quantize(normal(1, K, N), rule.weight).pack_for(target)
    own = jqx.per_axis(0) if name == "int8 in groups" else rule.activation.granularity
    x = jqx.QTensor.quantize(normal(0, 5, K), jqx.QSpec(rule.activation.qtype, own))
    with on(target):
        (chosen,) = jqx.formulations(jqx.matmul)(x, q)
        found = jax.jit(jqx.matmul)(x, q)
    assert "kernel_of_codes" in chosen.cpu.name
    real = np.float64(x.dequantize()) @ np.float64(q.dequantize())
    np.testing.assert_allclose(found, real, rtol=0, atol=1e-4)


def test_a_gpu_quantizes_many_rows_first():
    w, x = normal(1, K, N), normal(0, 65, K)
    run, q = converted(POLICIES["int8 in groups"], w, x)
    with on("gpu"):
        (many,) = jqx.formulations(run)(q.pack_for("gpu"), x)
        (few,) = jqx.formulations(run)(q.pack_for("gpu"), x[:64])
    assert many.cpu.name == "quantize_first"
    assert "kernel_quantizing" in few.cpu.name


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_derivatives_are_those_of_the_plain_form(target):
    w, x = normal(1, K, N), normal(0, 3, K)
    run, q = converted(POLICIES["int8 in groups"], w, x)
    laid = q.pack_for(target)

    def loss(x, scale, q):
        w = jqx.QTensor(q.values, scale, qtype=q.qtype, layout=q.layout)
        return jnp.sum(jnp.sin(run(w, x)))

    gradient = jax.grad(loss, (0, 1))
    expected = jax.jit(gradient)(x, q.scale, q)
    with on(target):
        found = jax.jit(lambda *args: gradient(*args))(x, q.scale, laid)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_a_stack_is_mapped_over_and_scanned():
    ws, x = normal(1, 3, K, K) / 16, normal(0, 3, K)

    def stacked(ws, x):
        return jax.lax.scan(lambda h, w: (h @ w, None), x, ws)[0]

    plan = jqx.make_plan(stacked, jqx.presets.w8a8_dynamic())(ws, x)
    run, q = jqx.convert(stacked, plan), jqx.quantize_params(ws, plan)
    plain = jax.jit(run)(q, x)
    with on("tpu"):
        found = jax.jit(lambda q, x: run(q, x))(q.pack_for("tpu"), x)
        (chosen,) = jqx.formulations(run)(q.pack_for("tpu"), x)
    assert "kernel_quantizing" in chosen.cpu.name and chosen.times == 3
    np.testing.assert_array_equal(found, plain)
