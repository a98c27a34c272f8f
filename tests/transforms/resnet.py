"""A residual network as wide as ResNet50 in plain JAX, which shows its features on the way."""

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import on_device

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
                first = name.endswith("_0") and not name.startswith("block0")
                features[name] = x = block(p, x, 2 if first else 1)
        features["logits"] = x.mean((1, 2)) @ params["head"]
        return features

    return f


def parameters(seed=0):
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
