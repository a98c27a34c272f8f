"""Each layer beside Flax's: the same in float, and on integers what the transforms give."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.nnx import Mode, QParam

from ..arrays import normal
from .networks import images

POLICY = jqx.presets.w8a8_dynamic(tables="int8")
LAYERS = {
    "Linear": ((4, 3), {}, (normal(1, 2, 4),)),
    "Linear without bias, in bfloat16": (
        (4, 3),
        {"use_bias": False, "dtype": jnp.bfloat16},
        (normal(1, 2, 4),),
    ),
    "LinearGeneral": (((4, 2), (3, 5)), {"axis": (-2, -1)}, (normal(1, 2, 4, 2),)),
    "LinearGeneral with a batch axis": (
        (4, 3),
        {"batch_axis": {0: 2}},
        (normal(1, 2, 4),),
    ),
    "Einsum": (("bd,dhk->bhk", (4, 2, 3), (2, 3)), {}, (normal(1, 5, 4),)),
    "Conv": ((2, 4, (3, 3)), {"strides": 2, "padding": "VALID"}, (images(),)),
    "Conv, causal": ((2, 4, 3), {"padding": "CAUSAL"}, (normal(1, 2, 6, 2),)),
    "Conv, circular, in groups, dilated": (
        (2, 4, (3, 3)),
        {"padding": "CIRCULAR", "feature_group_count": 2, "kernel_dilation": 2},
        (images(),),
    ),
    "ConvTranspose": ((2, 4, (3, 3)), {"strides": (2, 2)}, (images(),)),
    "ConvTranspose, transposed": (
        (2, 4, (3, 3)),
        {"transpose_kernel": True, "padding": "CIRCULAR"},
        (images(),),
    ),
    "Embed": ((5, 4), {}, (jnp.array([[1, 2], [4, 0]]),)),
    "MultiHeadAttention": ((2, 8), {"decode": False}, (normal(1, 2, 5, 8),)),
    "MultiHeadAttention with groups of queries": (
        (4, 8),
        {"decode": False, "num_kv_heads": 2, "normalize_qk": True},
        (normal(1, 2, 5, 8), normal(2, 2, 6, 8)),
    ),
}
QUICK = ("Linear", "LinearGeneral", "Einsum", "Conv", "ConvTranspose", "Embed")


def pair(title, mode):
    """A layer of Flax, and the quantized one of the same weights."""
    args, options, inputs = LAYERS[title]
    name = title.split(",")[0].split(" ")[0]
    plain = getattr(nnx, name)(*args, **options, rngs=nnx.Rngs(0))
    kind = getattr(jqx.nnx, name)
    return plain, kind(*args, **options, policy=POLICY, mode=mode, rngs=nnx.Rngs(0)), inputs


def params_of(layer):
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


def function_of(layer):
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

    def function(values, *inputs):
        nnx.replace_by_pure_dict(params, values)
        return nnx.merge(graphdef, params, rest)(*inputs)

    return function


@pytest.mark.many
@pytest.mark.parametrize("title", LAYERS)
def test_a_layer_in_float_is_that_of_flax(title):
    plain, layer, inputs = pair(title, Mode.FLOAT)
    a, b = params_of(plain), params_of(layer)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert all((x == y).all() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))
    out = layer(*inputs)
    assert out.dtype == plain(*inputs).dtype
    assert (out == plain(*inputs)).all()


@pytest.mark.parametrize(
    "title",
    [pytest.param(t, marks=[pytest.mark.slow] if t not in QUICK else []) for t in LAYERS],
)
def test_a_layer_on_integers_is_the_transform_of_that_of_flax(title):
    plain, layer, inputs = pair(title, Mode.SIMULATE)
    function, params = function_of(plain), params_of(plain)
    plan = jqx.make_plan(function, POLICY)(params, *inputs)
    assert plan.weights
    assert jqx.nnx.make_plan(layer, *inputs).to_dict() == plan.to_dict()
    expected = jqx.simulate(function, plan, "dynamic")(params, *inputs)
    assert (layer(*inputs) == expected).all()
    codes = jqx.quantize_params(params, plan)
    jqx.nnx.convert(layer, *inputs)
    actual = nnx.to_flat_state(nnx.state(layer, QParam))
    assert ["/".join(path) for path, _ in actual] == sorted(w.path for w in plan.weights)
    assert (layer(*inputs) == jqx.convert(function, plan, "dynamic")(codes, *inputs)).all()
    layer.set_attributes(mode=Mode.FLOAT)
    assert (layer(*inputs) == function(jqx.dequantize_params(codes), *inputs)).all()


def test_attend_uses_the_codes_of_the_lookup():
    layer = jqx.nnx.Embed(5, 4, policy=jqx.presets.w8a16(tables="int8"), rngs=nnx.Rngs(0))
    rows = jnp.array([1, 3])
    jqx.nnx.convert(layer, rows)
    table, query = layer.embedding.get_value(), normal(1, 2, 4)
    assert (layer(rows) == jqx.take(table, rows, axis=0)).all()
    assert (layer.attend(query) == jqx.matmul(query, table.T)).all()
    assert (layer(rows) == table.dequantize()[rows]).all()


def test_decoding_writes_the_cache_as_the_float_layer_does():
    plain, layer, _ = pair("MultiHeadAttention", Mode.CALIBRATE)
    for module in (plain, layer):
        module.decode = True
        module.init_cache((2, 3, 8))
    for seed in (1, 2, 3):
        token = normal(seed, 2, 1, 8)
        assert (layer(token) == plain(token)).all()
        assert layer.cache_index[...] == seed
        assert (layer.cached_key[...] == plain.cached_key[...]).all()
    jqx.nnx.convert(layer, token)
    assert layer.cache_index[...] == 3
