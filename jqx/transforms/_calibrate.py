"""Calibration: observe activations in float, merge what was seen, decide scales."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._calls import called
from .._compat import Eqn
from .._errors import message
from ..calibrators import Affine
from ..policy import Policy
from ._arguments import check_plan, check_stats
from ._interpret import Rules, interpret
from ._origin import Address, Loop
from ._plan import Plan, Site
from ._plan_call import as_plan, params_of
from ._trace import check_function, trace_call
from ._weight import real_of
from .primitives import Records

Stats = dict[str, Any]
"""Statistics by key, such as `layer0/w:dot_general:lhs`; each a pytree of its calibrator."""

Affines = dict[str, Affine]
"""Scales and zero points by key."""


@dataclasses.dataclass(frozen=True)
class _Observe(Rules):
    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        operands = [real_of(x) for x in operands]
        (result,) = _compat.bind(eqn, operands)
        seen = {operand.key: x for operand, x in zip(site.operands, operands, strict=False)}
        seen[site.output_key] = result
        with _compat.intermediates():
            records = {
                key: spec.calibrator.observe(jnp.asarray(seen[key]), spec)
                for key, spec in site.static_specs().items()
            }
        return result, records

    @_compat.intermediates()
    def unseen(self, here: Address) -> Records:
        records = {}
        for key in self.plan.keys_in(here):
            site = self.plan.site_of_key(key)
            if any(loop.address == here for loop in site.loops):
                continue
            empty = site.static_specs()[key].calibrator.empty(site.scale_shape(key))
            steps = tuple(loop.length for loop in site.loops_in(here))
            records[key] = jax.tree.map(
                lambda x, steps=steps: jnp.broadcast_to(x, steps + jnp.shape(x)), empty
            )
        return records

    def merge(self, here: Address, a: Records, b: Records) -> Records:
        merged = {}
        for key in a:
            site = self.plan.site_of_key(key)
            merge = site.static_specs()[key].calibrator.merge
            merged[key] = _each_step(merge, site.loops_in(here))(a[key], b[key])
        return merged


@called("calibrate", "call it in two steps: jqx.calibrate(f, plan)(params, x).")
def calibrate(f: Callable[..., Any], plan: Plan | Policy) -> Callable[..., tuple[Any, Stats]]:
    """Returns a function that evaluates `f` in float and observes what needs a static scale.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with (its parameters are argument 0 then).

    Returns:
      `calibrated(*args, **kwargs) -> (out, stats)`: the result of `f`, and statistics of this one
      batch. Pure, so it may be jitted; merge the statistics of several batches with `merge_stats`.
      A QTensor that is no weight, such as a cache, stays one, as in `convert`.

    Raises:
      TypeError: `f` is no function or `plan` no plan.
      ValueError: the plan was made for another function.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> w, x = jnp.eye(2), jnp.array([[1.0, -3.0]])
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8())(w, x)
      >>> out, stats = jqx.calibrate(f, plan)(w, x)
      >>> float(stats[":dot_general:lhs"].largest[0, 0])
      3.0
    """
    check_function("calibrate", f)
    params = params_of("calibrate", plan)

    def calibrated(*args: Any, **kwargs: Any) -> tuple[Any, Stats]:
        call = trace_call("calibrate", f, params, args, kwargs)
        known = as_plan("calibrate", plan, call, params)
        leaves = [
            leaf if known.weight_at(path) is None else real_of(leaf)
            for leaf, path in zip(call.leaves, call.paths, strict=True)
        ]
        out, stats = interpret(call.jaxpr, call.consts, leaves, _Observe(known))
        return jax.tree.unflatten(call.out_tree, out), stats

    return calibrated


@called("merge_stats", "pass the plan first: jqx.merge_stats(plan, a, b).")
def merge_stats(plan: Plan, a: Mapping[str, Any], b: Mapping[str, Any]) -> Stats:
    """Returns the statistics of two calibrations together; associative.

    Args:
      plan: the plan that both were made with.
      a: statistics from `calibrate`.
      b: statistics from `calibrate`.

    Raises:
      ValueError: `a` or `b` has not the entries of the plan.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8())(jnp.eye(2), jnp.ones((1, 2)))
      >>> parts = [jqx.calibrate(f, plan)(jnp.eye(2), jnp.full((1, 2), c))[1] for c in (2.0, 5.0)]
      >>> float(jqx.merge_stats(plan, *parts)[":dot_general:lhs"].largest[0, 0])
      5.0
    """
    check_plan("merge_stats", plan, a, b, order="merge_stats(plan, a, b)")
    check_stats("merge_stats", "a", a)
    check_stats("merge_stats", "b", b)
    specs = plan.static_specs()
    _check_keys("merge_stats", "a", a, specs)
    _check_keys("merge_stats", "b", b, specs)
    return {
        key: _each_step(spec.calibrator.merge, plan.site_of_key(key).loops)(a[key], b[key])
        for key, spec in specs.items()
    }


@called("affines", "pass the plan first: jqx.affines(plan, stats).")
def affines(plan: Plan, stats: Mapping[str, Any]) -> Affines:
    """Returns the scale and zero point of every static activation: the calibrators decide here.

    Args:
      plan: the plan that `stats` were made with.
      stats: from `calibrate`, merged over batches.

    Returns:
      A dict from keys such as `layer0/w:dot_general:lhs` to `(scale, zero_point)`.

    Raises:
      ValueError: `stats` has not the entries of the plan, some were never observed, or NaN values
        were. (Under jit, where this cannot be seen, such scales come out as NaN.)

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
    _check_keys("affines", "stats", stats, plan.static_specs())
    return affines_seen(plan, stats)


