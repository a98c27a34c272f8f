"""A deep residual network of images that become as small as 2 x 2, less than its windows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..models.transforms import normal, relative
from .resnet import parameters, resnet


def cosine(a, b):
    a, b = np.float64(a).ravel(), np.float64(b).ravel()
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("policy", [jqx.presets.w8a8(), jqx.presets.w8a8_dynamic()])
def test_every_feature_of_a_residual_network_is_right(policy, padding):
    f, params, x = resnet(padding), parameters(), normal(0, 2, 64, 64, 3)
    real = jax.jit(f)(params, x)
    plan = jqx.make_plan(f, policy)(params, x)
    affines = None
    if plan.static_specs():
        observed, stats = jax.jit(jqx.calibrate(f, plan))(params, x)
        affines = jqx.affines(plan, stats)
        assert max(relative(observed[name], real[name]) for name in real) <= 1e-5
    q = jqx.quantize_params(params, plan)
    integers = jax.jit(jqx.convert(f, plan, affines))(q, x)
    floats = jax.jit(jqx.simulate(f, plan, affines))(params, x)
    training = jax.jit(jqx.simulate(f, plan, affines, backward=jnp.float32))(params, x)
    for name, feature in integers.items():
        np.testing.assert_array_equal(training[name], feature, err_msg=name)
        # Sums in float32 differ in their last bits, which tips codes over ties. At worst all later
        # roundings go another way: then the two are as far from each other as two independent
        # ones, sqrt(2) times as far as each is from float.
        noise = relative(floats[name], real[name])
        assert relative(feature, floats[name]) <= np.sqrt(2) * noise, name
        # Where the peak is at most 7 times the root mean square, an int8 code is off by
        # 7 / 127 / sqrt(12) = 0.016 of it. 23 contractions in series, half of them in branches
        # that a shortcut outweighs, leave at most 23 * 2 * 0.016 ** 2 / 2 less than a cosine of 1.
        assert cosine(feature, real[name]) >= 0.994, name
