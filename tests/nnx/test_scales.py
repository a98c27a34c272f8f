"""A static activation without a scale is an error, unless it is asked of the values at hand."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.nnx import Mode

from .networks import POLICIES, WAYS, float_network, images, params

W8A8 = POLICIES["w8a8"]
SITES = {
    "whole": "conv/kernel:conv_general_dilated:lhs, hidden/kernel:dot_general:lhs",
    "layers": "kernel:conv_general_dilated:lhs",
    "injected": "kernel:conv_general_dilated:lhs",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_forgotten_calibration_is_an_error_that_names_the_sites(way):
    model = WAYS[way](W8A8, Mode.SIMULATE)
    before = nnx.to_pure_dict(nnx.state(model))
    match = f"(?s)have no scale.*{{}}, without .*{re.escape(SITES[way])}.*fix.*dynamic"
    for mode in (Mode.SIMULATE, Mode.CONVERT):
        model.set_attributes(mode=mode)
        with pytest.raises(ValueError, match=match.format(mode)):
            model(images())
        for name in ("convert", "fix_scales", "learn_scales"):
            with pytest.raises(ValueError, match=match.format(f"a call of {name}")):
                getattr(jqx.nnx, name)(model, images())
    after = nnx.to_pure_dict(nnx.state(model))
    assert str(before) == str(after)
    if way == "whole":
        assert len(jqx.nnx.make_plan(model, images()).sites) == 3
        with pytest.raises(ValueError, match=r"(?s)Linear: `__call__` of a part.*without scales"):
            model.out(jnp.ones((1, 8)))


@pytest.mark.parametrize("way", WAYS)
def test_dynamic_scales_are_those_of_the_values_of_the_call(way):
    model = WAYS[way](W8A8, Mode.SIMULATE, "dynamic")
    expected = jqx.simulate(float_network, W8A8, "dynamic")(params(), images())
    assert (model(images()) == expected).all()
    plan = jqx.make_plan(float_network, W8A8)(params(), images())
    weights = jqx.quantize_params(params(), plan)
    stats = jqx.calibrate(float_network, plan)(params(), images())[1]
    affines = jqx.affines(plan, stats) if way == "whole" else "dynamic"
    expected = jqx.convert(float_network, plan, affines)(weights, images())
    jqx.nnx.convert(model, images())
    other = WAYS[way](W8A8, Mode.SIMULATE)
    jqx.nnx.convert(other, images(), scales="dynamic")
    assert (model(images()) == expected).all() and (other(images()) == expected).all()
    assert model(2 * images()).shape == (4, 3)


def test_methods_are_converted_one_after_another():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return self.second(self.first(x))

        def half(self, x):
            return self.first(x)

    x = jnp.linspace(-1, 1, 16).reshape(2, 8)
    one, two = (jqx.nnx.quantize(Two(nnx.Rngs(0)), W8A8, mode=Mode.CALIBRATE) for _ in range(2))
    for model in (one, two):
        model(x)
    jqx.nnx.convert(one, x)
    for name in ("half", "__call__"):
        jqx.nnx.convert(two, x, method=name)
    assert (one(x) == two(x)).all() and (one.half(x) == two.half(x)).all()
    assert not two.quant_stats.get_value()


def test_parts_take_dynamic_scales():
    model = WAYS["whole"](W8A8, Mode.SIMULATE, "dynamic")
    x, floats = jnp.linspace(-1, 1, 8)[None], WAYS["whole"](W8A8, Mode.FLOAT)
    assert (model.out(x) != floats.out(x)).any()


def test_scales_are_checked():
    with pytest.raises(ValueError, match=r"(?s)Linear: `scales` is unknown.*'batch'.*fix"):
        jqx.nnx.Linear(2, 3, policy=W8A8, scales="batch", rngs=nnx.Rngs(0))
    model = WAYS["whole"](W8A8, Mode.SIMULATE)
    with pytest.raises(ValueError, match=r"(?s)fix_scales: `scales` is unknown"):
        jqx.nnx.fix_scales(model, images(), scales="static")


def test_learned_scales_have_a_rate_of_their_own():
    def label(path, _):
        return "scales" if "learned_scales" in jax.tree_util.keystr(path) else "weights"

    def labels(params):
        return jax.tree.map_with_path(label, params)

    lsq = {"gradient": jqx.gradients.lsq}
    model = jqx.nnx.quantize(
        nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jqx.presets.w8a8(weight=lsq, activation=lsq)
    )
    x = jnp.linspace(-1, 1, 8).reshape(2, 4)
    jqx.nnx.learn_scales(model, x, scales="dynamic")
    rates = {"weights": optax.sgd(0.0, momentum=0.9), "scales": optax.sgd(1e-3, momentum=0.9)}
    optimizer = nnx.Optimizer(model, optax.multi_transform(rates, labels), wrt=nnx.Param)
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).sum())(model))

    for _ in range(2):
        step(model, optimizer)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), before, after)
    assert same["kernel"] and same["bias"]
    assert not any(jax.tree.leaves(same["learned_scales"]))


def test_negative_learned_scales_mirror_the_codes():
    lsq = {"qtype": "int4", "gradient": jqx.gradients.lsq}
    model = jqx.nnx.quantize(
        nnx.Linear(4, 2, rngs=nnx.Rngs(0)),
        jqx.presets.w8a8(weight=lsq, activation=lsq),
        backward=jnp.float32,
    )
    x = jnp.linspace(-1, 1, 8).reshape(2, 4)
    jqx.nnx.learn_scales(model, x, scales="dynamic")
    before = model(x)
    scales = model.learned_scales.get_value()
    model.learned_scales.set_value(jax.tree.map(lambda scale: -scale, scales))
    assert (model(x) == before).all()
    jqx.nnx.convert(model, x)
    assert (model(x) == before).all()
