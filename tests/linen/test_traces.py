"""How often the float module runs under one call of the quantized one: once."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jqx
import jqx.linen
from jqx.linen import Mode

TRACES = []
X = jnp.ones((1, 4))


class Counted(nn.Module):
    """A perceptron that tells how often it runs."""

    @nn.compact
    def __call__(self, x):
        TRACES.append(x)
        return nn.Dense(2)(nn.relu(nn.Dense(4)(x)))


@pytest.mark.parametrize("policy", [jqx.presets.w8a8(), jqx.presets.w8a8_dynamic()])
def test_every_mode_and_conversion_traces_the_module_once(policy):
    known = Counted().init(jax.random.key(0), X)
    module = jqx.linen.quantize(Counted(), policy)
    integers = module.clone(mode=Mode.CONVERT)
    counts = []

    def counted(f):
        TRACES.clear()
        result = f()
        counts.append(len(TRACES))
        return result

    calibrate = module.clone(mode=Mode.CALIBRATE)
    _, seen = counted(lambda: calibrate.apply(known, X, mutable=["quant_stats"]))
    known = {**known, **seen}
    counted(lambda: module.apply(known, X))
    codes = counted(lambda: jqx.linen.convert(integers, known, X))
    counted(lambda: integers.apply(codes, X))
    assert counts == [1] * 4
