"""`ptq` on modules of Flax: the numbers of `jqx.linen` and `jqx.nnx`, and a pure function. Weights
that are computed from parameters alone, of functions, in files and in modules.
"""

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

from ..arrays import assert_same
from ..models.transforms import normal
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


@pytest.fixture(scope="module")
def linen():
    module = Net()
    variables = jax.jit(module.init)(jax.random.key(0), X)
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
    state = dict(variables)
    for batch in (X, 2 * X):
        state |= observe(state, batch)
    whole = calibrate.clone(mode=jqx.linen.Mode.CONVERT)
    converted = jqx.linen.convert(whole, state, X, target=jax.default_backend())
    assert_same(quantized(X), whole.apply(converted, X))
    # Scales are constants there. Sums are of integers: scaled twice, and added to a bias.
    compiled, result = jax.jit(quantized.function)(quantized.params, X), np.asarray(quantized(X))
    size = np.abs(result) + 2 * np.abs(quantized.params["params"]["out"]["bias"])
    assert np.all(np.abs(compiled - result) <= 2 * gamma(3) * size)
    assert_same(quantized.params["params"]["out"]["kernel"], converted["qparams"]["out"]["kernel"])
    assert_same(quantized.params["batch_stats"], dict(variables["batch_stats"]))


def test_linen_is_ptq_of_apply(linen):
    module, variables, quantized = linen
    assert [w.path for w in quantized.plan.weights] == ["hidden/kernel", "out/kernel"]
    assert [skip.op for skip in quantized.plan.skipped] == ["dot_general"]
    names = {"params": "", "batch_stats": None, "constants": None}
    other = jqx.ptq(module.apply, W8A8, NEAREST, names=names, **QUIET)(variables, [X, 2 * X])
    assert other.plan == quantized.plan and str(other.report) == str(quantized.report)
    assert_same(quantized.params, other.params)
    assert_same(quantized.affines, other.affines)


def test_calls_take_what_apply_takes(linen):
    module, variables, quantized = linen
    doubled = jqx.linen.ptq(module, W8A8, NEAREST, method="twice", target=False, **QUIET)
    result = doubled({"params": variables["params"], **variables}, [X, 2 * X])
    assert result.params["params"]["out"]["kernel"].layout is None
    assert_same(result(X), 2 * quantized(X))  # twice a float is exact
    with pytest.raises(Exception, match="immutable"):
        quantized(X, train=True)
    rngs = {"dropout": jax.random.key(0)}
    out, written = quantized(X, train=True, rngs=rngs, mutable=["batch_stats"])
    assert out.shape == (4, 3) and list(written) == ["batch_stats"]


def test_boxes_of_linen_are_opened():
    init = nn.with_partitioning(nn.initializers.ones, (None, "x"))
    module = nn.Dense(8, kernel_init=init)
    variables = jax.jit(module.init)(jax.random.key(0), X)
    quantized = jqx.linen.ptq(module, jqx.presets.w8a16(), **QUIET)(variables, [X])
    assert [w.path for w in quantized.plan.weights] == ["kernel"] and quantized(X).shape == (4, 8)


def test_nnx_gives_the_numbers_of_nnx_ptq(model):
    net, quantized = model
    assert isinstance(quantized, jqx.Quantized)
    whole = jqx.nnx.quantize(net, W8A8, mode=jqx.nnx.Mode.CALIBRATE)
    for batch in (X, 2 * X):
        whole(batch)
    jqx.nnx.convert(whole, X, target=jax.default_backend())
    assert_same(quantized(X), whole(X))
    assert_same(quantized.params["parts"]["1"]["kernel"], whole.parts[1].kernel.get_value())
    assert [w.path for w in quantized.plan.weights] == ["parts/0/kernel", "parts/1/kernel"]
    assert isinstance(net.parts[0].kernel, nnx.Param) and len(quantized.plan.skipped) == 1
    np.testing.assert_array_equal(quantized(X, scale=2.0), 2 * quantized(X))


