"""The nine round modes, in `quantize` and in `round`."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jqx
from jqx import RoundMode

from ..arrays import on_device
from ..oracles.numerics import as_int64, assert_codes, assert_floats, rounded, saturated
from ..oracles.refusals import assert_refusals, refusal

EVERY_FLOAT16 = np.arange(65536, dtype=np.uint16).view(np.float16)
NEAREST = [mode for mode in RoundMode if mode.value.startswith("ROUND_NEAREST")]
TABLE = {  # of 2.5, -2.5, -3.5, 2.4, -2.6
    "ROUND_NEAREST_TOWARD_INFINITY": (3, -3, -4, 2, -3),
    "ROUND_NEAREST_TOWARD_ZERO": (2, -2, -3, 2, -3),
    "ROUND_NEAREST_UPWARD": (3, -2, -3, 2, -3),
    "ROUND_NEAREST_DOWNWARD": (2, -3, -4, 2, -3),
    "ROUND_NEAREST_TOWARD_EVEN": (2, -2, -4, 2, -3),
    "ROUND_TOWARD_INFINITY": (3, -3, -4, 3, -3),
    "ROUND_TOWARD_ZERO": (2, -2, -3, 2, -2),
    "ROUND_UP": (3, -2, -3, 3, -2),
    "ROUND_DOWN": (2, -3, -4, 2, -3),
}


def all_forms(x, mode):
    one = jnp.ones((), x.dtype)
    return (
        jqx.quantize(x, one, qtype=jnp.int8, round_mode=mode),
        jqx.quantize(x, one, qtype=jnp.int32, round_mode=mode),
        jqx.round(x, mode),
    )


def eagerly(f):
    return f


def of_a_constant(f):
    return lambda x: jax.jit(lambda: f(on_device(x)))()


def assert_all_forms_follow_the_table(evaluate, x, mode):
    int8, int32, floats = evaluate(functools.partial(all_forms, mode=mode))(x)
    wide = np.float64 if x.dtype == np.float64 else np.float32
    r = rounded(x.astype(np.float64), mode.value)
    assert_codes(int8, saturated(r, 0, jnp.int8), jnp.int8)
    assert_codes(int32, saturated(r, 0, jnp.int32), jnp.int32)
    assert_floats(floats, r.astype(wide), x.dtype)


def test_the_nine_modes_carry_the_attribute_strings_of_ngraph():
    assert {mode.value for mode in RoundMode} == set(TABLE)
    assert all(mode.value == f"ROUND_{mode.name}" for mode in RoundMode)


@pytest.mark.many("evaluate")
@pytest.mark.parametrize("evaluate", [eagerly, jax.jit, of_a_constant])
@pytest.mark.parametrize("mode", RoundMode)
def test_every_float16_is_rounded_as_specified(mode, evaluate):
    with np.errstate(invalid="ignore"):
        assert_all_forms_follow_the_table(evaluate, EVERY_FLOAT16, mode)


@pytest.mark.parametrize("mode", RoundMode)
def test_the_rows_of_the_table_hold(mode):
    x = np.float32([2.5, -2.5, -3.5, 2.4, -2.6])
    for codes in all_forms(x, mode):
        assert tuple(np.asarray(codes).astype(int)) == TABLE[mode.value]


@pytest.mark.parametrize("mode", RoundMode)
def test_float32_neighbours_of_ties_and_integers_are_rounded_as_specified(mode):
    halves = (np.arange(-2048, 2049) / 2).astype(np.float32)
    near = [np.nextafter(halves, np.float32(to)) for to in (np.inf, -np.inf)]
    near = [np.where(np.abs(v) < np.finfo(np.float32).tiny, halves, v) for v in near]
    big = np.array([2.0**22 + 0.5, 2.0**22 + 1.5, 2.0**23 - 0.5, 2.0**23 - 1.5], np.float32)
    rest = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 1.2e-38, -1.2e-38], np.float32)
    x = np.concatenate([halves, *near, big, -big, rest])
    assert_all_forms_follow_the_table(jax.jit, x, mode)


@pytest.mark.parametrize("evaluate", [eagerly, jax.jit])
@pytest.mark.parametrize("mode", NEAREST)
def test_the_float32_just_below_a_half_becomes_zero(mode, evaluate):
    x = np.array([0.49999997, -0.49999997], np.float32)
    assert x[0] == np.nextafter(np.float32(0.5), np.float32(0))
    for codes in evaluate(functools.partial(all_forms, mode=mode))(x):
        np.testing.assert_array_equal(np.asarray(codes).astype(int), [0, 0])


@pytest.mark.many
@pytest.mark.parametrize("evaluate", [eagerly, jax.jit])
@pytest.mark.parametrize("mode", RoundMode)
def test_odd_float32_integers_between_2_to_23_and_2_to_24_stay_themselves(mode, evaluate):
    odd = np.arange(2**23 + 1, 2**24, 2, dtype=np.int64)
    odd = np.concatenate([odd[:1000], odd[::997], odd[-1000:]])
    odd = np.concatenate([odd, -odd])
    assert 8388609 in odd and 16777215 in odd
    _, codes, floats = evaluate(functools.partial(all_forms, mode=mode))(odd.astype(np.float32))
    np.testing.assert_array_equal(as_int64(codes), odd)
    np.testing.assert_array_equal(np.asarray(floats).astype(np.int64), odd)


@pytest.mark.parametrize("mode", RoundMode)
def test_float64_is_rounded_as_specified(mode):
    halves = np.arange(-2048, 2049) / 2
    hazards = np.array([0.49999999999999994, 2.0**52 + 1, 2.0**53 - 1, 2.0**51 + 0.5])
    rest = np.array([np.inf, -np.inf, np.nan, 1e300, 2.0**31 - 0.5, 2.0**31 - 1])
    x = np.concatenate([halves, np.nextafter(halves, 1e9), hazards, -hazards, rest, -rest])
    x = np.where(np.abs(x) < np.finfo(np.float64).tiny, 0, x)
    with jax.enable_x64(True):
        assert_all_forms_follow_the_table(jax.jit, x, mode)


@pytest.mark.parametrize("mode", RoundMode)
def test_every_bfloat16_is_rounded_as_specified(mode):
    x = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
    wide = x.astype(np.float32)
    x = x[(np.abs(wide) >= np.finfo(np.float32).tiny) | (wide == 0) | np.isnan(wide)]
    with np.errstate(invalid="ignore"):
        expected = rounded(x.astype(np.float64), mode.value)
    assert_floats(jqx.round(x, mode), expected, jnp.bfloat16)
    assert_floats(jax.jit(lambda x: jqx.round(x, mode))(x), expected, jnp.bfloat16)


def test_round_keeps_shape_and_dtype():
    for shape, dtype in itertools.product(
        [(), (0,), (2, 0, 3), (3, 4)], [jnp.float16, jnp.bfloat16, jnp.float32]
    ):
        result = jqx.round(jnp.full(shape, 1.5, dtype), RoundMode.UP)
        assert result.shape == shape and result.dtype == dtype
        assert np.all(np.asarray(result) == 2)


def test_round_takes_python_numbers():
    assert jqx.round(2.5, RoundMode.NEAREST_TOWARD_EVEN) == 2


@pytest.mark.parametrize("mode", RoundMode)
def test_round_has_gradient_zero(mode):
    x = jnp.array([-2.4, 0.3, 1.7], jnp.float32)
    gradient = jax.jit(jax.grad(lambda x: jqx.round(x, mode).sum()))(x)
    np.testing.assert_array_equal(gradient, np.zeros(3))


def test_vmapped_round_is_round():
    x = jnp.linspace(-4, 4, 24, dtype=jnp.float32).reshape(4, 6)
    for mode in (RoundMode.NEAREST_DOWNWARD, RoundMode.TOWARD_INFINITY):
        mapped = jax.vmap(lambda x, mode=mode: jqx.round(x, mode))(x)
        np.testing.assert_array_equal(mapped, jqx.round(x, mode))


def test_what_is_not_floating_point_and_no_round_mode_is_refused():
    for dtype in ("int8", "int32", "bool"):
        facts = (f"`x` element type ({dtype}) must be a floating point number", "bfloat16")
        case = refusal(facts, np.ones(3, dtype))
        assert_refusals("round", TypeError, [case], mode=RoundMode.UP)
    x = np.ones(3, np.float32)
    for mode in ("UP", "ROUND_UP", None, 3):
        facts = ("`mode` is not a RoundMode", f"mode == {mode!r}", "NEAREST_TOWARD_EVEN")
        assert_refusals("round", TypeError, [refusal(facts, x, mode=mode)])
