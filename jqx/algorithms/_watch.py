"""Calibration stage by stage, for functions whose leaves are read when a stage needs them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._errors import fail
from ..observers import Observer
from ..observers._shared import Weight
from ..transforms import Plan, dequantize_params
from ..transforms._shared import (
    FLAGS,
    Address,
    Entries,
    Entry,
    GivenObservers,
    OnNonfinite,
    Stats,
    TracedOnce,
    check_finite,
    check_mode,
    check_observers,
    contractions,
    count_operand,
    entries_of,
    every_row,
    places_of,
    progress_bar,
    value_of,
    warn_left_out,
    with_flags,
)
from ._leaves import Leaves
from ._offload import Offload, on_device
from ._once import scans_around
from ._report import name_of
from ._sequential import Pairs, Stream, Walk
from ._stages import Steps
from ._traced import Traced


def calibrate_stages(
    f: Callable[..., Any],
    plan: Plan,
    params: Any,
    batches: Iterable[Any],
    *,
    observers: GivenObservers = None,
    weight: Weight | None = None,
    on_nonfinite: OnNonfinite = "error",
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
      weight: as in `calibrate_batches`; observers with a weight of their own have the same.
      on_nonfinite: as in `calibrate_batches`.
      progress: whether to show a progress bar.

    Raises:
      NotImplementedError: an observed site is inside a loop other than a scan, or a `shard_map`,
        which runs as a whole.
    """
    every, f = list(batches), TracedOnce(f)
    ignores = check_mode("ptq", on_nonfinite)
    given = f, plan, dequantize_params(params), every, weight
    traced = Traced.of(*given, lazy=True, ignores=ignores)
    weight = every_row if ignores and weight is None else weight
    plan, first = traced.plan, traced.calls[0]
    checked = check_observers("ptq", observers)
    entries = entries_of("ptq", plan, first.jaxpr, contractions(first), checked, weight)
    scans = scans_around(plan, first.jaxpr)
    beyond = [x.site for x in entries.recorded.values() if x.site.address not in scans]
    if beyond:
        raise fail(
            "ptq",
            "the inputs of a site cannot be observed between stages, and its parameters are lazy.",
            given=f"{[site.name for site in beyond[:4]]}, inside of a while loop or a shard_map, "
            f"with "
            "a static scale, or a weight that is used more than once",
            expected="sites in the function itself, or inside scans, branches or called functions",
            fix="read the parameters, jax.tree.map(lambda x: x.read(), params), give these sites "
            "dynamic scales, or add a rule that leaves such a weight in float.",
            error=NotImplementedError,
        )
    needed = any(x.part.place < 0 for x in entries.recorded.values())
    scopes = traced.scopes(lambda site: site.address in scans, returns=needed)
    bar = progress_bar("calibrate", "site", total=len(entries.recorded)) if progress else None
    watch = _Watch(plan, entries, scans, bar, ignores)
    stream = Stream(Leaves(dict(traced.originals)), Offload(False))
    watch.go(traced.frames(scopes, [stream]))
    if bar is not None:
        bar.close()
    seen = {key: watch.stats_of(entry) for key, entry in entries.recorded.items()}
    stats = with_flags({key: seen[own] for key, own in entries.shared.items()}, ignores)
    warn_left_out("ptq", stats.left_out)
    places = places_of(plan, first, entries.places)
    stats.update({key: make() for key, make in places.items()})
    return stats


class _Watch(Walk):
    """Runs a function stage by stage, and records the operands and results of its sites."""

    def __init__(
        self,
        plan: Plan,
        entries: Entries,
        scans: dict[Address, tuple[Address, ...]],
        bar: Any,
        ignores: bool,
    ):
        super().__init__(plan, lambda *_: None)
        self._ignores = ignores
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
                    self._put(entry, steps, x, value_of(sizes), frame.batch)
        if self._bar is not None and not any(steps):
            self._bar.update(len(entries))

    def _put(self, entry: Entry, steps: Steps, x: Any, sizes: Any, batch: int) -> None:
        weights = None
        if entry.weight is not None:
            shape = () if entry.weight is every_row else None
            weights = count_operand("ptq", entry.site.name, x, shape)
        loops = {loop.address for loop in entry.site.loops}
        around = zip(self._scans[entry.site.address], steps, strict=True)
        at = tuple(int(step) for address, step in around if address in loops)
        about = replace(entry.part.about, path="")  # one program for all equal sites
        same = replace(entry, key="", part=entry.part._replace(key="", about=about), site=None)
        seen = jnp.asarray(value_of(x)), sizes, weights
        own = _observed(*seen, entry=same, leaves_out=self._ignores)
        if FLAGS in entry.key and not self._ignores:
            check_finite("ptq", {name_of([entry.part.key], steps): own}, batch)
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
@partial(jax.jit, static_argnames=("entry", "leaves_out"))
def _observed(x: jax.Array, sizes: Any, weights: Any, *, entry: Entry, leaves_out: bool) -> Any:
    return entry.observe(x, sizes, weights, leaves_out)


@_compat.intermediates()
@partial(jax.jit, static_argnames="observer")
def _merged(a: Any, b: Any, *, observer: Observer) -> Any:
    return observer.merge(a, b)
