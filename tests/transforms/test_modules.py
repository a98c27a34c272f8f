"""Modules of Flax linen and Flax nnx, as they are, against weights rounded by hand."""

import jax
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
    axes = {f"params/{path}": held for path, held in LANGUAGE.items()}
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
    graph, shapes, rest = nnx.split(nnx.eval_shape(lambda: Network(nnx.Rngs(0))), nnx.Param, ...)
    params = filled(shapes)
    f = lambda params, tokens: nnx.merge(graph, params, rest)(tokens)  # noqa: E731
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
