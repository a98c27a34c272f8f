"""`calibrate`, `calibrate_batches`, `merge_stats` and `affines`: statistics of activations, which
are observed in float, and the scales that follow from them.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..checks import called
from ..compat import Eqn
from ..errors import fail, message, some, warn
from ..policy import Policy
from ..signatures import P, R
from ..statistics.calibrators import Affine, affine_of, needs_no_values
from ..statistics.statistics import RowWeight, check_weight, flags, in_total, places
from ..tensor.segments import check_read
from .arguments import check_batch, check_batches, check_function, check_plan, check_stats
from .higher_order import Records
from .interpret import Rules, interpret
from .make_plan import params_of, with_contractions
from .paths import by_argument, flatten, insert_params, path_of
from .plan import Plan, Site, Weight
from .quantize_params import quantize_params
from .row_counts import (
    count_arguments,
    count_operand,
    counted,
    every_row,
    tainted,
    tainted_results,
    tainted_rows,
    value_of,
    weights_of,
)
from .stats import (
    Entries,
    GivenObservers,
    OnNonfinite,
    Stats,
    check_finite,
    check_keys,
    check_mode,
    check_observers,
    each_step,
    entries_of,
    flags_of,
    in_order,
    keys_of,
    kinds_of,
    merged_flags,
    nonfinite_text,
    observers_of,
    places_of,
    stats_of,
    warn_left_out,
    with_flags,
    without_observers,
)
from .trace import is_array, is_quantized, trace_call
from .views import Address, real_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observe(Rules):
    """Evaluates in float, and records statistics.

    Attributes:
      entries: the entries to record.
      shape: shape of the weights of rows, if rows are weighted.
    """

    entries: Entries
    shape: tuple[int, ...] | None = None

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[Any, Records]:
        values = [real_of(value_of(x)) for x in operands]
        results = compat.bind(eqn, values)
        operands = tainted_rows(eqn, operands) if self.leaves_out else operands
        counts = [*operands, *results]
        if self.is_counting:
            roles = [x.role for x in site.operands] + [""] * len(operands)
            counted_operands = [
                value if role == "weight" and is_quantized(x) else x
                for role, x, value in zip(roles, operands, values, strict=False)
            ]
            counted_results = counted(eqn, counted_operands, results)
            if self.leaves_out:
                counted_results = tainted_results(eqn, counted_operands, counted_results)
            counts = [*operands, *counted_results]
        values_of_parts, result = [*values, *results], counts[-1]
        sizes = values[2] if site.op == "ragged_dot" else None
        records = {}
        for entry in self.entries.at(site.address):
            weights, index = None, entry.part.argnum
            if self.shape is not None and entry.weight is not None:
                weights = count_operand("calibrate", site.name, counts[index], self.shape)
            x = jnp.asarray(values_of_parts[index])
            records[entry.key] = entry.observe(x, sizes, weights, self.leaves_out)
        return result, records

    @compat.intermediates()
    def empty_records(self, address: Address) -> Records:
        records = {}
        for entry in self.entries.at(address):
            if any(loop.address == address for loop in entry.site.loops):
                continue
            steps = tuple(loop.length for loop in entry.site.loops_in(address))
            records[entry.key] = jax.tree.map(
                lambda x, steps=steps: jnp.broadcast_to(x, steps + jnp.shape(x)), entry.empty()
            )
        return records

    def merge(self, address: Address, a: Records, b: Records) -> Records:
        merged = {}
        for key in a:
            entry = self.entries.recorded[key]
            loops = entry.site.loops_in(address)
            merged[key] = each_step(entry.observer.merge, loops)(a[key], b[key])
        return merged


@called("calibrate", "call it in two steps: jqx.calibrate(f, plan)(params, x).")
def calibrate(
    f: Callable[P, R],
    plan: Plan | Policy,
    *,
    observers: GivenObservers = None,
    weight: RowWeight | None = None,
    on_nonfinite: OnNonfinite = "error",
) -> Callable[P, tuple[R, Stats]]:
    """Returns a function that evaluates `f` in float and records statistics for static scales and
    for observers.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with (then argument 0 holds the parameters).
      observers: other statistics to record: a dict from regular expressions to a
        `jqx.extend.Observer` or a tuple of observers. The expressions are matched in full
        against the paths of the sites of the plan, or the paths of the weights that they are parts
        of. Sites without a static scale are observed too; contractions that the plan skips are not.
        A calibrator observes the operands that the plan quantizes, static or not.
      weight: how much rows count, for static scales and for observers without a weight of their
        own, as in `jqx.extend.hessian`: a function of the arguments of `f` without its
        parameters, such as `lambda tokens: tokens != 0`. Static scales ignore rows of weight 0, and
        treat all others alike.
      on_nonfinite: what is done with rows of operands that hold a NaN or an infinity. Flags in the
        statistics count them, under jit as well. `"error"`: `affines`, `calibrate_batches` and
        `quantize_params` raise then. `"ignore"`: they are left out, at this site and at the sites
        after it, as far as rows can be followed. Rows are then counted as with a weight.

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
      TypeError: if `f` is not a function, `plan` is not a plan, `observers` is not a dict of
        observers, or `weight` is not a function.
      ValueError: if the plan was made for another function, a regular expression of `observers` is
        invalid or matches no site, an observer observes nothing there, two observers of a site have
        the same name, the results of an observer differ in structure, shapes or dtypes, or
        `on_nonfinite` is unknown.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> w, x = jnp.eye(2), jnp.array([[1.0, -3.0]])
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8())(w, x)
      >>> out, stats = jqx.calibrate(f, plan)(w, x)
      >>> float(stats[":dot_general:lhs"].largest[0, 0])
      3.0
      >>> _, stats = jqx.calibrate(f, plan, observers={".*": jqx.extend.hessian})(w, x)
      >>> stats[":dot_general:lhs@hessian"].products
      Array([[ 1., -3.],
             [-3.,  9.]], dtype=float32)
    """
    check_function("calibrate", f)
    check_weight("calibrate", weight)
    ignores = check_mode("calibrate", on_nonfinite)
    return observed(f, plan, observers, weight=weight, ignores=ignores)


def observed(
    f: Callable[P, R],
    plan: Plan | Policy,
    observers: GivenObservers,
    rules: type[Observe] = Observe,
    values_by_key: Mapping[str, Any] = MappingProxyType({}),
    *,
    weight: RowWeight | None = None,
    ignores: bool = False,
) -> Callable[P, tuple[R, Stats]]:
    """Returns the function that `calibrate` returns. `rules` may do more at sites, using values
    `values_by_key` of operands and results, with a leading axis for each scan over the weight.
    """
    params = params_of("calibrate", plan)
    weight = every_row if ignores and weight is None else weight
    checked = check_observers("calibrate", observers)

    def calibrated(*args: P.args, **kwargs: P.kwargs) -> tuple[R, Stats]:
        call = trace_call("calibrate", f, params, args, kwargs)
        fitted, items = with_contractions("calibrate", plan, call, params)
        leaves = [
            leaf if fitted.weight_at(path) is None else real_of(leaf)
            for leaf, path in zip(call.leaves, call.paths, strict=True)
        ]
        entries = entries_of("calibrate", fitted, call.jaxpr, items, checked, weight)
        out, recorded = [], {}
        for counting, subset in reversed(entries.by_weight().items()):
            if counting is None:
                rule, inputs = rules(fitted, dict(values_by_key), entries=subset), leaves
            else:
                counts = weights_of("calibrate", counting, fitted.params, args, kwargs)
                options: Any = {"is_counting": True, "leaves_out": ignores, "shape": counts.shape}
                rule = rules(fitted, dict(values_by_key), entries=subset, **options)
                inputs = count_arguments("calibrate", counts, fitted.params, call, leaves)
                inputs = list(map(tainted, inputs)) if ignores else inputs
            out, records = interpret(call.jaxpr, call.consts, inputs, rule)
            recorded |= records
        out = list(map(value_of, out))
        stats = with_flags(
            {key: recorded[shared_key] for key, shared_key in entries.shared.items()}, ignores
        )
        stats.update({key: make() for key, make in places_of(fitted, call, entries.places).items()})
        return jax.tree.unflatten(call.out_tree, out), stats

    return calibrated


# `merge_stats`: the statistics of two calibrations together.


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
    observed_sites = keys_of(name, plan, check_observers(name, observers))
    check_keys(name, "a", without_observers(plan, a, observed_sites), specs)
    check_keys(name, "b", without_observers(plan, b, observed_sites), specs)
    _check_observed(plan, a, b, observed_sites)
    calibrated_sites = {
        key: (plan.site_of_key(key), spec.calibrator) for key, spec in specs.items()
    }
    (_, *own_flags), (_, *other_flags) = stats_of(a).parts, stats_of(b).parts
    merged = Stats((), *map(merged_flags, own_flags, other_flags))
    done: dict[Any, Any] = {}  # entries of one value are one object: each is merged once
    for key in (*specs, *(key for key in a if key not in specs)):
        site, observer = calibrated_sites[key] if key in calibrated_sites else observed_sites[key]
        pair = id(a[key]), id(b[key]), observer, len(site.loops)
        if pair not in done:
            done[pair] = each_step(observer.merge, site.loops)(a[key], b[key])
        merged[key] = done[pair]
    return merged


def _check_observed(
    plan: Plan, a: Mapping[str, Any], b: Mapping[str, Any], observed_sites: Mapping[str, Any]
) -> None:
    """Checks that both have entries of the same observers, that all of these were given, and that
    the entries of each have the same shapes.
    """
    keys = (set(a) | set(b)) - set(plan.static_specs())
    strange, one_sided = sorted(keys - set(observed_sites)), sorted(set(a) ^ set(b))
    if strange or one_sided:
        problem = "`a` and `b` do not have the same entries of observers."
        problem = "there are entries of observers that were not given." if strange else problem
        fix = "pass the observers= that were used for both calibrations."
        raise fail("merge_stats", problem, given=some(strange or one_sided), fix=fix)
    for key in sorted(keys):
        kinds = [kinds_of(jax.eval_shape(lambda x: x, stats[key])) for stats in (a, b)]
        if kinds[0] != kinds[1]:
            problem = f"the statistics {key!r} differ in structure, shapes or dtypes."
            fix = "let the observer reduce the axes that a batch may change: site.reduced(x.ndim)."
            raise fail("merge_stats", problem, given=" and ".join(kinds), fix=fix)


# `affines`: scales and zero points of activations, from statistics.


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
    scales = affines_seen(plan, stats)
    if params is not None:

        def note(weight: Weight, codes: Any) -> Any:
            scales[weight.key] = Affine(codes.scale, codes.zero_point)
            return codes

        plan.map_weights(note, quantize_params(params, plan))
    return scales


def affines_seen(plan: Plan, stats: Mapping[str, Any]) -> Affines:
    """Returns the result of `affines` for those static activations that have statistics."""
    specs = {key: spec for key, spec in plan.static_specs().items() if key in stats}
    counts = {key: spec.calibrator.observed(stats[key]) for key, spec in specs.items()}
    unseen = [
        key
        for key, n in counts.items()
        if compat.is_concrete(n) and not bool(np.all(np.asarray(n) > 0))
    ]
    if unseen:
        details = f"a count of 0 for {', '.join(unseen[:4])}"
        fix = "calibrate on more batches, or quantize them with dynamic=True."
        raise fail("affines", "some sites were never observed.", given=details, fix=fix)
    merged = stats_of(stats)
    check_finite("affines", in_order(plan, merged.flags))
    scales = {
        key: each_step(partial(affine_of, spec.calibrator, spec=spec), plan.site_of_key(key).loops)(
            stats[key]
        )
        for key, spec in specs.items()
    }
    if bad := _nonfinite(plan, stats, scales):
        raise ValueError(nonfinite_text("affines", bad))
    _warn_of_zeros(plan, flags_of(stats), specs)
    return scales


def _nonfinite(plan: Plan, stats: Mapping[str, Any], scales: Affines) -> list[str]:
    """Returns which statistics without flags, such as those of a module, hold a NaN or infinity."""
    bad, flags = [], flags_of(stats)
    for key, affine in scales.items():
        nans = plan.static_specs()[key].calibrator.nans(stats[key])
        if not compat.is_concrete(nans) or not compat.is_concrete(affine.scale):
            continue
        # A percentile may clip an infinity, and have a finite scale.
        leaves = () if key in flags else jax.tree.leaves(stats[key])
        if count := int(np.sum(np.asarray(nans), dtype=np.int64)):
            bad.append(f"{count} NaN values at {key}")
        elif not all(map(_is_finite, (affine.scale, *leaves))):
            bad.append(f"infinity at {key}")
    return bad


def _is_finite(x: Any) -> bool:
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    return not is_float or bool(np.isfinite(np.asarray(x, np.float32)).all())


def _warn_of_zeros(plan: Plan, flags: Mapping[str, Any], specs: Mapping[str, Any]) -> None:
    """Warns of static scales of sites that saw nothing but zeros."""
    bad = []
    for key, spec in specs.items():
        flag = flags.get(key)
        if flag is None or not compat.is_concrete(flag) or needs_no_values(spec.calibrator):
            continue
        depth = len(plan.site_of_key(key).loops)
        rows = np.asarray(flag)[..., 2]
        rows = rows.reshape(*rows.shape[:depth], -1).max(-1)  # experts of a stack share a scale
        steps = np.argwhere(rows == 0).tolist()
        bad += [f"{key}[{', '.join(map(str, step))}]" if step else key for step in steps]
    if bad:
        problem = "some sites saw only zeros, so that their static scale is 1."
        fix = "calibrate on batches that reach them, or use dynamic=True; a site whose input is "
        fix += "always 0 needs nothing."
        warn(message("affines", problem, given=some(bad), fix=fix))


# `calibrate_batches`: the merged statistics of many batches.


_LARGE = 2**28
"""The size in bytes from which the size of statistics is printed."""


@called("calibrate_batches", "pass for example jqx.calibrate_batches(f, plan, params, batches).")
def calibrate_batches(
    f: Callable[..., Any],
    plan: Plan,
    params: Any,
    batches: Iterable[Any],
    *,
    observers: GivenObservers = None,
    weight: RowWeight | None = None,
    on_nonfinite: OnNonfinite = "error",
    progress: bool = True,
) -> Stats:
    """Returns the merged statistics of the activations of `f` over batches, one after another.

    One jitted function observes each batch. A batch of another shape compiles another one.

    Args:
      f: the function that the plan was made for.
      plan: from `make_plan`.
      params: the argument of `f` that holds its weights; a tuple of arguments if the plan was made
        with several. Leaves that are not arrays are static, as everywhere.
      batches: a list or another iterable, but not an array; each a tuple of the other arguments of
        `f`, in order, or a single argument: an array, a dict, a named tuple or another pytree. All
        leaves are arrays or numbers. Python's numbers are static, and each other number compiles
        another function.
      observers: other statistics to record, as in `calibrate`.
      weight: how much rows count, as in `calibrate`.
      on_nonfinite: `"error"` raises if a row of an operand holds a NaN or an infinity. `"ignore"`
        leaves such rows out, as in `calibrate`, with a warning that counts them.
      progress: whether to show a bar on standard error, if tqdm is installed, and above it the size
        of large statistics, before they are computed.

    Raises:
      TypeError: if `f` is not a function, `plan` is not a `Plan`, `observers` is not a dict of
        observers, or `batches` is not iterable or is an array.
      ValueError: if there is no batch, the plan was made for another function, `observers` does not
        fit it, or activations are not finite; the error names the sites and the batch.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> w, batches = jnp.eye(2), [jnp.full((1, 2), c) for c in (2.0, -5.0, 3.0)]
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8())(w, batches[0])
      >>> stats = jqx.calibrate_batches(f, plan, w, batches, progress=False)
      >>> float(stats[":dot_general:lhs"].largest[0, 0])
      5.0
    """
    check_function("calibrate_batches", f)
    name = "calibrate_batches"
    order = "calibrate_batches(f, plan, params, batches)"
    check_plan(name, plan, params, batches, order=order)
    ignores = check_mode(name, on_nonfinite)
    check_batches(name, batches)
    checked = check_observers(name, observers)
    observers_of(name, plan, checked)
    named = flatten(by_argument(plan.params, params))
    check_read(name, [(path_of(keys), leaf) for keys, leaf in named])
    where = [pattern for pattern, kinds in checked if places in kinds]
    others = {pattern: tuple(x for x in kinds if x != places) for pattern, kinds in checked}
    recorded = {pattern: kinds for pattern, kinds in others.items() if kinds}
    arrays, filled = arrays_of(params)

    @jax.jit
    def observe(arrays: list[Any], batch: Any) -> tuple[_SharedStats, jax.Array]:
        arguments = arguments_of(plan, filled(arrays), batch)
        options: Any = {"weight": weight, "on_nonfinite": on_nonfinite}
        stats = calibrate(f, plan, observers=recorded, **options)(*arguments)[1]
        return _SharedStats(stats), in_total([*stats.flags.values(), *stats.left_out.values()])

    @jax.jit
    def merge(a: _SharedStats, b: _SharedStats) -> _SharedStats:
        return _SharedStats(merge_stats(plan, a.stats, b.stats, observers=recorded))

    merged: _SharedStats | None = None
    first_batch: Any = None
    left_out: list[int] = []
    pending: tuple[int, Stats, jax.Array] | None = None

    def look_at_last() -> None:
        """Looks at the flags of the last batch, while the next one is computed."""
        if pending is not None and int(pending[2]):
            check_finite(name, in_order(plan, pending[1].flags), pending[0])
            left_out.append(pending[0])

    bar = progress_bar("calibrate", "batch", batches) if progress else None
    for index, batch in enumerate(batches if bar is None else bar):
        check_batch(name, batch, index)
        if merged is None and bar is not None:
            size = bytes_of(jax.eval_shape(observe, arrays, Batch(batch))[0])
            if size >= _LARGE:
                tell(bar, f"calibrate: the statistics take {in_bytes(size)}")
        statistics, bad = observe(arrays, Batch(batch))
        look_at_last()
        pending = index, statistics.stats, bad
        first_batch = batch if merged is None else first_batch
        merged = statistics if merged is None else merge(merged, statistics)
    if merged is None:
        problem = "there is no batch: `batches` is empty, or an exhausted generator."
        raise fail(name, problem, fix="pass a list, or create the generator again.")
    look_at_last()
    stats = merged.stats
    if ignores:
        warn_left_out(name, in_order(plan, stats.left_out), left_out)
    stats.update(elements_of(f, plan, params, first_batch, where))
    return stats


def look_at_batches(
    function: str,
    f: Callable[..., Any],
    plan: Plan,
    params: Any,
    batches: Sequence[Any],
    on_nonfinite: OnNonfinite,
) -> Stats:
    """Returns the flags of all operands and results of sites in float, for algorithms that do not
    observe each site. Raises, or warns, if some are not finite.
    """
    ignores = check_mode(function, on_nonfinite)
    arrays, filled = arrays_of(params)

    @jax.jit
    def seen(arrays: list[Any], batch: Any) -> tuple[Stats, jax.Array]:
        options: Any = {"observers": {".*": flags}, "on_nonfinite": on_nonfinite}
        stats = calibrate(f, plan, **options)(*arguments_of(plan, filled(arrays), batch))[1]
        stats = Stats((), stats.flags, stats.left_out)
        return stats, in_total([*stats.flags.values(), *stats.left_out.values()])

    merged, spoilt = Stats(), []
    for index, batch in enumerate(batches):
        stats, bad = seen(arrays, Batch(batch))
        if int(bad):
            check_finite(function, in_order(plan, stats.flags), index)
            spoilt.append(index)
        pairs = zip(merged.parts[1:], stats.parts[1:], strict=True)
        merged = Stats((), *(merged_flags(a, b) for a, b in pairs))
    if ignores:
        warn_left_out(function, in_order(plan, merged.left_out), spoilt)
    return merged


def elements_of(
    f: Callable[..., Any], plan: Plan, params: Any, batch: Any, patterns: Sequence[str]
) -> dict[str, Any]:
    """Returns the statistics of `jqx.extend.places` for the sites that regular expressions
    match. They are the same for all batches, and nothing else of the function is computed.
    """
    if not patterns:
        return {}
    arrays, filled = arrays_of((params, batch))

    @jax.jit
    def elements(arrays: list[Any]) -> dict[str, Any]:
        arguments = arguments_of(plan, *filled(arrays))
        _, stats = calibrate(f, plan, observers=dict.fromkeys(patterns, places))(*arguments)
        return {key: x for key, x in stats.items() if key.endswith(f"@{places}")}

    return elements(arrays)


def arrays_of(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the arrays of a tree, for `jit`, and a function that rebuilds it from arrays."""
    leaves, structure = jax.tree.flatten(tree)

    def filled(arrays: Sequence[Any]) -> Any:
        iterator = iter(arrays)
        return structure.unflatten([next(iterator) if is_array(x) else x for x in leaves])

    return [leaf for leaf in leaves if is_array(leaf)], filled


