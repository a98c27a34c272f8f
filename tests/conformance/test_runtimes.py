"""Each value of `Numerics` gives the scales, zero points and codes of its runtime, bit for bit.

Against NumPy models of all runtimes, and against the runtimes themselves where they are installed.
Left out, as the runtimes leave them undefined or no scale is finite there: NaN and infinite ranges,
subnormals (XLA on CPU flushes them), and for TFLite quotients of 2**31 and above.

Requantized results are compared with TFLite's reference kernels: stored ones, and, where it is
installed, its own. FULLY_CONNECTED is not among them: its reference kernel of today rounds a
product in float64.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import numerics
from jqx._src.contractions.requantize import Requantization, requantize
from jqx.calibrators import Affine, minmax
from jqx.numerics import Integer, SymmetricRange, format_of

from . import runtimes_peers as peers
from . import tflite_peers
from .runtimes import MODELS, SCALES, elements, rows
from .stored import X64, load

pytestmark = pytest.mark.skipif(X64, reason="the runtimes have no float64 form")
EPS, TINY = float(np.finfo(np.float32).eps), float(np.finfo(np.float32).tiny)
PRESETS = {name: getattr(numerics, name) for name in MODELS}
AWAY = jqx.RoundMode.NEAREST_TOWARD_INFINITY
PRESETS["ngraph"] = dataclasses.replace(PRESETS["ngraph"], round_mode=AWAY)
ZERO_POINTS = {"int8": (None, 0, 3, -5, 100, -128), "uint8": (None, 0, 3, 128, 100, 255)}
every_code_type = pytest.mark.parametrize("qtype", ZERO_POINTS)


@functools.partial(jax.jit, static_argnames="spec")
def quantized(x, spec, affine=None):
    q = jqx.QTensor.quantize(x, spec, affine)
    return q.scale, q.zero_point, q.values


def by_rows(x, qtype, symmetric, runtime):
    """Scale, zero point and codes of each row; the first two by `affine_from_range` as well."""
    spec = jqx.QSpec(
        qtype, jqx.per_axis(0), symmetric=symmetric, calibrator=minmax, numerics=runtime
    )
    scale, zero_point, codes = quantized(x, spec)
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    actual = jqx.affine_from_range(low, high, qtype=qtype, symmetric=symmetric, numerics=runtime)
    assert_same((scale, zero_point), actual)
    return scale, zero_point, codes


def codes_of(x, scale, zero_point, qtype, runtime):
    """Codes on a given scale."""
    form = format_of(qtype)
    spec = jqx.QSpec(qtype, symmetric=zero_point is None and form.signed, numerics=runtime)
    z = None if zero_point is None else jnp.full((1,), int(zero_point), form.storage)
    affine = Affine(jnp.full((1,), scale, jnp.float32), z)
    return np.asarray(quantized(x, spec, affine)[2]).astype(np.int32)


def assert_same(result, expected):
    """Compares scales bit by bit, and integers whatever their dtypes; `None` stands for zero."""
    for actual, value in zip(result, expected, strict=True):
        if actual is not None and value is not None:
            kind = np.float32 if np.asarray(actual).dtype == np.float32 else np.int32
            actual, value = (np.asarray(v).astype(kind) for v in (actual, value))
            np.testing.assert_array_equal(actual, value, strict=True)


def sweep(real, runtime, qtype, skip=None, count=2000):
    """Compares codes on all scales and zero points with those of `real`."""
    points = ZERO_POINTS[qtype]
    for i, scale in enumerate(SCALES):
        zero_point = points[i % len(points)]
        x = elements(i, count, scale)
        expected = np.asarray(real(x, scale, zero_point, qtype)).astype(np.int32)
        result = codes_of(x, scale, zero_point, qtype, runtime)
        counted = np.ones(x.shape, bool) if skip is None else ~skip(x, scale)
        np.testing.assert_array_equal(result[counted], expected[counted])


def limits(qtype):
    form = format_of(qtype)
    return int(form.low), int(form.high)


@every_code_type
@pytest.mark.parametrize("name", MODELS)
def test_codes_are_those_of_the_model(name, qtype):
    def model(x, scale, zero_point, qtype):
        low, high = limits(qtype)
        low += name == "tflite" and zero_point is None and low < 0
        with np.errstate(all="ignore"):
            return MODELS[name].quantize(x, scale, zero_point or 0, low, high)

    sweep(model, PRESETS[name], qtype)


@pytest.mark.many
@pytest.mark.parametrize(
    ("qtype", "symmetric"),
    [(jnp.int8, True), (jnp.int4, True), (jnp.int8, False), (jnp.uint8, False), (jnp.uint4, False)],
)
@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].parameters])
def test_scales_zero_points_and_codes_of_rows_are_those_of_the_model(name, qtype, symmetric):
    x = rows(0)
    low, high = limits(qtype)
    with np.errstate(all="ignore"):
        scale, zero_point = MODELS[name].parameters(x, low, high, symmetric)
        narrowed = low + (name == "tflite" and symmetric)
        codes = MODELS[name].quantize(x, scale, zero_point, narrowed, high)
    result = by_rows(x, qtype, symmetric, PRESETS[name])
    assert result[0].dtype == jnp.float32 and (result[1] is None) == symmetric
    assert_same(result, (scale, None if symmetric else zero_point, codes))


@pytest.mark.slow
def test_the_inputs_tell_the_runtimes_apart():
    """Else the tests above would not see one preset stand for another."""
    results = []
    for runtime in PRESETS.values():
        ranges = [by_rows(rows(0), jnp.int8, symmetric, runtime) for symmetric in (True, False)]
        codes = codes_of(elements(0, 2000, SCALES[0]), SCALES[0], None, "int8", runtime)
        results.append(
            b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves([ranges, codes]))
        )
    assert len(set(results)) == len(PRESETS)


@every_code_type
def test_onnx_quantize_linear(qtype):
    pytest.importorskip("onnxruntime")
    sweep(peers.onnx_quantize, numerics.onnx, qtype)


def test_onnx_dynamic_quantize_linear():
    pytest.importorskip("onnxruntime")
    x = rows(1)
    assert_same(by_rows(x, jnp.uint8, False, numerics.onnx), peers.onnx_dynamic(x))


def test_symmetric_scales_of_the_quantization_tool_of_onnxruntime():
    pytest.importorskip("onnxruntime.quantization")
    x = rows(2)
    assert_same(by_rows(x, jnp.int8, True, numerics.onnx), peers.onnx_symmetric(x))


TORCHAO = [
    ("SYMMETRIC", Integer(8), EPS),  # what the int8 configurations pass
    ("SYMMETRIC", Integer(8), None),
    ("SYMMETRIC", Integer(8, narrow=True), 1e-5),
    ("SYMMETRIC", Integer(4), None),
    ("SYMMETRIC_NO_CLIPPING_ERR", Integer(8), EPS),
    ("SYMMETRIC_NO_CLIPPING_ERR", Integer(4), None),
    ("ASYMMETRIC", Integer(8), EPS),
    ("ASYMMETRIC", Integer(8), None),
    ("ASYMMETRIC", Integer(4, signed=False), 1e-6),
]


@pytest.mark.parametrize(("mapping", "qtype", "eps"), TORCHAO)
def test_torchao_affine_primitives(mapping, qtype, eps):
    pytest.importorskip("torchao")
    least = TINY if eps is None else eps
    runtime = dataclasses.replace(numerics.torchao, min_scale=least, small_scale=least)
    if mapping == "SYMMETRIC_NO_CLIPPING_ERR":
        runtime = dataclasses.replace(runtime, symmetric_range=SymmetricRange.COVER)
    x = rows(3)
    expected = peers.torchao(x, *limits(qtype), mapping, eps)
    assert_same(by_rows(x, qtype, mapping != "ASYMMETRIC", runtime), expected)


@pytest.mark.parametrize("method", ["absmax", "minmax"])
@pytest.mark.parametrize("qtype", ["int8", "int4"])
def test_qwix_per_channel(qtype, method):
    pytest.importorskip("qwix")
    x = rows(4)
    result = by_rows(x, jnp.dtype(qtype), method == "absmax", numerics.qwix)
    assert_same(result, peers.qwix(x, qtype, method))


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize(
    ("mode", "qtype"),
    [
        ("INT8_SYM", "int8"),
        ("INT8_ASYM", "uint8"),
        ("INT4_SYM", "int4"),
        ("INT4_ASYM", "uint4"),
    ],
)
def test_integer_weights_of_openvino(mode, qtype, optimized, monkeypatch):
    pytest.importorskip("nncf")
    pytest.importorskip("openvino")
    x = rows(5)
    result = by_rows(x, jnp.dtype(qtype), mode.endswith("_SYM"), numerics.openvino)
    assert_same(result, peers.nncf(x, mode, optimized, monkeypatch))


@every_code_type
def test_tflite_quantize_by_reference_kernels(qtype):
    """Whose narrow symmetric codes are a matter of the weights alone, not of this operation."""
    pytest.importorskip("ai_edge_litert")
    runtime = dataclasses.replace(numerics.tflite, narrow=False)

    def overflows(x, scale):
        with np.errstate(over="ignore"):
            return np.abs(x / scale) >= 2**31 - 400

    sweep(peers.tflite_quantize, runtime, qtype, overflows)


@pytest.mark.parametrize(
    ("name", "field"), [("onednn", "expected"), ("onednn_runtime", "expected_reciprocal")]
)
def test_stored_codes_of_onednn(name, field):
    """Zero points are s32 there: those that are no codes are left out, as are scales whose
    reciprocal is subnormal, which XLA on CPU flushes.
    """
    compared = 0
    for case, arrays in load("onednn_dynamicquantize"):
        zps = arrays.get("zps")
        qtype = {"s8": "int8", "u8": "uint8"}[case["attrs"]["dst"]]
        low, high = limits(qtype)
        scale = float(arrays["scales"].ravel()[0])
        if (
            arrays["scales"].size > 1
            or arrays["src"].dtype != np.float32
            or (zps is not None and not low <= int(zps.ravel()[0]) <= high)
            or (name == "onednn_runtime" and 2.0**126 < abs(scale) < np.inf)
        ):
            continue
        x = arrays["src"].ravel()
        zero_point = None if zps is None else int(zps.ravel()[0])
        result = codes_of(x, np.float32(scale), zero_point, qtype, PRESETS[name])
        care = arrays["care"].ravel() == 1
        if "ftz" in arrays:
            care &= arrays["ftz"].ravel() == 0
        expected = arrays[field].ravel().astype(np.int32)
        np.testing.assert_array_equal(result[care], expected[care], str(case["id"]))
        compared += int(care.sum())
    assert compared > 1000


LOWEST, LARGEST = -(2**31), 2**31 - 1
requantized = jax.jit(requantize)


def assert_requantized(accumulator, r, expected):
    result = np.asarray(requantized(np.asarray(accumulator).astype(np.int32), r).values)
    np.testing.assert_array_equal(result, expected, strict=True)


def random_codes(rng, dtype, shape):
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def test_stored_codes():
    compared = 0
    for case, arrays in load("tflite_requantize"):
        attrs = case["attrs"]
        scales = [
            np.asarray(attrs[f"{name}_scale"], np.float32) for name in ("lhs", "rhs", "output")
        ]
        qtype = {"s8": "int8", "u8": "uint8", "s16": "int16"}[attrs["dst"]]
        r = Requantization.of(
            *scales,
            qtype=jnp.dtype(qtype),
            zero_point=attrs["zero_point"],
            bias=arrays.get("bias"),
            low=attrs["low"],
            high=attrs["high"],
        )
        assert_requantized(arrays["accumulator"], r, arrays["expected"].astype(qtype))
        compared += arrays["expected"].size
    assert compared > 40_000


def accumulators(rng, output):
    """Of all magnitudes: near the random_codes, where they tie, and up to both ends."""
    n = 4000
    wide = rng.integers(LOWEST, LARGEST, n, endpoint=True) >> rng.integers(0, 31, n)
    ties = np.rint((rng.integers(-300, 300, n) + 0.5) * np.minimum(output, 2.0**22))
    near = ties + rng.integers(-2, 3, n)
    ends = [LOWEST, LOWEST + 1, -1, 0, 1, LARGEST - 1, LARGEST]
    return np.concatenate([wide, ties, near, ends]).clip(LOWEST, LARGEST).astype(np.int32)


# `1 / factor`: powers of two, which tie; others; below 1 the accumulator is shifted to the left.
QUOTIENTS = [2.0, 256.0, 2.0**15, 2.0**23, 3.0, 1000.0, 123456.7, 3e8, 1.0, 0.5, 0.3, 0.01]


@pytest.mark.parametrize("qtype", ["int8", "int16"])
def test_quantize_of_int32(qtype):
    pytest.importorskip("ai_edge_litert")
    for i, (scale, quotient) in enumerate(
        itertools.product((np.float32(1), np.float32(0.37)), QUOTIENTS)
    ):
        rng = np.random.default_rng(i)
        output, zero = scale * np.float32(quotient), int(random_codes(rng, qtype, ()))
        x = accumulators(rng, quotient)
        r = Requantization.of(scale, 1.0, output, qtype=jnp.dtype(qtype), zero_point=zero)
        assert_requantized(x, r, tflite_peers.quantize(x, (scale, output), (0, zero), qtype))


@pytest.mark.parametrize("qtype", ["int8", "uint8", "int16"])
def test_mul(qtype):
    pytest.importorskip("ai_edge_litert")
    rng = np.random.default_rng(0)
    for output in (0.7, 256.0, 2.0**14, 3e4):
        scales = (np.float32(0.5), np.float32(0.3), np.float32(output))
        zeros = [0] * 3 if qtype == "int16" else random_codes(rng, qtype, 3).tolist()
        a, b = random_codes(rng, qtype, (2, 20_000))
        factor = scales[0] * scales[1] / scales[2]  # all in float32
        r = Requantization.of(factor, 1.0, 1.0, qtype=jnp.dtype(qtype), zero_point=zeros[2])
        product = (a.astype(np.int64) - zeros[0]) * (b.astype(np.int64) - zeros[1])
        assert_requantized(product, r, tflite_peers.mul(a, b, scales, zeros))


def test_batch_matmul():
    pytest.importorskip("ai_edge_litert")
    rng = np.random.default_rng(1)
    for output in (8.0, 3.0, 64.0, 0.05):
        scales, zeros = (
            (np.float32(0.0371), np.float32(0.25), np.float32(output * 0.0371)),
            random_codes(rng, "int8", 3).tolist(),
        )
        a, b = random_codes(rng, "int8", (200, 24)), random_codes(rng, "int8", (24, 50))
        sums = (a.astype(np.int64) - zeros[0]) @ (b.astype(np.int64) - zeros[1])
        product = scales[0] * scales[1]  # in float32, as GetQuantizedConvolutionMultipler does
        r = Requantization.of(product, 1.0, scales[2], qtype=jnp.int8, zero_point=zeros[2])
        assert_requantized(sums, r, tflite_peers.matmul(a, b, scales, zeros))


@pytest.mark.parametrize("relu", [False, True])
def test_convolution_with_a_scale_for_each_channel(relu):
    pytest.importorskip("ai_edge_litert")
    rng = np.random.default_rng(2)
    powers = 2.0 ** rng.integers(-3, 1, 50)
    for weights in (powers.astype(np.float32), rng.uniform(0.1, 1, 50).astype(np.float32)):
        scales, zeros = (np.float32(0.5), weights, np.float32(128)), (-3, 0, -60)
        x, w = (
            random_codes(rng, "int8", (200, 24)),
            rng.integers(-127, 128, (24, 50)).astype(np.int8),
        )
        bias = rng.integers(-30_000, 30_000, 50).astype(np.int32)
        r = Requantization.of(
            *scales, qtype=jnp.int8, zero_point=-60, bias=bias, low=-60 if relu else None
        )
        sums = (x.astype(np.int64) + 3) @ w.astype(np.int64)
        assert_requantized(sums, r, tflite_peers.convolution(x, w, bias, scales, zeros, relu))
