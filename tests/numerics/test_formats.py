"""Integers, minifloats and codebooks: each rounds as its table, however it is evaluated."""

import functools
import itertools
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jqx import RoundMode, numerics
from jqx._src.numerics.minifloats import MINIFLOATS
from jqx._src.numerics.qtype import INTEGERS
from jqx.numerics import (
    Codebook,
    Integer,
    Minifloat,
    Specials,
    binary,
    float6_e2m3fn,
    float6_e3m2fn,
    format_of,
    nf4,
)

from ..arrays import on_device
from ..oracles.formats import NF4
from ..oracles.numerics import assert_codes, code_range, codes_of, rounded
from ..oracles.refusals import assert_refused
from .tables import (
    GRID,
    Table,
    assert_conforms,
    assert_same_numbers,
    every_way,
    grid,
    minifloat_numbers,
    minifloat_table,
    table_of,
)

NEAREST_EVEN = RoundMode.NEAREST_TOWARD_EVEN
RANGES = {  # name: fields, smallest and largest, dtype of the codes
    **{f"int{b}": ((b,), -(2 ** (b - 1)), 2 ** (b - 1) - 1) for b in range(2, 9)},
    **{f"uint{b}": ((b, False), 0, 2**b - 1) for b in range(2, 9)},
    **{
        f"int{b}_narrow": ((b, True, True), 1 - 2 ** (b - 1), 2 ** (b - 1) - 1) for b in range(3, 9)
    },
    "ternary": ((2, True, True), -1, 1),
}
WIDE = {
    "int16": ((16,), -32768, 32767),
    "int32": ((32,), -2147483648, 2147483647),
    "uint16": ((16, False), 0, 65535),
    "uint32": ((32, False), 0, 4294967295),
    "int16_narrow": ((16, True, True), -32767, 32767),
    "int32_narrow": ((32, True, True), -2147483647, 2147483647),
}
NATIVE = ("int2", "int4", "int8", "uint2", "uint4", "uint8")


def integer(name):
    return Integer(*(RANGES | WIDE)[name][0])


def integer_table(name):
    _, low, high = RANGES[name]
    return table_of(np.arange(low, high + 1), nan=0.0)


def test_the_ten_integer_dtypes_of_jax_and_no_other_are_listed():
    names = {f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16, 32)}
    assert set(INTEGERS) == names and len(INTEGERS) == 10
    for name in INTEGERS:
        assert jnp.dtype(name).name == name
        assert code_range(name) == (RANGES | WIDE)[name][1:]


@pytest.mark.parametrize("name", [*RANGES, *WIDE])
def test_the_range_is_that_of_twos_complement(name):
    fields, low, high = (RANGES | WIDE)[name]
    qtype = Integer(*fields)
    assert qtype.name == str(qtype) == name
    assert (qtype.low, qtype.high, qtype.bits) == (low, high, fields[0])
    assert all(type(bound) is int for bound in (qtype.low, qtype.high, qtype.levels))
    assert qtype.levels == high - low + 1
    assert qtype.signed is (low < 0) and qtype.uniform
    wide = f"{'u' * (low >= 0)}int{max(8, fields[0])}"
    assert qtype.storage == jnp.dtype(name if name in NATIVE else wide)


def test_the_named_formats_are_those_of_their_names():
    for name in ("int3", "int5", "int6", "int7", "uint3", "uint5", "uint6", "uint7", "ternary"):
        assert getattr(numerics, name) == integer(name)
    assert Integer() == Integer(8) == Integer(np.int64(8), signed=True)


@pytest.mark.parametrize("name", RANGES)
def test_every_code_decodes_to_its_integer_and_back(name):
    qtype, numbers = integer(name), integer_table(name).numbers
    numbers = np.resize(numbers, 256)  # one length: operations are compiled once
    codes = codes_of(numbers.astype(np.int64), qtype.storage)
    decoded = qtype.decode(on_device(codes))
    np.testing.assert_array_equal(decoded, numbers.astype(np.float32), strict=True)
    for mode in RoundMode:
        assert_codes(qtype.encode(decoded, mode), numbers.astype(np.int64), qtype.storage)


