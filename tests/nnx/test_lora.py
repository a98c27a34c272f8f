"""Adapters of nnx over a base that may be quantized, and started from what LoftQ and EoRA find."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.algorithms import eora, loftq
from jqx.nnx import Mode, QParam

from ..arrays import normal
from ..oracles.refusals import assert_error

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


WEIGHTS = jqx.Policy({".*": "int2:channel"})
STATIC = jqx.presets.w8a8(weight={"qtype": "int4"})
ROWS = normal(1, 5, 16)


class Layered(nnx.Module):
    """Two layers, of which one may have a scale of its own, and a buffer."""

    def __init__(self, make, last=None):
        self.up = make(16, 24, rngs=nnx.Rngs(0))
        self.down = (last or make)(24, 2, rngs=nnx.Rngs(1))
        self.gain = nnx.BatchStat(jnp.ones((1, 24)))

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)) * self.gain[...])


def with_adapters(policy, last=None, **kwargs):
    options = {"rank": 4, "alpha": 2.0, "policy": policy, **kwargs}

    def make(*args, **kwargs):
        return jqx.nnx.LoRALinear(*args, **options, **kwargs)

    return Layered(make, last)


def quantized(policy, algorithm, **kwargs):
    model = Layered(nnx.Linear)
    model.gain.set_value(model.gain[...] * 2)
    model.up.bias.set_value(normal(3, 24))
    return model, jqx.nnx.ptq(model, policy, algorithm, progress=False, **kwargs)([ROWS])


@pytest.mark.many
@pytest.mark.parametrize("policy", [WEIGHTS, STATIC])
@pytest.mark.parametrize("algorithm", [loftq(rank=4), eora(rank=4)])
def test_the_model_starts_as_the_quantized_function(policy, algorithm):
    """But for rounding: of sums of 24 products and of 4, and of two factors."""
    model, own = quantized(policy, algorithm)
    trained = with_adapters(policy)
    jqx.nnx.init_lora(trained, own)
    assert trained.up.mode is Mode.SIMULATE and isinstance(trained.up.kernel, QParam)
    assert trained.down.lora_b.shape == (4, 2) and float(trained.gain[0, 0]) == 2
    expected = own(ROWS)
    for mode in (Mode.SIMULATE, Mode.CONVERT):
        trained.set_attributes(mode=mode)
        out = nnx.jit(lambda model, x: model(x))(trained, ROWS)
        assert jnp.abs(out - expected).max() <= 2.0**-18 * jnp.abs(expected).max()
    trained.set_attributes(mode=Mode.SIMULATE)
    exact, adapters = model(ROWS), nnx.DiffState(0, nnx.LoRAParam)
    error = jnp.square(exact - expected).mean()

    @nnx.jit
    def step(model):
        loss, gradient = nnx.value_and_grad(
            lambda model: jnp.square(model(ROWS) - exact).mean(), argnums=adapters
        )(model)
        nnx.update(
            model,
            jax.tree.map(lambda x, g: x - 0.003 * g, nnx.state(model, nnx.LoRAParam), gradient),
        )
        return loss, gradient

    losses, gradients = zip(*(step(trained) for _ in range(10)), strict=True)
    assert jnp.allclose(losses[0], error, rtol=1e-3) and losses[-1] < losses[0]
    up = gradients[0]["up"]
    assert all(bool((x != 0).any()) for x in jax.tree.leaves(up))
    for layer in (trained.up, trained.down):
        layer.lora_b.set_value(jnp.zeros_like(layer.lora_b[...]))
    assert error < 0.5 * jnp.square(exact - trained(ROWS)).mean()


def test_what_does_not_fit_is_refused():
    _, own = quantized(WEIGHTS, loftq(rank=4))
    _, none = quantized(WEIGHTS, None)
    other = jqx.Policy({"up/.*": "int2:channel"})
    _, first = quantized(other, loftq(rank=4))

    def wide(count, _, rngs):
        return nnx.Linear(count, 3, rngs=rngs)

    for model, given, facts in (
        (Layered(nnx.Linear), own, "no weights with adapters|LoRALinear"),
        (with_adapters(WEIGHTS, rank=3), own, "another rank|product of rank 4|rank=4"),
        (with_adapters(WEIGHTS), none, "no compensation|'down/kernel'|loftq"),
        (with_adapters(WEIGHTS), first, "no compensation|'down/kernel'"),
        (with_adapters(WEIGHTS, nnx.Linear), own, "have no adapters|'down/kernel'"),
        (
            with_adapters(WEIGHTS, wide),
            first,
            "have the parameters|'down/bias' of shape (2,)|(3,)",
        ),
    ):
        before = nnx.graphdef(model)
        start = functools.partial(jqx.nnx.init_lora, model, given)
        assert_error(start, "jqx.nnx.init_lora: ", *facts.split("|"))
        assert nnx.graphdef(model) == before
    kept = with_adapters(WEIGHTS, nnx.Linear)
    jqx.nnx.init_lora(kept, first)
    assert jnp.allclose(kept(ROWS), first(ROWS), rtol=1e-4, atol=1e-4)
    for args, name in (((own, own), "model"), ((kept, own.params), "quantized")):
        with pytest.raises(TypeError, match=rf"(?s)nnx\.init_lora: `{name}`.*fix:"):
            jqx.nnx.init_lora(*args)
