"""A collective: what it sends, what is lost by that, and how a cotangent goes back.

The loss of a device is its own to keep. Added to what it sends next, it makes the sum of many steps
as exact as one step: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014;
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
    """A collective along an axis, linear but for rounding.

    Attributes:
      axis_name: of the mesh.
      wire: how its messages are sent.
      back: how those of the cotangent are.
    """

    axis_name: AxisName
    wire: Wire
    back: Wire

    @abc.abstractmethod
    def run(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Returns the result for float32 `x`, float32, and what was lost of `x`, of its shape.

        `key` is one of this device alone.
        """

    @abc.abstractmethod
    def pull_back(self, cotangent: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns the cotangent of `x`, from that of the result; `key` is that of all devices."""

    @property
    def size(self) -> int:
        """How many devices take part."""
        return lax.axis_size(self.axis_name)

    @property
    def index(self) -> jax.Array:
        """The place of this device, int32."""
        return lax.axis_index(self.axis_name)

    @property
    def checked_axes(self) -> frozenset[str]:
        """The axes of the mesh along which JAX tells arrays that vary from those that do not: none
        with `check_vma=False`, nor in a vmap.
        """
        return _compat.varies_along(self.index)

    @property
    def turned(self) -> dict[str, Wire]:
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
    # No index of a device: what is drawn backward is not what was drawn forward.
    other = None if key is None else jax.random.fold_in(key, 2**32 - 1)
    return collective.pull_back(cotangent, other), None, None


_perform.defvjp(_forward, _backward)
