import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqx import RoundMode
from jqx.numerics import Codebook, binary, nf4

from ..arrays import on_device
from ..oracles.refusals import assert_refused
from .tables import GRID, Table, assert_conforms, assert_same_numbers, every_way, grid

NEAREST_EVEN = RoundMode.NEAREST_TOWARD_EVEN
NF4 = (  # Dettmers et al., arXiv:2305.14314, appendix E
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


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
FORMATS = {name: Codebook(entries, name) for name, entries in TABLES.items()} | {
    "nf4": nf4,
    "binary": binary,
}


def table_named(name):
    """Even places are even; NaN becomes the entry nearest to zero, the lower of two."""
    numbers = np.float32(TABLES[name]).astype(np.float64)
    nan = numbers[np.argmin(np.abs(numbers))]
    return Table(numbers, np.arange(1, len(numbers)) % 2 == 0, nan=nan)


@pytest.mark.parametrize("name", TABLES)
def test_a_codebook_is_its_table(name):
    qtype, numbers = FORMATS[name], np.float32(TABLES[name])
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
    decoded = transform(FORMATS[name].decode)(codes)
    assert decoded.dtype == np.float32
    beyond = np.full(256 - len(numbers), numbers[-1])
    assert_same_numbers(decoded, np.append(numbers, beyond).astype(np.float64))


@pytest.mark.many
@pytest.mark.parametrize("name", TABLES)
def test_every_entry_midpoint_and_neighbour_is_rounded_in_all_nine_modes(name):
    table = table_named(name)
    y = grid(table.numbers)
    for mode in RoundMode:
        found = every_way(FORMATS[name], on_device(y), mode)
        assert_conforms(FORMATS[name], found, y, table.rounded(y, mode))
        assert np.all(np.asarray(found["encode"]) < len(table.numbers))


@pytest.mark.parametrize("mode", RoundMode)
@pytest.mark.parametrize("name", ["nf4", "without_zero"])
def test_jit_and_vmap_change_nothing_in_any_mode(name, mode):
    check_under_jit_and_vmap(name, mode)


@pytest.mark.many
@pytest.mark.parametrize("name", TABLES)
def test_jit_and_vmap_change_nothing_in_any_table(name):
    check_under_jit_and_vmap(name, NEAREST_EVEN)


def check_under_jit_and_vmap(name, mode):
    table = table_named(name)
    y = grid(table.numbers).reshape(8, GRID // 8)
    found = jax.jit(jax.vmap(lambda row: every_way(FORMATS[name], row, mode)))(y)
    assert_conforms(FORMATS[name], found, y, table.rounded(y, mode))


@pytest.mark.many
@pytest.mark.parametrize("name", TABLES)
def test_float64_is_rounded_once(name):
    table = table_named(name)
    y = grid(table.numbers, np.float64)
    with jax.enable_x64(True):
        for mode in RoundMode:
            found = every_way(FORMATS[name], on_device(y), mode)
            assert_conforms(FORMATS[name], found, y, table.rounded(y, mode))


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


@pytest.mark.parametrize(
    "name, code",
    [("nf4", 7), ("binary", 0), ("without_zero", 2), ("all_negative", 2), ("all_positive", 0)],
)
def test_nan_becomes_the_entry_nearest_to_zero_and_infinities_the_ends(name, code):
    y = on_device([np.nan, -np.nan, np.inf, -np.inf], jnp.float32)
    last = len(TABLES[name]) - 1
    for mode in RoundMode:
        assert FORMATS[name].encode(y, mode).tolist() == [code, code, last, 0]


def test_zero_of_either_sign_is_cut_alike():
    zeros = on_device([0.0, -0.0], jnp.float32)
    codes = {mode: FORMATS["binary"].encode(zeros, mode).tolist() for mode in RoundMode}
    up = {mode for mode, found in codes.items() if found == [1, 1]}
    assert all(found in ([0, 0], [1, 1]) for found in codes.values())
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


NAME = "numerics.Codebook"


@pytest.mark.parametrize(
    "entries, fact",
    [
        ((), "0 entries"),
        ((1.0,), "1 entries"),
        (range(257), "257 entries"),
        ((1.0, 1.0), "2 entries that do not increase"),
        ((1.0, 0.5, 2.0), "3 entries that do not increase"),
        ((1.0, 1.0 + 1e-9), "2 entries that do not increase"),
        ((0.0, np.nan), "2 entries"),
        ((0.0, np.inf), "2 entries"),
    ],
)
def test_what_is_no_table_is_refused(entries, fact):
    problem = "`entries` is not a table of increasing numbers"
    assert_refused(lambda: Codebook(entries), (), ValueError, NAME, problem, fact)


@pytest.mark.parametrize("entries", [1.0, None])
def test_entries_that_are_no_sequence_are_refused(entries):
    problem = "`entries` is not an Iterable"
    assert_refused(lambda: Codebook(entries), (), TypeError, NAME, problem, "entries ==")


@pytest.mark.parametrize(
    "entries, fact",
    [
        ((object(), 1.0), "float, object"),
        (("a", "b"), "str"),
        ((None, 1), "NoneType, int"),
        ("12", "str"),
    ],
)
def test_entries_that_are_no_numbers_are_refused(entries, fact):
    problem = "`entries` must hold numbers"
    assert_refused(lambda: Codebook(entries), (), TypeError, NAME, problem, fact)


def test_a_label_that_is_no_string_is_refused():
    facts = ("`label` is not a str", "label == 3")
    assert_refused(lambda: Codebook((0.0, 1.0), 3), (), TypeError, NAME, *facts)