@jax.tree_util.register_pytree_node_class
class _SharedStats:
    """Statistics in which an object that several entries share crosses `jit` once."""

    def __init__(self, stats: Stats):
        self.stats = stats

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the distinct objects, and the index of the object of each entry."""
        parts = self.stats.parts
        objects = {id(value): value for part in parts for value in part.values()}
        numbers = {key: i for i, key in enumerate(objects)}
        return tuple(objects.values()), tuple(
            tuple((key, numbers[id(value)]) for key, value in part.items()) for part in parts
        )

    @classmethod
    def tree_unflatten(cls, parts: Any, objects: Any) -> "_SharedStats":
        """Returns the statistics."""
        return cls(Stats(*({key: objects[number] for key, number in part} for part in parts)))


@jax.tree_util.register_pytree_node_class
class Batch:
    """A batch as an argument of `jax.jit`. Its leaves that are not arrays, such as numbers, are
    static, as they are for every transform.
    """

    def __init__(self, value: Any):
        self.value = value.value if isinstance(value, Batch) else value

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the arrays and QTensors, and all else with its type, because 1 == 1.0 == True."""
        leaves, structure = jax.tree.flatten(self.value, is_leaf=is_quantized)
        constants = tuple(None if is_array(x) else (type(x), x) for x in leaves)
        return tuple(x for x in leaves if is_array(x)), (structure, constants)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "Batch":
        """Returns the batch."""
        (structure, constants), iterator = static, iter(arrays)
        return cls(structure.unflatten([next(iterator) if x is None else x[1] for x in constants]))


