"""Quantization-aware training with learned scales (LSQ), beside quantization after training.

Five float networks, each of its own seed and split of scikit-learn's digits, are quantized to 2
bits, weights and activations, with one scale a layer: after training; by training on with fixed
scales; and by training weights and scales together, with `jax.grad` of `jqx.simulate` with respect
to both. A scan runs over stacked layers; all seeds train at once, under vmap. Prints the test
accuracies of the integer networks from two kinds of first scales, and asserts what is learned:
trained scales make good for poor ones, and are as good as the best fixed ones.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jqx

LAYERS, WIDTH, BATCH, EPOCHS, SEEDS = 3, 64, 64, 20, range(5)


def network(params, x):
    """Logits of images `x`; it knows nothing of quantization."""
    x = jnp.tanh(x @ params["first"])
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return x @ params["last"]


def initial(key):
    """Returns parameters of one network."""
    shapes = {"first": (64, WIDTH), "layers": (LAYERS, WIDTH, WIDTH), "last": (WIDTH, 10)}
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / np.sqrt(shape[-2])
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


@functools.partial(jax.jit, static_argnums=(0, 3))
def train(apply, variables, data, rate):
    """Minimises the cross-entropy of `apply(variables, images)` with Adam, for every seed."""
    steps = len(data[0][0]) // BATCH
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, EPOCHS * steps))

    def loss(variables, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(apply(variables, x), y).mean()

    def of_one_seed(variables, images, labels, key):
        def step(state, batch):
            gradients = jax.grad(loss)(state[0], images[batch], labels[batch])
            updates, momenta = optimizer.update(gradients, state[1])
            return (optax.apply_updates(state[0], updates), momenta), None

        orders = jax.vmap(lambda key: jax.random.permutation(key, len(images))[: steps * BATCH])
        batches = orders(jax.random.split(key, EPOCHS)).reshape(-1, BATCH)
        return jax.lax.scan(step, (variables, optimizer.init(variables)), batches)[0][0]

    keys = jax.random.split(jax.random.key(1), len(SEEDS))
    return jax.vmap(of_one_seed)(variables, *data, keys)


def show(name, apply, variables, data):
    """Prints and returns the percent of images told right: for each seed, and on average."""
    right = jax.jit(jax.vmap(lambda v, x, y: apply(v, x).argmax(-1) == y))(variables, *data)
    scores = 100 * np.mean(right, axis=1)
    print(name.ljust(22), *(f"{score:6.2f}" for score in scores), f" mean {scores.mean():6.2f}")
    return scores


images, labels = load_digits(return_X_y=True)
splits = [
    train_test_split(images.astype(np.float32) / 8 - 1, labels, test_size=0.3, random_state=seed)
    for seed in SEEDS
]
train_x, test_x, train_y, test_y = (
    jnp.stack([jnp.asarray(part) for part in parts]) for parts in zip(*splits, strict=True)
)
seen, unseen = (train_x, train_y), (test_x, test_y)
params = jax.vmap(initial)(jax.random.split(jax.random.key(0), len(SEEDS)))
params = train(network, params, seen, 3e-3)
show("float32", network, params, unseen)

scores = {}
for name, calibrator in (("absmax", jqx.calibrators.absmax), ("mse", jqx.calibrators.mse)):
    two_bits = jqx.QSpec(jnp.int2, calibrator=calibrator, gradient=jqx.gradients.lsq)
    each_layer = dataclasses.replace(two_bits, granularity=jqx.per_axis(0))
    rules = [
        jqx.Rule("layers", weight=each_layer, activation=two_bits),
        jqx.Rule(weight=two_bits, activation=two_bits),
    ]
    plan = jqx.make_plan(network, jqx.Policy(rules))(initial(jax.random.key(0)), train_x[0])

    def calibrated(params, images, plan=plan):
        """Returns the weights, and every scale: of activations and, by path, of weights."""
        affines = jqx.affines(plan, jqx.calibrate(network, plan)(params, images)[1])
        quantized = jqx.quantize_params(params, plan)
        for weight in plan.weights:
            affines[weight.key] = jqx.calibrators.Affine(quantized[weight.path].scale)
        return params, affines

    def learned(variables, x, plan=plan):
        """The network in training: both variables get gradients."""
        params, affines = variables
        return jqx.simulate(network, plan, affines)(params, x)

    def fixed(variables, x, learned=learned):
        """The same, where scales get none."""
        params, affines = variables
        return learned((params, jax.lax.stop_gradient(affines)), x)

    def integers(variables, x, plan=plan):
        """The network on integers."""
        params, affines = variables
        quantized = jqx.quantize_params(params, plan, affines)
        return jqx.convert(network, plan, affines)(quantized, x)

    start = jax.jit(jax.vmap(calibrated))(params, train_x)
    ways = {
        "after training": start,
        "fixed scales": train(fixed, start, seen, 3e-3),
        "learned scales": train(learned, start, seen, 3e-3),
    }
    for way, variables in ways.items():
        scores[name, way] = show(f"{name}, {way}", integers, variables, unseen)

for name in ("absmax", "mse"):
    assert scores[name, "learned scales"].mean() > scores["mse", "after training"].mean() + 3
assert scores["absmax", "learned scales"].mean() > scores["absmax", "fixed scales"].mean()
assert scores["mse", "learned scales"].mean() > scores["mse", "fixed scales"].mean() - 1.5
print("Claims hold: learned scales win over training alone, and over scales fixed at absmax.")