@pytest.mark.parametrize("name", RANGES)
def test_every_number_midpoint_and_neighbour_is_rounded_in_all_nine_modes(name):
    qtype, table = integer(name), integer_table(name)
    y = grid(table.numbers)
    for mode in RoundMode:
        expected = table.rounded(y, mode)
        np.testing.assert_array_equal(
            expected, saturated_to(rounded(y, mode.value), table.numbers[0], table.numbers[-1])
        )
        actual = every_way(qtype, on_device(y), mode)
        assert_conforms(qtype, actual, y, expected)
        assert not np.any(np.signbit(actual["round"]) & (np.asarray(actual["round"]) == 0))


def saturated_to(r, low, high):
    return np.where(np.isnan(r), 0, np.clip(r.astype(np.float64), low, high)) + 0.0


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("name", WIDE)
def test_wide_formats_round_and_saturate_exactly(name, kind):
    qtype = integer(name)
    edges = [0, 1, 2**15, 2**16, 2**31, 2**32]
    y = np.array([v + d for v in edges for d in (-1.5, -1, -0.5, 0, 0.5, 1)], kind)
    y = np.concatenate([y, -y, np.array([np.inf, -np.inf, np.nan, 1e30], kind)])
    with jax.enable_x64(kind is np.float64):
        for mode in RoundMode:
            r = rounded(y, mode.value)
            expected = saturated_to(r, qtype.low, qtype.high).astype(np.int64)
            assert_codes(qtype.encode(on_device(y), mode), expected, qtype.storage)


@pytest.mark.many
@pytest.mark.parametrize("name", RANGES)
def test_a_zero_point_is_added_before_bits_saturate(name):
    qtype = integer(name)
    r = np.array([-1e9, -300.0, -4.0, -1.0, 0.0, 1.0, 3.0, 200.0, 1e9, np.nan], np.float32)
    zero_points = codes_of(np.arange(qtype.low, qtype.high + 1), qtype.storage)[:, None]
    actual = qtype.sum_to_bits(jnp.broadcast_to(r, (len(zero_points), len(r))), zero_points)
    sums = np.where(np.isnan(r), np.nan, r) + zero_points.astype(np.float64)
    expected = np.where(np.isnan(sums), 0, np.clip(sums, qtype.low, qtype.high)).astype(np.int64)
    assert actual.dtype == np.uint8
    np.testing.assert_array_equal(actual, (expected % 2**qtype.bits).astype(np.uint8))
    assert qtype.sum_to_bits(on_device(r), None).dtype == np.uint8


PARTS = r"jqx\.numerics\.Integer: .*{}.*(\n  given:    .+)?(\n  expected: .+)?\n  fix:      .+"


def test_integers_that_do_not_exist_are_refused():
    for bits in (-8, 0, 1, 9, 12, 15, 24, 31, 33, 64):
        fix = r"fix:      .*jqx\.numerics\.binary" if bits == 1 else "fix:"
        with pytest.raises(ValueError, match=f"(?s)bits == {bits} is not supported.+{fix}"):
            Integer(bits)
    with pytest.raises(ValueError, match=r"(?s)no negative code to exclude.+fix:"):
        Integer(8, signed=False, narrow=True)
    for field, value in [
        ("bits", 8.0),
        ("bits", True),
        ("bits", "8"),
        ("signed", 1),
        ("narrow", 0),
        ("narrow", None),
    ]:
        with pytest.raises(TypeError, match=PARTS.format(f"`{field}`")):
            Integer(**{field: value})


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


def standard_table(name):
    return minifloat_table(*STANDARD[name][:4])


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
    y = grid(standard_table(name).numbers)
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
            actual = every_way(qtype, on_device(y), mode)
            assert_conforms(qtype, actual, y, table.rounded(y, mode))


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


