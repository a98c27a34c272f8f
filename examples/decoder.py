"""A transformer decoder in plain JAX: trained, quantized to 8 and to 4 bits, decoding greedily.

`decoder` is used for training, prefill and decoding steps. It scans over stacked layers, and keeps
keys and values in a cache. It learns the reference manual that is part of every CPython, letter by
letter. Prints what each model writes, its loss on held-out text and its bytes, and asserts what it
claims: one plan and one set of quantized weights serve prefill and steps, little accuracy is lost,
and the integer function writes the same tokens as `simulate`, also with an int8 cache.

Needs `pip install -e ".[examples]"`. Takes a minute or two on two cores.
"""

from functools import partial
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from tqdm import tqdm

import jqx

LAYERS, WIDTH, HEADS, CONTEXT, PROMPT = 2, 64, 4, 64, 24


def initial(key, letters):
    """Returns parameters; those of the layers are stacked along a leading axis."""
    keys = iter(jax.random.split(key, 6))

    def normal(scale, *shape):
        return scale * jax.random.normal(next(keys), shape)

    return {
        "embed": normal(1 / 8, letters, WIDTH),
        "place": normal(1 / 8, CONTEXT, WIDTH),
        "layers": {
            "qkv": normal(1 / 14, LAYERS, WIDTH, 3 * WIDTH),
            "out": normal(1 / 14, LAYERS, WIDTH, WIDTH),
            "up": normal(1 / 14, LAYERS, WIDTH, 4 * WIDTH),
            "down": normal(1 / 28, LAYERS, 4 * WIDTH, WIDTH),
        },
    }


