"""Calibrators: statistics of the elements that share a scale, from which the scale is computed.

This file has the interface, calibrators whose range is given or read off a few numbers (absmax,
minmax, fixed, rms, delayed), and what changes a calibrator or its statistics: 16-bit scales,
devices, masks, averages. `searches.py` has those that search a range.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .. import compat
from ..checks import added, as_dtype, check_fields, check_instance, instance, number, shown, whole
from ..errors import fail, some
from ..numerics.blocks import Block
from ..numerics.lookup import format_of
from ..ops.affine import affine_from_range
from .granularity import Groups, members
from .statistics import (
    MergedByField,
    ObservedSite,
    Observer,
    saturating_add,
    serializable,
    weights_of_rows,
)

if TYPE_CHECKING:
    from jqx import QSpec


@serializable("calibrators")
class Affine(NamedTuple):
    """A scale and zero point: `real = (code - zero_point) * scale`.

    Attributes:
      scale: float32 (float8_e8m0fnu for an MX format), with the rank of the quantized array and one
        entry for each group of elements.
      zero_point: has the dtype of the codes and the shape of `scale`; `None` means zero everywhere.
    """

    scale: jax.Array
    zero_point: jax.Array | None = None


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
    def observe(self, x: jax.Array, spec: "QSpec") -> Any:
        """Returns the statistics of one array; `spec.granularity` is absolute."""

    @abc.abstractmethod
    def merge(self, a: Any, b: Any) -> Any:
        """Returns the statistics of both."""

    @abc.abstractmethod
    def affine(self, stats: Any, spec: "QSpec") -> Affine:
        """Returns the scale and zero point computed from `stats`: a `jqx.calibrators.Affine`, or a
        pair as `jqx.affine_from_range` returns it.
        """

    def fit(self, x: jax.Array, spec: "QSpec") -> Affine:
        """Returns the scale and zero point for one given array, such as a weight."""
        return affine_of(self, self.observe(x, spec), spec)

    def observed(self, stats: Any) -> jax.Array:
        """Returns how many arrays were observed, int32."""
        return stats.observed

    def nans(self, stats: Any) -> jax.Array:
        """Returns how many NaN values were observed, int32, an entry for each scale."""
        return stats.nans


def affine_of(calibrator: Calibrator, stats: Any, spec: "QSpec") -> Affine:
    """Returns the scale and zero point of statistics; a calibrator of a user may return a pair."""
    return Affine(*calibrator.affine(stats, spec))


def fit_of(calibrator: Calibrator, x: jax.Array, spec: "QSpec") -> Affine:
    """Returns the scale and zero point for an array; a calibrator of a user may return a pair."""
    return Affine(*calibrator.fit(x, spec))


# What the calibrators of jqx share.


@dataclasses.dataclass(frozen=True)
class Ready(MergedByField, Calibrator):
    """A calibrator of jqx, which covers a range. Its statistics end with `nans` and `observed`.

    Attributes:
      stats: the NamedTuple of its statistics.
    """

    stats: ClassVar[Any]

    def empty(self, shape: Sequence[int]) -> Any:
        """Returns sums and magnitudes of 0, the empty range `[inf, -inf]`, and counts of 0."""
        fills = [{"low": jnp.inf, "high": -jnp.inf}.get(name, 0) for name in self.stats._fields]
        numbers = [jnp.full(tuple(shape), fill, jnp.float32) for fill in fills[:-2]]
        return self.stats(*numbers, jnp.zeros(tuple(shape), jnp.int32), jnp.zeros((), jnp.int32))

    def observe(self, x: jax.Array, spec: "QSpec") -> Any:
        """Returns the statistics of one array."""
        groups = spec.granularity.groups(x.shape)
        values, nans = without_nan(x, groups)
        return self.stats(*self.measured(values, nans, groups), nans, jnp.int32(x.size > 0))

    def measured(self, values: jax.Array, nans: jax.Array, groups: Groups) -> Sequence[jax.Array]:
        """Returns what the statistics of an array, with zeros in place of NaN, have besides counts:
        nothing, unless a subclass measures something.
        """
        return ()

    def range_of(self, stats: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the range for the statistics, as if there were no NaN."""
        raise NotImplementedError

    def affine(self, stats: Any, spec: "QSpec") -> Affine:
        """Returns the scale and zero point that cover the range."""
        return poisoned(self.cover(*self.range_of(stats), spec), stats.nans)

    def cover(self, low: jax.Array, high: jax.Array, spec: "QSpec") -> Affine:
        """Returns the scale and zero point that cover `[low, high]`."""
        return cover(low, high, spec)

    def __str__(self) -> str:
        """Returns the name of the class, with the fields unless all have their defaults."""
        name, fields = type(self).__name__.lower(), dataclasses.fields(self)
        values = [getattr(self, field.name) for field in fields]
        if values == [field.default for field in fields]:
            return name
        return f"{name}({', '.join(map(str, values))})"


