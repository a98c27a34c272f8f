"""Statistics of some elements of an array."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ._around import Around
from ._calibrator import Affinity, Calibrator
from ._delayed import Delayed
from ._fixed import Fixed


def observe_where(calibrator: Calibrator, x: jax.Array, spec: Affinity, kept: jax.Array) -> Any:
    """Returns the statistics of the elements for which `kept` is true; it has the rank of `x`."""
    # A calibrator counts NaN values and otherwise ignores them. A `Delayed` also remembers which
    # step had one; 0 is in each of its ranges.
    neutral = jnp.zeros_like(x) if _is(calibrator, Delayed) else jnp.full_like(x, jnp.nan)
    stats: Any = calibrator.observe(jnp.where(kept, x, neutral), spec)
    nans = spec.granularity.groups(x.shape).count(jnp.isnan(x) & kept)
    some = jnp.any(kept).astype(jnp.int32)
    observed = stats.observed * some
    replace: Any = dataclasses.replace if dataclasses.is_dataclass(stats) else type(stats)._replace
    return replace(stats, nans=nans, observed=observed)


def needs_no_values(calibrator: Calibrator) -> bool:
    """Whether the range of a calibrator is given, and does not depend on what it observes."""
    return _is(calibrator, Fixed)


def _is(calibrator: Calibrator, kind: type) -> bool:
    while isinstance(calibrator, Around):
        calibrator = calibrator.calibrator
    return isinstance(calibrator, kind)
