"""`simulate(..., backward=)` where XLA optimizes it: the bits of what is deployed, what is kept for
the backward pass, and features of a residual network.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx

from ..arrays import on_device
from ..models.transforms import normal, relative


def test_what_is_evaluated_is_what_is_deployed():
    """In float a code is now and then the other of two, and layers amplify that."""

    def f(params, x):
        def layer(x, w):
            return x + jax.nn.gelu(x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) @ w), None

        return lax.scan(layer, x, params["layers"])[0] @ params["head"]

    params = {"layers": normal(0, 24, 32, 32) / 3, "head": normal(1, 32, 8)}
    x = normal(2, 1024, 32)
    plan = jqx.make_plan(f, jqx.presets.w8a8_dynamic())(params, x)

    @jax.jit
    def results(params, x):
        converted = jqx.convert(f, plan)(jqx.quantize_params(params, plan), x)
        exact = jqx.simulate(f, plan, backward=jnp.float32)(params, x)
        return converted, exact, jqx.simulate(f, plan)(params, x)

    converted, exact, simulated = results(params, x)
    np.testing.assert_array_equal(exact, converted)
    assert np.abs(simulated - converted).max() > 1e-4 * np.abs(converted).max()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of what XLA on CPU keeps")
def test_codes_are_kept_for_the_backward_pass_not_their_quotients():
    """Of a weight that no other operation divides: its quotients would be the root of a fusion."""

    def f(w, x):
        return jax.nn.relu(x @ w)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 512), (64, 256))]
    simulated = jqx.simulate(f, jqx.presets.w8a8_dynamic(), "dynamic", backward=jnp.float32)
    step = jax.value_and_grad(lambda w, x: simulated(w, x).sum(), (0, 1))
    program = jax.jit(step).lower(*shapes).compile().as_text()
    assert re.search(r"s8\[256,512\]\S* (fusion|convert)", program)
    assert not re.search(r"ROOT \S+ = f32\[256,512\]\S* divide", program)


STAGES = ((2, 64), (2, 128), (2, 256), (3, 512))
"""Blocks and width of each stage; a block gives four times its width. ResNet50 repeats more blocks,
of the same shapes.
"""


def resnet(padding):
    """Returns the network from parameters and images [n, h, w, 3] to features by name.

    Its convolutions pad by themselves (`"same"`), or are `"valid"` ones of padded images.
    """

    def conv(p, x, stride=1):
        kernel, pad = p["kernel"], p["kernel"].shape[0] // 2
        edges = [(pad, pad)] * 2
        if padding == "valid":
            zero = jnp.zeros((), x.dtype)
            x = jax.lax.pad(x, zero, [(0, 0, 0), (pad, pad, 0), (pad, pad, 0), (0, 0, 0)])
            edges = "VALID"
        y = jax.lax.conv_general_dilated(
            x, kernel, (stride,) * 2, edges, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y * p["gain"][None, None, None] + p["bias"][None, None, None]

    def block(p, x, stride):
        y = jax.nn.relu(conv(p["reduce"], x))
        y = jax.nn.relu(conv(p["middle"], y, stride))
        y = conv(p["expand"], y)
        return jax.nn.relu(y + (conv(p["shortcut"], x, stride) if "shortcut" in p else x))

    def f(params, images):
        x = jax.nn.relu(conv(params["stem"], images, 2))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        features = {"stem": x}
        for name, p in params.items():
            if name.startswith("block"):
                is_first = name.endswith("_0") and not name.startswith("block0")
                features[name] = x = block(p, x, 2 if is_first else 1)
        features["logits"] = x.mean((1, 2)) @ params["head"]
        return features

    return f


def resnet_params(seed=0):
    """Random ones, that keep the variance of features near 1: gains and biases are of a batch
    normalization, its statistics folded in.
    """
    rng = np.random.default_rng(seed)

    def conv(window, inputs, outputs, gain=1.0):
        std = np.sqrt(2 / (window * window * inputs))
        return {
            "kernel": on_device(rng.normal(0, std, (window, window, inputs, outputs)), "float32"),
            "gain": on_device(gain * rng.uniform(0.5, 1.5, outputs), jnp.float32),
            "bias": on_device(rng.normal(0, 0.1, outputs), jnp.float32),
        }

    params, inputs = {"stem": conv(7, 3, 64)}, 64
    for stage, (blocks, width) in enumerate(STAGES):
        for index in range(blocks):
            params[f"block{stage}_{index}"] = p = {
                "reduce": conv(1, inputs, width),
                "middle": conv(3, width, width),
                "expand": conv(1, width, 4 * width, gain=0.5),
            }
            if index == 0:
                p["shortcut"] = conv(1, inputs, 4 * width, gain=0.7)
            inputs = 4 * width
    params["head"] = on_device(rng.normal(0, inputs**-0.5, (inputs, 10)), jnp.float32)
    return params


def cosine(a, b):
    a, b = np.float64(a).ravel(), np.float64(b).ravel()
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("policy", [jqx.presets.w8a8(), jqx.presets.w8a8_dynamic()])
def test_every_feature_of_a_residual_network_is_right(policy, padding):
    """Its images become as small as 2 x 2, less than its windows."""
    f, params, x = resnet(padding), resnet_params(), normal(0, 2, 64, 64, 3)
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