def test_a_file_gives_back_the_same_module_and_model(linen, model, tmp_path):
    module, _, quantized = linen
    path = tmp_path / "linen.safetensors"
    jqx.save(path, quantized)
    loaded = jqx.load(path)
    for bound in (jqx.linen.bind(loaded, module), loaded.bind(module.apply)):
        assert_same(bound.params, quantized.params)
        assert_same(bound(X), quantized(X))
        assert repr(bound) == repr(quantized)
    _, quantized = model
    jqx.save(path, quantized)
    abstract = nnx.eval_shape(lambda: Model(nnx.Rngs(3)))
    abstract.eval()
    bound = jqx.nnx.bind(jqx.load(path), abstract)
    assert_same(bound.params, quantized.params)
    assert_same(bound(X), quantized(X))


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
        (lambda: jqx.linen.bind(quantized, module), TypeError, "`saved`"),
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
    variables = jax.jit(module.init)(jax.random.key(0), X)
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
    variables = jax.jit(module.init)(jax.random.key(0), X)
    of = jqx.algorithms
    algorithms = of.smooth_quant(strength=0.85), of.rotate(), of.eora(rank=2), of.bias_correction()
    both = (
        (jqx.linen.ptq(module, W8A8, of.chain(*algorithms), **QUIET)(variables, [X]), module),
        (jqx.nnx.ptq(model, W8A8, of.chain(*algorithms), **QUIET)([X]), model),
    )
    for way, (quantized, net) in zip((jqx.linen, jqx.nnx), both, strict=True):
        exact = net.apply(variables, X) if way is jqx.linen else net(X)
        assert np.abs(quantized(X) - exact).max() < 0.05 * np.abs(exact).max()
        assert {key.rsplit(":", 1)[1] for key in quantized.maps} == {"lhs", "out"}
        path = tmp_path / "model.safetensors"
        jqx.save(path, quantized)
        bound = way.bind(jqx.load(path), net)
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
    variables = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    args = W8A8, NEAREST
    for quantized, plain in (
        (jqx.linen.ptq(module, *args, **QUIET)(variables), lambda x: module.apply(variables, x)),
        (jqx.nnx.ptq(model, *args, **QUIET)(), model),
    ):
        tokens = jnp.array([[0, 1, 2, 3, 4, 5], [0, 7, 8, 9, 10, 11]])
        both = jax.jit(lambda x, pair=(quantized, plain): [f(x) for f in pair])
        np.testing.assert_allclose(*both(tokens), atol=0.1)
        codes = quantized.report.codes
        assert codes.endswith("calibrated on 16 rows of 32 tokens that the function wrote itself")
        assert len(quantized.affines) == 5


ROWS = normal(0, 4, 16)
MASKED = {
    "w": normal(1, 16, 16),
    "mask": jnp.tri(16),
    "v": normal(2, 3, 16, 16),
    "b": normal(3, 1, 16),
}


def norm(w):
    return w / jnp.linalg.norm(w, axis=0, keepdims=True)


def masked(p, x):
    h = jnp.tanh(x @ (p["w"] * p["mask"]) + p["b"])
    return jax.lax.scan(lambda h, v: (jnp.tanh(h @ norm(v)), None), h, p["v"])[0]


def hoisted(function=masked, params=MASKED, policy=None, hoist=True, **options):
    policy = policy or jqx.presets.w8a8()
    split = jqx.ptq(function, policy, NEAREST, hoist=hoist, target=False, progress=False, **options)
    return split(params, [ROWS])


def error_of(got, expected):
    return float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))


def test_what_is_split_off_is_quantized_saved_and_bound_again(tmp_path):
    quantized = hoisted()
    assert [weight.path for weight in quantized.plan.weights] == ["computed/mask,w", "computed/v"]
    assert quantized.plan.skipped == () and quantized.plan.hoisted.what == "weights"
    expected = quantized(ROWS)
    assert (
        error_of(expected, masked(MASKED, ROWS)) < 0.05
    )  # eight bits, in four layers one after another
    jqx.save(tmp_path / "f", quantized)
    unbound = jqx.load(tmp_path / "f")
    assert unbound.plan == quantized.plan
    g, _ = jqx.hoist(masked, "weights")(MASKED, ROWS)
    for bound in (unbound.bind(masked, target=False), unbound.bind(g, target=False)):
        np.testing.assert_array_equal(bound(ROWS), expected)
        np.testing.assert_array_equal(bound(ROWS[:2]), expected[:2])


def test_another_function_of_the_parameters_is_split_in_the_same_way():
    quantized = hoisted()
    step = quantized.bind(lambda p, x, scale: scale * masked(p, x[None])[0])
    np.testing.assert_array_equal(step(ROWS[0], 2.0), 2 * quantized(ROWS[:1])[0])
    with pytest.raises(ValueError, match="not the computed parameters"):
        quantized.bind(lambda p, x: masked(p, x) @ jnp.exp(p["w"]) @ jnp.tanh(p["w"] * p["mask"]))(
            ROWS
        )


