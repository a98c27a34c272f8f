"""Which layer hurts? A network on scikit-learn's digits, diagnosed and mended.

Trains a convolutional network in plain JAX and quantizes its weights to 2 bits, which costs it many
of its digits. `report` and `compare` say what becomes of each weight and of each layer's results,
`sensitivity` what each costs the network; `search` gives each weight 2 to 8 bits, 5 on average with
scales. Prints the tables, saves a picture (diagnose.png), and asserts that the mixture is nearer to
float32 than 5 bits for all, in fewer bytes.

Needs `pip install -e ".[examples]"`. Takes a minute on two cores.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jqx
from jqx.diagnostics import Bits, plots, search, sensitivity

BATCH, EPOCHS = 64, 15
SHAPES = {
    "conv_0": (3, 3, 1, 16),
    "conv_1": (3, 3, 16, 32),
    "conv_2": (3, 3, 32, 32),
    "dense_0": (128, 64),
    "dense_1": (64, 10),
}


def network(params, x):
    """Logits of images; it knows nothing of quantization."""
    for name in ("conv_0", "conv_1", "conv_2"):
        x = jax.lax.conv_general_dilated(
            x, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
        if name != "conv_0":
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["dense_0"])
    return x @ params["dense_1"]


def train(params, images, labels):
    """Minimises the cross-entropy with Adam."""
    steps = len(images) // BATCH
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, EPOCHS * steps))

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(network(params, x), y).mean()

    def step(state, batch):
        gradients = jax.grad(loss)(state[0], images[batch], labels[batch])
        updates, moments = optimizer.update(gradients, state[1])
        return (optax.apply_updates(state[0], updates), moments), None

    @jax.jit
    def epoch(state, key):
        order = jax.random.permutation(key, len(images))[: steps * BATCH]
        return jax.lax.scan(step, state, order.reshape(steps, BATCH))[0]

    state = (params, optimizer.init(params))
    keys = jax.random.split(jax.random.key(1), EPOCHS)
    for key in tqdm(keys, desc="train", ncols=80, disable=None):
        state = epoch(state, key)
    return state[0]


def divergence(logits, plain):
    """How far the probabilities of the quantized network are from those of the float one (KL)."""
    logs, reference = jax.nn.log_softmax(logits), jax.nn.log_softmax(plain)
    return jnp.mean(jnp.sum(jnp.exp(reference) * (reference - logs), axis=-1))


def weights_of(bits):
    """A policy of weights with so many bits, one scale a channel, found by least squares."""
    qtype = getattr(jqx.numerics, f"int{bits}", f"int{bits}")
    return jqx.presets.w8a16(weight={"qtype": qtype, "calibrator": jqx.calibrators.mse})


images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
split = train_test_split(images, labels, test_size=0.3, random_state=0)
train_x, test_x, train_y, test_y = map(jnp.asarray, split)
keys = jax.random.split(jax.random.key(0), len(SHAPES))
params = {
    name: jax.random.normal(key, shape) * np.sqrt(2 / np.prod(shape[:-1]))
    for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
}
params = train(params, train_x, train_y)
calibration = train_x[:512]

# What do 2 bits do to each weight, and to the results of each layer?
two = jqx.make_plan(network, weights_of(2))(params, calibration)
print(jqx.report(two, params), end="\n\n")
compared = jqx.compare(network, two)(params, calibration)
print(compared, end="\n\n")

# What does each weight cost the network?
costs = sensitivity(network, two, divergence)(params, calibration)
print(costs, end="\n\n")

# Bits where they count: 5 for a weight on average, scales included.
ways = {f"{bits} bits": weights_of(bits) for bits in (2, 3, 4, 5, 6, 8)}
found = search(network, two, ways, Bits(5), metric=divergence)(params, calibration)
print(found, end="\n\n")

scores = {}
for name, policy in {"float32": None, **ways, "mixed": found.policy}.items():
    f = network if policy is None else jqx.simulate(network, policy)
    logits = jax.jit(f)(params, test_x)
    right = 100 * float((logits.argmax(-1) == test_y).mean())
    scores[name] = float(divergence(logits, network(params, test_x)))
    print(f"{name:8}{right:7.2f} % of test images, divergence {scores[name]:.5f}")

sheet = Figure(figsize=(16, 4.4), layout="constrained")
left, middle, right = sheet.subplots(1, 3)
plots.histogram(params["dense_0"], jqx.quantize_params(params, two)["dense_0"], ax=left)
plots.sqnr_bars(compared, ax=middle)
plots.front(found, ax=right)
sheet.savefig("diagnose.png", dpi=120)

assert costs.ranked[0].cost > 2 * costs.ranked[-1].cost
assert found.bytes < found.uniform["5 bits"][0] and scores["mixed"] < scores["5 bits"]
print("Claims hold: the mixture is nearer to float32 than 5 bits for all. See diagnose.png.")
