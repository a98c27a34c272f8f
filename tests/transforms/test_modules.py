"""Modules of Flax linen, Flax nnx and Equinox, as they are, against weights rounded by hand."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jqx

from ..arrays import filled, normal, on_device
from .sources import assert_quantized

X = normal(1, 4, 8)
TOKENS = on_device(np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.int32))
NO_WEIGHT = "no weight reaches it"


class Language(nn.Module):
    """A lookup, a convolution, attention, a split layer and a head tied to the table."""

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(11, 8, name="table")
        h = nn.Conv(8, (3,), name="conv")(table(tokens))
        h = nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(nn.LayerNorm()(h))
        h = nn.DenseGeneral((2, 4), name="split")(h)
        h = nn.DenseGeneral(8, axis=(-2, -1), name="join")(h)
        return table.attend(h)


LANGUAGE = {
    "table/embedding": (0,),
    "conv/kernel": (2,),
    "attention/query/kernel": (1, 2),
    "attention/key/kernel": (1, 2),
    "attention/value/kernel": (1, 2),
    "attention/out/kernel": (2,),
    "split/kernel": (1, 2),
    "join/kernel": (2,),
}


def test_linen_modules_apply_as_they_are():
    model = Language()
    variables = filled(jax.eval_shape(model.init, jax.random.key(0), TOKENS))
    axes = {f"params/{path}": scaled_axes for path, scaled_axes in LANGUAGE.items()}
    plan = assert_quantized(
        lambda v, tokens: model.apply(v, tokens, mutable=False), axes, variables, TOKENS
    )
    assert [skip.path for skip in plan.skipped] == [
        "Language/attention/...qhd,...khd->...hqk",
        "Language/attention/...hqk,...khd->...qhd",
    ]
    assert all(skip.reason.startswith(NO_WEIGHT) for skip in plan.skipped)
    assert "one tensor for params/table/embedding (2 sites)" in str(plan)


@pytest.mark.slow
def test_linen_state_beside_the_parameters_is_returned_changed():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False)(nn.Dense(6)(x))

    model = Normed()
    variables = filled(jax.eval_shape(model.init, jax.random.key(0), X))
    f = lambda v, x: model.apply(v, x, mutable=["batch_stats"])  # noqa: E731
    assert_quantized(f, {"params/Dense_0/kernel": (1,)}, variables, X)


class Block(nn.Module):
    @nn.compact
    def __call__(self, carry, _):
        return carry + nn.Dense(8, name="dense")(nn.relu(carry)), None


REMAT = nn.remat(Block, prevent_cse=False)


@pytest.mark.parametrize("block", [Block, pytest.param(REMAT, marks=pytest.mark.slow)])
def test_linen_layers_stacked_by_scan_have_scales_of_their_own(block):
    stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    model = stack(name="layers")
    params = filled(jax.eval_shape(model.init, jax.random.key(0), X, None))
    f = lambda params, x: model.apply(params, x, None)[0]  # noqa: E731
    plan = assert_quantized(f, {"params/dense/kernel": (0, 2)}, params, X)
    assert len(plan.sites) == 1


class Network(nnx.Module):
    """The same in nnx, without the convolution."""

    def __init__(self, rngs):
        self.table = nnx.Embed(11, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)
        self.wide = nnx.Linear(8, 16, rngs=rngs)
        self.back = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, tokens):
        h = self.attention(self.table(tokens))
        return self.table.attend(self.back(nnx.relu(self.wide(h))))


NETWORK = {
    "table/embedding": (0,),
    "attention/query/kernel": (1, 2),
    "attention/key/kernel": (1, 2),
    "attention/value/kernel": (1, 2),
    "attention/out/kernel": (2,),
    "wide/kernel": (1,),
    "back/kernel": (1,),
}


def test_nnx_modules_are_merged_from_a_graph_closed_over():
    graph, shapes, others = nnx.split(nnx.eval_shape(lambda: Network(nnx.Rngs(0))), nnx.Param, ...)
    params = filled(shapes)
    f = lambda params, tokens: nnx.merge(graph, params, others)(tokens)  # noqa: E731
    plan = assert_quantized(f, NETWORK, params, TOKENS)
    assert len(plan.skipped) == 2
    q = jqx.quantize_params(params, plan)
    assert isinstance(q, nnx.State)
    assert isinstance(q["wide"]["kernel"][...], jqx.QTensor)


@pytest.mark.slow
def test_nnx_state_may_be_a_plain_dict_or_the_module_itself():
    model = Network(nnx.Rngs(0))
    graph, state = nnx.split(model)
    plain = nnx.to_pure_dict(state)
    assert_quantized(lambda p, tokens: nnx.merge(graph, p)(tokens), NETWORK, plain, TOKENS)
    assert_quantized(lambda model, tokens: model(tokens), NETWORK, model, TOKENS)


def random_module(kind, *args):
    """A module with random weights."""
    return filled(eqx.filter_eval_shape(kind, *args, key=jax.random.key(0)))


def over_rows(module, x):
    return jax.vmap(module)(x)


@pytest.mark.slow
def test_equinox_modules_are_parameters_themselves():
    mlp = random_module(eqx.nn.MLP, 8, 4, 16, 2)
    axes = {f"layers/{i}/weight": (0,) for i in range(3)}
    plan = assert_quantized(over_rows, axes, mlp, X, wrap=eqx.filter_jit)
    q = jqx.quantize_params(mlp, plan)
    assert isinstance(q, eqx.nn.MLP) and q.activation is mlp.activation


def test_equinox_functions_are_planned_with_their_own_jit():
    f, linear = eqx.filter_jit(over_rows), random_module(eqx.nn.Linear, 8, 4)
    assert_quantized(f, {"weight": (0,)}, linear, X, wrap=lambda f: f)


class Decoder(eqx.Module):
    """A table looked up by vmap and tied to the head, a convolution and a leaf that is no array."""

    table: eqx.nn.Embedding
    conv: eqx.nn.Conv1d
    norm: eqx.nn.LayerNorm
    activation: Callable
    name: str = eqx.field(static=True)

    def __init__(self, key):
        self.table = eqx.nn.Embedding(11, 8, key=key)
        self.conv = eqx.nn.Conv1d(8, 8, 3, padding=1, key=key)
        self.norm = eqx.nn.LayerNorm(8)
        self.activation = jax.nn.relu
        self.name = "decoder"

    def __call__(self, tokens):
        h = jax.vmap(self.norm)(jax.vmap(self.table)(tokens))
        return self.activation(self.conv(h.T).T) @ self.table.weight.T


def test_equinox_embeddings_are_lookups_under_vmap():
    model = random_module(Decoder)
    axes = {"table/weight": (0,), "conv/weight": (0,)}
    # XLA sums 24 and then 8 products with codes in an order that depends on the processor.
    plan = assert_quantized(over_rows, axes, model, TOKENS, wrap=eqx.filter_jit, roundings=32)
    assert [(site.path, site.op) for site in plan.sites] == [
        ("table/weight", "gather"),
        ("conv/weight", "conv_general_dilated"),
        ("table/weight", "dot_general"),
    ]


@pytest.mark.slow
def test_equinox_attention_is_mapped_over_a_batch():
    attention = random_module(eqx.nn.MultiheadAttention, 2, 8)
    axes = {f"{name}_proj/weight": (0,) for name in ("query", "key", "value", "output")}
    f = lambda m, x: jax.vmap(lambda x: m(x, x, x))(x)  # noqa: E731
    # So here: queries, keys, scores and outputs are sums of 8, and values of 5.
    x = normal(2, 3, 5, 8)
    plan = assert_quantized(f, axes, attention, x, wrap=eqx.filter_jit, roundings=37)
    assert len(plan.skipped) == 2


def test_a_training_step_hands_back_its_module_with_the_leaves_that_are_no_arrays():
    mlp = random_module(eqx.nn.MLP, 8, 1, 4, 1)

    def step(mlp, x):
        loss = lambda mlp: jnp.mean(jax.vmap(mlp)(x) ** 2)  # noqa: E731
        gradient = eqx.filter_grad(loss)(mlp)
        return eqx.apply_updates(mlp, gradient)

    policy = jqx.Policy([jqx.Rule(weight=jqx.QSpec(jnp.int8))])
    updated = eqx.filter_jit(jqx.simulate(step, policy))(mlp, X)
    assert jax.tree.structure(updated) == jax.tree.structure(mlp)
    assert updated.activation is mlp.activation
