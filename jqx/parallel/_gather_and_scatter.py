"""`all_gather` and `reduce_scatter`, each of which is the transpose of the other."""

import dataclasses
from functools import partial
from typing import Any

import jax
from jax.typing import ArrayLike

from .._calls import called
from .._checks import check_flags
from ..tensor import QSpec
from ._arguments import array_of, axis_of, check_form, check_parts, count_of, error_of, wires_of
from ._collective import AxisName, Collective, perform
from ._moves import to_all, to_all_in_ring
from ._pieces import cut, joined
from ._sums import SUMS


@called("parallel.all_gather", 'pass jqx.parallel.all_gather(x, axis_name, "int8:group=256").')
def all_gather(
    x: ArrayLike,
    axis_name: AxisName,
    spec: QSpec | str,
    *,
    axis: int = 0,
    tiled: bool = False,
    form: str = "two_phase",
    hadamard: bool = False,
    key: jax.Array | None = None,
    error: ArrayLike | None = None,
    backward: QSpec | str | None = None,
) -> Any:
    """Returns `jax.lax.all_gather(x, axis_name, axis=axis, tiled=tiled)`, with codes sent in place
    of floats.

    Each element is rounded once, by the device that has it, which takes the rounded one as well:
    all end with the same bits.

    Args:
      x: array of any shape, float16, bfloat16 or float32.
      axis_name: an axis of the mesh of the `jax.shard_map` around, or a tuple of them.
      spec: as for `jqx.parallel.all_reduce`; `x` is one message.
      axis: where the arrays of the devices are put side by side: an axis of the result.
      tiled: whether it is an axis of `x` too; else it is a new one.
      form: `"two_phase"`, which is `jax.lax.all_gather`, or `"ring"`, where codes go from device to
        device as they are. The bits are the same; the sum of the cotangents has this form as well.
      hadamard: whether groups are rotated, as for `all_reduce`.
      key: for stochastic rounding, as for `all_reduce`; `None` rounds to nearest.
      error: what earlier calls have lost of what this device sends, as for `all_reduce`.
      backward: the spec of the cotangent; `None` means `spec`.

    Returns:
      The arrays of all devices, of the dtype of `x`. As that of `jax.lax.all_gather`, JAX takes it
      for one that varies. With `error`, the pair of it and the new error.

    Raises:
      NameError, TypeError, ValueError: as `all_reduce`; `axis` is no axis of the result.

    Gradient: of `x`, rounding being the identity: `reduce_scatter` of the cotangents, with
      `backward` and a key made of `key`. None of `key` and `error`.
    NaN and infinities: make their group NaN.
    Source: ZeRO++, arXiv:2306.10209, for weights and, backward, gradients.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> x = jax.random.normal(jax.random.key(0), (4, 100))  # of four devices
      >>> spec = jqx.QSpec(jnp.int8, jqx.per_group(32))
      >>> y = jax.vmap(lambda x: jqx.parallel.all_gather(x, "i", spec), axis_name="i")(x)
      >>> y.shape, bool(jnp.abs(y[1] - x).max() < 0.02)
      ((4, 4, 100), True)
    """
    name = "parallel.all_gather"
    x = array_of(name, x)
    count_of(name, axis_name)
    check_form(name, form)
    check_flags(name, tiled=tiled)
    axis = axis_of(name, "axis", axis, x.ndim if tiled else x.ndim + 1)
    wires = wires_of(name, spec, backward, hadamard, key)
    collective = AllGather(axis_name, **wires, axis=axis, tiled=tiled, form=form)
    return perform(collective, x, error_of(name, error, x), key)


