"""Every layer beside Flax's own: the same fields, parameters and results."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jqx
import jqx.linen
from jqx._src.modules.quantized_function import overlay
from jqx.linen import Mode

from ..arrays import normal

POLICY = jqx.presets.w8a8_dynamic()
W8 = jqx.presets.w8a16(tables="int8")


def rows(*shape):
    return normal(1, *shape)


def tokens(*shape):
    return jax.random.randint(jax.random.key(1), shape, 0, 7)


IMAGE = rows(2, 6, 6, 4)
MASK = jnp.tril(jnp.ones((1, 1, 5, 5), bool))
LAYERS = {
    "Dense": ("Dense", (3,), {}, (rows(4, 6),)),
    "Dense, bfloat16": ("Dense", (3,), {"dtype": jnp.bfloat16, "use_bias": False}, (rows(4, 6),)),
    "DenseGeneral": ("DenseGeneral", ((2, 3),), {"axis": (-2, -1)}, (rows(4, 5, 6),)),
    "DenseGeneral, batch": ("DenseGeneral", (3,), {"batch_dims": (0,)}, (rows(4, 5, 6),)),
    "Einsum": ("Einsum", ((6, 2, 3), "...d,dhk->...hk"), {}, (rows(4, 6),)),
    "Conv": ("Conv", (3, (3, 3)), {}, (IMAGE,)),
    "Conv, strided": ("Conv", (3, (3, 2)), {"strides": (2, 1), "padding": "VALID"}, (IMAGE,)),
    "Conv, groups": ("Conv", (4, (3, 3)), {"feature_group_count": 2}, (IMAGE,)),
    "Conv, dilated": (
        "Conv",
        (3, (2, 2)),
        {"kernel_dilation": 2, "input_dilation": 2, "padding": 1},
        (IMAGE,),
    ),
    "Conv, circular": ("Conv", (3, (3,)), {"padding": "CIRCULAR"}, (rows(2, 6, 4),)),
    "Conv, causal": ("Conv", (3, (3,)), {"padding": "CAUSAL"}, (rows(2, 6, 4),)),
    "Conv, one image": ("Conv", (3, (3, 3)), {"use_bias": False}, (IMAGE[0],)),
    "ConvTranspose": ("ConvTranspose", (3, (3, 3)), {"strides": (2, 2)}, (IMAGE,)),
    "Embed": ("Embed", (7, 4), {}, (tokens(2, 5),)),
    "attention": ("MultiHeadAttention", (), {"num_heads": 2}, (rows(2, 5, 8),)),
    "attention, crossed": (
        "MultiHeadDotProductAttention",
        (),
        {"num_heads": 2, "qkv_features": 4, "out_features": 6},
        (rows(2, 5, 8), rows(2, 3, 8)),
    ),
}


def both(name, **options):
    """The float layer, the quantized one, and arguments."""
    kind, args, kwargs, inputs = LAYERS[name]
    return (
        getattr(nn, kind)(*args, **kwargs),
        getattr(jqx.linen, kind)(*args, **kwargs, **options),
        inputs,
    )


def policy_of(name):
    return W8 if "Embed" in name else POLICY


@pytest.mark.many
@pytest.mark.parametrize("name", LAYERS)
def test_float_is_flax(name):
    plain, layer, inputs = both(name, policy=policy_of(name), mode=Mode.FLOAT)
    variables = plain.init(jax.random.key(0), *inputs)
    jax.tree.map(
        lambda a, b: None if (a == b).all() else pytest.fail("parameters differ"),
        layer.init(jax.random.key(0), *inputs),
        variables,
    )
    out = layer.apply(variables, *inputs)
    assert out.dtype == plain.apply(variables, *inputs).dtype
    assert (out == plain.apply(variables, *inputs)).all()


@pytest.mark.many
@pytest.mark.parametrize("name", LAYERS)
def test_simulate_and_convert_are_the_transforms(name):
    plain, layer, inputs = both(name, policy=policy_of(name))
    variables = plain.init(jax.random.key(0), *inputs)

    def function(params, *inputs):
        return plain.apply({"params": params}, *inputs)

    params = variables["params"]
    plan = jqx.make_plan(function, policy_of(name))(params, *inputs)
    assert plan.weights
    assert str(jqx.linen.make_plan(layer, variables, *inputs)) == str(plan)
    expected = jqx.simulate(function, plan, "dynamic")(params, *inputs)
    assert (layer.apply(variables, *inputs) == expected).all()

    integers = layer.clone(mode=Mode.CONVERT)
    converted = jqx.linen.convert(integers, variables, *inputs)
    quantized = jqx.quantize_params(params, plan)
    assert jax.tree.structure(overlay(converted.get("params", {}), converted["qparams"])) == (
        jax.tree.structure(quantized)
    )
    expected = jqx.convert(function, plan, "dynamic")(quantized, *inputs)
    assert (integers.apply(converted, *inputs) == expected).all()
    floats = layer.clone(mode=Mode.FLOAT).apply(converted, *inputs)
    assert (floats == function(jqx.dequantize_params(quantized), *inputs)).all()


def test_an_embedding_attends_with_the_codes_of_its_lookup():
    plain, layer, (ids,) = both("Embed", policy=W8, mode=Mode.CONVERT)
    variables = plain.init(jax.random.key(0), ids)
    converted = jqx.linen.convert(layer, variables, ids)
    query = rows(3, 4)
    out = layer.apply(converted, query, method="attend")
    table = converted["qparams"]["embedding"]
    assert table.scale.shape == (7, 1)
    assert (out == jqx.matmul(query, table.T)).all()
    assert jnp.abs(out - plain.apply(variables, query, method="attend")).max() < 0.05


def test_a_mask_and_dropout_reach_attention():
    options = {"num_heads": 2, "dropout_rate": 0.5}
    plain = nn.MultiHeadDotProductAttention(**options)
    layer = jqx.linen.MultiHeadDotProductAttention(**options, policy=POLICY, mode=Mode.FLOAT)
    x = rows(2, 5, 8)
    variables = plain.init(jax.random.key(0), x, deterministic=True)
    given = {"mask": MASK, "deterministic": False, "rngs": {"dropout": jax.random.key(3)}}
    expected = plain.apply(variables, x, **given)
    assert (layer.apply(variables, x, **given) == expected).all()
    simulated = layer.clone(mode=Mode.SIMULATE).apply(variables, x, **given)
    assert 0 < jnp.abs(simulated - expected).max() < 0.05


def test_sown_intermediates_come_out():
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(3)(x)
            self.sow("intermediates", "hidden", x)
            return nn.Dense(2)(x)

    quantized = jqx.linen.quantize(Sows(), POLICY)
    variables = Sows().init(jax.random.key(0), rows(4, 6))
    _, kept = quantized.apply(
        {"params": variables["params"]}, rows(4, 6), mutable=["intermediates"]
    )
    assert kept["intermediates"]["hidden"][0].shape == (4, 3)
