"""`all_to_all`: each device sends a part of its array to each other one."""

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
    """Returns `jax.lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=tiled)`, with codes
    sent in place of floats.

    Each element is rounded once, those that stay with their device included.

    Args:
      x: array of one axis or more, float16, bfloat16 or float32, of the same shape on each device.
      axis_name: an axis of the mesh of the `jax.shard_map` around, or a tuple of them.
      split_axis: the axis of `x` along which it is cut, a part for each device.
      concat_axis: the axis of the result along which parts are put side by side.
      spec: as for `jqx.parallel.all_reduce`; the part for one device is a message.
      tiled: whether both are axes of `x` and of the result; else `split_axis` is as long as there
        are devices, and goes, and `concat_axis` is a new one.
      hadamard: whether groups are rotated, as for `all_reduce`.
      key: for stochastic rounding, as for `all_reduce`; `None` rounds to nearest.
      error: what earlier calls have lost, as for `all_reduce`.
      backward: the spec of the cotangent; `None` means `spec`.

    Returns:
      The parts that came in, of the dtype of `x`. With `error`, the pair of it and the new error.

    Raises:
      NameError, TypeError, ValueError: as `all_reduce`; an axis is none, or there is not a part for
        each device.

    Gradient: of `x`, rounding being the identity: the cotangents sent back, by this function with
      its axes swapped, with `backward` and a key made of `key`. None of `key` and `error`.
    NaN and infinities: make their group NaN.
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
        back = dataclasses.replace(self, **self.turned, **axes)
        return perform(back, cotangent, None, key)
