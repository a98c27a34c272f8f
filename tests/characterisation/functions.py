"""Small functions of parameters and batches, one for each way in which a function uses a weight."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import jqx
import jqx.linen
import jqx.nnx

from ..arrays import on_device

WIDTH, HEADS, LENGTH, WORDS, LAYERS, EXPERTS = 8, 2, 8, 20, 2, 3


@dataclasses.dataclass(frozen=True)
class Model:
    """A function, its parameters and two batches, on the second of which results are recorded.

    Attributes:
      function: takes the parameters and a batch.
      params: its weights, as float32 arrays.
      batches: tuples of the other arguments.
      names: as in `jqx.make_plan`.
      ptq: takes what `jqx.ptq` takes after the function, and then the batches.
      weight: as in `jqx.ptq`.
      policies: those to record besides the presets, by name.
    """

    function: Callable[..., Any]
    params: Any
    batches: tuple[tuple[Any, ...], ...]
    names: Any = None
    ptq: Callable[..., Any] | None = None
    weight: Callable[..., Any] | None = None
    policies: Mapping[str, jqx.Policy] = dataclasses.field(default_factory=dict)

    def quantize(self, policy: jqx.Policy, algorithm: Any) -> jqx.Quantized:
        """Quantizes it with an algorithm, on its batches; codes are in their default layout."""
        options: dict[str, Any] = {"target": False, "progress": False, "weight": self.weight}
        if self.ptq is not None:
            return self.ptq(policy, algorithm, **options)(self.batches)
        return jqx.ptq(self.function, policy, algorithm, **options)(self.params, self.batches)


def normal(seed: int, *shape: int) -> jax.Array:
    """A weight whose columns have different sizes, so that channels differ."""
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(size=shape[-1:]) / 2)
    fan = shape[-2] if len(shape) > 1 else 1
    return on_device(rng.normal(size=shape) * spread / fan**0.5, np.float32)


def rows(*shape: int) -> tuple[tuple[Any, ...], ...]:
    """Two batches of floats, some channels of which are larger."""
    each = (np.random.default_rng(seed).normal(size=shape) for seed in (100, 101))
    sizes = np.exp(np.random.default_rng(102).normal(size=shape[-1:]))
    return tuple((on_device(x * sizes, np.float32),) for x in each)


def texts(batch: int = 3, words: int = WORDS) -> tuple[tuple[Any, ...], ...]:
    """Two batches of tokens."""
    each = (np.random.default_rng(seed).integers(1, words, (batch, LENGTH)) for seed in (100, 101))
    return tuple((on_device(x, np.int32),) for x in each)


def rms(x: jax.Array, gain: jax.Array) -> jax.Array:
    """RMSNorm over the last axis."""
    x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    return x * gain.reshape((1,) * (x.ndim - 1) + gain.shape)


def heads(x: jax.Array) -> jax.Array:
    """Splits the last axis into heads."""
    return x.reshape(*x.shape[:-1], HEADS, -1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Attention of [batch, length, width], with heads."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", heads(q), heads(k)) / (WIDTH // HEADS) ** 0.5
    scores = scores if mask is None else jnp.where(mask, scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads(v)).reshape(q.shape)


def causal(length: int) -> jax.Array:
    """The mask of a causal decoder."""
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


def block(x: jax.Array, p: Any, mask: jax.Array) -> jax.Array:
    """A residual block of attention and a gated perceptron, each after a norm."""
    q, k, v = jnp.split(rms(x, p["norm"]) @ p["qkv"], 3, -1)
    x = x + attend(q, k, v, mask) @ p["out"]
    h = rms(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def block_params(seed: int, *layers: int) -> dict[str, jax.Array]:
    """Parameters of `block`, or of a stack of them."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"gate": (WIDTH, 12), "up": (WIDTH, 12), "down": (12, WIDTH)}
    made = {
        name: normal(seed + i, *layers, *shape) for i, (name, shape) in enumerate(shapes.items())
    }
    gains = {
        name: on_device(1 + np.asarray(normal(seed + 8 + i, *layers, WIDTH)) / 8)
        for i, name in enumerate(("norm", "norm2"))
    }
    return made | gains


MODELS: dict[str, Callable[[], Model]] = {}
"""How each function is made, by its name."""


def model(f: Callable[[], Model]) -> Callable[[], Model]:
    """Adds a function to `MODELS`; it is made once."""
    MODELS[f.__name__] = functools.cache(f)
    return MODELS[f.__name__]


