"""Calls that fail leave a model as it was."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.nnx import Mode

POLICY = jqx.presets.w8a8_dynamic()
ONES = jnp.ones((1, 4))


def linear(policy=POLICY, **options):
    return jqx.nnx.Linear(4, 2, policy=policy, rngs=nnx.Rngs(0), **options)


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