@functools.partial(jax.jit, static_argnames="groups")  # traced once for all sites of one shape
def without_nan(x: jax.Array, groups: Groups) -> tuple[jax.Array, jax.Array]:
    """Returns an array with zeros in place of NaN, and the number of NaN values for each scale."""
    nan = jnp.isnan(x)
    return jnp.where(nan, jnp.zeros_like(x), x), groups.count(nan)


@functools.partial(jax.jit, inline=True)  # one program where it is called on values
def poisoned(affine: Affine, nans: jax.Array) -> Affine:
    """Returns the affine with NaN for every scale that saw a NaN."""
    scale = jnp.where(nans > 0, jnp.full_like(affine.scale, jnp.nan), affine.scale)
    return affine._replace(scale=scale)


MAX_COUNT = 2**20
"""The largest number of steps, bins or candidates of a calibrator."""


@functools.partial(jax.jit, static_argnames="spec", inline=True)
def cover(low: jax.Array, high: jax.Array, spec: "QSpec") -> Affine:
    """Returns the scale and zero point that cover `[low, high]` and zero; an empty range counts as
    0.
    """
    empty = low > high
    low, high = (jnp.where(empty, jnp.zeros_like(v), v) for v in (low, high))
    form = {"qtype": spec.qtype, "symmetric": spec.symmetric, "numerics": spec.numerics}
    return Affine(*affine_from_range(low, high, **form))


def _check_factor(calibrator: Any, name: str) -> None:
    """Checks the number that a range is multiplied by."""
    fix = "pass for example 0.8, to clip the largest fifth."
    check_fields(f"calibrators.{name}", calibrator, fix, factor=number(0, above=True))


def _times(factor: float, limit: jax.Array) -> jax.Array:
    """Returns an end of a range times a factor."""
    return limit if factor == 1 else limit * jnp.float32(factor)


# The largest magnitude.


@serializable("calibrators")
class AbsMaxStats(NamedTuple):
    """The largest magnitude (float32) and NaN values per scale, and arrays observed (int32)."""

    largest: jax.Array
    nans: jax.Array
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class AbsMax(Ready):
    """Covers `[-m, m]`, `m` the largest magnitude observed times `factor`, which is above 0."""

    stats: ClassVar[Any] = AbsMaxStats

    factor: float = added(1.0)

    def __post_init__(self) -> None:
        _check_factor(self, "absmax")

    def measured(self, values: jax.Array, nans: jax.Array, groups: Groups) -> Sequence[jax.Array]:
        """Returns the largest magnitude of the elements that share a scale."""
        return (groups.largest_magnitude(values).astype(jnp.float32),)

    def range_of(self, stats: AbsMaxStats) -> tuple[jax.Array, jax.Array]:
        """Returns the range whose ends have the largest magnitude, times the factor."""
        largest = _times(self.factor, stats.largest)
        return -largest, largest

    def fit(self, x: jax.Array, spec: "QSpec") -> Affine:
        """Returns the scale for one array in one pass; the largest magnitude of a NaN is NaN."""
        largest = spec.granularity.groups(x.shape).largest_magnitude(x).astype(jnp.float32)
        largest = _times(self.factor, largest)
        return self.cover(-largest, largest, spec)


