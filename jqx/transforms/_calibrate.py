"""Calibration: observe activations in float, merge statistics, compute scales."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._calls import called
from .._compat import Eqn
from .._errors import message
from .._signatures import P, R
from ..calibrators import Affine
from ..policy import Policy
from ._arguments import check_plan, check_stats
from ._counted import value_of
from ._counting import count_arguments, count_operand, weights_of
from ._entries import Entries, entries_of, kinds_of
from ._interpret import Rules, interpret
from ._observers import GivenObservers, check_observers, keys_of, without_observers
from ._origin import Address, Loop
from ._places import places_of
from ._plan import Plan
from ._plan_call import params_of, with_contractions
from ._quantize_params import quantize_params
from ._site import Site, Weight
from ._trace import check_function, is_quantized, trace_call
from ._weight import real_of
from .primitives import Records, counted

Stats = dict[str, Any]
"""Statistics by key, such as `layer0/w:dot_general:lhs`; each is the pytree of a calibrator."""

Affines = dict[str, Affine]
"""Scales and zero points by key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observe(Rules):
    """Evaluates in float, and records statistics.

    Attributes:
      entries: the entries to record.
      shape: shape of the weights of rows, if rows are weighted.
    """

    entries: Entries
    shape: tuple[int, ...] | None = None

    @property
    def is_counting(self) -> bool:
        return self.shape is not None

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[Any, Records]:
        values = [real_of(value_of(x)) for x in operands]
        results = _compat.bind(eqn, values)
        counts = [*operands, *results]
        if self.is_counting:
            roles = [x.role for x in site.operands] + [""] * len(operands)
            known = [
                value if role == "weight" and is_quantized(x) else x
                for role, x, value in zip(roles, operands, values, strict=False)
            ]
            counts = [*operands, *counted(eqn, known, results)]
        seen, result = [*values, *results], counts[-1]
        sizes = values[2] if site.op == "ragged_dot" else None
        records = {}
        for entry in self.entries.at(site.address):
            weights, place = None, entry.part.place
            if self.shape is not None and entry.observer.weight is not None:
                weights = count_operand("calibrate", site.name, counts[place], self.shape)
            records[entry.key] = entry.observe(jnp.asarray(seen[place]), sizes, weights)
        return result, records

    @_compat.intermediates()
    def unseen(self, here: Address) -> Records:
        records = {}
        for entry in self.entries.at(here):
            if any(loop.address == here for loop in entry.site.loops):
                continue
            steps = tuple(loop.length for loop in entry.site.loops_in(here))
            records[entry.key] = jax.tree.map(
                lambda x, steps=steps: jnp.broadcast_to(x, steps + jnp.shape(x)), entry.empty()
            )
        return records

    def merge(self, here: Address, a: Records, b: Records) -> Records:
        merged = {}
        for key in a:
            entry = self.entries.recorded[key]
            loops = entry.site.loops_in(here)
            merged[key] = _each_step(entry.observer.merge, loops)(a[key], b[key])
        return merged


@called("calibrate", "call it in two steps: jqx.calibrate(f, plan)(params, x).")
def calibrate(
    f: Callable[P, R], plan: Plan | Policy, *, observers: GivenObservers = None
) -> Callable[P, tuple[R, Stats]]:
    """Returns a function that evaluates `f` in float and records statistics for static scales and
    for observers.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with (then argument 0 holds the parameters).
      observers: other statistics to record: a dict from regular expressions to a
        `jqx.observers.Observer` or a tuple of observers. The expressions are matched in full
        against the paths of the sites of the plan, or the paths of the weights that they are parts
        of. Sites without a static scale are observed too; contractions that the plan skips are not.
        A calibrator observes the operands that the plan quantizes, static or not.

    Returns:
      `calibrated(*args, **kwargs) -> (out, stats)`: the result of `f`, and the statistics of this
      batch. It is pure, so it may be jitted. Merge the statistics of several batches with
      `merge_stats`. A QTensor that is not a weight, such as a cache, stays a QTensor, as in
      `convert`.

      The key of an entry ends with the name of its observer, such as
      `layer0/w:dot_general:lhs@hessian`. The entry has a leading axis for each scan that steps over
      the weight of its site. Other loops, branches and the devices of a `shard_map` are merged. If
      several sites read one value along the same axes, its statistics are computed once, and their
      entries are one object.

    Raises:
      TypeError: if `f` is not a function, `plan` is not a plan or `observers` is not a dict of
        observers.
      ValueError: if the plan was made for another function, a regular expression of `observers` is
        invalid or matches no site, an observer observes nothing there, two observers of a site have
        the same name, or the results of an observer differ in structure, shapes or dtypes.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> w, x = jnp.eye(2), jnp.array([[1.0, -3.0]])
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8())(w, x)
      >>> out, stats = jqx.calibrate(f, plan)(w, x)
      >>> float(stats[":dot_general:lhs"].largest[0, 0])
      3.0
      >>> _, stats = jqx.calibrate(f, plan, observers={".*": jqx.observers.hessian})(w, x)
      >>> stats[":dot_general:lhs@hessian"].products
      Array([[ 1., -3.],
             [-3.,  9.]], dtype=float32)
    """
    check_function("calibrate", f)
    return observed(f, plan, observers)


