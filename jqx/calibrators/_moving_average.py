"""The exponential moving average of statistics, for a loop over batches written by the caller.

    mixed = decay * old + (1 - decay) * new

It is not a monoid, because the order of the batches matters, so it is not a calibrator's `merge`.

Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", arXiv:1712.05877, section 3.1.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import fail
from ._arguments import check_number
from ._calibrator import saturating_add

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
    decay = check_number(
        "calibrators.moving_average", "decay", decay, lambda v: 0 < v < 1, "above 0 and below 1"
    )
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        if set(old) != set(new):
            raise fail(
                "calibrators.moving_average",
                "`old` and `new` do not have the same entries.",
                given=f"entries that differ: "
                f"{', '.join(sorted(map(str, set(old) ^ set(new)))[:4])}",
                expected="statistics of one plan",
                fix="calibrate both with the same plan.",
                error=TypeError,
            )
        return {k: _mixed(old[k], new[k], decay) for k in old if not _is_a_sum(k, old[k])}
    return _mixed(old, new, decay)


def _is_a_sum(key: Any, stats: Any) -> bool:
    """Whether the observer of an entry is not a calibrator: its name follows an `@`."""
    observer = str(key).rpartition(":")[2].partition("@")[2]
    return bool(observer) and not set(_COUNTS) <= set(getattr(stats, "_fields", ()))


def _mixed(old: Any, new: Any, decay: float) -> Any:
    _check_alike(old, new)
    fields = {
        name: saturating_add(getattr(old, name), getattr(new, name))
        if name in _COUNTS
        else _mix(getattr(old, name), getattr(new, name), old.observed, new.observed, decay)
        for name in old._fields
    }
    return type(old)(**fields)


def _mix(
    old: jax.Array, new: jax.Array, seen_before: jax.Array, seen_now: jax.Array, decay: float
) -> jax.Array:
    mixed = old * decay + new * (1 - decay)
    # Stacked statistics, as scan makes them, have a count for each entry of their first axes.
    before, now = (n.reshape(n.shape + (1,) * (old.ndim - n.ndim)) for n in (seen_before, seen_now))
    return jnp.where(before == 0, new, jnp.where(now == 0, old, mixed))


def _check_alike(old: Any, new: Any) -> None:
    fields = getattr(old, "_fields", ())
    if not (type(old) is type(new) and set(_COUNTS) <= set(fields)):
        raise fail(
            "calibrators.moving_average",
            "`old` and `new` are not statistics of one calibrator.",
            given=f"objects of type {type(old).__name__} and {type(new).__name__}",
            expected="NamedTuples of one type with the fields nans and observed, or dicts of them",
            fix="pass what `observe` or `jqx.calibrate` returns.",
            error=TypeError,
        )
    for name in fields:
        a, b = getattr(old, name), getattr(new, name)
        if name not in _COUNTS and not jnp.issubdtype(a.dtype, jnp.floating):
            raise fail(
                "calibrators.moving_average",
                f"{type(old).__name__}.{name} has no average.",
                given=f"{name}.dtype == {a.dtype.name}",
                expected="statistics of floats, such as those of minmax",
                fix="merge them with the calibrator instead.",
                error=TypeError,
            )
        if a.shape != b.shape:
            raise fail(
                "calibrators.moving_average",
                "`old` and `new` do not have the same shapes.",
                given=f"{name}.shape == {a.shape} and {b.shape}",
                expected="statistics of one scale shape",
                fix="observe both with the same granularity.",
            )
