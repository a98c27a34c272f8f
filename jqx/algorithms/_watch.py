"""Calibration stage by stage, for functions whose leaves are read when a stage needs them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._checks import require_that
from ..observers import ObservedSite, Observer
from ..observers._shared import Weight
from ..transforms import Plan, dequantize_params
from ..transforms._shared import (
    Address,
    Entries,
    Entry,
    GivenObservers,
    TracedOnce,
    check_observers,
    contractions,
    count_operand,
    entries_of,
    places_of,
    progress_bar,
    value_of,
)
from ._leaves import Leaves
from ._offload import Offload, on_device
from ._once import scans_around
from ._sequential import Pairs, Stream, Walk
from ._stages import Steps
from ._traced import Traced

Stats = dict[str, Any]


def calibrate_stages(
    f: Callable[..., Any],
    plan: Plan,
    params: Any,
    batches: Iterable[Any],
    *,
    observers: GivenObservers = None,
    weight: Weight | None = None,
    progress: bool = True,
) -> Stats:
    """Returns the statistics of `calibrate_batches` for parameters that may be `Lazy`. Each stage
    runs on all batches before the next one, and reads the leaves that it needs. Activations are
    those of `calibrate_batches`, except for rounding where XLA fuses differently.

    Args:
      f: the function.
      plan: the plan.
      params: its parameters.
      batches: as in `calibrate_batches`; all are held.
      observers: as in `calibrate_batches`.
      weight: the weight that all observers share, if they have one.
      progress: whether to show a progress bar.

    Raises:
      NotImplementedError: an observed site is inside a loop other than a scan, or a `shard_map`,
        which runs as a whole.
    """
    every, f = list(batches), TracedOnce(f)
    traced = Traced.of(f, plan, dequantize_params(params), every, weight, lazy=True)
    first, checked = traced.calls[0], check_observers("ptq", observers)
    entries = entries_of("ptq", plan, first.jaxpr, contractions(first), checked)
    scans = scans_around(plan, first.jaxpr)
    beyond = [x.site for x in entries.recorded.values() if x.site.address not in scans]
    require_that(
        not beyond,
        error=NotImplementedError,
        function="ptq",
        problem="the inputs of a site cannot be observed between stages, and its parameters are "
        "lazy.",
        given=f"{[site.name for site in beyond[:4]]}, inside of a while loop or a shard_map, with "
        "a static scale, or a weight that is used more than once",
        expected="sites in the function itself, or inside scans, branches or called functions",
        mend="read the parameters, jax.tree.map(lambda x: x.read(), params), give these sites "
        "dynamic scales, or add a rule that leaves such a weight in float.",
    )
    needed = any(x.part.place < 0 for x in entries.recorded.values())
    scopes = traced.scopes(lambda site: site.address in scans, returns=needed)
    bar = progress_bar("calibrate", "site", total=len(entries.recorded)) if progress else None
    watch = _Watch(plan, entries, scans, bar)
    stream = Stream(Leaves(dict(traced.originals)), Offload(False))
    watch.go(traced.frames(scopes, [stream]))
    if bar is not None:
        bar.close()
    seen = {key: watch.stats_of(entry) for key, entry in entries.recorded.items()}
    stats = {key: seen[own] for key, own in entries.shared.items()}
    places = places_of(plan, first, entries.places)
    return stats | {key: make() for key, make in places.items()}


class _Watch(Walk):
    """Runs a function stage by stage, and records the operands and results of its sites."""

    def __init__(
        self, plan: Plan, entries: Entries, scans: dict[Address, tuple[Address, ...]], bar: Any
    ):
        super().__init__(plan, lambda *_: None)
        self._entries, self._scans, self._bar = entries, scans, bar
        self._seen: dict[str, dict[Steps, Any]] = {key: {} for key in entries.recorded}

    def _site(self, pairs: Pairs, steps: Steps) -> None:
        entries = self._entries.at(pairs[0][0].here)
        for stage, (frame,) in pairs:
            (eqn,) = stage.eqns
            places = {x.part.place for x in entries if x.part.place >= 0}
            places |= {2} if eqn.primitive.name == "ragged_dot_general" and entries else set()
            atoms = {place: eqn.invars[place] for place in sorted(places)}
            read = dict(zip(atoms, frame.read([*atoms.values()], steps), strict=True))
            frame.run(stage, steps)
            read[-1] = frame.values.get(eqn.outvars[0])
            for entry in entries:
                if read[entry.part.place] is not None:
                    x, sizes = (on_device(read.get(i)) for i in (entry.part.place, 2))
                    self._put(entry, steps, x, value_of(sizes))
        if self._bar is not None and not any(steps):
            self._bar.update(len(entries))

    def _put(self, entry: Entry, steps: Steps, x: Any, sizes: Any) -> None:
        weights = None
        if entry.observer.weight is not None:
            weights = count_operand("ptq", entry.site.name, x)
        loops = {loop.address for loop in entry.site.loops}
        around = zip(self._scans[entry.site.address], steps, strict=True)
        at = tuple(int(step) for address, step in around if address in loops)
        about = replace(entry.part.about, path="")  # one program for all equal sites
        seen = jnp.asarray(value_of(x)), sizes, weights
        own = _observed(*seen, observer=entry.observer, about=about)
        seen = self._seen[entry.key]
        seen[at] = _merged(seen[at], own, observer=entry.observer) if at in seen else own

    def stats_of(self, entry: Entry) -> Any:
        """Returns the recorded statistics, with a leading axis for each scan over the weight."""
        lengths, seen = tuple(loop.length for loop in entry.site.loops), self._seen[entry.key]
        each = [seen[at] if at in seen else entry.empty() for at in np.ndindex(lengths)]
        if not lengths:
            return each[0]
        with _compat.intermediates():
            return jax.tree.map(lambda *x: jnp.stack(x).reshape(lengths + x[0].shape), *each)


@_compat.intermediates()
@partial(jax.jit, static_argnames=("observer", "about"))
def _observed(
    x: jax.Array, sizes: Any, weights: Any, *, observer: Observer, about: ObservedSite
) -> Any:
    return observer.observe(x, replace(about, sizes=sizes, weights=weights))


@_compat.intermediates()
@partial(jax.jit, static_argnames="observer")
def _merged(a: Any, b: Any, *, observer: Observer) -> Any:
    return observer.merge(a, b)
