"""`fake_quantize_as`, what simulation puts in place of a QTensor: the same grid, differentiable."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import RoundMode, calibrators, numerics
from jqx._src.tensor.grid import fake_quantize_as
from jqx.calibrators import Affine

from ..arrays import on_device
from ..oracles.numerics import assert_floats
from .tensors import CASES, spread_out

SPECS = [
    jqx.QSpec(jnp.int8),
    jqx.QSpec(jnp.int4, jqx.per_axis(1)),
    jqx.QSpec(jnp.uint8, jqx.per_axis(0), symmetric=False, calibrator=calibrators.minmax),
    jqx.QSpec(jnp.int8, jqx.per_axis(0, 1), round_mode=RoundMode.TOWARD_ZERO),
]
specs = pytest.mark.parametrize("spec", SPECS, ids=str)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.many
@specs
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_gives_the_values_of_the_qtensor(spec, dtype):
    x = on_device(normal(4, 5), dtype)
    real = jqx.QTensor.quantize(x, spec).dequantize()
    assert_floats(fake_quantize_as(x, spec), np.asarray(real), dtype)


@specs
def test_it_gives_the_values_of_the_qtensor_of_a_given_scale(spec):
    x, shape = normal(4, 5), spec.granularity.scale_shape((4, 5))
    affine = Affine(jnp.full(shape, 0.25), jnp.full(shape, 3, spec.qtype))
    real = jqx.QTensor.quantize(x, spec, affine).dequantize()
    assert_floats(fake_quantize_as(x, spec, affine), np.asarray(real), np.float32)


@specs
def test_a_scale_that_is_found_is_a_constant_of_the_gradient(spec):
    x = normal(4, 5)
    q = jqx.QTensor.quantize(x, spec)

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(x, affine_is_given):
        affine = Affine(q.scale, q.zero_point) if affine_is_given else None
        return jax.grad(lambda x: fake_quantize_as(x, spec, affine).sum())(x)

    assert_floats(gradient(x, False), np.asarray(gradient(x, True)), np.float32)


FORMATS = [
    *("int2", "int4", "int8", "int16", "int32", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"),
    *(numerics.int3, numerics.ternary, numerics.Integer(8, True, narrow=True)),
    *(numerics.float6_e2m3fn, numerics.nf4, numerics.binary, numerics.Codebook((-1.0, 0.1, 0.5))),
    *(numerics.Codebook((0.0, 1.0)), numerics.nvfp4, numerics.mxfp8_e4m3),
]
EXTREMES = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 1e-38, -1e-30, 3e38, -3.4e38)


@pytest.mark.many
@pytest.mark.parametrize("qtype", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_found_has_the_gradient_of_what_is_given_whatever_the_values(qtype, dtype):
    """With the clip mask or without: every format, each row one magnitude and one extreme. Of rows
    below 2^-106 the share of the range that the mask forgives is subnormal, and so it is 0. What a
    NaN itself gets is told below.
    """
    size = 16 if qtype == numerics.nvfp4 else 32
    spec = jqx.QSpec(qtype, jqx.per_block({0: 1, 1: size}))
    x = normal(64, 32) * 2.0 ** np.linspace(-100, 112, 64).round()[:, None]
    x[: 2 * len(EXTREMES) : 2, 3] = EXTREMES
    with np.errstate(over="ignore"):  # of what is too large for float16
        x = on_device(x.astype(dtype))
    pull = on_device(normal(64, 32), dtype)
    q = jqx.QTensor.quantize(x, spec)
    given = Affine(q.scale, q.zero_point)
    found, back = jax.vjp(lambda x: fake_quantize_as(x, spec), x)
    same, again = jax.vjp(lambda x: fake_quantize_as(x, spec, given), x)
    assert_floats(found, np.asarray(same), dtype)
    known = ~np.isnan(np.asarray(x))
    assert_floats(back(pull)[0][known], np.asarray(again(pull)[0])[known], dtype)


def test_a_nan_makes_all_nan_that_its_scale_covers_and_the_gradient_is_of_the_identity():
    """No mask is computed there. Beside a scale that is given, `ste` gives a NaN no gradient."""
    x = on_device(normal(2, 5)).at[1, 3].set(jnp.nan)
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(0))
    found, back = jax.vjp(lambda x: fake_quantize_as(x, spec), x)
    np.testing.assert_array_equal(jnp.isnan(found), [[False] * 5, [True] * 5])
    np.testing.assert_array_equal(back(found.at[1].set(2.0))[0][1], np.full(5, 2.0))
    given = Affine(jnp.ones((2, 1)))
    gradient = jax.grad(lambda x: fake_quantize_as(x, spec, given).sum())(x)
    np.testing.assert_array_equal(gradient[1], [1, 1, 1, 0, 1])


def test_no_value_is_clipped_by_the_symmetric_scale_that_it_set():
    """So the straight-through gradient is that of the identity, up to the largest value."""
    x = normal(40, 50)
    gradient = jax.grad(lambda x: fake_quantize_as(x, SPECS[1]).sum())(x)
    assert_floats(gradient, np.ones((40, 50)), np.float32)


def test_a_scale_that_is_given_has_its_gradient():
    """Of the clamp: the ends of the range move with the scale, -8 and 7 steps away."""
    spec = jqx.QSpec(jnp.int4)
    x = jnp.array([[0.3, 100.0], [-100.0, 200.0]])

    def f(x, scale):
        return fake_quantize_as(x, spec, Affine(scale)).sum()

    dx, dscale = jax.grad(f, (0, 1))(x, jnp.ones((1, 1)))
    assert_floats(dx, np.array([[1, 0], [0, 0]]), np.float32)
    assert_floats(dscale, np.array([[7 - 8 + 7]]), np.float32)


@dataclasses.dataclass(frozen=True)
class Doubling:
    """An estimator of a user: twice the cotangent, clipped or not."""

    def bwd(self, x, low, high, levels, cotangent):
        return 2 * cotangent, jnp.zeros_like(low), jnp.zeros_like(high)


def test_the_estimator_is_the_one_of_the_spec():
    spec = jqx.QSpec(jnp.int4, gradient=Doubling())
    affine = Affine(jnp.ones((1, 1)))
    gradient = jax.grad(lambda x: fake_quantize_as(x, spec, affine).sum())(jnp.array([[0.3, 100]]))
    assert_floats(gradient, np.full((1, 2), 2.0), np.float32)


def test_a_relative_granularity_is_refused():
    with pytest.raises(ValueError, match="per_channel"):
        fake_quantize_as(jnp.ones((2, 3)), jqx.QSpec(jnp.int8, jqx.per_channel()))


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
def test_every_format_and_granularity_is_simulated_as_it_is_quantized(name):
    x, spec = on_device(spread_out(CASES[name].shape)), CASES[name].spec
    f = jax.jit(lambda x: (fake_quantize_as(x, spec), jqx.QTensor.quantize(x, spec).dequantize()))
    simulated, real = f(x)
    assert_floats(simulated, np.asarray(real), np.float32)
    gradient = jax.grad(lambda x: fake_quantize_as(x, spec).sum())(x)
    assert gradient.shape == x.shape and np.isfinite(gradient).all()
    if spec.symmetric and not name.startswith(("mx", "nv")):  # whose scales may clip the largest
        assert_floats(gradient, np.ones(x.shape), np.float32)


@pytest.mark.parametrize("name", ["mx in blocks", "nv with a tail"])
def test_the_gradient_of_a_block_format_is_that_of_clamp_at_the_scale_of_each_block(name):
    x, spec = on_device(spread_out(CASES[name].shape)), CASES[name].spec
    q = jqx.QTensor.quantize(x, spec)
    scale = q.scale.dequantize() if name.startswith("nv") else q.scale.astype(jnp.float32)
    high = 6 * np.repeat(scale, q.groups.sizes[-1], axis=-1)[..., : x.shape[-1]]
    gradient = jax.grad(lambda x: fake_quantize_as(x, spec).sum())(x)
    assert_floats(gradient, np.abs(x) <= high * (1 + 2.0**-19), np.float32)
