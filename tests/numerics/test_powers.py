import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqx._src.numerics.exact import exponent_of, times_power_of_two
from jqx.numerics import power_of_two, step_of

from ..arrays import on_device

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