def inputs_of(batch: Any) -> tuple[Any, ...]:
    """Returns a batch as arguments: those of a plain tuple, or a single one, such as a named tuple
    or another pytree.
    """
    batch = batch.value if isinstance(batch, Batch) else batch
    return batch if type(batch) is tuple else (batch,)


def arguments_of(plan: Plan, params: Any, batch: Any) -> list[Any]:
    """Returns the arguments of the function: the parameters at their positions, and the batch, a
    tuple or a single argument.
    """
    return insert_params(plan.params, params, inputs_of(batch))


def bytes_of(tree: Any) -> int:
    """Returns the size in bytes of arrays, or of objects with shapes and dtypes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def in_bytes(count: int) -> str:
    """Returns a number of bytes as text."""
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count / 2 ** (10 * power):.4g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


# Progress bars on standard error, if that is a terminal and tqdm is installed (in the extra
# `examples`).


T = TypeVar("T")


def progress_bar(title: str, unit: str, items: Iterable[Any] | None = None, **options: Any) -> Any:
    """Returns a bar of tqdm, which shows nothing without a terminal; `None` without tqdm.

    Args:
      title: description of the work.
      unit: the unit that is counted.
      items: items to iterate over; `None` if the caller calls `update` of the bar.
      **options: options of tqdm, such as `total`.
    """
    if importlib.util.find_spec("tqdm") is None:
        return None
    bar = importlib.import_module("tqdm").tqdm
    return bar(items, desc=title, unit=unit, disable=None, **options)


@contextlib.contextmanager
def advancing(
    title: str, unit: str, total: int | None, progress: bool, **options: Any
) -> Iterator[Callable[..., Any]]:
    """Shows a bar, if `progress`, as long as the context lasts; yields the function that advances
    it, by one or by a number.
    """
    bar = progress_bar(title, unit, total=total, **options) if progress else None
    try:
        yield (lambda count=1: None) if bar is None else bar.update
    finally:
        if bar is not None:
            bar.close()


def with_bar(title: str, unit: str, items: Collection[T], progress: bool = True) -> Iterator[T]:
    """Yields items, with a bar that appears only after one second, since most work is shorter."""
    with advancing(title, unit, len(items), progress, delay=1) as advance:
        for item in items:
            yield item
            advance()


def tell(bar: Any, text: str) -> None:
    """Writes a line above a bar, if the bar is visible."""
    if bar is not None and not bar.disable:
        bar.write(text, file=sys.stderr)
