"""Whole models from outside: what a float model does beside its contractions, and ties."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.nnx import Mode, QParam

from ..arrays import normal

W8A16 = jqx.presets.w8a16()
TOLERANCE = 2.0**-16
"""Scales are applied before a float sum of 8 terms or behind it, up to four times in a row."""


def vectors(seed, *shape):
    return normal(seed, *shape)


class Noisy(nnx.Module):
    """Has running statistics, and noise of a stream of its own and of one that it is given."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.other = nnx.Dropout(0.5)

    def __call__(self, x, *, rngs):
        x = self.dropout(self.norm(self.linear(x)))
        return self.other(x, rngs=rngs)


def state_of(*nodes):
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        [nnx.state(node, nnx.Not(nnx.Any(QParam, jqx.nnx.Stat, jqx.nnx.Scale))) for node in nodes],
    )


@pytest.mark.parametrize("mode", [Mode.FLOAT, Mode.CALIBRATE])
def test_masks_and_running_statistics_are_those_of_the_float_model(mode):
    plain, own = Noisy(nnx.Rngs(0)), nnx.Rngs(1)
    model, its = jqx.nnx.quantize(plain, jqx.presets.w8a8(), mode=mode), nnx.Rngs(1)
    for seed in (1, 2):
        x = vectors(seed, 4, 8)
        assert (model(x, rngs=its) == plain(x, rngs=own)).all()
    assert its.default.count[...] == own.default.count[...] == 2
    a, b = state_of(plain, own), state_of(model, its)
    assert all((x == y).all() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("mode", [Mode.SIMULATE, Mode.CONVERT])
def test_streams_advance_in_every_mode(mode, jit):
    model, rngs = jqx.nnx.quantize(Noisy(nnx.Rngs(0)), W8A16), nnx.Rngs(1)
    x = vectors(1, 4, 8)
    before = model.norm.mean[...]
    if mode is Mode.CONVERT:
        jqx.nnx.convert(model, x, rngs=rngs)
        assert rngs.default.count[...] == 0
        assert model.dropout.rngs.count[...] == 0
        assert (model.norm.mean[...] == before).all()

    def call(model, x, rngs):
        return model(x, rngs=rngs)

    call = nnx.jit(call) if jit else call
    a, b = call(model, x, rngs), call(model, x, rngs)
    assert ((a == 0) != (b == 0)).any()
    assert rngs.default.count[...] == model.dropout.rngs.count[...] == 2
    assert (model.norm.mean[...] != before).any()


class Tied(nnx.Module):
    """A table that is looked up and multiplied by, and a layer that is two attributes."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(6, 8, rngs=rngs)
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.layers = nnx.data([self.first, nnx.Linear(8, 8, rngs=rngs)])
        self.layers[1].kernel = self.first.kernel

    def __call__(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.first(x))


def test_tied_weights_stay_tied():
    x = jnp.array([[1, 2, 5]])
    model = jqx.nnx.quantize(Tied(nnx.Rngs(0)), jqx.presets.w8a16(tables="int8"))
    assert model.layers[1].kernel is model.first.kernel
    paths = {site.path for site in jqx.nnx.make_plan(model, x).sites}
    assert paths == {"embed/embedding", "first/kernel"}
    expected = model(x)
    jqx.nnx.convert(model, x)
    assert model.layers[0] is model.first
    assert model.layers[1].kernel is model.first.kernel
    assert len(nnx.to_flat_state(nnx.state(model, QParam))) == 2
    assert jnp.allclose(model(x), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert set(nnx.state(model)["first"]) == set(nnx.state(Tied(nnx.Rngs(0)))["first"])


def test_the_model_given_is_not_touched():
    plain, x = Methods(nnx.Rngs(0)), vectors(1, 2, 8)
    before, expected = nnx.state(plain), plain(x)
    model = jqx.nnx.quantize(plain, W8A16)
    jqx.nnx.convert(model, x)
    assert type(plain) is Methods
    assert isinstance(model, Methods)
    assert jax.tree.structure(nnx.state(plain)) == jax.tree.structure(before)
    assert (plain(x) == expected).all()


class Methods(nnx.Module):
    """Methods of every kind."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.down = nnx.Linear(8, 8, rngs=rngs)
        self.calls = 0

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        return self.up(x)

    @nnx.jit
    def decode(self, x, *, scale: float = 1.0):
        return self.down(x) * scale

    def counted(self, x):
        self.calls += 1
        return self.up(x)

    def init_cache(self, size):
        self.cache = nnx.Cache(jnp.zeros(size))

    def cached(self, x):
        self.cache[...] += self.up(x)
        return self.cache[...]

    def rewritten(self, x):
        self.up.bias[...] += 1
        return self.up(x)


def test_every_method_is_quantized_and_converted_one_after_another():
    x, plain = vectors(1, 2, 8), Methods(nnx.Rngs(0))
    model = jqx.nnx.quantize(plain, W8A16)
    for name in ("__call__", "encode", "decode"):
        function = getattr(Methods, name)

        def pure(params, x, function=function):
            other = nnx.clone(plain)
            nnx.update(other, params)
            return function(other, x)

        params = nnx.to_pure_dict(nnx.state(plain))
        assert (getattr(model, name)(x) == jqx.simulate(pure, W8A16)(params, x)).all()
        assert (getattr(model, name)(x) != function(plain, x)).any()
    assert (model.decode(x, scale=2.0) == 2 * model.decode(x)).all()
    jqx.nnx.convert(model, x, method="encode")
    assert isinstance(model.up.kernel, QParam)
    assert isinstance(model.down.kernel, nnx.Param)
    jqx.nnx.convert(model, x)
    assert isinstance(model.down.kernel, QParam)


def test_variables_that_a_method_makes_or_writes_are_kept():
    x, plain = jnp.ones(8), Methods(nnx.Rngs(0))
    model = jqx.nnx.quantize(plain, W8A16)
    model.init_cache((8,))
    assert isinstance(model.cache, nnx.Cache)
    first = model.cached(x)
    assert jnp.allclose(model.cached(x), 2 * first)
    model.rewritten(x)
    assert (model.up.bias[...] == 1).all()
    assert (plain.up.bias[...] == 0).all()


def test_captured_values_are_those_of_the_float_model():
    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            x = self.linear(x)
            self.sow(nnx.Intermediate, "seen", x)
            return 2 * x

    model = jqx.nnx.quantize(Sowing(nnx.Rngs(0)), W8A16)
    out, seen = nnx.capture(model, nnx.Intermediate)(vectors(1, 2, 8))
    assert (out == 2 * seen["seen"][0]).all()


def test_attributes_that_a_method_sets_are_refused():
    model = jqx.nnx.quantize(Methods(nnx.Rngs(0)), W8A16)
    with pytest.raises(ValueError, match=r"(?s)`counted` sets attributes.*calls.*fix"):
        model.counted(jnp.ones(8))


def test_paths_of_rules_are_those_of_the_state():
    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    spec = jqx.QSpec(jnp.int8, jqx.per_channel())
    policy = jqx.Policy([jqx.Rule("blocks/1/kernel", weight=spec)])
    model = jqx.nnx.quantize(Deep(nnx.Rngs(0)), policy)
    jqx.nnx.convert(model, jnp.ones((1, 8)))
    assert isinstance(model.blocks[0].kernel, nnx.Param)
    assert isinstance(model.blocks[1].kernel, QParam)


def test_estimators_that_draw_take_a_stream():
    policy = jqx.presets.w8a16(weight={"gradient": jqx.gradients.stochastic})
    layer = jqx.nnx.Linear(8, 8, policy=policy, rngs=nnx.Rngs(params=0, quant=1))
    x = jnp.ones(8)
    assert (layer(x) != layer(x)).any()
    assert layer.quant_rng.count[...] == 2
    plain = nnx.Linear(8, 8, rngs=nnx.Rngs(params=0))
    assert (layer.kernel[...] == plain.kernel[...]).all()
    model = jqx.nnx.quantize(plain, policy, rngs=nnx.Rngs(quant=1))
    assert (nnx.jit(lambda model, x: model(x))(model, x) != model(x)).any()
    with pytest.raises(ValueError, match=r"(?s)draws random numbers.*no `rngs`.*fix"):
        jqx.nnx.quantize(plain, policy)


def test_parts_in_float_are_left_alone():
    rngs, x = nnx.Rngs(0), vectors(1, 2, 8)
    layers = [jqx.nnx.Linear(8, 8, policy=W8A16, rngs=rngs) for _ in range(2)]
    model = nnx.Sequential(*layers)
    layers[1].mode = Mode.FLOAT
    jqx.nnx.convert(model, x)
    assert isinstance(layers[0].kernel, QParam)
    assert isinstance(layers[1].kernel, nnx.Param)
    assert layers[1].mode is Mode.FLOAT
    assert (model(x) == nnx.Linear.__call__(layers[1], layers[0](x))).all()


@pytest.mark.parametrize("policy", [W8A16, jqx.presets.w4a16(block=4), jqx.presets.nf4(block=4)])
def test_a_converted_model_prints(policy):
    model = jqx.nnx.quantize(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), policy)
    jqx.nnx.convert(model, jnp.ones((1, 8)))
    assert f"value={model.kernel.get_value()!r}" in str(model)
    assert "QParam" in nnx.tabulate(model, jnp.ones((1, 8)))


