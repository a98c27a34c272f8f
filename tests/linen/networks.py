"""Networks for the tests of linen, whose layers are named by who makes them."""

import functools
from collections.abc import Callable

import jax
from flax import linen as nn

import jqx
import jqx.linen

from ..arrays import normal

POLICIES = {
    "w8a8": jqx.presets.w8a8(),
    "w8a8_dynamic": jqx.presets.w8a8_dynamic(),
    "w4a16": jqx.presets.w4a16(block=4),
    "fp8": jqx.presets.fp8(),
}


class Net(nn.Module):
    """A convolution, a perceptron and a head."""

    conv: Callable[..., nn.Module] = nn.Conv
    dense: Callable[..., nn.Module] = nn.Dense

    @nn.compact
    def __call__(self, x):
        x = nn.relu(self.conv(4, (3, 3), name="conv")(x))
        x = nn.relu(self.dense(8, name="hidden")(x.reshape(len(x), -1)))
        return self.dense(3, name="out")(x)


def of_layers(policy: jqx.Policy, mode: jqx.linen.Mode, scales: str = "calibrated") -> nn.Module:
    """The network made of jqx's layers."""
    options = {"policy": policy, "mode": mode, "scales": scales}
    conv = functools.partial(jqx.linen.Conv, **options)
    return Net(conv, functools.partial(jqx.linen.Dense, **options))


def of_whole(policy: jqx.Policy, mode: jqx.linen.Mode, scales: str = "calibrated") -> nn.Module:
    """The float network, quantized from outside."""
    return jqx.linen.quantize(Net(), policy, mode=mode, scales=scales)


WAYS = {"layers": of_layers, "whole": of_whole}


def images(seed: int = 1) -> jax.Array:
    """A batch of four images of 5 x 5 pixels with two channels."""
    return normal(seed, 4, 5, 5, 2)


@functools.cache
def variables() -> dict:
    """Float variables of the network."""
    return Net().init(jax.random.key(0), images())


def float_network(params, x):
    """The network as a function."""
    return Net().apply({"params": params}, x)
