import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jqx import RoundMode
from jqx._src.numerics.minifloats import MINIFLOATS
from jqx.numerics import Minifloat, Specials, float6_e2m3fn, float6_e3m2fn, format_of

from ..arrays import on_device
from .tables import (
    GRID,
    assert_conforms,
    assert_same_numbers,
    every_way,
    grid,
    minifloat_numbers,
    minifloat_table,
)

NEAREST_EVEN = RoundMode.NEAREST_TOWARD_EVEN
STANDARD = {  # the formats of ml_dtypes: exponent and mantissa bits, specials, bias, largest
    "float8_e4m3fn": (4, 3, "fn", 7, 448),
    "float8_e4m3": (4, 3, "", 7, 240),
    "float8_e4m3fnuz": (4, 3, "fnuz", 8, 240),
    "float8_e4m3b11fnuz": (4, 3, "fnuz", 11, 30),
    "float8_e5m2": (5, 2, "", 15, 57344),
    "float8_e5m2fnuz": (5, 2, "fnuz", 16, 57344),
    "float8_e3m4": (3, 4, "", 3, 15.5),
    "float6_e2m3fn": (2, 3, "finite", 1, 7.5),
    "float6_e3m2fn": (3, 2, "finite", 3, 28),
    "float4_e2m1fn": (2, 1, "finite", 1, 6),
}
OVERFLOWING = [name for name, fields in STANDARD.items() if fields[2] != "finite"]
SIX_BITS = {"float6_e2m3fn": float6_e2m3fn, "float6_e3m2fn": float6_e3m2fn}


def _exists(e, m, specials):
    """IEEE needs a mantissa bit for NaN; a format must have a number besides zero, in steps of at
    most 1.
    """
    return m > 0 if specials == "" else e + m >= 2 or specials == "fnuz"


COMBINATIONS = [
    (e, m, specials)
    for e in range(1, 8)
    for m in range(8 - e)
    for specials in ("", "fn", "fnuz", "finite")
    if _exists(e, m, specials)
]


def standard(name):
    return SIX_BITS.get(name) or format_of(name)


def kind_of(name):
    return getattr(ml_dtypes, name)


def nonsaturating(name):
    e, m, specials, bias, _ = STANDARD[name]
    return Minifloat(e, m, Specials(specials), bias, saturate=False)


def bits_of(array):
    return np.asarray(array).view(np.uint8)


def all_codes(qtype):
    return qtype.from_bits(jnp.arange(2**qtype.bits, dtype=jnp.uint8))


def name_of(combination):
    e, m, specials = combination
    return f"e{e}m{m}{specials}"


@pytest.mark.parametrize("name", STANDARD)
def test_the_standard_formats_are_those_of_their_specifications(name):
    e, m, specials, bias, largest = STANDARD[name]
    qtype = standard(name)
    assert qtype == Minifloat(e, m, Specials(specials), bias)
    assert qtype.name == str(qtype) == name
    assert (qtype.bits, qtype.low, qtype.high) == (1 + e + m, -largest, largest)
    assert qtype.signed and not qtype.uniform and qtype.saturate
    assert qtype.storage == (np.uint8 if name in SIX_BITS else kind_of(name))
    if name != "float8_e4m3b11fnuz":
        assert Minifloat(e, m, Specials(specials)) == qtype


def test_the_minifloat_dtypes_of_jax_are_listed():
    assert set(MINIFLOATS) == set(STANDARD) - set(SIX_BITS)
    assert len(MINIFLOATS) == 8


@pytest.mark.many
@pytest.mark.parametrize("name", STANDARD)
def test_every_code_decodes_as_in_ml_dtypes(name):
    qtype = standard(name)
    codes = np.arange(2**qtype.bits, dtype=np.uint8)
    expected = codes.view(kind_of(name)).astype(np.float64)
    assert_same_numbers(minifloat_numbers(*STANDARD[name][:4]), expected)
    for decode in (qtype.decode, jax.jit(jax.vmap(qtype.decode))):
        assert_same_numbers(decode(all_codes(qtype)), expected)
    assert_same_numbers(qtype.decode(qtype.widen_bits(on_device(codes))), expected)


@pytest.mark.many
@pytest.mark.parametrize("name", STANDARD)
def test_nearest_even_that_saturates_is_the_clipped_cast_of_ml_dtypes(name):
    largest, qtype = STANDARD[name][4], standard(name)
    y = grid(minifloat_table(*STANDARD[name][:4]).numbers)
    y = y[~np.isnan(y)]
    expected = np.clip(y, -np.float32(largest), np.float32(largest)).astype(kind_of(name))
    for encode in (qtype.encode_bits, jax.jit(qtype.encode_bits, static_argnums=1)):
        np.testing.assert_array_equal(encode(on_device(y), NEAREST_EVEN), bits_of(expected))


