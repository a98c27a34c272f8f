"""Quantized functions as models of ONNX: the integers are those of jqx."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jqx
from jqx.interop import to_onnx

from ..arrays import normal
from .runtime import LEVELS, assert_close, operations, run

PARAMS = {
    "first": normal(0, 64, 64) / 8,
    "layers": normal(1, 2, 64, 64) / 8,
    "last": normal(2, 64, 32) / 8,
}
X = normal(3, 8, 64)
U8 = {"qtype": jnp.uint8, "symmetric": False, "calibrator": jqx.calibrators.minmax}
TABLE, WORDS = normal(4, 20, 64), np.array([[3, 0], [19, 7]], "i4")


def network(params, x):
    h = jax.nn.gelu(x @ params["first"])
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["layers"])
    return h @ params["last"]


def quantized(policy, f=network, params=PARAMS, x=X, **options):
    return jqx.ptq(f, policy, progress=False, **options)(params, [x])


SCHEMES = {
    "w8a8": (jqx.presets.w8a8(), {}),
    "w8a8 as floats": (jqx.presets.w8a8(), {"products": "qdq_uint8"}),
    "w8a8 as floats in int8": (jqx.presets.w8a8(), {"products": "qdq_int8"}),
    "w8a8 dynamic as floats": (jqx.presets.w8a8_dynamic(), {"products": "qdq_uint8"}),
    "w8a8 in int8": (jqx.presets.w8a8(activation=U8), {"products": "int8"}),
    "w8a8 with zero points": (jqx.presets.w8a8(activation=U8), {}),
    "w8a8 dynamic": (jqx.presets.w8a8_dynamic(), {}),
    "w8a8 dynamic with zero points": (jqx.presets.w8a8_dynamic(activation=U8), {}),
    "w8a16": (jqx.presets.w8a16(), {}),
    "w4a16": (jqx.presets.w4a16(), {}),
    "w4a16 with zero points": (
        jqx.presets.w4a16(weight={"qtype": jnp.uint4, "symmetric": False}),
        {},
    ),
    "w2a16": (jqx.presets.w4a16(weight={"qtype": jnp.int2}), {}),
    "w4a8": (jqx.presets.w4a8(), {}),
    "w4a8 in int8": (jqx.presets.w4a8(), {"products": "int8"}),
    "w4a8 in groups": (jqx.presets.w4a8(weight={"granularity": jqx.per_group(32)}), {}),
    "fp8": (jqx.presets.fp8(), {}),
    "nf4": (jqx.presets.nf4(), {}),
    "mxfp4 weights": (jqx.Policy({".*": "mxfp4"}), {}),
    "nvfp4 weights": (jqx.Policy({".*": "nvfp4"}), {}),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_a_model_gives_the_results_of_the_quantized_function(name):
    policy, options = SCHEMES[name]
    q = quantized(policy, algorithm=jqx.algorithms.nearest())
    model = to_onnx(q, **options)(X)
    expected = jax.jit(q.function)(q.params, X)
    assert_close(run(model, X), expected)
    bits = [jqx.numerics.format_of(w.spec.qtype).bits for w in q.plan.weights]
    weights = jax.tree.leaves(q.params, is_leaf=lambda x: isinstance(x, jqx.QTensor))
    assert len(bits) == len(weights)
    codes = sum(w.size // (2 if n <= 4 else 1) for w, n in zip(weights, bits, strict=True))
    codes += sum(4 * w.scale.size for w in weights)
    written = sum(len(x.raw_data) for x in model.graph.initializer)
    assert written < 1.02 * codes + 2_000


OF_GROUPS = {"granularity": jqx.per_group(32)}
ARITHMETIC = {
    "mxfp8": jqx.presets.mxfp8(),
    "nvfp4": jqx.Policy([jqx.Rule(weight="nvfp4", activation=jqx.QSpec("nvfp4", dynamic=True))]),
    "groups": jqx.presets.w8a8_dynamic(activation=OF_GROUPS, weight=OF_GROUPS),
    "rounded up": jqx.presets.w8a8(activation={"round_mode": jqx.RoundMode.UP}),
    "percentile": jqx.presets.w8a8_dynamic(activation={"calibrator": jqx.calibrators.percentile}),
    "six bits": jqx.presets.w8a8_dynamic(activation={"qtype": "float6_e2m3fn"}),
    "of a runtime": jqx.presets.w8a8_dynamic(activation={"numerics": jqx.numerics.torchao}),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_activations_without_nodes_are_rounded_by_arithmetic(name):
    f, nearest = lambda w, x: x @ w, jqx.algorithms.nearest()
    q = quantized(ARITHMETIC[name], f, PARAMS["first"], algorithm=nearest)
    expected = jax.jit(q.function)(q.params, X)
    for products in ("uint8", "qdq_uint8"):
        assert_close(run(to_onnx(q, products=products)(X), X), expected)


def test_sums_of_integers_are_those_of_jqx_bit_for_bit():
    """One product with scales of 1, so that nothing else rounds; also codes from 0 to 255."""
    f = lambda w, x: x @ w  # noqa: E731
    w = np.random.default_rng(0).integers(-127, 128, (64, 32)).astype("f4")
    x = np.random.default_rng(1).integers(-127, 128, (8, 64)).astype("f4")
    w[0], x[:, 0] = 127, 127  # scales are 1
    positive = x + 128
    positive[:, :2] = 0, 255
    cases = [("w8a8", x), ("w8a8 dynamic", x)]
    cases += [(f"{name} with zero points", positive) for name, _ in cases]
    for name, x in cases:
        q = jqx.ptq(f, SCHEMES[name][0], progress=False)(jnp.asarray(w), [jnp.asarray(x)])
        for products in ("uint8", "int8"):
            model = to_onnx(q, products=products)(jnp.asarray(x))
            assert operations(model)["MatMulInteger"] == 1
            for level in (LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL):
                (found,) = run(model, x, level=level)
                assert (found == x.astype(int) @ w.astype(int)).all()


def test_layers_of_a_scan_have_their_own_scales():
    q = quantized(jqx.presets.w8a8())
    model = to_onnx(q, products="qdq_uint8")(X)
    assert operations(model)["QuantizeLinear"] == 4
    assert operations(model)["DequantizeLinear"] == 8


@pytest.mark.parametrize("qtype", ["int8", "uint8", "int3", "int4", "float8_e4m3fn", "nf4"])
def test_a_table_is_looked_up_as_codes(qtype):
    def f(params, words):
        return params["table"][words] @ params["w"]

    params = {"table": TABLE, "w": PARAMS["last"]}
    spec = jqx.QSpec(qtype, jqx.per_axis(0), symmetric=qtype != "uint8")
    policy = jqx.Policy([jqx.Rule("table", weight=spec, tables=spec), jqx.Rule("w")])
    q = quantized(policy, f, params, jnp.asarray(WORDS))
    model = to_onnx(q)(jnp.asarray(WORDS))
    for words in (WORDS, WORDS + 5):  # one of them is outside of the table
        assert_close(run(model, words), jax.jit(q.function)(q.params, words))
    stored = TABLE.size // (2 if qtype in ("int3", "int4", "nf4") else 1)
    assert model.ByteSize() < stored + 4 * 64 * 32 + 4_000


@pytest.mark.parametrize("preset", ["w8a8_dynamic", "w8a16", "w4a8", "w4a16"])
def test_a_table_that_is_also_the_head_is_stored_once(preset):
    """As signed codes in the lookup, and as the runtime multiplies them in the product."""

    def f(params, words):
        h = params["table"][words]
        return jnp.tanh(h) @ params["table"].T

    table = normal(7, 512, 64)
    policy = getattr(jqx.presets, preset)()
    weight = policy.rules[0].weight
    rule = dataclasses.replace(policy.rules[0], tables=weight)
    nearest = jqx.algorithms.nearest()
    q = jqx.ptq(f, jqx.Policy([rule]), nearest, progress=False)({"table": table}, [WORDS])
    model = to_onnx(q)(WORDS)
    stored = table.size // (2 if "w4" in preset else 1) + q.params["table"].scale.nbytes
    assert model.ByteSize() < stored + 7_000
    assert_close(run(model, WORDS), jax.jit(q.function)(q.params, WORDS), 1e-4)


def test_codes_that_are_not_numbers_are_read_from_a_table():
    """Those of formats without a dtype, also with a sign, and those that NumPy knows."""
    squares = jqx.numerics.Squares(4), jqx.numerics.Squares(8, signed=False)
    for qtype in (*squares, "float6_e2m3fn", "float4_e2m1fn", "float8_e4m3b11fnuz"):
        q = jqx.QTensor.quantize(PARAMS["first"], jqx.QSpec(qtype, jqx.per_axis(1)))
        assert_close(run(to_onnx(lambda w, x: x @ w, q)(X), X), X @ q.dequantize())


def test_sums_of_convolutions_are_those_of_jqx_bit_for_bit():
    """With strides, groups, dilations of both kinds and codes from 0 to 255; scales of 1."""
    rng, nhwc = np.random.default_rng(0), ("NHWC", "HWIO", "NHWC")
    ways = {
        "stride": ({"window_strides": (2, 1), "padding": "SAME"}, 1),
        "depthwise": ({"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 8}, 8),
        "dilated": ({"window_strides": (1, 1), "padding": "VALID", "rhs_dilation": (2, 1)}, 1),
        "spread": (
            {"window_strides": (1, 1), "padding": ((1, 2), (0, 1)), "lhs_dilation": (2, 2)},
            1,
        ),
    }
    kernels = {name: rng.integers(-127, 128, (3, 3, 8 // n, 16)) for name, (_, n) in ways.items()}
    image = rng.integers(-127, 128, (2, 7, 6, 8))
    kernels = {name: k.astype("f4") for name, k in kernels.items()}
    for kernel in kernels.values():
        kernel[0, 0, 0] = 127  # scales are 1
    image[:, 0, 0] = 127
    positive = image + 128
    positive[:, 0, 1] = 0

    def f(kernels, x):
        call = lax.conv_general_dilated
        return {
            name: call(x, kernels[name], dimension_numbers=nhwc, **options)
            for name, (options, _) in ways.items()
        }

    for name, x in (("w8a8", image), ("w8a8 dynamic", image), ("w8a8 with zero points", positive)):
        x = x.astype("f4")
        nearest = jqx.algorithms.nearest()
        q = jqx.ptq(f, SCHEMES[name][0], nearest, progress=False)(kernels, [jnp.asarray(x)])
        model = to_onnx(q)(x)
        assert operations(model)["ConvInteger"] == len(ways)
        expected = jax.tree.leaves(f(kernels, x))  # whole numbers below 2**24
        for level in (LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL):
            for found, want in zip(run(model, x, level=level), expected, strict=True):
                np.testing.assert_array_equal(found, want)


def test_convolutions_in_float_are_beside_what_dequantizes_them():
    """As a runtime finds them: codes have their axes turned before they are dequantized."""

    def f(kernel, x):
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    kernel, x = normal(5, 3, 3, 4, 8), normal(6, 2, 6, 6, 4)
    for policy, count in ((jqx.presets.w8a16(), 1), (jqx.presets.w8a8(), 2)):
        q = quantized(policy, f, kernel, x)
        model = to_onnx(q, products="qdq_uint8")(x)
        made = {node.output[0]: node.op_type for node in model.graph.node}
        (conv,) = (node for node in model.graph.node if node.op_type == "Conv")
        assert [made[name] for name in conv.input][-count:] == ["DequantizeLinear"] * count
        for level in (LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL):
            assert_close(run(model, x, level=level), jax.jit(q.function)(q.params, x))


def test_results_of_a_plan_are_rounded():
    rule = jqx.Rule(weight="int8", activation="int8", output="int8")
    q = quantized(jqx.Policy([rule]), lambda w, x: x @ w, PARAMS["last"])
    found = run(to_onnx(q)(X), X)
    assert_close(found, jax.jit(q.function)(q.params, X))


def test_a_batch_may_have_any_size():
    (b,) = export.symbolic_shape("b")
    q = quantized(jqx.presets.w8a8_dynamic())
    model = to_onnx(q)(jax.ShapeDtypeStruct((b, 64), jnp.float32))
    for rows in (1, 5):
        assert_close(run(model, X[:rows]), jax.jit(q.function)(q.params, X[:rows]))


def test_one_node_rounds_with_scales_of_current_values():
    """It is several times as fast as the arithmetic."""
    x, (b,) = normal(5, 2, 3, 64), export.symbolic_shape("b")
    for spec in ({}, {"granularity": jqx.per_tensor()}):
        policy = jqx.presets.w8a8_dynamic(activation=spec)
        q = quantized(policy, lambda w, x: x @ w, PARAMS["first"], x)
        for products in ("uint8", "int8", "qdq_uint8"):
            model = to_onnx(q, products=products)(jax.ShapeDtypeStruct((b, 3, 64), jnp.float32))
            counts = operations(model)
            assert counts["QuantizeLinear"] == 1 and not counts["Round"]
            assert_close(run(model, x), jax.jit(q.function)(q.params, x), 1e-6)


def test_a_function_is_written_with_its_plan_and_float_weights():
    plan = jqx.make_plan(network, jqx.presets.w8a8_dynamic())(PARAMS, X)
    model = to_onnx(network, PARAMS, plan=plan)(X)
    expected = jqx.convert(network, plan)(jqx.quantize_params(PARAMS, plan), X)
    assert_close(run(model, X), expected)


def test_calls_that_make_no_sense_are_refused():
    q = quantized(jqx.presets.w8a16())
    cases = [
        (lambda: to_onnx(q, PARAMS), "has its own parameters"),
        (lambda: to_onnx(3), "f"),
        (lambda: to_onnx(q, products="int4"), "unknown: 'int4'.\n.* pass 'uint8', 'int8', "),
        (lambda: to_onnx(network, PARAMS, plan=3), "pass the result of jqx.make_plan"),
    ]
    for call, text in cases:
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=text):
            call()


def test_dynamic_scales_of_numbers_that_are_not_finite():
    x = np.array(X)
    x[0, 3], x[1, 2], x[2, 1], x[3], x[4] = np.nan, np.inf, -np.inf, 0, x[4] * 1e30
    for spec in ({}, U8, {**U8, "qtype": jnp.int8}):
        policy = jqx.presets.w8a8_dynamic(activation=spec)
        q = quantized(policy, lambda w, x: x @ w, PARAMS["first"])
        (found,) = run(to_onnx(q)(x), x)
        expected = np.asarray(jax.jit(q.function)(q.params, x))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        assert np.isnan(found[0]).all() and not np.isfinite(found[1:3]).any()


def test_nan_has_the_code_0_with_static_scales_of_rows():
    x = np.array(X)
    x[1, 3] = np.nan
    for spec in ({"qtype": jnp.int8}, U8):
        policy = jqx.presets.w8a8(activation={**spec, "granularity": jqx.per_axis(0)})
        q = quantized(policy, lambda w, x: x @ w, PARAMS["first"])
        expected = q(x)
        for products in ("uint8", "int8", "qdq_uint8", "qdq_int8"):
            assert_close(run(to_onnx(q, products=products)(x), x), expected)
