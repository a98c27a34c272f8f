"""Each value of `Numerics` gives the scales, zero points and codes of its runtime, bit for bit.

Against NumPy models of all runtimes, and against the runtimes themselves where they are installed.
Left out, as the runtimes leave them undefined or no scale is finite there: NaN and infinite ranges,
subnormals (XLA on CPU flushes them), and for TFLite quotients of 2**31 and above.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import numerics
from jqx.calibrators import Affine, minmax
from jqx.numerics import Integer, SymmetricRange, format_of

from . import runtimes_peers as peers
from .forms import X64
from .golden_io import load
from .runtimes_inputs import SCALES, elements, rows
from .runtimes_models import MODELS

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
    found = jqx.affine_from_range(low, high, qtype=qtype, symmetric=symmetric, numerics=runtime)
    assert_same((scale, zero_point), found)
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
    for found, value in zip(result, expected, strict=True):
        if found is not None and value is not None:
            kind = np.float32 if np.asarray(found).dtype == np.float32 else np.int32
            found, value = (np.asarray(v).astype(kind) for v in (found, value))
            np.testing.assert_array_equal(found, value, strict=True)


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
