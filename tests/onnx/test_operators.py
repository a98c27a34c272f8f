"""The specified operators in ONNX: bit for bit, and as nodes of their own where ONNX has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.interop import to_onnx

from .runtime import assert_equal, operations, run

FORMATS = ("int8", "uint8", "int16", "uint16", "int4", "uint4")
SCALE, SCALES = 0.037, np.array([0.037, 0.1, 2.0, 1e-3], "f4")
ONCE = {"Identity": 1, "Equal": 1, "Where": 1}  # the output, and NaN in front of QuantizeLinear


def near_ties(scale):
    """Numbers at ties and beside them, far outside, and not finite; float32 [n, 4]."""
    ties = (np.random.default_rng(0).integers(-300, 300, 500) + 0.5).astype("f4") * np.float32(
        scale
    )
    beside = (np.nextafter(ties, np.float32(to)) for to in (np.inf, -np.inf))
    odd = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1e38, -1e38, 3e5], "f4")
    return np.concatenate([ties, *beside, odd, ties * np.float32(1.37)]).reshape(-1, 4)


def compare(f, *args):
    """Compares a function in a file with JAX, and returns the operations of the file."""
    model = to_onnx(lambda _, *args: f(*args), {})(*args)
    assert_equal(run(model, *args), jax.tree.map(np.asarray, jax.jit(f)(*args)))
    return dict(operations(model))


def wide(codes):
    return codes.astype(jnp.int32) if codes.dtype.name in ("int4", "uint4") else codes


@pytest.mark.parametrize("qtype", FORMATS)
def test_operators_are_nodes_of_their_own(qtype):
    x, zero = near_ties(SCALE), np.asarray(3, qtype)
    zeros = np.array([0, 1, 2, 3], qtype)
    cast = {"Cast": 1} if "4" in qtype else {}
    quantized = {**ONCE, "QuantizeLinear": 1, **cast}
    cases = [
        (lambda x: wide(jqx.quantize(x, SCALE, qtype=qtype)), quantized),
        (lambda x: wide(jqx.quantize(x, SCALE, zero, qtype=qtype)), quantized),
        (lambda x: wide(jqx.quantize(x, SCALES, zeros, qtype=qtype, axes=1)), quantized),
        (
            lambda x: jqx.quantize_dequantize(x, SCALES, zeros, qtype=qtype, axes=1),
            {**ONCE, "QuantizeLinear": 1, "DequantizeLinear": 1},
        ),
        (
            lambda x: jqx.dequantize(jqx.quantize(x, SCALE, qtype=qtype), SCALES, zeros, axes=1),
            {**ONCE, "QuantizeLinear": 1, "DequantizeLinear": 1},
        ),
    ]
    for f, expected in cases:
        assert compare(f, x) == expected
    by_row = np.abs(x[:, 0]) + np.float32(0.01)
    by_row[~np.isfinite(by_row)] = 0
    found = compare(lambda x, s: wide(jqx.quantize(x, s, qtype=qtype, axes=0)), x, by_row)
    assert "QuantizeLinear" not in found and sum(found.values()) < 14


@pytest.mark.parametrize("mode", [pytest.param(m, marks=pytest.mark.slow) for m in jqx.RoundMode])
def test_every_round_mode(mode):
    def f(x):
        codes = [
            jqx.quantize(x, 0.5, np.asarray(3, q), qtype=q, round_mode=mode)
            for q in ("int8", "uint16", "int4")
        ]
        real = jqx.quantize_dequantize(x, 0.5, qtype="int8", round_mode=mode)
        return [*map(wide, codes), real, jqx.round(x, mode)]

    compare(f, near_ties(0.5))


def test_what_has_no_node_is_its_arithmetic():
    def f(x):
        single = np.float32(SCALE)[None]
        yield jqx.quantize(x, SCALE, qtype="int32")
        yield jqx.quantize(x, SCALE, qtype="int8", round_mode=jqx.RoundMode.TOWARD_ZERO)
        yield jqx.quantize(x, SCALE, qtype="float8_e4m3fn").astype(jnp.float32)
        yield jqx.quantize(x.astype(jnp.float16), jnp.float16(SCALE), qtype="int8")
        yield jqx.dynamic_quantize(x, single, np.array([3], "i1"))
        yield jqx.fake_quantize(x, -1.0, 2.0, -1.0, 2.0, levels=255)
        yield jqx.fake_quantize(x, 0.0, 1.0, 0.0, 1.0, levels=16)
        yield jqx.quantize_dequantize(x, SCALE, qtype="int8", gradient=jqx.gradients.ste_unclipped)

    compare(lambda x: list(f(x)), near_ties(SCALE))


def test_bits_of_numbers():
    rng = np.random.default_rng(0)
    powers = np.arange(1, 255, dtype="u4") << 23
    odd = np.array([0, 1, 2**23 - 1, 2**31, 2**31 + 1, 0x7F800000, 0xFF800000], "u4")
    bits = np.concatenate(
        [rng.integers(0, 2**32, 20_000, "u4"), powers, powers - 1, powers + 1, odd]
    )
    bits = bits[~np.isnan(bits.view("f4"))].view("i4")

    def f(bits, x):
        yield lax.bitcast_convert_type(x, jnp.int32)
        yield lax.bitcast_convert_type(x, jnp.uint32)
        yield lax.bitcast_convert_type(lax.bitcast_convert_type(bits, jnp.float32), jnp.int32)
        yield lax.bitcast_convert_type(bits, jnp.uint32)

    model = to_onnx(lambda _, *args: list(f(*args)), {})(bits, bits.view("f4"))
    for found in run(model, bits, bits.view("f4")):
        np.testing.assert_array_equal(found.view("i4"), bits)
    with pytest.raises(NotImplementedError, match="of float16 to int16 has no form"):
        to_onnx(lambda _, x: lax.bitcast_convert_type(x, jnp.int16), {})(np.ones(3, "f2"))
