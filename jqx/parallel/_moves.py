"""Moves of the leaves of messages, [messages, ...], between devices."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def to_each(leaf: jax.Array, axis_name: Any) -> jax.Array:
    """Sends each device its message: [devices, ...] to [devices, ...].

    XLA on GPUs (jaxlib 0.10.2) widens 4-bit codes to a byte each in this collective alone. There,
    pairs of codes are sent as the bytes that they occupy in memory, which needs no kernel.
    """
    move = partial(lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0, tiled=True)
    if leaf.dtype.name not in ("int4", "uint4") or leaf.shape[-1] % 2:
        return move(leaf)

    def in_bytes(leaf: jax.Array) -> jax.Array:
        pairs = leaf.reshape(*leaf.shape[:-1], -1, 2)
        received = move(lax.bitcast_convert_type(pairs, jnp.uint8))
        return lax.bitcast_convert_type(received, leaf.dtype).reshape(leaf.shape)

    return lax.platform_dependent(leaf, cuda=in_bytes, rocm=in_bytes, default=move)


def to_next(leaf: jax.Array, axis_name: Any) -> jax.Array:
    """Sends everything to the next device of a ring."""
    count = lax.axis_size(axis_name)
    return lax.ppermute(leaf, axis_name, [(i, (i + 1) % count) for i in range(count)])


def unrolled(count: int) -> int:
    """Returns how many hops of a ring are unrolled. Up to 16 hops make no loop.

    Compilers can then schedule the hops together with other work. XLA on CPU (jaxlib 0.10.2) also
    confuses what devices send in a loop and outside of it, in programs of many collectives.
    """
    return max(1, min(count - 1, 16))


def to_all(leaf: jax.Array, axis_name: Any) -> jax.Array:
    """Sends one message to all devices: [1, ...] to [devices, ...]."""
    return lax.all_gather(leaf, axis_name, tiled=True)


def to_all_in_ring(leaf: jax.Array, axis_name: Any) -> jax.Array:
    """`to_all`, where each device passes on what it received, unchanged."""
    count, index = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def hop(held: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        held = to_next(held, axis_name)
        return held, held[0]

    _, others = lax.scan(hop, leaf, length=count - 1, unroll=unrolled(count))
    return jnp.concatenate([leaf, others])[(index - jnp.arange(count)) % count]
