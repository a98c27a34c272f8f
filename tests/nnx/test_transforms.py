"""Quantized models under the transforms of nnx."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.nnx import Mode, QParam, Stat

from .networks import images, of_layers, of_whole

W8A8 = jqx.presets.w8a8()
LAYERS, WIDTH = 3, 8


def halves(seed, *shape):
    """Multiples of 1/2 in [-2, 2]."""
    return jax.random.randint(jax.random.key(seed), shape, -4, 5).astype(jnp.float32) / 2


ROUNDING = 2 * LAYERS * (WIDTH + 2) * 2.0**-24
"""Between two programs: of the terms of each layer's float sum, and of two products with scales."""


def same(a, b):
    """Whether two trees have equal structures and leaves of equal bits."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    return all(bool((x == y).all()) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def close(a, b, tolerance):
    """Whether two trees agree up to the rounding of float sums of at most 100 terms, which a
    compiler may order in its own way; no value here is so near to a tie that it is rounded apart.
    """
    return all(
        bool(jnp.allclose(x, y, rtol=tolerance, atol=tolerance))
        for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


def values(model, *kinds):
    return nnx.to_pure_dict(nnx.state(model, nnx.Any(*kinds)))


class Block(nnx.Module):
    """A residual layer."""

    def __init__(self, rngs, mode=Mode.SIMULATE, policy=W8A8):
        options = {"policy": policy, "mode": mode, "scales": "dynamic"}
        self.linear = jqx.nnx.Linear(WIDTH, WIDTH, **options, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


def stacked(mode=Mode.SIMULATE, policy=W8A8):
    """Blocks whose variables have a leading axis of layers."""

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def make(rngs):
        return Block(rngs, mode, policy)

    return make(nnx.Rngs(0))


def unstacked(blocks):
    """The same, one by one."""
    graphdef, state = nnx.split(blocks)
    return [nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], state)) for i in range(LAYERS)]


class Deep(nnx.Module):
    """A scan over stacked blocks."""

    def __init__(self, blocks, remat=False):
        self.blocks, self.remat = blocks, remat

    def __call__(self, x):
        call = nnx.remat(lambda block, x: block(x)) if self.remat else lambda block, x: block(x)

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def steps(block, x):
            return call(block, x)

        return steps(self.blocks, x)


@pytest.mark.parametrize("make", [pytest.param(of_layers, marks=pytest.mark.slow), of_whole])
def test_statistics_gathered_under_jit_are_those_gathered_without(make):
    plain, jitted = make(W8A8, Mode.CALIBRATE), make(W8A8, Mode.CALIBRATE)
    step = nnx.jit(lambda model, x: model(x))
    for seed in (1, 2, 3):
        plain(images(seed))
        step(jitted, images(seed))
    got, expected = values(jitted, Stat), values(plain, Stat)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert close(got, expected, 2.0**-18)


@pytest.mark.parametrize("make", [pytest.param(of_layers, marks=pytest.mark.slow), of_whole])
def test_convert_under_jit_and_eval_shape(make):
    policy = jqx.presets.w8a8_dynamic()
    plain, jitted = make(policy, Mode.SIMULATE), make(policy, Mode.SIMULATE)
    jqx.nnx.convert(plain, images())
    nnx.jit(jqx.nnx.convert)(jitted, images())
    assert same(values(plain, QParam, nnx.Param), values(jitted, QParam, nnx.Param))
    assert jax.tree.structure(nnx.state(plain)) == jax.tree.structure(nnx.state(jitted))

    def converted():
        model = make(policy, Mode.SIMULATE)
        jqx.nnx.convert(model, images())
        return model

    abstract = nnx.state(nnx.eval_shape(converted))
    assert jax.tree.structure(abstract) == jax.tree.structure(nnx.state(plain))
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(nnx.state(plain))]
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)] == shapes


def test_gradients_leave_codes_out():
    model = of_layers(jqx.presets.w8a8_dynamic(), Mode.SIMULATE)
    jqx.nnx.convert(model, images())
    value, grads = nnx.value_and_grad(lambda model, x: model(x).sum())(model, images())
    assert value == model(images()).sum()
    assert all("bias" in path for path, _ in nnx.to_flat_state(grads))
    assert (grads["out"]["bias"] == 4).all()


def test_learned_scales_have_gradients_and_start_where_the_calibrators_put_them():
    policy = jqx.presets.w8a8(
        weight={"gradient": jqx.gradients.lsq}, activation={"gradient": jqx.gradients.lsq}
    )
    model = of_whole(policy, Mode.CALIBRATE)
    model(images())
    model.set_attributes(mode=Mode.SIMULATE)
    expected = model(images(2))
    jqx.nnx.learn_scales(model, images())
    assert (model(images(2)) == expected).all()
    grads = nnx.grad(lambda model, x: (model(x) ** 2).sum())(model, images(2))
    scales = jax.tree.leaves(grads["learned_scales"])
    assert len(scales) == 6
    assert all(bool(jnp.any(scale != 0)) for scale in scales)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_stacked_layers(remat):
    x = halves(1, 4, WIDTH)
    deep = Deep(stacked(Mode.CALIBRATE), remat)
    layers = unstacked(deep.blocks)
    for batch in (x, x / 2):
        deep(batch)
        for layer in layers:
            batch = layer(batch)
    assert same(values(layers[0], Stat), jax.tree.map(lambda s: s[0], values(deep.blocks, Stat)))
    jqx.nnx.convert(deep, x)
    assert deep.blocks.linear.kernel.get_value().scale.shape == (LAYERS, 1, WIDTH)
    converted = unstacked(deep.blocks)
    for layer, other in zip(layers, converted, strict=True):
        jqx.nnx.convert(layer, x)
        assert same(values(layer, QParam), values(other, QParam))
    expected = x
    for layer in converted:
        expected = layer(expected)
    assert close(deep(x), expected, 2.0**-18)


def test_gradients_through_scan_and_remat():
    x = halves(1, 4, WIDTH)
    blocks = stacked()

    def loss(model, x):
        return (model(x) ** 2).sum()

    plain = nnx.grad(loss)(Deep(blocks), x)
    remat = nnx.grad(loss)(Deep(blocks, remat=True), x)
    assert jnp.any(plain["blocks"]["linear"]["kernel"][...] != 0)
    assert close(plain, remat, 2 * ROUNDING)  # there and back


def test_scales_of_stacked_layers_are_learned_by_an_optimizer():
    x, lsq = halves(1, 4, WIDTH), {"gradient": jqx.gradients.lsq}
    deep = Deep(stacked(policy=jqx.presets.w8a8(weight=lsq, activation=lsq)))
    jqx.nnx.learn_scales(deep, x)
    shapes = jax.tree.map(jnp.shape, deep.blocks.linear.learned_scales.get_value())
    names = ("kernel:dot_general:lhs", "kernel:weight")
    assert shapes == dict(zip(names, ((LAYERS, 1, 1), (LAYERS, 1, WIDTH)), strict=True))
    before = values(deep, nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).sum())(model))

    step(deep, nnx.Optimizer(deep, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param), x)
    pairs = zip(*map(jax.tree.leaves, (before, values(deep, nnx.Param))), strict=True)
    assert all(bool((a != b).any()) for a, b in pairs)
    expected, learned = deep(x), deep.blocks.linear.learned_scales.get_value()
    jqx.nnx.convert(deep, x)
    assert deep.blocks.linear.learned_scales is None
    assert (deep.blocks.linear.kernel.get_value().scale == learned[names[1]]).all()
    assert (deep.blocks.linear.quant_scales[names[0]].scale == learned[names[0]]).all()
    assert close(deep(x), expected, ROUNDING)


def test_scan_inside_of_a_model_that_is_quantized_from_outside():
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def make(rngs):
        return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    class Scanned(nnx.Module):
        def __init__(self):
            self.layers = make(nnx.Rngs(0))

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def steps(layer, x):
                return jnp.tanh(layer(x))

            return steps(self.layers, x)

    x = halves(1, 4, WIDTH)
    model = jqx.nnx.quantize(Scanned(), W8A8, mode=Mode.CALIBRATE)
    assert (model(x) == Scanned()(x)).all()
    jqx.nnx.convert(model, x)
    assert model.layers.kernel.get_value().scale.shape == (LAYERS, 1, WIDTH)
    assert jnp.abs(model(x) - Scanned()(x)).max() <= 0.1


def test_vmap_over_models_and_over_examples():
    x = halves(1, 4, WIDTH)
    models = stacked(policy=jqx.presets.w8a8_dynamic())
    many = nnx.vmap(lambda model, x: model(x), in_axes=(0, None))(models, x)
    one = jnp.stack([model(x) for model in unstacked(models)])
    assert close(many, one, 2.0**-18)
    model = unstacked(models)[0]
    rows = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))(model, x)
    assert close(rows, model(x), 2.0**-18)


def test_split_merge_state_update_and_clone_of_a_converted_model():
    model = of_whole(W8A8, Mode.SIMULATE, "dynamic")
    jqx.nnx.convert(model, images())
    expected = model(images(2))
    assert (nnx.merge(*nnx.split(model))(images(2)) == expected).all()
    assert (nnx.clone(model)(images(2)) == expected).all()
    other = of_whole(W8A8, Mode.SIMULATE, "dynamic")
    jqx.nnx.convert(other, 2 * images())
    assert (other(images(2)) != expected).any()
    nnx.update(other, nnx.state(model))
    assert (other(images(2)) == expected).all()
    graphdef, codes, rest = nnx.split(model, QParam, ...)
    assert len(nnx.to_flat_state(codes)) == 3
    assert (nnx.merge(graphdef, codes, rest)(images(2)) == expected).all()


def test_a_float_checkpoint_fits():
    float_state = nnx.state(of_whole(W8A8, Mode.FLOAT), nnx.Param)
    model = of_whole(W8A8, Mode.SIMULATE)
    assert jax.tree.structure(nnx.state(model, nnx.Param)) == jax.tree.structure(float_state)
