"""Requantized results against TFLite's reference kernels, bit for bit: stored ones, and, where
the runtime is installed, its own.

FULLY_CONNECTED is not among them: its reference kernel of today rounds a product in float64.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqx._src.contractions.requantize import Requantization, requantize

from . import tflite_peers as peers
from .golden_io import load

F = np.float32
LOWEST, LARGEST = -(2**31), 2**31 - 1
requantized = jax.jit(requantize)


def assert_codes(accumulator, r, expected):
    result = np.asarray(requantized(np.asarray(accumulator).astype(np.int32), r).values)
    np.testing.assert_array_equal(result, expected, strict=True)


def codes(rng, dtype, shape):
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def test_stored_codes():
    compared = 0
    for case, arrays in load("tflite_requantize"):
        attrs = case["attrs"]
        scales = [np.asarray(attrs[f"{name}_scale"], F) for name in ("lhs", "rhs", "output")]
        qtype = {"s8": "int8", "u8": "uint8", "s16": "int16"}[attrs["dst"]]
        r = Requantization.of(
            *scales,
            qtype=jnp.dtype(qtype),
            zero_point=attrs["zero_point"],
            bias=arrays.get("bias"),
            low=attrs["low"],
            high=attrs["high"],
        )
        assert_codes(arrays["accumulator"], r, arrays["expected"].astype(qtype))
        compared += arrays["expected"].size
    assert compared > 40_000


def accumulators(rng, output):
    """Of all magnitudes: near the codes, where they tie, and up to both ends."""
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
    for i, (scale, quotient) in enumerate(itertools.product((F(1), F(0.37)), QUOTIENTS)):
        rng = np.random.default_rng(i)
        output, zero = scale * F(quotient), int(codes(rng, qtype, ()))
        x = accumulators(rng, quotient)
        r = Requantization.of(scale, 1.0, output, qtype=jnp.dtype(qtype), zero_point=zero)
        assert_codes(x, r, peers.quantize(x, (scale, output), (0, zero), qtype))


@pytest.mark.parametrize("qtype", ["int8", "uint8", "int16"])
def test_mul(qtype):
    pytest.importorskip("ai_edge_litert")
    rng = np.random.default_rng(0)
    for output in (0.7, 256.0, 2.0**14, 3e4):
        scales = (F(0.5), F(0.3), F(output))
        zeros = [0] * 3 if qtype == "int16" else codes(rng, qtype, 3).tolist()
        a, b = codes(rng, qtype, (2, 20_000))
        factor = scales[0] * scales[1] / scales[2]  # all in float32
        r = Requantization.of(factor, 1.0, 1.0, qtype=jnp.dtype(qtype), zero_point=zeros[2])
        product = (a.astype(np.int64) - zeros[0]) * (b.astype(np.int64) - zeros[1])
        assert_codes(product, r, peers.mul(a, b, scales, zeros))


def test_batch_matmul():
    pytest.importorskip("ai_edge_litert")
    rng = np.random.default_rng(1)
    for output in (8.0, 3.0, 64.0, 0.05):
        scales, zeros = (F(0.0371), F(0.25), F(output * 0.0371)), codes(rng, "int8", 3).tolist()
        a, b = codes(rng, "int8", (200, 24)), codes(rng, "int8", (24, 50))
        sums = (a.astype(np.int64) - zeros[0]) @ (b.astype(np.int64) - zeros[1])
        product = scales[0] * scales[1]  # in float32, as GetQuantizedConvolutionMultipler does
        r = Requantization.of(product, 1.0, scales[2], qtype=jnp.int8, zero_point=zeros[2])
        assert_codes(sums, r, peers.matmul(a, b, scales, zeros))


@pytest.mark.parametrize("relu", [False, True])
def test_convolution_with_a_scale_for_each_channel(relu):
    pytest.importorskip("ai_edge_litert")
    rng = np.random.default_rng(2)
    powers = 2.0 ** rng.integers(-3, 1, 50)
    for weights in (powers.astype(F), rng.uniform(0.1, 1, 50).astype(F)):
        scales, zeros = (F(0.5), weights, F(128)), (-3, 0, -60)
        x, w = codes(rng, "int8", (200, 24)), rng.integers(-127, 128, (24, 50)).astype(np.int8)
        bias = rng.integers(-30_000, 30_000, 50).astype(np.int32)
        r = Requantization.of(
            *scales, qtype=jnp.int8, zero_point=-60, bias=bias, low=-60 if relu else None
        )
        sums = (x.astype(np.int64) + 3) @ w.astype(np.int64)
        assert_codes(sums, r, peers.convolution(x, w, bias, scales, zeros, relu))
