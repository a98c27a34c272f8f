"""A GPTQ checkpoint in the format of Hugging Face, loaded into a Flax model by names.

The example downloads nothing: it first makes the checkpoint. It trains a residual network of Flax
linen on scikit-learn's digits, quantizes the projections of its layers to 4 bits by GPTQ, in groups
of 64 with zero points, and writes a folder with `config.json` and `model.safetensors`, whose
tensors have the names of a Llama. From then on only that folder is used. A new model gets its
tensors by rules for their names, as QTensors with the codes of the file, and keeps them in 4 bits.
On CPU, products widen weights with zero points to floats in each call, unless `jqx.pack_for` lays
them out for the kernels of jqx-cpu; `jqx.explain` shows what is multiplied.

Prints the tensors of a layer, and accuracy and bytes of the float model and of the checkpoint.
Asserts that the codes are those of the file, read by hand with NumPy, that logits equal those of
dequantized weights except for the order of sums, and that little accuracy is lost.

Needs `pip install -e ".[examples]"`. Takes half a minute on two cores.
"""

import tempfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jqx
import jqx.linen

LAYERS, WIDTH, BATCH, EPOCHS = 2, 128, 64, 20
NAMES = [  # the name of a tensor in the file, and the path of a weight in the model
    jqx.interop.Name("model.embed.weight", "params/embed/kernel", transpose=True),
    ("model.layers.{layer}.norm.weight", "params/layers_{layer}/norm/scale"),
    jqx.interop.Name(
        "model.layers.{layer}.mlp.{name}.weight",
        "params/layers_{layer}/{name}/kernel",
        transpose=True,  # files have [out, in], Flax [in, out]
    ),
    jqx.interop.Name("lm_head.weight", "params/head/kernel", transpose=True),
]


class Layer(nn.Module):
    """A gated perceptron, added to its input."""

    @nn.compact
    def __call__(self, x):
        h = nn.RMSNorm(name="norm")(x)
        gate, up = (nn.Dense(4 * WIDTH, False, name=f"{name}_proj")(h) for name in ("gate", "up"))
        return x + nn.Dense(WIDTH, False, name="down_proj")(nn.silu(gate) * up)


class Net(nn.Module):
    """Logits of images. There is no quantization in it."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, False, name="embed")(x)
        for i in range(LAYERS):
            x = Layer(name=f"layers_{i}")(x)
        return nn.Dense(10, False, name="head")(x)


def train(params, images, labels):
    """Minimises the cross-entropy with Adam."""
    steps = len(images) // BATCH
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-3, EPOCHS * steps))

    def loss(params, x, y):
        logits = Net().apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(state, places):
        gradients = jax.grad(loss)(state[0], images[places], labels[places])
        updates, moments = optimizer.update(gradients, state[1])
        return (optax.apply_updates(state[0], updates), moments), None

    epoch = jax.jit(lambda state, order: jax.lax.scan(step, state, order)[0])
    rng, state = np.random.default_rng(0), (params, optimizer.init(params))
    for _ in tqdm(range(EPOCHS), desc="train", ncols=80, disable=None):
        order = rng.permutation(len(images))[: steps * BATCH]
        state = epoch(state, order.reshape(steps, BATCH))
    return state[0]


def write_checkpoint(folder, params, batches):
    """Quantizes by GPTQ and writes a folder like `transformers`, with weights [out, in]."""
    policy = jqx.Policy({".*_proj/kernel": "int4:group=64:asymmetric"})
    in_float16 = jqx.calibrators.Rounded(jqx.calibrators.minmax)  # scales that the file can hold
    gptq = jqx.algorithms.gptq(calibrator=in_float16)
    quantized = jqx.linen.ptq(Net(), policy, gptq, target=False)(params, batches)
    tensors = jqx.interop.named(quantized.params, NAMES)
    jqx.interop.write(folder, tensors, "gptq", config={"model_type": "digits"})


def by_hand(file, module):
    """Returns a weight [in, out] from the tensors of a file, as the format defines it."""
    words, zeros, scales, groups = (
        file[f"{module}.{end}"] for end in ("qweight", "qzeros", "scales", "g_idx")
    )
    shifts = np.arange(0, 32, 4)  # eight codes of 4 bits in an int32
    codes = (words[:, None] >> shifts[:, None] & 15).reshape(-1, words.shape[1])
    zeros = (zeros[:, :, None] >> shifts & 15).reshape(len(zeros), -1)
    return np.float32(scales[groups]) * (codes - zeros[groups])


def show(name, logits, params):
    """Prints and returns the test accuracy in percent."""
    percent = 100 * float((logits.argmax(-1) == test_y).mean())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(f"{name:28}{percent:7.2f} %{size:11,} bytes")
    return percent


images, labels = load_digits(return_X_y=True)
split = train_test_split(images.astype(np.float32) / 16, labels, test_size=0.3, random_state=0)
train_x, test_x, train_y, test_y = map(jnp.asarray, split)
floats = train(jax.jit(Net().init)(jax.random.key(0), train_x[:1]), train_x, train_y)

with tempfile.TemporaryDirectory() as parent:
    folder = Path(parent) / "digits-gptq"
    write_checkpoint(folder, floats, [train_x[:512], train_x[512:1024]])

    # 1. Look into the folder.
    file = load_file(folder / "model.safetensors")
    print(f"\n{(folder / 'config.json').read_text()}\n")
    for name, x in sorted(file.items()):
        if name.startswith("model.layers.0.mlp.up_proj"):
            print(f"{name:40}{x.dtype!s:9}{x.shape}")

    # 2. Load it by names. `like` checks that every weight of the model is there, in its shape.
    like = jax.eval_shape(Net().init, jax.random.key(0), train_x[:1])
    with jqx.interop.read(folder, dtype=jnp.float32) as archive:  # scales are float16
        params = jqx.interop.tree(archive, NAMES, like=like)

# 3. Run it. The policy is empty, because the weights are quantized already.
apply = jax.jit(jqx.convert(Net().apply, jqx.Policy([])))
logits = apply(params, test_x)
dequantized = jqx.dequantize_params(params)
expected = jax.jit(Net().apply)(dequantized, test_x)

kernel = params["params"]["layers_0"]["up_proj"]["kernel"]
print(f"\n{kernel}\n")
right = show("float32", jax.jit(Net().apply)(floats, test_x), floats), show("GPTQ", logits, params)
difference = float(jnp.abs(logits - expected).max() / jnp.abs(expected).max())
print(f"relative difference to the logits of dequantized weights: {difference:.1e}")

for i in range(LAYERS):
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = dequantized["params"][f"layers_{i}"][name]["kernel"]
        assert (np.asarray(weight) == by_hand(file, f"model.layers.{i}.mlp.{name}")).all()
sizes = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (floats, params))
assert next(sizes) > 6 * next(sizes)
assert difference < 1e-5 and right[1] > right[0] - 1 > 95
print(
    "Claims hold: codes equal those of the file, logits equal those of its weights, in a sixth of "
    "the bytes, and accuracy is within a point of float32."
)
