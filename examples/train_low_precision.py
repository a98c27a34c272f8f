"""A character transformer trained in 16, 8 and 4 bits, forward and backward.

`network` is plain JAX: five layers in a scan, a million weights. It learns the reference manual
that is part of every CPython, letter by letter. It is trained in float32; with the products of its
layers in bfloat16; with those of `jqx.recipes`, in int8, fp8, MXFP8 and NVFP4; and in float32 with
optimizers whose moments have 8 bits. For each seed, all start from the same weights and see the
same text. Prints one table of losses on text that was held out, in float32, saves one picture of
the losses in training (train_low_precision.png), and asserts what it claims.

By default one seed takes 200 steps, which is enough to see that all recipes learn, and not what
they cost. `--steps 2000 --seeds 5` tells them apart, and takes two hours on two cores; `--save`
keeps what has been trained, so that it may be stopped and started again.

Needs `pip install -e ".[examples]"`. Takes ten minutes on two cores.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from matplotlib.figure import Figure
from tqdm import tqdm

import jqx
import jqx.optim
from jqx.recipes import Product, Products, Recipe, Rounded

LAYERS, WIDTH, HEADS, CONTEXT, BATCH, RATE = 5, 128, 4, 64, 6, 1.5e-3
FLOAT = ("embed", "head")
LAST = (*FLOAT, "layers[-1]")
CHUNK = 20


def initial(key, letters):
    """Returns parameters; those of the layers are stacked along a leading axis."""
    shapes = {
        "embed": (letters, WIDTH),
        "place": (CONTEXT, WIDTH),
        "head": (WIDTH, letters),
        "layers": {
            "qkv": (LAYERS, WIDTH, 3 * WIDTH),
            "out": (LAYERS, WIDTH, WIDTH),
            "up": (LAYERS, WIDTH, 4 * WIDTH),
            "down": (LAYERS, 4 * WIDTH, WIDTH),
        },
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    return tree.unflatten(
        jax.random.normal(k, shape) / np.sqrt(WIDTH if len(shape) == 2 else 2 * shape[-2])
        for k, shape in zip(keys, leaves, strict=True)
    )


def norm(x):
    """Scales each vector to a root mean square of 1."""
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def network(params, tokens, dot=jnp.matmul):
    """Returns logits of the letters after each of `tokens` (batch, time)."""

    def layer(x, w):
        q, k, v = jnp.split(dot(norm(x), w["qkv"]), 3, -1)
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = q.reshape(heads), k.reshape(heads), v.reshape(heads)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + dot(mixed.reshape(x.shape), w["out"])
        return x + dot(jnp.square(jax.nn.relu(dot(norm(x), w["up"]))), w["down"]), None

    x = params["embed"][tokens] + params["place"][: tokens.shape[1]]
    x, _ = lax.scan(layer, x, params["layers"])
    return norm(x) @ params["head"]


def loss(params, text, dot=jnp.matmul):
    """Returns nats per letter on rows of `text`."""
    logits = network(params, text[:, :-1], dot)
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def in_bfloat16(x, w):
    """A product of operands in bfloat16, summed in float32."""
    return jnp.matmul(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)).astype(jnp.float32)


def with_nearest_gradients():
    """NVFP4, but gradients are rounded to nearest: what stochastic rounding is for."""
    products = jqx.recipes.nvfp4().rules[-1][1]
    x, w, dy = *products.forward.operands, Rounded(products.dgrad.lhs.spec)
    nearest = Products((x, w), (dy, w), Product(x, dy, hadamard=16, signs="fixed"))
    return Recipe("nearest", {**dict.fromkeys(LAST), ".*": nearest})


ADAM = partial(optax.adamw, b2=0.99, weight_decay=0.01)
MUON = optax.contrib.muon
EIGHT = {"mu": "8bit", "nu": "8bit_positive"}
PLAIN = {"float32": (jnp.matmul, ADAM), "bfloat16": (in_bfloat16, ADAM)}
RECIPES = {
    "int8": jqx.recipes.int8(exclude=FLOAT),
    "fp8": jqx.recipes.fp8(exclude=FLOAT),
    "fp8 delayed": jqx.recipes.fp8_delayed(exclude=FLOAT, history=16),
    "MXFP8": jqx.recipes.mxfp8(exclude=FLOAT),
    "NVFP4": jqx.recipes.nvfp4(exclude=LAST),
    "NVFP4 nearest": with_nearest_gradients(),
    "Quartet II": jqx.recipes.quartet2(exclude=LAST),
}
OPTIMIZERS = {
    "Adam in 8 bits": (jnp.matmul, lambda rate: jqx.optim.quantized(ADAM(rate), EIGHT)),
    "Muon": (jnp.matmul, MUON),
    "Muon in 8 bits": (jnp.matmul, lambda rate: jqx.optim.quantized(MUON(rate), EIGHT)),
}
NAMES = [*PLAIN, *RECIPES, *OPTIMIZERS]


def variant(name, params, text, steps):
    """Returns the loss `f(params, state, text, key=)`, the state, and the optimizer."""
    rate = optax.warmup_cosine_decay_schedule(0, RATE, max(1, steps // 10), steps)
    if name in RECIPES:
        recipe = RECIPES[name]
        plan = jqx.make_plan(loss, recipe.policy)(params, text)
        return jqx.train(loss, plan, recipe), jqx.train_state(plan, recipe), ADAM(rate)
    dot, optimizer = (PLAIN | OPTIMIZERS)[name]
    return lambda params, state, text, key: loss(params, text, dot), {}, optimizer(rate)


def trained(name, seed, text, held_out, steps):
    """Returns the loss after each chunk of steps, and on text that was held out."""
    first, draws = jax.random.split(jax.random.key(seed))
    params = initial(first, int(text.max()) + 1)
    example = jnp.zeros((BATCH, CONTEXT + 1), jnp.int32)
    f, state, optimizer = variant(name, params, example, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)

    def step(carry, key):
        params, state, moments = carry
        places, key = jax.random.split(key)
        start = jax.random.randint(places, (BATCH, 1), 0, len(text) - CONTEXT)
        rows = text[start + jnp.arange(CONTEXT + 1)]
        value, (grads, state) = jax.value_and_grad(f, (0, 1))(params, state, rows, key=key)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), state, moments), value

    advance = jax.jit(lambda carry, keys: lax.scan(step, carry, keys))
    carry, losses = (params, state, optimizer.init(params)), []
    bar = tqdm(range(0, steps, CHUNK), desc=f"{name}, seed {seed}", ncols=80, disable=None)
    for i in bar:
        keys = jax.vmap(partial(jax.random.fold_in, draws))(jnp.arange(i, min(i + CHUNK, steps)))
        carry, values = advance(carry, keys)
        losses.append(float(values.mean()))
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    parts = jnp.stack(jnp.split(held_out, 8))
    return {
        "losses": losses,
        "end": float(jax.jit(partial(lax.map, partial(loss, carry[0])))(parts).mean()),
    }


parser = argparse.ArgumentParser(description="Train a character transformer in low precision.")
parser.add_argument("--steps", type=int, default=200, help="steps of each training")
parser.add_argument("--seeds", type=int, default=1, help="how often each is trained")
parser.add_argument("--only", default=",".join(NAMES), help="names of rows, separated by ','")
parser.add_argument("--save", type=Path, help="a JSON file of results, read and extended")
arguments = parser.parse_args()
names = arguments.only.split(",")
if unknown := {*names} - {*NAMES}:
    parser.error(f"no rows are called {', '.join(unknown)}; there are {', '.join(NAMES)}.")

letters = "".join(text for _, text in sorted(topics.items()))
alphabet = sorted(set(letters))
codes = np.array([alphabet.index(x) for x in letters], np.int32)
count = len(codes) * 9 // 10
text = jnp.asarray(codes[:count])
starts = np.linspace(0, len(codes) - count - CONTEXT - 1, 256).astype(int)
held_out = jnp.asarray(codes[count:][starts[:, None] + np.arange(CONTEXT + 1)])

results = {}
if arguments.save is not None and arguments.save.exists():
    results = json.loads(arguments.save.read_text())
for seed in range(arguments.seeds):
    for name in names:
        key = f"{name}/{arguments.steps}/{seed}"
        if key not in results:
            results[key] = trained(name, seed, text, held_out, arguments.steps)
        if arguments.save is not None:
            arguments.save.write_text(json.dumps(results))

ends = {
    name: np.array(
        [results[f"{name}/{arguments.steps}/{i}"]["end"] for i in range(arguments.seeds)]
    )
    for name in names
}
base = ends.get("float32", next(iter(ends.values())))
half = ends.get("bfloat16", np.nan)
shapes = jax.eval_shape(partial(initial, letters=len(alphabet)), jax.random.key(0))
weights, seeds = sum(x.size for x in jax.tree.leaves(shapes)), arguments.seeds
print(f"{weights:,} weights, {arguments.steps} steps of {BATCH * CONTEXT} letters, {seeds} seeds")
print(f"{'trained in':18}{'held-out loss':>14}{'to float32':>12}{'minus bfloat16':>16} (spread)")
for name, values in ends.items():
    difference = values - half  # seed by seed: the same weights, the same text
    spread = difference.std(ddof=1) if len(values) > 1 else np.nan
    row = f"{name:18}{values.mean():14.4f}{values.mean() / base.mean():12.4f}"
    print(f"{row}{difference.mean():+16.4f} ({spread:.4f})")

figure = Figure(figsize=(9, 5), layout="constrained")
axis = figure.subplots()
for name in names:
    curve = results[f"{name}/{arguments.steps}/0"]["losses"]
    axis.plot(np.arange(len(curve)) * CHUNK, curve, label=name, lw=1)
axis.set(xlabel="step", ylabel="nats per letter in training", ylim=(None, 3.5))
axis.legend()
figure.savefig("train_low_precision.png", dpi=120)

assert all(np.isfinite(values).all() for values in ends.values())
assert all((values < np.log(len(alphabet)) - 0.5).all() for values in ends.values())
for name in {"int8", "fp8", "fp8 delayed", "MXFP8", "Adam in 8 bits"} & {*ends}:
    assert abs(ends[name].mean() / base.mean() - 1) < 0.02, name
print("Claims hold: in 8 bits all end within 2 % of float32. See train_low_precision.png.")
