"""`pure` of both libraries: a module as a function of the tree of its values. Its batch
normalization, dropout and caches in the transforms, and how values get back into a model.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jqx
import jqx.linen
import jqx.nnx

from ..arrays import assert_same, normal, on_device
from ..linen import networks as of_linen
from ..nnx import networks as of_nnx

IMAGES, LABELS = normal(3, 16, 6, 6, 1), on_device(np.arange(16) % 4)
POLICY = jqx.presets.w8a8_dynamic(weight={"qtype": "int4"})
ROWS = normal(4, 2, 8)


class LinenNet(nn.Module):
    """A convolution with batch normalization and dropout, and a head."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(8, (3, 3), use_bias=False, name="conv")(x)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.8, name="norm")(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(4, name="out")(x.reshape(len(x), -1))


class NnxNet(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(288, 4, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(nnx.relu(self.norm(self.conv(x))))
        return self.out(x.reshape(len(x), -1))


def linen_net():
    """The functions of training and of evaluation, the values, and what puts written ones in."""
    module = LinenNet()
    variables = jax.jit(module.init)(jax.random.key(0), IMAGES)
    train, params = jqx.linen.pure(module, variables, mutable=["batch_stats"], train=True)
    return train, jqx.linen.pure(module, variables)[0], params, lambda a, b: {**a, **b}


def nnx_net():
    model = NnxNet(nnx.Rngs(params=0, dropout=1))
    train, params = jqx.nnx.pure(model, mutable=nnx.BatchStat)
    model.eval()
    return train, jqx.nnx.pure(model)[0], params, jqx.nnx.update


NETS = {"linen": linen_net, "nnx": nnx_net}


@pytest.mark.parametrize("library", NETS)
def test_a_network_with_batch_normalization_is_trained_and_converted(library):
    train, evaluate, params, update = NETS[library]()
    simulated, optimizer = jqx.simulate(train, POLICY), optax.sgd(0.05, momentum=0.9)

    def loss(params, key):
        logits, written = simulated(params, IMAGES, rngs={"dropout": key})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)
        return losses.mean(), written

    @jax.jit
    def step(params, state, key):
        (value, written), gradients = jax.value_and_grad(loss, has_aux=True)(params, key)
        updates, state = optimizer.update(gradients, state)
        return update(optax.apply_updates(params, updates), written), state, value

    trained, state, losses = params, optimizer.init(params), []
    for key in jax.random.split(jax.random.key(1), 25):
        trained, state, value = step(trained, state, key)
        losses.append(float(value))
    assert losses[-1] < losses[0] / 2
    assert jax.tree.structure(trained) == jax.tree.structure(params)
    plan = jqx.make_plan(evaluate, POLICY)(trained, IMAGES)
    assert len(plan.weights) == 2
    converted = jax.jit(jqx.convert(evaluate, plan))(jqx.quantize_params(trained, plan), IMAGES)
    # Four bits, from which a float sum may move a rounding of an activation in 8 bits.
    expected = jax.jit(jqx.simulate(evaluate, plan))(trained, IMAGES)
    assert float(jnp.linalg.norm(converted - expected) / jnp.linalg.norm(expected)) < 0.02


@pytest.mark.parametrize("library", NETS)
def test_dropout_is_that_of_the_key_of_the_call(library):
    train, evaluate, params, _ = NETS[library]()
    first, again, other = (
        train(params, IMAGES, rngs={"dropout": jax.random.key(seed)})[0] for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert_same(evaluate(params, IMAGES), evaluate(params, IMAGES))
    with pytest.raises(Exception, match=r"dropout"):
        train(params, IMAGES)


def test_a_function_of_linen_writes_what_apply_writes():
    train, _, params, _ = linen_net()
    options = {"mutable": ["batch_stats"], "rngs": {"dropout": jax.random.key(0)}}
    expected = LinenNet().apply(params, IMAGES, train=True, **options)
    assert_same(train(params, IMAGES, rngs=options["rngs"]), expected)


def test_a_function_of_nnx_writes_what_a_call_writes():
    model = NnxNet(nnx.Rngs(params=0, dropout=1))
    train, params = jqx.nnx.pure(model, mutable=True)
    nnx.reseed(model, dropout=jax.random.key(0))
    out, written = train(params, IMAGES, rngs={"dropout": jax.random.key(0)})
    assert list(written) == ["norm"] and sorted(written["norm"]) == ["mean", "var"]
    np.testing.assert_array_equal(out, model(IMAGES))
    assert_same(jqx.nnx.update(params, written), jqx.nnx.pure(model)[1])


TOKENS = normal(5, 1, 6, 16)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(2, decode=True, name="inner")(x)


def linen_attention():
    variables = jax.jit(Attention().init)(jax.random.key(0), TOKENS)
    f, params = jqx.linen.pure(Attention(), variables, mutable=["cache"])
    expected, state = [], dict(variables)
    for i in range(3):
        out, new = Attention().apply(state, TOKENS[:, i : i + 1], mutable=["cache"])
        state |= new
        expected.append(out)
    return f, params, lambda a, b: {**a, **b}, expected


def nnx_attention():
    model = nnx.MultiHeadAttention(2, 16, decode=True, rngs=nnx.Rngs(0))
    model.init_cache(TOKENS.shape)
    f, params = jqx.nnx.pure(model, mutable=nnx.Cache)
    return f, params, jqx.nnx.update, [model(TOKENS[:, i : i + 1]) for i in range(3)]


@pytest.mark.parametrize("make", [linen_attention, nnx_attention])
def test_a_cache_goes_from_call_to_call(make):
    f, params, update, expected = make()
    plan = jqx.make_plan(f, jqx.presets.w8a16())(params, TOKENS[:, :1])
    assert len(plan.weights) == 4
    converted, codes = jax.jit(jqx.convert(f, plan)), jqx.quantize_params(params, plan)
    f = jax.jit(f)
    for i in range(3):
        out, written = f(params, TOKENS[:, i : i + 1])
        params = update(params, written)
        np.testing.assert_allclose(out, expected[i], atol=1e-6)
        out, written = converted(codes, TOKENS[:, i : i + 1])
        codes = update(codes, written)
        np.testing.assert_allclose(out, expected[i], atol=0.05)


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_ptq_takes_the_function_and_its_values(library):
    options = {"target": False, "progress": False}
    nearest, images = jqx.algorithms.nearest(), of_linen.images()
    if library == "linen":
        module, variables = of_linen.Net(), of_linen.variables()
        f, params = jqx.linen.pure(module, variables)
        expected = jqx.linen.ptq(module, POLICY, nearest, **options)(variables, [images])
    else:
        model = of_nnx.Net(nnx.Rngs(0))
        f, params = jqx.nnx.pure(model)
        expected = jqx.nnx.ptq(model, POLICY, nearest, **options)([images])
    names = {"params": ""} if library == "linen" else None
    quantized = jqx.ptq(f, POLICY, nearest, names=names, **options)(params, [images])
    assert quantized.plan == expected.plan
    assert_same(quantized.params, expected.params)
    np.testing.assert_array_equal(quantized(images), expected(images))


def test_update_writes_codes_and_values_into_a_model():
    net, images = of_nnx.Net(nnx.Rngs(0)), of_linen.images()
    f, params = jqx.nnx.pure(net)
    options = {"target": False, "progress": False}
    quantized = jqx.ptq(f, POLICY, jqx.algorithms.nearest(), **options)(params, [images])
    model = jqx.nnx.quantize(of_nnx.Net(nnx.Rngs(1)), POLICY, mode=jqx.nnx.Mode.CONVERT)
    assert jqx.nnx.update(model, quantized.params) is model
    assert isinstance(model.out.kernel, jqx.nnx.QParam)
    np.testing.assert_array_equal(model(images), quantized(images))
    other = of_nnx.Net(nnx.Rngs(1))
    bias = normal(6, 3)
    jqx.nnx.update(other, {**params, "out": {"bias": bias}})
    assert_same(jqx.nnx.pure(other)[1]["conv"], params["conv"])
    assert isinstance(other.out.bias, nnx.Param) and (other.out.bias[...] == bias).all()


def test_update_writes_arrays_that_are_attributes():
    class Counting(nnx.Module):
        def __init__(self):
            self.held = nnx.data([jnp.zeros(2), {"x": nnx.Variable(jnp.zeros(2))}])

        def __call__(self, x):
            self.held[0] = self.held[0] + x
            self.held[1]["x"][...] += 2 * x
            return x

    model = Counting()
    f, params = jqx.nnx.pure(model, mutable=True)
    _, written = jax.jit(f)(params, jnp.ones(2))
    assert_same(written, {"held": {"0": jnp.ones(2), "1": {"x": jnp.full(2, 2.0)}}})
    assert (model.held[0] == 0).all()
    jqx.nnx.update(model, written)
    assert (model.held[0] == 1).all() and (model.held[1]["x"][...] == 2).all()


def test_a_state_with_gradients_is_what_an_optimizer_of_nnx_takes():
    model = NnxNet(nnx.Rngs(params=0, dropout=1))
    _, params = jqx.nnx.pure(model)
    gradients = jax.tree.map(jnp.ones_like, params)  # with those of running statistics
    state = jqx.nnx.update(nnx.state(model), gradients)
    assert isinstance(state, nnx.State) and isinstance(state["out"]["bias"], nnx.Param)
    nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param).update(model, state)
    expected = jax.tree.map(lambda x: x - 1, params)
    expected["norm"] |= {name: params["norm"][name] for name in ("mean", "var")}
    assert_same(jqx.nnx.pure(model)[1], expected)


def test_what_pure_and_update_refuse():
    module, net = of_linen.Net(), of_nnx.Net(nnx.Rngs(0))
    f, params = jqx.nnx.pure(net)
    mistakes = {
        "linen.pure: `module`": lambda: jqx.linen.pure(net, {}),
        "linen.pure: `variables`": lambda: jqx.linen.pure(module, [1]),
        "linen.pure: .*bound already": lambda: jqx.linen.pure(module.bind({}), {}),
        r"linen.pure: the call writes .*not mutable(.|\n)*train=False": lambda: jqx.linen.pure(
            LinenNet(), jax.eval_shape(LinenNet().init, jax.random.key(0), IMAGES), train=True
        )[0](LinenNet().init(jax.random.key(0), IMAGES), IMAGES),
        "nnx.pure: `model`": lambda: jqx.nnx.pure(module),
        "nnx.pure: .*quantized already": lambda: jqx.nnx.pure(jqx.nnx.quantize(net, POLICY)),
        "nnx.pure: the parameters have no value for 'conv/bias'": lambda: f(
            {**params, "conv": {}}, IMAGES
        ),
        "nnx.update: `model`": lambda: jqx.nnx.update(module, params),
        "nnx.update: `values`": lambda: jqx.nnx.update(net, nnx.state(net).items()),
        "nnx.update: the model has no variables at 'conv/b', 'mid/w'": lambda: jqx.nnx.update(
            net, {"conv": {"b": 1.0}, "mid": {"w": 1.0}}
        ),
        "nnx.update: the model has no variables at 'w'": lambda: jqx.nnx.update(
            nnx.state(net), {"w": 1.0}
        ),
    }
    for message, call in mistakes.items():
        with pytest.raises((TypeError, ValueError), match=rf"^jqx\.{message}"):
            call()
    training = NnxNet(nnx.Rngs(params=0, dropout=1))
    f, params = jqx.nnx.pure(training)
    match = r"(?s)'dropout/rngs/count' of the stream 'dropout', 'norm/mean'.*model\.eval.*mutable"
    with pytest.raises(ValueError, match=match):
        f(params, IMAGES)
