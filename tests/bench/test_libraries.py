"""Models of other libraries: neural differential equations of diffrax; networks of dm-haiku, Keras
and transformers as functions; T5 of transformers by `jqx.linen`; Llama 3 of tunix by `jqx.nnx`.
"""

import copy
import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqx
import jqx.linen
import jqx.nnx

from .checks import (
    ERRORS,
    POLICIES,
    Model,
    check,
    check_equal,
    cosine,
    floats,
    least_cosine,
    relative,
)

pytestmark = pytest.mark.bench


ADJOINTS = ("RecursiveCheckpointAdjoint", "BacksolveAdjoint", "DirectAdjoint")


STEPS = 8


@pytest.fixture(scope="module")
def equation():
    """Returns an equation's solution at the end, from parameters and where it starts, for an
    adjoint.
    """
    diffrax = pytest.importorskip("diffrax")
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(8, 8, 32, 2, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_inexact_array)

    def solution(adjoint):
        def f(params, start):
            field = diffrax.ODETerm(lambda t, y, params: eqx.combine(params, static)(y))
            return diffrax.diffeqsolve(
                field,
                diffrax.Heun(),
                t0=0.0,
                t1=1.0,
                dt0=1 / STEPS,
                y0=start,
                args=params,
                adjoint=getattr(diffrax, adjoint)(),
            ).ys

        return f

    starts = tuple((jax.random.normal(jax.random.key(k), (8,)),) for k in (1, 2))
    return lambda adjoint: Model(solution(adjoint), params, starts, depth=3 * 2 * STEPS)


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("policy", ["w8a8", "w4a16"])
def test_solutions_and_their_gradients(equation, adjoint, policy):
    """Two of them are rules of a `custom_vjp`, which `simulate` evaluates in float."""
    check(equation(adjoint), policy, gradient=True, bits=adjoint == "DirectAdjoint")


def test_both_ways_to_differentiate_the_steps_agree(equation):
    """With weights alone: rounded activations tip over ties, each way others."""

    def gradient(adjoint):
        model = equation(adjoint)
        plan = jqx.make_plan(model.f, POLICIES["w4a16"])(model.params, *model.batches[0])
        f = jqx.simulate(model.f, plan)
        loss = lambda params, start: jnp.sum(f(params, start) ** 2)  # noqa: E731
        return jax.jit(jax.grad(loss))(model.params, *model.batches[0])

    assert relative(gradient("RecursiveCheckpointAdjoint"), gradient("DirectAdjoint")) <= 1e-5


@pytest.fixture(scope="module")
def resnet50_of_haiku():
    """With the features of every group beside the logits."""
    hk = pytest.importorskip("haiku")

    def network(images, is_training):
        net = hk.nets.ResNet50(10, resnet_v2=False)
        features = {}

        def keep(call, args, kwargs, context):
            result = call(*args, **kwargs)
            if type(context.module).__name__ in ("BlockV1", "BlockGroup"):
                features[context.module.module_name] = result
            return result

        with hk.intercept_methods(keep):
            logits = net(images, is_training)
        return {**features, "logits": logits}

    pure = hk.without_apply_rng(hk.transform_with_state(network))
    batches = tuple((jax.random.normal(jax.random.key(k), (2, 64, 64, 3)),) for k in range(2))
    params, state = jax.jit(pure.init, static_argnums=2)(jax.random.key(0), *batches[0], True)
    rng = np.random.default_rng(0)
    for layer in params.values():  # last normalizations of blocks, and logits, start at zero
        if "scale" in layer and not np.any(layer["scale"]):
            layer["scale"] = jnp.asarray(rng.uniform(0.1, 0.5, layer["scale"].shape), jnp.float32)
        elif "b" in layer:
            layer["w"] = jnp.asarray(rng.normal(0, 2048**-0.5, layer["w"].shape), jnp.float32)
    # Statistics of 32 images: 128 values of a channel at the end, where few may be nearly equal,
    # and what normalizes them enlarges every error.
    many = jax.random.normal(jax.random.key(2), (32, 64, 64, 3))
    _, state = jax.jit(pure.apply, static_argnums=3)(params, state, many, True)
    # 50 contractions. A ReLU leaves a third of a normal number's square in its mean, which the next
    # normalization takes away, unlike errors: with those of shortcuts they count at most twice.
    f = lambda params, x: pure.apply(params, state, x, False)[0]  # noqa: E731
    return Model(f, params, batches, depth=2 * 50)


