import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jqx
from jqx import RoundMode, numerics
from jqx._src.numerics.lookup import E8M0
from jqx.numerics import Block, Integer, float6_e2m3fn, float6_e3m2fn, mxint8, nf4, nvfp4

from ..arrays import on_device
from ..oracles.refusals import assert_refused
from .tables import assert_conforms, assert_same_numbers, every_way, grid, minifloat_table, table_of

ELEMENTS = {  # exponent and mantissa bits, specials, largest number, dtype of the codes
    "mxfp8_e4m3": ((4, 3, "fn"), 448.0, "float8_e4m3fn"),
    "mxfp8_e5m2": ((5, 2, ""), 57344.0, "float8_e5m2"),
    "mxfp6_e2m3": ((2, 3, "finite"), 7.5, "uint8"),
    "mxfp6_e3m2": ((3, 2, "finite"), 28.0, "uint8"),
    "mxfp4": ((2, 1, "finite"), 6.0, "float4_e2m1fn"),
    "mxint8": (None, 127 / 64, "int8"),
    "nvfp4": ((2, 1, "finite"), 6.0, "float4_e2m1fn"),
}
MX = [name for name in ELEMENTS if name.startswith("mx")]


def table_named(name):
    fields, _, _ = ELEMENTS[name]
    if fields is not None:
        return minifloat_table(*fields)
    numbers = np.arange(-127, 128) / 64
    return dataclasses.replace(table_of(numbers * 64, nan=0.0), numbers=numbers)


@pytest.mark.parametrize("name", ELEMENTS)
def test_the_block_formats_are_those_of_their_specifications(name):
    qtype, (_, largest, storage) = getattr(numerics, name), ELEMENTS[name]
    assert qtype.name == str(qtype) == name
    assert (qtype.size, qtype.low, qtype.high) == (16 if name == "nvfp4" else 32, -largest, largest)
    assert qtype.storage == jnp.dtype(storage)
    assert qtype.bits == int(re.search(r"\d", name)[0])
    assert qtype.scale_qtype == (ml_dtypes.float8_e4m3fn if name == "nvfp4" else E8M0)
    assert qtype.levels == len(table_named(name).numbers)
    assert qtype.signed
    assert qtype.elements.bits == qtype.bits


def every_magnitude():
    """The powers of two of every exponent of float32, floats around them, and what is no number."""
    powers = np.ldexp(np.float32(1), np.arange(-126, 128))
    near = [np.nextafter(powers, np.float32(to)) for to in (0, np.inf)]
    subnormal = np.ldexp(np.float32(1), np.arange(-149, -126))
    rest = np.array([0.0, np.finfo(np.float32).max, np.inf, np.nan], np.float32)
    return np.concatenate([powers, *near, powers * np.float32(1.75), subnormal, rest])


def scale_by_the_rule(largest, high):
    """`2**(floor(log2(largest)) - floor(log2(high)))` in the range of E8M0, by frexp."""
    exponent = np.frexp(np.where(np.isfinite(largest), largest, 0).astype(np.float64))[1] - 1
    exponent = np.where(largest == 0, -(10**6), np.where(np.isinf(largest), 128, exponent))
    exponent = exponent - (np.frexp(high)[1] - 1)
    return np.where(np.isnan(largest), np.nan, np.ldexp(1.0, np.clip(exponent, -127, 127)))


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", MX)
def test_the_scale_is_the_power_of_two_of_the_ocp_rule(name, x64):
    qtype, largest = getattr(numerics, name), every_magnitude()
    expected = scale_by_the_rule(largest, ELEMENTS[name][1])
    with jax.enable_x64(x64):
        for f in (qtype.scale_of, jax.jit(jax.vmap(qtype.scale_of))):
            scale = f(on_device(largest))
            assert scale.dtype == E8M0
            assert_same_numbers(scale, expected)


@pytest.mark.parametrize("name", MX)
def test_the_scale_of_float64_reaches_both_ends_of_e8m0(name):
    qtype = getattr(numerics, name)
    largest = np.array([1e-300, 2.0**-127, 2.0**-126, 3.0, 2.0**127, 1e300, 0.0, np.nan])
    with jax.enable_x64(True):
        scale = qtype.scale_of(on_device(largest))
        assert_same_numbers(scale, scale_by_the_rule(largest, ELEMENTS[name][1]))
    assert {2.0**-127, 2.0**127} <= set(np.asarray(scale).astype(np.float64).tolist())