@pytest.mark.parametrize("name", OVERFLOWING)
def test_nearest_even_that_overflows_is_the_cast_of_ml_dtypes(name):
    qtype = nonsaturating(name)
    y = grid(minifloat_table(*STANDARD[name][:4], saturate=False).numbers)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = y.astype(kind_of(name))
    codes = qtype.encode(on_device(y), NEAREST_EVEN)
    assert codes.dtype == kind_of(name)
    assert_same_numbers(codes, expected.astype(np.float64))
    nan = np.isnan(expected.astype(np.float32))
    assert np.any(nan)
    np.testing.assert_array_equal(bits_of(codes)[~nan], bits_of(expected)[~nan])
    assert set(bits_of(codes)[nan]) == set(bits_of(np.array([np.nan]).astype(kind_of(name))))


@pytest.mark.parametrize("combination", COMBINATIONS, ids=name_of)
def test_every_combination_of_widths_decodes_every_code_and_encodes_every_number(combination):
    e, m, specials = combination
    qtype = Minifloat(e, m, Specials(specials))
    numbers = minifloat_numbers(e, m, specials)
    padded = np.resize(np.arange(len(numbers)), 256)
    codes = qtype.from_bits(on_device(padded, jnp.uint8))
    decoded = qtype.decode(codes)
    assert_same_numbers(decoded, numbers[padded])
    finite = numbers[np.isfinite(numbers)]
    assert (qtype.low, qtype.high, qtype.bits) == (finite.min(), finite.max(), 1 + e + m)
    assert qtype.levels == len(np.unique(finite))
    for mode in (NEAREST_EVEN, RoundMode.UP):
        back = np.asarray(qtype.encode_bits(decoded, mode))
        exact = np.isfinite(numbers[padded])
        np.testing.assert_array_equal(back[exact], padded[exact])


@pytest.mark.many
@pytest.mark.parametrize("combination", COMBINATIONS, ids=name_of)
def test_every_combination_of_widths_rounds_as_its_table_in_all_nine_modes(combination):
    e, m, specials = combination
    for saturate in (True, False)[: 1 + (specials != "finite")]:
        qtype = Minifloat(e, m, Specials(specials), saturate=saturate)
        table = minifloat_table(e, m, specials, saturate=saturate)
        y = grid(table.numbers)
        for mode in RoundMode:
            found = every_way(qtype, on_device(y), mode)
            assert_conforms(qtype, found, y, table.rounded(y, mode))


@pytest.mark.parametrize("bias", [-1, 0, 11, 60, 100])
@pytest.mark.parametrize("specials", ["", "fn", "fnuz", "finite"])
def test_a_bias_of_ones_own_moves_the_table(specials, bias):
    qtype = Minifloat(3, 2, Specials(specials), bias)
    table = minifloat_table(3, 2, specials, bias)
    y = grid(table.numbers)
    for mode in RoundMode:
        assert_conforms(qtype, every_way(qtype, on_device(y), mode), y, table.rounded(y, mode))


def test_the_name_tells_a_bias_and_an_overflow_that_are_not_the_usual_ones():
    assert str(Minifloat(3, 2, Specials.NONE, 5)) == "float6_e3m2b5fn"
    assert str(Minifloat(4, 3, Specials.NAN, saturate=False)) == "float8_e4m3fn_nonsaturating"
    assert str(Minifloat(4, 3, Specials.NONE)) == "float8_e4m3_finite"
    every = {Minifloat(e, m, Specials(s)).name for e, m, s in COMBINATIONS if s != "finite"}
    assert len(every) == sum(s != "finite" for _, _, s in COMBINATIONS)


@functools.partial(jax.jit, static_argnums=(0, 2))
def mapped_every_way(qtype, y, mode):
    return jax.vmap(lambda row: every_way(qtype, row, mode))(y)


