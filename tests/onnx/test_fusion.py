"""Files of `products="qdq_uint8"`: onnxruntime multiplies the codes of each product."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from jax import lax

import jqx
from jqx.interop import to_onnx, verify_onnx

from ..arrays import normal
from .runtime import LEVELS, assert_close, operations, run

CHANNELS = {
    "stem": normal(0, 3, 3, 3, 8) / 4,
    "expand": normal(1, 1, 1, 8, 16) / 3,
    "depthwise": normal(2, 3, 3, 1, 16) / 3,
    "project": normal(3, 1, 1, 16, 8) / 4,
    "first": normal(4, 8, 24) / 3,
    "last": normal(5, 24, 4) / 5,
    "biases": [normal(6 + i, n) / 4 for i, n in enumerate((8, 16, 16, 8, 24, 4))],
}
IMAGES = normal(12, 3, 10, 10, 3)


def network(params, x, act=jax.nn.relu6):
    """A block of inverted residuals and a head of two layers, all with biases."""
    biases = iter(params["biases"])

    def biased(y):
        return y + next(biases).reshape((1,) * (y.ndim - 1) + (-1,))

    def conv(x, name, stride=1, groups=1):
        numbers = lax.conv_dimension_numbers(x.shape, params[name].shape, ("NHWC", "HWIO", "NHWC"))
        y = lax.conv_general_dilated(
            x, params[name], (stride,) * 2, "SAME", None, None, numbers, groups
        )
        return biased(y)

    x = act(conv(x, "stem", 2))
    x = x + conv(act(conv(act(conv(x, "expand")), "depthwise", groups=16)), "project")
    x = jnp.clip(biased(x.mean((1, 2)) @ params["first"]), -0.5, 0.75)
    return biased(x @ params["last"])


def optimized(model, path):
    """What onnxruntime makes of a model."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3  # it warns that the file is for this machine alone
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    return onnx.load(path)


U8 = {"qtype": jnp.uint8, "symmetric": False, "calibrator": jqx.calibrators.minmax}
# One result is rounded and also added in float, which no operation of onnxruntime gives.
STATIC = {"Conv": 1, "QLinearConv": 2, "MatMulIntegerToFloat": 3}
DYNAMIC = {"Conv": 1, "ConvInteger": 1, "MatMulIntegerToFloat": 4}
SCHEMES = {
    "static": (jqx.presets.w8a8(), STATIC),
    "static with zero points": (jqx.presets.w8a8(activation=U8), STATIC),
    "dynamic": (
        jqx.presets.w8a8_dynamic(),
        {"Conv": 1, "ConvInteger": 1, "MatMulIntegerToFloat": 4},
    ),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_onnxruntime_multiplies_codes_in_each_product(name, tmp_path):
    policy, counts = SCHEMES[name]
    q = jqx.ptq(network, policy, jqx.algorithms.nearest(), progress=False)(CHANNELS, [IMAGES])
    model = to_onnx(q, products="qdq_uint8")(IMAGES)
    fused = operations(optimized(model, tmp_path / "fused.onnx"))
    ops = ("Conv", "ConvInteger", "MatMul", "MatMulInteger", "Gemm", *counts)
    assert {op: fused[op] for op in ops if fused[op]} == counts
    expected = jax.jit(q.function)(q.params, IMAGES)
    assert_close(run(model, IMAGES), expected)
    found = verify_onnx(model, q)(IMAGES)
    assert all(site.sqnr > 40 for site in found.sites) and found.optimized.sqnr > 40, found


@pytest.mark.parametrize("products", ["qdq_uint8", "qdq_int8", "uint8"])
def test_bounds_of_codes_are_those_of_numbers(products):
    """Inside the limits of the codes and outside, in both orders, and infinite."""
    bounds = [(0, np.inf), (-np.inf, 0.3), (-0.2, 0.4), (0.6, -0.1), (3, 9), (-9, -3), (0, 0)]

    def f(w, x):
        clipped = [jnp.minimum(jnp.maximum(x, low), high) for low, high in bounds]
        others = [jnp.maximum(jnp.minimum(x, low), high) for low, high in bounds[2:]]
        return [a @ w for a in (*clipped, *others)]

    x = jnp.concatenate(
        [jnp.linspace(-1, 1, 1023), jnp.array([jnp.inf, -jnp.inf, 1e30, 0.0, -0.0])]
    )
    for spec in (jqx.QSpec("int8", jqx.per_tensor()), jqx.QSpec(**U8)):
        rule = jqx.Rule(weight="int8", activation=spec)
        q = jqx.ptq(f, jqx.Policy([rule]), progress=False)(jnp.eye(4), [x[:1020].reshape(-1, 4)])
        model = to_onnx(q, products=products)(x.reshape(-1, 4))
        assert (operations(model)["Clip"] > 0) == (products == "qdq_uint8")
        expected = jax.jit(q.function)(q.params, x.reshape(-1, 4))
        for level in (LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL):
            assert_close(run(model, x.reshape(-1, 4), level=level), expected, 1e-6)


def test_what_is_used_twice_stays():
    """A result, or an operand of something else, is not moved into an operation."""

    def f(params, x):
        numbers = ("NCHW", "OIHW", "NCHW")
        y = lax.conv_general_dilated(x, params["a"], (1, 1), "VALID", dimension_numbers=numbers)
        z = jax.nn.relu(y + params["bias"][None, :, None, None])
        first = lax.conv_general_dilated(z, params["b"], (1, 1), "VALID", dimension_numbers=numbers)
        return first + first[:, :1], y, z

    params = {"a": normal(0, 4, 3, 1, 1), "b": normal(1, 4, 4, 2, 2), "bias": normal(2, 4)}
    x = normal(3, 2, 3, 5, 5)
    q = jqx.ptq(f, jqx.presets.w8a8(), jqx.algorithms.nearest(), progress=False)(params, [x])
    model = to_onnx(q, products="qdq_uint8")(x)
    assert_close(run(model, x), jax.jit(q.function)(q.params, x))
