"""A Flax linen network on scikit-learn's digits, quantized after and during training.

`Net` has convolutions, batch normalization and dropout, and no quantization. `jqx.linen.quantize`
returns a module with the same variables, whose mode says whether a call observes, simulates or runs
on integers. Prints test accuracy and bytes of int8 after training, and of 2-bit weights with 4-bit
activations after training and trained with learned scales. Asserts its claims.

Needs `pip install -e ".[examples]"`. Takes a minute on two cores.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jqx
import jqx.linen
from jqx.linen import Mode

BATCH, EPOCHS = 64, 12


class Net(nn.Module):
    """Logits of images."""

    @nn.compact
    def __call__(self, x, train=False):
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(x))


def train(module, variables, rate):
    """Minimises the cross-entropy with Adam. A module in Mode.SIMULATE trains like any other."""
    steps = len(train_x) // BATCH
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, EPOCHS * steps))
    fixed = {k: v for k, v in variables.items() if k not in ("params", "batch_stats")}

    def loss(params, stats, x, y, key):
        known = {**fixed, "params": params, "batch_stats": stats}
        logits, new = module.apply(
            known, x, train=True, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean(), new["batch_stats"]

    def step(state, batch):
        params, stats, moments = state
        key, places = batch
        gradients, stats = jax.grad(loss, has_aux=True)(
            params, stats, train_x[places], train_y[places], key
        )
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(params, updates), stats, moments), None

    @jax.jit
    def epoch(state, key):
        order = jax.random.permutation(key, len(train_x))[: steps * BATCH]
        batches = jax.random.split(key, steps), order.reshape(steps, BATCH)
        return jax.lax.scan(step, state, batches)[0]

    params, stats = variables["params"], variables["batch_stats"]
    state = (params, stats, optimizer.init(params))
    keys = jax.random.split(jax.random.key(1), EPOCHS)
    for key in tqdm(keys, desc="train", ncols=80, leave=False, disable=None):
        state = epoch(state, key)
    return {**fixed, "params": state[0], "batch_stats": state[1]}


def show(name, module, variables):
    """Prints and returns the test accuracy in percent."""
    guess = jax.jit(module.apply)(variables, test_x).argmax(-1)
    percent = 100 * float((guess == test_y).mean())
    weights = {k: variables[k] for k in ("params", "qparams") if k in variables}
    sizes = jax.tree.map(lambda x: x.nbytes, weights, is_leaf=lambda x: isinstance(x, jqx.QTensor))
    print(f"{name:32}{percent:7.2f} %{sum(jax.tree.leaves(sizes)):10,} bytes")
    return percent


images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
split = train_test_split(images, labels, test_size=0.3, random_state=0)
train_x, test_x, train_y, test_y = map(jnp.asarray, split)

net = Net()
variables = train(net, net.init(jax.random.key(0), train_x[:1]), 3e-3)
right = {"float32": show("float32", net, variables)}

lsq = {"gradient": jqx.gradients.lsq}
policies = {
    "W8A8": jqx.presets.w8a8(),
    "W2A4": jqx.presets.w8a8(
        weight={"qtype": jnp.int2, "calibrator": jqx.calibrators.mse, **lsq},
        activation={"qtype": jnp.int4, "calibrator": jqx.calibrators.mse, **lsq},
    ),
}
for name, policy in policies.items():
    module = jqx.linen.quantize(net, policy)
    integers = module.clone(mode=Mode.CONVERT)
    print(f"\n{jqx.linen.make_plan(module, variables, test_x)}")

    # Calibrate: the result is that of the float module; statistics are stored in the variables.
    observe = module.clone(mode=Mode.CALIBRATE)
    known = variables
    for start in range(0, 1024, 256):
        batch = train_x[start : start + 256]
        known = {**known, **observe.apply(known, batch, mutable=["quant_stats"])[1]}

    # After training: convert moves each weight from "params" to "qparams", as a QTensor.
    converted = jqx.linen.convert(integers, known, test_x)
    right[name] = show(f"{name} after training", integers, converted)

    # During training: scales become parameters, and are trained with the weights.
    if name == "W2A4":
        trained = train(module, jqx.linen.learn_scales(module, known, train_x), 1e-3)
        converted = jqx.linen.convert(integers, trained, test_x)
        right["trained"] = show(f"{name} trained", integers, converted)

assert right["W8A8"] >= right["float32"] - 0.5
assert right["trained"] >= right["float32"] - 2.0 > right["W2A4"]
print("(JAX stores int2 codes in a byte each.)")
print("Claims hold: W8A8 is within 0.5 points of float32, and W2A4, trained, within 2.")