@pytest.mark.parametrize("name", STANDARD)
def test_float32_is_rounded_alike_where_x64_is_on(name):
    table = standard_table(name)
    y = grid(table.numbers)
    with jax.enable_x64(True):
        actual = every_way(standard(name), on_device(y), NEAREST_EVEN)
        assert_conforms(standard(name), actual, y, table.rounded(y, NEAREST_EVEN))


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


NO_MINIFLOATS = [
    ((0, 3), {}, "exponent_bits == 0"),
    ((8, 0), {}, "exponent_bits == 8"),
    ((4, 4), {}, "4 exponent bits, 4 mantissa bits"),
    ((4, -1), {}, "mantissa_bits == -1"),
    ((5, 0), {}, "0 mantissa bits and Specials.INFINITY_AND_NAN"),
    ((1, 0, Specials.NAN), {}, "0 mantissa bits and Specials.NAN"),  # its only number would be zero
    ((2000, 0), {}, "exponent_bits == 2000"),
    ((3, 2), {"bias": 101}, "bias == 101"),
    ((3, 2), {"bias": -2}, "bias == -2"),
    ((7, 0, Specials.NAN), {"bias": -1}, "bias == -1"),  # its largest number would be 2**127 * 2
    ((3, 2, Specials.NONE), {"saturate": False}, "without infinity and NaN must saturate"),
]
OF_THE_WRONG_KIND = {"exponent_bits": 4.0, "mantissa_bits": True, "bias": "7"}
OF_THE_WRONG_KIND |= {"specials": "fn", "saturate": 1}


def test_minifloats_that_do_not_exist_are_refused():
    for widths, options, facts in NO_MINIFLOATS:
        parts = rf"(?s)jqx\.numerics\.Minifloat: .*{re.escape(facts)}.*\n  fix:      .+"
        with pytest.raises(ValueError, match=parts):
            Minifloat(*widths, **options)
    for field, value in OF_THE_WRONG_KIND.items():
        parts = rf"`{field}` .+(\n  given: .+)?(\n  expected: .+)?\n  fix: .+"
        with pytest.raises(TypeError, match=rf"jqx\.numerics\.Minifloat: {parts}"):
            Minifloat(**{"exponent_bits": 4, "mantissa_bits": 3, field: value})


def test_widths_of_numpy_integers_are_the_same_format():
    assert Minifloat(np.int64(4), np.int8(3)) == Minifloat(4, 3)
    assert hash(Minifloat(np.int64(4), np.int8(3))) == hash(Minifloat(4, 3))


def _random(count):
    rng = np.random.default_rng(count)
    return tuple(np.sort(rng.normal(size=count).astype(np.float32)).tolist())


TABLES = {
    "nf4": NF4,
    "binary": (-1.0, 1.0),
    "asymmetric": (-3.0, -1.0, 0.0, 0.5, 2.0, 10.0),
    "without_zero": (-2.5, -1.0, 0.25, 1.0, 7.0),
    "all_negative": (-8.0, -4.0, -3.0),
    "all_positive": (0.5, 0.75, 1.5, 6.0),
    "two": (0.0, 1.0),
    "two_apart": (-1.0, 3.0),
    "seventeen": tuple(float(k * abs(k)) for k in range(-8, 9)),  # the first past the binary search
    "two_hundred_and_fifty_five": _random(255),
    "two_hundred_and_fifty_six": _random(256),
}
CODEBOOKS = {name: Codebook(entries, name) for name, entries in TABLES.items()} | {
    "nf4": nf4,
    "binary": binary,
}


def codebook_table(name):
    """Even places are even; NaN becomes the entry nearest to zero, the lower of two."""
    numbers = np.float32(TABLES[name]).astype(np.float64)
    nan = numbers[np.argmin(np.abs(numbers))]
    return Table(numbers, np.arange(1, len(numbers)) % 2 == 0, nan=nan)


@pytest.mark.parametrize("name", TABLES)
def test_a_codebook_is_its_table(name):
    qtype, numbers = CODEBOOKS[name], np.float32(TABLES[name])
    assert qtype.entries == tuple(numbers.tolist())
    assert str(qtype) == qtype.name == qtype.label == name
    assert (qtype.low, qtype.high, qtype.levels) == (numbers[0], numbers[-1], len(numbers))
    assert 2 ** (qtype.bits - 1) < len(numbers) <= 2**qtype.bits
    assert qtype.storage == np.uint8 and not qtype.uniform
    assert qtype.signed is bool(numbers[0] < 0)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: jax.jit(jax.vmap(f))])
