"""Adapters on a 4-bit base (QLoRA): a network for digits learns mirrored digits.

The base is trained in float, quantized to nf4 with one scale for 64 weights, and frozen. Only the
adapters of rank 4 have gradients. EoRA initializes them so that they correct most of the error of
the codes. They then learn what the base cannot do: the same images, mirrored. Merged into the base
they give the same logits. Prints accuracies, bytes and the number of trained values. Asserts its
claims.

Needs `pip install -e ".[examples]"`. Takes half a minute on two cores.
"""

import functools

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

BATCH, STEPS, ROUND, RANK, ALPHA = 64, 600, 60, 4, 8.0
POLICY = jqx.presets.nf4(block=64)


class Net(nn.Module):
    """Logits of images; `dense` is Flax's layer or one that replaces it."""

    dense: type = nn.Dense

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.relu(self.dense(256, name=f"hidden_{i}")(x))
        return self.dense(10, name="logits")(x)


def with_adapters(mode):
    """Returns the network with adapters for each layer."""
    return Net(
        functools.partial(jqx.linen.LoRADense, rank=RANK, alpha=ALPHA, policy=POLICY, mode=mode)
    )


def train(module, frozen, trained, x, y):
    """Minimises the cross-entropy of `{**frozen, **trained}` with respect to `trained`."""
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))

    def loss(trained, x, y):
        logits = module.apply({**frozen, **trained}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(state, places):
        gradients = jax.grad(loss)(state[0], x[places], y[places])
        updates, moments = optimizer.update(gradients, state[1])
        return (optax.apply_updates(state[0], updates), moments), None

    advance = jax.jit(lambda state, places: jax.lax.scan(step, state, places)[0])
    places = jax.random.randint(jax.random.key(1), (STEPS // ROUND, ROUND, BATCH), 0, len(x))
    state = (trained, optimizer.init(trained))
    for some in tqdm(places, desc="train", ncols=80, leave=False, disable=None):
        state = advance(state, some)
    return state[0]


def show(name, module, variables, x, y):
    """Prints and returns the accuracy in percent."""
    guess = jax.jit(module.apply)(variables, x).argmax(-1)
    percent = 100 * float((guess == y).mean())
    size = sum(x.nbytes for x in jax.tree.leaves(variables))
    print(f"{name:36}{percent:7.2f} %{size:10,} bytes")
    return percent


images, labels = load_digits(return_X_y=True)
split = train_test_split(images.astype(np.float32) / 16, labels, test_size=0.3, random_state=0)
train_x, test_x, train_y, test_y = map(jnp.asarray, split)
mirror = jax.jit(lambda x: x.reshape(-1, 8, 8)[:, :, ::-1].reshape(-1, 64))

# A float base.
base = train(Net(), {}, Net().init(jax.random.key(0), train_x[:1]), train_x, train_y)
show("float32 base", Net(), base, test_x, test_y)
before = show("float32 base, mirrored", Net(), base, mirror(test_x), test_y)

# Weights become 4-bit codes, and the adapters start as a correction of their error.
eora = jqx.algorithms.eora(rank=RANK)
quantize = jqx.linen.ptq(Net(), POLICY, eora, target=False)
integers, simulated = with_adapters(Mode.CONVERT), with_adapters(Mode.SIMULATE)
known = jqx.linen.init_lora(simulated, quantize(base, [train_x]), train_x[:1])
adapters = known.pop("lora")
frozen = jax.tree.map(
    lambda x: x.pack() if isinstance(x, jqx.QTensor) else x,
    known,
    is_leaf=lambda x: isinstance(x, jqx.QTensor),
)
zeros = jax.tree.map(jnp.zeros_like, adapters)
exact = Net().apply(base, test_x)
errors = []
for name, lora in (("zeros", zeros), ("EoRA", adapters)):
    show(f"nf4 base, adapters from {name}", integers, {**frozen, "lora": lora}, test_x, test_y)
    difference = integers.apply({**frozen, "lora": lora}, test_x) - exact
    errors.append(float(jnp.linalg.norm(difference) / jnp.linalg.norm(exact)))
print(f"error of logits: {errors[0]:.3f} from zeros, {errors[1]:.3f} from EoRA")

# Train: only the adapters get gradients; codes and scales do not change.
trained = train(simulated, frozen, {"lora": adapters}, mirror(train_x), train_y)
known = {**frozen, **trained}
after = show("nf4 base with adapters, mirrored", integers, known, mirror(test_x), test_y)
count = sum(x.size for x in jax.tree.leaves(trained))
print(f"{count:,} of {sum(x.size for x in jax.tree.leaves(base)) + count:,} values trained")

merged = jqx.linen.merge_lora(known, alpha=ALPHA)
logits = simulated.apply(known, mirror(test_x))
difference = jnp.abs(Net().apply(merged, mirror(test_x)) - logits).max() / jnp.abs(logits).max()
print(f"merged into float weights: relative difference of logits {difference:.1e}")

assert before < 50 and after > 93
assert errors[1] < 0.5 * errors[0]
assert difference < 1e-5
print("Claims hold: adapters correct 4-bit codes, learn, and merge up to rounding.")
