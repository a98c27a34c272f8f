"""Scales of several methods and of parts, and learned scales."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.nnx import Mode

from .networks import POLICIES, WAYS

W8A8 = POLICIES["w8a8"]


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
    model = WAYS["whole"](W8A8, Mode.SIMULATE)
    with pytest.raises(ValueError, match=r"(?s)Linear: `__call__` of a part.*without scales"):
        model.out(x)


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
