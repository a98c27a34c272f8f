import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jqx import RoundMode, numerics
from jqx._src.numerics.qtype import INTEGERS
from jqx.numerics import Integer

from ..arrays import on_device
from ..oracles.numerics import assert_codes, code_range, codes_of, rounded, saturated
from .tables import GRID, assert_conforms, every_way, grid, table_of

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


def format_named(name):
    return Integer(*(RANGES | WIDE)[name][0])


def table_named(name):
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
        assert getattr(numerics, name) == format_named(name)
    assert Integer() == Integer(8) == Integer(np.int64(8), signed=True)


@pytest.mark.parametrize("name", RANGES)
def test_every_code_decodes_to_its_integer_and_back(name):
    qtype, numbers = format_named(name), table_named(name).numbers
    numbers = np.resize(numbers, 256)  # one length: operations are compiled once
    codes = codes_of(numbers.astype(np.int64), qtype.storage)
    decoded = qtype.decode(on_device(codes))
    np.testing.assert_array_equal(decoded, numbers.astype(np.float32), strict=True)
    for mode in RoundMode:
        assert_codes(qtype.encode(decoded, mode), numbers.astype(np.int64), qtype.storage)


@pytest.mark.parametrize("name", RANGES)
def test_every_number_midpoint_and_neighbour_is_rounded_in_all_nine_modes(name):
    qtype, table = format_named(name), table_named(name)
    y = grid(table.numbers)
    for mode in RoundMode:
        expected = table.rounded(y, mode)
        np.testing.assert_array_equal(
            expected, saturated_to(rounded(y, mode.value), table.numbers[0], table.numbers[-1])
        )
        found = every_way(qtype, on_device(y), mode)
        assert_conforms(qtype, found, y, expected)
        assert not np.any(np.signbit(found["round"]) & (np.asarray(found["round"]) == 0))


def saturated_to(r, low, high):
    return np.where(np.isnan(r), 0, np.clip(r.astype(np.float64), low, high)) + 0.0


@pytest.mark.parametrize("name", NATIVE)
def test_nearest_even_is_the_cast_of_ml_dtypes(name):
    qtype, table = format_named(name), table_named(name)
    y = grid(table.numbers)
    y = y[~np.isnan(y)]
    expected = np.rint(np.clip(y, qtype.low, qtype.high))
    expected = expected.astype(getattr(ml_dtypes, name, None) or np.dtype(name))
    codes = np.asarray(qtype.encode(on_device(y), NEAREST_EVEN))
    np.testing.assert_array_equal(codes, expected, strict=True)


@pytest.mark.many
@pytest.mark.parametrize("mode", RoundMode)
@pytest.mark.parametrize("name", ["int4", "uint5"])
def test_jit_and_vmap_change_nothing_in_any_mode(name, mode):
    check_under_jit_and_vmap(name, mode)


@pytest.mark.many
@pytest.mark.parametrize("name", RANGES)
def test_jit_and_vmap_change_nothing_in_any_format(name):
    check_under_jit_and_vmap(name, NEAREST_EVEN)


def check_under_jit_and_vmap(name, mode):
    qtype, table = format_named(name), table_named(name)
    y = grid(table.numbers).reshape(8, GRID // 8)
    found = jax.jit(jax.vmap(lambda row: every_way(qtype, row, mode)))(y)
    assert_conforms(qtype, found, y, table.rounded(y, mode))


@pytest.mark.parametrize("name", RANGES)
def test_float64_is_rounded_once(name):
    qtype, table = format_named(name), table_named(name)
    y = grid(table.numbers, np.float64)
    with jax.enable_x64(True):
        for mode in RoundMode:
            found = every_way(qtype, on_device(y), mode)
            assert_conforms(qtype, found, y, table.rounded(y, mode))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("name", WIDE)
def test_wide_formats_round_and_saturate_exactly(name, kind):
    qtype = format_named(name)
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
    qtype = format_named(name)
    r = np.array([-1e9, -300.0, -4.0, -1.0, 0.0, 1.0, 3.0, 200.0, 1e9, np.nan], np.float32)
    zero_points = codes_of(np.arange(qtype.low, qtype.high + 1), qtype.storage)[:, None]
    found = qtype.sum_to_bits(jnp.broadcast_to(r, (len(zero_points), len(r))), zero_points)
    sums = np.where(np.isnan(r), np.nan, r) + zero_points.astype(np.float64)
    expected = np.where(np.isnan(sums), 0, np.clip(sums, qtype.low, qtype.high)).astype(np.int64)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, (expected % 2**qtype.bits).astype(np.uint8))
    assert qtype.sum_to_bits(on_device(r), None).dtype == np.uint8


@pytest.mark.many
@pytest.mark.parametrize("name", INTEGERS)
def test_the_oracle_of_the_integer_dtypes_agrees(name):
    y = np.array([-3e9, -1.5, 0.5, 1.5, 2.5, 5e9, np.nan], np.float32)
    for mode in RoundMode:
        codes = format_named(name).encode(on_device(y), mode)
        assert_codes(codes, saturated(rounded(y, mode.value), 0, name), name)


PARTS = r"jqx\.numerics\.Integer: .*{}.*(\n  given:    .+)?(\n  expected: .+)?\n  fix:      .+"


@pytest.mark.parametrize("bits", [-8, 0, 1, 9, 12, 15, 24, 31, 33, 64])
def test_widths_that_do_not_exist_are_refused(bits):
    with pytest.raises(ValueError, match=f"(?s)bits == {bits} is not supported.+fix:"):
        Integer(bits)


def test_one_bit_is_referred_to_binary():
    with pytest.raises(ValueError, match=r"fix:      .*jqx\.numerics\.binary"):
        Integer(1)


def test_a_narrow_unsigned_format_is_refused():
    with pytest.raises(ValueError, match=r"(?s)no negative code to exclude.+fix:"):
        Integer(8, signed=False, narrow=True)


@pytest.mark.parametrize(
    "fields",
    [{"bits": 8.0}, {"bits": True}, {"bits": "8"}, {"signed": 1}, {"narrow": 0}, {"narrow": None}],
)
def test_fields_of_the_wrong_kind_are_refused_by_name(fields):
    (field,) = fields
    with pytest.raises(TypeError, match=PARTS.format(f"`{field}`")):
        Integer(**fields)