@pytest.mark.many
@pytest.mark.parametrize("mode", RoundMode)
@pytest.mark.parametrize("saturate", [True, False])
def test_jit_and_vmap_change_nothing_in_any_mode(saturate, mode):
    qtype = Minifloat(4, 3, Specials.NAN, saturate=saturate)
    table = minifloat_table(4, 3, "fn", saturate=saturate)
    y = grid(table.numbers).reshape(8, GRID // 8)
    found = mapped_every_way(qtype, on_device(y), mode)
    assert_conforms(qtype, found, y, table.rounded(y, mode))


@pytest.mark.parametrize("name", STANDARD)
def test_jit_and_vmap_change_nothing_in_any_standard_format(name):
    table = minifloat_table(*STANDARD[name][:4])
    y = grid(table.numbers).reshape(8, GRID // 8)
    found = mapped_every_way(standard(name), on_device(y), NEAREST_EVEN)
    assert_conforms(standard(name), found, y, table.rounded(y, NEAREST_EVEN))


@pytest.mark.many
@pytest.mark.parametrize("name", STANDARD)
def test_float64_is_rounded_once(name):
    table = minifloat_table(*STANDARD[name][:4])
    y = grid(table.numbers, np.float64)  # its neighbours of ties are ties in float32
    with jax.enable_x64(True):
        for mode in RoundMode:
            found = every_way(standard(name), on_device(y), mode)
            assert_conforms(standard(name), found, y, table.rounded(y, mode))


@pytest.mark.parametrize("name", STANDARD)
def test_float32_is_rounded_alike_where_x64_is_on(name):
    table = minifloat_table(*STANDARD[name][:4])
    y = grid(table.numbers)
    with jax.enable_x64(True):
        found = every_way(standard(name), on_device(y), NEAREST_EVEN)
        assert_conforms(standard(name), found, y, table.rounded(y, NEAREST_EVEN))


@pytest.mark.parametrize(
    "name, overflow", [("float8_e5m2", np.inf), ("float8_e4m3fn", np.nan), ("float8_e3m4", np.inf)]
)
def test_what_would_round_beyond_the_largest_number_overflows_as_the_mode_says(name, overflow):
    largest = STANDARD[name][4]
    step = largest - float(np.nextafter(kind_of(name)(largest), kind_of(name)(0)))
    y = on_device([largest, largest + step / 4, largest + step * 3 / 4, 4 * largest], jnp.float32)
    qtype = nonsaturating(name)
    rows = {
        RoundMode.NEAREST_TOWARD_EVEN: [largest, largest, overflow, overflow],
        RoundMode.UP: [largest, overflow, overflow, overflow],
        RoundMode.TOWARD_INFINITY: [largest, overflow, overflow, overflow],
        RoundMode.DOWN: [largest, largest, largest, overflow],
        RoundMode.TOWARD_ZERO: [largest, largest, largest, overflow],
    }
    for mode, expected in rows.items():
        np.testing.assert_array_equal(qtype.round(y, mode), np.float32(expected))
    down = -np.float32([largest, overflow, overflow, overflow])
    np.testing.assert_array_equal(qtype.round(-y, RoundMode.DOWN), down)


def test_the_families_of_specials_have_the_suffixes_of_their_names():
    assert [specials.value for specials in Specials] == ["", "fn", "fnuz", "finite"]


@pytest.mark.parametrize(
    "fields, facts",
    [
        ({"exponent_bits": 0, "mantissa_bits": 3}, "exponent_bits == 0"),
        ({"exponent_bits": 8, "mantissa_bits": 0}, "exponent_bits == 8"),
        ({"exponent_bits": 4, "mantissa_bits": 4}, "4 exponent bits, 4 mantissa bits"),
        ({"exponent_bits": 4, "mantissa_bits": -1}, "mantissa_bits == -1"),
        ({"exponent_bits": 5, "mantissa_bits": 0}, "0 mantissa bits and Specials.INFINITY_AND_NAN"),
        (
            {"exponent_bits": 1, "mantissa_bits": 0, "specials": Specials.NAN},
            "0 mantissa bits and Specials.NAN",  # its only number would be zero
        ),
        ({"exponent_bits": 2000, "mantissa_bits": 0}, "exponent_bits == 2000"),
        ({"exponent_bits": 3, "mantissa_bits": 2, "bias": 101}, "bias == 101"),
        ({"exponent_bits": 3, "mantissa_bits": 2, "bias": -2}, "bias == -2"),
        (
            {"exponent_bits": 7, "mantissa_bits": 0, "specials": Specials.NAN, "bias": -1},
            "bias == -1",  # its largest number would be 2**127 times 2
        ),
        (
            {
                "exponent_bits": 3,
                "mantissa_bits": 2,
                "specials": Specials.NONE,
                "saturate": False,
            },
            "without infinity and NaN must saturate",
        ),
    ],
)
def test_formats_that_do_not_exist_are_refused(fields, facts):
    parts = r"(?s)jqx\.numerics\.Minifloat: .*{}.*\n  fix:      .+"
    with pytest.raises(ValueError, match=parts.format(re.escape(facts))):
        Minifloat(**fields)


@pytest.mark.parametrize(
    "field, value",
    [
        ("exponent_bits", 4.0),
        ("mantissa_bits", True),
        ("bias", "7"),
        ("specials", "fn"),
        ("saturate", 1),
    ],
)
def test_fields_of_the_wrong_kind_are_refused_by_name(field, value):
    fields = {"exponent_bits": 4, "mantissa_bits": 3} | {field: value}
    parts = rf"jqx\.numerics\.Minifloat: `{field}` .+(\n  given: .+)?(\n  expected: .+)?\n  fix: .+"
    with pytest.raises(TypeError, match=parts):
        Minifloat(**fields)


def test_widths_of_numpy_integers_are_the_same_format():
    assert Minifloat(np.int64(4), np.int8(3)) == Minifloat(4, 3)
    assert hash(Minifloat(np.int64(4), np.int8(3))) == hash(Minifloat(4, 3))