def observed(
    f: Callable[P, R],
    plan: Plan | Policy,
    observers: GivenObservers,
    rules: type[Observe] = Observe,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[P, tuple[R, Stats]]:
    """Returns the function that `calibrate` returns. `rules` may do more at sites, using values
    `given` by keys of operands and results, with a leading axis for each scan over the weight.
    """
    params = params_of("calibrate", plan)
    checked = check_observers("calibrate", observers)

    def calibrated(*args: P.args, **kwargs: P.kwargs) -> tuple[R, Stats]:
        call = trace_call("calibrate", f, params, args, kwargs)
        known, found = with_contractions("calibrate", plan, call, params)
        leaves = [
            leaf if known.weight_at(path) is None else real_of(leaf)
            for leaf, path in zip(call.leaves, call.paths, strict=True)
        ]
        entries = entries_of("calibrate", known, call.jaxpr, found, checked)
        out, seen = [], {}
        for weight, own in reversed(entries.by_weight().items()):
            if weight is None:
                here, these = rules(known, dict(given), entries=own), leaves
            else:
                counts = weights_of("calibrate", weight, known.params, args, kwargs)
                here = rules(known, dict(given), entries=own, shape=counts.shape)
                these = count_arguments("calibrate", counts, known.params, call, leaves)
            out, records = interpret(call.jaxpr, call.consts, these, here)
            seen |= records
        out = list(map(value_of, out))
        stats = {key: seen[first] for key, first in entries.shared.items()}
        stats |= {key: make() for key, make in places_of(known, call, entries.places).items()}
        return jax.tree.unflatten(call.out_tree, out), stats

    return calibrated


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
    _check_keys(name, "a", without_observers(plan, a, known), specs)
    _check_keys(name, "b", without_observers(plan, b, known), specs)
    _check_observed(plan, a, b, known)
    own = {key: (plan.site_of_key(key), spec.calibrator) for key, spec in specs.items()}
    merged: Stats = {}
    done: dict[Any, Any] = {}  # entries of one value are one object: each is merged once
    for key in (*specs, *(key for key in a if key not in specs)):
        site, observer = own[key] if key in own else known[key]
        both = id(a[key]), id(b[key]), observer, len(site.loops)
        if both not in done:
            done[both] = _each_step(observer.merge, site.loops)(a[key], b[key])
        merged[key] = done[both]
    return merged


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
        or has seen NaN values. (Under jit, where this cannot be checked, such scales are NaN.) Or
        if `params` are not those of the plan.

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
    _check_keys("affines", "stats", without_observers(plan, stats), plan.static_specs())
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
        if _compat.is_concrete(n) and np.any(np.asarray(n) > 0)
    }
    if spoilt:
        raise ValueError(
            message(
                "affines",
                "NaN values were observed.",
                given=", ".join(f"{n} at {key}" for key, n in list(spoilt.items())[:4]),
                expected="batches whose activations are numbers",
                mend="leave those batches out, or find the source of the NaN values.",
            )
        )
    return {
        key: _each_step(partial(spec.calibrator.affine, spec=spec), plan.site_of_key(key).loops)(
            stats[key]
        )
        for key, spec in specs.items()
    }


def _each_step(f: Callable[..., Any], loops: Sequence[Loop]) -> Callable[..., Any]:
    """Maps `f` over the leading axes of statistics, one for each scan over a weight."""
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
            given=f"{len(stats)} entries; these differ: {', '.join(differ[:4])}",
            expected=f"one entry for each of the {len(specs)} static activations of the plan",
            mend="pass statistics from jqx.calibrate with the same plan.",
        )
    )


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
    raise ValueError(
        message(
            "merge_stats",
            "there are entries of observers that were not given."
            if strange
            else "`a` and `b` do not have the same entries of observers.",
            given=f"{', '.join((strange or one_sided)[:4])}",
            expected="entries of the observers given, the same in both",
            mend="pass the observers= that were used for both calibrations.",
        )
    )


def _check_same_kind(key: str, a: Any, b: Any) -> None:
    kinds = [kinds_of(jax.eval_shape(lambda x: x, stats)) for stats in (a, b)]
    if kinds[0] == kinds[1]:
        return
    raise ValueError(
        message(
            "merge_stats",
            f"the statistics {key!r} differ in structure, shapes or dtypes.",
            given=" and ".join(kinds),
            expected="statistics that do not depend on the size of a batch",
            mend="let the observer reduce the axes that a batch may change: site.reduced(x.ndim).",
        )
    )
