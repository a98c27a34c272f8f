"""`all_gather` and `reduce_scatter`, which are the transposes of each other."""

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
    """Returns `jax.lax.all_gather(x, axis_name, axis=axis, tiled=tiled)`, but sends codes instead
    of floats.

    Each element is rounded once, by the device that holds it. That device uses the rounded value
    too, so the result has the same bits on all devices.

    Args:
      x: array of any shape, float16, bfloat16 or float32.
      axis_name: an axis of the mesh of the surrounding `jax.shard_map`, or a tuple of axes.
      spec: as for `jqx.parallel.all_reduce`; `x` is one message.
      axis: the axis of the result along which the arrays of the devices are concatenated.
      tiled: whether `axis` is an axis of `x` too. Otherwise it is a new axis.
      form: `"two_phase"`, which is `jax.lax.all_gather`, or `"ring"`, where codes pass unchanged
        from device to device. The bits are the same. The sum of the cotangents has this form too.
      hadamard: whether groups are rotated, as for `all_reduce`.
      key: for stochastic rounding, as for `all_reduce`; `None` rounds to nearest.
      error: the rounding error of earlier calls for what this device sends, as for `all_reduce`.
      backward: the spec of the cotangent; `None` means `spec`.

    Returns:
      The arrays of all devices, of the dtype of `x`. As with `jax.lax.all_gather`, JAX assumes that
      it varies between devices. With `error`, the pair of it and the new error.

    Raises:
      NameError, TypeError, ValueError: as `all_reduce`; also if the result has no such `axis`.

    Gradient: for `x`, with rounding as the identity: `reduce_scatter` of the cotangents, with
      `backward` and a key derived from `key`. None for `key` and `error`.
    NaN and infinities: make their whole group NaN.
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
    """Returns `jax.lax.psum_scatter(x, axis_name, ...)`, but sends codes instead of floats.

    Each device gets its part of the sum. Each summand is rounded once, including the part that
    stays on its device. In a ring, each device rounds the sum before it passes it on.

    Args:
      x: array of one axis or more, float16, bfloat16 or float32, of the same shape on each device.
      axis_name: an axis of the mesh of the surrounding `jax.shard_map`, or a tuple of axes.
      spec: as for `jqx.parallel.all_reduce`; the part of `x` for one device is a message.
      scatter_dimension: the axis along which the sum is split.
      tiled: whether that axis is kept, and divided by the number of devices in length. Otherwise it
        has one element for each device and is removed.
      form: `"two_phase"` or `"ring"`, as for `all_reduce`.
      hadamard: whether groups are rotated, as for `all_reduce`.
      key: for stochastic rounding, as for `all_reduce`; `None` rounds to nearest.
      error: the rounding error of earlier calls, as for `all_reduce`.
      backward: the spec of the cotangent; `None` means `spec`.

    Returns:
      The part of the sum, of the dtype of `x`, added in float32. With `error`, the pair of it and
      the new error.

    Raises:
      NameError, TypeError, ValueError: as `all_reduce`; also if `scatter_dimension` is not an axis
        of `x`, or cannot be split into one part for each device.

    Gradient: for `x`, with rounding as the identity: `all_gather` of the cotangents, with
      `backward` and a key derived from `key`. None for `key` and `error`.
    NaN and infinities: make the sum NaN in their whole group.
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
    """What both have in common: the axis of the pieces, and the form of a sum."""

    axis: int
    tiled: bool
    form: str

    def _transposed(self, kind: type[Collective]) -> Collective:
        along = {"axis": self.axis, "tiled": self.tiled, "form": self.form}
        return kind(self.axis_name, **self.transposed, **along)


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
