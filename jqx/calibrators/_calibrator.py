"""The contract of a calibrator: what is observed of the values, and the scale decided from it."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ._granularity import Granularity


class Affine(NamedTuple):
    """A scale and zero point: `real = (code - zero_point) * scale`.

    Attributes:
      scale: float32, rank of the quantized array, each dim 1 or that of the array.
      zero_point: of the quantized dtype and the shape of `scale`; `None` means zero everywhere.
    """

    scale: jax.Array
    zero_point: jax.Array | None = None


class Affinity(Protocol):
    """What a calibrator reads of a `QSpec`."""

    @property
    def qtype(self) -> DTypeLike: ...
    @property
    def granularity(self) -> Granularity: ...
    @property
    def symmetric(self) -> bool: ...


class Calibrator(Hashable, Protocol):
    """A hashable value that turns observed values into a scale.

    Statistics are a pytree of arrays. They form a monoid: `merge` is associative and `empty` its
    unit, so batches, loop steps and devices may be combined in any grouping.
    """

    def empty(self, shape: Sequence[int]) -> Any:
        """Returns the statistics of no values, for a scale of `shape`."""
        ...

    def observe(self, x: jax.Array, spec: Affinity) -> Any:
        """Returns the statistics of one array; `spec.granularity` is absolute."""
        ...

    def merge(self, a: Any, b: Any) -> Any:
        """Returns the statistics of both."""
        ...

    def observed(self, stats: Any) -> jax.Array:
        """Returns how many arrays were observed, an int32 scalar."""
        ...

    def affine(self, stats: Any, spec: Affinity) -> Affine:
        """Returns the scale and zero point decided from `stats`."""
        ...


def reduced_axes(x: jax.Array, spec: Affinity) -> tuple[int, ...]:
    """The axes of `x` along which a scale of `spec` is shared."""
    shape = spec.granularity.scale_shape(x.shape)
    return tuple(i for i, (n, m) in enumerate(zip(x.shape, shape, strict=True)) if m == 1 or n != m)


def one() -> jax.Array:
    """The count of one observation."""
    return jnp.ones((), jnp.int32)


def none() -> jax.Array:
    """The count of no observation."""
    return jnp.zeros((), jnp.int32)
