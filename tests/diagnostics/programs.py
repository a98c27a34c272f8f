"""Small functions whose lowering is known, for tests of several files."""

import jax
import jax.numpy as jnp

import jqx


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def codes(*dims, qtype=jnp.int8, granularity=None):
    """An abstract weight [K, N]."""
    spec = jqx.QSpec(qtype, granularity or jqx.per_axis(1))
    return jax.eval_shape(lambda w: jqx.QTensor.quantize(w, spec), shape(*dims))


def two_layers(params, x):
    """A layer, and one with the same shapes under another name."""
    return jax.nn.relu(x @ params["w"]) @ params["v"]


def looped(params, x):
    """Layers under a scan, and attention without weights."""
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
    with jax.named_scope("scores"):
        scores = h @ h.T
    return scores @ h


def by_hand(w, x):
    """What not to do: the weight is dequantized before the product."""
    return x @ (w.values.astype(jnp.float32) * w.scale)
