"""Quantized models of Keras, read and written, against Keras itself."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # before keras is imported

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.interop import from_keras, to_keras

from ..oracles.refusals import assert_error

keras = pytest.importorskip("keras", "3.15")
if keras.backend.backend() != "jax":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:.*quantize. method", "ignore:__array__")
layers, quantizers = keras.layers, keras.quantizers
TOKENS = np.arange(12).reshape(2, 6) % 11
NONE = jqx.Policy([])


@pytest.fixture(autouse=True, scope="module")
def _default_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def network(*inner):
    """A model with all layers that Keras quantizes, and with state beside its variables."""
    keras.utils.set_random_seed(0)
    norm = layers.Normalization(name="norm")
    norm.adapt(np.random.default_rng(0).normal(1, 3, (8, 6, 15)))
    block = [layers.Dense(9, "relu", name="up"), layers.Dropout(0.5), *inner]
    tokens = keras.Input((6,), dtype="int32")
    x = norm(layers.Embedding(11, 15, name="table")(tokens))
    x = keras.Sequential(block, name="block")(x)
    x = layers.EinsumDense("abc,cde->abde", (None, 2, 6), bias_axes="de", name="heads")(x)
    x = layers.EinsumDense("abde,dec->abc", (None, 13), name="merged")(x)
    x = layers.EinsumDense("abc,dc->abd", (None, 13), name="turned")(x)
    return keras.Model(tokens, layers.Dense(5, name="out")(layers.BatchNormalization()(x)))


def calibrated(bits, group, ordered=("up", "heads"), top=0):
    """A model with layers as GPTQ of Keras leaves them. (It takes half a minute for one layer.)"""
    model, generator = network(), np.random.default_rng(bits)
    config = quantizers.GPTQConfig(None, None, weight_bits=bits, group_size=group)
    for layer in [*model.get_layer("block").layers[:1], *map(model.get_layer, ("heads", "merged"))]:
        layer.quantize("gptq", config=config)
        del layer._kernel
        count, groups = layer.kernel_scale.shape
        inputs = layer.g_idx.shape[0]
        codes = generator.integers(0, 2**bits, (count, inputs)).astype(np.uint8)
        packed = quantizers.pack_int4(codes, axis=0, dtype="uint8")[0] if bits == 4 else codes
        layer.quantized_kernel.assign(packed)
        layer.kernel_scale.assign(generator.uniform(0.1, 1, (count, groups)) / 2**bits)
        layer.kernel_zero.assign(generator.integers(0, 2**bits + top, (count, groups)))
        size = inputs if group == -1 else group
        places = generator.permutation(inputs) if layer.name in ordered else np.arange(inputs)
        layer.g_idx.assign(places / size)  # a fraction, as Keras has it
        layer.is_gptq_calibrated = True
    return model


def in_keras(layer, name):
    """The numbers that Keras multiplies by, and whether jqx has them to the last bit."""
    grouped = keras.src.quantizers.quantizers.dequantize_with_sz_map
    scale, codes = (jnp.asarray(getattr(layer, x)) for x in (f"{name}_scale", name))
    if layer.quantization_mode == "gptq":
        real = grouped(codes[: len(scale)], scale, layer.kernel_zero, layer.g_idx).T
        return real.reshape(getattr(layer, "original_kernel_shape", real.shape)), True
    if layer.quantization_mode == "int8" and isinstance(layer, layers.EinsumDense):
        return codes / layer._adjust_scale_for_dequant(scale), False
    is_table = name == "embeddings"
    matrix = codes if is_table else codes.reshape(-1, scale.shape[-1])
    if scale.ndim == 1:
        return (matrix / (scale[:, None] if is_table else scale)).reshape(codes.shape), False
    zero = getattr(layer, f"{name}_zero")
    real = grouped(matrix, scale, zero, layer.g_idx, group_axis=-1 if is_table else 0)
    return real.reshape(codes.shape), True


def quantized_by_keras(config):
    model = network()
    model.quantize(config=config, filters=lambda x: x.name != "turned" or config.mode == "int8")
    return model


WITHOUT_INPUTS = quantizers.Int8QuantizationConfig(activation_quantizer=None)
MODELS = {
    "int8": lambda: quantized_by_keras(WITHOUT_INPUTS),
    "int4": lambda: quantized_by_keras(quantizers.Int4QuantizationConfig(block_size=None)),
    "int4 in blocks": lambda: quantized_by_keras(quantizers.Int4QuantizationConfig(block_size=4)),
    "2 bits": lambda: calibrated(2, 6),
    "4 bits": lambda: calibrated(4, 3, top=1),
    "4 bits in order": lambda: calibrated(4, 12, ()),
    "8 bits": lambda: calibrated(8, -1),
}


@pytest.fixture(scope="module")
def read():
    """Each model, with what `from_keras` returns, and its outputs on codes."""
    models = {name: make() for name, make in MODELS.items()}
    result = {name: (model, *from_keras(model)) for name, model in models.items()}
    functions = {name: jqx.convert(f, NONE) for name, (_, f, _) in result.items()}
    params = {name: p for name, (_, _, p) in result.items()}
    run = jax.jit(lambda params: {name: functions[name](p, TOKENS) for name, p in params.items()})
    outputs = run(params)
    return {name: (*entry, outputs[name]) for name, entry in result.items()}


def leaves(params):
    return {
        f"{path.rpartition('block/')[2]}{jax.tree_util.keystr(key)}": x
        for path, value in params.items()
        for key, x in jax.tree_util.tree_leaves_with_path(value)
    }


def assert_same(params, others):
    params, others = leaves(params), leaves(others)
    assert params.keys() == others.keys()
    for name, x in params.items():
        assert x.dtype == others[name].dtype, name
        np.testing.assert_array_equal(x, others[name], name)


@pytest.mark.parametrize("name", MODELS)
def test_codes_of_keras_are_kept(name, read):
    model, _, params, outputs = read[name]
    found = 0
    for layer in model._flatten_layers():
        weight = "embeddings" if isinstance(layer, layers.Embedding) else "kernel"
        if layer.quantization_mode is not None and not isinstance(layer, layers.Normalization):
            variable = getattr(layer, "quantized_kernel", getattr(layer, f"_{weight}", None))
            expected, exact = in_keras(layer, weight)
            real = params[variable.path].dequantize()
            tolerance = 0 if exact else 2.0**-22
            np.testing.assert_allclose(real, expected, rtol=tolerance, err_msg=layer.path)
            found += 1
    assert found == sum(isinstance(x, jqx.QTensor) for x in params.values()) > 2
    np.testing.assert_allclose(outputs, model(TOKENS), atol=1e-5)  # sums in another order


WRITTEN = {name: name in ("int8", "int4 in blocks") for name in MODELS if name != "8 bits"}


@pytest.mark.parametrize(
    "name",
    [
        name if fast else pytest.param(name, marks=pytest.mark.slow)
        for name, fast in WRITTEN.items()
    ],
)
def test_what_is_read_is_written(name, read, tmp_path):
    model, _, params, outputs = read[name]
    if name == "4 bits":  # has zero points of 16, as Keras has for numbers of one sign
        assert params["heads/kernel"].qtype == jnp.uint8
    written = to_keras(model, params)
    again = from_keras(written)[1]
    if name == "2 bits":  # codes of 2 bits are int4 in Keras
        for path, x in params.items():
            other = again[path.removeprefix("block/")]
            if isinstance(x, jqx.QTensor):
                np.testing.assert_array_equal(x.dequantize(), other.dequantize())
    else:
        assert_same(params, again)
    np.testing.assert_allclose(written(TOKENS), outputs, atol=1e-5)
    written.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(TOKENS), written(TOKENS))
    assert_same(again, from_keras(loaded)[1])


@pytest.mark.slow
def test_keras_saves_no_zero_points_of_gptq(tmp_path):
    """If this fails, `to_keras` can write mode `gptq`."""
    calibrated(4, 3).save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="expected 5 variables"):
        keras.saving.load_model(tmp_path / "model.keras")


def ptq(model, policy, inputs, algorithm=None):
    f, params = from_keras(model)
    quantized = jqx.ptq(f, policy, algorithm, progress=False)(params, [inputs])
    return quantized, jax.jit(quantized.function)(quantized.params, inputs)


def test_inputs_in_int8_as_keras_has_them(tmp_path):
    model = network()
    policy = jqx.presets.w8a8_dynamic()
    quantized, expected = ptq(model, policy, TOKENS, jqx.algorithms.nearest())
    written = to_keras(model, quantized)
    assert all(model.get_layer(x).quantization_mode is None for x in ("out", "heads"))
    assert all(written.get_layer(x).inputs_quantizer for x in ("out", "heads", "merged", "turned"))
    np.testing.assert_allclose(written(TOKENS), expected, atol=1e-5)
    assert np.abs(written(TOKENS) - model(TOKENS)).max() > 1e-4
    written.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(TOKENS), written(TOKENS))
    f, params = from_keras(loaded)
    np.testing.assert_allclose(jqx.convert(f, policy)(params, TOKENS), expected, atol=1e-5)


@pytest.mark.slow
def test_weights_of_gptq_in_attention(tmp_path):
    """Keras saves no codes of `MultiHeadAttention` by itself."""
    keras.utils.set_random_seed(1)
    x = keras.Input((6, 24))
    attended = layers.MultiHeadAttention(2, 8, name="attention")(x, x)
    up = layers.Dense(32, "relu", dtype=keras.dtype_policies.DTypePolicyMap(), name="up")
    block = keras.Sequential([up, layers.Dense(24)])
    out = keras.layers.Dense(3, name="out")
    model = keras.Model(x, out(block(attended) + attended))
    inputs = np.random.default_rng(0).normal(size=(4, 6, 24)).astype(np.float32)
    rules = [
        jqx.Rule(".*(up|out)/.*", weight="int3:group=8"),
        jqx.Rule(weight="uint4:group=6:asymmetric"),
    ]
    quantized, expected = ptq(model, jqx.Policy(rules), inputs, jqx.algorithms.gptq())
    assert len(quantized.plan.sites) == 7
    written = to_keras(model, quantized)
    np.testing.assert_allclose(written(inputs), expected, atol=1e-5)
    written.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(inputs), written(inputs))
    with pytest.raises(ValueError):  # if this passes, Keras has learnt it
        loaded.save(tmp_path / "again.keras")
    to_keras(loaded, from_keras(loaded)[1]).save(tmp_path / "again.keras")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("block", [None, 4])
def test_tables_that_are_used_twice(tied, block, tmp_path):
    def make():
        keras.utils.set_random_seed(2)
        table = layers.ReversibleEmbedding(11, 15, tie_weights=tied, name="table")
        tokens = keras.Input((6,), dtype="int32")
        return keras.Model(
            tokens, table(layers.Dense(15, "tanh", name="dense")(table(tokens)), reverse=True)
        )

    model = make()
    model.quantize(config=quantizers.Int4QuantizationConfig(block_size=block), filters="table")
    f, params = from_keras(model)
    assert sum(isinstance(x, jqx.QTensor) for x in params.values()) == 2 - tied
    outputs = jax.jit(jqx.convert(f, NONE))(params, TOKENS)
    np.testing.assert_allclose(outputs, model(TOKENS), atol=1e-5)
    written = to_keras(make(), params)
    assert_same(params, from_keras(written)[1])
    np.testing.assert_allclose(written(TOKENS), outputs, atol=1e-5)


def test_weights_of_the_same_path_are_numbered():
    x = keras.Input((4,))
    parts = [keras.Sequential([layers.Dense(4, name="one")], name=name) for name in "ab"]
    model = keras.Model(x, parts[1](parts[0](x)))
    params = from_keras(model)[1]
    assert list(params) == ["a/one/kernel", "a/one/bias", "b/one/kernel", "b/one/bias"]
    written = to_keras(model, params)  # Keras gives its weights shorter paths
    f, again = from_keras(written)
    assert list(again) == ["one/kernel", "one/bias", "one/kernel#1", "one/bias#1"]
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(f(again, x), model(x))
    np.testing.assert_array_equal(to_keras(written, again)(x), model(x))


def small(**options):
    return keras.Sequential([keras.Input((8,)), layers.Dense(4, name="dense", **options)], name="s")


def test_models_that_are_refused():
    assert_error(lambda: from_keras(layers.Dense(2)), "`model` is not a Model", error=TypeError)
    assert_error(
        lambda: from_keras(keras.Sequential([layers.Dense(2)], name="s")), "'s'", "not built"
    )
    model = small()
    model.quantize("float8")
    assert_error(lambda: from_keras(model), "'s/dense'", "float8")
    model = small()
    model.quantize("int8")
    model.layers[0].enable_lora(2)
    assert_error(lambda: from_keras(model), "'s/dense'", "LoRA")
    assert_error(lambda: to_keras(model, {}), "'s/dense'", "LoRA")

    class Opaque(keras.Model):
        def __init__(self, width):
            super().__init__()
            self.dense = layers.Dense(width)

        def call(self, x):
            return self.dense(x)

    model = Opaque(3)
    model(np.ones((2, 8)))
    params = from_keras(model)[1]  # the function of a float model needs no config
    assert_error(lambda: to_keras(model, params), "get_config")
    model = calibrated(4, 3, ("merged",))
    assert_error(lambda: from_keras(model), "'merged'", "activation_order=False")
    model = calibrated(4, 3)
    model.get_layer("heads").g_idx.assign(np.zeros(9))
    assert_error(lambda: from_keras(model), "'heads'", "equal sizes")


def test_codes_that_keras_cannot_hold():
    tokens = keras.Input((8, 3))
    x = layers.Dense(4, name="dense")(layers.Conv1D(3, 2, name="conv")(tokens))
    model = keras.Model(tokens, x)
    params = from_keras(model)[1]

    def with_codes(path, spec):
        return {**params, path: jqx.QTensor.quantize(params[path], spec)}

    columns, rows = jqx.per_axis(1), jqx.per_axis(0)
    asymmetric = jqx.QSpec("int8", columns, symmetric=False, calibrator=jqx.calibrators.minmax)
    for path, spec, *words in (
        ("conv/kernel", jqx.QSpec("int8", jqx.per_axis(2)), "'conv/kernel'", "Conv1D", "no codes"),
        ("dense/kernel", jqx.QSpec("nf4", columns), "'dense/kernel'", "nf4", "integers"),
        ("dense/kernel", jqx.QSpec("float8_e4m3fn", columns), "'dense/kernel'", "integers"),
        ("dense/kernel", jqx.QSpec("int8", rows), "'dense/kernel'", "blocks of inputs"),
        ("dense/kernel", asymmetric, "'dense/kernel'", "no zeros"),
        ("dense/bias", jqx.QSpec("int8"), "'dense/bias'", "codes of kernel"),
    ):
        q = with_codes(path, spec)
        assert_error(lambda: to_keras(model, q), *words)  # noqa: B023
    assert_error(lambda: to_keras(model, {**params, "a": 1}), "without none, with a")
    assert_error(lambda: to_keras(model, {}), "without conv/bias, conv/kernel", "dense/bias")
    assert_error(lambda: to_keras(model, 3), "`quantized`", error=TypeError)
    wide = {**params, "dense/bias": np.full(4, 0.1)}
    assert_error(lambda: to_keras(model, wide), "'dense/bias'", "float64[4] for float32[4]")
    lost = {**params, "dense/kernel": params["dense/kernel"].T}
    assert_error(lambda: to_keras(model, lost), "'dense/kernel'", "[4, 3] for float32[3, 4]")


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=() if i < 2 else pytest.mark.slow)
        for i, spec in enumerate(
            [
                jqx.QSpec(
                    "uint4", jqx.per_axis(1), symmetric=False, calibrator=jqx.calibrators.minmax
                ),
                jqx.QSpec("int4", jqx.per_block({0: 3, 1: 2}, tail=True)),
                jqx.QSpec("int8", jqx.per_tensor()),
                jqx.QSpec("int4", jqx.per_tensor()),
                jqx.QSpec("uint2", jqx.per_block({0: 4, 1: 1}), symmetric=False),
                jqx.QSpec("int6", jqx.per_axis(1)),
            ]
        )
    ],
    ids=str,
)
def test_every_form_of_integers(spec):
    model = small()
    params = from_keras(model)[1]
    q = jqx.QTensor.quantize(params["s/dense/kernel"], spec)
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    for form in [q, q.pack_for("cpu", contracted=-2)]:
        written = to_keras(model, {**params, "s/dense/kernel": form})
        np.testing.assert_allclose(written(x), x @ q.dequantize(), atol=1e-6)


def test_plans_that_keras_cannot_hold():
    model = small()
    f, params = from_keras(model)
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    for rule, *words in (
        (jqx.Rule(weight="int8", activation="int8"), "'s/dense/kernel'", "int8 per_tensor"),
        (jqx.Rule(weight="int8", activation="int8:tensor:dynamic"), "per token, dynamic"),
        (jqx.Rule(weight="int8", activation="float8_e4m3fn:token:dynamic"), "float8"),
        (jqx.Rule(weight="int8", activation="int8:token:dynamic", output="int8"), "dynamic"),
        (jqx.Rule(weight="int4:group=4", activation="int8:token:dynamic"), "inputs in int8"),
    ):
        nearest = jqx.algorithms.nearest()
        quantized = jqx.ptq(f, jqx.Policy([rule]), nearest, progress=False)(params, [x])
        assert_error(lambda: to_keras(model, quantized), "Keras cannot hold", *words)  # noqa: B023
    rules = jqx.presets.w8a8_dynamic()
    smooth = jqx.algorithms.smooth_quant()
    quantized = jqx.ptq(f, rules, smooth, progress=False)(params, [x])
    assert_error(lambda: to_keras(model, quantized), "channel maps")


def test_layers_around_layers_that_keras_cannot_hold():
    x = keras.Input((3, 8))
    attention = layers.MultiHeadAttention(1, 4, name="attention")
    model = keras.Model(x, layers.TimeDistributed(layers.Dense(2, name="out"))(attention(x, x)))
    params = from_keras(model)[1]

    def with_codes(path, axes):
        spec = jqx.QSpec("int8", jqx.per_axis(*axes))
        return {**params, path: jqx.QTensor.quantize(params[path], spec)}

    assert_error(lambda: to_keras(model, with_codes("time_distributed/out/kernel", (1,))), "'out'")
    q = with_codes("attention/query/kernel", (1, 2))
    assert_error(lambda: to_keras(model, q), "'attention/query'", "inputs int8")


def test_scales_that_the_variables_would_round():
    model = small(dtype="bfloat16")
    params = from_keras(model)[1]
    q = {
        **params,
        "s/dense/kernel": jqx.QTensor.quantize(
            params["s/dense/kernel"], jqx.QSpec("int8", jqx.per_axis(1))
        ),
    }
    assert_error(lambda: to_keras(model, q), "kernel_scale", "float32[4] for bfloat16[4]")