absmax: AbsMax = AbsMax()


# The smallest and the largest value: the tightest range that clips no observed value.


@serializable("calibrators")
class MinMaxStats(NamedTuple):
    """The extremes per scale (float32), NaN values per scale and arrays observed (int32)."""

    low: jax.Array
    high: jax.Array
    nans: jax.Array
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class MinMax(Ready):
    """Covers `[min(low, 0), max(high, 0)]`, `low` and `high` the extremes observed times `factor`,
    which is above 0.
    """

    stats: ClassVar[Any] = MinMaxStats

    factor: float = added(1.0)

    def __post_init__(self) -> None:
        _check_factor(self, "minmax")

    def observe(self, x: jax.Array, spec: "QSpec") -> MinMaxStats:
        """Returns the extremes of the elements that share a scale."""
        low, high, nans = spec.granularity.groups(x.shape).extremes(x)
        extremes = low.astype(jnp.float32), high.astype(jnp.float32)
        return MinMaxStats(*extremes, nans, jnp.int32(x.size > 0))

    def range_of(self, stats: MinMaxStats) -> tuple[jax.Array, jax.Array]:
        """Returns the extremes, times the factor."""
        return _times(self.factor, stats.low), _times(self.factor, stats.high)


minmax: MinMax = MinMax()


# A range that is given, so that no data is needed.
#
# Example: activations after a sigmoid are in `[0, 1]`, whatever the input.


@serializable("calibrators")
class FixedStats(NamedTuple):
    """NaN values per scale and arrays observed (int32); nothing else is needed."""

    nans: jax.Array
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class Fixed(Ready):
    """The calibrator that `fixed` returns."""

    stats: ClassVar[Any] = FixedStats

    low: float
    high: float

    def __post_init__(self) -> None:
        any_size = number(float(jnp.finfo(jnp.float32).min))
        fix = "pass two finite numbers, which float32 can hold."
        check_fields("calibrators.fixed", self, fix, low=any_size, high=any_size)
        if self.low >= self.high:
            problem = f"the range is empty: low {self.low} is not below high {self.high}."
            raise fail("calibrators.fixed", problem, fix="swap them, or widen the range.")

    def observed(self, stats: FixedStats) -> jax.Array:
        """Returns how many arrays were observed, at least 1, because none is needed."""
        return jnp.maximum(stats.observed, 1)

    def range_of(self, stats: FixedStats) -> tuple[jax.Array, jax.Array]:
        """Returns the given range for each scale."""
        low, high = (jnp.full(stats.nans.shape, x, jnp.float32) for x in (self.low, self.high))
        return low, high


def fixed(low: float, high: float) -> Fixed:
    """Returns a calibrator that covers `[min(low, 0), max(high, 0)]`, or `[-m, m]` with the larger
    magnitude if the spec is symmetric.

    Values outside of the range saturate, infinities too. No array needs to be observed, so a scale
    can be computed without calibration.

    Args:
      low: the smallest value of the range.
      high: the largest value of the range.

    Raises:
      TypeError: if a limit is not a number.
      ValueError: if a limit is not finite, or `low` is not below `high`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> spec = jqx.QSpec(jnp.int8, calibrator=jqx.calibrators.fixed(0, 127))
      >>> jqx.QTensor.quantize(jnp.array([0.3, 200.0]), spec).values
      Array([  0, 127], dtype=int8)
    """
    return Fixed(low, high)


# A multiple of the root mean square: `[-r, r]`, `r = multiplier * sqrt(mean(x**2))`.
#
# For a normal distribution the mean squared error is least at about 2.5 for 4 bits and 4 for 8
# bits: Banner et al., "Post training 4-bit quantization of convolutional networks for rapid-
# deployment", arXiv:1810.05723.


