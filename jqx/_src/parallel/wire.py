"""Messages between devices: how they are quantized, sent and added up.

A message is cut into groups, possibly rotated, and becomes a QTensor, whose leaves are sent.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import QSpec, QTensor, RoundMode, per_group
from ...gradients import ste, stochastic_round
from ...numerics import Block, format_of
from ..algorithms.hadamard import factors_of, hadamard, is_order, signs_of
from ..statistics.granularity import PerGroup
from ..tensor.grid import fit, rounded_to

Move = Callable[[jax.Array], jax.Array]
"""Sends one leaf of messages, [sent, ...], and returns what is received, [received, ...]."""

_SENT_UNCHANGED = ("int4", "uint4")
"""Dtypes below a byte that compilers send unchanged; codes of others are packed into bytes."""

_LARGEST_MATRIX = 256
"""Larger Hadamard matrices are Kronecker products of two smaller ones."""


@dataclasses.dataclass(frozen=True)
class Wire:
    """How messages are quantized.

    Attributes:
      spec: per tensor, or in groups.
      hadamard: whether groups are rotated.
    """

    spec: QSpec
    hadamard: bool

    def groups(self, pieces: jax.Array) -> jax.Array:
        """Returns messages in groups, as they are quantized.

        Args:
          pieces: float32 [messages, ...].

        Returns:
          [messages, groups, size]: runs of each message; the last is padded with zeros.
        """
        count, *shape = pieces.shape
        length = math.prod(shape)
        size = self._group_size(length)
        flat = jnp.pad(pieces.reshape(count, length), ((0, 0), (0, -length % size)))
        groups = flat.reshape(count, -(-length // size), size)
        return _rotate(groups) if self.hadamard else groups

    def pieces(self, groups: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Inverts `groups`: returns messages [messages, *shape]."""
        groups = _rotate_back(groups) if self.hadamard else groups
        flat = groups.reshape(len(groups), math.prod(groups.shape[1:]))
        return flat[:, : math.prod(shape)].reshape(len(flat), *shape)

    def exchange(
        self, groups: jax.Array, move: Move, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Sends messages; returns those received, and the rounding error of those sent."""
        q = self._quantize(groups, key)
        return jax.tree.map(move, q).dequantize(), groups - q.dequantize()

    def _group_size(self, length: int) -> int:
        """Returns the group size for a message, at most its length unless the size is fixed."""
        granularity, length = self.spec.granularity, max(length, 1)
        if not isinstance(granularity, PerGroup):
            return length
        is_fixed = self.hadamard or isinstance(format_of(self.spec.qtype), Block)
        return granularity.size if is_fixed else min(granularity.size, length)

    def _quantize(self, groups: jax.Array, key: jax.Array | None) -> QTensor:
        form = format_of(self.spec.qtype)
        granularity = per_group(groups.shape[2]).resolve(3, (0, 1))
        stacked = (0,) if isinstance(form, Block) and form.two_level else ()
        spec = dataclasses.replace(self.spec, granularity=granularity, stacked=stacked)
        affine = None
        if spec.symmetric and not isinstance(form, Block):
            affine = fit(groups, spec)
        if key is not None:
            assert affine is not None
            groups = round_stochastically(groups, affine.scale, spec, key)
        is_packed = form.bits < 8 and form.storage.name not in _SENT_UNCHANGED
        return QTensor.quantize(groups, spec, affine, pack=2 if is_packed else None)


# Two ways to sum the messages of all devices, each on the device that it is for:
#
#     two phases   each device sends a message to every other; the receiver adds them up
#     ring         a partial sum passes from device to device; each adds its message
#
# Both send codes, and add in float32. The ring rounds a sum at every device that it passes, so its
# error grows with their number. It needs memory for one message in flight.
#
# Source: ZeRO++ (Wang et al., arXiv:2306.10209) for the all-to-all exchange; EQuARX (Ahmed et al.,
# arXiv:2506.17615) for the ring that quantizes again at each hop.

Sum = Callable[[Wire, jax.Array, Any, jax.Array | None], tuple[jax.Array, jax.Array]]
"""From [devices, groups, size], a message for each device, to the sum of the messages for this
device, [1, groups, size], and the rounding error of what this device sent, by receiver.
"""


def sum_of_exchanged(
    wire: Wire, groups: jax.Array, axis_name: Any, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """See `Sum`. What a device sends to itself is rounded as well."""
    received, error = wire.exchange(groups, partial(to_each, axis_name=axis_name), key)
    return received.sum(axis=0, keepdims=True), error


def sum_in_ring(
    wire: Wire, groups: jax.Array, axis_name: Any, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """See `Sum`. The sum for a device starts at the next device, and ends with its own message."""
    count, index = len(groups), lax.axis_index(axis_name)

    def message(hops: jax.Array | int) -> jax.Array:
        return lax.dynamic_index_in_dim(groups, (index - 1 - hops) % count)

    def hop(total: jax.Array, hops: jax.Array) -> tuple[jax.Array, jax.Array]:
        hop_key = None if key is None else jax.random.fold_in(key, hops)
        received, error = wire.exchange(total, partial(_to_next, axis_name=axis_name), hop_key)
        return received + message(hops + 1), error[0]

    total, errors = lax.scan(hop, message(0), jnp.arange(count - 1), unroll=_unrolled(count))
    errors = jnp.concatenate([errors, jnp.zeros_like(total)])
    return total, errors[(index - 1 - jnp.arange(count)) % count]


SUMS: dict[str, Sum] = {"two_phase": sum_of_exchanged, "ring": sum_in_ring}


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


def to_all(leaf: jax.Array, axis_name: Any) -> jax.Array:
    """Sends one message to all devices: [1, ...] to [devices, ...]."""
    return lax.all_gather(leaf, axis_name, tiled=True)


def to_all_in_ring(leaf: jax.Array, axis_name: Any) -> jax.Array:
    """`to_all`, where each device passes on what it received, unchanged."""
    count, index = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def hop(message: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        message = _to_next(message, axis_name)
        return message, message[0]

    _, others = lax.scan(hop, leaf, length=count - 1, unroll=_unrolled(count))
    return jnp.concatenate([leaf, others])[(index - jnp.arange(count)) % count]


def _to_next(leaf: jax.Array, axis_name: Any) -> jax.Array:
    """Sends everything to the next device of a ring."""
    count = lax.axis_size(axis_name)
    return lax.ppermute(leaf, axis_name, [(i, (i + 1) % count) for i in range(count)])


def _unrolled(count: int) -> int:
    """Returns how many hops of a ring are unrolled. Up to 16 hops make no loop.

    Compilers can then schedule the hops together with other work. XLA on CPU (jaxlib 0.10.2) also
    confuses what devices send in a loop and outside of it, in programs of many collectives.
    """
    return max(1, min(count - 1, 16))


# An array is cut along an axis into one piece for each device, and joined again, as in `jax.lax`:
# with `tiled`, an axis is split into parts, and parts are concatenated. Otherwise the axis is
# removed, or added.


def cut(x: jax.Array, axis: int, count: int, tiled: bool) -> jax.Array:
    """Returns the pieces, [count, *piece]."""
    if tiled:
        shape = x.shape
        x = x.reshape(*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def join(pieces: jax.Array, axis: int, tiled: bool) -> jax.Array:
    """Returns pieces, [count, *piece], joined along an axis."""
    x = jnp.moveaxis(pieces, 0, axis)
    if tiled:
        shape = x.shape
        x = x.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    return x


def round_stochastically(x: jax.Array, scale: jax.Array, spec: QSpec, key: jax.Array) -> jax.Array:
    """Rounds to one of the two nearest numbers of a format, such that the mean over keys is `x`.

    Args:
      x: float32, any shape.
      scale: of a calibrator that clips nothing; broadcasts to `x`.
      spec: a symmetric one; its gradient estimator is not used.
      key: a key, a new one for each call.
    """
    below, above = (
        rounded_to(x, scale, None, dataclasses.replace(spec, round_mode=mode, gradient=ste))
        for mode in (RoundMode.DOWN, RoundMode.UP)
    )
    gap = above - below
    chance = jnp.where(gap > 0, (x - below) / gap, jnp.zeros_like(x))
    return jnp.where(stochastic_round(chance, key) > 0, above, below)


# A group times a Hadamard matrix, which spreads large values over all its elements:
#
#     rotate(g) = (signs * g) H / sqrt(size)
#
# The signs are random but fixed, so that a group with a single value, or one row of H, is spread
# too. Source: Tseng et al., "QuIP#", arXiv:2402.04396; Ashkboos et al., "QuaRot", arXiv:2404.00456.


@functools.cache
def matrix_sizes(size: int) -> tuple[int, ...]:
    """Returns the sizes of the factors of a group's matrix; empty if no matrix is known."""
    return (size,) if size <= _LARGEST_MATRIX and is_order(size) else factors_of(size)


def _rotate(groups: jax.Array) -> jax.Array:
    """Rotates float32 [messages, groups, size] along the last axis."""
    size = groups.shape[2]
    return _times(groups * _signs(size), [hadamard(n) for n in matrix_sizes(size)])


def _rotate_back(groups: jax.Array) -> jax.Array:
    """Inverts `_rotate`."""
    size = groups.shape[2]
    return _times(groups, [hadamard(n).T for n in matrix_sizes(size)]) * _signs(size)


def _times(groups: jax.Array, matrices: list[np.ndarray]) -> jax.Array:
    """Multiplies by the Kronecker product of matrices, divided by the root of its size."""
    x = groups.reshape(*groups.shape[:2], *map(len, matrices))
    for axis, matrix in enumerate(matrices, 2):
        dims = (((axis,), (0,)), ((), ()))
        factor = jnp.asarray(matrix, x.dtype)
        x = jnp.moveaxis(lax.dot_general(x, factor, dims, lax.Precision.HIGHEST), -1, axis)
    return x.reshape(groups.shape) * jnp.asarray(1 / math.sqrt(groups.shape[2]), x.dtype)


def _signs(size: int) -> jax.Array:
    return jnp.asarray(signs_of(size, 0), jnp.float32)[None, None]
