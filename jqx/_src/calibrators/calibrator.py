"""The interface of a calibrator: statistics of observed values, and scales computed from them."""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import DTypeLike

from ..checks import check_integer, shown
from ..errors import fail
from ..numerics.qtype import QType
from ..numerics.runtimes import Numerics
from ..ops.range import affine_from_range
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


class Seen(NamedTuple):
    """The values that every observation starts from.

    Attributes:
      values: the array with zeros in place of NaN.
      nans: number of NaN values for each scale, int32.
      observed: 1, or 0 for an array without elements, int32.
    """

    values: jax.Array
    nans: jax.Array
    observed: jax.Array


def look_at(x: jax.Array, spec: Affinity) -> Seen:
    """Counts the NaN values of `x` and replaces them with zeros."""
    return _look_at(x, spec.granularity.groups(x.shape))


@functools.partial(jax.jit, static_argnames="groups")  # traced once for all sites of one shape
def _look_at(x: jax.Array, groups: Groups) -> Seen:
    nan = jnp.isnan(x)
    return Seen(jnp.where(nan, jnp.zeros_like(x), x), groups.count(nan), jnp.int32(x.size > 0))


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


_LARGEST = float(np.finfo(np.float32).max)

_MOST = 2**20


def check_number(
    function: str, argument: str, value: Any, holds: Callable[[float], bool], expected: str
) -> float:
    """Returns `value` as a float, after checking that float32 can hold it and that it `holds`."""
    if not (
        isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    ):
        raise fail(
            function,
            f"`{argument}` must be a number.",
            given=f"an object of type {type(value).__name__}",
            fix=f"pass a Python number, {expected}.",
            error=TypeError,
        )
    if not (abs(value) <= _LARGEST and holds(float(value))):
        raise fail(
            function,
            f"`{argument}` is out of range.",
            given=f"{argument} == {shown(value)}",
            fix=f"pass a finite number, {expected}.",
        )
    return float(value)


def check_count(function: str, argument: str, value: Any, least: int) -> int:
    """Returns `value` as an integer, after checking that it is at least `least` and not absurdly
    large for a number of steps, bins or candidates.
    """
    value = check_integer(function, argument, value)
    if not least <= value <= _MOST:
        raise fail(
            function,
            f"`{argument}` is too {'small' if value < least else 'large'}.",
            given=f"{argument} == {shown(value)}",
            fix=f"pass a number from {least} to {_MOST}.",
        )
    return value


# The scale and zero point that cover a range of values and zero.


def cover(low: jax.Array, high: jax.Array, spec: Affinity) -> Affine:
    """Returns the scale and zero point that cover `[low, high]`; an empty range counts as 0."""
    empty = low > high
    low, high = (jnp.where(empty, jnp.zeros_like(v), v) for v in (low, high))
    return Affine(
        *affine_from_range(
            low, high, qtype=spec.qtype, symmetric=spec.symmetric, numerics=spec.numerics
        )
    )


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
