"""`ptq` on modules of Flax: the numbers of `jqx.linen` and `jqx.nnx`, and a pure function."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jqx
import jqx.linen
import jqx.nnx

from ..oracles.contractions import gamma

X = jax.random.normal(jax.random.key(1), (4, 16))
W8A8 = jqx.presets.w8a8()
QUIET, NEAREST = {"progress": False}, jqx.algorithms.nearest()
PARTS = r"jqx\.[\w., ()]+: .+(\n  given:    .+)?(\n  expected: .+)?\n  fix:      .+"


class Net(nn.Module):
    """Statistics, a matrix that is no parameter, a method, and noise."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(8, name="hidden")(x))
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        fixed = self.variable("constants", "turn", lambda: jnp.eye(8))
        return nn.Dense(3, name="out")(x @ fixed.value)

    def twice(self, x):
        return 2 * self(x)


class Model(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs):
        self.parts = nnx.List([nnx.Linear(16, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.noise = nnx.Dropout(0.5, rngs=rngs)
        self.turn = nnx.Variable(jnp.eye(8))

    def __call__(self, x, scale=1.0):
        x = self.noise(self.norm(nnx.relu(self.parts[0](x))))
        return self.parts[1](x @ self.turn.get_value()) * scale

    def twice(self, x):
        return 2 * self(x)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y)


@pytest.fixture(scope="module")
def linen():
    module = Net()
    variables = module.init(jax.random.key(0), X)
    return module, variables, jqx.linen.ptq(module, W8A8, NEAREST, **QUIET)(variables, [X, 2 * X])


@pytest.fixture(scope="module")
def model():
    model = Model(nnx.Rngs(0))
    model.eval()
    return model, jqx.nnx.ptq(model, W8A8, NEAREST, **QUIET)([X, 2 * X])


def test_linen_gives_the_numbers_of_linen_ptq(linen):
    module, variables, quantized = linen
    assert isinstance(quantized, jqx.Quantized)
    calibrate = jqx.linen.quantize(module, W8A8, mode=jqx.linen.Mode.CALIBRATE)
    observe = jax.jit(lambda v, x: calibrate.apply(v, x, mutable=["quant_stats"])[1])
    known = dict(variables)
    for batch in (X, 2 * X):
        known |= observe(known, batch)
    whole = calibrate.clone(mode=jqx.linen.Mode.CONVERT)
    converted = jqx.linen.convert(whole, known, X, target=jax.default_backend())
    same(quantized(X), whole.apply(converted, X))
    # Scales are constants there. Sums are of integers: scaled twice, and added to a bias.
    compiled, found = jax.jit(quantized.function)(quantized.params, X), np.asarray(quantized(X))
    size = np.abs(found) + 2 * np.abs(quantized.params["params"]["out"]["bias"])
    assert np.all(np.abs(compiled - found) <= 2 * gamma(3) * size)
    same(quantized.params["params"]["out"]["kernel"], converted["qparams"]["out"]["kernel"])
    same(quantized.params["batch_stats"], dict(variables["batch_stats"]))


def test_linen_is_ptq_of_apply(linen):
    module, variables, quantized = linen
    assert [w.path for w in quantized.plan.weights] == ["hidden/kernel", "out/kernel"]
    assert [skip.op for skip in quantized.plan.skipped] == ["dot_general"]
    names = {"params": "", "batch_stats": None, "constants": None}
    other = jqx.ptq(module.apply, W8A8, NEAREST, names=names, **QUIET)(variables, [X, 2 * X])
    assert other.plan == quantized.plan and str(other.report) == str(quantized.report)
    same(quantized.params, other.params)
    same(quantized.affines, other.affines)


def test_calls_take_what_apply_takes(linen):
    module, variables, quantized = linen
    doubled = jqx.linen.ptq(module, W8A8, NEAREST, method="twice", target=False, **QUIET)
    found = doubled({"params": variables["params"], **variables}, [X, 2 * X])
    assert found.params["params"]["out"]["kernel"].layout is None
    same(found(X), 2 * quantized(X))  # twice a float is exact
    with pytest.raises(Exception, match="immutable"):
        quantized(X, train=True)
    rngs = {"dropout": jax.random.key(0)}
    out, written = quantized(X, train=True, rngs=rngs, mutable=["batch_stats"])
    assert out.shape == (4, 3) and list(written) == ["batch_stats"]


def test_boxes_of_linen_are_opened():
    init = nn.with_partitioning(nn.initializers.ones, (None, "x"))
    module = nn.Dense(8, kernel_init=init)
    variables = module.init(jax.random.key(0), X)
    found = jqx.linen.ptq(module, jqx.presets.w8a16(), **QUIET)(variables, [X])
    assert [w.path for w in found.plan.weights] == ["kernel"] and found(X).shape == (4, 8)


def test_nnx_gives_the_numbers_of_nnx_ptq(model):
    net, quantized = model
    assert isinstance(quantized, jqx.Quantized)
    whole = jqx.nnx.quantize(net, W8A8, mode=jqx.nnx.Mode.CALIBRATE)
    for batch in (X, 2 * X):
        whole(batch)
    jqx.nnx.convert(whole, X, target=jax.default_backend())
    same(quantized(X), whole(X))
    same(quantized.params["parts"]["1"]["kernel"], whole.parts[1].kernel.get_value())
    assert [w.path for w in quantized.plan.weights] == ["parts/0/kernel", "parts/1/kernel"]
    assert isinstance(net.parts[0].kernel, nnx.Param) and len(quantized.plan.skipped) == 1
    np.testing.assert_array_equal(quantized(X, scale=2.0), 2 * quantized(X))


def test_a_file_gives_back_the_same_module_and_model(linen, model, tmp_path):
    module, _, quantized = linen
    path = tmp_path / "linen.safetensors"
    jqx.save(path, quantized)
    loaded = jqx.load(path)
    for bound in (jqx.linen.bind(loaded, module), loaded.bind(module.apply)):
        same(bound.params, quantized.params)
        same(bound(X), quantized(X))
        assert repr(bound) == repr(quantized)
    _, quantized = model
    jqx.save(path, quantized)
    abstract = nnx.eval_shape(lambda: Model(nnx.Rngs(3)))
    abstract.eval()
    bound = jqx.nnx.bind(jqx.load(path), abstract)
    same(bound.params, quantized.params)
    same(bound(X), quantized(X))


def test_what_does_not_fit_is_refused_in_four_parts(linen, model, tmp_path):
    module, variables, quantized = linen
    net, other = model
    jqx.save(tmp_path / "a", quantized)
    jqx.save(tmp_path / "b", other)
    a, b = jqx.load(tmp_path / "a"), jqx.load(tmp_path / "b")
    training = Model(nnx.Rngs(0))
    for run, error, fact in (
        (lambda: jqx.linen.ptq(net, W8A8), TypeError, "`module`"),
        (lambda: jqx.linen.ptq(module.bind(variables), W8A8), ValueError, "bound already"),
        (lambda: jqx.linen.ptq(jqx.linen.quantize(module, W8A8), W8A8), ValueError, "quantized"),
        (lambda: jqx.linen.ptq(module, W8A8)(X, [X]), TypeError, "`variables`"),
        (lambda: jqx.linen.ptq(module, W8A8)({"a": {}}, [X]), ValueError, "no collection 'params'"),
        (lambda: jqx.linen.ptq(module, "w8a8"), TypeError, "`policy`"),
        (lambda: jqx.linen.ptq(module, {".*": "int8"}), TypeError, r"jqx\.Policy\({regex: scheme"),
        (lambda: jqx.nnx.ptq(net, {".*": "int8"}), TypeError, r"jqx\.Policy\({regex: scheme"),
        (lambda: jqx.linen.ptq(module, W8A8)([X]), TypeError, "that module.init returns, and a"),
        (lambda: jqx.linen.ptq(module, W8A8)(variables, X), TypeError, r"a list of batches: \[x\]"),
        (lambda: jqx.nnx.ptq(net, W8A8)(nnx.state(net), [X]), TypeError, "batches alone"),
        (lambda: jqx.nnx.ptq(net, W8A8)(X), TypeError, r"a list of batches: \[x\]"),
        (lambda: jqx.linen.bind(quantized, module), TypeError, "`unbound`"),
        (lambda: jqx.linen.bind(a, nn.Dense(3)), ValueError, "does not take"),
        (lambda: a.bind(module), TypeError, r"jqx\.linen\.bind\(jqx\.load\(path\), module\)"),
        (lambda: b.bind(net), TypeError, r"jqx\.nnx\.bind\(jqx\.load\(path\), model\)"),
        (lambda: quantized.bind(module), TypeError, "fix:      pass module.apply"),
        (lambda: other.bind(net), TypeError, "a function of quantized.params"),
        (lambda: jqx.ptq(net, W8A8), TypeError, r"jqx\.nnx\.ptq\(model, policy\)\(batches\)"),
        (lambda: jqx.ptq(module, W8A8), TypeError, r"jqx\.linen\.ptq\(module, policy\)"),
        (lambda: jqx.nnx.ptq(module, W8A8), TypeError, "`model`"),
        (
            lambda: jqx.nnx.ptq(jqx.nnx.quantize(net, W8A8), W8A8),
            ValueError,
            "is quantized already",
        ),
        (lambda: jqx.nnx.ptq(training, W8A8)([X]), ValueError, r"model\.eval"),
        (lambda: jqx.nnx.bind(b, nnx.Linear(16, 3, rngs=nnx.Rngs(0))), ValueError, r"nnx\.bind: "),
        (lambda: jqx.nnx.bind(a, net), ValueError, r"nnx\.bind: "),
    ):
        with pytest.raises(error, match=fact) as info:
            run()
        assert re.match(PARTS, str(info.value)), info.value


class Normed(nn.Module):
    """A number among the parameters as well."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=True, name="norm")(nn.Dense(8, name="a")(x)))
        return nn.Dense(3, name="b")(x * self.param("by", lambda key: jnp.float32(2.0)))


class NormedModel(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(16, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.norm, self.by = nnx.BatchNorm(8, rngs=rngs), nnx.Param(jnp.float32(2.0))
        self.norm.use_running_average = True

    def __call__(self, x):
        return self.b(nnx.relu(self.norm(self.a(x))) * self.by.get_value())


def test_channels_are_scaled_in_modules():
    """Through the variables of a batch norm too, those that no gradient reaches."""
    module, model = Normed(), NormedModel(nnx.Rngs(0))
    variables = module.init(jax.random.key(0), X)
    smooth = jqx.algorithms.smooth_quant(strength=0.85)
    for name, quantized, exact in (
        (
            "batch_stats/",
            jqx.linen.ptq(module, W8A8, smooth, **QUIET)(variables, [X]),
            module.apply(variables, X),
        ),
        ("", jqx.nnx.ptq(model, W8A8, smooth, **QUIET)([X]), model(X)),
    ):
        (pair,) = quantized.details
        assert pair.channels == 8 and pair.after == ("b/kernel:dot_general",)
        made = {"a/kernel:dot_general", "a/bias", f"{name}norm/mean", "norm/bias"}
        assert set(pair.before) == made
        assert np.abs(quantized(X) - exact).max() < 0.05 * np.abs(exact).max()


def test_what_is_kept_at_sites_of_modules_is_saved_and_bound(tmp_path):
    """A scale, a rotation, a low-rank product and a shift."""
    module, model = Normed(), NormedModel(nnx.Rngs(0))
    variables = module.init(jax.random.key(0), X)
    of = jqx.algorithms
    algorithms = of.smooth_quant(strength=0.85), of.rotate(), of.eora(rank=2), of.bias_correction()
    both = (
        (jqx.linen.ptq(module, W8A8, of.chain(*algorithms), **QUIET)(variables, [X]), module),
        (jqx.nnx.ptq(model, W8A8, of.chain(*algorithms), **QUIET)([X]), model),
    )
    for way, (quantized, own) in zip((jqx.linen, jqx.nnx), both, strict=True):
        exact = own.apply(variables, X) if way is jqx.linen else own(X)
        assert np.abs(quantized(X) - exact).max() < 0.05 * np.abs(exact).max()
        assert {key.rsplit(":", 1)[1] for key in quantized.maps} == {"lhs", "out"}
        path = tmp_path / "model.safetensors"
        jqx.save(path, quantized)
        bound = way.bind(jqx.load(path), own)
        np.testing.assert_array_equal(bound(X), quantized(X))


class Decoder(nn.Module):
    """Logits of tokens, of at most 32."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(24, 16, name="table")(tokens)
        x = x + nn.Embed(32, 16, name="places")(jnp.arange(tokens.shape[1])[None])
        mask = nn.make_causal_mask(tokens)
        x = x + nn.MultiHeadDotProductAttention(2, name="mix")(nn.LayerNorm()(x), mask=mask)
        return nn.Dense(24, name="out")(x)


class DecoderModel(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs):
        self.table, self.places = (nnx.Embed(n, 16, rngs=rngs) for n in (24, 32))
        self.norm, self.out = nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, 24, rngs=rngs)
        self.mix = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens) + self.places(jnp.arange(tokens.shape[1])[None])
        x = x + self.mix(self.norm(x), mask=nnx.make_causal_mask(tokens))
        return self.out(x)


@pytest.mark.filterwarnings(r"error:jqx\.")
def test_decoders_write_their_own_text():
    """One position at a time: there is no warning. Logits after the last place are NaN."""
    module, model = Decoder(), DecoderModel(nnx.Rngs(0))
    variables = module.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    given = W8A8, NEAREST
    for quantized, plain in (
        (jqx.linen.ptq(module, *given, **QUIET)(variables), lambda x: module.apply(variables, x)),
        (jqx.nnx.ptq(model, *given, **QUIET)(), model),
    ):
        tokens = jnp.array([[0, 1, 2, 3, 4, 5], [0, 7, 8, 9, 10, 11]])
        np.testing.assert_allclose(quantized(tokens), plain(tokens), atol=0.1)
        codes = quantized.report.codes
        assert codes.endswith("calibrated on 16 rows of 32 tokens that the function wrote itself")
        assert len(quantized.affines) == 5
