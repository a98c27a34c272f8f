"""Adapters: a sum of two products, trained alone, merged without loss."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jqx
import jqx.linen
from jqx._src.modules.quantized_function import overlay
from jqx.linen import Mode

from ..arrays import normal

NF4 = jqx.presets.nf4(block=8)
X = normal(1, 4, 16)


class Net(nn.Module):
    """Two layers with adapters."""

    mode: Mode

    @nn.compact
    def __call__(self, x):
        options = {"rank": 2, "alpha": 3.0, "policy": NF4, "mode": self.mode}
        x = jnp.tanh(jqx.linen.LoRADense(8, **options, name="one")(x))
        return jqx.linen.LoRADense(5, **options, name="two")(x)


class Merged(nn.Module):
    """The same without adapters."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(5, name="two")(jnp.tanh(nn.Dense(8, name="one")(x)))


def trained(converted):
    """Variables with adapters that are not zero, over floats or codes."""
    known = Net(Mode.FLOAT).init(jax.random.key(0), X)
    keys = iter(jax.random.split(jax.random.key(2), 4))
    lora = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape) / 4, known["lora"])
    known = {**known, "lora": lora}
    return jqx.linen.convert(Net(Mode.CONVERT), known, X) if converted else known


def test_adapters_start_at_nothing():
    known = Net(Mode.FLOAT).init(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, known["lora"]) == {
        "one": {"a": (16, 2), "b": (2, 8)},
        "two": {"a": (8, 2), "b": (2, 5)},
    }
    assert all((known["lora"][name]["b"] == 0).all() for name in ("one", "two"))
    assert all((known["lora"][name]["a"] != 0).all() for name in ("one", "two"))
    out = Net(Mode.FLOAT).apply(known, X)
    assert (out == Merged().apply({"params": known["params"]}, X)).all()


@pytest.mark.parametrize("mode", [Mode.FLOAT, Mode.SIMULATE, Mode.CONVERT])
@pytest.mark.parametrize("converted", [False, True])
def test_merged_equals_not_merged(mode, converted):
    """Within the rounding of float32: two sums of 16 products and one of the other order."""
    known = trained(converted)
    floats = known
    if mode is not Mode.FLOAT and not converted:
        known = jqx.linen.convert(Net(Mode.CONVERT), known, X)
    out = Net(mode).apply(known if mode is Mode.CONVERT else floats, X)
    merged = jqx.linen.merge_lora(known, alpha=3.0)
    assert set(merged) == {"params"}
    expected = Merged().apply(merged, X)
    assert jnp.abs(out - expected).max() <= 2.0**-18 * jnp.abs(expected).max()


def test_the_gradient_tree_holds_adapters_only():
    known = trained(converted=True)
    assert known["qparams"]["one"]["kernel"].values.dtype == jnp.uint8
    frozen = {name: tree for name, tree in known.items() if name != "lora"}

    def loss(lora):
        return (Net(Mode.SIMULATE).apply({**frozen, "lora": lora}, X) ** 2).sum()

    gradient = jax.jit(jax.grad(loss))(known["lora"])
    assert jax.tree.structure(gradient) == jax.tree.structure(known["lora"])
    weights = jqx.dequantize_params(overlay(known["params"], known["qparams"]))

    def expected(lora):
        return (Net(Mode.FLOAT).apply({"params": weights, "lora": lora}, X) ** 2).sum()

    close = jax.tree.map(
        lambda a, b: jnp.abs(a - b).max() <= 2.0**-16 * jnp.abs(b).max(),
        gradient,
        jax.grad(expected)(known["lora"]),
    )
    assert jax.tree.all(close)


def test_nothing_to_merge_is_an_error():
    known = Merged().init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="there are no adapters") as error:
        jqx.linen.merge_lora(known)
    assert "LoRADense" in str(error.value)