@serializable("calibrators")
class RmsStats(NamedTuple):
    """Sum of squares and number of values per scale (float32), NaN values, arrays observed (int32).

    Float sums round: merging in another order may change the last bits.
    """

    squares: jax.Array
    elements: jax.Array
    nans: jax.Array
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class Rms(Ready):
    """The calibrator that `rms` returns."""

    stats: ClassVar[Any] = RmsStats

    multiplier: float

    def __post_init__(self) -> None:
        fix = "pass for example 2.5 for 4 bits, or 4 for 8 bits."
        check_fields("calibrators.rms", self, fix, multiplier=number(0, above=True))

    def measured(self, values: jax.Array, nans: jax.Array, groups: Groups) -> Sequence[jax.Array]:
        """Returns the sum of squares of the elements that share a scale, and their number."""
        squares = groups.reduce(jnp.sum, jnp.square(values.astype(jnp.float32)), 0)
        return squares, members(groups).astype(jnp.float32) - nans.astype(jnp.float32)

    def range_of(self, stats: RmsStats) -> tuple[jax.Array, jax.Array]:
        """Returns the multiple of the root mean square, for either sign."""
        count = jnp.maximum(stats.elements, jnp.ones_like(stats.elements))
        r = jnp.sqrt(stats.squares / count) * jnp.float32(self.multiplier)
        return -r, r


def rms(multiplier: float) -> Rms:
    """Returns a calibrator that covers `[-r, r]`, `r` a multiple of the root mean square of all
    values.

    The mean is exact for magnitudes between 2**-63 and 2**63. Squares of smaller ones are zero.
    Squares of larger ones are infinite, and so is the scale. An infinity makes the scale infinite.

    Args:
      multiplier: above 0.

    Raises:
      TypeError: if `multiplier` is not a number.
      ValueError: if `multiplier` is not finite, or not above 0.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> spec = jqx.QSpec(jnp.int8, calibrator=jqx.calibrators.rms(127.0))
      >>> jqx.QTensor.quantize(jnp.array([1.0, -1.0, 1.0]), spec).scale
      Array([1.], dtype=float32)
    """
    return Rms(multiplier)


# Delayed scaling: the scale of a step comes from the largest magnitudes of the steps before it.
#
#     scale = 2**margin * max(history) / qmax
#
# The history is explicit state. A step uses `affine` of the history, observes its own values, and
# passes on `merge(advance(stats), observe(x))`. What the devices of one step observe is merged
# first: each slot keeps the larger magnitude.
#
# Sources: the history and the margin are from the DelayedScaling recipe of NVIDIA Transformer
# Engine; scaled FP8 tensors are from Micikevicius et al., "FP8 Formats for Deep Learning",
# arXiv:2209.05433.


@serializable("calibrators")
class DelayedStats(NamedTuple):
    """The largest magnitude of each step, the newest first.

    Attributes:
      history: float32, an axis of steps in front of the shape of the scale; NaN for a step that saw
        a NaN.
      nans: number of NaN values per scale over all steps, int32.
      observed: number of arrays, int32.
    """

    history: jax.Array
    nans: jax.Array
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class Delayed(Ready):
    """Covers `[-m, m]`, `m` the largest magnitude of the last `length` steps times `2**margin`.

    Before anything is observed the scale is 1. A NaN makes the scale NaN, and an infinity makes it
    infinite, until that step leaves the history.

    Attributes:
      length: number of steps in the history.
      margin: headroom in powers of two, an integer.

    Raises:
      TypeError: if a field is not an integer.
      ValueError: if `length` is below 1, or float32 cannot hold `2**margin`.
    """

    stats: ClassVar[Any] = DelayedStats

    length: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        # 2**margin is a normal float32.
        margin = whole(-126, 127)
        check_fields("calibrators.Delayed", self, length=whole(1, MAX_COUNT), margin=margin)

    def empty(self, shape: Sequence[int]) -> DelayedStats:
        """Returns a history of zeros."""
        history = jnp.zeros((self.length, *shape), jnp.float32)
        return super().empty(shape)._replace(history=history)

    def measured(self, values: jax.Array, nans: jax.Array, groups: Groups) -> Sequence[jax.Array]:
        """Returns a history with the largest magnitude of this step in the newest slot."""
        largest = groups.largest_magnitude(values).astype(jnp.float32)
        largest = jnp.where(nans > 0, jnp.full_like(largest, jnp.nan), largest)
        return (jnp.zeros((self.length, *largest.shape), jnp.float32).at[0].set(largest),)

    def affine(self, stats: DelayedStats, spec: "QSpec") -> Affine:
        """Returns the scale of the largest magnitude in the history."""
        nan = jnp.isnan(stats.history)  # XLA may lose a NaN in a maximum
        history = jnp.where(nan, jnp.zeros_like(stats.history), stats.history)
        largest = jnp.max(history, axis=0) * jnp.float32(2.0**self.margin)
        return poisoned(cover(-largest, largest, spec), jnp.sum(nan.astype(jnp.int32), axis=0))


