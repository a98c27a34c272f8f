"""`merge_stats`: the statistics of two calibrations together."""

from collections.abc import Mapping
from typing import Any

import jax

from .._calls import called
from .._errors import fail
from ._arguments import check_plan, check_stats
from ._entries import kinds_of
from ._observers import GivenObservers, check_observers, keys_of, without_observers
from ._plan import Plan
from ._stats import Stats, check_keys, each_step, merged_flags, stats_of


@called("merge_stats", "pass the plan first: jqx.merge_stats(plan, a, b).")
def merge_stats(
    plan: Plan,
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    *,
    observers: GivenObservers = None,
) -> Stats:
    """Returns the merged statistics of two calibrations; associative.

    Args:
      plan: the plan that both were made with.
      a: statistics from `calibrate`.
      b: statistics from `calibrate`.
      observers: the observers that `calibrate` was given, if any.

    Raises:
      TypeError: if `observers` is not a dict of observers.
      ValueError: if `a` or `b` does not have the entries of the plan, or has entries of other
        observers, or a regular expression of `observers` matches no site.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8())(jnp.eye(2), jnp.ones((1, 2)))
      >>> parts = [jqx.calibrate(f, plan)(jnp.eye(2), jnp.full((1, 2), c))[1] for c in (2.0, 5.0)]
      >>> float(jqx.merge_stats(plan, *parts)[":dot_general:lhs"].largest[0, 0])
      5.0
    """
    name = "merge_stats"
    check_plan(name, plan, a, b, order="merge_stats(plan, a, b)")
    check_stats(name, "a", a)
    check_stats(name, "b", b)
    specs = plan.static_specs()
    known = keys_of(name, plan, check_observers(name, observers))
    check_keys(name, "a", without_observers(plan, a, known), specs)
    check_keys(name, "b", without_observers(plan, b, known), specs)
    _check_observed(plan, a, b, known)
    own = {key: (plan.site_of_key(key), spec.calibrator) for key, spec in specs.items()}
    (_, *own_flags), (_, *other_flags) = stats_of(a).parts, stats_of(b).parts
    merged = Stats((), *map(merged_flags, own_flags, other_flags))
    done: dict[Any, Any] = {}  # entries of one value are one object: each is merged once
    for key in (*specs, *(key for key in a if key not in specs)):
        site, observer = own[key] if key in own else known[key]
        both = id(a[key]), id(b[key]), observer, len(site.loops)
        if both not in done:
            done[both] = each_step(observer.merge, site.loops)(a[key], b[key])
        merged[key] = done[both]
    return merged


def _check_observed(
    plan: Plan, a: Mapping[str, Any], b: Mapping[str, Any], known: Mapping[str, Any]
) -> None:
    """Checks that both have entries of the same observers, that all of these were given, and that
    the entries of each have the same shapes.
    """
    static = plan.static_specs()
    seen = set(a) | set(b)
    strange = sorted(seen - set(static) - set(known))
    one_sided = sorted(set(a) ^ set(b))
    if not strange and not one_sided:
        for key in sorted(seen - set(static)):
            _check_same_kind(key, a[key], b[key])
        return
    raise fail(
        "merge_stats",
        "there are entries of observers that were not given."
        if strange
        else "`a` and `b` do not have the same entries of observers.",
        given=f"{', '.join((strange or one_sided)[:4])}",
        expected="entries of the observers given, the same in both",
        fix="pass the observers= that were used for both calibrations.",
    )


def _check_same_kind(key: str, a: Any, b: Any) -> None:
    kinds = [kinds_of(jax.eval_shape(lambda x: x, stats)) for stats in (a, b)]
    if kinds[0] == kinds[1]:
        return
    raise fail(
        "merge_stats",
        f"the statistics {key!r} differ in structure, shapes or dtypes.",
        given=" and ".join(kinds),
        expected="statistics that do not depend on the size of a batch",
        fix="let the observer reduce the axes that a batch may change: site.reduced(x.ndim).",
    )
