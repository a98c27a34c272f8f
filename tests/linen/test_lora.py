"""Adapters of linen: a sum of two products, trained alone, merged without loss, and started from
what LoftQ and EoRA find.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jqx
import jqx.linen
from jqx._src.modules.quantized_function import overlay
from jqx.algorithms import chain, eora, loftq, rotate
from jqx.linen import Mode

from ..arrays import normal
from ..oracles.refusals import assert_error

NF4 = jqx.presets.nf4(block=8)
X = normal(1, 4, 16)


class Adapted(nn.Module):
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
    known = Adapted(Mode.FLOAT).init(jax.random.key(0), X)
    keys = iter(jax.random.split(jax.random.key(2), 4))
    lora = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape) / 4, known["lora"])
    known = {**known, "lora": lora}
    return jqx.linen.convert(Adapted(Mode.CONVERT), known, X) if converted else known


def test_adapters_start_at_nothing():
    known = Adapted(Mode.FLOAT).init(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, known["lora"]) == {
        "one": {"a": (16, 2), "b": (2, 8)},
        "two": {"a": (8, 2), "b": (2, 5)},
    }
    assert all((known["lora"][name]["b"] == 0).all() for name in ("one", "two"))
    assert all((known["lora"][name]["a"] != 0).all() for name in ("one", "two"))
    out = Adapted(Mode.FLOAT).apply(known, X)
    assert (out == Merged().apply({"params": known["params"]}, X)).all()


@pytest.mark.parametrize("mode", [Mode.FLOAT, Mode.SIMULATE, Mode.CONVERT])
@pytest.mark.parametrize("converted", [False, True])
def test_merged_equals_not_merged(mode, converted):
    """Within the rounding of float32: two sums of 16 products and one of the other order."""
    known = trained(converted)
    floats = known
    if mode is not Mode.FLOAT and not converted:
        known = jqx.linen.convert(Adapted(Mode.CONVERT), known, X)
    out = Adapted(mode).apply(known if mode is Mode.CONVERT else floats, X)
    merged = jqx.linen.merge_lora(known, alpha=3.0)
    assert set(merged) == {"params"}
    expected = Merged().apply(merged, X)
    assert jnp.abs(out - expected).max() <= 2.0**-18 * jnp.abs(expected).max()


def test_the_gradient_tree_holds_adapters_only():
    known = trained(converted=True)
    assert known["qparams"]["one"]["kernel"].values.dtype == jnp.uint8
    frozen = {name: tree for name, tree in known.items() if name != "lora"}

    def loss(lora):
        return (Adapted(Mode.SIMULATE).apply({**frozen, "lora": lora}, X) ** 2).sum()

    gradient = jax.jit(jax.grad(loss))(known["lora"])
    assert jax.tree.structure(gradient) == jax.tree.structure(known["lora"])
    weights = jqx.dequantize_params(overlay(known["params"], known["qparams"]))

    def expected(lora):
        return (Adapted(Mode.FLOAT).apply({"params": weights, "lora": lora}, X) ** 2).sum()

    close = jax.tree.map(
        lambda a, b: jnp.abs(a - b).max() <= 2.0**-16 * jnp.abs(b).max(),
        gradient,
        jax.grad(expected)(known["lora"]),
    )
    assert jax.tree.all(close)


def test_nothing_to_merge_is_an_error():
    known = Merged().init(jax.random.key(0), X)
    assert_error(lambda: jqx.linen.merge_lora(known), "there are no adapters", "LoRADense")


WEIGHTS = jqx.Policy({".*": "int2:channel"})
STATIC = jqx.presets.w8a8(weight={"qtype": "int4"})


class Layer(nn.Module):
    """A step of a scan."""

    dense: type

    @nn.compact
    def __call__(self, x, _):
        return x + jnp.tanh(self.dense(16, name="own")(x)), None


class Net(nn.Module):
    """Layers in a scan, a layer of fewer outputs than the rank, and a parameter of its own."""

    dense: type = nn.Dense

    @nn.compact
    def __call__(self, x, *, narrow=True):
        axes = {"params": 0, "qparams": 0, "lora": 0, "quant_scales": 0}
        scan = nn.scan(Layer, axes, split_rngs={"params": True}, length=2)
        x, _ = scan(self.dense, name="layers")(x, None)
        x = x * self.param("gain", nn.initializers.ones, (1, 16))
        return self.dense(2, name="last")(x) if narrow else x


def with_adapters(policy, mode=Mode.SIMULATE, rank=4, alpha=-3.0):
    return Net(
        functools.partial(jqx.linen.LoRADense, rank=rank, alpha=alpha, policy=policy, mode=mode)
    )


def variables(dtype=jnp.float32):
    known = Net().init(jax.random.key(0), X)
    known["params"]["gain"] = known["params"]["gain"].at[0, 0].set(2)
    return jax.tree.map(lambda x: x.astype(dtype), known)


def quantized(policy, algorithm, net=None, **kwargs):
    quantize = jqx.linen.ptq(net or Net(), policy, algorithm, progress=False, **kwargs)
    return quantize(variables(), [X])


@pytest.mark.many
@pytest.mark.parametrize("policy", [WEIGHTS, STATIC])
@pytest.mark.parametrize("algorithm", [loftq(rank=4), eora(rank=4)])
def test_the_module_starts_as_the_quantized_function(policy, algorithm):
    """But for rounding: of sums of 16 products and of 4, and of two factors."""
    quantized_model = quantized(policy, algorithm)
    known = jqx.linen.init_lora(with_adapters(policy), quantized_model, X)
    names = ["lora", "params", "qparams"] + ["quant_scales"] * (policy is STATIC)
    assert sorted(known) == sorted(names)
    assert float(known["params"]["gain"][0, 0]) == 2
    assert jax.tree.map(jnp.shape, known["lora"]) == {
        "layers": {"own": {"a": (2, 16, 4), "b": (2, 4, 16)}},
        "last": {"a": (16, 4), "b": (4, 2)},
    }
    expected = quantized_model(X)
    for mode in (Mode.SIMULATE, Mode.CONVERT):
        out = jax.jit(with_adapters(policy, mode).apply)(known, X)
        assert jnp.abs(out - expected).max() <= 2.0**-18 * jnp.abs(expected).max()
    exact = Net().apply(variables(), X)
    zeros = jqx.linen.convert(
        with_adapters(policy, Mode.CONVERT),
        {**variables(), "lora": jax.tree.map(jnp.zeros_like, known["lora"])},
        X,
        scales="dynamic",
    )
    plain = with_adapters(policy).apply(zeros, X)
    assert jnp.square(exact - expected).sum() < 0.5 * jnp.square(exact - plain).sum()


def test_training_goes_on():
    quantized_model = quantized(WEIGHTS, loftq(rank=1))
    known = jqx.linen.init_lora(with_adapters(WEIGHTS, rank=1), quantized_model, X)
    frozen = {name: tree for name, tree in known.items() if name != "lora"}
    exact = Net().apply(variables(), X)

    @jax.jit
    def loss(lora):
        out = with_adapters(WEIGHTS, rank=1).apply({**frozen, "lora": lora}, X)
        return jnp.square(out - exact).mean()

    step = jax.jit(jax.value_and_grad(loss))
    lora, losses = known["lora"], []
    for _ in range(20):
        value, gradient = step(lora)
        losses.append(float(value))
        lora = jax.tree.map(lambda x, g: x - 0.02 * g, lora, gradient)
    assert all(bool((x != 0).all()) for x in jax.tree.leaves(gradient))
    assert losses[-1] < 0.5 * losses[0]


def test_types_of_adapters_and_abstract_inputs():
    module = jqx.linen.LoRADense(
        8, rank=2, policy=WEIGHTS, param_dtype=jnp.bfloat16, use_bias=False
    )
    plain = nn.Dense(8, param_dtype=jnp.bfloat16, use_bias=False)
    quantize = jqx.linen.ptq(plain, WEIGHTS, loftq(rank=2), progress=False)
    x = X.astype(jnp.bfloat16)
    quantized_model = quantize(plain.init(jax.random.key(0), x), [x])
    known = jqx.linen.init_lora(module, quantized_model, jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert sorted(known) == ["lora", "qparams"]
    assert known["lora"]["a"].dtype == known["lora"]["b"].dtype == jnp.bfloat16


def test_what_does_not_fit_is_refused():
    loft = loftq(rank=4)
    quantized_model = quantized(WEIGHTS, loft)
    other = jqx.Policy({"last/.*": "int2:channel"})
    half = functools.partial(jqx.linen.Dense, policy=WEIGHTS)

    class Mixed(nn.Module):
        dense: type
        last: type
        shape: tuple[int, ...] = (1, 16)

        @nn.compact
        def __call__(self, x):
            x, _ = Layer(self.dense, name="layers")(x, None)
            x = x * self.param("gain", nn.initializers.ones, self.shape)
            return self.last(2, name="last")(x)

    lora = functools.partial(jqx.linen.LoRADense, rank=4, policy=WEIGHTS)
    plain = Mixed(nn.Dense, nn.Dense)
    unscanned = jqx.linen.ptq(plain, WEIGHTS, loft, progress=False)(
        plain.init(jax.random.key(0), X), [X]
    )
    maps = {key: x for key, x in unscanned.maps.items() if key.startswith("layers/")}
    first = dataclasses.replace(unscanned, maps=maps)
    for module, given, facts in (
        (Net(), quantized_model, "no weights with adapters|LoRADense"),
        (with_adapters(WEIGHTS, rank=3), quantized_model, "another rank|product of rank 4|rank=4"),
        (with_adapters(WEIGHTS, rank=8), quantized_model, "another rank|product of rank 4"),
        (with_adapters(WEIGHTS, alpha=0.0), quantized_model, "add nothing|alpha == 0"),
        (with_adapters(WEIGHTS), quantized(WEIGHTS, None), "no compensation|'last/kernel'|loftq"),
        (with_adapters(WEIGHTS), quantized(other, loft), "no compensation|'layers/own/kernel'"),
        (with_adapters(WEIGHTS), quantized(WEIGHTS, chain(rotate(), loft)), "hold|ChannelMap"),
        (with_adapters(WEIGHTS), unscanned, "do not fit its compensation|(16, 4)|(2, 16, 4)"),
        (Mixed(lora, half), unscanned, "have no adapters|'last/kernel'"),
        (Mixed(lora, lora), first, "no compensation|'last/kernel'"),
        (Mixed(lora, nn.Dense), first, "not in a layer that takes codes|'last/kernel'"),
        (
            Mixed(lora, half, (1, 1)),
            first,
            "not have the parameters|'gain' of shape (1, 16)|(1, 1)",
        ),
    ):
        start = functools.partial(jqx.linen.init_lora, module, given, X)
        assert_error(start, "jqx.linen.init_lora: ", *facts.split("|"))
    jqx.linen.init_lora(Mixed(lora, half), first, X)
    with pytest.raises(TypeError, match=r"(?s)linen\.init_lora: `quantized`.*fix:"):
        jqx.linen.init_lora(with_adapters(WEIGHTS), quantized_model.params, X)
    with pytest.raises(TypeError, match=r"(?s)linen\.init_lora: `module`.*fix:"):
        jqx.linen.init_lora(quantized_model, quantized_model, X)
