"""A Llama-like decoder in plain JAX, which knows nothing of quantization.

Layers are a list, each with weights and a cache of its own, and unrolled; or they are stacked, and
scanned over. `prefill` reads a prompt; `step` reads one token for each row and goes on from a
cache. Both return the logits of the last token and the caches.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, Any]
THETA, EPS = 500_000.0, 1e-5
ATTENTION = "attention"  # the scope of what multiplies no weights


@dataclass(frozen=True)
class Config:
    """The sizes of a decoder.

    Attributes:
      layers: how many there are.
      width, hidden: features between layers, and inside of a perceptron.
      heads, kv_heads: of queries; of keys and values, each shared by several of those.
      tokens: of the vocabulary.
      stacked: whether the layers are stacked and scanned over.
      attention: what computes the attention of a prompt, as `jax.nn.dot_product_attention` has it.
    """

    layers: int = 12
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    tokens: int = 32000
    stacked: bool = False
    attention: Literal["xla", "cudnn"] = "xla"

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The weights of a layer, [inputs, outputs]."""
        return {
            "qkv": (self.width, (self.heads + 2 * self.kv_heads) * self.head),
            "out": (self.heads * self.head, self.width),
            "gate_up": (self.width, 2 * self.hidden),
            "down": (self.hidden, self.width),
        }


def initial(config: Config, key: jax.Array) -> Params:
    """Returns random parameters in bfloat16."""
    keys = iter(jax.random.split(key, 4 * config.layers + 2))

    def normal(shape: tuple[int, int]) -> jax.Array:
        return _normal(next(keys), shape)

    def layer() -> Params:
        own: Params = {name: normal(shape) for name, shape in config.matrices.items()}
        ones = jnp.ones(config.width, jnp.bfloat16)
        return own | {"before_attention": ones, "before_perceptron": ones}

    layers = [layer() for _ in range(config.layers)]
    return {
        "embed": normal((config.tokens, config.width)),
        "layers": jax.tree.map(lambda *x: jnp.stack(x), *layers) if config.stacked else layers,
        "norm": jnp.ones(config.width, jnp.bfloat16),
        "head": normal((config.width, config.tokens)),
    }


@partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * shape[0] ** -0.5


def empty_caches(config: Config, batch: int, room: int) -> Any:
    """Returns room for the keys and values of every layer."""

    def empty(*leading: int) -> jax.Array:
        return jnp.zeros((*leading, 2, batch, config.kv_heads, room, config.head), jnp.bfloat16)

    return empty(config.layers) if config.stacked else [empty() for _ in range(config.layers)]


def prefill(config: Config, params: Params, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the logits of the last of `tokens` [batch, time], and the caches of all of them."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=config.attention)
        return y, _cached(k, v)

    return _decode(config, params, tokens, None, 0, attend)


def step(
    config: Config, params: Params, tokens: jax.Array, caches: Any, place: jax.Array
) -> tuple[jax.Array, Any]:
    """Returns the logits of `tokens` [batch, 1] at a place, and the caches with them."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        cache = lax.dynamic_update_slice_in_dim(cache, _cached(k, v), place, axis=3)
        grouped = q.reshape(len(q), config.kv_heads, -1, config.head)
        scores = jnp.einsum(
            "bkgd,bksd->bkgs", grouped, cache[0], preferred_element_type=jnp.float32
        )
        seen = jnp.arange(cache.shape[3]) <= place
        scores = jnp.where(seen, scores * config.head**-0.5, -jnp.inf)
        shares = jax.nn.softmax(scores).astype(q.dtype)
        return jnp.einsum("bkgs,bksd->bkgd", shares, cache[1]).reshape(q.shape), cache

    return _decode(config, params, tokens, caches, place, attend)


def _decode(
    config: Config, params: Params, tokens: jax.Array, caches: Any, start: Any, attend: Any
) -> tuple[jax.Array, Any]:
    turn = _turn(start + jnp.arange(tokens.shape[1]), config.head)

    def layer(x: jax.Array, inputs: tuple[Params, Any]) -> tuple[jax.Array, Any]:
        w, cache = inputs
        batch, time, _ = x.shape
        q, k, v = jnp.split(
            (_norm(x, w["before_attention"]) @ w["qkv"]).reshape(batch, time, -1, config.head),
            [config.heads, config.heads + config.kv_heads],
            axis=2,
        )
        with jax.named_scope(ATTENTION):
            y, cache = attend(_rotated(q, *turn), _rotated(k, *turn), v, cache)
        x = x + y.reshape(batch, time, -1) @ w["out"]
        gate, up = jnp.split(_norm(x, w["before_perceptron"]) @ w["gate_up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ w["down"], cache

    x = params["embed"][tokens]
    if config.stacked:
        x, caches = lax.scan(layer, x, (params["layers"], caches))
    else:
        filled = []
        for w, cache in zip(params["layers"], caches or [None] * config.layers, strict=True):
            x, cache = layer(x, (w, cache))
            filled.append(cache)
        caches = filled
    return _norm(x[:, -1], params["norm"]) @ params["head"], caches


def _cached(k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns keys and values [batch, time, heads, head] as they are cached: heads before time."""
    return jnp.stack([k, v]).swapaxes(2, 3)


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    real = x.astype(jnp.float32)
    unit = real * lax.rsqrt(jnp.mean(real**2, axis=-1, keepdims=True) + EPS)
    return unit.astype(x.dtype) * weight


def _turn(places: jax.Array, head: int) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of rotary embeddings, [time, 1, head / 2]."""
    rates = THETA ** (-jnp.arange(0, head, 2, dtype=jnp.float32) / head)
    angles = places[:, None, None].astype(jnp.float32) * rates
    return jnp.cos(angles), jnp.sin(angles)


def _rotated(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1).astype(x.dtype)