@pytest.fixture(scope="module")
def keras():
    os.environ["KERAS_BACKEND"] = "jax"
    library = pytest.importorskip("keras")
    library.utils.set_random_seed(0)
    return library


def model_of(network, batches, depth):
    """Returns a network as a function of its weights by path; the state of its layers is fixed."""
    fixed = [v.value for v in network.non_trainable_variables]
    paths = [v.path for v in network.trainable_variables]

    def f(params, *args):
        result, _ = network.stateless_call([params[p] for p in paths], fixed, *args, training=False)
        return result

    return Model(f, {v.path: v.value for v in network.trainable_variables}, batches, depth)


def images(count, size=64):
    keys = jax.random.split(jax.random.key(0), count)
    return tuple((jax.random.normal(key, (2, size, size, 3)),) for key in keys)


@pytest.fixture(scope="module")
def resnet50_of_keras(keras):
    """With the features of every block beside the result."""
    network = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)
    names = [layer.name for layer in network.layers if layer.name.endswith("_out")]
    assert len(names) == 16
    outputs = {name: network.get_layer(name).output for name in names}
    features = keras.Model(network.input, {**outputs, "probabilities": network.output})
    return model_of(features, images(2), depth=50)


@pytest.mark.parametrize("policy", ["w8a8", "w8a8 dynamic"])
@pytest.mark.parametrize(
    "network, count", [("resnet50_of_haiku", 16 + 4 + 1), ("resnet50_of_keras", 16 + 1)]
)
def test_resnet50_and_its_features(request, network, count, policy):
    model = request.getfixturevalue(network)
    integers = check(model, policy)
    assert len(integers) == count
    for name, feature in integers.items():
        least = least_cosine(policy, model.depth)
        assert cosine(feature, model.result[name]) >= least, name


@pytest.fixture(scope="module")
def mobilenet(keras):
    network = keras.applications.MobileNetV2(weights=None, input_shape=(64, 64, 3), classes=10)
    return model_of(network, images(2), depth=53)


@pytest.mark.parametrize("policy", ["w8a8", "w8a8 dynamic", "w8a16"])
def test_mobilenet_v2(mobilenet, policy):
    check(mobilenet, policy, gradient=policy == "w8a8")


