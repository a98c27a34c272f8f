import jax.numpy as jnp
import numpy as np
import pytest

from jqx import numerics

from .oracles import code_range

EXPECTED = {
    "int2": (-2, 1),
    "int4": (-8, 7),
    "int8": (-128, 127),
    "int16": (-32768, 32767),
    "int32": (-2147483648, 2147483647),
    "uint2": (0, 3),
    "uint4": (0, 15),
    "uint8": (0, 255),
    "uint16": (0, 65535),
    "uint32": (0, 4294967295),
}


def test_the_ten_integer_formats_and_no_other_are_listed():
    assert set(numerics.INTEGERS) == set(EXPECTED)
    assert len(numerics.INTEGERS) == len(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_integer_formats_have_the_ranges_of_twos_complement(name):
    assert numerics.integer_range(name) == EXPECTED[name] == code_range(name)
    assert numerics.integer_range(getattr(jnp, name)) == EXPECTED[name]
    low, high = EXPECTED[name]
    assert numerics.is_signed(name) is (low < 0)
    assert numerics.bit_width(name) == (high - low).bit_length()
    assert numerics.is_quantized_type(name)


@pytest.mark.parametrize("name", EXPECTED)
def test_integer_ranges_are_python_integers(name):
    assert all(type(bound) is int for bound in numerics.integer_range(name))
    assert type(numerics.bit_width(name)) is int


@pytest.mark.parametrize(
    "name", ["bool", "int64", "uint64", "float16", "bfloat16", "float32", "float8_e4m3fn"]
)
def test_other_dtypes_are_not_quantized_types(name):
    assert not numerics.is_quantized_type(name)
    with pytest.raises(TypeError, match=r"^jqx\.caller: Output element type \(" + name):
        numerics.as_quantized_type("caller", "qtype", name, "Output")


def test_every_way_to_name_a_format_gives_the_same_dtype():
    for spelling in ("int8", jnp.int8, np.int8, np.dtype("int8"), jnp.dtype("int8")):
        dtype = numerics.as_quantized_type("caller", "qtype", spelling, "Output")
        assert dtype == np.dtype(np.int8)


def test_what_is_no_dtype_is_refused_by_name():
    with pytest.raises(TypeError, match=r"^jqx\.caller: `qtype` is not a dtype") as refusal:
        numerics.as_quantized_type("caller", "qtype", "int7", "Output")
    assert "int7" in str(refusal.value)


@pytest.mark.parametrize(
    "dtype, wide",
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_small_floats_are_computed_in_float32(dtype, wide):
    assert numerics.compute_dtype(dtype) == np.dtype(wide)