def test_a_file_without_the_structure_of_the_parameters_asks_for_it(tmp_path):
    def own(p, x):
        return x @ (p["w"] * p["mask"]) * p["n"]

    params = {"w": MASKED["w"], "mask": MASKED["mask"], "n": 3}
    quantized = hoisted(own, params, jqx.presets.w8a16())
    jqx.save(tmp_path / "f", quantized)
    unbound = jqx.load(tmp_path / "f")
    with pytest.raises(ValueError, match=r"bind\(f, like=params\)"):
        unbound.bind(own)
    for like in (params, {**jax.eval_shape(lambda: MASKED), "n": 3}):
        like = {key: like[key] for key in params}
        np.testing.assert_array_equal(unbound.bind(own, like, target=False)(ROWS), quantized(ROWS))
    with pytest.raises(ValueError) as raised:
        unbound.bind(lambda p, x: x @ (p["w"] + jnp.exp(p["w"])), params)
    assert "fix:" in str(raised.value)


def test_values_that_are_larger_are_split_off_only_when_asked():
    low = {"a": normal(1, 16, 4), "b": normal(2, 4, 16)}
    policy = jqx.presets.w8a16()
    product = lambda p, x: x @ (p["a"] @ p["b"])  # noqa: E731
    kept = hoisted(product, low, policy)
    assert [weight.path for weight in kept.plan.weights] == ["a", "b"]
    assert "larger than their 128" in kept.plan.skipped[0].reason
    whole = hoisted(product, low, policy, hoist="all")
    assert [weight.path for weight in whole.plan.weights] == ["computed/a,b"]
    with pytest.raises(ValueError, match="`hoist` is unknown"):
        hoisted(hoist="large")


def test_complex_parameters_are_saved_as_they_are(tmp_path):
    params = {"c": jax.lax.complex(MASKED["w"], MASKED["mask"]), "w": MASKED["w"]}

    def own(p, x):
        return (x.astype(jnp.complex64) @ jnp.exp(p["c"])).real @ norm(p["w"])

    quantized = hoisted(own, params, jqx.presets.w8a16(), hoist="all")
    jqx.save(tmp_path / "f", quantized)
    bound = jqx.load(tmp_path / "f").bind(own, target=False)
    assert bound.params["computed"]["c"].dtype == jnp.complex64
    np.testing.assert_array_equal(bound(ROWS), quantized(ROWS))


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=True)(nn.WeightNorm(nn.Dense(16))(x))
        return h @ (self.param("w", nn.initializers.normal(), (16, 4)) * jnp.tri(16, 4))


class NormalizedModel(nnx.Module):
    def __init__(self, rngs):
        self.v, self.g = nnx.Param(normal(5, 16, 16)), nnx.Param(jnp.ones((1, 16)))
        self.norm = nnx.BatchNorm(16, use_running_average=True, rngs=rngs)

    def __call__(self, x):
        return self.norm(x @ (self.g[...] * norm(self.v[...])))


@pytest.mark.slow
def test_modules_of_flax_are_split_and_bound_again(tmp_path):
    policy, options = jqx.presets.w8a8_dynamic(), {"hoist": True, "progress": False}
    module = Normalized()
    variables = jax.jit(module.init)(jax.random.key(0), ROWS)
    quantized = jqx.linen.ptq(module, policy, NEAREST, **options)(variables, [ROWS])
    names = "Dense_0.kernel,WeightNorm_0.Dense_0.kernel.scale"
    assert [x.path for x in quantized.plan.weights] == [f"computed/{names}", "computed/w"]
    assert error_of(quantized(ROWS), module.apply(variables, ROWS)) < 0.02
    jqx.save(tmp_path / "linen", quantized)
    again = jqx.linen.bind(jqx.load(tmp_path / "linen"), module)
    np.testing.assert_array_equal(again(ROWS), quantized(ROWS))
    model = NormalizedModel(nnx.Rngs(0))
    quantized = jqx.nnx.ptq(model, policy, NEAREST, **options)([ROWS])
    assert [x.path for x in quantized.plan.weights] == ["computed/g,v"]
    assert error_of(quantized(ROWS), model(ROWS)) < 0.02
    jqx.save(tmp_path / "nnx", quantized)
    np.testing.assert_array_equal(
        jqx.nnx.bind(jqx.load(tmp_path / "nnx"), model)(ROWS), quantized(ROWS)
    )