@pytest.mark.parametrize("x64", [False, True])
def test_the_scale_of_nvfp4_is_a_quotient(x64):
    kind = np.float64 if x64 else np.float32
    largest = every_magnitude().astype(kind)
    largest = largest[~((largest / 6 < np.finfo(np.float32).tiny) & (largest > 0))]
    with jax.enable_x64(x64):
        for f in (nvfp4.scale_of, jax.jit(nvfp4.scale_of)):
            scale = f(on_device(largest))
            assert scale.dtype == kind
            np.testing.assert_array_equal(scale, largest / kind(6))


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_number_midpoint_and_neighbour_is_rounded_in_all_nine_modes(name):
    qtype, table = getattr(numerics, name), table_named(name)
    y = grid(table.numbers)
    for mode in RoundMode:
        actual = every_way(qtype, on_device(y), mode)
        assert_conforms(qtype, actual, y, table.rounded(y, mode))


@pytest.mark.parametrize("name", ["mxint8", "mxfp4"])
def test_jit_and_float64_change_nothing(name):
    qtype, table = getattr(numerics, name), table_named(name)
    mode = RoundMode.NEAREST_TOWARD_EVEN
    y = grid(table.numbers)
    actual = jax.jit(lambda y: every_way(qtype, y, mode))(y)
    assert_conforms(qtype, actual, y, table.rounded(y, mode))
    y = grid(table.numbers, np.float64)
    with jax.enable_x64(True):
        actual = every_way(qtype, on_device(y), mode)
        assert_conforms(qtype, actual, y, table.rounded(y, mode))


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_code_decodes_as_its_element_times_the_unit(name):
    qtype = getattr(numerics, name)
    bits = jnp.arange(2**qtype.bits, dtype=jnp.uint8)
    elements = np.asarray(qtype.elements.decode(qtype.elements.from_bits(bits)))
    unit = 2.0**-6 if name == "mxint8" else 1.0
    decoded = qtype.decode(qtype.from_bits(bits))
    assert decoded.dtype == np.float32
    assert_same_numbers(decoded, elements.astype(np.float64) * unit)
    np.testing.assert_array_equal(qtype.to_bits(qtype.from_bits(bits)), bits)


def test_mxint8_is_the_fixed_point_number_of_the_specification():
    assert mxint8.elements == Integer(8, narrow=True) and mxint8.unit == 2.0**-6
    codes = on_device([-127, -64, 0, 1, 127], jnp.int8)
    assert mxint8.decode(codes).tolist() == [-127 / 64, -1.0, 0.0, 1 / 64, 127 / 64]


def test_a_block_format_of_ones_own_takes_any_element():
    ours = Block(nf4, 8, "mine", scale_qtype=jnp.float8_e5m2, unit=0.5)
    assert (ours.name, ours.high, ours.bits, ours.elements) == ("mine", 0.5, 4, nf4)
    y = on_device([-0.5, 0.1, 3.0], jnp.float32)
    for mode in RoundMode:
        expected = nf4.round(y * 2, mode) / 2
        np.testing.assert_array_equal(ours.round(y, mode), expected)
        np.testing.assert_array_equal(ours.decode(ours.encode(y, mode)), expected)


