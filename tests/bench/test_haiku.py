"""dm-haiku: its ResNet50."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .checks import Model, check, cosine, least_cosine

pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def resnet50():
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


@pytest.mark.parametrize("policy", ["w8a8", "w8a8 dynamic"])
def test_resnet50_and_its_features(resnet50, policy):
    integers = check(resnet50, policy)
    assert len(integers) == 16 + 4 + 1
    for name, feature in integers.items():
        least = least_cosine(policy, resnet50.depth)
        assert cosine(feature, resnet50.result[name]) >= least, name