delayed: Delayed = Delayed()


def advance(stats: Any) -> Any:
    """Returns the statistics at the start of the next step, without the oldest slot.

    Args:
      stats: statistics of `Delayed`, or a dict of statistics as `jqx.calibrate` returns it. Entries
        of other calibrators stay unchanged.

    Raises:
      TypeError: if it is neither.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> spec = jqx.QSpec(jnp.int8, calibrator=jqx.calibrators.Delayed(2))
      >>> stats = spec.calibrator.empty((1,))
      >>> for x in (jnp.array([8.0]), jnp.array([-3.0])):
      ...     now = spec.calibrator.observe(x, spec)
      ...     stats = spec.calibrator.merge(jqx.calibrators.advance(stats), now)
      >>> stats.history[:, 0]
      Array([3., 8.], dtype=float32)
    """
    if isinstance(stats, Mapping):
        return {k: advance(v) if isinstance(v, DelayedStats) else v for k, v in stats.items()}
    fix = "pass what `observe` of a Delayed returns, or a dict of such statistics."
    check_instance("calibrators.advance", "stats", stats, DelayedStats, fix=fix)
    axis = stats.observed.ndim  # scan stacks statistics: the axis of steps comes after its axes
    history = jnp.roll(stats.history, 1, axis)
    newest = jax.lax.broadcasted_iota(jnp.int32, history.shape, axis) == 0
    return stats._replace(history=jnp.where(newest, jnp.zeros_like(history), history))


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

    def observe(self, x: jax.Array, spec: "QSpec") -> Any:
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

    def affine(self, stats: Any, spec: "QSpec") -> Affine:
        """Returns the scale and zero point computed from the statistics."""
        return affine_of(self.calibrator, stats, spec)


# Scales rounded to 16 bits, as files of other libraries store them.


_FIX = "pass one of jqx.calibrators, such as absmax."


@dataclasses.dataclass(frozen=True)
class Rounded(Around):
    """Rounds the scales of another calibrator to 16 bits, before codes are chosen.

    GPTQ, AWQ and GGUF files store scales in float16. A scale above 0 stays above 0 and finite: it
    is clamped to the smallest and the largest number of the dtype. Scales are still float32 arrays,
    with values that the dtype can hold: `q.scale.astype(dtype)` loses nothing.

    Attributes:
      calibrator: the calibrator that finds the scales.
      dtype: float16 or bfloat16.

    Raises:
      TypeError: if a field has the wrong type.
      ValueError: if `dtype` is another one; on use, if the format has its own format of scales.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> spec = jqx.QSpec("int4", jqx.per_axis(0), calibrator=jqx.calibrators.Rounded())
      >>> jqx.QTensor.quantize(jnp.array([[1.0, 3.0]]), spec).scale
      Array([[0.4284668]], dtype=float32)
    """

    calibrator: Calibrator = absmax
    dtype: DTypeLike = jnp.float16

    def __post_init__(self) -> None:
        name = "calibrators.Rounded"
        check_fields(name, self, _FIX, calibrator=instance(Calibrator))
        object.__setattr__(self, "dtype", as_dtype(name, "dtype", self.dtype))
        if self.dtype not in (jnp.float16, jnp.bfloat16):
            problem = f"`dtype` ({self.dtype}) is neither float16 nor bfloat16."
            raise fail(name, problem, fix="pass jnp.float16, which GPTQ, AWQ and GGUF use.")

    def __str__(self) -> str:
        return f"{self.calibrator} in {jnp.dtype(self.dtype).name}"

    def affine(self, stats: Any, spec: "QSpec") -> Affine:
        """Returns the rounded scale."""
        return self._rounded(affine_of(self.calibrator, stats, spec), spec)

    def fit(self, x: jax.Array, spec: "QSpec") -> Affine:
        """Returns the rounded scale for one array."""
        return self._rounded(fit_of(self.calibrator, x, spec), spec)

    def _rounded(self, affine: Affine, spec: "QSpec") -> Affine:
        form = format_of(spec.qtype)
        if isinstance(form, Block):
            problem = f"{form.name} has its own format of scales."
            raise fail("calibrators.Rounded", problem, fix="use the inner calibrator itself.")
        return affine._replace(scale=_nearest(affine.scale, jnp.dtype(self.dtype)))