@model
def mlp() -> Model:
    """Two layers with biases; 24 inputs do not fill a group of 32, and 40 leave a tail."""

    def f(p, x):
        h = jax.nn.relu(x @ p["a"]["kernel"] + p["a"]["bias"][None])
        return h @ p["b"]["kernel"] + p["b"]["bias"][None]

    a = {"kernel": normal(0, 24, 40), "bias": normal(1, 40)}
    b = {"kernel": normal(2, 40, 5), "bias": normal(3, 5)}
    return Model(f, {"a": a, "b": b}, rows(24, 24))


@model
def transposed() -> Model:
    """A weight that is transposed first, and half of one that is cut and reshaped."""

    def f(p, x):
        h = jnp.tanh(x @ p["w"].T)
        return h @ p["v"][:24].reshape(24, 8)

    return Model(f, {"w": normal(0, 24, 20), "v": normal(1, 30, 2, 4)}, rows(16, 20))


@model
def joined() -> Model:
    """Two weights that are joined for one product, and a product of two weights."""

    def f(p, x):
        h = jnp.tanh(x @ jnp.concatenate([p["q"], p["k"]], 1))
        return h @ (p["down"] @ p["up"])

    params = {"q": normal(0, 12, 10), "k": normal(1, 12, 6)}
    params |= {"down": normal(2, 16, 4), "up": normal(3, 4, 8)}
    return Model(f, params, rows(24, 12))


@model
def left_in_float() -> Model:
    """Products that no preset can quantize, each for another reason, and one that all can."""
    closed, key = normal(9, 10, 10), jax.random.key(0)

    def f(p, x):
        h = x @ p["plain"]
        h = jnp.tanh(h @ (p["squared"] * p["squared"]) + h @ closed)
        h = h @ jax.random.normal(key, (10, 10))
        h = h @ p["cast"].astype(jnp.bfloat16).astype(jnp.float32).T
        h = jnp.einsum("bi,bj->b", h, h @ p["counts"].astype(jnp.float32))
        return h + p["vector"][x.shape[1] - 1] + (p["unread"] * 2).sum()

    params = {name: normal(i, 10, 10) for i, name in enumerate(("plain", "squared", "cast"))}
    params |= {"counts": jnp.arange(100).reshape(10, 10) % 7, "unread": normal(4, 3, 3)}
    return Model(f, params | {"vector": normal(5, 20)}, rows(16, 10))


@model
def shared() -> Model:
    """One weight at two sites, which contract the same axis of it."""

    def f(p, x):
        h = jnp.tanh(x @ p["w"])
        return jnp.tanh(h @ p["w"]) @ p["v"]

    return Model(f, {"w": normal(0, 20, 20), "v": normal(1, 20, 6)}, rows(24, 20))


@model
def tied() -> Model:
    """A table that is looked up, and multiplied by as the head."""

    def f(p, tokens):
        return jnp.tanh(p["table"][tokens] @ p["w"]) @ p["table"].T

    params = {"table": normal(0, WORDS, WIDTH), "w": normal(1, WIDTH, WIDTH)}
    return Model(f, params, texts(), policies={"tables": jqx.presets.w4a8(tables="int8")})


@model
def fused_attention() -> Model:
    """Attention whose queries, keys and values are one product."""

    def f(p, x):
        q, k, v = jnp.split(x @ p["qkv"], 3, -1)
        return attend(q, k, v) @ p["out"]

    params = {"qkv": normal(0, WIDTH, 3 * WIDTH), "out": normal(1, WIDTH, WIDTH)}
    return Model(f, params, rows(2, 6, WIDTH))


@model
def several_axes() -> Model:
    """Einsums that keep or contract two axes of a weight."""

    def f(p, x):
        h = jnp.tanh(jnp.einsum("bti,hid->bthd", x, p["in"]))
        return jnp.einsum("bthd,hdo->bto", h, p["out"])

    params = {"in": normal(0, HEADS, 12, 10), "out": normal(1, HEADS, 10, 6)}
    return Model(f, params, rows(2, 6, 12))


@model
def conv1d() -> Model:
    """A convolution over time with strides, and a product."""

    def f(p, x):
        dims = ("NWC", "WIO", "NWC")
        h = lax.conv_general_dilated(x, p["taps"], (2,), "SAME", dimension_numbers=dims)
        return jax.nn.relu(h) @ p["w"]

    return Model(f, {"taps": normal(0, 3, 10, 16), "w": normal(1, 16, 6)}, rows(4, 8, 10))


@model
def conv2d() -> Model:
    """A convolution of images, one for each channel, and one of 1x1."""

    def f(p, x):
        dims = ("NHWC", "HWIO", "NHWC")
        conv = partial(lax.conv_general_dilated, padding="SAME", dimension_numbers=dims)
        h = jax.nn.relu(conv(x, p["full"], (1, 1)) + p["bias"][None, None, None])
        h = jax.nn.relu(conv(h, p["deep"], (2, 2), feature_group_count=8))
        return conv(h, p["point"], (1, 1)).mean((1, 2))

    params = {"full": normal(0, 3, 3, 3, 8), "deep": normal(1, 3, 3, 1, 8)}
    params |= {"point": normal(2, 1, 1, 8, 10), "bias": normal(3, 8)}
    return Model(f, params, rows(2, 6, 6, 3))


