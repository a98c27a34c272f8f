"""Quantization-aware training with learned scales (LSQ), compared with post-training quantization.

Five float networks, each with its own seed and split of scikit-learn's digits, are quantized to
2-bit weights and activations with one scale per layer, in three ways: after training; by further
training with fixed scales; and by training weights and scales together, with `jax.grad` of
`jqx.simulate` with respect to both. A scan runs over stacked layers, and all seeds train at once
under vmap. The initial scales come from the largest magnitude (absmax), or from a search for the
least squared error (mse).

Prints for the integer networks the test accuracy of each seed, the losses in training and in the
test, and the ratio of the scales of weights to those that a search finds for the same weights.
Asserts that learned scales correct poor initial ones, and reach the lowest loss in training.

In the test, a learned scale can still lose to a searched one: the last two rows have losses of
0.147 and 0.157. Learning minimises the training loss, and reaches 0.009, where fixed scales from a
search reach 0.011. For this the scales grow to 1.4 times what a search would find for the same
weights, and approximate the weights less well. A search ignores the loss and stays close to the
float network, which generalises. Both networks have memorised nearly all of their 1,257 images, so
the lower loss gains nothing: the accuracies of 96.0 and 95.9 % differ by less than their standard
error of 0.4, and their order changes with the order of the batches. Learn scales if the initial
ones are poor or if you have much data. Otherwise fixed scales from a search are as good.

Needs `pip install -e ".[examples]"`. Takes a minute on two cores.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jqx

LAYERS, WIDTH, BATCH, EPOCHS, SEEDS = 3, 64, 64, 20, range(5)


def network(params, x):
    """Returns logits of images `x`. There is no quantization in it."""
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


def loss_of(apply, variables, images, labels):
    """Returns the mean cross-entropy of `apply(variables, images)`."""
    logits = apply(variables, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(title, apply, variables, data, rate=3e-3):
    """Minimises the loss with Adam, for every seed."""
    steps = len(data[0][0]) // BATCH
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, EPOCHS * steps))

    def of_one_seed(state, images, labels, key):
        def step(state, batch):
            gradients = jax.grad(loss_of, 1)(apply, state[0], images[batch], labels[batch])
            updates, moments = optimizer.update(gradients, state[1])
            return (optax.apply_updates(state[0], updates), moments), None

        order = jax.random.permutation(key, len(images))[: steps * BATCH]
        return jax.lax.scan(step, state, order.reshape(steps, BATCH))[0]

    epoch = jax.jit(jax.vmap(of_one_seed))
    state = (variables, jax.vmap(optimizer.init)(variables))
    keys = jax.random.split(jax.random.key(1), (EPOCHS, len(SEEDS)))
    for key in tqdm(keys, desc=title, ncols=80, leave=False, disable=None):
        state = epoch(state, *data, key)
    return state[0]


def plan_of(calibrator):
    """Plans 2 bits for weights and activations, with one scale per layer."""
    two_bits = jqx.QSpec(jnp.int2, calibrator=calibrator, gradient=jqx.gradients.lsq)
    each_layer = dataclasses.replace(two_bits, granularity=jqx.per_axis(0))
    rules = [
        jqx.Rule("layers", weight=each_layer, activation=two_bits),
        jqx.Rule(weight=two_bits, activation=two_bits),
    ]
    return jqx.make_plan(network, jqx.Policy(rules))(initial(jax.random.key(0)), train_x[0])


def scales_of(plan, params):
    """Returns the scales that the calibrator of a plan finds for weights, by key."""
    quantized = jqx.quantize_params(params, plan)
    return {w.key: jqx.calibrators.Affine(quantized[w.path].scale) for w in plan.weights}


def calibrated(plan, params, images):
    """Returns the weights, and the scales of activations and weights."""
    stats = jqx.calibrate(network, plan)(params, images)[1]
    return params, jqx.affines(plan, stats, params)


def learned(plan, variables, x):
    """Runs the network in training: weights and scales get gradients."""
    params, affines = variables
    return jqx.simulate(network, plan, affines)(params, x)


def fixed(plan, variables, x):
    """Runs the network in training with fixed scales, which get no gradients."""
    params, affines = variables
    return learned(plan, (params, jax.lax.stop_gradient(affines)), x)


def integers(plan, variables, x):
    """Runs the network on integers."""
    params, affines = variables
    quantized = jqx.quantize_params(params, plan, affines)
    return jqx.convert(network, plan, affines)(quantized, x)


def judge(apply, variables):
    """Returns the test accuracy of each seed in percent, and the training and test losses."""

    def of_one_seed(variables, *data):
        losses = [loss_of(apply, variables, *part) for part in (data[:2], data[2:])]
        return jnp.mean(apply(variables, data[2]).argmax(-1) == data[3]), losses

    right, losses = jax.jit(jax.vmap(of_one_seed))(variables, *seen, *unseen)
    return 100 * np.asarray(right), [float(x.mean()) for x in losses]


def growth(variables):
    """Returns the mean ratio of scales of weights to those that a search finds for them."""
    params, affines = variables
    best = jax.jit(jax.vmap(functools.partial(scales_of, plan_of(jqx.calibrators.mse))))(params)
    return np.mean([np.mean(affines[key].scale / best[key].scale) for key in best])


def show(name, apply, variables):
    """Prints the results of `judge`, and returns the mean accuracy and the losses."""
    right, losses = judge(apply, variables)
    each = "".join(f"{score:7.2f}" for score in (*right, right.mean()))
    ratio = f"{growth(variables):13.2f}" if isinstance(variables, tuple) else ""
    print(f"{name:22}{each}{losses[0]:12.4f}{losses[1]:10.4f}{ratio}", flush=True)
    return right.mean(), *losses


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
params = train("float32", network, params, seen)
titles = [f"{f'seed {seed}':>7}" for seed in SEEDS]
print(f"{'':22}{''.join(titles)}   mean  train loss test loss scale/search")
show("float32", network, params)

found = {}
for name, calibrator in (("absmax", jqx.calibrators.absmax), ("mse", jqx.calibrators.mse)):
    plan = plan_of(calibrator)
    start = jax.jit(jax.vmap(functools.partial(calibrated, plan)))(params, train_x)
    ways = {"after training": None, "fixed scales": fixed, "learned scales": learned}
    for way, apply in ways.items():
        title, variables = f"{name}, {way}", start
        if apply is not None:
            variables = train(title, functools.partial(apply, plan), start, seen)
        row = show(title, functools.partial(integers, plan), variables)
        found[name, way] = dict(zip(("right", "seen", "unseen"), row, strict=True))

best = found["mse", "fixed scales"]
for name in ("absmax", "mse"):
    assert found[name, "learned scales"]["right"] > found["mse", "after training"]["right"] + 3
assert found["absmax", "learned scales"]["right"] > found["absmax", "fixed scales"]["right"]
assert best["right"] - 1.5 < found["mse", "learned scales"]["right"]
assert found["mse", "learned scales"]["seen"] < best["seen"]
print(
    "Claims hold: learned scales are better than quantization after training, and than scales "
    "fixed at absmax. They reach a lower training loss than fixed scales from a search."
)
