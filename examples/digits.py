"""Quantizes a plain JAX function on real data: scikit-learn's 1,797 scanned digits.

Trains `network` in float32, then, without changing it: plans, calibrates and converts it to int8,
shows what 2-bit weights cost, and trains 2-bit weights with quantization in the loop. Prints one
table, saves one picture (digits.png), and asserts what it claims.
"""

import re
import timeit
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jqx

SIZES, BATCH, EPOCHS = (64, 128, 64, 10), 64, 60


def network(params, x):
    """Logits of images `x`; it knows nothing of quantization."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def train(apply, params, images, labels, rate, title):
    """Minimises the cross-entropy of `apply(params, images)` with Adam."""
    steps = len(images) // BATCH
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, EPOCHS * steps))

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()

    def step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state[0], *batch)
        updates, momenta = optimizer.update(gradients, state[1])
        return (optax.apply_updates(state[0], updates), momenta), value

    @jax.jit
    def epoch(state, key):
        order = jax.random.permutation(key, len(images))[: steps * BATCH].reshape(steps, BATCH)
        return jax.lax.scan(step, state, (images[order], labels[order]))

    state = (params, optimizer.init(params))
    bar = tqdm(jax.random.split(jax.random.key(1), EPOCHS), desc=title, ncols=80)
    for key in bar:
        state, losses = epoch(state, key)
        bar.set_postfix(loss=f"{losses.mean():.4f}")
    return state[0]


images, labels = load_digits(return_X_y=True)
split = train_test_split(images.astype(np.float32) / 16, labels, test_size=0.3, random_state=0)
train_x, test_x, train_y, test_y = map(jnp.asarray, split)
shapes = zip(jax.random.split(jax.random.key(0), 3), SIZES[:-1], SIZES[1:], strict=True)
params = [
    {"w": jax.random.normal(k, (m, n)) * np.sqrt(2 / m), "b": jnp.zeros(n)} for k, m, n in shapes
]
params = train(network, params, train_x, train_y, 3e-3, "float32")

# 1. Plan: which contractions, and how. Prints as a table.
static = jqx.make_plan(network, jqx.presets.w8a8())(params, train_x)
dynamic = jqx.make_plan(network, jqx.presets.w8a8_dynamic())(params, train_x)
policy = jqx.presets.w8a8_dynamic(weight={"qtype": jnp.int2})
two_bit = jqx.make_plan(network, policy)(params, train_x)
print(static)

# 2. Calibrate: statistics of every batch, merged; then the scales.
observe = jax.jit(jqx.calibrate(network, static))
stats = observe(params, train_x[:256])[1]
for start in range(256, len(train_x), 256):
    stats = jqx.merge_stats(static, stats, observe(params, train_x[start : start + 256])[1])
affines = jqx.affines(static, stats)

# 3. Train with 2-bit weights in the loop, from the float weights on.
trained = train(jqx.simulate(network, two_bit), params, train_x, train_y, 1e-3, "int2 QAT")

# 4. Convert: integers from here on.
schemes = {
    "float32": (network, params),
    "W8A8 static": (jqx.convert(network, static, affines), jqx.quantize_params(params, static)),
    "W8A8 dynamic": (jqx.convert(network, dynamic), jqx.quantize_params(params, dynamic)),
    "W2A8 PTQ": (jqx.convert(network, two_bit), jqx.quantize_params(params, two_bit)),
    "W2A8 QAT": (jqx.convert(network, two_bit), jqx.quantize_params(trained, two_bit)),
}
accuracy, dots, reference = {}, {}, jnp.argmax(network(params, test_x), axis=-1)
print(f"\n{'scheme':14}{'accuracy':>10}{'weight bytes':>14}{'agreement':>11}{'median ms':>11}")
for name, (apply, weights) in schemes.items():
    compiled = jax.jit(apply).lower(weights, test_x).compile()
    guess = jnp.argmax(compiled(weights, test_x), axis=-1)
    accuracy[name] = 100 * float(jnp.mean(guess == test_y))
    agreement = 100 * float(jnp.mean(guess == reference))
    dots[name] = len(re.findall(r"= s32\[[\d,]*\]\S* dot\(", compiled.as_text()))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    call = partial(compiled, weights, test_x)
    times = timeit.repeat(lambda call=call: jax.block_until_ready(call()), number=1, repeat=50)
    row = f"{name:14}{accuracy[name]:9.2f}%{size:14,}{agreement:10.2f}%"
    print(f"{row}{1e3 * np.median(times):11.3f}")
print(f"(JAX holds int2 one code to a byte.) Integer dots in the optimized HLO: {dots}")

figure = Figure(figsize=(13, 3.6), layout="constrained")
bars, *histograms = figure.subplots(1, 3)
bars.bar_label(bars.barh(list(accuracy), list(accuracy.values())), fmt="%.1f %%", padding=2)
bars.set(title="test accuracy", xlim=(0, 115), ylim=(4.6, -0.6))
grids = [("int8, float training", params, static), ("int2, trained with it", trained, two_bit)]
for axis, (title, tree, plan) in zip(histograms, grids, strict=True):
    q = jqx.quantize_params(tree, plan)[0]["w"]
    axis.hist((tree[0]["w"] / q.scale).ravel(), bins=120)  # each in units of its own scale
    for code in range(int(q.values.min()), int(q.values.max()) + 1):
        axis.axvline(code, color="black", lw=0.4, alpha=0.5)
    axis.set(title=f"layer 0, {title}", xlabel="weight / scale; lines are the codes")
figure.savefig("digits.png", dpi=120)

assert abs(accuracy["W8A8 static"] - accuracy["float32"]) <= 0.5
assert abs(accuracy["W8A8 dynamic"] - accuracy["float32"]) <= 0.5
assert accuracy["W2A8 QAT"] >= min(accuracy["W2A8 PTQ"] + 10, 96)
assert dots["W8A8 static"] == dots["W8A8 dynamic"] == 3 and dots["float32"] == 0
print("Claims hold: W8A8 within 0.5 points of float32, 2-bit weights trained back. See digits.png.")
