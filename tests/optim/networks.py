"""Two small networks, and what training them with an optimizer of optax comes to.

Labels are partly random, so that losses end well above zero, where a percent of them means
something. Some tensors are smaller than a block, and some have sizes that blocks do not divide.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..arrays import normal, on_device

ROWS, BATCH = 1024, 64

FIELDS = {
    "adam": ("mu", "nu"),
    "lion": ("mu",),
    "muon": ("mu", "nu"),
    "adafactor": ("v_row", "v_col", "v", "ema"),
}
"""The fields that hold floats in the states of each optimizer."""

POSITIVE = ("nu", "v_row", "v_col", "v")
"""Those of them that hold second moments."""


def optimizer(name, steps):
    """An optimizer of optax, whose rate falls to 0."""
    rates = {"adam": 3e-3, "lion": 1e-3, "muon": 1e-2, "adafactor": 1e-2}
    rate = optax.cosine_decay_schedule(rates[name], steps)
    if name == "adafactor":
        return optax.adafactor(rate, min_dim_size_to_factor=32, momentum=0.9)
    return {"adam": optax.adam, "lion": optax.lion, "muon": optax.contrib.muon}[name](rate)


def choices(fields, name="8bit"):
    """The spec of each field: the one without zero for second moments."""
    return {x: f"{name}_positive" if x in POSITIVE else name for x in fields}


def labelled(seed, classes):
    """Inputs of 32 numbers, and labels that a random network gives to three quarters of them."""
    x = normal(seed, ROWS, 32)
    rng = np.random.default_rng(seed + 1)
    hidden = np.tanh(np.asarray(x) @ rng.standard_normal((32, 16)) / 4)
    y = (hidden @ rng.standard_normal((16, classes))).argmax(-1)
    flipped = rng.random(ROWS) < 0.25
    return x, on_device(np.where(flipped, rng.integers(0, classes, ROWS), y), np.int32)


def entropy(logits, y):
    """The mean cross entropy."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()


def dense_init(key):
    first, second = jax.random.split(key)
    return {
        "up": jax.random.normal(first, (32, 48)) / 6,
        "bias": jnp.zeros(48),
        "down": jax.random.normal(second, (48, 10)) / 7,
    }


def dense_loss(params, x, y):
    hidden = jnp.maximum(x @ params["up"] + params["bias"][None], 0)
    return entropy(hidden @ params["down"], y)


def gated_init(key):
    first, second = jax.random.split(key)
    return {
        "in": jax.random.normal(first, (2, 32, 37)) / 6,
        "norm": jnp.ones(37),
        "out": jax.random.normal(second, (37, 7)) / 6,
        "gain": jnp.ones(1),
    }


def gated_loss(params, x, y):
    gate, value = jnp.einsum("ni,gih->gnh", x, params["in"])
    hidden = jax.nn.silu(gate) * value
    hidden = hidden / jnp.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6) * params["norm"][None]
    return entropy(hidden @ params["out"] * params["gain"][None], y)


NETWORKS = {"dense": (dense_init, dense_loss, 10), "gated": (gated_init, gated_loss, 7)}


def losses(network, tx, steps, seeds):
    """The final losses over all rows, one for each seed of weights and batches."""
    init, loss, classes = NETWORKS[network]
    x, y = labelled(0, classes)

    def trained(seed):
        key, batches = jax.random.split(jax.random.key(seed))
        params, rows = init(key), jax.random.randint(batches, (steps, BATCH), 0, ROWS)

        def step(carry, rows):
            params, state = carry
            updates, state = tx.update(jax.grad(loss)(params, x[rows], y[rows]), state, params)
            return (optax.apply_updates(params, updates), state), None

        params, _ = jax.lax.scan(step, (params, tx.init(params)), rows)[0]
        return loss(params, x, y)

    return jax.jit(jax.vmap(trained))(seeds)
