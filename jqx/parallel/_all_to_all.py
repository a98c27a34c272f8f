"""`all_to_all`: each device sends a part of its array to every other device."""

import dataclasses
from functools import partial
from typing import Any

import jax
from jax.typing import ArrayLike

from .._calls import called
from .._checks import check_flags
from ..tensor import QSpec
from ._arguments import array_of, axis_of, check_parts, count_of, error_of, wires_of
from ._collective import AxisName, Collective, perform
from ._moves import to_each
from ._pieces import cut, joined


@called(
    "parallel.all_to_all", 'pass jqx.parallel.all_to_all(x, axis_name, 0, 1, "int8:group=256").'
)
def all_to_all(
    x: ArrayLike,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    spec: QSpec | str,
    *,
    tiled: bool = False,
    hadamard: bool = False,
    key: jax.Array | None = None,
    error: ArrayLike | None = None,
    backward: QSpec | str | None = None,
) -> Any:
    """Returns `jax.lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=tiled)`, but sends
    codes instead of floats.

    Each element is rounded once, including those that stay on their device.

    Args:
      x: array of one axis or more, float16, bfloat16 or float32, of the same shape on each device.
      axis_name: an axis of the mesh of the surrounding `jax.shard_map`, or a tuple of axes.
      split_axis: the axis of `x` that is split into one part for each device.
      concat_axis: the axis of the result along which the parts are concatenated.
      spec: as for `jqx.parallel.all_reduce`; the part for one device is a message.
      tiled: whether both are axes of `x` and of the result. Otherwise `split_axis` has one element
        for each device and is removed, and `concat_axis` is a new axis.
      hadamard: whether groups are rotated, as for `all_reduce`.
      key: for stochastic rounding, as for `all_reduce`; `None` rounds to nearest.
      error: the rounding error of earlier calls, as for `all_reduce`.
      backward: the spec of the cotangent; `None` means `spec`.

    Returns:
      The received parts, of the dtype of `x`. With `error`, the pair of it and the new error.

    Raises:
      NameError, TypeError, ValueError: as `all_reduce`; also if an axis is not valid, or cannot be
        split into one part for each device.

    Gradient: for `x`, with rounding as the identity: the cotangents sent back by this function with
      its axes swapped, with `backward` and a key derived from `key`. None for `key` and `error`.
    NaN and infinities: make their whole group NaN.
    Source: ZeRO++, arXiv:2306.10209.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> x = jax.random.normal(jax.random.key(0), (4, 4, 100))  # of four devices
      >>> sent = lambda x: jqx.parallel.all_to_all(x, "i", 0, 0, "int8:group=50")
      >>> y = jax.vmap(sent, axis_name="i")(x)
      >>> bool(jnp.abs(y - x.swapaxes(0, 1)).max() < 0.02)
      True
    """
    name = "parallel.all_to_all"
    x = array_of(name, x)
    count = count_of(name, axis_name)
    check_flags(name, tiled=tiled)
    split = axis_of(name, "split_axis", split_axis, x.ndim)
    concat = axis_of(name, "concat_axis", concat_axis, x.ndim)
    check_parts(name, "split_axis", x.shape[split], count, tiled)
    wires = wires_of(name, spec, backward, hadamard, key)
    collective = AllToAll(axis_name, **wires, split_axis=split, concat_axis=concat, tiled=tiled)
    return perform(collective, x, error_of(name, error, x), key)


@dataclasses.dataclass(frozen=True)
class AllToAll(Collective):
    """See `all_to_all`."""

    split_axis: int
    concat_axis: int
    tiled: bool

    def run(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        pieces = cut(x, self.split_axis, self.size, self.tiled)
        received, lost = self.wire.exchange(
            self.wire.groups(pieces), partial(to_each, axis_name=self.axis_name), key
        )
        received, lost = (self.wire.pieces(y, pieces.shape[1:]) for y in (received, lost))
        return (
            joined(received, self.concat_axis, self.tiled),
            joined(lost, self.split_axis, self.tiled),
        )

    def pull_back(self, cotangent: jax.Array, key: jax.Array | None) -> jax.Array:
        axes = {"split_axis": self.concat_axis, "concat_axis": self.split_axis}
        back = dataclasses.replace(self, **self.transposed, **axes)
        return perform(back, cotangent, None, key)