@called(
    "parallel.reduce_scatter",
    'pass jqx.parallel.reduce_scatter(x, axis_name, "int8:group=256", tiled=True).',
)
def reduce_scatter(
    x: ArrayLike,
    axis_name: AxisName,
    spec: QSpec | str,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    form: str = "two_phase",
    hadamard: bool = False,
    key: jax.Array | None = None,
    error: ArrayLike | None = None,
    backward: QSpec | str | None = None,
) -> Any:
    """Returns `jax.lax.psum_scatter(x, axis_name, ...)`, with codes sent in place of floats.

    Each device gets its part of the sum. Each summand is rounded once, the part that stays with its
    device included; in a ring, sums are rounded at each device that they leave.

    Args:
      x: array of one axis or more, float16, bfloat16 or float32, of the same shape on each device.
      axis_name: an axis of the mesh of the `jax.shard_map` around, or a tuple of them.
      spec: as for `jqx.parallel.all_reduce`; the part of `x` for one device is a message.
      scatter_dimension: the axis along which the sum is parted.
      tiled: whether it stays, and is as much shorter as there are devices; else it is as long as
        there are devices, and goes.
      form: `"two_phase"` or `"ring"`, as for `all_reduce`.
      hadamard: whether groups are rotated, as for `all_reduce`.
      key: for stochastic rounding, as for `all_reduce`; `None` rounds to nearest.
      error: what earlier calls have lost, as for `all_reduce`.
      backward: the spec of the cotangent; `None` means `spec`.

    Returns:
      The part of the sum, of the dtype of `x`, added in float32. With `error`, the pair of it and
      the new error.

    Raises:
      NameError, TypeError, ValueError: as `all_reduce`; `scatter_dimension` is no axis of `x`, or
        there is not a part for each device.

    Gradient: of `x`, rounding being the identity: `all_gather` of the cotangents, with `backward`
      and a key made of `key`. None of `key` and `error`.
    NaN and infinities: make the sum NaN in all of their group.
    Source: ZeRO++, arXiv:2306.10209.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> x = jax.random.normal(jax.random.key(0), (4, 400))  # of four devices
      >>> part_of = lambda x: jqx.parallel.reduce_scatter(x, "i", "int8:group=50", tiled=True)
      >>> y = jax.vmap(part_of, axis_name="i")(x)
      >>> y.shape, bool(jnp.abs(y.reshape(400) - x.sum(axis=0)).max() < 0.1)
      ((4, 100), True)
    """
    name = "parallel.reduce_scatter"
    x = array_of(name, x)
    count = count_of(name, axis_name)
    check_form(name, form)
    check_flags(name, tiled=tiled)
    axis = axis_of(name, "scatter_dimension", scatter_dimension, x.ndim)
    check_parts(name, "scatter_dimension", x.shape[axis], count, tiled)
    wires = wires_of(name, spec, backward, hadamard, key)
    collective = ReduceScatter(axis_name, **wires, axis=axis, tiled=tiled, form=form)
    return perform(collective, x, error_of(name, error, x), key)


_GATHERS = {"two_phase": to_all, "ring": to_all_in_ring}


@dataclasses.dataclass(frozen=True)
class _AlongAxis(Collective):
    """What both have in common: where pieces lie, and the form of a sum."""

    axis: int
    tiled: bool
    form: str

    def _transposed(self, kind: type[Collective]) -> Collective:
        along = {"axis": self.axis, "tiled": self.tiled, "form": self.form}
        return kind(self.axis_name, **self.turned, **along)


class AllGather(_AlongAxis):
    """See `all_gather`."""

    def run(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        move = partial(_GATHERS[self.form], axis_name=self.axis_name)
        received, lost = self.wire.exchange(self.wire.groups(x[None]), move, key)
        pieces = self.wire.pieces(received, x.shape)
        return joined(pieces, self.axis, self.tiled), self.wire.pieces(lost, x.shape)[0]

    def pull_back(self, cotangent: jax.Array, key: jax.Array | None) -> jax.Array:
        return perform(self._transposed(ReduceScatter), cotangent, None, key)


class ReduceScatter(_AlongAxis):
    """See `reduce_scatter`."""

    def run(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        pieces = cut(x, self.axis, self.size, self.tiled)
        groups, shape = self.wire.groups(pieces), pieces.shape[1:]
        total, lost = SUMS[self.form](self.wire, groups, self.axis_name, key)
        lost = joined(self.wire.pieces(lost, shape), self.axis, self.tiled)
        return self.wire.pieces(total, shape)[0], lost

    def pull_back(self, cotangent: jax.Array, key: jax.Array | None) -> jax.Array:
        return perform(self._transposed(AllGather), cotangent, None, key)
