"""Which layer hurts? A network on scikit-learn's digits, diagnosed and mended.

Trains a convolutional network in plain JAX and quantizes its weights to 2 bits, which costs it many
of its digits. `report` and `compare` say what becomes of each weight and of each layer's results,
`sensitivity` how much nearer to float32 the network is if one weight stays in float; `search` gives
each weight 2 to 8 bits, 4.25 on average with scales. Prints the tables, saves a picture
(diagnose.png), and asserts on test images that 8 bits mend more for the weight that `sensitivity`
ranks first than for the last, and that the mixture is nearer to float32 than 4 bits for all.

Needs `pip install -e ".[examples]"`. Takes half a minute on two cores.
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

BATCH, EPOCHS = 64, 8
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

    @jax.jit
    def step(params, moments, batch):
        gradients = jax.grad(loss)(params, images[batch], labels[batch])
        updates, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(params, updates), moments

    moments, keys = optimizer.init(params), jax.random.split(jax.random.key(1), EPOCHS)
    for key in tqdm(keys, desc="train", ncols=80, disable=None):
        order = jax.random.permutation(key, len(images))[: steps * BATCH]
        for batch in order.reshape(steps, BATCH):
            params, moments = step(params, moments, batch)
    return params


def divergence(logits, plain):
    """How far the probabilities of the quantized network are from those of the float one (KL)."""
    logs, reference = jax.nn.log_softmax(logits), jax.nn.log_softmax(plain)
    return jnp.mean(jnp.sum(jnp.exp(reference) * (reference - logs), axis=-1))


def weights_of(bits, path=".*"):
    """A policy of weights with so many bits, one scale a channel, found by least squares."""
    qtype = getattr(jqx.numerics, f"int{bits}", f"int{bits}")
    return jqx.presets.w8a16(path, weight={"qtype": qtype, "calibrator": jqx.calibrators.mse})


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

# What do 2 bits do to each weight, and to the results of each layer?
two = jqx.make_plan(network, weights_of(2))(params, train_x)
print(jqx.report(two, params), end="\n\n")
compared = jqx.compare(network, two)(params, train_x)
print(compared, end="\n\n")

# How much nearer is the network to float32 if only this weight is left in float?
costs = sensitivity(network, two, divergence, estimate="all_but_one")(params, train_x)
print(costs, end="\n\n")

# Bits where they count: 4.25 for a weight on average, scales included.
ways = {f"{bits} bits": weights_of(bits) for bits in (2, 3, 4, 5, 8)}
found = search(network, two, ways, Bits(4.25), metric=divergence)(params, train_x)
print(found, end="\n\n")

# On test images: 8 bits for one weight of five, one after another, and the mixture.
policies = {"2 bits": weights_of(2)}
for row in costs.ranked:
    policies[f"8 bits for {row.path}"] = weights_of(8, row.path) + weights_of(2)
policies |= {"4 bits": ways["4 bits"], "mixed": found.policy}
logits_of = jax.jit(lambda params: network(params, test_x))
plain = logits_of(params)
scores = {}
for name, policy in {"float32": None, **policies}.items():
    logits = plain
    if policy is not None:
        plan = jqx.make_plan(network, policy)(params, test_x)
        logits = logits_of(jqx.dequantize_params(jqx.quantize_params(params, plan)))
    right = 100 * float((logits.argmax(-1) == test_y).mean())
    scores[name] = float(divergence(logits, plain))
    print(f"{name:18}{right:7.2f} % of test images, divergence {scores[name]:.5f}")

sheet = Figure(figsize=(16, 4.4), layout="constrained")
left, middle, right = sheet.subplots(1, 3)
plots.histogram(params["dense_0"], jqx.quantize_params(params, two)["dense_0"], ax=left)
plots.sqnr_bars(compared, ax=middle)
plots.front(found, ax=right)
sheet.savefig("diagnose.png", dpi=120)

worst, best = (f"8 bits for {row.path}" for row in (costs.ranked[0], costs.ranked[-1]))
assert scores[worst] < scores[best] < scores["2 bits"]
assert found.bits <= 4.25 and scores["mixed"] < scores["4 bits"]
print("Claims hold: 8 bits mend most where sensitivity says so, and the mixture is nearer to")
print("float32 than 4 bits for all. See diagnose.png.")
