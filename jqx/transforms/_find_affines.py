"""`affines`: scales and zero points of activations, from statistics."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._calls import called
from .._errors import fail, message, some, warn
from ..calibrators import Affine
from ..calibrators._shared import needs_no_values
from ._arguments import check_plan, check_stats
from ._observers import without_observers
from ._plan import Plan
from ._quantize_params import quantize_params
from ._site import Weight
from ._stats import (
    check_finite,
    check_keys,
    each_step,
    flags_of,
    in_order,
    nonfinite_text,
    stats_of,
)

Affines = dict[str, Affine]
"""Scales and zero points by key."""


@called("affines", "pass the plan first: jqx.affines(plan, stats).")
def affines(plan: Plan, stats: Mapping[str, Any], params: Any = None) -> Affines:
    """Returns the scale and zero point of every static activation, computed by its calibrator.

    Args:
      plan: the plan that `stats` were made with.
      stats: from `calibrate`, merged over batches; entries of observers are ignored.
      params: float weights, whose scales are returned too: `simulate`, `quantize_params` and
        `convert` take them, so that they can be trained. A tuple of arguments if the plan was made
        with several. With `None`, only the scales of activations are returned.

    Returns:
      A dict from keys such as `layer0/w:dot_general:lhs` to `(scale, zero_point)`; with `params`
      also from `layer0/w:weight`.

    Raises:
      TypeError: if `plan` is not a `Plan`.
      ValueError: if `stats` does not have the entries of the plan, or if a site was never observed
        or has seen NaN or infinities that were not left out. (Under jit, where this cannot be
        checked, such scales are not finite.) Or if `params` are not those of the plan.

    A site that saw only zeros, such as an expert that no token reached, gets the scale 1, with a
    warning.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> w, x = jnp.eye(2), jnp.array([[1.0, -127.0]])
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8())(w, x)
      >>> jqx.affines(plan, jqx.calibrate(f, plan)(w, x)[1])[":dot_general:lhs"].scale
      Array([[1.]], dtype=float32)
    """
    check_plan("affines", plan, stats, order="affines(plan, stats)")
    check_stats("affines", "stats", stats)
    check_keys("affines", "stats", without_observers(plan, stats), plan.static_specs())
    found = affines_seen(plan, stats)
    if params is not None:

        def note(weight: Weight, codes: Any) -> Any:
            found[weight.key] = Affine(codes.scale, codes.zero_point)
            return codes

        plan.map_weights(note, quantize_params(params, plan))
    return found


def affines_seen(plan: Plan, stats: Mapping[str, Any]) -> Affines:
    """Returns the result of `affines` for those static activations that have statistics."""
    specs = {key: spec for key, spec in plan.static_specs().items() if key in stats}
    counts = {key: spec.calibrator.observed(stats[key]) for key, spec in specs.items()}
    unseen = [
        key
        for key, n in counts.items()
        if _compat.is_concrete(n) and not bool(np.all(np.asarray(n) > 0))
    ]
    if unseen:
        raise fail(
            "affines",
            "some sites were never observed.",
            given=f"a count of 0 for {', '.join(unseen[:4])}",
            expected="at least one observation of every static activation",
            fix="calibrate on more batches, or quantize them with dynamic=True.",
        )
    seen = stats_of(stats)
    check_finite("affines", in_order(plan, seen.flags))
    found = {
        key: each_step(partial(spec.calibrator.affine, spec=spec), plan.site_of_key(key).loops)(
            stats[key]
        )
        for key, spec in specs.items()
    }
    _check_finite(plan, stats, found)
    _warn_of_zeros(plan, flags_of(stats), specs)
    return found


def _check_finite(plan: Plan, stats: Mapping[str, Any], found: Affines) -> None:
    """Raises if statistics without flags, such as those of a module, hold a NaN or an infinity."""
    bad, flags = [], flags_of(stats)
    for key, affine in found.items():
        nans = plan.static_specs()[key].calibrator.nans(stats[key])
        if not _compat.is_concrete(nans) or not _compat.is_concrete(affine.scale):
            continue
        count = int(np.sum(np.asarray(nans), dtype=np.int64))
        if count:
            bad.append(f"{count} NaN values at {key}")
            continue
        # A percentile may clip an infinity, and have a finite scale.
        seen = () if key in flags else jax.tree.leaves(stats[key])
        if not all(map(_is_finite, (affine.scale, *seen))):
            bad.append(f"infinity at {key}")
    if bad:
        raise ValueError(nonfinite_text("affines", bad))


def _is_finite(x: Any) -> bool:
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    return not is_float or bool(np.isfinite(np.asarray(x, np.float32)).all())


def _warn_of_zeros(plan: Plan, flags: Mapping[str, Any], specs: Mapping[str, Any]) -> None:
    """Warns of static scales of sites that saw nothing but zeros."""
    bad = []
    for key, spec in specs.items():
        own = flags.get(key)
        if own is None or not _compat.is_concrete(own) or needs_no_values(spec.calibrator):
            continue
        depth = len(plan.site_of_key(key).loops)
        rows = np.asarray(own)[..., 2]
        rows = rows.reshape(*rows.shape[:depth], -1).max(-1)  # experts of a stack share a scale
        steps = np.argwhere(rows == 0).tolist()
        bad += [f"{key}[{', '.join(map(str, step))}]" if step else key for step in steps]
    if bad:
        text = message(
            "affines",
            "some sites saw only zeros, so that their static scale is 1.",
            given=some(bad),
            expected="batches that reach every site, such as every expert",
            fix="calibrate on batches that reach them, or quantize their activations with "
            "dynamic=True; a site whose input is always 0 needs nothing.",
        )
        warn(text)
