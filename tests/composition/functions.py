"""Functions of few lines in which a weight, a table or a loop is written as models write them.

Each takes `(params, x, tokens)` with x float32 [B, 16] and tokens int32 [B], and returns an array
[B, ...], for any B. `together` makes one function of many, so that a plan, a calibration and a
compilation serve all of them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

WIDTH, WORDS, LAYERS, EXPERTS = 16, 12, 3, 2

Params = dict[str, jax.Array]


class Case(NamedTuple):
    """A function, the shapes of its parameters, and how many of its contractions have weights."""

    f: Callable[..., jax.Array]
    shapes: dict[str, tuple[int, ...]]


CASES: dict[str, Case] = {}


def case(**shapes: tuple[int, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a function to `CASES`, under its name."""

    def add(f: Callable[..., Any]) -> Callable[..., Any]:
        CASES[f.__name__] = Case(f, shapes)
        return f

    return add


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    size = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return x * size * jnp.expand_dims(gain, tuple(range(x.ndim - 1)))


def bias(x: jax.Array, b: jax.Array) -> jax.Array:
    return x + jnp.expand_dims(b, tuple(range(x.ndim - 1)))


# Views of weights


@case(w=(16, 48))
def split(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    q, k, v = (x @ part for part in jnp.split(p["w"], 3, axis=1))
    return jax.nn.sigmoid(q) * jnp.tanh(k) + v


@case(w=(16, 48))
def sliced_columns(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return (x @ p["w"][:, :20]) * (x @ p["w"][:, 20:40])


@case(w=(32, 16))
def sliced_rows(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w"][:16]) @ p["w"][16:]


@case(w=(16, 32), o=(32, 16))
def heads(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    h = jnp.einsum("bd,dhk->bhk", x, p["w"].reshape(16, 4, 8))
    return jnp.einsum("bhk,hkd->bd", jax.nn.gelu(h), p["o"].reshape(4, 8, 16))


@case(w=(3, 16, 4, 4))
def fused_heads(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    q, k, v = jnp.einsum("bd,cdhk->cbhk", x, p["w"])
    return jax.nn.softmax(q * k, axis=-1) * v


@case(w=(16, 16), v=(16, 8))
def joined(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return x @ jnp.concatenate([p["w"], p["v"]], axis=1)


@case(w=(16, 16))
def reversed_columns(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return x @ p["w"][:, ::-1]


@case(w=(16, 16))
def reversed_rows(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return x @ p["w"][::-1]


@case(w=(32, 16))
def strided_rows(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return x @ p["w"][::2]


@case(w=(8, 16))
def transposed(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return x @ p["w"].T


@case(w=(3, 16, 16))
def one_of_a_stack(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return x @ p["w"][1] + jnp.tanh(x @ p["w"][2])


@case(w=(48, 16))
def sliced_at_run_time(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    def step(i, h):
        return jnp.tanh(h @ lax.dynamic_slice(p["w"], (i * 16, 0), (16, 16)))

    return lax.fori_loop(0, 3, step, x)


@case(w=(16, 16))
def named_by_checkpoint(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return x @ lax.optimization_barrier(checkpoint_name(p["w"], "weights"))


@case(w=(16, 16))
def cast(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return (x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32)


# Weights that several readers share


@case(w=(16, 16))
def used_twice(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w"]) @ p["w"]


@case(w=(16, 16), b=(16,))
def one_bias_twice(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return bias(jax.nn.relu(bias(x @ p["w"], p["b"])) @ p["w"].T, p["b"])


@case(table=(12, 16), w=(16, 16), gain=(16,))
def tied_head(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    h = norm(p["table"][tokens] + x, p["gain"])
    return jax.nn.gelu(h @ p["w"]) @ p["table"].T


@case(table=(12, 16), a=(16, 8), c=(16, 8))
def two_towers(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    other = p["table"][(tokens + 3) % 12]
    return (p["table"][tokens] @ p["a"]) * (other @ p["c"])


@case(table=(12, 16), w=(16, 16))
def two_lookups_added(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return (p["table"][tokens] + p["table"][(tokens * 5) % 12]) @ p["w"]


@case(table=(12, 16), w=(3, 16, 16))
def lookup_in_each_step(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    def step(h: jax.Array, item: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        i, w = item
        return h + p["table"][(tokens + i) % 12] @ w, None

    return lax.scan(step, x, (jnp.arange(3, dtype=jnp.int32), p["w"]))[0]


@case(table=(12, 16), a=(8, 8), c=(8, 8))
def slices_of_one_lookup(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    row = p["table"][tokens]
    return (row[:, :8] @ p["a"]) * (row[:, 8:] @ p["c"])


@case(table=(12, 16), a=(16, 8), c=(16, 8))
def lookup_in_branches(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    def left():
        return p["table"][tokens] @ p["a"]

    def right():
        return p["table"][(tokens + 1) % 12] @ p["c"]

    return lax.cond(x[0, 0] > 0, left, right) + left() + right()


@case(latents=(5, 16), q=(16, 16), v=(16, 16))
def learned_queries(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    scores = (x @ p["v"]) @ (p["latents"] @ p["q"]).T
    return jax.nn.softmax(scores / 4) @ p["latents"]


@case(a=(16, 32), c=(16, 32), o=(32, 16), gain=(16,))
def gated(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    h = norm(x, p["gain"])
    return x + (jax.nn.silu(h @ p["a"]) * (h @ p["c"])) @ p["o"]


# Loops, branches, experts


@case(w=(3, 16, 16), b=(3, 16), gain=(3, 16), o=(16, 8))
def layers(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    def layer(h: jax.Array, own: Params) -> tuple[jax.Array, None]:
        return h + jax.nn.gelu(bias(norm(h, own["gain"]) @ own["w"], own["b"])), None

    stack = {name: p[name] for name in ("w", "b", "gain")}
    return lax.scan(jax.checkpoint(layer), x, stack)[0] @ p["o"]


@case(w=(3, 16, 16))
def one_stack_in_two_scans(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    def step(h, w):
        return (jnp.tanh(h @ w), None)

    return lax.scan(step, x, p["w"])[0] * lax.scan(step, x, p["w"], reverse=True)[0]


@case(w=(2, 3, 16, 16))
def loops_in_loops(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    def step(h, w):
        return (jnp.tanh(h @ w), None)

    return lax.scan(lambda h, ws: lax.scan(step, h, ws), x, p["w"])[0]


@case(w=(3, 16, 16))
def keys_in_a_loop(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    def step(h: jax.Array, item: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        w, key = item
        is_kept = jax.random.key_data(key)[1] % 2 == 0  # as dropout does, without its random bits
        return jnp.where(is_kept, jnp.tanh(h @ w), h), None

    return lax.scan(step, x, (p["w"], jax.random.split(jax.random.key(0), 3)))[0]


@case(w=(16, 16), v=(16, 16))
def branches(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return lax.cond(x[0, 0] > 0, lambda: x @ p["w"], lambda: jnp.tanh(x @ p["v"])) @ p["w"]


@case(router=(16, 2), up=(2, 16, 24), down=(2, 24, 16))
def experts(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    shares = jax.nn.softmax(x @ p["router"])
    h = jax.nn.silu(jnp.einsum("bd,edf->bef", x, p["up"]))
    return jnp.einsum("bef,efd,be->bd", h, p["down"], shares)


@case(up=(2, 16, 16))
def rows_of_experts(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    second = (tokens % 2).sum()  # as if rows were sorted
    return lax.ragged_dot(x, p["up"], jnp.stack([x.shape[0] - second, second]).astype(jnp.int32))


@case(w=(3, 1, 8), d=(3, 1, 8), o=(8, 16))
def convolutions(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    conv = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1,),
        padding="SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
    )
    h = jax.nn.relu(conv(x[:, :, None], p["w"]))
    return conv(h, p["d"], feature_group_count=8).mean(1) @ p["o"]


@case(w=(2, 16, 16))
def mapped(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return jax.vmap(lambda w: jnp.tanh(x @ w), out_axes=1)(p["w"])


@case(w=(16, 16), v=(8, 8))
def parts_of_activations(p: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    h = x @ p["w"]
    h = jnp.concatenate([h[:, 8:] * h[:, 0:1], -h[:, :8]], axis=-1)
    return (h[..., :8] * h[..., 8:]) @ p["v"]


def parameters(shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> dict[str, Any]:
    """Random parameters; channels of tables differ in size, so that scaling has work to do."""
    values = {}
    for name, shape in shapes.items():
        size = shape[-2] ** -0.5 if len(shape) > 1 else 0.3
        value = rng.standard_normal(shape) * size + (name == "gain")
        if name == "table":
            value = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[-1]))
        values[name] = value.astype(np.float32)
    return values


def together(names: tuple[str, ...]) -> Callable[..., dict[str, jax.Array]]:
    """Returns one function with the results of many, of parameters by name."""

    def f(params: dict[str, Params], x: jax.Array, tokens: jax.Array) -> dict[str, jax.Array]:
        return {name: CASES[name].f(params[name], x, tokens) for name in names}

    return f


def inputs(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns x with channels of unequal size, and tokens. Conditions hold for odd seeds."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(0.5 * np.random.default_rng(0).standard_normal(WIDTH))
    x = (rng.standard_normal((rows, WIDTH)) * sizes).astype(np.float32)
    x[0, 0] = 1 if seed % 2 else -1
    return x, rng.integers(0, WORDS, rows).astype(np.int32)
