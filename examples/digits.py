"""Quantizes a plain JAX function on real data: scikit-learn's 1,797 scanned digits.

Trains `network` in float32. Then, without changing it, `jqx.ptq` makes integer networks from it: in
int8, and with 2-bit weights, which are rounded to nearest or chosen by GPTQ. Finally, the 2-bit
weights are trained with quantization in the loop. Prints one table of accuracies, packed bytes and
times, saves one picture (digits.png), and asserts what it claims.

Needs `pip install -e ".[examples]"`. Takes half a minute on two cores.
"""

import itertools
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
INTEGER_PRODUCT = (  # of XLA, of jqx-cpu, or of oneDNN inside of jaxlib
    r"= s32\[[\d,]*\]\S* dot\(|custom_call_target=\"(?:jqx_cpu_\w*product|__onednn\$matmul)"
)


def network(params, x):
    """Returns logits of images `x`. There is no quantization in it."""
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
    def epoch(state, order):
        return jax.lax.scan(step, state, (images[order], labels[order]))

    rng, state = np.random.default_rng(1), (params, optimizer.init(params))
    bar = tqdm(range(EPOCHS), desc=title, ncols=80, disable=None)
    for _ in bar:
        order = rng.permutation(len(images))[: steps * BATCH].reshape(steps, BATCH)
        state, losses = epoch(state, order)
        bar.set_postfix(loss=f"{losses.mean():.4f}")
    return state[0]


def packed(params):
    """Packs 2-bit weights, four to a byte, and leaves all others unchanged."""

    def is_quantized(leaf):
        return isinstance(leaf, jqx.QTensor)

    def pack(leaf):
        return leaf.pack(0) if is_quantized(leaf) and leaf.qtype == jnp.int2 else leaf

    return jax.tree.map(pack, params, is_leaf=is_quantized)


images, labels = load_digits(return_X_y=True)
split = train_test_split(images.astype(np.float32) / 16, labels, test_size=0.3, random_state=0)
train_x, test_x, train_y, test_y = map(jnp.asarray, split)
rng = np.random.default_rng(0)
params = [
    {"w": jnp.float32(rng.normal(0, np.sqrt(2 / m), (m, n))), "b": jnp.zeros(n)}
    for m, n in itertools.pairwise(SIZES)
]
params = train(network, params, train_x, train_y, 3e-3, "float32")

# 1. Quantize after training: one call plans, calibrates on batches and chooses codes.
batches = [train_x[i : i + 256] for i in range(0, 1024, 256)]
int2 = jqx.presets.w8a8_dynamic(weight={"qtype": jnp.int2})
quantize = {
    "W8A8 static": jqx.ptq(network, jqx.presets.w8a8()),
    "W8A8 dynamic": jqx.ptq(network, jqx.presets.w8a8_dynamic()),
    "W2A8 rounded": jqx.ptq(network, int2, jqx.algorithms.nearest(), target=False),
    "W2A8 GPTQ": jqx.ptq(network, int2, target=False),  # what jqx chooses for weights of 2 bits
}
quantized = {name: of(params, batches) for name, of in quantize.items()}
print(quantized["W8A8 static"].plan, quantized["W8A8 static"].report, sep="\n\n")

# 2. Train with 2-bit weights in the loop, starting from the float weights; then round them.
simulated = jqx.simulate(network, quantized["W2A8 rounded"].plan)
trained = train(simulated, params, train_x, train_y, 1e-3, "2-bit weights")
quantized["W2A8 trained"] = quantize["W2A8 rounded"](trained, batches)

# 3. Compare. The 2-bit weights stay packed, four to a byte, when the network runs.
schemes = {"float32": (network, params)}
schemes |= {name: (q.function, packed(q.params)) for name, q in quantized.items()}
accuracy, sizes, products = {}, {}, {}
reference = None
print(f"\n{'scheme':14}{'accuracy':>10}{'weight bytes':>14}{'agreement':>11}{'median ms':>11}")
for name, (apply, weights) in schemes.items():
    compiled = jax.jit(apply).lower(weights, test_x).compile()
    guess = np.argmax(compiled(weights, test_x), axis=-1)
    reference = guess if reference is None else reference
    accuracy[name] = 100 * np.mean(guess == test_y)
    agreement = 100 * np.mean(guess == reference)
    products[name] = len(re.findall(INTEGER_PRODUCT, compiled.as_text()))
    sizes[name] = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    call = partial(compiled, weights, test_x)
    times = timeit.repeat(lambda call=call: jax.block_until_ready(call()), number=1, repeat=50)
    row = f"{name:14}{accuracy[name]:9.2f}%{sizes[name]:14,}{agreement:10.2f}%"
    print(f"{row}{1e3 * np.median(times):11.3f}")
print(f"Integer products in the compiled programs: {products}")

figure = Figure(figsize=(13, 3.6), layout="constrained")
bars, *histograms = figure.subplots(1, 3)
labels = [f"{accuracy[name]:.1f} %, {size:,} bytes" for name, size in sizes.items()]
bars.bar_label(bars.barh(list(accuracy), list(accuracy.values())), labels, padding=2)
bars.set(title="test accuracy", xlim=(0, 190), ylim=(5.6, -0.6), xticks=range(0, 101, 25))
titles = {"W2A8 rounded": "trained in float", "W2A8 trained": "trained with 2-bit weights"}
for axis, (name, title), tree in zip(histograms, titles.items(), (params, trained), strict=True):
    q = quantized[name].params[0]["w"]
    axis.hist((tree[0]["w"] / q.scale).ravel(), bins=120)  # each in units of its own scale
    for code in np.unique(q.values):
        axis.axvline(code, color="black", lw=0.4, alpha=0.5)
    axis.set(title=f"layer 0, {title}", xlabel="weight / scale; lines are the codes")
figure.savefig("digits.png", dpi=120)

for name in ("W8A8 static", "W8A8 dynamic"):
    assert abs(accuracy[name] - accuracy["float32"]) <= 0.5
for name in ("W2A8 GPTQ", "W2A8 trained"):
    assert accuracy[name] >= max(accuracy["float32"] - 4, accuracy["W2A8 rounded"] + 10)
    assert sizes[name] < 0.35 * sizes["W8A8 dynamic"]
assert all(count == (0 if name == "float32" else 3) for name, count in products.items())
print(
    "Claims hold: W8A8 is within 0.5 points of float32, and 2-bit weights in a third of its bytes "
    "are within 4 points, by GPTQ or by training. See digits.png."
)
