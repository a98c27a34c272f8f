"""Codes of Keras in jqx, and codes of jqx in Keras, for a small tagger of tokens.

Keras quantizes the model to 4 bits in blocks of 16. `jqx.interop.from_keras` reads its codes, and
the function of the model runs on them as in Keras. Then jqx quantizes the float model to 4 bits,
and its last layer to int8 with inputs in int8. `jqx.interop.to_keras` writes that as a Keras model,
which is saved, loaded and gives the same outputs. Prints, for both ways, the sites of
the plan, the bytes of the weights and the cosine of the logits with those of the float model.

Needs `pip install -e ".[examples]"` with Keras 3.15 or newer. Takes half a minute on two cores.
"""

import os
import pathlib
import tempfile
import warnings

os.environ["KERAS_BACKEND"] = "jax"  # before keras is imported

import jax
import jax.numpy as jnp
import keras
import numpy as np

import jqx
from jqx.interop import from_keras, to_keras

warnings.filterwarnings("ignore", ".*quantize. method")  # of layers that stay in float
layers = keras.layers
WORDS, WIDTH, TAGS = 200, 64, 12


def tagger():
    """A model with embeddings, attention, a gated perceptron and a layer of logits."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((16,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="words")(tokens)
    x += layers.MultiHeadAttention(4, 16, name="attention")(x, x)
    up = layers.EinsumDense("abc,cde->abde", (None, 2, 128), name="up")(
        layers.LayerNormalization()(x)
    )
    x += layers.Dense(WIDTH, name="down")(keras.activations.silu(up[:, :, 0]) * up[:, :, 1])
    return keras.Model(tokens, layers.Dense(TAGS, name="tags")(layers.LayerNormalization()(x)))


def cosine(x, y):
    """The cosine of two arrays of logits."""
    x, y = (np.asarray(a, np.float64).ravel() for a in (x, y))
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def size(params):
    """The bytes of parameters, with codes packed."""
    packed = [
        x.unpack().pack() if isinstance(x, jqx.QTensor) and x.qtype == jnp.int4 else x
        for x in params.values()
    ]
    return sum(x.nbytes for x in packed)


def show(name, sites, params, logits):
    """Prints a row, and returns the cosine."""
    similarity = cosine(logits, target)
    print(f"{name:22}{sites:3} sites{size(params):10,} bytes   cosine {similarity:.4f}")
    return similarity


model = tagger()
batches = [np.random.default_rng(i).integers(0, WORDS, (32, 16)) for i in range(5)]
test = batches.pop()
f, params = from_keras(model)  # of a float model: its function and its weights
target = f(params, test)
show("float32", 0, params, target)

# From Keras: the codes that model.quantize has made.
blocks = keras.quantizers.Int4QuantizationConfig(block_size=16)
with_codes = tagger()
with_codes.quantize(config=blocks)
g, codes = from_keras(with_codes)
logits = jax.jit(jqx.convert(g, jqx.Policy([])))(codes, test)
count = sum(isinstance(x, jqx.QTensor) for x in codes.values())
from_codes = show("int4, by Keras", count, codes, logits)
np.testing.assert_allclose(logits, with_codes(test), atol=1e-5)

# To Keras: codes that jqx has chosen, with rules that Keras has no words for.
policy = jqx.Policy(
    [
        jqx.Rule("tags/.*", weight="int8", activation="int8:token:dynamic"),
        jqx.Rule("words/.*", weight="int4:group=16", op="gather"),
        jqx.Rule(weight="int4:group=16:asymmetric"),
    ]
)
quantized = jqx.ptq(f, policy, progress=False)(params, batches)
print(quantized.plan)
logits = jax.jit(quantized.function)(quantized.params, test)
to_codes = show("int4, by jqx", len(quantized.plan.sites), quantized.params, logits)

with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "tagger.keras")
    to_keras(model, quantized).save(path)
    loaded = keras.saving.load_model(path)
    stored = path.stat().st_size
print(f"loaded: {loaded.get_layer('down').dtype_policy.name}, a file of {stored:,} bytes")
# Inputs of the last layer that are next to a tie may get another code.
np.testing.assert_allclose(loaded(test), logits, atol=2e-2 * np.abs(logits).max())
assert cosine(loaded(test), logits) > 0.9999
assert to_codes > from_codes > 0.97
print("Claims hold: both libraries compute the same from the same codes; those of jqx come closer.")
