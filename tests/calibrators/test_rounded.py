"""Scales of another calibrator, rounded to 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import calibrators
from jqx.calibrators import Rounded
from jqx.numerics import mxfp4


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_every_size_of_scale_is_rounded_as_numpy_rounds_it(dtype):
    rng = np.random.default_rng(0)
    scales = np.ldexp(rng.uniform(1, 2, 3000), rng.integers(-40, 20, 3000)).astype(np.float32)
    x = jnp.asarray(scales[:, None] * 127)
    spec = jqx.QSpec("int8", jqx.per_axis(0), calibrator=Rounded(dtype=dtype))
    found = jax.jit(lambda x: jqx.QTensor.quantize(x, spec).scale)(x)[:, 0]
    plain = jqx.QTensor.quantize(x, jqx.QSpec("int8", jqx.per_axis(0))).scale[:, 0]
    kind = jnp.finfo(dtype)
    with np.errstate(over="ignore"):
        want = np.asarray(plain).astype(dtype).astype(np.float32)
    want = np.clip(want, float(kind.smallest_subnormal), float(kind.max))
    np.testing.assert_array_equal(found, want)


def test_codes_are_chosen_for_the_rounded_scale():
    x = jax.random.normal(jax.random.key(0), (16, 64))
    for calibrator in (calibrators.absmax, calibrators.mse, calibrators.hqq):
        spec = jqx.QSpec(
            "int4", jqx.per_block({0: 1, 1: 32}), symmetric=False, calibrator=Rounded(calibrator)
        )
        q = jqx.QTensor.quantize(x, spec)
        assert (q.scale.astype(jnp.float16).astype(jnp.float32) == q.scale).all()
        again = np.round(np.asarray(x).reshape(16, 2, 32) / np.asarray(q.scale)[..., None])
        codes = np.clip(again + np.asarray(q.zero_point)[..., None].astype(int), -8, 7)
        np.testing.assert_array_equal(np.asarray(q.codes).reshape(16, 2, 32), codes)


def test_zeros_nan_and_signs_are_kept():
    spec = jqx.QSpec("int8", jqx.per_axis(0), calibrator=Rounded())
    x = jnp.array([[0.0], [jnp.nan], [jnp.inf]])
    plain = jqx.QTensor.quantize(x, jqx.QSpec("int8", jqx.per_axis(0)))
    np.testing.assert_array_equal(jqx.QTensor.quantize(x, spec).scale, plain.scale)


def test_observed_values_give_rounded_scales_too():
    def f(w, x):
        return x @ w

    w, x = jnp.eye(8), jax.random.normal(jax.random.key(0), (4, 8))
    spec = jqx.QSpec("int8", jqx.per_tensor(), calibrator=Rounded())
    policy = jqx.Policy([jqx.Rule(weight="int8", activation=spec)])
    made = jqx.ptq(f, policy, progress=False)(w, [(x,)])
    (scale,) = (affine.scale for affine in made.affines.values())
    assert (scale.astype(jnp.float16).astype(jnp.float32) == scale).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="neither float16 nor bfloat16"):
        Rounded(dtype=jnp.float32)
    with pytest.raises(TypeError, match="calibrator"):
        Rounded("absmax")
    spec = jqx.QSpec(mxfp4, jqx.per_block({0: 1, 1: 32}), calibrator=Rounded())
    with pytest.raises(ValueError, match="its own format of scales"):
        jqx.QTensor.quantize(jnp.ones((1, 32)), spec)