@pytest.mark.parametrize("name", TABLES)
def test_every_code_decodes_to_its_entry_and_what_lies_outside_to_the_last(name, transform):
    numbers = np.float32(TABLES[name])
    codes = jnp.arange(256, dtype=jnp.uint8)
    decoded = transform(CODEBOOKS[name].decode)(codes)
    assert decoded.dtype == np.float32
    beyond = np.full(256 - len(numbers), numbers[-1])
    assert_same_numbers(decoded, np.append(numbers, beyond).astype(np.float64))


@pytest.mark.many
@pytest.mark.parametrize("name", TABLES)
def test_every_entry_midpoint_and_neighbour_is_rounded_in_all_nine_modes(name):
    table = codebook_table(name)
    y = grid(table.numbers)
    for mode in RoundMode:
        actual = every_way(CODEBOOKS[name], on_device(y), mode)
        assert_conforms(CODEBOOKS[name], actual, y, table.rounded(y, mode))
        assert np.all(np.asarray(actual["encode"]) < len(table.numbers))


def test_ties_between_entries_of_any_size_are_exact():
    entries = (-(2.0**100), -(2.0**-100), 2.0**-120, 1.0, 2.0**60)
    qtype = Codebook(entries)
    middles = [(Fraction(a) + Fraction(b)) / 2 for a, b in itertools.pairwise(entries)]
    y = np.array([float(m) for m in middles], np.float32)
    y = np.concatenate([np.nextafter(y, np.float32(-np.inf)), y, np.nextafter(y, np.float32(9e30))])
    for mode in (RoundMode.NEAREST_UPWARD, RoundMode.NEAREST_DOWNWARD):
        tie = mode is RoundMode.NEAREST_UPWARD
        above = [
            [Fraction(float(v)) > m or (tie and Fraction(float(v)) == m) for m in middles]
            for v in y
        ]
        np.testing.assert_array_equal(qtype.encode(on_device(y), mode), np.sum(above, axis=1))


def test_nan_becomes_the_entry_nearest_to_zero_and_infinities_the_ends():
    y = on_device([np.nan, -np.nan, np.inf, -np.inf], jnp.float32)
    codes = {"nf4": 7, "binary": 0, "without_zero": 2, "all_negative": 2, "all_positive": 0}
    for name, code in codes.items():
        last = len(TABLES[name]) - 1
        for mode in RoundMode:
            assert CODEBOOKS[name].encode(y, mode).tolist() == [code, code, last, 0], name


def test_zero_of_either_sign_is_cut_alike():
    zeros = on_device([0.0, -0.0], jnp.float32)
    codes = {mode: CODEBOOKS["binary"].encode(zeros, mode).tolist() for mode in RoundMode}
    up = {mode for mode, actual in codes.items() if actual == [1, 1]}
    assert all(actual in ([0, 0], [1, 1]) for actual in codes.values())
    assert {RoundMode.UP, RoundMode.NEAREST_UPWARD, RoundMode.NEAREST_TOWARD_INFINITY} <= up
    assert not up & {RoundMode.DOWN, RoundMode.NEAREST_DOWNWARD, RoundMode.NEAREST_TOWARD_EVEN}


def test_entries_are_rounded_to_float32_and_hashable_whatever_holds_them():
    a = Codebook((0.1, 0.2), "tenths")
    assert a.entries == (float(np.float32(0.1)), float(np.float32(0.2)))
    for entries in ([0.1, 0.2], np.array([0.1, 0.2]), (x for x in (0.1, 0.2))):
        assert Codebook(entries, "tenths") == a
        assert hash(Codebook(a.entries, "tenths")) == hash(a)
    assert Codebook((0, 1)) == Codebook((0.0, 1.0)) and Codebook((0, 1)).name == "codebook"
    assert Codebook((0.1, 0.2)) != a


