"""Keys and values in 8 bits: a decoder with 4-bit weights that continues many texts at once.

The cache of a decoder grows with texts and tokens, and soon takes more memory than its weights. The
decoder is that of `decoder.py`, in plain JAX, whose cache is a float array. After conversion it
takes a QTensor instead of that array (`jqx.QTensor.zeros`; `jqx.quantize_state` for trees). Writes
are quantized, with a scale for each head of each token, and attention reads the codes, in prefill
and in steps. This needs neither a plan nor calibration.

Prints, for float32, for 4-bit weights, and for these with an int8 cache: the bytes of weights and
of the cache of 64 texts, the loss on held-out text, and how many letters are the same as with a
float cache. Asserts that an int8 cache loses less than 0.001 nats per letter in less than a third
of the bytes.

Needs `pip install -e ".[examples]"`. Takes a minute on two cores. `smollm2.py --cache int8` does
this with a pretrained model.
"""

import jax
import jax.numpy as jnp
import numpy as np
from decoder import PROMPT, decoder, empty_cache, greedy, initial, judge, manual, pack, train

import jqx

TEXTS = 64


def int8_cache(texts):
    """Returns an empty cache in 8 bits, with the shape of the float cache."""
    *axes, _ = range(len(empty_cache(texts).shape))  # all except that within a head
    return jqx.QTensor.zeros(empty_cache(texts).shape, jqx.QSpec("int8", jqx.per_axis(*axes)))


def size_of(tree):
    """Returns the bytes of arrays and QTensors in memory."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def main():
    """Trains the decoder, quantizes its weights with `ptq`, and compares caches."""
    letters, text, held_out = manual()
    params = train(decoder, initial(jax.random.key(0), len(letters)), text, steps=300)

    rows = jqx.QSpec(jnp.int4, jqx.per_group(32))  # for the tables; one is tied to the head
    quantize = jqx.ptq(
        decoder, jqx.presets.w4a16(block=32, tables=rows), jqx.algorithms.nearest(), target=False
    )
    quantized = quantize(params, [(held_out[:16, :-1], empty_cache(16), 0)])
    small = quantized.function, pack(quantized.params)
    models = {
        "float32": (decoder, params, empty_cache),
        "W4A16": (*small, empty_cache),
        "W4A16, int8 cache": (*small, int8_cache),
    }

    prompts, results, before = held_out[:TEXTS, :PROMPT], {}, None
    titles = ("weight bytes", "cache bytes", "nats/letter", "same letters")
    print("\n" + f"{'model':18}" + "".join(f"{title:>15}" for title in titles))
    for name, (apply, weights, cache) in models.items():
        nats, _ = jax.jit(lambda w, t, f=apply, c=cache: judge(f, w, t, c))(weights, held_out)
        written = np.asarray(greedy(apply, weights, prompts, cache))
        before = before if name.endswith("int8 cache") else written
        sizes, same = (size_of(weights), size_of(cache(TEXTS))), np.mean(written == before)
        row = f"{name:18}{sizes[0]:15,}{sizes[1]:15,}{nats:15.4f}{100 * same:13.1f} %"
        print(row, flush=True)
        results[name] = float(nats), *sizes, same
    print(f"\n{letters[prompts[1]].tobytes().decode()!r} is continued by")
    print(f"  {letters[written[1]].tobytes().decode()!r}")

    _, (nats, weights, floats, _), (nats8, _, codes, same) = results.values()
    assert floats > 50 * weights and codes < floats / 3
    assert abs(nats8 - nats) < 0.001 and same > 0.9
    print("Claims hold: an int8 cache loses less than 0.001 nats per letter in 1/3 of the bytes.")


if __name__ == "__main__":
    main()
