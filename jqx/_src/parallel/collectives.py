"""Collectives that send codes in place of floats, for use inside `jax.shard_map`.

Each device may keep its own rounding error, and add it to what it sends next. The sum of many steps
is then as exact as one step: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014;
Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv:1901.09847.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ... import QSpec
from ...calibrators import absmax
from ...numerics import Block, format_of
from .. import compat
from ..checks import as_array, as_real, called, check_dtype, check_flags, check_integer, shown
from ..errors import fail
from ..statistics.granularity import PerGroup, PerTensor
from ..tensor.spec import needed_spec
from .wire import SUMS, Wire, cut, join, matrix_sizes, to_all, to_all_in_ring, to_each

AxisName = Any
"""The name of an axis of a mesh, or a tuple of names."""


@called("parallel.all_reduce", 'pass jqx.parallel.all_reduce(x, axis_name, "int8:group=256").')
def all_reduce(
    x: ArrayLike,
    axis_name: AxisName,
    spec: QSpec | str,
    *,
    form: str = "two_phase",
    hadamard: bool = False,
    key: jax.Array | None = None,
    error: ArrayLike | None = None,
    backward: QSpec | str | None = None,
) -> Any:
    """Returns `jax.lax.psum(x, axis_name)`, but sends codes instead of floats.

    Each device sums one part of the arrays, and sends that sum to all others. Each element is
    rounded twice, once as a summand and once as a sum. A device also rounds its own part, so the
    result has the same bits on all devices. A single device rounds as several would.

    Args:
      x: array of any shape, float16, bfloat16 or float32, of the same shape on each device.
      axis_name: an axis of the mesh of the surrounding `jax.shard_map`, or a tuple of axes.
      spec: a `QSpec` or a scheme such as `"int8:group=256"`. It has a format and a granularity.
        With `jqx.per_group(size)`, groups are runs of `size` elements of the message to one device;
        the last group is padded with zeros. With `jqx.per_tensor()`, each message has one scale.
        Scales are computed from the values, and sent with the codes in float32 (for a block format,
        in its scale format).
      form: `"two_phase"`, or `"ring"`, where sums pass from device to device and are rounded at
        each. The sums are then gathered by `jax.lax.all_gather`, which does not change the codes.
      hadamard: whether each group is multiplied by a Hadamard matrix with fixed random signs, which
        spreads large values, and the sum by its inverse. For formats of few bits.
      key: a key from `jax.random.key(...)`, a new one for each call, the same on all devices.
        Rounding is then stochastic, to one of the two nearest numbers, independent for each device
        and phase. The mean of the result is the exact sum. `None` rounds as `spec` says.
      error: the rounding error of earlier calls, float32 of the shape of `x`, one array for each
        device; start with zeros. It is added to `x`, and the error of this call is returned. The
        error of a sum stays on the device that rounded it. The error of converting the result to 16
        bits is not kept.
      backward: the spec of the cotangent; `None` means `spec`.

    Returns:
      The sum, with the shape and dtype of `x`, added in float32. JAX knows that it is the same on
      all devices, so `out_specs=P()` accepts it. With `error`, the pair of the sum and the new
      error.

    Raises:
      NameError: there is no such axis.
      TypeError: `x` or `error` has another dtype, `spec` is not a spec, `key` is not a key, or
        `hadamard` is not a bool.
      ValueError: the granularity is not supported, `error` has another shape, the form is unknown,
        there is no Hadamard matrix of the group size, or `key` is given with a spec that clips.

    Gradient: for `x` as that of `jax.lax.psum`; rounding counts as the identity. With
      `check_vma=True` it is the cotangent itself, and nothing is sent. Otherwise it is the sum of
      the cotangents, sent as codes by this function, with `backward` and a key derived from `key`.
      None for `key` and `error`. In a `jax.vmap` with an axis name, take gradients inside of it.
    NaN and infinities: make the sum NaN in their whole group.
    Bytes: int8 in groups of 256 sends a quarter of float32, int4 an eighth, scales included. XLA on
      CPU widens int4 to bytes and float8 to float16 to send them. TPUs and GPUs do not, except that
      a GPU sends int4 in groups of an odd size as bytes in the two-phase form.
    Source: ZeRO++, arXiv:2306.10209; EQuARX, arXiv:2506.17615; QuIP#, arXiv:2402.04396, for
      Hadamard; error feedback: arXiv:1901.09847.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> x = jax.random.normal(jax.random.key(0), (4, 1000))  # of four devices
      >>> sum_of = lambda x: jqx.parallel.all_reduce(x, "i", "int8:group=256")
      >>> y = jax.vmap(sum_of, axis_name="i")(x)  # or jax.shard_map
      >>> bool((y == y[0]).all()), bool(jnp.abs(y[0] - x.sum(axis=0)).max() < 0.1)
      (True, True)
    """
    name = "parallel.all_reduce"
    x, _ = _operand(name, x, axis_name)
    wires = _wires(name, spec, backward, hadamard, key)
    return _send(name, AllReduce(axis_name, **wires, form=form), x, error, key)


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
    x, _ = _operand(name, x, axis_name)
    axis = _front_axis(name, "axis", axis, x.ndim if tiled else x.ndim + 1)
    wires = _wires(name, spec, backward, hadamard, key)
    collective = AllGather(axis_name, **wires, axis=axis, tiled=tiled, form=form)
    return _send(name, collective, x, error, key)


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
    x, count = _operand(name, x, axis_name)
    axis = _front_axis(name, "scatter_dimension", scatter_dimension, x.ndim)
    _check_parts(name, "scatter_dimension", x.shape[axis], count, tiled)
    wires = _wires(name, spec, backward, hadamard, key)
    collective = ReduceScatter(axis_name, **wires, axis=axis, tiled=tiled, form=form)
    return _send(name, collective, x, error, key)


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
    x, count = _operand(name, x, axis_name)
    split = _front_axis(name, "split_axis", split_axis, x.ndim)
    concat = _front_axis(name, "concat_axis", concat_axis, x.ndim)
    _check_parts(name, "split_axis", x.shape[split], count, tiled)
    wires = _wires(name, spec, backward, hadamard, key)
    collective = AllToAll(axis_name, **wires, split_axis=split, concat_axis=concat, tiled=tiled)
    return _send(name, collective, x, error, key)


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
    x, count = _operand(name, x, axis_name)
    _check_pairs(name, perm, count)
    wires = _wires(name, spec, backward, hadamard, key)
    collective = PPermute(axis_name, **wires, perm=tuple((source, to) for source, to in perm))
    return _send(name, collective, x, error, key)


@dataclasses.dataclass(frozen=True)
class Collective(abc.ABC):
    """A collective along an axis, linear except for rounding.

    Attributes:
      axis_name: the axis of the mesh.
      wire: how its messages are sent.
      back: how messages of the cotangent are sent.
    """

    axis_name: AxisName
    wire: Wire
    back: Wire

    @abc.abstractmethod
    def run(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Returns the result for float32 `x`, float32, and the rounding error of `x`, in its shape.

        `key` differs between devices.
        """

    @abc.abstractmethod
    def pull_back(self, cotangent: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns the cotangent of `x` from that of the result; all devices have the same `key`."""

    @property
    def size(self) -> int:
        """The number of devices that take part."""
        return lax.axis_size(self.axis_name)

    @property
    def index(self) -> jax.Array:
        """The index of this device, int32."""
        return lax.axis_index(self.axis_name)

    @property
    def tracked_axes(self) -> frozenset[str]:
        """The axes of the mesh along which JAX tracks which arrays vary. Empty with
        `check_vma=False` and in a vmap.
        """
        return compat.varies_along(self.index)

    @property
    def transposed(self) -> dict[str, Wire]:
        """The wires of the transposed collective."""
        return {"wire": self.back, "back": self.wire}


@dataclasses.dataclass(frozen=True)
class AllReduce(Collective):
    """See `all_reduce`."""

    form: str

    def run(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        sum_key, gather_key = (None, None) if key is None else jax.random.split(key)
        part = -(-x.size // self.size)
        flat = jnp.pad(x.reshape(-1), (0, part * self.size - x.size))
        groups = self.wire.groups(flat.reshape(self.size, part))
        total, error = SUMS[self.form](self.wire, groups, self.axis_name, sum_key)
        totals, error_of_total = self.wire.exchange(total, self._gather, gather_key)
        is_own = (jnp.arange(self.size) == self.index)[:, None, None]
        error = error + jnp.where(is_own, error_of_total, jnp.zeros_like(error))

        def joined(groups: jax.Array) -> jax.Array:
            return self.wire.pieces(groups, (part,)).reshape(-1)[: x.size].reshape(x.shape)

        return joined(totals), joined(error)

    def pull_back(self, cotangent: jax.Array, key: jax.Array | None) -> jax.Array:
        if self.tracked_axes:
            return compat.vary(cotangent, self.tracked_axes)
        return perform(dataclasses.replace(self, **self.transposed), cotangent, None, key)

    def _gather(self, leaf: jax.Array) -> jax.Array:
        to = "invarying" if self.tracked_axes else "varying"
        return lax.all_gather(leaf, self.axis_name, tiled=True, to=to)


_GATHERS = {"two_phase": to_all, "ring": to_all_in_ring}


@dataclasses.dataclass(frozen=True)
class _AlongAxis(Collective):
    """A collective that concatenates or splits arrays along an axis."""

    axis: int
    tiled: bool
    form: str

    def _transposed(self, kind: type["_AlongAxis"]) -> Collective:
        wires = self.transposed
        return kind(self.axis_name, **wires, axis=self.axis, tiled=self.tiled, form=self.form)


class AllGather(_AlongAxis):
    """See `all_gather`."""

    def run(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        move = partial(_GATHERS[self.form], axis_name=self.axis_name)
        received, error = self.wire.exchange(self.wire.groups(x[None]), move, key)
        pieces = self.wire.pieces(received, x.shape)
        return join(pieces, self.axis, self.tiled), self.wire.pieces(error, x.shape)[0]

    def pull_back(self, cotangent: jax.Array, key: jax.Array | None) -> jax.Array:
        return perform(self._transposed(ReduceScatter), cotangent, None, key)


class ReduceScatter(_AlongAxis):
    """See `reduce_scatter`."""

    def run(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        pieces = cut(x, self.axis, self.size, self.tiled)
        groups, shape = self.wire.groups(pieces), pieces.shape[1:]
        total, error = SUMS[self.form](self.wire, groups, self.axis_name, key)
        error = join(self.wire.pieces(error, shape), self.axis, self.tiled)
        return self.wire.pieces(total, shape)[0], error

    def pull_back(self, cotangent: jax.Array, key: jax.Array | None) -> jax.Array:
        return perform(self._transposed(AllGather), cotangent, None, key)


@dataclasses.dataclass(frozen=True)
class AllToAll(Collective):
    """See `all_to_all`."""

    split_axis: int
    concat_axis: int
    tiled: bool

    def run(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        pieces = cut(x, self.split_axis, self.size, self.tiled)
        move, shape = partial(to_each, axis_name=self.axis_name), pieces.shape[1:]
        received, error = self.wire.exchange(self.wire.groups(pieces), move, key)
        received = join(self.wire.pieces(received, shape), self.concat_axis, self.tiled)
        return received, join(self.wire.pieces(error, shape), self.split_axis, self.tiled)

    def pull_back(self, cotangent: jax.Array, key: jax.Array | None) -> jax.Array:
        axes = {"split_axis": self.concat_axis, "concat_axis": self.split_axis}
        back = dataclasses.replace(self, **self.transposed, **axes)
        return perform(back, cotangent, None, key)


@dataclasses.dataclass(frozen=True)
class PPermute(Collective):
    """See `ppermute`."""

    perm: tuple[tuple[int, int], ...]

    def run(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        move = partial(lax.ppermute, axis_name=self.axis_name, perm=self.perm)
        received, error = self.wire.exchange(self.wire.groups(x[None]), move, key)
        return self.wire.pieces(received, x.shape)[0], self.wire.pieces(error, x.shape)[0]

    def pull_back(self, cotangent: jax.Array, key: jax.Array | None) -> jax.Array:
        inverse = tuple((destination, source) for source, destination in self.perm)
        back = dataclasses.replace(self, **self.transposed, perm=inverse)
        return perform(back, cotangent, None, key)


def perform(
    collective: Collective, x: jax.Array, error: jax.Array | None, key: jax.Array | None
) -> Any:
    """Returns the result of a collective; with `error`, the pair of it and the new error."""
    operands = compat.vary(compat.vary_alike(x, error, key), collective.tracked_axes)
    return _perform(collective, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _perform(
    collective: Collective, x: jax.Array, error: jax.Array | None, key: jax.Array | None
) -> Any:
    wide = x.astype(jnp.float32)
    device_key = None if key is None else jax.random.fold_in(key, collective.index)
    y, new_error = collective.run(wide if error is None else wide + error, device_key)
    y = y.astype(x.dtype)
    return y if error is None else (y, new_error)


def _forward(
    collective: Collective, x: jax.Array, error: jax.Array | None, key: jax.Array | None
) -> tuple[Any, jax.Array | None]:
    return _perform(collective, x, error, key), key


def _backward(
    collective: Collective, key: jax.Array | None, cotangents: Any
) -> tuple[jax.Array, None, None]:
    cotangent = cotangents[0] if isinstance(cotangents, tuple) else cotangents
    # The key does not depend on the device index: backward draws differ from the forward ones.
    back_key = None if key is None else jax.random.fold_in(key, 2**32 - 1)
    return collective.pull_back(cotangent, back_key), None, None


_perform.defvjp(_forward, _backward)


def _operand(function: str, x: ArrayLike, axis_name: Any) -> tuple[jax.Array, int]:
    """Returns the array to send and the number of devices, after checking both."""
    x = as_real(function, "x", x)
    if x.dtype == jnp.float64:
        problem = "float64 is not supported: sums are computed in float32."
        raise fail(function, problem, fix="convert it: x.astype(jnp.float32).", error=TypeError)
    try:
        return x, lax.axis_size(axis_name)
    except (NameError, TypeError, ValueError):
        problem = f"`axis_name` is not an axis of the surrounding mesh: {shown(axis_name)}."
        fix = "call it inside jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)."
        raise fail(function, problem, fix=fix, error=NameError) from None


def _send(
    function: str,
    collective: Any,
    x: jax.Array,
    error: ArrayLike | None,
    key: jax.Array | None,
) -> Any:
    """Checks the options that several collectives have, and performs one."""
    form = getattr(collective, "form", "ring")
    if not isinstance(form, str) or form not in SUMS:
        fix = 'leave it out for "two_phase", or pass form="ring".'
        raise fail(function, f"`form` is unknown: {shown(form)}.", fix=fix)
    check_flags(function, tiled=getattr(collective, "tiled", False))
    if error is not None:
        error = as_array(function, "error", error)
        if error.shape != x.shape:
            fix = "start with jnp.zeros(x.shape, jnp.float32), and pass what each call returns."
            raise fail(function, f"`error` has the shape {error.shape}, and x {x.shape}.", fix=fix)
        check_dtype(function, "error", error, jnp.float32, of="its")
    return perform(collective, x, error, key)


def _front_axis(function: str, argument: str, axis: Any, rank: int) -> int:
    """Returns an axis of an array, counted from the front."""
    axis = check_integer(function, argument, axis)
    if not -rank <= axis < rank:
        problem = f"`{argument}` == {axis}, and the array has {rank} axes."
        raise fail(function, problem, fix="pass an axis that the array has.")
    return axis % rank


def _check_parts(function: str, argument: str, length: int, count: int, tiled: bool) -> None:
    """Checks that an axis can be split into one part for each device."""
    if length % count if tiled else length != count:
        problem = f"axis `{argument}` of {length} elements does not fit {count} devices."
        fix = "pad the array along it." if tiled else "pass tiled=True, or reshape the array."
        raise fail(function, problem, fix=fix)


def _check_pairs(function: str, perm: Any, count: int) -> None:
    """Checks (source, destination) pairs, in which no device occurs twice as either."""
    is_pairs = isinstance(perm, Sequence) and all(
        isinstance(pair, Sequence) and len(pair) == 2 for pair in perm
    )
    for devices in zip(*perm, strict=True) if is_pairs else ():
        is_unique = len(set(devices)) == len(devices)
        is_pairs &= is_unique and all(type(i) is int and 0 <= i < count for i in devices)
    if not is_pairs:
        problem = f"`perm` is not a list of pairs (source, destination): {shown(perm)}."
        fix = (
            f"pass for example [(i, (i + 1) % {count}) for i in range({count})], each device once."
        )
        raise fail(function, problem, fix=fix)


def _wires(
    function: str,
    spec: QSpec | str,
    backward: QSpec | str | None,
    hadamard: bool,
    key: jax.Array | None,
) -> dict[str, Wire]:
    """Returns how messages are sent, and how those of the cotangent are."""
    check_flags(function, hadamard=hadamard)
    is_key = jnp.issubdtype(getattr(key, "dtype", jnp.float32), jax.dtypes.prng_key)
    if key is not None and (not is_key or key.shape != ()):
        keys = f"keys of shape {key.shape}" if is_key else shown(key)
        fix = "pass key=jax.random.key(0), a new one for each step."
        raise fail(function, f"`key` is not one random key: {keys}.", fix=fix, error=TypeError)
    wire = back = _wire(function, "spec", spec, hadamard, key is not None)
    if backward is not None:
        back = _wire(function, "backward", backward, hadamard, key is not None)
    return {"wire": wire, "back": back}


def _wire(function: str, argument: str, spec: Any, hadamard: bool, stochastic: bool) -> Wire:
    """Returns how messages with a spec are sent, after checking that it is one for messages."""
    spec = needed_spec(function, argument, spec, "array")
    granularity, form = spec.granularity, format_of(spec.qtype)
    problem, fix = "", ""
    if not isinstance(granularity, (PerGroup, PerTensor)):
        problem = "messages have no axes for scales."
        fix = f"pass runs of a message: jqx.QSpec({form.name!r}, jqx.per_group(256))."
    elif not form.low < 0 < form.high and spec.symmetric:
        problem = f"{form.name} does not have both negative and positive numbers."
        fix = "pass int8, or symmetric=False if the format can have zero points."
    elif stochastic and (
        not spec.symmetric or spec.calibrator != absmax or isinstance(form, Block)
    ):
        problem = "stochastic rounding is biased if values are clipped."
        fix = "drop key, or pass a symmetric spec with absmax, and not in a block format."
    elif hadamard and not (isinstance(granularity, PerGroup) and matrix_sizes(granularity.size)):
        problem = "there is no Hadamard matrix of the group size."
        fix = "pass jqx.per_group(256), a power of two or 4 n for most n; or hadamard=False."
    if problem:
        raise fail(function, problem, given=f"`{argument}`: {spec}", fix=fix)
    return Wire(spec, hadamard)
