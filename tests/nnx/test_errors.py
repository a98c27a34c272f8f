"""What is refused, and what the messages say."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.nnx import Mode

from .networks import Net, images, of_layers, of_whole

POLICY = jqx.presets.w8a8_dynamic()
ONES = jnp.ones((1, 4))


def linear(policy=POLICY, **options):
    return jqx.nnx.Linear(4, 2, policy=policy, rngs=nnx.Rngs(0), **options)


def test_a_policy_and_a_mode_are_checked():
    with pytest.raises(TypeError, match=r"(?s)Linear: `policy` is not a Policy.*fix"):
        linear(policy="w8a8")
    with pytest.raises(TypeError, match=r"(?s)Linear: `mode` is not a Mode.*SIMULATE"):
        linear(mode="simulate")
    layer = linear()
    layer.set_attributes(mode="float")
    with pytest.raises(TypeError, match=r"(?s)Linear: `mode` is not a Mode.*'float'"):
        layer(ONES)


def test_quantize_takes_float_modules():
    with pytest.raises(TypeError, match=r"(?s)quantize: `model` is not a Module.*fix"):
        jqx.nnx.quantize(lambda x: x, POLICY)
    with pytest.raises(
        ValueError, match=r"(?s)quantize: this model is quantized already.*parts \(Conv, Linear"
    ):
        jqx.nnx.quantize(of_layers(POLICY, Mode.FLOAT), POLICY)

    class Named(nnx.Module):
        def __init__(self):
            self.policy = "mine"

    with pytest.raises(ValueError, match=r"(?s)quantize: this.*with attributes policy\n.*rename"):
        jqx.nnx.quantize(Named(), POLICY)


@pytest.mark.parametrize("name", ["convert", "fix_scales", "learn_scales"])
def test_a_model_without_quantized_parts(name):
    model = Net(nnx.Rngs(0))
    with pytest.raises(ValueError, match=rf"(?s)jqx\.nnx\.{name}: no part.*Net with 0 quant.*fix"):
        getattr(jqx.nnx, name)(model, images())
    with pytest.raises(TypeError, match=rf"(?s)jqx\.nnx\.{name}: `model` is not a Module"):
        getattr(jqx.nnx, name)(lambda x: x, images())


def test_a_model_that_is_converted_already_keeps_its_state():
    model = of_whole(POLICY, Mode.SIMULATE)
    jqx.nnx.convert(model, images())
    before = model(images())
    with pytest.raises(ValueError, match=r"(?s)convert: no part.*not yet codes.*fix"):
        jqx.nnx.convert(model, images())
    assert (model(images()) == before).all()


def test_a_failed_call_changes_nothing():
    model = linear(jqx.presets.w8a8(), mode=Mode.CALIBRATE)
    model(ONES)
    with pytest.raises(TypeError):
        jqx.nnx.convert(model, jnp.ones((1, 3)))
    assert model.mode is Mode.CALIBRATE
    assert list(model.quant_stats) == ["kernel:dot_general:lhs"]


class Counts(nnx.Module):
    """Counts its calls, and hands a part of itself to a function."""

    def __init__(self, rngs):
        self.linear, self.calls = nnx.Linear(4, 2, rngs=rngs), nnx.Variable(jnp.zeros((), int))
        self.extra = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x, other, f):
        self.calls[...] += 1
        self.linear.bias[...] += 1.0
        other[...] = x[0] + 1.0
        return f(self.extra(self.linear(x)))


@pytest.mark.parametrize(
    ("mode", "policy"), [(Mode.SIMULATE, POLICY), (Mode.CALIBRATE, jqx.presets.w8a8())]
)
def test_a_method_that_raises_leaves_the_model_as_it_was(mode, policy):
    def fails(y):
        raise KeyError("mine")

    model = jqx.nnx.quantize(Counts(nnx.Rngs(0)), policy, mode=mode)
    kinds = [type(part) for _, part in nnx.iter_modules(model)]
    other, state = nnx.Variable(jnp.zeros(4)), jax.tree.map(jnp.array, nnx.state(model))
    with pytest.raises(ValueError, match=r"(?s)cannot be evaluated.*KeyError: 'mine'"):
        model(ONES, other, fails)
    assert not jnp.any(other[...])
    assert jax.tree.all(jax.tree.map(jnp.array_equal, state, nnx.state(model)))
    assert [type(part) for _, part in nnx.iter_modules(model)] == kinds
    assert model.mode is mode


def test_statistics_of_fixed_scales_have_no_use():
    model = linear(jqx.presets.w8a8())
    jqx.nnx.fix_scales(model, ONES, scales="dynamic")
    model.set_attributes(mode=Mode.CALIBRATE)
    with pytest.raises(ValueError, match=r"(?s)Linear: statistics.*kernel:dot_general:lhs"):
        model(ONES)


def test_learned_scales_are_symmetric_floats():
    spec = {"symmetric": False, "qtype": jnp.uint8}
    model = linear(jqx.presets.w8a8(activation=spec, weight={"gradient": jqx.gradients.lsq}))
    with pytest.raises(ValueError, match=r"(?s)learn_scales: an integer zero point.*fix"):
        jqx.nnx.learn_scales(model, ONES, scales="dynamic")
    assert model.learned_scales is None


def test_a_rule_that_matches_nothing():
    rule = jqx.Rule("heads/.*", weight=jqx.QSpec(jnp.int8))
    model = jqx.nnx.quantize(Net(nnx.Rngs(0)), jqx.Policy([rule, *POLICY.rules]))
    for call in (model, lambda x: jqx.nnx.convert(model, x)):
        with pytest.raises(ValueError, match=r"(?s)rule 0 of the policy matches.*'conv/kernel'"):
            call(images())


def test_a_plan_is_of_a_quantized_model():
    with pytest.raises(TypeError, match=r"(?s)make_plan: `model` is not a Quantized.*fix"):
        jqx.nnx.make_plan(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), ONES)


def test_a_contraction_that_does_not_know_its_weight():
    dot = jqx.nnx.DotGeneral(policy=POLICY, weight_name="weight")
    layer = nnx.Linear(4, 2, dot_general=dot, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"(?s)convert: an injected DotGeneral.*weight_name="):
        jqx.nnx.convert(layer, ONES)


def test_adapters_are_looked_for():
    with pytest.raises(ValueError, match=r"(?s)merge_lora: there are no adapters.*fix"):
        jqx.nnx.merge_lora(linear())


@pytest.mark.parametrize("way", ["layer", "whole", "part"])
def test_weights_that_were_not_converted_are_named(way):
    policy, mode, rngs = jqx.presets.w8a8_dynamic(), jqx.nnx.Mode.CONVERT, nnx.Rngs(0)
    if way == "layer":
        model = run = jqx.nnx.Linear(4, 3, policy=policy, mode=mode, rngs=rngs)
    else:
        model = nnx.Sequential(nnx.Linear(4, 3, rngs=rngs))
        model = run = jqx.nnx.quantize(model, policy, mode=mode)
    if way == "part":
        run = model.layers[0]
    wrong = r"(?s)not converted.*floats for \S*kernel, .*fix: .*jqx\.nnx\.convert"
    with pytest.raises(ValueError, match=wrong):
        run(jnp.ones((2, 4)))
    jqx.nnx.convert(model, jnp.ones((2, 4)))
    assert run(jnp.ones((2, 4))).shape == (2, 3)