@pytest.mark.parametrize("exponent", [-40, 0, 31])
def test_a_unit_of_four_thirds_clips_nothing(exponent, tmp_path):
    """The 3/4 rule: the scale is that of MXFP4, and its largest number 8 scales, not 6."""
    wide = Block(jnp.float4_e2m1fn, 32, "mxfp4_wide", unit=4 / 3)
    rng, powers = np.random.default_rng(0), np.exp2(np.arange(-3, 4))[:, None]
    x = np.float32(rng.normal(size=(7, 32)) * powers * 2.0**exponent)
    x[0, 3] = np.float32(2.0 ** (exponent + 3)) * np.float32(1 - 2**-24)  # as near 8 as there is
    spec = jqx.QSpec(wide, jqx.per_block({0: 1, 1: 32}))
    actual = jax.jit(lambda x: jqx.QTensor.quantize(x, spec))(on_device(x, jnp.float32))
    scale = np.exp2(np.frexp(np.abs(x).max(1, keepdims=True))[1] - 3.0)
    np.testing.assert_array_equal(actual.scale.astype(jnp.float32), scale)
    exact = x.astype(np.float64) / (scale * (4 / 3))
    assert np.abs(exact).max() <= 6
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = numbers[np.abs(np.abs(exact)[..., None] - numbers).argmin(-1)] * np.sign(exact)
    real = np.asarray(actual.dequantize(), np.float64)
    # One rounding of 4/3 to float32, and one of its product with a number.
    np.testing.assert_allclose(real, nearest * scale * (4 / 3), rtol=2.0**-22)
    same = jqx.calibrators.Affine(actual.scale)
    other = jqx.QTensor.quantize(actual.dequantize(), spec, same)
    np.testing.assert_array_equal(other.dequantize(), actual.dequantize())
    y = on_device(rng.normal(size=(3, 32)), jnp.float32)
    product = jqx.dot_general(y, actual, (((1,), (1,)), ((), ())))
    expected = np.asarray(y, np.float64) @ real.T
    # Sums of 32 products in float32.
    bound = 2.0**-20 * (np.abs(np.asarray(y, np.float64)) @ np.abs(real.T))
    assert (np.abs(product - expected) <= bound).all()
    jqx.save(path := tmp_path / "wide.safetensors", {"x": actual})
    loaded = jqx.load(path)["x"]
    assert loaded.qtype == wide and (loaded.dequantize() == actual.dequantize()).all()


def test_equal_block_formats_are_one_value_however_they_are_written():
    assert Block("int8", np.int64(32)) == Block(jnp.int8, 32) == Block(Integer(8), 32)
    assert hash(Block("int8", np.int64(32))) == hash(Block(jnp.int8, 32))
    assert Block(jnp.int8, 32) != Block(jnp.int8, 16)
    assert Block(float6_e2m3fn, 32, "mxfp6_e2m3") == numerics.mxfp6_e2m3
    assert Block(float6_e3m2fn, 32, "mxfp6_e3m2") == numerics.mxfp6_e3m2


@pytest.mark.parametrize(
    "fields, error, problem, fact",
    [
        ({"size": 0}, ValueError, "`size` is out of range", "size == 0"),
        ({"size": -4}, ValueError, "`size` is out of range", "size == -4"),
        ({"unit": 2.0**65}, ValueError, "`unit` is out of range", "unit == 3.6893488147419103e+19"),
        ({"unit": 0.0}, ValueError, "`unit` is out of range", "unit == 0.0"),
        ({"unit": -0.5}, ValueError, "`unit` is out of range", "unit == -0.5"),
        ({"unit": float("inf")}, ValueError, "`unit` is out of range", "unit == inf"),
        ({"unit": float("nan")}, ValueError, "`unit` is out of range", "unit == nan"),
        ({"element": jnp.float32}, TypeError, "element type (float32)", "Block"),
        ({"element": "int9"}, TypeError, "`element` is not a dtype", "int9"),
        ({"size": 32.0}, TypeError, "`size` has the wrong type", "size == 32.0"),
        ({"size": True}, TypeError, "`size` has the wrong type", "size == True"),
        ({"label": 3}, TypeError, "`label` is not a str", "label == 3"),
        ({"scale_qtype": jnp.float32}, TypeError, "element type (float32)", "Scale"),
        ({"scale_qtype": jnp.int8}, TypeError, "not a float format", "`scale_qtype` (int8)"),
        ({"scale_qtype": nf4}, TypeError, "not a float format", "`scale_qtype` (nf4)"),
        ({"unit": "1"}, TypeError, "`unit` has the wrong type", "unit == '1'"),
    ],
)
def test_fields_that_make_no_format_are_refused_by_name(fields, error, problem, fact):
    fields = {"element": jnp.int8, "size": 32} | fields
    assert_refused(lambda: Block(**fields), (), error, "numerics.Block", problem, fact)