@model
def scanned() -> Model:
    """A scan over stacked layers."""

    def f(p, x):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])
        return x @ p["head"]

    params = {"layers": normal(0, 3, 16, 16), "head": normal(1, 16, 6)}
    steps = jqx.Policy({"layers[0]": "int8", "head": "float", ".*": "int4:group=8"})
    return Model(f, params, rows(16, 16), policies={"steps": steps})


@model
def nested() -> Model:
    """A scan inside a scan, and rematerialization inside both."""

    def f(p, x):
        @jax.checkpoint
        def step(x, w):
            return jnp.tanh(x @ w), None

        x, _ = lax.scan(lambda x, w: lax.scan(step, x, w), x, p["layers"])
        return x @ p["head"]

    return Model(f, {"layers": normal(0, 2, 2, 14, 14), "head": normal(1, 14, 6)}, rows(16, 14))


@model
def branches() -> Model:
    """A cond with a weight in each branch, and one that both use."""

    def f(p, x):
        h = lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ p["a"]), lambda x: x @ p["b"], x)
        return h @ p["v"]

    params = {"a": normal(0, 14, 14), "b": normal(1, 14, 14), "v": normal(2, 14, 6)}
    (x,), (y,) = rows(16, 14)
    return Model(f, params, ((x.at[0, 0].set(1.0),), (y.at[0, 0].set(-1.0),)))


@model
def loop() -> Model:
    """A while loop that multiplies by one weight in each step."""

    def f(p, x):
        step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["w"]))  # noqa: E731
        _, x = lax.while_loop(lambda c: c[0] < 3, step, (jnp.int32(0), x))
        return x @ p["v"]

    return Model(f, {"w": normal(0, 16, 16), "v": normal(1, 16, 6)}, rows(16, 16))


@model
def mapped_experts() -> Model:
    """Experts by vmap, all on all rows, mixed by a router."""

    def f(p, x):
        expert = lambda up, down: jax.nn.relu(x @ up) @ down  # noqa: E731
        each = jax.vmap(expert)(p["up"], p["down"])
        return jnp.einsum("ebd,be->bd", each, jax.nn.softmax(x @ p["router"]))

    params = {"up": normal(0, EXPERTS, 12, 14), "down": normal(1, EXPERTS, 14, 10)}
    return Model(f, params | {"router": normal(2, 12, EXPERTS)}, rows(16, 12))


@model
def ragged_experts() -> Model:
    """Experts that each see the rows that a router sends them."""

    def f(p, x):
        expert = jnp.argmax(x @ p["router"], -1)
        order = jnp.argsort(expert)
        counts = jnp.bincount(expert, length=EXPERTS).astype(jnp.int32)
        h = jax.nn.relu(lax.ragged_dot(x[order], p["up"], counts))
        return lax.ragged_dot(h, p["down"], counts)[jnp.argsort(order)]

    params = {"up": normal(0, EXPERTS, 12, 14), "down": normal(1, EXPERTS, 14, 10)}
    return Model(f, params | {"router": normal(2, 12, EXPERTS)}, rows(64, 12))


@model
def cached() -> Model:
    """A step of a decoder that appends to a quantized cache and attends to it."""

    def f(p, tokens):
        x = p["table"][tokens]
        q, k, v = jnp.split(x @ p["qkv"], 3, -1)
        sizes = {"heads": HEADS, "width": WIDTH // HEADS}
        cache = jqx.KVCache.empty(batch=x.shape[0], length=16, format="int4", **sizes)
        mixed = cache.append(heads(k), heads(v)).attend(heads(q))
        return (x + mixed.reshape(x.shape) @ p["out"]) @ p["head"]

    params = {"table": normal(0, WORDS, WIDTH), "qkv": normal(1, WIDTH, 3 * WIDTH)}
    params |= {"out": normal(2, WIDTH, WIDTH), "head": normal(3, WIDTH, WORDS)}
    return Model(f, params, texts())


@model
def updated() -> Model:
    """A decoder that is given its cache, and returns it with new keys and values."""

    def f(p, tokens, cache, start):
        x = p["table"][tokens]
        q, *new = jnp.split(x @ p["qkv"], 3, -1)
        zero = jnp.zeros_like(start)
        k, v = (
            lax.dynamic_update_slice(c, y, (zero, start, zero))
            for c, y in zip(cache, new, strict=True)
        )
        seen = jnp.arange(k.shape[1])[None] <= start + jnp.arange(x.shape[1])[:, None]
        return attend_to(q, k, v, seen) @ p["head"], (k, v)

    def attend_to(q, k, v, seen):
        scores = jnp.where(seen[None], jnp.einsum("bqd,bkd->bqk", q, k), -1e30)
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)

    params = {"table": normal(0, WORDS, WIDTH), "qkv": normal(1, WIDTH, 3 * WIDTH)}
    cache = tuple(normal(seed, 3, 12, WIDTH) for seed in (5, 6))
    batches = tuple((*tokens, cache, jnp.int32(3)) for tokens in texts())
    return Model(f, params | {"head": normal(2, WIDTH, WORDS)}, batches)


