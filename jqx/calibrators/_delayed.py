"""Delayed scaling: the scale of a step comes from the largest magnitudes of the steps before it.

    scale = 2**margin * max(history) / qmax

The history is explicit state. A step uses `affine` of the history, observes its own values, and
passes on `merge(advance(stats), observe(x))`. What the devices of one step observe is merged
first: each slot keeps the larger magnitude.

Sources: the history and the margin are from the DelayedScaling recipe of NVIDIA Transformer
Engine; scaled FP8 tensors are from Micikevicius et al., "FP8 Formats for Deep Learning",
arXiv:2209.05433.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._checks import check_instance, check_integer, shown
from .._errors import fail
from ._arguments import check_count
from ._calibrator import (
    Affine,
    Affinity,
    Calibrator,
    added_counts,
    look_at,
    nothing_seen,
    poisoned,
    serializable,
)
from ._cover import cover


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
        name = "calibrators.Delayed"
        object.__setattr__(self, "length", check_count(name, "length", self.length, 1))
        object.__setattr__(self, "margin", check_integer(name, "margin", self.margin))
        if not -126 <= self.margin <= 127:
            raise fail(
                name,
                "`margin` is out of range.",
                given=f"margin == {shown(self.margin)}",
                expected="-126 to 127: 2**margin is a float32",
                fix="choose margin from that range, such as 0 or 1.",
            )

    def empty(self, shape: Sequence[int]) -> DelayedStats:
        """Returns a history of zeros."""
        return DelayedStats(jnp.zeros((self.length, *shape), jnp.float32), *nothing_seen(shape))

    def observe(self, x: jax.Array, spec: Affinity) -> DelayedStats:
        """Returns a history with the largest magnitude of this step in the newest slot."""
        seen = look_at(x, spec)
        groups = spec.granularity.groups(x.shape)
        largest = groups.largest_magnitude(seen.values).astype(jnp.float32)
        largest = jnp.where(seen.nans > 0, jnp.full_like(largest, jnp.nan), largest)
        history = jnp.zeros((self.length, *largest.shape), jnp.float32).at[0].set(largest)
        return DelayedStats(history, seen.nans, seen.observed)

    def merge(self, a: DelayedStats, b: DelayedStats) -> DelayedStats:
        """Returns the larger magnitude of each step, and the sums of the counts."""
        history = jnp.maximum(a.history, b.history)
        return DelayedStats(history, *added_counts(a, b))

    def affine(self, stats: DelayedStats, spec: Affinity) -> Affine:
        """Returns the scale of the largest magnitude in the history."""
        nan = jnp.isnan(stats.history)  # XLA may lose a NaN in a maximum
        known = jnp.where(nan, jnp.zeros_like(stats.history), stats.history)
        largest = jnp.max(known, axis=0) * jnp.float32(2.0**self.margin)
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
        return {key: _advanced(v) if _has_history(v) else v for key, v in stats.items()}
    check_instance(
        "calibrators.advance",
        "stats",
        stats,
        DelayedStats,
        fix="pass what `observe` of a Delayed returns, or a dict of such statistics.",
    )
    return _advanced(stats)


def _has_history(stats: Any) -> bool:
    return isinstance(stats, DelayedStats)


def _advanced(stats: DelayedStats) -> DelayedStats:
    axis = stats.observed.ndim  # scan stacks statistics: the axis of steps comes after its axes
    history = jnp.roll(stats.history, 1, axis)
    newest = jax.lax.broadcasted_iota(jnp.int32, history.shape, axis) == 0
    return stats._replace(history=jnp.where(newest, jnp.zeros_like(history), history))
