"""The statistics of a calibration: which observers and calibrators record what, their entries, the
positions of weights' elements, and flags of what was not finite.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from .. import compat
from ..checks import check_instance, check_pattern
from ..compat import Eqn
from ..errors import fail, message, some, warn
from ..statistics.calibrators import Calibrated, Calibrator
from ..statistics.statistics import (
    ObservedSite,
    Observer,
    Patches,
    Places,
    RowWeight,
    Weighted,
    flags,
    without_nonfinite,
)
from ..tensor.qtensor import QTensor
from .channel_map import Channels
from .find import Found, numbered
from .plan import Plan, Site
from .rules import CONTRACTIONS, VIEWS
from .trace import Call
from .views import SHARDINGS, Address, Loop
from .walk import Body, Domain, Followed, Where, walk

# Checks `observers=`, and matches observers with the sites of a plan.


GivenObservers = Mapping[str, Observer | Calibrator | Sequence[Observer | Calibrator]] | None
"""The type of `observers=` of a transform: observers by paths of sites."""

Checked = tuple[tuple[str, tuple[Observer, ...]], ...]
"""The same as pairs, in which calibrators are wrapped as observers."""


def check_observers(function: str, observers: GivenObservers) -> Checked:
    """Returns `observers=` as pairs, after checking that it is a dict of observers."""
    if observers is None:
        return ()
    fix = "pass for example observers={'.*': jqx.extend.hessian}."
    check_instance(function, "observers", observers, Mapping, fix=fix)
    kinds_fix = "pass a jqx.extend.Observer, a jqx.extend.Calibrator, or a tuple of these."
    checked = []
    for pattern, value in observers.items():
        name = f"observers[{pattern!r}]"
        check_pattern(function, f"a key of observers, {pattern!r},", pattern, fix=fix)
        several = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        if not several:
            raise fail(function, f"`{name}` records nothing: {value!r}.", fix="drop that entry.")
        for x in several:
            check_instance(function, name, x, (Observer, Calibrator), fix=kinds_fix)
            try:
                hash(x)
            except TypeError:
                problem = f"`{name}`, a {type(x).__name__}, cannot be hashed."
                fix = "write it with @dataclasses.dataclass(frozen=True)."
                raise fail(function, problem, fix=fix, error=TypeError) from None
        kinds = (Calibrated(x) if isinstance(x, Calibrator) else x for x in several)
        checked.append((pattern, tuple(kinds)))
    return tuple(checked)


def is_for(pattern: str, plan: Plan, path: str) -> bool:
    """Whether a regular expression matches the path of a site, or of the weight that this path is a
    part of.
    """
    return any(re.fullmatch(pattern, name) for name in {path, plan.whole_of(path)})


def observers_of(function: str, plan: Plan, checked: Checked) -> list[tuple[Site, list[Observer]]]:
    """Returns the sites of a plan, each with the observers whose regular expression matches its
    path, or the path of the weight that its path is a part of. Raises if an expression matches
    nothing, or two observers of a site have the same name.
    """
    for pattern, _ in checked:
        if not any(is_for(pattern, plan, site.path) for site in plan.sites):
            problem = f"observers[{pattern!r}] matches no site of the plan."
            paths = dict.fromkeys(repr(site.path) for site in plan.sites)
            fix = f"match a path in full: {some(paths)}."
            skips = (skip for skip in plan.skipped if re.fullmatch(pattern, skip.path))
            if (skip := next(skips, None)) is not None:
                problem += f" {skip.path!r} is skipped: {skip.reason}."
                fix = "calibrate with a plan that quantizes it."
            raise fail(function, problem, fix=fix)
    sites = []
    for site in plan.sites:
        matching = [several for pattern, several in checked if is_for(pattern, plan, site.path)]
        observers = list(dict.fromkeys(observer for several in matching for observer in several))
        names = [str(observer) for observer in observers]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            problem = f"two observers of {site.path!r} have the same name, {twice!r}."
            raise fail(function, problem, fix="let __str__ of the observer show its parameters.")
        sites.append((site, observers))
    return sites


def keys_of(function: str, plan: Plan, checked: Checked) -> dict[str, tuple[Site, Observer]]:
    """Returns the possible keys of observers' entries, each with its site and observer."""
    return {
        f"{key}@{observer}": (site, observer)
        for site, observers in observers_of(function, plan, checked)
        for key in site.keys
        for observer in observers
    }


