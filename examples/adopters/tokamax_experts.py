"""Experts whose weights jqx quantizes, multiplied by tokamax.

`jqx.ptq` quantizes a mixture of experts that calls `tokamax.ragged_dot`. What runs afterwards is
the same function: tokamax takes the codes, as the `qwix.QArray` that `jqx.interop.to_qarray` makes
of a QTensor, and applies the scales after or inside its own product. So its kernels for TPUs and
GPUs read codes; on CPU it dequantizes them. Prints sites, bytes and cosines, for 8 bits with a
scale for each channel of each expert and for 4 bits in tiles of 32. Asserts that tokamax computes
what jqx computes from the same codes, to 1e-5 of the largest value.

Needs `pip install tokamax`. Takes ten seconds on two cores.
"""

import jax
import jax.numpy as jnp
import tokamax

import jqx

EXPERTS, CHOSEN, WIDTH, HIDDEN, TOKENS = 8, 2, 128, 256, 96


def layer(params, x):
    """Sends each token to the experts of its two largest weights, and adds up their results."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), CHOSEN)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=EXPERTS)
    rows = x[order // CHOSEN]
    gate = tokamax.ragged_dot(rows, params["gate"], sizes)
    hidden = jax.nn.silu(gate) * tokamax.ragged_dot(rows, params["up"], sizes)
    y = tokamax.ragged_dot(hidden, params["down"], sizes)
    y = jnp.zeros_like(y).at[order].set(y).reshape(-1, CHOSEN, y.shape[-1])
    return (y * weights[:, :, None]).sum(axis=1)


def model(params, x):
    """Two such layers."""
    for block in params.values():
        x = x + layer(block, x)
    return x


def random_block(key):
    """Returns the weights of a layer."""
    shapes = {
        "router": (WIDTH, EXPERTS),
        "gate": (EXPERTS, WIDTH, HIDDEN),
        "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
    }
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    return {n: jax.random.normal(keys[n], s) / s[-2] ** 0.5 for n, s in shapes.items()}


def as_qarrays(params):
    """Returns parameters with the arrays of Qwix in place of QTensors."""
    is_coded = lambda x: isinstance(x, jqx.QTensor)  # noqa: E731
    to = lambda x: jqx.interop.to_qarray(x) if is_coded(x) else x  # noqa: E731
    return jax.tree.map(to, params, is_leaf=is_coded)


def size(params):
    """Returns the bytes of all arrays, with two codes of 4 bits in a byte, as chips hold them."""
    bits = lambda x: 4 if x.dtype == jnp.int4 else 8 * x.dtype.itemsize  # noqa: E731
    return sum(x.size * bits(x) // 8 for x in jax.tree.leaves(params))


def cosine(a, b):
    """Returns the cosine of two arrays."""
    return float((a * b).sum() / jnp.linalg.norm(a) / jnp.linalg.norm(b))


def main():
    """Quantizes the model in two schemes."""
    params = {f"block_{i}": random_block(key) for i, key in enumerate(map(jax.random.key, (0, 1)))}
    calibration, x = jax.random.normal(jax.random.key(2), (2, TOKENS, WIDTH))
    expected = jax.jit(model)(params, x)
    print(f"float32: {size(params):,} bytes")
    bounds = {"int8": (0.999, 3.5), "int4:group=32": (0.98, 5.5)}
    for scheme, (least, times) in bounds.items():
        policy = jqx.Policy({".*/(gate|up|down)": scheme})
        # The codes stay in order: `to_qarray` would undo a layout for this machine.
        quantized = jqx.ptq(model, policy, target=False)(params, [calibration])
        experts = [site for site in quantized.plan.sites if site.op == "ragged_dot"]
        y = jax.jit(quantized.function)(quantized.params, x)
        by_tokamax = jax.jit(model)(as_qarrays(quantized.params), x)
        found, error = cosine(by_tokamax, expected), float(abs(by_tokamax - y).max() / abs(y).max())
        codes = size(quantized.params)
        print(f"{scheme}: {len(experts)} sites, {codes:,} bytes, cosine {found:.5f}")
        print(f"  tokamax and jqx differ by {error:.1e} of the largest value")
        assert len(experts) == len(quantized.plan.sites) == 6
        assert error < 1e-5 and found > least and size(params) > times * codes


if __name__ == "__main__":
    main()
