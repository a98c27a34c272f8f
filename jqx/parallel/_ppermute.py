"""`ppermute`: some devices each send their array to one other device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.typing import ArrayLike

from .._calls import called
from ..tensor import QSpec
from ._arguments import array_of, count_of, error_of, pairs_of, wires_of
from ._collective import AxisName, Collective, perform


@called("parallel.ppermute", 'pass jqx.parallel.ppermute(x, axis_name, perm, "int8:group=256").')
def ppermute(
    x: ArrayLike,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    spec: QSpec | str,
    *,
    hadamard: bool = False,
    key: jax.Array | None = None,
    error: ArrayLike | None = None,
    backward: QSpec | str | None = None,
) -> Any:
    """Returns `jax.lax.ppermute(x, axis_name, perm)`, but sends codes instead of floats.

    Args:
      x: array of any shape, float16, bfloat16 or float32, of the same shape on each device.
      axis_name: an axis of the mesh of the surrounding `jax.shard_map`, or a tuple of axes.
      perm: pairs (source, destination), each source and each destination once.
      spec: as for `jqx.parallel.all_reduce`; `x` is one message.
      hadamard: whether groups are rotated, as for `all_reduce`.
      key: for stochastic rounding, as for `all_reduce`; `None` rounds to nearest.
      error: the rounding error of earlier calls, as for `all_reduce`. Devices that send nothing
        have an error too, as if they did.
      backward: the spec of the cotangent; `None` means `spec`.

    Returns:
      The received array, with the shape and dtype of `x`; zeros on devices that receive nothing.
      With `error`, the pair of it and the new error.

    Raises:
      NameError, TypeError, ValueError: as `all_reduce`; also if `perm` is not a list of such pairs.

    Gradient: for `x`, with rounding as the identity: the cotangents sent back by this function with
      the inverse of `perm`, with `backward` and a key derived from `key`. None for `key` and
      `error`.
    NaN and infinities: make their whole group NaN.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> x = jax.random.normal(jax.random.key(0), (4, 100))  # of four devices
      >>> ring = [(i, (i + 1) % 4) for i in range(4)]
      >>> sent = lambda x: jqx.parallel.ppermute(x, "i", ring, "int8:group=50")
      >>> bool(jnp.abs(jax.vmap(sent, axis_name="i")(x) - jnp.roll(x, 1, axis=0)).max() < 0.02)
      True
    """
    name = "parallel.ppermute"
    x = array_of(name, x)
    pairs = pairs_of(name, perm, count_of(name, axis_name))
    wires = wires_of(name, spec, backward, hadamard, key)
    return perform(PPermute(axis_name, **wires, perm=pairs), x, error_of(name, error, x), key)


@dataclasses.dataclass(frozen=True)
class PPermute(Collective):
    """See `ppermute`."""

    perm: tuple[tuple[int, int], ...]

    def run(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        received, lost = self.wire.exchange(self.wire.groups(x[None]), self._move, key)
        received, lost = (self.wire.pieces(y, x.shape)[0] for y in (received, lost))
        return received, lost

    def pull_back(self, cotangent: jax.Array, key: jax.Array | None) -> jax.Array:
        inverse = tuple((destination, source) for source, destination in self.perm)
        back = dataclasses.replace(self, **self.transposed, perm=inverse)
        return perform(back, cotangent, None, key)

    def _move(self, leaf: jax.Array) -> jax.Array:
        return lax.ppermute(leaf, self.axis_name, self.perm)
