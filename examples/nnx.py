"""A Flax nnx network on scikit-learn's digits: quantized, trained with quantization, converted.

`Net` has convolutions, batch normalization and dropout, and no quantization. `jqx.nnx.quantize`
returns a model with the same variables, which is calibrated, trained with fixed scales of
activations and rounded weights, and converted in place. Prints test accuracy and bytes for int8,
and for 2-bit weights with int8 activations. Asserts its claims.

Needs `pip install -e ".[examples]"`. Takes a minute on two cores.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jqx
import jqx.nnx
from jqx.nnx import Mode

BATCH, EPOCHS = 64, 12


class Net(nnx.Module):
    """Logits of images."""

    def __init__(self, rngs):
        self.convs = nnx.List(
            [nnx.Conv(m, n, (3, 3), use_bias=False, rngs=rngs) for m, n in ((1, 16), (16, 32))]
        )
        self.norms = nnx.List([nnx.BatchNorm(n, momentum=0.9, rngs=rngs) for n in (16, 32)])
        self.hidden = nnx.Linear(128, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.max_pool(nnx.relu(norm(conv(x))), (2, 2), (2, 2))
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))
        return self.out(self.dropout(x))


@nnx.jit
def step(model, optimizer, x, y):
    """Takes one step of training. A model in Mode.SIMULATE trains like any other."""

    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    optimizer.update(model, nnx.grad(loss)(model))


def train(model, rate):
    """Minimises the cross-entropy with Adam."""
    steps = len(train_x) // BATCH
    schedule = optax.cosine_decay_schedule(rate, EPOCHS * steps)
    optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)
    model.train()
    for epoch in tqdm(range(EPOCHS), desc="train", ncols=80, leave=False, disable=None):
        order = np.random.default_rng(epoch).permutation(len(train_x))
        for places in np.split(order[: steps * BATCH], steps):
            step(model, optimizer, train_x[places], train_y[places])
    model.eval()


@nnx.jit
def guesses(model, x):
    """Returns the digit that a model predicts for each image."""
    return model(x).argmax(-1)


def show(name, model):
    """Prints and returns the test accuracy in percent."""
    percent = 100 * float((guesses(model, test_x) == test_y).mean())
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model, (nnx.Param, jqx.nnx.QParam))))
    print(f"{name:24}{percent:7.2f} %{size:10,} bytes")
    return percent


images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
split = train_test_split(images, labels, test_size=0.3, random_state=0)
train_x, test_x, train_y, test_y = map(jnp.asarray, split)

net = Net(nnx.Rngs(0))
train(net, 3e-3)
right = {"float32": show("float32", net)}

policies = {
    "W8A8": jqx.presets.w8a8(),
    "W2A8": jqx.presets.w8a8(weight={"qtype": jnp.int2, "calibrator": jqx.calibrators.mse}),
}
for name, policy in policies.items():
    # Calibrate: calls return the float result, and write statistics to variables of the model.
    model = jqx.nnx.quantize(net, policy, mode=Mode.CALIBRATE)
    for start in range(0, 1024, 256):
        guesses(model, train_x[start : start + 256])
    print(f"\n{jqx.nnx.make_plan(model, test_x)}")

    # After training: convert replaces each planned weight by a QParam, which holds a QTensor.
    converted = nnx.clone(model)
    jqx.nnx.convert(converted, test_x)
    right[f"{name} after"] = show(f"{name} after training", converted)

    # During training: statistics become scales, and the model simulates quantization.
    jqx.nnx.fix_scales(model, test_x)
    train(model, 1e-3)
    right[f"{name} trained"] = show(f"{name} trained, simulated", model)
    simulated = guesses(model, test_x)
    jqx.nnx.convert(model, test_x)
    right[f"{name} integers"] = show(f"{name} trained, integers", model)
    agree = 100 * float((guesses(model, test_x) == simulated).mean())
    print(f"Integers and simulation agree on {agree:.2f} % of the images.")
    assert agree >= 99

print("(JAX stores int2 codes in a byte each.)")
assert right["W8A8 integers"] >= right["float32"] - 0.5
assert right["W2A8 integers"] >= right["float32"] - 2.0 > right["W2A8 after"]
print("Claims hold: W8A8 is within 0.5 points of float32, and W2A8, trained, within 2.")
