"""What changes the scales of a calibrator: 16-bit scales, devices, steps, masks, averages."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .. import compat
from ..checks import as_dtype, check_fields, check_instance, instance, number, shown, whole
from ..errors import fail, some
from ..numerics.blocks import Block
from ..numerics.lookup import format_of
from .calibrator import (
    MAX_COUNT,
    Affine,
    Affinity,
    Around,
    Calibrator,
    added_counts,
    cover,
    look_at,
    nothing_seen,
    poisoned,
    saturating_add,
    serializable,
)
from .ranges import Fixed, absmax

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

    def affine(self, stats: Any, spec: Affinity) -> Affine:
        """Returns the rounded scale."""
        return self._rounded(self.calibrator.affine(stats, spec), spec)

    def fit(self, x: jax.Array, spec: Affinity) -> Affine:
        """Returns the rounded scale for one array."""
        return self._rounded(self.calibrator.fit(x, spec), spec)

    def _rounded(self, affine: Affine, spec: Affinity) -> Affine:
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

    def observe(self, x: jax.Array, spec: Affinity) -> Any:
        """Returns the statistics of the parts of an array on all devices."""
        stats = self.calibrator.observe(x, spec)
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


@serializable
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
class Delayed(Calibrator):
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

    length: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        # 2**margin is a normal float32.
        margin = whole(-126, 127)
        check_fields("calibrators.Delayed", self, length=whole(1, MAX_COUNT), margin=margin)

    def empty(self, shape: Sequence[int]) -> DelayedStats:
        """Returns a history of zeros."""
        return DelayedStats(jnp.zeros((self.length, *shape), jnp.float32), *nothing_seen(shape))

    def observe(self, x: jax.Array, spec: Affinity) -> DelayedStats:
        """Returns a history with the largest magnitude of this step in the newest slot."""
        observation = look_at(x, spec)
        groups = spec.granularity.groups(x.shape)
        largest = groups.largest_magnitude(observation.values).astype(jnp.float32)
        largest = jnp.where(observation.nans > 0, jnp.full_like(largest, jnp.nan), largest)
        history = jnp.zeros((self.length, *largest.shape), jnp.float32).at[0].set(largest)
        return DelayedStats(history, observation.nans, observation.observed)

    def merge(self, a: DelayedStats, b: DelayedStats) -> DelayedStats:
        """Returns the larger magnitude of each step, and the sums of the counts."""
        history = jnp.maximum(a.history, b.history)
        return DelayedStats(history, *added_counts(a, b))

    def affine(self, stats: DelayedStats, spec: Affinity) -> Affine:
        """Returns the scale of the largest magnitude in the history."""
        nan = jnp.isnan(stats.history)  # XLA may lose a NaN in a maximum
        history = jnp.where(nan, jnp.zeros_like(stats.history), stats.history)
        largest = jnp.max(history, axis=0) * jnp.float32(2.0**self.margin)
        return poisoned(cover(-largest, largest, spec), jnp.sum(nan.astype(jnp.int32), axis=0))

    def __str__(self) -> str:
        return "delayed" if self == delayed else f"delayed({self.length}, {self.margin})"


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
    mixed = {}
    for name in old._fields:
        a, b = getattr(old, name), getattr(new, name)
        if name not in _COUNTS and not jnp.issubdtype(a.dtype, jnp.floating):
            problem = f"{kind}.{name} is of {a.dtype.name}, which has no average."
            fix = "merge them with the calibrator; only statistics of floats have averages."
            raise fail(function, problem, fix=fix, error=TypeError)
        if a.shape != b.shape:
            problem = f"`old` and `new` have different shapes of {name}: {a.shape} and {b.shape}."
            raise fail(function, problem, fix="observe both with the same granularity.")
        if name in _COUNTS:
            mixed[name] = saturating_add(a, b)
            continue
        # Stacked statistics, as scan makes them, have a count for each entry of their first axes.
        old_count, new_count = (
            stats.observed.reshape(stats.observed.shape + (1,) * (a.ndim - stats.observed.ndim))
            for stats in (old, new)
        )
        average = a * decay + b * (1 - decay)
        mixed[name] = jnp.where(old_count == 0, b, jnp.where(new_count == 0, a, average))
    return type(old)(**mixed)


# Statistics of some elements of an array.


def observe_where(calibrator: Calibrator, x: jax.Array, spec: Affinity, mask: jax.Array) -> Any:
    """Returns the statistics of the elements for which `mask` is true; it has the rank of `x`."""
    # A calibrator counts NaN values and otherwise ignores them. A `Delayed` also remembers which
    # step had one; 0 is in each of its ranges.
    neutral = jnp.zeros_like(x) if _is(calibrator, Delayed) else jnp.full_like(x, jnp.nan)
    stats: Any = calibrator.observe(jnp.where(mask, x, neutral), spec)
    nans = spec.granularity.groups(x.shape).count(jnp.isnan(x) & mask)
    observed = stats.observed * jnp.any(mask).astype(jnp.int32)
    replace: Any = dataclasses.replace if dataclasses.is_dataclass(stats) else type(stats)._replace
    return replace(stats, nans=nans, observed=observed)


def needs_no_values(calibrator: Calibrator) -> bool:
    """Whether the range of a calibrator is given, and does not depend on what it observes."""
    return _is(calibrator, Fixed)


def _is(calibrator: Calibrator, kind: type) -> bool:
    while isinstance(calibrator, Around):
        calibrator = calibrator.calibrator
    return isinstance(calibrator, kind)
