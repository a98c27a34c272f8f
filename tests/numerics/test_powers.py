"""Powers of two: their exact arithmetic, and the format of them, float8_e8m0fnu."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jqx import RoundMode
from jqx._src.numerics.exact import exponent_of, times_power_of_two
from jqx._src.numerics.lookup import E8M0, PowerOfTwo, exponent_of_e8m0, times_e8m0
from jqx.extend import power_of_two, step_of

from ..arrays import on_device
from .tables import GRID, Table, assert_conforms, assert_same_numbers, every_way, grid

KINDS = {"float32": (np.float32, -126, 127), "float64": (np.float64, -1022, 1023)}


def numbers_of_every_exponent(name):
    """Powers of two, the floats on both sides, and others of the same exponent; both signs."""
    kind, low, high = KINDS[name]
    powers = np.ldexp(kind(1), np.arange(low, high + 1)).astype(kind)
    near = [np.nextafter(powers, kind(to)) for to in (0, np.inf)]
    x = np.concatenate([powers, *near, powers * kind(1.5)])
    x = x[np.isfinite(x) & (np.abs(x) >= np.finfo(kind).tiny)]
    return np.concatenate([x, -x])


@pytest.fixture(params=KINDS)
def name(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


def test_exponents_are_those_of_frexp(name):
    x = numbers_of_every_exponent(name)
    for f in (exponent_of, jax.jit(jax.vmap(exponent_of))):
        exponents = f(on_device(x))
        assert exponents.dtype == np.int32
        np.testing.assert_array_equal(exponents, np.frexp(x)[1] - 1)


def test_zero_subnormals_infinity_and_nan_have_exponents_next_to_the_normal_ones(name):
    kind, low, high = KINDS[name]
    tiny = np.finfo(kind).tiny
    small = np.array([0.0, tiny / 2, np.finfo(kind).smallest_subnormal], kind)
    large = np.array([np.inf, np.nan], kind)
    for sign in (1, -1):
        assert set(exponent_of(on_device(sign * small)).tolist()) == {low - 1}
        assert set(exponent_of(on_device(sign * large)).tolist()) == {high + 1}


def test_powers_of_two_are_exact_for_every_normal_exponent(name):
    kind, low, high = KINDS[name]
    exponents = np.arange(low, high + 1, dtype=np.int32)
    for f in (power_of_two, jax.jit(power_of_two, static_argnums=1)):
        powers = f(on_device(exponents), kind)
        assert powers.dtype == kind
        np.testing.assert_array_equal(powers, np.ldexp(kind(1), exponents))


def test_scaling_by_any_power_of_two_is_exact_where_the_result_is_normal(name):
    kind, low, _ = KINDS[name]
    x = numbers_of_every_exponent(name)
    exponents = np.arange(-252, 255, dtype=np.int32)
    x = np.concatenate([x[:: max(1, len(x) // 300)], np.array([0.0, -0.0, np.inf, -np.inf], kind)])
    with np.errstate(over="ignore", under="ignore"):
        expected = np.ldexp(x[:, None], exponents).astype(kind)
    finite = (x[:, None] != 0) & np.isfinite(x[:, None])
    flushed = finite & (np.frexp(x)[1][:, None] - 1 + exponents < low)
    assert flushed.any() and not flushed.all()
    shape = expected.shape
    operands = np.broadcast_to(x[:, None], shape), np.broadcast_to(exponents, shape)
    for f in (times_power_of_two, jax.jit(times_power_of_two)):
        scaled = np.asarray(f(*map(jnp.asarray, operands)))
        assert scaled.dtype == kind
        np.testing.assert_array_equal(scaled[~flushed], expected[~flushed])
        np.testing.assert_array_equal(np.signbit(scaled), np.signbit(expected))
        assert np.all(np.abs(scaled[flushed]) <= np.finfo(kind).tiny)


def test_scaling_keeps_nan(name):
    nan = jnp.full(3, jnp.nan, KINDS[name][0])
    assert np.all(np.isnan(times_power_of_two(nan, on_device([-252, 0, 254], jnp.int32))))


@pytest.mark.parametrize(
    "mantissa_bits, least, largest", [(3, -6, 9), (0, -62, 65), (6, -99, -90), (2, 61, 64)]
)
def test_the_step_is_the_spacing_of_floats_of_few_mantissa_bits(
    name, mantissa_bits, least, largest
):
    kind, _, _ = KINDS[name]
    x = numbers_of_every_exponent(name)
    x = np.concatenate([x, np.array([0.0, -0.0, np.inf, -np.inf], kind)])
    exponents = np.frexp(np.where(np.isinf(x), np.finfo(kind).max, x))[1] - 1
    exponents = np.where(x == 0, least, exponents)
    expected = np.clip(exponents, least, largest) - mantissa_bits
    for f in (step_of, jax.jit(step_of, static_argnums=(1, 2, 3))):
        step, inverse = f(on_device(x), mantissa_bits, least, largest)
        assert step.dtype == inverse.dtype == kind
        np.testing.assert_array_equal(step, np.ldexp(kind(1), expected))
        np.testing.assert_array_equal(inverse, np.ldexp(kind(1), -expected))


POWERS = np.ldexp(1.0, np.arange(-127, 128))
TABLE = Table(POWERS, np.arange(1, 255) % 2 == 0)  # the code, exponent + 127, is even
QTYPE = PowerOfTwo()


def expected_of(y, mode):
    """Zero and what is too small become 2**-127; below zero there is nothing."""
    return np.where(y < 0, np.nan, TABLE.rounded(y, mode))


def powers(kind):
    """The powers of two, their midpoints and neighbours; 2**-127 is a float32 subnormal."""
    return grid(POWERS if kind is np.float64 else POWERS[1:], kind)


def test_the_format_is_that_of_the_microscaling_specification():
    assert E8M0 == QTYPE.storage == ml_dtypes.float8_e8m0fnu
    assert QTYPE == PowerOfTwo() and str(QTYPE) == QTYPE.name == "float8_e8m0fnu"
    assert (QTYPE.bits, QTYPE.low, QTYPE.high, QTYPE.levels) == (8, 2.0**-127, 2.0**127, 255)
    assert not QTYPE.signed and not QTYPE.uniform


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: jax.jit(jax.vmap(f))])
def test_every_code_decodes_as_in_ml_dtypes(transform):
    bits = np.arange(256, dtype=np.uint8)
    expected = np.append(POWERS, np.nan)
    np.testing.assert_array_equal(bits.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), expected)
    codes = QTYPE.from_bits(on_device(bits))
    assert codes.dtype == E8M0
    assert_same_numbers(transform(QTYPE.decode)(codes), expected)
    assert_same_numbers(transform(QTYPE.decode)(on_device(bits)), expected)


@pytest.mark.parametrize("mode", RoundMode)
def test_every_power_midpoint_and_neighbour_is_rounded_as_the_mode_says(mode):
    """Op by op, under jit and vmap, and where x64 is on."""
    y = powers(np.float32)
    expected = expected_of(y, mode)
    assert_conforms(QTYPE, every_way(QTYPE, on_device(y), mode), y, expected)
    rows = y.reshape(8, GRID // 8)
    mapped = jax.jit(jax.vmap(lambda row: every_way(QTYPE, row, mode)))(rows)
    assert_conforms(QTYPE, mapped, rows, expected.reshape(rows.shape))
    with jax.enable_x64(True):
        assert_conforms(QTYPE, every_way(QTYPE, on_device(y), mode), y, expected)


@pytest.mark.parametrize("mode", RoundMode)
def test_float64_is_rounded_once(mode):
    y = powers(np.float64)
    y = np.append(y, [1e-300, 1e300, 1.25 * 2.0**-127, 1.5 * 2.0**-127, 1.75 * 2.0**-127])
    with jax.enable_x64(True):
        actual = every_way(QTYPE, on_device(y), mode)
        np.testing.assert_array_equal(
            actual["to_bits"], np.where(y < 0, 255, code_of(expected_of(y, mode)))
        )
        assert_conforms(QTYPE, actual, y, expected_of(y, mode))


def code_of(numbers):
    exponent = np.frexp(np.where(np.isnan(numbers), 1, numbers))[1] - 1
    return np.where(np.isnan(numbers), 255, exponent + 127).astype(np.uint8)


def test_ml_dtypes_rounds_ties_upward_and_makes_nan_of_zero_and_of_what_is_too_large():
    exponents = np.arange(-126, 127)
    ties = np.ldexp(np.float32(1.5), exponents)
    cast = ties.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    np.testing.assert_array_equal(cast, exponents + 128)
    codes = QTYPE.encode_bits(on_device(ties), RoundMode.NEAREST_TOWARD_EVEN)
    np.testing.assert_array_equal(codes, exponents + 127 + (exponents % 2 == 0))
    upward = QTYPE.encode_bits(on_device(ties), RoundMode.NEAREST_UPWARD)
    np.testing.assert_array_equal(upward, cast)
    edges = np.array([0.0, -0.0, 3e38, np.inf, -1.0, np.nan], np.float32)
    assert np.all(np.isnan(edges.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)))
    for mode in RoundMode:
        assert QTYPE.encode_bits(on_device(edges), mode).tolist() == [0, 0, 254, 254, 255, 255]


def test_exponents_are_read_from_every_code():
    codes = QTYPE.from_bits(jnp.arange(256, dtype=jnp.uint8))
    for f in (exponent_of_e8m0, jax.jit(exponent_of_e8m0)):
        exponents = f(codes)
        assert exponents.dtype == np.int32
        assert exponents.tolist() == list(range(-127, 129))


def test_a_product_with_every_code_is_exact_and_nan_with_that_of_nan():
    x = np.float32([[0, 1, -1.5, 448, 2.0**-9]])
    scale = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    actual = np.asarray(jax.jit(times_e8m0)(x, jnp.asarray(scale)[:, None]))
    with np.errstate(over="ignore"):
        expected = np.float32(np.float64(x) * np.append(POWERS, np.nan)[:, None])
    normal = ~(np.abs(expected) < np.finfo(np.float32).tiny) | (expected == 0)
    np.testing.assert_array_equal(actual[normal], expected[normal])
