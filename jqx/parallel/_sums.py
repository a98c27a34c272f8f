"""Two ways to sum the messages of all devices, each on the device that it is for.

    two phases   each device sends a message to every other; the receiver adds them up
    ring         a partial sum passes from device to device; each adds its message

Both send codes, and add in float32. The ring rounds a sum at every device that it passes, so its
error grows with their number. It needs memory for one message in flight.

Source: ZeRO++ (Wang et al., arXiv:2306.10209) for the all-to-all exchange; EQuARX (Ahmed et al.,
arXiv:2506.17615) for the ring that quantizes again at each hop.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._moves import to_each, to_next, unrolled
from ._wire import Wire

Sum = Callable[[Wire, jax.Array, Any, jax.Array | None], tuple[jax.Array, jax.Array]]
"""From [devices, groups, size], a message for each device, to the sum of the messages for this
device, [1, groups, size], and the rounding error of what this device sent, by receiver.
"""


def sum_of_exchanged(
    wire: Wire, groups: jax.Array, axis_name: Any, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """See `Sum`. What a device sends to itself is rounded as well."""
    received, lost = wire.exchange(groups, partial(to_each, axis_name=axis_name), key)
    return received.sum(axis=0, keepdims=True), lost


def sum_in_ring(
    wire: Wire, groups: jax.Array, axis_name: Any, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """See `Sum`. The sum for a device starts at the next device, and ends with its own message."""
    count, index = len(groups), lax.axis_index(axis_name)

    def message(hops: jax.Array | int) -> jax.Array:
        return lax.dynamic_index_in_dim(groups, (index - 1 - hops) % count)

    def hop(total: jax.Array, hops: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = None if key is None else jax.random.fold_in(key, hops)
        received, lost = wire.exchange(total, partial(to_next, axis_name=axis_name), own)
        return received + message(hops + 1), lost[0]

    total, lost = lax.scan(hop, message(0), jnp.arange(count - 1), unroll=unrolled(count))
    lost = jnp.concatenate([lost, jnp.zeros_like(total)])
    return total, lost[(index - 1 - jnp.arange(count)) % count]


SUMS: dict[str, Sum] = {"two_phase": sum_of_exchanged, "ring": sum_in_ring}
