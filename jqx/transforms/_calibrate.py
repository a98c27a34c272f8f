"""`calibrate`: observes activations in float, and records statistics."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from .._calls import called
from .._compat import Eqn
from .._signatures import P, R
from ..observers._shared import Weight, check_weight
from ..policy import Policy
from ._counted import value_of
from ._counting import count_arguments, count_operand, every_row, weights_of
from ._entries import Entries, entries_of
from ._interpret import Rules, interpret
from ._observers import GivenObservers, check_observers
from ._origin import Address
from ._places import places_of
from ._plan import Plan
from ._plan_call import params_of, with_contractions
from ._site import Site
from ._stats import OnNonfinite, Stats, check_mode, each_step, with_flags
from ._tainted import tainted, tainted_results, tainted_rows
from ._trace import check_function, is_quantized, trace_call
from ._weight import real_of
from .primitives import Records, counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observe(Rules):
    """Evaluates in float, and records statistics.

    Attributes:
      entries: the entries to record.
      shape: shape of the weights of rows, if rows are weighted.
      ignores: whether rows that are not finite are left out.
    """

    entries: Entries
    shape: tuple[int, ...] | None = None
    ignores: bool = False

    @property
    def is_counting(self) -> bool:
        return self.shape is not None

    @property
    def leaves_out(self) -> bool:
        return self.ignores

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[Any, Records]:
        values = [real_of(value_of(x)) for x in operands]
        results = _compat.bind(eqn, values)
        operands = tainted_rows(eqn, operands) if self.ignores else operands
        counts = [*operands, *results]
        if self.is_counting:
            roles = [x.role for x in site.operands] + [""] * len(operands)
            known = [
                value if role == "weight" and is_quantized(x) else x
                for role, x, value in zip(roles, operands, values, strict=False)
            ]
            own = counted(eqn, known, results)
            counts = [*operands, *(tainted_results(eqn, known, own) if self.ignores else own)]
        seen, result = [*values, *results], counts[-1]
        sizes = values[2] if site.op == "ragged_dot" else None
        records = {}
        for entry in self.entries.at(site.address):
            weights, place = None, entry.part.place
            if self.shape is not None and entry.weight is not None:
                weights = count_operand("calibrate", site.name, counts[place], self.shape)
            x = jnp.asarray(seen[place])
            records[entry.key] = entry.observe(x, sizes, weights, self.ignores)
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
            merged[key] = each_step(entry.observer.merge, loops)(a[key], b[key])
        return merged


@called("calibrate", "call it in two steps: jqx.calibrate(f, plan)(params, x).")
def calibrate(
    f: Callable[P, R],
    plan: Plan | Policy,
    *,
    observers: GivenObservers = None,
    weight: Weight | None = None,
    on_nonfinite: OnNonfinite = "error",
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
      weight: how much rows count, for static scales and for observers without a weight of their
        own, as in `jqx.observers.hessian`: a function of the arguments of `f` without its
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
      >>> _, stats = jqx.calibrate(f, plan, observers={".*": jqx.observers.hessian})(w, x)
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
    given: Mapping[str, Any] = MappingProxyType({}),
    *,
    weight: Weight | None = None,
    ignores: bool = False,
) -> Callable[P, tuple[R, Stats]]:
    """Returns the function that `calibrate` returns. `rules` may do more at sites, using values
    `given` by keys of operands and results, with a leading axis for each scan over the weight.
    """
    params = params_of("calibrate", plan)
    weight = every_row if ignores and weight is None else weight
    checked = check_observers("calibrate", observers)

    def calibrated(*args: P.args, **kwargs: P.kwargs) -> tuple[R, Stats]:
        call = trace_call("calibrate", f, params, args, kwargs)
        known, found = with_contractions("calibrate", plan, call, params)
        leaves = [
            leaf if known.weight_at(path) is None else real_of(leaf)
            for leaf, path in zip(call.leaves, call.paths, strict=True)
        ]
        entries = entries_of("calibrate", known, call.jaxpr, found, checked, weight)
        out, seen = [], {}
        for counting, own in reversed(entries.by_weight().items()):
            if counting is None:
                here, these = rules(known, dict(given), entries=own), leaves
            else:
                counts = weights_of("calibrate", counting, known.params, args, kwargs)
                options = {"shape": counts.shape, "ignores": ignores}
                here = rules(known, dict(given), entries=own, **options)
                these = count_arguments("calibrate", counts, known.params, call, leaves)
                these = list(map(tainted, these)) if ignores else these
            out, records = interpret(call.jaxpr, call.consts, these, here)
            seen |= records
        out = list(map(value_of, out))
        stats = with_flags({key: seen[first] for key, first in entries.shared.items()}, ignores)
        stats.update({key: make() for key, make in places_of(known, call, entries.places).items()})
        return jax.tree.unflatten(call.out_tree, out), stats

    return calibrated
