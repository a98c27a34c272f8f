"""Packing: codes of 1 to 7 bits without gaps in bytes, along one axis.

A code of b bits is split into planes of 4, 2 and 1 bits, by the binary digits of b: 7 = 4 + 2 + 1,
with the lowest bits first. A plane of w bits packs 8 / w codes into a byte: it splits the axis into
8 / w equal runs and overlays them, with the first run in the lowest bits. So for 4-bit codes, byte
i holds element i in its low half and element i + n / 2 in its high half. The planes are
concatenated along the axis. If the runs of a plane do not divide the length, zeros fill the last.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def planes_of(bits: int) -> tuple[tuple[int, int], ...]:
    """Returns (width, lowest bit) of each plane."""
    widths = [width for width in (4, 2, 1) if bits & width]
    return tuple((width, sum(widths[:i])) for i, width in enumerate(widths))


def packed_length(length: int, bits: int) -> int:
    """Returns how many bytes `length` codes take along the packed axis."""
    return sum(-(-length * width // 8) for width, _ in planes_of(bits))


@partial(jax.jit, static_argnames=("bits", "axis"))
def pack_bits(codes: jax.Array, bits: int, axis: int) -> jax.Array:
    """Packs unsigned codes.

    Args:
      codes: uint8 below `2**bits`, any shape of one axis or more.
      bits: 1 to 7.
      axis: the axis that becomes shorter, not negative.

    Returns:
      uint8, of the shape of `codes` except for `packed_length` along `axis`.
    """
    planes = []
    for width, lowest in planes_of(bits):
        count = 8 // width
        run = -(-codes.shape[axis] // count)
        padding = [(0, 0, 0)] * codes.ndim
        padding[axis] = (0, run * count - codes.shape[axis], 0)
        parts = lax.pad(codes, jnp.uint8(0), padding).astype(jnp.int32)
        parts = parts.reshape(*codes.shape[:axis], count, run, *codes.shape[axis + 1 :])
        shift = lax.broadcasted_iota(jnp.int32, parts.shape, axis) * width
        parts = ((parts >> lowest) & (2**width - 1)) << shift
        # A reduction, not an or of slices, because XLA on CPU vectorizes it in any fusion.
        planes.append(lax.reduce(parts, np.int32(0), lax.bitwise_or, (axis,)).astype(jnp.uint8))
    return lax.concatenate(planes, axis) if len(planes) > 1 else planes[0]


@partial(jax.jit, static_argnames=("bits", "axis", "length"))
def unpack_bits(packed: jax.Array, bits: int, axis: int, length: int) -> jax.Array:
    """Inverts `pack_bits`; `length` is the length of the axis before packing."""
    start = 0
    codes = None
    for width, lowest in planes_of(bits):
        count = 8 // width
        run = -(-length // count)
        plane = lax.slice_in_dim(packed, start, start + run, axis=axis)
        start += run
        # Shifts by an iota, not a concatenation of parts, because XLA on CPU vectorizes them in any
        # fusion, also in loops.
        shape = (*plane.shape[:axis], count, *plane.shape[axis:])
        shift = lax.broadcasted_iota(jnp.uint8, shape, axis) * jnp.uint8(width)
        parts = (lax.expand_dims(plane, (axis,)) >> shift) & jnp.uint8(2**width - 1)
        parts = parts.reshape(*plane.shape[:axis], count * run, *plane.shape[axis + 1 :])
        head = lax.slice_in_dim(parts, 0, length, axis=axis)
        head = head << jnp.uint8(lowest)
        codes = head if codes is None else codes | head
    # Without the barrier, XLA on CPU widens each part separately before it joins them.
    return lax.optimization_barrier(codes)


@partial(jax.jit, static_argnames=("bits", "axis"))
def pack_neighbours(codes: jax.Array, bits: int, axis: int) -> jax.Array:
    """Packs unsigned codes of 1, 2 or 4 bits so that the codes in a byte are neighbours along the
    axis, with the first in the lowest bits, as kernels for CPUs read them. The codes must fill
    whole bytes.
    """
    count = 8 // bits
    shape = (*codes.shape[:axis], codes.shape[axis] // count, count, *codes.shape[axis + 1 :])
    parts = codes.reshape(shape).astype(jnp.int32)
    shift = lax.broadcasted_iota(jnp.int32, shape, axis + 1) * bits
    return lax.reduce(parts << shift, np.int32(0), lax.bitwise_or, (axis + 1,)).astype(jnp.uint8)


@partial(jax.jit, static_argnames=("bits", "axis"))
def unpack_neighbours(packed: jax.Array, bits: int, axis: int) -> jax.Array:
    """Inverts `pack_neighbours`."""
    count, n = 8 // bits, packed.shape[axis]
    shape = (*packed.shape[: axis + 1], count, *packed.shape[axis + 1 :])
    shift = lax.broadcasted_iota(jnp.uint8, shape, axis + 1) * jnp.uint8(bits)
    parts = (lax.expand_dims(packed, (axis + 1,)) >> shift) & jnp.uint8(2**bits - 1)
    codes = parts.reshape(*packed.shape[:axis], n * count, *packed.shape[axis + 1 :])
    # The barrier has the same reason as in `unpack_bits`.
    return lax.optimization_barrier(codes)