@model
def linen_module() -> Model:
    """A linen module with attention, a norm and a perceptron."""

    class Layer(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            x = x + flax.linen.MultiHeadDotProductAttention(HEADS)(flax.linen.LayerNorm()(x))
            return flax.linen.Dense(6)(jax.nn.gelu(flax.linen.Dense(20)(x)))

    module, batches = Layer(), rows(2, 6, 12)
    shapes = jax.eval_shape(module.init, jax.random.key(0), *batches[0])
    params = drawn(shapes)
    ptq = lambda policy, algorithm, **options: partial(  # noqa: E731
        jqx.linen.ptq(module, policy, algorithm, **options), params
    )
    return Model(module.apply, params, batches, {"params": ""}, ptq)


@model
def nnx_module() -> Model:
    """An nnx module with a convolution, a norm and a perceptron."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(8, 12, (3,), rngs=rngs)
            self.norm = nnx.RMSNorm(12, rngs=rngs)
            self.up, self.down = nnx.Linear(12, 20, rngs=rngs), nnx.Linear(20, 6, rngs=rngs)

        def __call__(self, x):
            return self.down(jax.nn.gelu(self.up(self.norm(self.conv(x)))))

    graph, shapes = nnx.split(nnx.eval_shape(lambda: Layer(nnx.Rngs(0))))
    state = drawn(shapes)
    function = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    ptq = partial(jqx.nnx.ptq, nnx.merge(graph, state))
    return Model(function, state, rows(2, 6, 8), ptq=ptq)


def drawn(shapes: Any) -> Any:
    """Parameters of a module: biases and gains near one, and weights."""
    leaves, tree = jax.tree.flatten(shapes)
    each = [
        normal(i, *x.shape) if len(x.shape) > 1 else 1 + normal(i, *x.shape) / 8
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, each)


@model
def residual() -> Model:
    """A stack of residual blocks of floats, with RMSNorm, that a scan steps over."""

    def f(p, x):
        step = lambda x, w: (block(x, w, causal(x.shape[1])), None)  # noqa: E731
        x, _ = lax.scan(step, x, p["layers"])
        return rms(x, p["norm"]) @ p["head"]

    params = {"layers": block_params(0, LAYERS), "norm": 1 + normal(20, WIDTH) / 8}
    params |= {"head": normal(21, WIDTH, 10)}
    last = jqx.Policy({"layers[-1]/.*": "int8", ".*": jqx.presets.w4a8()})
    return Model(f, params, rows(2, 6, WIDTH), policies={"steps": last})


@model
def decoder() -> Model:
    """A causal language model of two layers with tied tables."""

    def f(p, tokens):
        x = p["table"][tokens]
        for layer in p["layers"]:
            x = block(x, layer, causal(tokens.shape[1]))
        return rms(x, p["norm"]) @ p["table"].T

    params = {"table": normal(0, WORDS, WIDTH), "norm": 1 + normal(1, WIDTH) / 8}
    return Model(f, params | {"layers": [block_params(10), block_params(30)]}, texts())


@model
def padded() -> Model:
    """An encoder of padded tokens, which no token attends to and the mean leaves out."""

    def f(p, tokens):
        is_word = tokens != 0
        x = p["table"][tokens] + p["places"][None, : tokens.shape[1]]
        x = block(x, p["layer"], is_word[:, None, None])
        share = is_word.astype(jnp.float32)
        share /= share.sum(1, keepdims=True)
        return jnp.einsum("btd,bt->bd", x, share) @ p["head"]

    ends = jnp.array([LENGTH, 5, 3])[:, None]
    batches = tuple((jnp.where(jnp.arange(LENGTH)[None] < ends, x, 0),) for (x,) in texts())
    params = {"table": normal(0, WORDS, WIDTH), "places": normal(1, LENGTH, WIDTH)}
    params |= {"layer": block_params(10), "head": normal(2, WIDTH, 6)}
    return Model(f, params, batches, weight=lambda tokens: tokens != 0)
