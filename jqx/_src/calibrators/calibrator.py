"""The interface of a calibrator: statistics of observed values, and scales computed from them."""

import abc
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import export
from jax.typing import DTypeLike

from ..numerics.qtype import QType
from ..numerics.runtimes import Numerics
from ..ops.affine import affine_from_range
from .granularity import Granularity, Groups

T = TypeVar("T")


def serializable(cls: type[T]) -> type[T]:
    """Lets `jax.export` serialize functions that take or return this NamedTuple."""
    name = f"jqx.calibrators.{cls.__name__}"
    return export.register_namedtuple_serialization(cls, serialized_name=name)


@serializable
class Affine(NamedTuple):
    """A scale and zero point: `real = (code - zero_point) * scale`.

    Attributes:
      scale: float32 (float8_e8m0fnu for an MX format), with the rank of the quantized array and one
        entry for each group of elements.
      zero_point: has the dtype of the codes and the shape of `scale`; `None` means zero everywhere.
    """

    scale: jax.Array
    zero_point: jax.Array | None = None


class Affinity(Protocol):
    """The part of a `QSpec` that a calibrator reads."""

    @property
    def qtype(self) -> DTypeLike | QType: ...
    @property
    def granularity(self) -> Granularity: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def numerics(self) -> Numerics: ...


class Calibrator(abc.ABC):
    """A frozen, hashable value that turns observed values into a scale.

    Statistics are a NamedTuple (or another pytree) of arrays. Two of them are `observed`, the
    number of arrays seen, an int32 scalar, and `nans`, the number of NaN values seen for each
    scale, an int32 array. Both saturate at the largest int32. Statistics form a monoid: `merge` is
    associative and `empty` is its unit, so batches, loop steps and devices can be
    combined in any grouping. NaN values are counted and otherwise ignored. A scale that saw a NaN
    is NaN.
    """

    @abc.abstractmethod
    def empty(self, shape: Sequence[int]) -> Any:
        """Returns the statistics of no values, for a scale of `shape`."""

    @abc.abstractmethod
    def observe(self, x: jax.Array, spec: Affinity) -> Any:
        """Returns the statistics of one array; `spec.granularity` is absolute."""

    @abc.abstractmethod
    def merge(self, a: Any, b: Any) -> Any:
        """Returns the statistics of both."""

    @abc.abstractmethod
    def affine(self, stats: Any, spec: Affinity) -> Affine:
        """Returns the scale and zero point computed from `stats`."""

    def fit(self, x: jax.Array, spec: Affinity) -> Affine:
        """Returns the scale and zero point for one given array, such as a weight."""
        return self.affine(self.observe(x, spec), spec)

    def observed(self, stats: Any) -> jax.Array:
        """Returns how many arrays were observed, int32."""
        return stats.observed

    def nans(self, stats: Any) -> jax.Array:
        """Returns how many NaN values were observed, int32, an entry for each scale."""
        return stats.nans


class Observation(NamedTuple):
    """The values that every observation starts from.

    Attributes:
      values: the array with zeros in place of NaN.
      nans: number of NaN values for each scale, int32.
      observed: 1, or 0 for an array without elements, int32.
    """

    values: jax.Array
    nans: jax.Array
    observed: jax.Array


def look_at(x: jax.Array, spec: Affinity) -> Observation:
    """Counts the NaN values of `x` and replaces them with zeros."""
    return _look_at(x, spec.granularity.groups(x.shape))


@functools.partial(jax.jit, static_argnames="groups")  # traced once for all sites of one shape
def _look_at(x: jax.Array, groups: Groups) -> Observation:
    nan = jnp.isnan(x)
    values = jnp.where(nan, jnp.zeros_like(x), x)
    return Observation(values, groups.count(nan), jnp.int32(x.size > 0))


def saturating_add(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the sum of counts, saturated at the largest integer of their dtype."""
    total = a + b
    return jnp.where(total < a, jnp.full_like(total, jnp.iinfo(total.dtype).max), total)


def added_counts(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the combined `nans` and `observed` of two statistics."""
    return saturating_add(a.nans, b.nans), saturating_add(a.observed, b.observed)


def nothing_seen(shape: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Returns the `nans` and `observed` of no observation."""
    return jnp.zeros(tuple(shape), jnp.int32), jnp.zeros((), jnp.int32)


def poisoned(affine: Affine, nans: jax.Array) -> Affine:
    """Returns the affine with NaN for every scale that saw a NaN."""
    scale = jnp.where(nans > 0, jnp.full_like(affine.scale, jnp.nan), affine.scale)
    return affine._replace(scale=scale)


MAX_COUNT = 2**20
"""The largest number of steps, bins or candidates of a calibrator."""


def cover(low: jax.Array, high: jax.Array, spec: Affinity) -> Affine:
    """Returns the scale and zero point that cover `[low, high]` and zero; an empty range counts as
    0.
    """
    empty = low > high
    low, high = (jnp.where(empty, jnp.zeros_like(v), v) for v in (low, high))
    form = {"qtype": spec.qtype, "symmetric": spec.symmetric, "numerics": spec.numerics}
    return Affine(*affine_from_range(low, high, **form))


# A base class for calibrators that change one step of another calibrator and keep the rest.


class Around(Calibrator):
    """Delegates statistics and scales to another calibrator.

    Attributes:
      calibrator: the other calibrator.
    """

    calibrator: Calibrator

    def empty(self, shape: Sequence[int]) -> Any:
        """Returns the statistics of no values."""
        return self.calibrator.empty(shape)

    def observe(self, x: jax.Array, spec: Affinity) -> Any:
        """Returns the statistics of one array."""
        return self.calibrator.observe(x, spec)

    def merge(self, a: Any, b: Any) -> Any:
        """Returns the statistics of both."""
        return self.calibrator.merge(a, b)

    def observed(self, stats: Any) -> jax.Array:
        """Returns how many arrays were observed."""
        return self.calibrator.observed(stats)

    def nans(self, stats: Any) -> jax.Array:
        """Returns how many NaN values were observed."""
        return self.calibrator.nans(stats)

    def affine(self, stats: Any, spec: Affinity) -> Affine:
        """Returns the scale and zero point computed from the statistics."""
        return self.calibrator.affine(stats, spec)