@pytest.fixture(scope="module")
def transformer(keras):
    """Two blocks with attention among 16 tokens, before a layer for each token."""
    layers = keras.layers
    tokens = layers.Input((16,), dtype="int32")
    x = layers.Embedding(100, 64)(tokens)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 16)(y, y, use_causal_mask=True)
        y = layers.Dense(256, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(64)(y)
    network = keras.Model(tokens, layers.Dense(100)(layers.LayerNormalization()(x)))
    rng = np.random.default_rng(0)
    batches = tuple((rng.integers(0, 100, (4, 16)).astype(np.int32),) for _ in range(2))
    return model_of(network, batches, depth=9)


@pytest.mark.parametrize("policy", ["w8a8", "w8a8 dynamic", "w8a16", "w4a16"])
def test_a_transformer(transformer, policy):
    check(transformer, policy, gradient=policy == "w8a8")


NEW = 12
"""Tokens that are generated."""


@pytest.fixture(scope="module")
def transformers():
    library = pytest.importorskip("transformers", minversion="4.57")
    if not hasattr(library, "FlaxPreTrainedModel"):
        pytest.skip("this release of transformers has no Flax models: it needs transformers<5")
    return library


def tokens(seed, *shape, low=2):
    return jnp.asarray(np.random.default_rng(seed).integers(low, 100, shape), jnp.int32)


@pytest.fixture(scope="module")
def gpt2(transformers):
    config = transformers.GPT2Config(
        vocab_size=100, n_positions=64, n_embd=64, n_layer=2, n_head=4, eos_token_id=1
    )
    return transformers.FlaxGPT2LMHeadModel(config, seed=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_of_gpt2(gpt2, policy):
    def f(params, ids):
        return gpt2(ids, params=params).logits

    batches = ((tokens(0, 2, 10),), (tokens(1, 2, 10),))
    check(Model(f, gpt2.params, batches, depth=9), policy, gradient=policy == "w8a8")


@pytest.mark.parametrize("policy", POLICIES)
def test_gpt2_generates_with_its_cache(gpt2, policy):
    """Tokens are the same in `simulate`, `convert` and, where weights alone are quantized, the
    function of the dequantized weights.
    """

    def f(params, ids):
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        return gpt2.generate(ids, params=params, **options).sequences

    batches = ((tokens(0, 2, 6),), (tokens(1, 2, 6),))
    generated = check(Model(f, gpt2.params, batches, depth=9), policy)
    assert generated.shape == (2, 6 + NEW)


class OlderNumpy:
    """`jax.numpy` with `jnp.clip(x, a_max=...)`, which T5 says and jax 0.10 no longer takes."""

    def __getattr__(self, name):
        return getattr(jnp, name)

    def clip(self, x, a_min=None, a_max=None):
        return jnp.clip(x, a_min, a_max)


@pytest.fixture(scope="module")
def t5(transformers):
    transformers.models.t5.modeling_flax_t5.jnp = OlderNumpy()
    config = transformers.T5Config(
        vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.FlaxT5ForConditionalGeneration(config, seed=0)


@dataclasses.dataclass(frozen=True)
class Converted:
    """A linen module with codes in place of the parameters that transformers hands to it."""

    module: Any
    variables: Any

    def init(self, *args, **kwargs):
        return self.module.init(*args, **kwargs)

    def apply(self, variables, *args, **kwargs):
        state = {name: tree for name, tree in variables.items() if name != "params"}
        return self.module.apply({**self.variables, **state}, *args, **kwargs)


def around(model, module):
    """Returns a model of transformers around another module."""
    result = copy.copy(model)
    result._module = module
    return result


def call_of(ids, seed):
    """Arguments of the module of T5."""
    return {
        "input_ids": ids,
        "attention_mask": jnp.ones_like(ids),
        "decoder_input_ids": tokens(seed, 2, 6),
        "decoder_attention_mask": jnp.ones((2, 6), jnp.int32),
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_of_t5(t5, policy):
    depth = 2 * 4 + 2 * 6 + 1
    module = jqx.linen.quantize(t5.module, POLICIES[policy])
    variables = {"params": t5.params}
    ids, other = call_of(tokens(0, 2, 10), 1), call_of(tokens(2, 2, 10), 3)
    real = t5.module.apply(variables, **ids).logits
    plan = jqx.linen.make_plan(module, variables, **ids)
    if plan.static_specs():
        calibrate = module.clone(mode=jqx.linen.Mode.CALIBRATE)
        for batch in (other, ids):
            observed, new = calibrate.apply(variables, **batch, mutable=["quant_stats"])
            variables = {**variables, **new}
        assert relative(observed.logits, real) <= 1e-5

    def run(module, variables):
        return jax.jit(lambda variables: module.apply(variables, **ids).logits)(variables)

    simulated = run(module, variables)
    training = run(module.clone(backward=jnp.float32), variables)
    integers = module.clone(mode=jqx.linen.Mode.CONVERT)
    converted = jqx.linen.convert(integers, variables, **ids)
    result = run(integers, converted)
    weight_only = len(ERRORS[policy]) == 1
    noise = 1e-5 * depth if weight_only else np.sqrt(2) * relative(simulated, real)
    check_equal(result, simulated, noise)
    check_equal(result, training, noise if weight_only else 0)
    assert cosine(result, real) >= least_cosine(policy, depth)


@pytest.mark.parametrize("policy", ["w8a8 dynamic", "w4a16"])
def test_encode_and_generate_of_t5_run_through_linen_ptq(t5, policy):
    """Both call `module.apply(..., method=a function)`; `generate` carries a cache."""
    ids = tokens(0, 2, 10)
    module = jqx.linen.quantize(t5.module, POLICIES[policy])
    integers = module.clone(mode=jqx.linen.Mode.CONVERT)
    variables = jqx.linen.convert(integers, {"params": t5.params}, **call_of(ids, 1))

    def run(module):
        model = around(t5, module)
        encoded = jax.jit(lambda ids: model.encode(ids, params=t5.params).last_hidden_state)(ids)
        options = {"max_new_tokens": NEW, "do_sample": False}
        return encoded, model.generate(ids, params=t5.params, **options).sequences

    real, _ = run(t5.module)
    result, generated = run(Converted(integers, variables))
    training, expected = run(module.clone(backward=jnp.float32))
    # Beside rounded activations sums are of integers; beside floats they are in float32.
    check_equal(result, training, 0 if len(ERRORS[policy]) == 2 else 1e-5 * 8)
    np.testing.assert_array_equal(generated, expected)
    assert generated.shape == (2, 1 + NEW)
    assert 1e-4 < relative(result, real)  # which float would give
    assert cosine(result, real) >= least_cosine(policy, 8)


BATCH, LENGTH = 2, 12


DEPTH = 4 * (4 * 1 + 7) + 7 + 1
"""A gated product doubles the error of what enters it, whose square then counts four times: that of
the table before the first layer, those of the table and the first layer before the second. Each
layer has seven weights; last comes the head.
"""


def rest(ids):
    """Returns the other arguments of a call: positions, no cache, and a causal mask."""
    positions = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (BATCH, LENGTH, LENGTH))
    return positions, None, mask


@nnx.jit
def logits(model, ids):
    return model(ids, *rest(ids))[0]


@pytest.fixture(scope="module")
def llama():
    library = pytest.importorskip("tunix.models.llama3.model")
    config = library.ModelConfig(
        num_layers=2, vocab_size=100, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16,
        num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5,
    )  # fmt: skip
    model = library.Llama3(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)

    def draw(x):  # tunix starts the perceptrons at zero
        if x.ndim < 2:
            return x
        return jnp.asarray(rng.normal(0, np.prod(x.shape[:-1]) ** -0.5, x.shape), x.dtype)

    nnx.update(model, jax.tree.map(draw, nnx.state(model)))
    return model


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_of_llama(llama, policy):
    ids, other = (tokens(seed, BATCH, LENGTH, low=0) for seed in (0, 1))
    real = logits(llama, ids)
    model = jqx.nnx.quantize(llama, POLICIES[policy], mode=jqx.nnx.Mode.CALIBRATE)
    plan = jqx.nnx.make_plan(model, ids, *rest(ids))
    assert len(plan.weights) == 2 * 7 + 1 + any(site.op == "gather" for site in plan.sites)
    for batch in (other, ids):
        observed = logits(model, batch)
    assert relative(observed, real) <= 1e-5
    model.set_attributes(mode=jqx.nnx.Mode.SIMULATE)
    simulated = logits(model, ids)
    gradient = nnx.jit(nnx.grad(lambda model: jnp.mean(logits(model, ids) ** 2)))(model)
    assert np.isfinite(floats(gradient)).all() and np.any(floats(gradient))
    training = nnx.clone(model)
    training.set_attributes(backward=jnp.float32)
    trained = logits(training, ids)
    jqx.nnx.convert(model, ids, *rest(ids))
    result = logits(model, ids)
    weight_only = len(ERRORS[policy]) == 1
    allowed = 1e-5 * DEPTH if weight_only else np.sqrt(2) * relative(simulated, real)
    check_equal(result, simulated, allowed)
    np.testing.assert_array_equal(trained, result)
    assert cosine(result, real) >= least_cosine(policy, DEPTH)


def test_llama_decodes_with_its_cache(llama):
    """Token by token it gives what it gives of the whole sequence, in float and on integers."""
    ids, policy = tokens(0, BATCH, LENGTH, low=0), "w8a8 dynamic"
    model = jqx.nnx.quantize(llama, POLICIES[policy], mode=jqx.nnx.Mode.SIMULATE)
    jqx.nnx.convert(model, ids, *rest(ids))
    shape = (BATCH, LENGTH, 2, 16)
    cache = {
        f"layer_{i}": {
            "k": jnp.zeros(shape),
            "v": jnp.zeros(shape),
            "end_index": jnp.zeros(BATCH, jnp.int32),
        }
        for i in range(2)
    }

    @nnx.jit
    def step(model, token, index, cache):
        positions = jnp.full((BATCH, 1), index)
        mask = jnp.broadcast_to(jnp.arange(LENGTH) <= index, (BATCH, 1, LENGTH))
        return model(token, positions, cache, mask)

    results = []
    for index in range(LENGTH):
        y, cache = step(model, ids[:, index : index + 1], index, cache)
        results.append(y)
    # Scales are per token: a step rounds as the whole sequence does, but for ties that are tipped.
    real = logits(llama, ids)
    stepped = jnp.concatenate(results, 1)
    whole = logits(model, ids)
    assert relative(stepped, whole) <= np.sqrt(2) * relative(whole, real)
    assert cosine(stepped, real) >= least_cosine(policy, DEPTH)