def empty_cache(batch):
    """Returns an empty cache for the keys and values of every layer."""
    return jnp.zeros((LAYERS, 2, batch, CONTEXT, HEADS, WIDTH // HEADS))


def int8_cache(batch):
    """Returns an empty cache in 8 bits, with a scale for each head of each token."""
    return jqx.quantize_state(empty_cache(batch), {"": jqx.QSpec(jnp.int8, jqx.per_token())})


def norm(x):
    """Scales each vector to a root mean square of 1."""
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def attend(qkv, cache, start):
    """Returns causal attention over cached and new tokens, and the cache with both."""
    batch, time = qkv.shape[:2]
    q, *new = jnp.moveaxis(qkv.reshape(batch, time, 3, HEADS, -1), 2, 0)
    cache = lax.dynamic_update_slice_in_dim(cache, jnp.stack(new), start, axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", q, cache[0]) / np.sqrt(q.shape[-1])
    seen = jnp.arange(CONTEXT) <= start + jnp.arange(time)[:, None]
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhts,bshd->bthd", shares, cache[1]).reshape(batch, time, -1), cache


def decoder(params, tokens, cache, start):
    """Returns logits of `tokens` (batch, time) after `start` cached ones, and the new cache."""

    def layer(x, inputs):
        w, cache = inputs
        mixed, cache = attend(jnp.tensordot(norm(x), w["qkv"], 1), cache, start)
        x = x + mixed @ w["out"]
        return x + jnp.square(jax.nn.relu(norm(x) @ w["up"])) @ w["down"], cache

    x = params["embed"][tokens] + params["place"][start + jnp.arange(tokens.shape[1])]
    x, cache = lax.scan(layer, x, (params["layers"], cache), unroll=True)
    return norm(x) @ params["embed"].T, cache


def judge(apply, params, text, cache=empty_cache):
    """Returns nats per letter on rows of `text`, and the most likely letters."""
    logits, _ = apply(params, text[:, :-1], cache(len(text)), 0)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()
    return nats, logits.argmax(-1)


def train(apply, params, text, rate=1e-2, steps=500, batch=16):
    """Minimises the loss on random parts of `text` with Adam."""
    schedule = optax.warmup_cosine_decay_schedule(0, rate, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99))

    def step(state, key):
        first = jax.random.randint(key, (batch, 1), 0, len(text) - CONTEXT)
        stretch = text[first + jnp.arange(CONTEXT + 1)]
        of = jax.value_and_grad(partial(judge, apply), has_aux=True)
        (nats, _), gradients = of(state[0], stretch)
        updates, momenta = optimizer.update(gradients, state[1])
        return (optax.apply_updates(state[0], updates), momenta), nats

    advance = jax.jit(lambda state, keys: lax.scan(step, state, keys))
    state = (params, optimizer.init(params))
    bar = tqdm(
        jax.random.split(jax.random.key(1), (steps // 20, 20)), desc="train", ncols=80, disable=None
    )
    for keys in bar:
        state, nats = advance(state, keys)
        bar.set_postfix(nats=f"{nats.mean():.3f}")
    return state[0]


def pack(weights):
    """Packs 4-bit weights, two to a byte."""

    def is_quantized(leaf):
        return isinstance(leaf, jqx.QTensor)

    def packed(leaf):
        return leaf.pack() if is_quantized(leaf) else leaf

    return jax.tree.map(packed, weights, is_leaf=is_quantized)


@partial(jax.jit, static_argnums=(0, 3))
def greedy(apply, params, prompt, cache=empty_cache):
    """Continues `prompt` (batch, time) to the end of the context, always with the likeliest."""
    logits, cache = apply(params, prompt, cache(len(prompt)), 0)  # prefill

    def step(state, place):
        token, cache = state
        logits, cache = apply(params, token[:, None], cache, place)
        return (logits[:, -1].argmax(-1), cache), token

    places = jnp.arange(prompt.shape[1], CONTEXT)
    return lax.scan(step, (logits[:, -1].argmax(-1), cache), places)[1].T


def manual():
    """Returns the letters of Python's manual, and its text as their numbers: seen, and held out."""
    paragraphs = dict.fromkeys("\n\n".join(topics.values()).split("\n\n"))  # some occur twice
    text = np.frombuffer("\n\n".join(paragraphs).encode("ascii", "ignore"), np.uint8)
    letters, numbers = np.unique(text, return_inverse=True)
    split = len(text) // (10 * (CONTEXT + 1)) * (CONTEXT + 1)
    numbers = jnp.asarray(numbers, jnp.int32)
    return letters, numbers[:-split], numbers[-split:].reshape(-1, CONTEXT + 1)


def compare(models, letters, held_out):
    """Prints and returns loss, bytes and agreement with the first model; prints continuations."""
    prompts, results, written = held_out[::100, :PROMPT], {}, {}
    reference = None
    print(f"\n{'model':17}{'nats per letter':>16}{'weight bytes':>14}{'same next letter':>18}")
    for name, (apply, weights, *cache) in models.items():
        nats, likeliest = jax.jit(lambda w, t, apply=apply, own=cache: judge(apply, w, t, *own))(
            weights, held_out
        )
        reference = likeliest if reference is None else reference
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        same = float(jnp.mean(likeliest == reference))
        print(f"{name:17}{nats:16.4f}{size:14,}{100 * same:17.1f}%")
        results[name] = (float(nats), size, same)
        written[name] = greedy(apply, weights, prompts, *cache)
    for i, prompt in enumerate(prompts[:3]):
        print(f"\n{letters[prompt].tobytes().decode()!r} is continued by")
        for name, texts in written.items():
            equal = 100 * np.mean(texts[i] == written["float32"][i])
            print(f"  {name:17} {letters[texts[i]].tobytes().decode()!r} ({equal:.0f} % equal)")
    return results


def main():
    """Trains the model, quantizes it in two ways, and compares."""
    letters, text, held_out = manual()
    params = train(decoder, initial(jax.random.key(0), len(letters)), text)
    rows = jqx.QSpec(jnp.int4, jqx.per_group(32))  # for the tables; one is tied to the head
    w8a8, w4a16 = jqx.presets.w8a8(tables="int8"), jqx.presets.w4a16(block=32, tables=rows)

    # 1. Plan. Lengths are not part of a plan: prefill and steps of one letter have the same one.
    calls = [(batch, empty_cache(16), 0) for batch in text[: 64 * CONTEXT].reshape(4, 16, CONTEXT)]
    step = (held_out[:1, :1], empty_cache(1), PROMPT)
    int8, int4 = (jqx.make_plan(decoder, policy)(params, *calls[0]) for policy in (w8a8, w4a16))
    assert int8 == jqx.make_plan(decoder, w8a8)(params, *step)
    assert int4 == jqx.make_plan(decoder, w4a16)(params, *step)
    print(int8)

    # 2. Calibrate the activations of W8A8.
    affines = jqx.affines(int8, jqx.calibrate_batches(decoder, int8, params, calls))

    # 3. Quantize the weights, once; convert the function.
    models = {
        "float32": (decoder, params),
        "W8A8": (jqx.convert(decoder, int8, affines), jqx.quantize_params(params, int8)),
        "W4A16": (jqx.convert(decoder, int4), pack(jqx.quantize_params(params, int4))),
    }
    models["W4A16, int8 cache"] = (*models["W4A16"], int8_cache)
    results = compare(models, letters, held_out)
    (nats, size, _), (nats8, size8, same8), (nats4, size4, same4), (both, *_) = results.values()
    assert nats8 < nats + 0.01 and same8 > 0.95 and size / size8 > 3.5
    assert nats4 < nats + 0.1 and same4 > 0.8 and size / size4 > 6
    assert abs(both - nats4) < 0.001

    # 4. With 4-bit weights and an 8-bit cache, simulation and integers write the same tokens.
    simulated = jqx.simulate(decoder, int4, backward=jnp.float32)
    prompts = held_out[::100, :PROMPT]
    on_integers = greedy(*models["W4A16"], prompts, int8_cache)
    assert (on_integers == greedy(simulated, params, prompts, int8_cache)).all()
    caches = (sum(x.nbytes for x in jax.tree.leaves(c(1))) for c in (empty_cache, int8_cache))
    print("\nbytes of a cache in float32 and in int8:", *caches)
    print(
        "Claims hold: W8A8 loses less than 0.01 nats per letter, W4A16 less than 0.1 in 1/6 of the "
        "bytes, and an int8 cache less than 0.001 more."
    )


if __name__ == "__main__":
    main()
