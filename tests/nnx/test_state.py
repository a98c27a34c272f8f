"""The state of a quantized model: arrays beside its variables, files, and checkpoints of Orbax."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jqx
import jqx.nnx

from ..arrays import normal, on_device
from ..oracles.refusals import assert_error

ONES = on_device(np.linspace(0.5, 1.5, 8), jnp.float32)
X = normal(0, 4, 16)
HELD = {
    "an array": (lambda: ONES, lambda t: t),
    "a NumPy array": (lambda: np.asarray(ONES), lambda t: t),
    "data": (lambda: nnx.data(ONES), lambda t: t),
    "a list as data": (lambda: nnx.data([ONES, {"x": ONES}]), lambda t: t[0] * t[1]["x"]),
    "nnx.List": (lambda: nnx.List([ONES, np.asarray(ONES)]), lambda t: t[0] * t[1]),
    "nnx.Dict": (lambda: nnx.Dict(x=ONES), lambda t: t["x"]),
    "static numbers": (lambda: nnx.static((1.0, 2.0)), lambda t: t[1]),
    "variables beside arrays": (
        lambda: nnx.data({"p": nnx.Param(ONES), "q": ONES}),
        lambda t: t["p"][...] * t["q"],
    ),
    "a number": (lambda: on_device(2.0, jnp.float32), lambda t: t),
    "a variable of a number": (lambda: nnx.Variable(on_device(2.0, jnp.float32)), lambda t: t[...]),
    "integers": (lambda: on_device(np.arange(8)), lambda t: ONES[t]),
    "a key": (lambda: nnx.data(jax.random.key(0)), lambda t: jax.random.uniform(t, (8,))),
}


class Model(nnx.Module):
    def __init__(self, held, read, rngs):
        self.inner = nnx.Linear(16, 16, rngs=rngs)
        self.twice = self.inner
        self.out = nnx.Linear(16, 8, rngs=rngs)
        self.held, self.read = held, read

    def __call__(self, x):
        return self.out(jnp.tanh(self.twice(self.inner(x)))) * jnp.broadcast_to(
            self.read(self.held), (len(x), 8)
        )


def assert_near(y, real):
    assert float(jnp.linalg.norm(y - real) / jnp.linalg.norm(real)) < 0.05


@pytest.mark.many
@pytest.mark.parametrize("name", HELD)
def test_ptq_and_files_take_a_model_with(name, tmp_path):
    make, read = HELD[name]
    model, path = Model(make(), read, nnx.Rngs(0)), str(tmp_path / "model.safetensors")
    policy = jqx.presets.w8a16()
    quantized = jqx.nnx.ptq(model, policy, progress=False, target=False)([X])
    y = jax.jit(quantized.function)(quantized.params, X)
    assert_near(y, model(X))
    jqx.save(path, quantized)
    bound = jqx.nnx.bind(jqx.load(path), Model(make(), read, nnx.Rngs(1)), target=False)
    np.testing.assert_array_equal(jax.jit(bound.function)(bound.params, X), y)


@pytest.mark.many
@pytest.mark.parametrize("name", ["an array", "nnx.List", "variables beside arrays", "a key"])
def test_quantize_and_what_follows_take_a_model_with(name):
    make, read = HELD[name]
    model = Model(make(), read, nnx.Rngs(0))
    quantized = jqx.nnx.quantize(model, jqx.presets.w8a8(), mode=jqx.nnx.Mode.CALIBRATE)
    quantized(X)
    fixed, learned = nnx.clone(quantized), nnx.clone(quantized)
    jqx.nnx.fix_scales(fixed, X)
    lsq = {"gradient": jqx.gradients.lsq}
    learned.policy = jqx.presets.w8a8(weight=lsq, activation=lsq)
    jqx.nnx.learn_scales(learned, X)
    assert len(jqx.nnx.make_plan(quantized, X).sites) == 3
    jqx.nnx.convert(quantized, X)
    graphdef, state = nnx.split(quantized)
    real = model(X)
    for each in (fixed, learned, nnx.merge(graphdef, state)):
        assert_near(nnx.jit(lambda model, x: model(x))(each, X), real)


def test_a_call_that_replaces_an_array_is_refused():
    class Counting(nnx.Module):
        def __init__(self, rngs):
            self.layer, self.seen = nnx.Linear(16, 8, rngs=rngs), on_device(np.zeros(8))

        def __call__(self, x):
            y = self.layer(x)
            self.seen = self.seen + y.sum(0)
            return y

    quantize = jqx.nnx.ptq(Counting(nnx.Rngs(0)), jqx.presets.w8a16(), progress=False)
    with pytest.raises(ValueError, match="writes variables") as refusal:
        quantize([X])
    assert "'seen'" in str(refusal.value)


class Checkpointed(nnx.Module):
    """Writes all variables of its block after each call, as MaxText does where no scan is."""

    def __init__(self, counts, rngs):
        self.block = nnx.Sequential(
            nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        )
        self.counts, self.seen = counts, nnx.Variable(on_device(0.0, jnp.float32))

    def __call__(self, x):
        graphdef, state = nnx.split(self.block)

        @jax.checkpoint
        def run(state, seen, x):
            block = nnx.merge(graphdef, state)
            y = block(x)
            return y, nnx.state(block), seen + y.sum() if self.counts else seen

        y, state, self.seen[...] = run(state, self.seen[...], x)
        nnx.update(self.block, state)
        return y


def test_a_variable_that_a_call_writes_back_is_not_written():
    model = Checkpointed(False, nnx.Rngs(0))
    model.eval()
    f, params = jqx.nnx.pure(model)
    np.testing.assert_array_equal(f(params, X), model(X))
    quantized = jqx.nnx.ptq(model, jqx.presets.w8a16(), progress=False)([X])
    assert [site.path for site in quantized.plan.sites] == ["block/layers/0/kernel"]
    plain = jqx.nnx.ptq(model.block, jqx.presets.w8a16(), progress=False)([X])
    np.testing.assert_array_equal(quantized(X), plain(X))
    counting = Checkpointed(True, nnx.Rngs(0))
    counting.eval()
    f, params = jqx.nnx.pure(counting)
    words = "writes variables, which a pure function cannot do: 'seen'."
    assert_error(lambda: jax.jit(f)(params, X), words)
    model.train()
    f, params = jqx.nnx.pure(model)
    assert_error(lambda: f(params, X), "block/layers/1/mean", "stream 'default'")


def test_an_abstract_model_whose_arrays_flax_loses_is_refused(tmp_path):
    path = str(tmp_path / "model.safetensors")
    model = Model(ONES, lambda t: t, nnx.Rngs(0))
    jqx.save(path, jqx.nnx.ptq(model, jqx.presets.w8a16(), progress=False)([X]))
    abstract = nnx.eval_shape(lambda: Model(jnp.ones(8), lambda t: t, nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"^jqx\.nnx\.bind: an abstract model") as refusal:
        jqx.nnx.bind(jqx.load(path), abstract)
    assert "'held'" in str(refusal.value)


ROWS = normal(1, 2, 32)
INT2 = jqx.presets.w8a16(weight={"qtype": jnp.int2})
UINT8 = jqx.presets.w8a8(activation={"qtype": jnp.uint8, "symmetric": False})
POLICIES = {
    name: getattr(jqx.presets, name)() for name in ("w8a8", "w4a16", "w4a8", "fp8", "mxfp8", "nf4")
} | {"int2": INT2, "uint8": UINT8}
QUICK = ("w8a8", "w4a16", "fp8")


def made(policy, change):
    """A model with a stream of random numbers, converted or otherwise changed."""
    rngs = nnx.Rngs(0)
    layers = (nnx.Linear(32, 64, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    model = nnx.Sequential(*layers, nnx.Linear(64, 4, rngs=rngs))
    model = jqx.nnx.quantize(model, policy, scales="dynamic")
    model.set_attributes(deterministic=True)
    change(model, ROWS)
    return model


def comes_back(policy, change, folder):
    """Checks a model that is saved, and restored into `nnx.eval_shape` of one."""
    model = made(policy, change)
    graphdef, target = nnx.split(nnx.eval_shape(lambda: made(policy, change)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", nnx.state(model))
        checkpointer.wait_until_finished()
        state = checkpointer.restore(folder / "saved", target)
    assert jax.tree.structure(state) == jax.tree.structure(nnx.state(model))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(nnx.state(model)), strict=True):
        assert a.dtype == b.dtype
        assert (a == b).all()
    restored = nnx.merge(graphdef, state)
    assert (restored(ROWS) == model(ROWS)).all()
    return restored


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in POLICIES],
)
def test_a_converted_model_comes_back(name, tmp_path):
    restored = comes_back(POLICIES[name], jqx.nnx.convert, tmp_path)
    assert isinstance(restored.layers[0].kernel.get_value(), jqx.QTensor)


def observe(model, x):
    model.set_attributes(mode=jqx.nnx.Mode.CALIBRATE)
    model(x)


@pytest.mark.parametrize("change", [observe, jqx.nnx.fix_scales, jqx.nnx.learn_scales])
def test_statistics_and_scales_come_back(change, tmp_path):
    policy = jqx.presets.w8a8(weight={"gradient": jqx.gradients.lsq})
    comes_back(policy, change, tmp_path)
