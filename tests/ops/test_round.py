import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jqx
from jqx import RoundMode

from ..oracles.numerics import assert_floats, rounded
from ..oracles.refusals import assert_refused


@pytest.mark.parametrize("mode", RoundMode)
def test_every_bfloat16_is_rounded_as_specified(mode):
    x = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
    wide = x.astype(np.float32)
    x = x[(np.abs(wide) >= np.finfo(np.float32).tiny) | (wide == 0) | np.isnan(wide)]
    with np.errstate(invalid="ignore"):
        expected = rounded(x.astype(np.float64), mode.value)
    assert_floats(jqx.round(x, mode), expected, jnp.bfloat16)
    assert_floats(jax.jit(lambda x: jqx.round(x, mode))(x), expected, jnp.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (3, 4)])
def test_round_keeps_shape_and_dtype(shape, dtype):
    result = jqx.round(jnp.full(shape, 1.5, dtype), RoundMode.UP)
    assert result.shape == shape and result.dtype == dtype
    assert np.all(np.asarray(result) == 2)


def test_round_keeps_float64():
    with jax.enable_x64(True):
        x = np.array([0.49999999999999994, 2.0**52 + 1, -2.5])
        assert_floats(jqx.round(x, RoundMode.NEAREST_UPWARD), [0, 2.0**52 + 1, -2], np.float64)


def test_round_takes_python_numbers():
    assert jqx.round(2.5, RoundMode.NEAREST_TOWARD_EVEN) == 2


@pytest.mark.parametrize("mode", RoundMode)
def test_rounding_twice_changes_nothing(mode):
    x = jnp.linspace(-9, 9, 145, dtype=jnp.float32)
    once = jqx.round(x, mode)
    np.testing.assert_array_equal(jqx.round(once, mode), once)


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


@pytest.mark.parametrize("dtype", ["int8", "int32", "bool"])
def test_what_is_not_floating_point_is_refused(dtype):
    x = np.ones(3, dtype)
    assert_refused(
        lambda x: jqx.round(x, RoundMode.UP),
        (x,),
        TypeError,
        "round",
        f"`x` element type ({dtype}) must be a floating point number",
        "bfloat16",
    )


@pytest.mark.parametrize("mode", ["UP", "ROUND_UP", None, 3])
def test_what_is_no_round_mode_is_refused(mode):
    assert_refused(
        lambda x: jqx.round(x, mode),
        (np.ones(3, np.float32),),
        TypeError,
        "round",
        "`mode` is not a RoundMode",
        f"mode == {mode!r}",
        "NEAREST_TOWARD_EVEN",
    )
