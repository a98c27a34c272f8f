"""How messages are sent: in groups, possibly rotated, as a QTensor; and the error of that."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ..calibrators._shared import PerGroup, per_group
from ..numerics import Block, format_of
from ..tensor import QSpec, QTensor
from ..tensor._shared import fit
from ._hadamard import rotated, rotated_back
from ._unbiased import rounded

Move = Callable[[jax.Array], jax.Array]
"""Sends one leaf of messages, [sent, ...], and returns what is received, [received, ...]."""

_SENT_UNCHANGED = ("int4", "uint4")
"""Dtypes below a byte that compilers send unchanged; codes of others are packed into bytes."""


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
        size = self._size(length)
        flat = jnp.pad(pieces.reshape(count, length), ((0, 0), (0, -length % size)))
        groups = flat.reshape(count, -(-length // size), size)
        return rotated(groups) if self.hadamard else groups

    def pieces(self, groups: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Inverts `groups`: returns messages [messages, *shape]."""
        groups = rotated_back(groups) if self.hadamard else groups
        flat = groups.reshape(len(groups), math.prod(groups.shape[1:]))
        return flat[:, : math.prod(shape)].reshape(len(flat), *shape)

    def exchange(
        self, groups: jax.Array, move: Move, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Sends messages; returns those received, and the rounding error of those sent."""
        q = self._quantized(groups, key)
        return jax.tree.map(move, q).dequantize(), groups - q.dequantize()

    def _size(self, length: int) -> int:
        """Returns the group size for a message, at most its length unless the size is fixed."""
        granularity, length = self.spec.granularity, max(length, 1)
        if not isinstance(granularity, PerGroup):
            return length
        fixed = self.hadamard or isinstance(format_of(self.spec.qtype), Block)
        return granularity.size if fixed else min(granularity.size, length)

    def _quantized(self, groups: jax.Array, key: jax.Array | None) -> QTensor:
        form = format_of(self.spec.qtype)
        of_groups = per_group(groups.shape[2]).resolve(3, (0, 1))
        stacked = (0,) if isinstance(form, Block) and form.two_level else ()
        spec = dataclasses.replace(self.spec, granularity=of_groups, stacked=stacked)
        affine = None
        if spec.symmetric and not isinstance(form, Block):
            affine = fit(groups, spec)
        if key is not None:
            assert affine is not None
            groups = rounded(groups, affine.scale, spec, key)
        packed = form.bits < 8 and form.storage.name not in _SENT_UNCHANGED
        return QTensor.quantize(groups, spec, affine, pack=2 if packed else None)
