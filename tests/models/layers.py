"""Networks in plain JAX that algorithms rewrite: a Llama, and layers with sites of every kind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays import on_device

TOKENS, WIDTH, HEADS, KEYS, HEAD, HIDDEN, LAYERS = 17, 24, 4, 2, 6, 40, 2
"""Sizes of `llama`: KEYS heads of keys and values, which query heads share."""


def weights(rng, *shape):
    """Weights whose products are about as large as their inputs."""
    scale = np.sqrt(shape[-2]) if len(shape) > 1 else 1
    return on_device(rng.normal(size=shape) / scale, jnp.float32)


def gains(rng, *shape):
    """Gains of norms: numbers about 1."""
    return on_device(rng.uniform(0.7, 1.4, size=shape), jnp.float32)


def conv(x, w, padding="SAME", strides=(1, 1), **options):
    """A convolution of images, channels last."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **options)


def llama_params(*, tied=False, biases=False):
    """Parameters of `llama`; those of layers are stacked."""
    normal, gain = (functools.partial(f, np.random.default_rng(0)) for f in (weights, gains))
    layers = {
        "norm": gain(LAYERS, WIDTH),
        "q": normal(LAYERS, WIDTH, HEADS * HEAD),
        "k": normal(LAYERS, WIDTH, KEYS * HEAD),
        "v": normal(LAYERS, WIDTH, KEYS * HEAD),
        "out": normal(LAYERS, HEADS * HEAD, WIDTH),
        "norm2": gain(LAYERS, WIDTH),
        "gate": normal(LAYERS, WIDTH, HIDDEN),
        "up": normal(LAYERS, WIDTH, HIDDEN),
        "down": normal(LAYERS, HIDDEN, WIDTH),
    }
    if biases:
        layers |= {"v_bias": normal(LAYERS, KEYS * HEAD), "out_bias": normal(LAYERS, WIDTH)}
        layers |= {"down_bias": normal(LAYERS, WIDTH), "gate_bias": normal(LAYERS, HIDDEN)}
    params = {"table": normal(TOKENS, WIDTH), "layers": layers, "norm": gain(WIDTH)}
    return params if tied else params | {"head": normal(WIDTH, TOKENS)}


def unstacked(params):
    """The same in a list of layers."""
    layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(LAYERS)]
    return params | {"layers": layers}


def rms_norm(x, scale):
    """A norm of the last axis."""
    core = x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)
    return core * jnp.broadcast_to(scale, x.shape)


def rotary(x):
    """Rotary embedding of x (batch, time, heads, head)."""
    angles = jnp.arange(float(x.shape[1]))[None, :, None, None] * jnp.array([[[[0.5, 0.3, 0.1]]]])
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def biased(x, w, name):
    """Adds a bias, where there is one."""
    return x + jnp.broadcast_to(w[name], x.shape) if name in w else x


def attention(h, w):
    """Causal attention."""
    q, k, v = (h @ w[name] for name in "qkv")
    q, k, v = (x.reshape(*h.shape[:2], -1, HEAD) for x in (q, k, biased(v, w, "v_bias")))
    mixed = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
    return biased(mixed.reshape(*h.shape[:2], -1) @ w["out"], w, "out_bias")


def llama_layer(x, w):
    """Attention and a gated perceptron behind norms."""
    x = x + attention(rms_norm(x, w["norm"]), w)
    h = rms_norm(x, w["norm2"])
    gate = jax.nn.silu(biased(h @ w["gate"], w, "gate_bias"))
    return biased(x + (gate * (h @ w["up"])) @ w["down"], w, "down_bias")


def llama(params, tokens, checkpointed=False):
    """Layers in a scan, or one by one if they are in a list; the table may be the head too."""
    body = jax.checkpoint(jax.jit(llama_layer)) if checkpointed else llama_layer
    x = params["table"][tokens]
    if isinstance(params["layers"], list):
        for w in params["layers"]:
            x = body(x, w)
    else:
        x = lax.scan(lambda x, w: (body(x, w), None), x, params["layers"])[0]
    return rms_norm(x, params["norm"]) @ params.get("head", params["table"].T)


def sites_of_every_kind(p, x, act=jax.nn.relu, before=lambda x: x, groups=1):
    """Perceptrons in a scan; behind them a convolution, experts, a stack of matrices and a lookup,
    as far as there are parameters. Returns each by its name, and the last value `x`.
    """

    def layer(x, p):
        return x + act(before(x) @ p["up"]) @ p["down"], None

    x = lax.scan(layer, x, {name: p[name] for name in ("up", "down")})[0]
    results = {"x": x}
    if "kernel" in p:
        image = x.reshape(-1, 2, 2, p["kernel"].shape[2] * groups)
        results["kernel"] = conv(image, p["kernel"], feature_group_count=groups)
    if "experts" in p:
        sizes = jnp.array([x.shape[0] // 4, x.shape[0] - x.shape[0] // 4], jnp.int32)
        results["experts"] = lax.ragged_dot(x, p["experts"], sizes)
    if "stack" in p:
        rows = x.reshape(2, -1, x.shape[1])
        results["stack"] = jnp.einsum("bsk,bkn->bsn", rows, p["stack"])
    if "table" in p:
        results["table"] = p["table"][jnp.arange(3)]
    return results