NO_TABLE = "`entries` is not a table of increasing numbers"
NO_NUMBERS = "`entries` must hold numbers"
NO_CODEBOOKS = [
    (ValueError, (), NO_TABLE, "0 entries"),
    (ValueError, (1.0,), NO_TABLE, "1 entries"),
    (ValueError, range(257), NO_TABLE, "257 entries"),
    (ValueError, (1.0, 1.0), NO_TABLE, "2 entries that do not increase"),
    (ValueError, (1.0, 0.5, 2.0), NO_TABLE, "3 entries that do not increase"),
    (ValueError, (1.0, 1.0 + 1e-9), NO_TABLE, "2 entries that do not increase"),
    (ValueError, (0.0, np.nan), NO_TABLE, "2 entries"),
    (ValueError, (0.0, np.inf), NO_TABLE, "2 entries"),
    (TypeError, 1.0, "`entries` is not an Iterable", "entries =="),
    (TypeError, None, "`entries` is not an Iterable", "entries =="),
    (TypeError, (object(), 1.0), NO_NUMBERS, "float, object"),
    (TypeError, ("a", "b"), NO_NUMBERS, "str"),
    (TypeError, (None, 1), NO_NUMBERS, "NoneType, int"),
    (TypeError, "12", NO_NUMBERS, "str"),
]


def test_what_is_no_codebook_is_refused():
    for error, entries, *facts in NO_CODEBOOKS:
        make = functools.partial(Codebook, entries)
        assert_refused(make, (), error, "numerics.Codebook", *facts)
    make, facts = functools.partial(Codebook, (0.0, 1.0), 3), ("`label` is not a str", "label == 3")
    assert_refused(make, (), TypeError, "numerics.Codebook", *facts)


FAMILIES = {
    "integer": (RANGES, integer, integer_table),
    "minifloat": (STANDARD, standard, standard_table),
    "codebook": (TABLES, CODEBOOKS.get, codebook_table),
}
each_format = pytest.mark.parametrize(
    "family, name", [(family, name) for family, (names, *_) in FAMILIES.items() for name in names]
)


def format_and_table(family, name):
    _, make, table = FAMILIES[family]
    return make(name), table(name)


def check_under_jit_and_vmap(qtype, table, mode):
    y = grid(table.numbers).reshape(8, GRID // 8)
    results = mapped_every_way(qtype, on_device(y), mode)
    assert_conforms(qtype, results, y, table.rounded(y, mode))


@pytest.mark.many("family")
@each_format
def test_jit_and_vmap_change_nothing_in_any_format(family, name):
    check_under_jit_and_vmap(*format_and_table(family, name), NEAREST_EVEN)


ANY_MODE = {
    "int4": (integer("int4"), integer_table("int4")),
    "uint5": (integer("uint5"), integer_table("uint5")),
    "e4m3fn": (Minifloat(4, 3, Specials.NAN), minifloat_table(4, 3, "fn")),
    "e4m3fn that overflows": (
        Minifloat(4, 3, Specials.NAN, saturate=False),
        minifloat_table(4, 3, "fn", saturate=False),
    ),
    "nf4": (nf4, codebook_table("nf4")),
    "without_zero": (CODEBOOKS["without_zero"], codebook_table("without_zero")),
}


@pytest.mark.many("name")
@pytest.mark.parametrize("mode", RoundMode)
@pytest.mark.parametrize("name", ANY_MODE)
def test_jit_and_vmap_change_nothing_in_any_mode(name, mode):
    check_under_jit_and_vmap(*ANY_MODE[name], mode)


@pytest.mark.many("family")
@each_format
def test_float64_is_rounded_once(family, name):
    """Neighbours of ties are ties in float32."""
    qtype, table = format_and_table(family, name)
    y = grid(table.numbers, np.float64)
    with jax.enable_x64(True):
        for mode in RoundMode:
            results = every_way(qtype, on_device(y), mode)
            assert_conforms(qtype, results, y, table.rounded(y, mode))