def _nearest(scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns the nearest numbers of a dtype, in float32; see `Rounded`.

    XLA may keep excess precision and so remove a conversion to the dtype and back.
    """
    kind = jnp.finfo(dtype)
    size = jnp.abs(scale)
    smallest = float(kind.smallest_subnormal)
    rounded = lax.reduce_precision(size, kind.nexp, kind.nmant)
    if dtype == jnp.float16:  # bfloat16 has the subnormal numbers of float32
        rounded = jnp.where(size < float(kind.tiny), jnp.round(size / smallest) * smallest, rounded)
    rounded = jnp.where(jnp.isfinite(size), jnp.minimum(rounded, float(kind.max)), size)
    rounded = jnp.where(size > 0, jnp.maximum(rounded, smallest), rounded)
    return jnp.copysign(rounded, scale).astype(scale.dtype)


# Scales that the devices of a `shard_map` find together, for an array that is split over them.


@dataclasses.dataclass(frozen=True)
class AcrossDevices(Around):
    """Applies another calibrator to what all devices along a mesh axis observe.

    For dynamic activations inside a `jax.shard_map`, where each device holds a part of the axis
    that is summed over. If each device used its own scale, the codes would differ from those of
    the whole array. The devices exchange statistics, one entry for each scale, not the array.
    Outside a `shard_map` an array is whole, however it is partitioned, and nothing is exchanged.
    The scale is computed from the merged statistics, as it is from several batches. So `mse` and
    `percentile` decide from their histograms.

    Attributes:
      axis_name: name of a mesh axis, or a tuple of names.
      calibrator: the calibrator that finds the scales.

    Raises:
      TypeError: if a field has the wrong type.
      ValueError: on use, if the mesh of the enclosing `shard_map` has no such axis.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> together = jqx.calibrators.AcrossDevices("model")
      >>> spec = jqx.QSpec("int8", jqx.per_axis(0), dynamic=True, calibrator=together)
      >>> scale = lambda x: jqx.QTensor.quantize(x, spec).scale
      >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> columns = P(None, "model")
      >>> run = jax.shard_map(scale, mesh=mesh, in_specs=columns, out_specs=columns)
      >>> run(jnp.array([[1.0, -127.0]]))
      Array([[1.]], dtype=float32)
    """

    axis_name: str | tuple[str, ...]
    calibrator: Calibrator = absmax

    def __post_init__(self) -> None:
        name = "calibrators.AcrossDevices"
        check_fields(name, self, _FIX, calibrator=instance(Calibrator))
        if not self._names or not all(isinstance(x, str) for x in self._names):
            problem = f"`axis_name` names no mesh axis: {shown(self.axis_name)}."
            fix = 'pass a string, such as "model", or a tuple of strings.'
            raise fail(name, problem, fix=fix, error=TypeError)

    def __str__(self) -> str:
        return f"{self.calibrator} across {' and '.join(self._names)}"

    @property
    def _names(self) -> tuple[Any, ...]:
        return self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)

    def observe(self, x: jax.Array, spec: "QSpec") -> Any:
        """Returns the statistics of the parts of an array on all devices."""
        return self.over_devices(self.calibrator.observe(x, spec))

    def over_devices(self, stats: Any) -> Any:
        """Returns the statistics of all devices, merged, from those of each device."""
        around = jax.sharding.get_abstract_mesh()
        manual = compat.manual_axes()
        if manual and not {*self._names} <= {*around.axis_names}:
            raise fail(
                "calibrators.AcrossDevices",
                f"the mesh of the enclosing shard_map has no axis {self.axis_name!r}.",
                fix=f"pass one of {', '.join(map(repr, around.axis_names))}.",
            )
        names = tuple(name for name in self._names if name in manual)
        if not names:
            return stats
        stats = compat.vary(stats, frozenset(names))
        gathered = lax.all_gather(stats, names)
        head = jax.tree.map(lambda leaf: leaf[0], gathered)
        tail = jax.tree.map(lambda leaf: leaf[1:], gathered)
        return lax.scan(lambda a, b: (self.merge(a, b), None), head, tail)[0]


# The exponential moving average of statistics, for a loop over batches written by the caller.
#
#     mixed = decay * old + (1 - decay) * new
#
# It is not a monoid, because the order of the batches matters, so it is not a calibrator's `merge`.
#
# Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
# Integer-Arithmetic-Only Inference", arXiv:1712.05877, section 3.1.


_COUNTS = ("nans", "observed")


def moving_average(old: Any, new: Any, decay: float) -> Any:
    """Returns `decay * old + (1 - decay) * new` for the floats of statistics; counts add up.

    Args:
      old: statistics of one calibrator, or a dict of statistics as `jqx.calibrate` returns it.
      new: statistics of the next batch, of the same structure.
      decay: above 0 and below 1.

    Returns:
      Statistics of that structure. If one of the two has observed nothing, the other is returned. A
      dict comes back without the entries of observers that are not calibrators, such as
      `w:dot_general:lhs@hessian`: these are sums, which `jqx.merge_stats` adds up.

    Raises:
      TypeError: if the statistics differ in structure, are not NamedTuples with `nans` and
        `observed`, or hold counts in bins, which have no average.
      ValueError: if `decay` is out of range, or the shapes differ.

    NaN and infinities: NaN values are counted, as always. An infinity stays.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> spec = jqx.QSpec(jnp.int8)
      >>> old, new = (spec.calibrator.observe(jnp.array([x]), spec) for x in (8.0, 4.0))
      >>> float(jqx.calibrators.moving_average(old, new, 0.75).largest[0])
      7.0
    """
    name, rule = "calibrators.moving_average", number(0, 1, above=True)
    if not rule.is_kind(decay) or not rule.holds(decay) or decay == 1:
        problem = f"`decay` is not a number above 0 and below 1: {shown(decay)}."
        error = ValueError if rule.is_kind(decay) else TypeError
        raise fail(name, problem, fix="pass for example 0.9.", error=error)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        if set(old) != set(new):
            names = some(sorted(map(str, set(old) ^ set(new))))
            problem = f"`old` and `new` do not have the same entries: {names}."
            raise fail(name, problem, fix="calibrate both with the same plan.", error=TypeError)
        keys = [k for k in old if not _is_a_sum(k, old[k])]
        return {k: _mixed(old[k], new[k], float(decay)) for k in keys}
    return _mixed(old, new, float(decay))


def _is_a_sum(key: Any, stats: Any) -> bool:
    """Whether the observer of an entry is not a calibrator: its name follows an `@`."""
    observer = str(key).rpartition(":")[2].partition("@")[2]
    return bool(observer) and not set(_COUNTS) <= set(getattr(stats, "_fields", ()))


def _mixed(old: Any, new: Any, decay: float) -> Any:
    """Returns the average of two statistics of one calibrator."""
    function, kind = "calibrators.moving_average", type(old).__name__
    if type(old) is not type(new) or not set(_COUNTS) <= set(getattr(old, "_fields", ())):
        problem = f"`old` and `new` are not statistics of one calibrator: {kind}, "
        problem += f"{type(new).__name__}."
        fix = "pass what `observe` or `jqx.calibrate` returns."
        raise fail(function, problem, fix=fix, error=TypeError)

    def mixed(name: str, a: jax.Array, b: jax.Array) -> jax.Array:
        if name not in _COUNTS and not jnp.issubdtype(a.dtype, jnp.floating):
            problem = f"{kind}.{name} is of {a.dtype.name}, which has no average."
            fix = "merge them with the calibrator; only statistics of floats have averages."
            raise fail(function, problem, fix=fix, error=TypeError)
        if a.shape != b.shape:
            problem = f"`old` and `new` have different shapes of {name}: {a.shape} and {b.shape}."
            raise fail(function, problem, fix="observe both with the same granularity.")
        if name in _COUNTS:
            return saturating_add(a, b)
        # Stacked statistics, as scan makes them, have a count for each entry of their first axes.
        old_count, new_count = (
            count.reshape(count.shape + (1,) * (a.ndim - count.ndim))
            for count in (old.observed, new.observed)
        )
        average = a * decay + b * (1 - decay)
        return jnp.where(old_count == 0, b, jnp.where(new_count == 0, a, average))

    return type(old)(*map(mixed, old._fields, old, new))


# Statistics of some elements of an array.


def observe_where(calibrator: Calibrator, x: jax.Array, spec: "QSpec", mask: jax.Array) -> Any:
    """Returns the statistics of the elements for which `mask` is true; it has the rank of `x`. Rows
    are left out or not: a scale ignores how much they count.
    """
    if isinstance(calibrator, AcrossDevices):  # each device has its own mask
        return calibrator.over_devices(observe_where(calibrator.calibrator, x, spec, mask))
    if isinstance(calibrator, Around):
        return observe_where(calibrator.calibrator, x, spec, mask)
    # A calibrator counts NaN values and otherwise ignores them. A `Delayed` also remembers which
    # step had one; 0 is in each of its ranges.
    neutral = jnp.zeros_like(x) if isinstance(calibrator, Delayed) else jnp.full_like(x, jnp.nan)
    stats: Any = calibrator.observe(jnp.where(mask, x, neutral), spec)
    nans = spec.granularity.groups(x.shape).count(jnp.isnan(x) & mask)
    observed = stats.observed * jnp.any(mask).astype(jnp.int32)
    replace: Any = dataclasses.replace if dataclasses.is_dataclass(stats) else type(stats)._replace
    return replace(stats, nans=nans, observed=observed)


def needs_no_values(calibrator: Calibrator) -> bool:
    """Whether the range of a calibrator is given, and does not depend on what it observes."""
    while isinstance(calibrator, Around):
        calibrator = calibrator.calibrator
    return isinstance(calibrator, Fixed)


# A calibrator as an observer: its statistics of an operand, under the operand's spec.


@dataclasses.dataclass(frozen=True)
class Calibrated(Observer):
    """Records the statistics of a calibrator, for the scales of each operand that has a spec.

    Attributes:
      calibrator: a `jqx.extend.Calibrator`.
    """

    calibrator: Calibrator

    def looks_at(self, site: ObservedSite) -> bool:
        """Whether the plan quantizes the operand, an activation or a result."""
        return site.spec is not None and site.role != "weight"

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> Any:
        """Returns the calibrator's statistics of no values."""
        assert site.spec is not None
        return self.calibrator.empty(site.spec.granularity.scale_shape(operand.shape))

    def observe(self, x: jax.Array, site: ObservedSite) -> Any:
        """Returns the calibrator's statistics of the operand, without rows of weight 0."""
        assert site.spec is not None
        weights = weights_of_rows(site)
        if weights is not None:
            return observe_where(self.calibrator, x, site.spec, weights > 0)
        return self.calibrator.observe(x, site.spec)

    def merge(self, a: Any, b: Any) -> Any:
        """Returns the statistics of both."""
        return self.calibrator.merge(a, b)

    def __str__(self) -> str:
        return str(self.calibrator)