def test_a_variable_may_hold_several_weights():
    class Dict(nnx.Module):
        def __init__(self):
            self.both = nnx.Param({"w": vectors(1, 8, 8), "b": jnp.ones(8)})

        def __call__(self, x):
            both = self.both.get_value()
            return x @ both["w"] + jnp.broadcast_to(both["b"], x.shape)

    model, x = jqx.nnx.quantize(Dict(), W8A16), vectors(2, 3, 8)
    assert [site.path for site in jqx.nnx.make_plan(model, x).sites] == ["both/w"]
    expected = model(x)
    jqx.nnx.convert(model, x)
    assert isinstance(model.both.get_value()["w"], jqx.QTensor)
    assert jnp.allclose(model(x), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_convert_lays_weights_out_for_a_target():
    policy, x = jqx.presets.w4a16(block=4), jnp.ones((2, 8))
    dot = jqx.nnx.DotGeneral(policy=policy)
    for make in (
        lambda: jqx.nnx.Linear(8, 6, policy=policy, rngs=nnx.Rngs(0)),
        lambda: nnx.Linear(
            8, 6, dot_general=dot, promote_dtype=jqx.nnx.promote_dtype, rngs=nnx.Rngs(0)
        ),
    ):
        plain, packed = make(), make()
        with pytest.raises(ValueError, match=r"jqx\.nnx\.convert: `target` is unknown"):
            jqx.nnx.convert(plain, x, target="cuda")
        jqx.nnx.convert(plain, x)
        jqx.nnx.convert(packed, x, target="cpu")
        expected = jqx.pack_for(plain.kernel.get_value(), "cpu")
        found = packed.kernel.get_value()
        assert found.layout == expected.layout != plain.kernel.get_value().layout
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        assert all((a == b).all() for a, b in pairs)
        packed(x)
