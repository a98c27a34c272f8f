"""`quantize` and `dequantize` in every format, estimators among them, and which do not fit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import numerics

from ..arrays import on_device
from ..oracles.formats import jitted, nearest_number, numbers, product, quotient, stored
from ..oracles.numerics import as_float64, assert_floats, nearest
from ..oracles.refusals import assert_refusals, refusal
from ..strategies import SHAPE, along

F32, I8 = np.ones((2, 3), np.float32), np.ones((2, 3), np.int8)


def f32(*shape):
    return np.ones(shape, np.float32)


FORMATS = {
    "int8": jnp.int8,
    "int3": numerics.int3,
    "uint5": numerics.uint5,
    "ternary": numerics.ternary,
    "int4_narrow": numerics.Integer(4, narrow=True),
    "float8_e4m3fn": jnp.float8_e4m3fn,
    "float8_e4m3fnuz": jnp.float8_e4m3fnuz,
    "float8_e5m2": jnp.float8_e5m2,
    "float8_e3m4": jnp.float8_e3m4,
    "float6_e2m3fn": numerics.float6_e2m3fn,
    "float6_e3m2fn": numerics.float6_e3m2fn,
    "float4_e2m1fn": jnp.float4_e2m1fn,
    "nf4": numerics.nf4,
}
FLOAT_FORMATS = [name for name in FORMATS if "int" not in name and name != "ternary"]
each_format = pytest.mark.parametrize("name", FORMATS)


def points(name, dtype="float32"):
    """Every number of a format, every middle of two, their neighbours, and values beyond."""
    table = numbers(name)
    middles = (table[1:] + table[:-1]) / 2
    x = np.concatenate([table, middles, table[[0, -1]] * 1.01, table[[0, -1]] * 100])
    x = x.astype(jnp.dtype(dtype))
    if dtype == "float32":
        x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, -x)])
        x = x[(np.abs(x) >= 2.0**-120) | (x == 0)]  # XLA flushes subnormals
    return x


@pytest.mark.many
@each_format
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_format_rounds_to_its_nearest_number_and_saturates(name, dtype):
    """Eagerly, under jit, under vmap, and in the dtype of `x`."""
    qtype, x = FORMATS[name], points(name, dtype)
    scale = np.asarray(0.25, x.dtype)
    x = (x.astype(np.float32) * np.float32(0.25)).astype(x.dtype)
    x = x[np.isfinite(x.astype(np.float32))]
    expected = nearest_number(quotient(x, 0.25), name)
    f = functools.partial(jqx.quantize, qtype=qtype)
    back = functools.partial(jqx.dequantize, qtype=qtype, dtype=dtype)
    real = nearest(expected * 0.25, dtype)
    fake = functools.partial(jqx.quantize_dequantize, qtype=qtype)

    @jax.jit
    def transformed(x, codes, scale):
        every_code = f(x, scale), jax.vmap(f, in_axes=(0, None))(x, scale)
        return every_code, fake(x, scale), back(codes, scale)

    (codes, mapped), once, _ = transformed(x, np.zeros(x.shape, stored(qtype)), scale)
    _, twice, real_again = transformed(real.astype(x.dtype), codes, scale)
    assert codes.dtype == stored(qtype)
    every_code = [mapped, f(on_device(x), scale)] if dtype == "float32" else [mapped]
    for again in every_code:
        np.testing.assert_array_equal(as_float64(again), as_float64(codes))
    for actual in (once, twice, real_again):
        assert_floats(actual, real, dtype)


@pytest.mark.many
@each_format
@pytest.mark.parametrize("axes", [(1,), (0, 2), (0, 1, 2)])
def test_every_format_takes_scales_along_axes(name, axes):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=SHAPE) * 2.0 ** rng.integers(-3, 4, SHAPE)).astype(np.float32)
    scale = rng.uniform(0.1, 2, tuple(SHAPE[axis] for axis in axes)).astype(np.float32)
    along_x = along(scale, axes)
    expected = product(nearest_number(quotient(x, along_x), name), along_x)
    options = {"axes": axes, "qtype": FORMATS[name]}

    @jax.jit
    def codes_and_fake(x, scale):
        return jqx.quantize(x, scale, **options), jqx.quantize_dequantize(x, scale, **options)

    codes, fake = codes_and_fake(x, scale)
    assert_floats(jitted(jqx.dequantize, **options)(codes, scale), expected, np.float32)
    assert_floats(fake, expected, np.float32)


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_nan_and_zero_by_zero_in_float_formats(name):
    """NaN stays NaN where a format has one; 0 / 0 is 0, and infinity saturates."""
    x = np.float32([0, 0, -0.0, np.inf, -np.inf, np.nan])
    scale = np.float32([0, 1, 0, 1, 1, 1])
    y = jqx.quantize_dequantize(x, scale, qtype=FORMATS[name], axes=0)
    top = numbers(name)[[-1, 0]]
    has_nan = name.startswith("float8")
    expected = np.float32([0, 0, 0, *top, np.nan if has_nan else 0])
    assert_floats(y, expected, np.float32)


@pytest.mark.many
@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_ste_in_a_float_format_is_the_derivative_of_clamp(name):
    """For `x` and for the scale, whose multiples the ends of the range are."""
    top = np.float32(numbers(name)[-1])
    scale = np.float32([0.5, 2.0])
    x = np.float32([0.1, -0.7, 0.99, -1.01, 5, -40])[:, None] * top * scale
    cotangent = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)

    def fake(x, scale):
        y = jqx.quantize_dequantize(x, scale, qtype=FORMATS[name], axes=1)
        return (y * cotangent).sum()

    def clamp(x, scale):
        return (jnp.clip(x, -top * scale[None], top * scale[None]) * cotangent).sum()

    @jax.jit
    def gradients(x, scale):
        pair = jnp.stack([x, -x])
        mapped = jax.vmap(jax.grad(lambda x, s: fake(x, s)), (0, None))(pair, scale)
        return *(jax.grad(f, (0, 1))(x, scale) for f in (fake, clamp)), mapped

    (dx, dscale), (expected_dx, expected_dscale), mapped = gradients(x, scale)
    assert_floats(dx, np.asarray(expected_dx), np.float32)
    # Four terms are summed, in any order: each of up to `top` times the cotangent.
    slack = 8 * 2.0**-24 * float(top) * np.abs(cotangent).sum()
    np.testing.assert_allclose(dscale, expected_dscale, rtol=0, atol=slack)
    assert_floats(np.asarray(mapped)[0], np.asarray(dx), np.float32)


F8 = np.ones((2, 3), jnp.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class Noise:
    """A surrogate of a user that draws numbers."""

    needs_key = True

    def surrogate(self, x, low, high, levels, key):
        return jnp.clip(x + jax.random.uniform(key, x.shape), low, high)


@dataclasses.dataclass(frozen=True)
class EvenOnly:
    """An estimator of a user for evenly spaced levels."""

    uniform_only = True

    def bwd(self, x, low, high, levels, cotangent):
        return cotangent, jnp.zeros_like(cotangent), jnp.zeros_like(cotangent)


REFUSED_FORMATS = {
    ("quantize", ValueError): [
        refusal(
            ("float8_e4m3fn has no zero point", "integer qtype"),
            zero_point=1,
            qtype=jnp.float8_e4m3fn,
        ),
        refusal(
            ("mxfp4 includes its own scales", "jqx.QTensor.quantize", "float4_e2m1fn"),
            qtype=numerics.mxfp4,
        ),
        refusal(
            ("`zero_point` is not a code of int3", "[-4, 3]"), zero_point=4, qtype=numerics.int3
        ),
    ],
    ("quantize_dequantize", ValueError): [
        refusal("nf4 has no zero point", F32, f32(), np.uint8(1), qtype=numerics.nf4),
        refusal(("nvfp4 includes its own scales", "jqx.QTensor.quantize"), qtype=numerics.nvfp4),
        refusal(("draws no random numbers", "drop key"), qtype=jnp.int8, key=jax.random.key(0)),
        refusal(("no key is given", "jax.random.key(0)"), qtype=jnp.int8, gradient=Noise()),
        refusal(
            ("evenly spaced levels", "integer format", "ste"),
            qtype=jnp.float8_e4m3fn,
            gradient=EvenOnly(),
        ),
        refusal(
            "evenly spaced levels", qtype=numerics.nf4, gradient=Noise(), key=jax.random.key(0)
        ),
    ],
    ("dequantize", ValueError): [
        refusal("float8_e4m3fn has no zero point", F8, f32(), np.ones((), jnp.float8_e4m3fn)),
        refusal("mxfp8_e4m3 includes its own scales", F8, f32(), qtype=numerics.mxfp8_e4m3),
    ],
    ("dequantize", TypeError): [
        refusal(
            "`q` element type (int8) must match qtype element type (uint8)",
            I8,
            f32(),
            qtype=numerics.nf4,
        ),
        refusal(
            ("`q` element type (float8_e4m3fn)", "float8_e5m2"), F8, f32(), qtype=jnp.float8_e5m2
        ),
    ],
    ("quantize", TypeError): [
        refusal(
            "`scale` element type (float16) must match input element type (float32)",
            F32,
            np.ones((), np.float16),
            qtype=jnp.float8_e4m3fn,
        )
    ],
}


def test_formats_and_estimators_that_do_not_fit_are_refused():
    for (function, error), cases in REFUSED_FORMATS.items():
        assert_refusals(function, error, cases, F32, f32())
    no_estimator = refusal(
        ("`gradient` is not a gradient estimator", "type str"), F32, f32(), gradient="ste"
    )
    assert_refusals("quantize_dequantize", TypeError, [no_estimator], qtype=jnp.int8)


def test_a_surrogate_takes_the_place_of_the_rounding_and_gets_the_key_and_the_bounds():
    x, key = np.linspace(-10, 10, 21, dtype=np.float32), jax.random.key(1)
    f = functools.partial(jqx.quantize_dequantize, qtype=jnp.int4, gradient=Noise())
    y = jax.jit(f)(x, np.float32(0.5), key=key)
    expected = np.clip(x + np.asarray(jax.random.uniform(key, x.shape)), -4, 3.5)
    assert_floats(y, expected, np.float32)
    other = f(x, np.float32(0.5), key=jax.random.key(2))
    assert np.any(np.asarray(other) != np.asarray(y))


def test_codes_in_uint8_are_read_as_the_format_that_is_named():
    codes = np.arange(16, dtype=np.uint8)
    table = numbers("nf4")
    assert_floats(jqx.dequantize(codes, 2.0, qtype=numerics.nf4), 2 * table, np.float32)
    assert_floats(jqx.dequantize(codes, 2.0), 2.0 * np.arange(16), np.float32)
