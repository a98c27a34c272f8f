"""Modules that write collections, in calls and in conversions; and which collections may be
written does not say what a call computes.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jqx
import jqx.linen
from jqx.linen import Mode

from ..arrays import normal
from .networks import POLICIES, WAYS, images, variables

X = normal(1, 2, 1, 8)
W8A8 = jqx.presets.w8a8(weight={"gradient": jqx.gradients.lsq})


class Decoder(nn.Module):
    """Attention with a cache, of the layer that is given."""

    attention: object = nn.MultiHeadAttention

    @nn.compact
    def __call__(self, x):
        return self.attention(num_heads=2, decode=True, name="attention")(x)


class Norm(nn.Module):
    """Running statistics, and a sown value."""

    dense: object = nn.Dense

    @nn.compact
    def __call__(self, x):
        x = self.dense(8, name="dense")(nn.BatchNorm(use_running_average=False)(x))
        self.sow("intermediates", "hidden", x)
        return x


class Counter(nn.Module):
    """A variable that is boxed, and a method that writes it."""

    def setup(self):
        box = nn.with_partitioning(jnp.zeros, ("rows",))
        self.count = self.variable("state", "count", box, (2,))
        self.dense = nn.Dense(8)

    def __call__(self, x):
        self.count.value += 1
        return self.dense(x)


def layer(name, **options):
    return lambda *args, **kwargs: getattr(jqx.linen, name)(*args, **kwargs, **options)


def whole(kind, mode):
    return jqx.linen.quantize(kind(), W8A8, mode=mode)


def of_layers(kind, mode):
    name = "MultiHeadAttention" if kind is Decoder else "Dense"
    return kind(layer(name, policy=W8A8, mode=mode))


CASES = [(make, kind) for make in (whole, of_layers) for kind in (Decoder, Norm)]
CASES += [(whole, Counter)]


@pytest.mark.many
@pytest.mark.parametrize(("make", "kind"), CASES)
def test_modules_that_write_collections(make, kind):
    plain = kind()
    known = jax.jit(plain.init)(jax.random.key(0), jnp.ones((2, 4, 8)))
    known.pop("intermediates", None)
    other = [name for name in known if name != "params"]

    out, stats = make(kind, Mode.CALIBRATE).apply(known, X, mutable=["quant_stats", *other])
    expected, want = plain.apply(known, X, mutable=other)
    assert (out == expected).all()
    stats, new = {"quant_stats": stats.pop("quant_stats")}, stats
    assert jax.tree.structure(new) == jax.tree.structure(want)
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (new, want)), strict=True))
    known |= stats

    module = make(kind, Mode.SIMULATE)
    fixed = jqx.linen.fix_scales(module, known, X)
    assert set(fixed) == {"params", "quant_scales", *other}
    assert set(jqx.linen.learn_scales(module, known, X)) == {"params", *other}
    small = jqx.linen.convert(make(kind, Mode.CONVERT), known, X)
    assert set(small) >= {"qparams", "quant_scales", *other}
    for found in (fixed, small):
        before, after = (jax.tree.leaves([v[name] for name in other]) for v in (known, found))
        assert all(a is b for a, b in zip(before, after, strict=True))
    simulated, one = module.apply(fixed, X, mutable=other)
    converted, two = make(kind, Mode.CONVERT).apply(small, X, mutable=other)
    assert jnp.abs(simulated - converted).max() <= 2.0**-18 * jnp.abs(converted).max()
    for written in (one, two):
        assert jax.tree.structure(written) == jax.tree.structure(want)
    if make is whole:
        assert jqx.linen.make_plan(module, known, X).weights


@pytest.mark.many
@pytest.mark.parametrize("mutable", [True, ["quant_scales", "learned_scales", "qparams"]])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_mutable_does_not_say_what_is_computed(way, mutable):
    policy = POLICIES["w8a8"]
    observe, module, integers = (
        WAYS[way](policy, mode) for mode in (Mode.CALIBRATE, Mode.SIMULATE, Mode.CONVERT)
    )
    known = {**variables(), **observe.apply(variables(), images(), mutable=["quant_stats"])[1]}
    out, new = module.apply(known, images(2), mutable=mutable)
    assert (out == module.apply(known, images(2))).all()
    assert set(new) <= set(known)
    small = jqx.linen.convert(integers, known, images())
    out, new = integers.apply(small, images(2), mutable=mutable)
    assert (out == integers.apply(small, images(2))).all()
    assert set(new) <= set(small)
    assert all(
        a is b or (a == b).all()
        for name in new
        for a, b in zip(*map(jax.tree.leaves, (new[name], small[name])), strict=True)
    )


def test_conversions_under_jit_do_not_share_a_program_with_calls():
    class Jitted(nn.Module):
        mode: Mode

        @nn.compact
        def __call__(self, x):
            dense = nn.jit(jqx.linen.Dense)
            return dense(8, policy=W8A8, mode=self.mode, name="dense")(x)

    module = Jitted(Mode.SIMULATE)
    known = module.init(jax.random.key(0), X)
    known |= Jitted(Mode.CALIBRATE).apply(known, X, mutable=["quant_stats"])[1]
    for _ in range(2):
        out, _ = module.apply(known, X, mutable=True)
        assert "quant_scales" in jqx.linen.fix_scales(module, known, X)
        learned = jqx.linen.learn_scales(module, known, X)
        assert "kernel:weight" in learned["params"]["dense"]
        assert "qparams" in jqx.linen.convert(Jitted(Mode.CONVERT), known, X)
        again, new = module.apply(known, X, mutable=True)
        assert (again == out).all() and "quant_scales" not in new
