"""The decoder of `decoder.py` in Equinox: the module itself is the parameters.

An `eqx.Module` is a pytree, so `make_plan`, `quantize_params` and `convert` take a module of
Equinox's own layers unchanged. The quantized model is a module of the same class whose weights are
QTensors. Data, training and greedy decoding are those of `decoder.py`. Prints the same as
`decoder.py`, and asserts that little accuracy is lost in a sixth of the bytes.

Needs `pip install -e ".[examples]"`. Takes a minute or two on two cores.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from decoder import CONTEXT, LAYERS, WIDTH, attend, compare, empty_cache, manual, pack, train
from jax import lax

import jqx


def each(layer):
    """Maps a layer of vectors over batch and time."""
    return jax.vmap(jax.vmap(layer))


class Block(eqx.Module):
    """Attention and a perceptron, each added to its input."""

    norms: tuple[eqx.nn.RMSNorm, eqx.nn.RMSNorm]
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.norms = (eqx.nn.RMSNorm(WIDTH), eqx.nn.RMSNorm(WIDTH))
        self.qkv = eqx.nn.Linear(WIDTH, 3 * WIDTH, use_bias=False, key=keys[0])
        self.out = eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=keys[1])
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, use_bias=False, key=keys[2])
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, use_bias=False, key=keys[3])

    def __call__(self, x, cache, start):
        mixed, cache = attend(each(self.qkv)(each(self.norms[0])(x)), cache, start)
        x = x + each(self.out)(mixed)
        hidden = jnp.square(jax.nn.relu(each(self.up)(each(self.norms[1])(x))))
        return x + each(self.down)(hidden), cache


class Decoder(eqx.Module):
    """Tokens to logits, with tied embeddings and stacked blocks."""

    embed: eqx.nn.Embedding
    place: eqx.nn.Embedding
    blocks: Block
    norm: eqx.nn.RMSNorm

    def __init__(self, letters, key):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(weight=jax.random.normal(keys[0], (letters, WIDTH)) / 8)
        self.place = eqx.nn.Embedding(weight=jax.random.normal(keys[1], (CONTEXT, WIDTH)) / 8)
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(keys[2], LAYERS))
        self.norm = eqx.nn.RMSNorm(WIDTH)

    def __call__(self, tokens, cache, start):
        x = each(self.embed)(tokens) + jax.vmap(self.place)(start + jnp.arange(tokens.shape[1]))

        def layer(x, inputs):
            block, cache = inputs
            return block(x, cache, start)

        x, cache = lax.scan(layer, x, (self.blocks, cache), unroll=True)
        return each(self.norm)(x) @ self.embed.weight.T, cache


letters, text, held_out = manual()
model = train(Decoder.__call__, Decoder(len(letters), jax.random.key(0)), text, steps=400)

rows = jqx.QSpec(jnp.int4, jqx.per_group(32))  # for the tables; one is tied to the head
of = jqx.make_plan(Decoder.__call__, jqx.presets.w4a16(block=32, tables=rows))
plan = of(model, held_out[:16, :-1], empty_cache(16), 0)
quantized = jqx.quantize_params(model, plan)
assert isinstance(quantized, Decoder) and isinstance(quantized.blocks.up.weight, jqx.QTensor)
print(plan, quantized.blocks.up, sep="\n")

models = {
    "float32": (Decoder.__call__, model),
    "W4A16": (jqx.convert(Decoder.__call__, plan), pack(quantized)),
}
(nats, size, _), (nats4, size4, same4) = compare(models, letters, held_out).values()
assert nats4 < nats + 0.1 and same4 > 0.8 and size / size4 > 6
print("\nClaims hold: 4-bit weights lose less than 0.1 nats per letter in 1/6 of the bytes.")
