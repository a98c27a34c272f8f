"""Trains the scales of 2- and 3-bit weights and activations (LSQ), beside fixed absmax scales.

Five float networks, each of its own seed and data split, are trained on with quantization in the
loop: once with scales fixed at the largest magnitudes, once with scales that are parameters of
their own. All seeds train at once, under vmap. Prints the paired test accuracies and asserts that
learned scales win.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jqx

SIZES, BATCH, EPOCHS, SEEDS = (64, 64, 32, 10), 64, 25, range(5)


def network(params, x):
    """Logits of images `x`; it knows nothing of quantization."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def initial(key):
    """Returns parameters of one network."""
    shapes = zip(jax.random.split(key, 3), SIZES[:-1], SIZES[1:], strict=True)
    return [
        {"w": jax.random.normal(k, (m, n)) * np.sqrt(2 / m), "b": jnp.zeros(n)}
        for k, m, n in shapes
    ]


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


def accuracy(apply, variables, data):
    """Percent of images told right, for each seed."""
    right = jax.vmap(lambda v, x, y: apply(v, x).argmax(-1) == y)(variables, *data)
    return 100 * np.mean(right, axis=1)


def show(name, values):
    """Prints one row: a number for each seed, and their mean."""
    print(name.ljust(24), *(f"{value:6.2f}" for value in values), f" mean {np.mean(values):6.2f}")


def quantized(bits, gradient):
    """Returns how weights, and activations, are quantized: those are never negative."""
    weight = jqx.QSpec(jqx.numerics.Integer(bits), jqx.per_channel(), gradient=gradient)
    unsigned, minmax = jqx.numerics.Integer(bits, signed=False), jqx.calibrators.minmax
    activation = jqx.QSpec(unsigned, symmetric=False, calibrator=minmax, gradient=gradient)
    return jqx.Policy([jqx.Rule(weight=weight, activation=activation)])


images, labels = load_digits(return_X_y=True)
splits = [
    train_test_split(images.astype(np.float32) / 16, labels, test_size=0.3, random_state=seed)
    for seed in SEEDS
]
train_x, test_x, train_y, test_y = (
    jnp.stack([jnp.asarray(part) for part in parts]) for parts in zip(*splits, strict=True)
)
params = jax.vmap(initial)(jax.random.split(jax.random.key(0), len(SEEDS)))
params = train(network, params, (train_x, train_y), 3e-3)
show("float32", accuracy(network, params, (test_x, test_y)))

one = jax.tree.map(lambda leaf: leaf[0], params)
for bits in (2, 3):
    scores = {}
    for name, gradient in {"fixed": jqx.gradients.ste, "learned": jqx.gradients.lsq}.items():
        plan = jqx.make_plan(network, quantized(bits, gradient))(one, train_x[0])

        def scales_of(params, images, plan=plan):
            """Scales of the float network: of its activations, and of its weights."""
            known = jqx.affines(plan, jqx.calibrate(network, plan)(params, images)[1])
            for weight in plan.weights:
                layer = int(weight.path.split("/")[0])
                known[weight.key] = weight.spec.calibrator.fit(params[layer]["w"], weight.spec)
            return {key: affine.scale for key, affine in known.items()}

        def apply(variables, x, plan=plan, learned=name == "learned"):
            params, scales = variables
            scales = scales if learned else jax.lax.stop_gradient(scales)
            zero = {key: None if key.endswith(":weight") else jnp.uint8([[0]]) for key in scales}
            known = {key: jqx.calibrators.Affine(s, zero[key]) for key, s in scales.items()}
            return jqx.simulate(network, plan, known)(params, x)

        start = (params, jax.vmap(scales_of)(params, train_x))
        trained = train(apply, start, (train_x, train_y), 1e-3)
        scores[name] = accuracy(apply, trained, (test_x, test_y))
        show(f"{bits} bits, {name} scales", scores[name])
    gain = scores["learned"] - scores["fixed"]
    show("        learned - fixed", gain)
    assert gain.mean() > 0
