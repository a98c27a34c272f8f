"""Whole models from outside: what a float model does beside its contractions, ties, scales of
methods and of parts, and calls that fail.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.nnx import Mode, QParam

from ..arrays import normal
from .networks import POLICIES, WAYS

W8A16 = jqx.presets.w8a16()
TOLERANCE = 2.0**-16
"""Scales are applied before a float sum of 8 terms or behind it, up to four times in a row."""


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
        x = normal(seed, 4, 8)
        assert (model(x, rngs=its) == plain(x, rngs=own)).all()
    assert its.default.count[...] == own.default.count[...] == 2
    a, b = state_of(plain, own), state_of(model, its)
    assert all((x == y).all() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("mode", [Mode.SIMULATE, Mode.CONVERT])
def test_streams_advance_in_every_mode(mode, jit):
    model, rngs = jqx.nnx.quantize(Noisy(nnx.Rngs(0)), W8A16), nnx.Rngs(1)
    x = normal(1, 4, 8)
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
    plain, x = Methods(nnx.Rngs(0)), normal(1, 2, 8)
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
    x, plain = normal(1, 2, 8), Methods(nnx.Rngs(0))
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
    out, seen = nnx.capture(model, nnx.Intermediate)(normal(1, 2, 8))
    assert (out == 2 * seen["seen"][0]).all()


def test_attributes_that_a_method_sets_are_refused():
    model = jqx.nnx.quantize(Methods(nnx.Rngs(0)), W8A16)
    with pytest.raises(ValueError, match=r"(?s)`counted` sets attributes.*calls.*fix"):
        model.counted(jnp.ones(8))


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
    rngs, x = nnx.Rngs(0), normal(1, 2, 8)
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
            self.both = nnx.Param({"w": normal(1, 8, 8), "b": jnp.ones(8)})

        def __call__(self, x):
            both = self.both.get_value()
            return x @ both["w"] + jnp.broadcast_to(both["b"], x.shape)

    model, x = jqx.nnx.quantize(Dict(), W8A16), normal(2, 3, 8)
    assert [site.path for site in jqx.nnx.make_plan(model, x).sites] == ["both/w"]
    expected = model(x)
    jqx.nnx.convert(model, x)
    assert isinstance(model.both.get_value()["w"], jqx.QTensor)
    assert jnp.allclose(model(x), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_convert_lays_weights_out_for_a_target():
    policy, x = jqx.presets.w4a16(block=4), jnp.ones((2, 8))
    plain, packed = (jqx.nnx.Linear(8, 6, policy=policy, rngs=nnx.Rngs(0)) for _ in range(2))
    with pytest.raises(ValueError, match=r"jqx\.nnx\.convert: `target` is unknown"):
        jqx.nnx.convert(plain, x, target="cuda")
    jqx.nnx.convert(plain, x)
    jqx.nnx.convert(packed, x, target="cpu")
    expected = jqx.pack_for(plain.kernel.get_value(), "cpu")
    actual = packed.kernel.get_value()
    assert actual.layout == expected.layout != plain.kernel.get_value().layout
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    assert all((a == b).all() for a, b in pairs)
    packed(x)


W8A8 = POLICIES["w8a8"]


def test_methods_are_converted_one_after_another():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return self.second(self.first(x))

        def half(self, x):
            return self.first(x)

    x = jnp.linspace(-1, 1, 16).reshape(2, 8)
    one, two = (jqx.nnx.quantize(Two(nnx.Rngs(0)), W8A8, mode=Mode.CALIBRATE) for _ in range(2))
    for model in (one, two):
        model(x)
    jqx.nnx.convert(one, x)
    for name in ("half", "__call__"):
        jqx.nnx.convert(two, x, method=name)
    assert (one(x) == two(x)).all() and (one.half(x) == two.half(x)).all()
    assert not two.quant_stats.get_value()


def test_parts_take_dynamic_scales():
    model = WAYS["whole"](W8A8, Mode.SIMULATE, "dynamic")
    x, floats = jnp.linspace(-1, 1, 8)[None], WAYS["whole"](W8A8, Mode.FLOAT)
    assert (model.out(x) != floats.out(x)).any()
    model = WAYS["whole"](W8A8, Mode.SIMULATE)
    with pytest.raises(ValueError, match=r"(?s)Linear: `__call__` of a part.*without scales"):
        model.out(x)


def test_learned_scales_have_a_rate_of_their_own():
    def label(path, _):
        return "scales" if "learned_scales" in jax.tree_util.keystr(path) else "weights"

    def labels(params):
        return jax.tree.map_with_path(label, params)

    lsq = {"gradient": jqx.gradients.lsq}
    model = jqx.nnx.quantize(
        nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jqx.presets.w8a8(weight=lsq, activation=lsq)
    )
    x = jnp.linspace(-1, 1, 8).reshape(2, 4)
    jqx.nnx.learn_scales(model, x, scales="dynamic")
    rates = {"weights": optax.sgd(0.0, momentum=0.9), "scales": optax.sgd(1e-3, momentum=0.9)}
    optimizer = nnx.Optimizer(model, optax.multi_transform(rates, labels), wrt=nnx.Param)
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).sum())(model))

    for _ in range(2):
        step(model, optimizer)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), before, after)
    assert same["kernel"] and same["bias"]
    assert not any(jax.tree.leaves(same["learned_scales"]))


def test_negative_learned_scales_mirror_the_codes():
    lsq = {"qtype": "int4", "gradient": jqx.gradients.lsq}
    model = jqx.nnx.quantize(
        nnx.Linear(4, 2, rngs=nnx.Rngs(0)),
        jqx.presets.w8a8(weight=lsq, activation=lsq),
        backward=jnp.float32,
    )
    x = jnp.linspace(-1, 1, 8).reshape(2, 4)
    jqx.nnx.learn_scales(model, x, scales="dynamic")
    before = model(x)
    scales = model.learned_scales.get_value()
    model.learned_scales.set_value(jax.tree.map(lambda scale: -scale, scales))
    assert (model(x) == before).all()
    jqx.nnx.convert(model, x)
    assert (model(x) == before).all()


DYNAMIC = jqx.presets.w8a8_dynamic()
ONES = jnp.ones((1, 4))


def linear(policy=DYNAMIC, **options):
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
    ("mode", "policy"), [(Mode.SIMULATE, DYNAMIC), (Mode.CALIBRATE, jqx.presets.w8a8())]
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