def without_observers(
    plan: Plan, stats: Mapping[str, Any], observed: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns the entries of statistics that belong to no observer: they are not known, and their
    keys are not those of observers of the plan.
    """
    static = plan.static_specs()
    names = {key for site in plan.sites for key in site.keys}

    def is_observed(key: str) -> bool:
        ends = [i for i, letter in enumerate(key) if letter == "@"]
        return key not in static and (key in observed or any(key[:i] in names for i in ends))

    return {key: value for key, value in stats.items() if not is_observed(key)}


# The entries of the statistics of a call: those of calibrators of its plan, and of observers.


FLAGS = "@flags:"
"""Comes after the key of an operand in the key of an entry of its flags."""


class ObservedOperand(NamedTuple):
    """An operand of a site, or its result.

    Attributes:
      key: the name of its statistics.
      observed: the description that an observer receives.
      kind: its shape and dtype in one step of the loops around the site.
      argnum: index of the operand of the contraction; -1 for the result.
    """

    key: str
    observed: ObservedSite
    kind: jax.ShapeDtypeStruct
    argnum: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of the statistics: what one observer records for one operand of a site.

    Attributes:
      key: its name in the statistics.
      site: the site.
      observer: the observer.
      part: the operand.
      weight: how much rows of a batch count, or `None`.
    """

    key: str
    site: Site
    observer: Observer
    part: ObservedOperand
    weight: RowWeight | None = None

    @compat.intermediates()
    def empty(self) -> Any:
        """Returns the statistics of no values, in one step of the loops."""
        return self.observer.empty(self.part.kind, self.part.observed)

    @compat.intermediates()
    def observe(
        self,
        x: jax.Array,
        sizes: jax.Array | None = None,
        weights: jax.Array | None = None,
        leaves_out: bool = False,
    ) -> Any:
        """Returns the statistics of one operand; `sizes` are the sizes of the groups of its rows,
        `weights` how much its elements count, and with `leaves_out` rows do not count that are not
        finite.
        """
        observed = dataclasses.replace(self.part.observed, sizes=sizes, weights=weights)
        if leaves_out and self.observer != flags:
            x, observed = without_nonfinite(x, observed)
        return self.observer.observe(x, observed)


@dataclasses.dataclass(frozen=True)
class Entries:
    """All entries of a call.

    Attributes:
      recorded: the entries that are computed, by key.
      shared: for each entry of the statistics, in order, the key of the entry that is computed. If
        operands are one value along the same axes, an observer records only the first.
      places: the entries of `jqx.extend.places`, which depend on no value.
    """

    recorded: Mapping[str, Entry]
    shared: Mapping[str, str]
    places: Sequence[Entry] = ()

    @functools.cached_property
    def _at(self) -> dict[Address, list[Entry]]:
        by_address: dict[Address, list[Entry]] = {}
        for entry in self.recorded.values():
            for depth in range(len(entry.site.address) + 1):
                by_address.setdefault(entry.site.address[:depth], []).append(entry)
        return by_address

    def by_weight(self) -> "dict[RowWeight | None, Entries]":
        """Returns for each `weight` the entries of the observers that have it. Those of observers
        without one are added to the first.
        """
        weight_functions = dict.fromkeys(entry.weight for entry in self.recorded.values())
        first_weight, *others = [weight for weight in weight_functions if weight is not None] or [
            None
        ]

        def of(*weights: RowWeight | None) -> Entries:
            entries = self.recorded.items()
            selected = {key: entry for key, entry in entries if entry.weight in weights}
            return dataclasses.replace(self, recorded=selected)

        return {first_weight: of(first_weight, None)} | {weight: of(weight) for weight in others}

    def at(self, address: Address) -> Sequence[Entry]:
        """Returns the entries of the site at an address, or of the sites inside its equation."""
        return self._at.get(address, ())


def entries_of(
    function: str,
    plan: Plan,
    jaxpr: Any,
    site_items: Sequence[Found],
    checked_observers: Checked,
    weight: RowWeight | None = None,
) -> Entries:
    """Returns the entries of a call.

    Args:
      function: name of the calling function, for messages.
      plan: the plan of the call.
      jaxpr: the jaxpr of the call.
      site_items: its contractions.
      checked_observers: the observers, in addition to the calibrators of the plan.
      weight: how much rows count, for those without a weight of their own.
    """

    def entry_of(key: str, site: Site, observer: Observer, part: ObservedOperand) -> Entry:
        row_weight = weight if observer.weight is None else observer.weight
        if isinstance(observer, Weighted):
            observer = observer(weight=row_weight)
        return Entry(key, site, observer, part, row_weight)

    items = {item.address: item for item in site_items if item.address}
    entries: list[Entry] = []
    place_entries: list[Entry] = []
    looks: set[tuple[Observer, str]] = set()
    checked: set[Any] = set()
    for site, observers in observers_of(function, plan, checked_observers):
        specs = site.static_specs()
        for part in observed_parts(site, items[site.address]):
            if part.key in specs:
                calibrated = Calibrated(specs[part.key].calibrator)
                entries.append(entry_of(part.key, site, calibrated, part))
            for observer in observers:
                if not observer.looks_at(part.observed):
                    continue
                entry = entry_of(f"{part.key}@{observer}", site, observer, part)
                looks.add((observer, site.path))
                if isinstance(observer, Places):
                    place_entries.append(entry)
                    continue
                entries.append(entry)
                _check_alike(function, entry, checked)
    for pattern, observers in checked_observers:
        for observer in observers:
            if not any(x == observer and is_for(pattern, plan, path) for x, path in looks):
                problem = f"the observer {str(observer)!r} records no operand of its sites."
                fix = "name other sites, or leave it out: its `looks_at` accepts none there."
                raise fail(function, problem, given=f"observers[{pattern!r}]", fix=fix)
    operands = dict.fromkeys((entry.part, entry.site, entry.weight) for entry in entries)
    flagged = [  # one for each operand and weight
        Entry(f"{part.key}{FLAGS}{i}", site, flags, part, row_weight)
        for i, (part, site, row_weight) in enumerate(operands)
    ]
    return dataclasses.replace(_shared(jaxpr, [*entries, *flagged]), places=place_entries)


def observed_parts(site: Site, item: Found) -> list[ObservedOperand]:
    """Returns the operands of a site, and its result."""
    family, eqn = item.family, item.eqn
    has_weight = any(operand.role == "weight" for operand in site.operands)
    axes = family.axes(eqn)
    parts = []
    for i, (operand, channels) in enumerate(zip(site.operands, axes, strict=True)):
        side = ("lhs", "rhs")[i]
        # In a convolution the features come first; along the other axes the kernel slides.
        summed = (
            channels.contracted[:1] if site.op == "conv_general_dilated" else channels.contracted
        )
        observed = ObservedSite(
            site.path,
            site.op,
            side,
            operand.role,
            has_weight,
            summed,
            channels.kept,
            channels.batch,
            operand.spec,
            patches=_patches_of(eqn),
            experts=eqn.invars[1].aval.shape[0] if site.op == "ragged_dot" else None,
        )
        parts.append(ObservedOperand(operand.key, observed, _kind_of(eqn.invars[i]), i))
    result = _kind_of(eqn.outvars[0])
    kept_axes = tuple(range(len(result.shape)))
    batch = kept_axes[: len(axes[0].batch)] if site.op == "dot_general" else ()
    weights = [i for i, operand in enumerate(site.operands) if operand.role == "weight"]
    channels = Channels.of_result(eqn, weights[0]).axes if weights else ()
    observed = ObservedSite(
        site.path, site.op, "out", "result", has_weight, (), kept_axes, batch, site.output, channels
    )
    return [*parts, ObservedOperand(site.output_key, observed, result, -1)]


def _patches_of(eqn: compat.Eqn) -> Patches | None:
    """Returns how a convolution takes patches of its image; `None` for any other operation."""
    p = eqn.params
    if eqn.primitive.name != "conv_general_dilated" or p["batch_group_count"] != 1:
        return None
    axes, shape = p["dimension_numbers"], eqn.invars[1].aval.shape
    kernel = tuple(shape[axis] for axis in axes.rhs_spec[2:])
    padding = tuple(map(tuple, p["padding"]))
    dilations = tuple(p["lhs_dilation"]), tuple(p["rhs_dilation"])
    strides, groups = tuple(p["window_strides"]), p["feature_group_count"]
    return Patches(kernel, strides, padding, *dilations, axes, groups)


def _kind_of(atom: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def _shared(jaxpr: Any, entries: Sequence[Entry]) -> Entries:
    """Finds the entries that have the same value and the same description for observers."""
    numbers = numbered(jaxpr)
    first_entry: dict[Any, Entry] = {}
    shared = {}
    for entry in entries:
        value_numbers = numbers[entry.site.address]
        index = entry.part.argnum
        value = value_numbers.result if index < 0 else value_numbers.operands[index]
        others = value_numbers.operands[len(entry.site.operands) :]
        observed = dataclasses.replace(entry.part.observed, path="")
        who = entry.observer, entry.weight
        same = (value_numbers.inside, entry.site.loops, value, others, *who, observed)
        shared[entry.key] = first_entry.setdefault(same, entry).key
    return Entries({entry.key: entry for entry in first_entry.values()}, shared)


def _check_alike(function: str, entry: Entry, checked: set[Any]) -> None:
    """Raises if the three functions of an observer do not return the same kind of statistics."""
    observed, kind = dataclasses.replace(entry.part.observed, path=""), entry.part.kind
    kind_key = (entry.observer, observed, kind.shape, kind.dtype)
    if kind_key in checked:
        return
    checked.add(kind_key)
    empty = jax.eval_shape(entry.empty)
    count = observed.experts
    sizes = None if count is None else jax.ShapeDtypeStruct((count,), jnp.int32)
    unit = jax.ShapeDtypeStruct((1,) * len(kind.shape), jnp.float32)
    weights = None if entry.weight is None else unit
    observed_kind = jax.eval_shape(entry.observe, kind, sizes, weights)
    merged = jax.eval_shape(entry.observer.merge, empty, observed_kind)
    for name, result in (("observe", observed_kind), ("merge", merged)):
        if kinds_of(result) != kinds_of(empty):
            problem = f"`empty` and `{name}` of the observer {str(entry.observer)!r} differ in "
            problem += "what they return."
            details = f"{kinds_of(empty)} and {kinds_of(result)}, for {entry.part.key!r}"
            fix = f"let `empty` return what `{name}` would return for no values."
            raise fail(function, problem, given=details, fix=fix)


def kinds_of(stats: Any) -> str:
    """Returns statistics as text: their structure, shapes and dtypes."""
    return str(jax.tree.map(lambda x: f"{x.dtype.name}{list(x.shape)}", stats))


OnNonfinite = Literal["error", "ignore"]
"""What is done with rows that are not finite."""


class Stats(dict[str, Any]):
    """Statistics by key, such as `layer0/w:dot_general:lhs`; each is the pytree of a calibrator or
    of an observer.

    Attributes:
      flags: for each observed operand, int32 `[..., 4]`: the number of its rows with a NaN, with an
        infinity but no NaN, with a value besides 0, and of all. It has a leading axis for each scan
        over the weight of its site, and one for the matrices of a stack, such as experts. Rows that
        are not finite are in the statistics.
      left_out: the same of a calibration that has left rows out that are not finite.
    """

    def __init__(
        self,
        stats: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        flags: Mapping[str, Any] | None = None,
        left_out: Mapping[str, Any] | None = None,
    ):
        super().__init__(stats)
        self.flags: dict[str, Any] = dict(flags or {})
        self.left_out: dict[str, Any] = dict(left_out or {})

    @property
    def parts(self) -> tuple[dict[str, Any], ...]:
        """The statistics, and both kinds of flags."""
        return dict(self), self.flags, self.left_out


def stats_of(entries: Mapping[str, Any]) -> Stats:
    """Returns statistics with their flags, if they have some."""
    return entries if isinstance(entries, Stats) else Stats(entries)


def flags_of(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags of statistics, of either kind."""
    stats = stats_of(entries)
    return {**stats.left_out, **stats.flags}


def _entries(stats: Stats) -> list[tuple[str, str, Any]]:
    """Returns the entries of statistics in order, each with the name of its part and its key."""
    parts = zip(("", ".flags", ".left_out"), stats.parts, strict=True)
    return [(name, key, part[key]) for name, part in parts for key in sorted(part)]


def _keys(stats: Stats) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(sorted(part)) for part in stats.parts)


def _with_keys(stats: Stats) -> tuple[Any, Any]:
    named = [(f"{key}{name}", value) for name, key, value in _entries(stats)]
    return [(jax.tree_util.DictKey(key), value) for key, value in named], _keys(stats)


def _flat(stats: Stats) -> tuple[Any, Any]:
    return [value for _, _, value in _entries(stats)], _keys(stats)


def _unflat(keys: Any, children: Iterable[Any]) -> Stats:
    iterator = iter(children)
    return Stats(*({key: next(iterator) for key in keys_of_part} for keys_of_part in keys))


jax.tree_util.register_pytree_with_keys(Stats, _with_keys, _unflat, _flat)
export.register_pytree_node_serialization(
    Stats,
    serialized_name="jqx.transforms.Stats",
    serialize_auxdata=lambda keys: json.dumps(keys).encode(),
    deserialize_auxdata=lambda data: tuple(map(tuple, json.loads(data))),
)


def with_flags(stats: Mapping[str, Any], leaves_out: bool) -> Stats:
    """Returns recorded statistics, with entries of flags as the flags of operands."""
    flags: dict[str, Any] = {}
    for key, x in stats.items():
        part, is_flag, _ = key.rpartition(FLAGS)
        if is_flag:  # rows of several weights
            flags[part] = jnp.maximum(flags[part], x) if part in flags else x
    statistics = {key: x for key, x in stats.items() if FLAGS not in key}
    return Stats(statistics, *(({}, flags) if leaves_out else (flags, {})))


def merged_flags(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags of both."""
    return {
        key: flags.merge(a[key], b[key]) if key in a and key in b else a.get(key, b.get(key))
        for key in [*a, *(key for key in b if key not in a)]
    }


def described(flags: Mapping[str, Any]) -> list[str]:
    """Returns what the flags of operands say of rows that are not finite, as text; nothing of
    traced flags.
    """
    lines = []
    for key, rows in flags.items():
        if not compat.is_concrete(rows):
            continue
        for step in np.ndindex(np.shape(rows)[:-1]):
            nans, infinities, *_ = map(int, np.asarray(rows)[step])
            counts = ((nans, "NaN"), (infinities, "infinity"))
            kinds = [f"{n} row{'s' * (n > 1)} with {kind}" for n, kind in counts if n]
            if kinds:
                step_text = f"[{', '.join(map(str, step))}]" if step else ""
                lines.append(f"{' and '.join(kinds)} at {key}{step_text}")
    return lines


def in_order(plan: Plan, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns flags in the order in which the sites of a plan run."""
    keys = [key for site in plan.sites for key in site.keys]
    return {key: flags[key] for key in dict.fromkeys((*keys, *flags)) if key in flags}


def check_finite(function: str, flags: Mapping[str, Any], batch: int | None = None) -> None:
    """Raises if observed rows are not finite; the first operand is the cause of the others. Traced
    flags are not checked.
    """
    if bad := described(flags):
        raise ValueError(nonfinite_text(function, bad, batch))


def nonfinite_text(function: str, bad: list[str], batch: int | None = None) -> str:
    """Returns the text of the error for rows that are not finite."""
    first_bad, *others = bad
    kinds = [kind for kind in ("NaN", "infinity") if kind in first_bad.partition(" at ")[0]]
    where = "" if batch is None else f"batch {batch}: "
    also = f", and at {len(others)} more operands" if others else ""
    reason = f"there is {' and '.join(kinds)} in an operand of a site."
    fix = "find where it comes from (float16 overflows above 65504), leave such batches out, or "
    fix += 'leave such rows out with on_nonfinite="ignore" of calibrate, calibrate_batches and ptq.'
    return message(
        function,
        f"an activation is not finite: {reason}",
        given=f"{where}{first_bad}{also}",
        fix=fix,
    )


def warn_left_out(function: str, flags: Mapping[str, Any], batches: Iterable[int] = ()) -> None:
    """Warns of rows that were left out."""
    if bad := described(flags):
        numbers = list(map(str, batches))
        where = f"batch{'es' * (len(numbers) > 1)} {some(numbers)}: " if numbers else ""
        problem = "rows that are not finite were left out of the statistics."
        fix = "nothing, if these few rows do not matter; otherwise find where they come from."
        warn(message(function, problem, given=where + some(bad), fix=fix))


def check_mode(function: str, value: Any) -> bool:
    """Returns whether rows that are not finite are left out, after checking `on_nonfinite`."""
    if not isinstance(value, str) or value not in ("error", "ignore"):
        fix = "leave it out for 'error', or pass 'ignore' to leave rows out that are not finite."
        raise fail(function, f"`on_nonfinite` is unknown: {value!r}.", fix=fix)
    return value == "ignore"


def each_step(f: Callable[..., Any], loops: Sequence[Loop]) -> Callable[..., Any]:
    """Maps `f` over the leading axes of statistics, one for each scan over a weight."""
    for _ in loops:
        f = jax.vmap(f)
    return compat.intermediates()(f)


def check_keys(
    function: str, argument: str, stats: Mapping[str, Any], specs: Mapping[str, Any]
) -> None:
    """Raises if statistics do not have the entries of the static specs of a plan."""
    if differ := sorted(set(stats) ^ set(specs)):
        problem = f"`{argument}` does not have the entries of the plan."
        details = f"{len(stats)} entries; these differ: {some(differ)}"
        fix = "pass statistics from jqx.calibrate with the same plan."
        raise fail(function, problem, given=details, fix=fix)


_SAME = {"convert_element_type", "copy", "div", "mul", "neg", "stop_gradient", *SHARDINGS}
"""Views that leave every element in place."""


# The positions of weights' elements in the matrices that contractions multiply by. They are found
# by passing the number of each element through the views of a function.


@dataclass(frozen=True)
class _Elements:
    """A weight, or several joined, seen through views.

    Attributes:
      sizes: the size of each weight, by path.
      elements: returns for each element of the value its number in the weight, int32; elements of a
        second weight are numbered after those of the first.
      loops: number of leading axes that are steps of the enclosing scans.
    """

    sizes: dict[str, int]
    elements: Callable[[], jax.Array]
    loops: int = 0

    def step_of(self, loop: Loop) -> "_Elements":
        """The value in one step of a scan over the leading axis."""
        return replace(self, loops=self.loops + 1)

    def among(self, sizes: dict[str, int]) -> "_Elements":
        """Returns the same value, numbered among the weights of `sizes`."""
        if [*sizes] == [*self.sizes]:
            return self

        def numbers() -> jax.Array:
            return jnp.asarray(renumbered(self.elements(), self.sizes, sizes), jnp.int32)

        return _Elements(sizes, numbers, self.loops)


def renumbered(elements: Any, starts_of: Mapping[str, int], others: Mapping[str, int]) -> Any:
    """Converts the numbers of elements of some weights, given their sizes by path, to the numbers
    that they have among others.
    """
    starts = np.cumsum([0, *others.values()])[:-1]
    start = dict(zip(others, starts.tolist(), strict=True))
    ends, moved, end = [], [], 0
    for path, size in starts_of.items():
        moved.append(start[path] - end)
        end += size
        ends.append(end)
    xp = np if isinstance(elements, np.ndarray) else jnp
    which = xp.searchsorted(xp.asarray(ends, elements.dtype), elements, side="right")
    return elements + xp.asarray(moved, elements.dtype)[which]


def places_of(
    plan: Plan, call: Call, entries: Sequence[Entry]
) -> dict[str, Callable[[], jax.Array]]:
    """Returns for each entry that has one the function that computes its statistics of
    `jqx.extend.places`.
    """
    if not entries:
        return {}
    follower = _Follower(plan)
    named = zip(call.leaves, call.paths, strict=True)
    leaves = [None if plan.weight_at(path) is None else _whole(path, leaf) for leaf, path in named]
    walk(follower, call.jaxpr, leaves)
    makers = {}
    for entry in entries:
        elements = follower.makers.get(entry.part.key)
        observed = entry.part.observed
        is_product = observed.op in ("dot_general", "ragged_dot") or observed.patches is not None
        if elements is not None and is_product:
            makers[entry.key] = partial(_rows, elements, observed.rows, len(entry.site.loops))
    return makers


def _rows(elements: Callable[[], jax.Array], rows: Callable[[Any], Any], loops: int) -> jax.Array:
    for _ in range(loops):
        rows = jax.vmap(rows)
    return rows(elements())


def _whole(path: Any, leaf: Any) -> _Elements:
    _check_numbers(path, leaf.size)

    def elements() -> jax.Array:
        return jnp.arange(leaf.size, dtype=jnp.int32).reshape(leaf.shape)

    return _Elements({path: leaf.size}, elements)


def _check_numbers(path: str, size: int) -> None:
    if size >= 2**31:
        problem = f"the weight {path!r} has {size} elements, more than int32 can number."
        fix = "split it: let rules select steps of the scan over it, such as 'layers[:16]'."
        raise fail("extend.places", problem, fix=fix, error=NotImplementedError)


@dataclass
class _Follower(Followed[_Elements]):
    """Follows the elements of weights, and collects those that sites multiply by."""

    plan: Plan
    makers: dict[str, Callable[[], jax.Array]] = field(default_factory=dict)

    def evaluate(
        self, eqn: Eqn, values: list[_Elements | None], where: Where
    ) -> Sequence[_Elements | None]:
        name = eqn.primitive.name
        if not self.enters(eqn, values, where) or (name not in CONTRACTIONS and name not in VIEWS):
            return super().evaluate(eqn, values, where)
        if name in VIEWS:
            return _viewed(eqn, values)
        site = self.plan.site_at(where.address) if where.is_marked else None
        for operand, x in zip(site.operands if site else (), values, strict=False):
            if x is None or site is None or operand.path is None:
                continue
            paths = self.plan.weights_in(site)
            if set(paths) == set(x.sizes):
                self.makers[operand.key] = x.among({p: x.sizes[p] for p in paths}).elements
        return super().evaluate(eqn, values, where)

    def body(
        self, eqn: Eqn, body: Body, values: list[_Elements | None], where: Where
    ) -> tuple[Domain[_Elements | None], list[_Elements | None]]:
        if eqn.primitive.name == "shard_map":  # each device has only a part
            return self, [None] * len(values)
        return super().body(eqn, body, values, where)


def _viewed(eqn: Eqn, inputs: Sequence[_Elements | None]) -> Sequence[_Elements | None]:
    """Returns the result of a view of weights; nothing if it reads other values as well."""
    weights = [x for x in inputs if x is not None]
    weight = weights[0]
    if eqn.primitive.name == "optimization_barrier":
        return inputs
    if eqn.primitive.name in _SAME:
        return [weight] * len(eqn.outvars)
    others = any(
        x is None and not compat.is_literal(v) for x, v in zip(inputs, eqn.invars, strict=True)
    )
    if others or len({x.loops for x in weights}) > 1:
        return [None] * len(eqn.outvars)
    sizes = {path: size for x in weights for path, size in x.sizes.items()}
    _check_numbers("+".join(sizes), sum(sizes.values()))
    weights = [x.among(sizes) for x in weights]
    literals = [None if x is not None else v.val for x, v in zip(inputs, eqn.invars, strict=True)]

    def view(*elements: jax.Array) -> list[jax.Array]:
        numbers = iter(elements)
        operands = [_as_codes(next(numbers)) if x is None else x for x in literals]
        return [q.values for q in VIEWS[eqn.primitive.name].apply(eqn, operands)]

    for _ in range(weight.loops):
        view = jax.vmap(view)

    def result(index: int) -> jax.Array:
        return view(*(x.elements() for x in weights))[index]

    return [_Elements(sizes, partial(result, i), weight.loops) for i in range(len(eqn.outvars))]


def _as_codes(elements: jax.Array) -> QTensor:
    """Returns the numbers of elements as codes, so that views move them as they move codes."""
    return QTensor(elements, jnp.ones((1,) * elements.ndim), qtype=jnp.dtype("int32"))
