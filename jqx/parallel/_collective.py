"""The base class of collectives: what is sent, the rounding error, and the cotangent.

Each device keeps its own rounding error, and adds it to what it sends next. The sum of many steps
is then as exact as one step: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014;
Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv:1901.09847.
"""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from ._wire import Wire

AxisName = Any
"""The name of an axis of a mesh, or a tuple of names."""


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
    def checked_axes(self) -> frozenset[str]:
        """The axes of the mesh along which JAX tracks which arrays vary. Empty with
        `check_vma=False` and in a vmap.
        """
        return _compat.varies_along(self.index)

    @property
    def transposed(self) -> dict[str, Wire]:
        """The wires of the transposed collective."""
        return {"wire": self.back, "back": self.wire}


def perform(
    collective: Collective, x: jax.Array, error: jax.Array | None, key: jax.Array | None
) -> Any:
    """Returns the result of a collective; with `error`, the pair of it and the new error."""
    operands = _compat.vary(_compat.vary_alike(x, error, key), collective.checked_axes)
    return _perform(collective, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _perform(
    collective: Collective, x: jax.Array, error: jax.Array | None, key: jax.Array | None
) -> Any:
    wide = x.astype(jnp.float32)
    own = None if key is None else jax.random.fold_in(key, collective.index)
    y, lost = collective.run(wide if error is None else wide + error, own)
    y = y.astype(x.dtype)
    return y if error is None else (y, lost)


def _forward(
    collective: Collective, x: jax.Array, error: jax.Array | None, key: jax.Array | None
) -> tuple[Any, jax.Array | None]:
    return _perform(collective, x, error, key), key


def _backward(
    collective: Collective, key: jax.Array | None, cotangents: Any
) -> tuple[jax.Array, None, None]:
    cotangent = cotangents[0] if isinstance(cotangents, tuple) else cotangents
    # The key does not depend on the device index: backward draws differ from the forward ones.
    other = None if key is None else jax.random.fold_in(key, 2**32 - 1)
    return collective.pull_back(cotangent, other), None, None


_perform.defvjp(_forward, _backward)
