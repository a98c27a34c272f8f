"""Modules of Equinox, as they are, against weights rounded by hand."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..arrays import filled, normal, on_device
from .sources import assert_quantized

X = normal(1, 4, 8)
TOKENS = on_device(np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.int32))


def made(kind, *args):
    """A module with random weights."""
    return filled(eqx.filter_eval_shape(kind, *args, key=jax.random.key(0)))


def mapped(module, x):
    return jax.vmap(module)(x)


@pytest.mark.slow
def test_equinox_modules_are_parameters_themselves():
    mlp = made(eqx.nn.MLP, 8, 4, 16, 2)
    axes = {f"layers/{i}/weight": (0,) for i in range(3)}
    plan = assert_quantized(mapped, axes, mlp, X, wrap=eqx.filter_jit)
    q = jqx.quantize_params(mlp, plan)
    assert isinstance(q, eqx.nn.MLP) and q.activation is mlp.activation


def test_equinox_functions_are_planned_with_their_own_jit():
    f, linear = eqx.filter_jit(mapped), made(eqx.nn.Linear, 8, 4)
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
    model = made(Decoder)
    axes = {"table/weight": (0,), "conv/weight": (0,)}
    # XLA sums 24 and then 8 products with codes in an order that depends on the processor.
    plan = assert_quantized(mapped, axes, model, TOKENS, wrap=eqx.filter_jit, roundings=32)
    assert [(site.path, site.op) for site in plan.sites] == [
        ("table/weight", "gather"),
        ("conv/weight", "conv_general_dilated"),
        ("table/weight", "dot_general"),
    ]


@pytest.mark.slow
def test_equinox_attention_is_mapped_over_a_batch():
    attention = made(eqx.nn.MultiheadAttention, 2, 8)
    axes = {f"{name}_proj/weight": (0,) for name in ("query", "key", "value", "output")}
    f = lambda m, x: jax.vmap(lambda x: m(x, x, x))(x)  # noqa: E731
    # So here: queries, keys, scores and outputs are sums of 8, and values of 5.
    x = normal(2, 3, 5, 8)
    plan = assert_quantized(f, axes, attention, x, wrap=eqx.filter_jit, roundings=37)
    assert len(plan.skipped) == 2


def test_a_training_step_hands_back_its_module_with_the_leaves_that_are_no_arrays():
    mlp = made(eqx.nn.MLP, 8, 1, 4, 1)

    def step(mlp, x):
        loss = lambda mlp: jnp.mean(jax.vmap(mlp)(x) ** 2)  # noqa: E731
        gradient = eqx.filter_grad(loss)(mlp)
        return eqx.apply_updates(mlp, gradient)

    policy = jqx.Policy([jqx.Rule(weight=jqx.QSpec(jnp.int8))])
    after = eqx.filter_jit(jqx.simulate(step, policy))(mlp, X)
    assert jax.tree.structure(after) == jax.tree.structure(mlp)
    assert after.activation is mlp.activation