def affines_seen(plan: Plan, stats: Mapping[str, Any]) -> Affines:
    """Returns what `affines` returns, of those static activations that have statistics."""
    specs = {key: spec for key, spec in plan.static_specs().items() if key in stats}
    counts = {key: spec.calibrator.observed(stats[key]) for key, spec in specs.items()}
    unseen = [
        key for key, n in counts.items() if _compat.is_concrete(n) and not bool(jnp.all(n > 0))
    ]
    if unseen:
        raise ValueError(
            message(
                "affines",
                "some sites were never observed.",
                given=f"a count of 0 for {', '.join(unseen[:4])}",
                expected="at least one observation of every static activation",
                mend="calibrate on more batches, or quantize them with dynamic=True.",
            )
        )
    nans = {key: spec.calibrator.nans(stats[key]) for key, spec in specs.items()}
    spoilt = {
        key: int(np.sum(np.asarray(n), dtype=np.int64))
        for key, n in nans.items()
        if _compat.is_concrete(n) and bool(jnp.any(n > 0))
    }
    if spoilt:
        raise ValueError(
            message(
                "affines",
                "NaN values were observed.",
                given=", ".join(f"{n} at {key}" for key, n in list(spoilt.items())[:4]),
                expected="batches whose activations are numbers",
                mend="leave those batches out, or find where the NaN arises.",
            )
        )
    return {
        key: _each_step(partial(spec.calibrator.affine, spec=spec), plan.site_of_key(key).loops)(
            stats[key]
        )
        for key, spec in specs.items()
    }


def _each_step(f: Callable[..., Any], loops: Sequence[Loop]) -> Callable[..., Any]:
    """Maps over the leading axes that statistics have, one for each scan over a weight."""
    for _ in loops:
        f = jax.vmap(f)
    return _compat.intermediates()(f)


def _check_keys(
    function: str, argument: str, stats: Mapping[str, Any], specs: Mapping[str, Any]
) -> None:
    if set(stats) == set(specs):
        return
    differ = sorted(set(stats) ^ set(specs))
    raise ValueError(
        message(
            function,
            f"`{argument}` does not have the entries of the plan.",
            given=f"{len(stats)} entries, of which these differ: {', '.join(differ[:4])}",
            expected=f"one entry for each of the {len(specs)} static activations of the plan",
            mend="pass statistics from jqx.calibrate with the same plan.",
        )
    )
