"""`all_reduce`: the sum of the arrays of all devices, on every device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .. import _compat
from .._calls import called
from ..tensor import QSpec
from ._arguments import array_of, check_form, count_of, error_of, wires_of
from ._collective import AxisName, Collective, perform
from ._sums import SUMS


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
    x = array_of(name, x)
    count_of(name, axis_name)
    check_form(name, form)
    wires = wires_of(name, spec, backward, hadamard, key)
    return perform(AllReduce(axis_name, **wires, form=form), x, error_of(name, error, x), key)


@dataclasses.dataclass(frozen=True)
class AllReduce(Collective):
    """See `all_reduce`."""

    form: str

    def run(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        one, two = (None, None) if key is None else jax.random.split(key)
        part = -(-x.size // self.size)
        flat = jnp.pad(x.reshape(-1), (0, part * self.size - x.size))
        groups = self.wire.groups(flat.reshape(self.size, part))
        total, lost = SUMS[self.form](self.wire, groups, self.axis_name, one)
        totals, lost_of_total = self.wire.exchange(total, self._gather, two)
        mine = (jnp.arange(self.size) == self.index)[:, None, None]
        lost = lost + jnp.where(mine, lost_of_total, jnp.zeros_like(lost))

        def whole(groups: jax.Array) -> jax.Array:
            return self.wire.pieces(groups, (part,)).reshape(-1)[: x.size].reshape(x.shape)

        return whole(totals), whole(lost)

    def pull_back(self, cotangent: jax.Array, key: jax.Array | None) -> jax.Array:
        if self.checked_axes:
            return _compat.vary(cotangent, self.checked_axes)
        return perform(dataclasses.replace(self, **self.transposed), cotangent, None, key)

    def _gather(self, leaf: jax.Array) -> jax.Array:
        to = "invarying" if self.checked_axes else "varying"
        return lax.all_gather(leaf, self.axis_name, tiled=True, to=to)
