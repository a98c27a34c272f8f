"""Networks for the tests of nnx, whose layers are named by who makes them."""

from typing import Any

from flax import nnx

import jqx
import jqx.nnx

from ..linen.networks import POLICIES as POLICIES
from ..linen.networks import images as images


class Net(nnx.Module):
    """A convolution, a perceptron and a head."""

    def __init__(self, rngs, *, conv: Any = nnx.Conv, linear: Any = nnx.Linear):
        self.conv = conv(2, 4, (3, 3), rngs=rngs)
        self.hidden = linear(100, 8, rngs=rngs)
        self.out = linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv(x))
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))
        return self.out(x)


def of_layers(policy: jqx.Policy, mode: jqx.nnx.Mode, scales: str = "calibrated") -> nnx.Module:
    """The network made of jqx's layers."""

    options = {"policy": policy, "mode": mode, "scales": scales}

    def conv(*args, **kwargs):
        return jqx.nnx.Conv(*args, **options, **kwargs)

    def linear(*args, **kwargs):
        return jqx.nnx.Linear(*args, **options, **kwargs)

    return Net(nnx.Rngs(0), conv=conv, linear=linear)


def of_whole(policy: jqx.Policy, mode: jqx.nnx.Mode, scales: str = "calibrated") -> nnx.Module:
    """The float network, quantized from outside."""
    return jqx.nnx.quantize(Net(nnx.Rngs(0)), policy, mode=mode, scales=scales)


WAYS = {"layers": of_layers, "whole": of_whole}


def params() -> dict:
    """The weights of the float network, as nested dicts."""
    return nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(0)), nnx.Param))


def float_network(params, x):
    """The network as a function."""
    net = Net(nnx.Rngs(0))
    nnx.update(net, params)
    return net(x)
