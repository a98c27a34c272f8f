"""Rules on steps of a scan, through both libraries: `nn.scan` and `nnx.scan`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jqx
import jqx.linen
import jqx.nnx

LAYERS, WIDTH = 4, 8
POLICY = jqx.Policy(
    [
        jqx.Rule("blocks[0]", weight="int8", activation="int8"),
        jqx.Rule("blocks[-1]"),
        jqx.Rule(weight="int4", activation="int8"),
    ]
)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, WIDTH)), jnp.float32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + jnp.tanh(nn.Dense(WIDTH, name="up")(x)), None


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        kind = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = kind(name="blocks")(x, None)
        return nn.Dense(2, name="head")(x)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.up(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer, in_axes=0))
        self.blocks = make(rngs)
        self.head = nnx.Linear(WIDTH, 2, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def steps(block, x):
            return block(x)

        return self.head(steps(self.blocks, x))


def of_linen():
    """Returns what calibrates and simulates, what converts and runs, and the stacked weight."""
    module = Linen()
    variables = module.init(jax.random.key(0), X)
    quantized = jqx.linen.quantize(module, POLICY, mode=jqx.linen.Mode.CALIBRATE)
    _, seen = quantized.apply(variables, X, mutable=["quant_stats"])
    variables = {**variables, **seen}
    simulated = quantized.clone(mode=jqx.linen.Mode.SIMULATE, backward=jnp.float32)
    integers = quantized.clone(mode=jqx.linen.Mode.CONVERT)
    plan = jqx.linen.make_plan(simulated, variables, X)
    codes = jqx.linen.convert(integers, variables, X, target="cpu")
    weight = codes["qparams"]["blocks"]["up"]["kernel"]
    run = jax.jit(lambda v, q, x: (simulated.apply(v, x), integers.apply(q, x)))
    return plan, weight, variables["params"]["blocks"]["up"]["kernel"], run(variables, codes, X)


def of_nnx():
    model = jqx.nnx.quantize(Nnx(nnx.Rngs(0)), POLICY, mode=jqx.nnx.Mode.CALIBRATE)
    model(X)
    model.set_attributes(mode=jqx.nnx.Mode.SIMULATE, backward=jnp.float32)
    plan = jqx.nnx.make_plan(model, X)
    real = model.blocks.up.kernel[...]
    simulated = nnx.jit(lambda model, x: model(x))(model, X)
    jqx.nnx.convert(model, X, target="cpu")
    weight = model.blocks.up.kernel.get_value()
    return plan, weight, real, (simulated, nnx.jit(lambda model, x: model(x))(model, X))


@pytest.mark.slow
@pytest.mark.many
@pytest.mark.parametrize("way", [of_linen, of_nnx])
def test_rules_on_steps_split_the_scans_of_modules(way):
    plan, weight, real, (simulated, converted) = way()
    assert [site.path for site in plan.sites] == [
        "blocks/up/kernel[0:1]",
        "blocks/up/kernel[1:3]",
        "head/kernel",
    ]
    assert isinstance(weight, jqx.Segments) and weight.bounds == (0, 1, 3, 4)
    kinds = [getattr(part, "qtype", None) for part in weight.parts]
    assert kinds == [jnp.int8, jnp.int4, None]
    np.testing.assert_array_equal(weight.parts[2], real[3:])
    whole = [
        jqx.QTensor.quantize(real[a:b], jqx.QSpec(kind, jqx.per_axis(0, 2))).dequantize()
        for kind, (a, b) in zip(("int8", "int4"), itertools.pairwise((0, 1, 3)), strict=True)
    ]
    np.testing.assert_array_equal(weight.dequantize()[:3], jnp.concatenate(whole))
    np.testing.assert_array_equal(simulated, converted)
