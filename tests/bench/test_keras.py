"""Keras 3 on JAX, through `stateless_call`: networks of `keras.applications`, and a transformer."""

import os

import jax
import numpy as np
import pytest

from .checks import Model, check, cosine, least_cosine

pytestmark = pytest.mark.bench


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
def resnet50(keras):
    """With the features of every block beside the result."""
    network = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)
    names = [layer.name for layer in network.layers if layer.name.endswith("_out")]
    assert len(names) == 16
    outputs = {name: network.get_layer(name).output for name in names}
    features = keras.Model(network.input, {**outputs, "probabilities": network.output})
    return model_of(features, images(2), depth=50)


@pytest.mark.parametrize("policy", ["w8a8", "w8a8 dynamic"])
def test_resnet50_and_its_features(resnet50, policy):
    integers = check(resnet50, policy)
    for name, feature in integers.items():
        least = least_cosine(policy, resnet50.depth)
        assert cosine(feature, resnet50.result[name]) >= least, name


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
