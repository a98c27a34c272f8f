"""A function whose weights lie on several devices writes the text of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jqx.algorithms import own_text

from .devices import TABLE

WORDS, WIDTH, HEADS, LAYERS, ROWS, LENGTH = 48, 32, 4, 2, 4, 40


def weights(seed, *shape):
    values = np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-2])
    return values.astype(np.float32)


PARAMS = {
    "table": 1.5 * weights(0, WORDS, WIDTH),
    "qkv": weights(1, LAYERS, WIDTH, 3 * WIDTH),
    "out": weights(2, LAYERS, WIDTH, WIDTH),
}
SPECS = {"table": P(), "qkv": P(None, None, "b"), "out": P(None, "b")}


def attend(q, k, v, mask):
    q, k, v = (x.reshape(*x.shape[:2], HEADS, -1) for x in (q, k, v))
    scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3, -1e30)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(*mixed.shape[:2], WIDTH)


def decoder(params, tokens):
    """Logits of a decoder of two layers, scanned."""

    def layer(x, p):
        mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1]), bool))
        return x + attend(*jnp.split(x @ p["qkv"], 3, -1), mask) @ p["out"], None

    x, _ = jax.lax.scan(layer, params["table"][tokens], {k: params[k] for k in ("qkv", "out")})
    return x @ params["table"].T


def step(params, cache, tokens, position):
    """The same for a token of each row, with a cache of keys and values."""
    x, kept = params["table"][tokens][:, None], []
    for i in range(LAYERS):
        q, *new = jnp.split(x @ params["qkv"][i], 3, -1)
        own = jax.lax.dynamic_update_slice(cache[i], jnp.stack(new), (0, 0, position, 0))
        seen = (jnp.arange(LENGTH) <= position)[None, None, None]
        x = x + attend(q, *own, seen) @ params["out"][i]
        kept.append(own)
    kept = jnp.stack(kept)
    jax.debug.inspect_array_sharding(kept, callback=LAID_OUT.append)
    return (x @ params["table"].T)[:, 0], kept


LAID_OUT = []
CACHE = np.zeros((LAYERS, 2, ROWS, LENGTH, WIDTH), np.float32)


def on_mesh(x, spec):
    return jax.device_put(x, NamedSharding(TABLE, spec))


@pytest.mark.parametrize("way", ["function", "step"])
def test_text_of_sharded_weights_is_that_of_one_device(way):
    """Sums over several devices round in another order, which changes none of these tokens. The
    cache stays on the devices, and so do the weights.
    """
    f, caches = (decoder, []) if way == "function" else (step, [CACHE])
    options = {"rows": ROWS, "length": LENGTH, "progress": False}
    expected = np.asarray(own_text(f, PARAMS, *caches, **options))
    assert len(np.unique(expected)) > WORDS / 2
    params = {name: on_mesh(x, SPECS[name]) for name, x in PARAMS.items()}
    places = {name: x.sharding for name, x in params.items()}
    spec = P(None, None, "a", None, "b")
    LAID_OUT.clear()
    found = own_text(f, params, *(on_mesh(x, spec) for x in caches), **options)
    np.testing.assert_array_equal(found, expected)
    assert found.sharding.device_set == set(TABLE.devices.flat)
    for name, x in params.items():
        assert x.sharding == places[name]
        np.testing.assert_array_equal(x, PARAMS[name])
    if way == "step":
        own = NamedSharding(TABLE, spec)
        assert LAID_OUT
        assert all(x.is_equivalent_to(own, CACHE.ndim) for x in LAID_OUT), LAID_OUT
