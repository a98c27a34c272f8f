"""A Keras model on JAX, quantized without changing it, on scikit-learn's digits.

`model.stateless_call` is a function of the variables of a Keras model. With the trainable variables
as a dict by path, `jqx.ptq` quantizes it like any other function. Prints the plan, and test
accuracy and bytes of two schemes: int8 weights and activations, and weights alone, with 4 bits in
the dense layers and 8 in the others. Asserts that both are within a point of float32. Finally, the
quantized model is saved and loaded, and gives the same logits.

Needs `pip install -e ".[examples]"`. Takes half a minute on two cores.
"""

import os
import tempfile

os.environ["KERAS_BACKEND"] = "jax"  # before keras is imported

import jax
import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jqx

keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
split = train_test_split(images, labels, test_size=0.3, random_state=0)
train_x, test_x, train_y, test_y = split

layers = keras.layers
model = keras.Sequential(
    [
        layers.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", use_bias=False, name="first"),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.SeparableConv2D(32, 3, strides=2, padding="same", activation="relu", name="second"),
        layers.Flatten(),
        layers.Dense(64, activation="relu", name="hidden"),
        layers.Dense(10, name="out"),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(3e-3), loss=loss)
model.fit(train_x, train_y, batch_size=64, epochs=8, verbose=0)

paths = [v.path for v in model.trainable_variables]
params = {v.path: v.value for v in model.trainable_variables}
statistics = [v.value for v in model.non_trainable_variables]  # of the normalization; not quantized


def logits(params, x):
    """Returns the logits of the model, as a function of its weights."""
    result, _ = model.stateless_call([params[path] for path in paths], statistics, x)
    return result


def show(name, f, params):
    """Prints and returns the test accuracy in percent."""
    percent = 100 * float((jax.jit(f)(params, test_x).argmax(-1) == test_y).mean())
    print(f"{name:8}{percent:7.2f} %{sum(x.nbytes for x in jax.tree.leaves(params)):9,} bytes")
    return percent


right = {"float32": show("float32", logits, params)}

# One call finds scales of activations on training images, and int8 weights per channel.
batches = [train_x[i : i + 256] for i in range(0, 1024, 256)]
quantized = jqx.ptq(logits, jqx.presets.w8a8())(params, batches)
print(f"\n{quantized.plan}")
right["W8A8"] = show("W8A8", quantized.function, quantized.params)

# Rules match paths: 4-bit weights in the dense layers, 8-bit weights in the others.
policy = jqx.presets.w4a16(".*/(hidden|out)/.*") + jqx.presets.w8a16()
small = jqx.ptq(logits, policy, target=False)(params, batches)
packed = {
    path: x.pack() if isinstance(x, jqx.QTensor) and x.qtype == "int4" else x
    for path, x in small.params.items()
}
right["W4, W8"] = show("W4, W8", small.function, packed)

with tempfile.TemporaryDirectory() as folder:
    jqx.save(f"{folder}/digits.safetensors", quantized)
    again = jqx.load(f"{folder}/digits.safetensors").bind(logits)
assert (again(test_x) == quantized(test_x)).all()
assert min(right.values()) >= right["float32"] - 1.0 > 90
print("Claims hold: both are within a point of float32; the loaded model equals the saved one.")
