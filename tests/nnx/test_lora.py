"""Adapters over a base that may be quantized."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.nnx import Mode, QParam

from ..arrays import normal

DYNAMIC = jqx.presets.w8a8_dynamic()
ADAPTERS = nnx.DiffState(0, nnx.LoRAParam)
X = normal(1, 3, 8)


class Model(nnx.Module):
    """Two layers with adapters."""

    def __init__(self, policy, mode=Mode.SIMULATE):
        rngs = nnx.Rngs(0)
        options = {"rank": 2, "alpha": 4.0, "policy": policy, "mode": mode, "rngs": rngs}
        self.up = jqx.nnx.LoRALinear(8, 8, **options)
        self.down = jqx.nnx.LoRALinear(8, 4, **options)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def trained(policy, convert):
    """A model whose adapters are not zero."""
    model = Model(policy)
    if convert:
        jqx.nnx.convert(model, X)
    for seed, layer in enumerate((model.up, model.down)):
        layer.lora_b[...] = normal(seed, *layer.lora_b.shape)
    return model


def test_adapters_start_at_zero():
    plain = jqx.nnx.Linear(8, 4, policy=DYNAMIC, rngs=nnx.Rngs(0))
    layer = jqx.nnx.LoRALinear(8, 4, rank=2, policy=DYNAMIC, rngs=nnx.Rngs(0))
    assert (layer(X) == plain(X)).all()


@pytest.mark.parametrize("policy", [jqx.presets.w4a16(block=4), jqx.presets.w8a8_dynamic()])
def test_gradients_of_adapters_over_codes(policy):
    model = trained(policy, convert=True)
    assert isinstance(model.up.kernel, QParam)
    model.set_attributes(mode=Mode.SIMULATE)

    def gradients(model, x):
        return nnx.grad(lambda model, x: (model(x) ** 2).sum(), argnums=ADAPTERS)(model, x)

    grads = gradients(model, X)
    dense = nnx.clone(model)
    for layer in (dense.up, dense.down):
        layer.kernel = nnx.Param(layer.kernel.get_value().dequantize())
        layer.mode = Mode.FLOAT
    assert {path for path, _ in nnx.to_flat_state(grads)} == {
        (layer, name) for layer in ("up", "down") for name in ("lora_a", "lora_b")
    }
    assert all(bool((leaf != 0).any()) for leaf in jax.tree.leaves(grads))
    if not policy.rules[0].activation:
        expected = jax.tree.leaves(gradients(dense, X))
        assert all((x == y).all() for x, y in zip(jax.tree.leaves(grads), expected, strict=True))


@pytest.mark.parametrize("convert", [False, True])
def test_merging_equals_not_merging(convert):
    model = trained(jqx.presets.w4a16(block=4), convert)
    model.set_attributes(mode=Mode.FLOAT)
    merged = jqx.nnx.merge_lora(model)
    assert type(merged.up) is nnx.Linear
    assert set(nnx.state(merged)["up"]) == {"kernel", "bias"}
    assert isinstance(model.up, jqx.nnx.LoRALinear)
    # Sums of at most 8 products of both sides, rounded in other orders.
    error = jnp.abs(merged(X) - model(X)).max()
    assert error <= 2.0**-20 * jnp.abs(model(X)).max() * 8
    assert jqx.nnx.quantize(merged, DYNAMIC)(X).shape == (3, 4)
