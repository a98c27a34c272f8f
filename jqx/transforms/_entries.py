"""The entries of the statistics of a call: those of calibrators of its plan, and of observers."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _compat
from .._errors import fail
from ..observers import ObservedSite, Observer, Places
from ..observers._shared import (
    Calibrated,
    Patches,
    Weight,
    Weighted,
    flags,
    without_nonfinite,
)
from ._channel_map import Channels
from ._find import Found
from ._observers import Checked, is_for, observers_of
from ._origin import Address
from ._plan import Plan
from ._site import Site
from ._values import numbered

FLAGS = "@flags:"
"""Comes after the key of an operand in the key of an entry of its flags."""


class Part(NamedTuple):
    """An operand of a site, or its result.

    Attributes:
      key: the name of its statistics.
      about: the description that an observer receives.
      kind: its shape and dtype in one step of the loops around the site.
      place: index of the operand of the contraction; -1 for the result.
    """

    key: str
    about: ObservedSite
    kind: jax.ShapeDtypeStruct
    place: int


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
    part: Part
    weight: Weight | None = None

    @classmethod
    def of(
        cls, key: str, site: Site, observer: Observer, part: Part, weight: Weight | None
    ) -> "Entry":
        """Returns an entry of an observer; `weight` is for observers without one of their own."""
        weight = weight if observer.weight is None else observer.weight
        if isinstance(observer, Weighted):
            observer = observer(weight=weight)
        return cls(key, site, observer, part, weight)

    @_compat.intermediates()
    def empty(self) -> Any:
        """Returns the statistics of no values, in one step of the loops."""
        return self.observer.empty(self.part.kind, self.part.about)

    @_compat.intermediates()
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
        about = dataclasses.replace(self.part.about, sizes=sizes, weights=weights)
        if leaves_out and self.observer != flags:
            x, about = without_nonfinite(x, about)
        return self.observer.observe(x, about)


@dataclasses.dataclass(frozen=True)
class Entries:
    """All entries of a call.

    Attributes:
      recorded: the entries that are computed, by key.
      shared: for each entry of the statistics, in order, the key of the entry that is computed. If
        operands are one value along the same axes, an observer records only the first.
      places: the entries of `jqx.observers.places`, which depend on no value.
    """

    recorded: Mapping[str, Entry]
    shared: Mapping[str, str]
    places: Sequence[Entry] = ()

    @functools.cached_property
    def _at(self) -> dict[Address, list[Entry]]:
        found: dict[Address, list[Entry]] = {}
        for entry in self.recorded.values():
            for depth in range(len(entry.site.address) + 1):
                found.setdefault(entry.site.address[:depth], []).append(entry)
        return found

    def by_weight(self) -> "dict[Weight | None, Entries]":
        """Returns for each `weight` the entries of the observers that have it. Those of observers
        without one are added to the first.
        """
        given = dict.fromkeys(entry.weight for entry in self.recorded.values())
        first, *others = [weight for weight in given if weight is not None] or [None]

        def of(*weights: Weight | None) -> Entries:
            entries = self.recorded.items()
            own = {key: entry for key, entry in entries if entry.weight in weights}
            return dataclasses.replace(self, recorded=own)

        return {first: of(first, None)} | {weight: of(weight) for weight in others}

    def at(self, address: Address) -> Sequence[Entry]:
        """Returns the entries of the site at an address, or of the sites inside its equation."""
        return self._at.get(address, ())


def entries_of(
    function: str,
    plan: Plan,
    jaxpr: Any,
    found: Sequence[Found],
    given: Checked,
    weight: Weight | None = None,
) -> Entries:
    """Returns the entries of a call.

    Args:
      function: name of the calling function, for messages.
      plan: the plan of the call.
      jaxpr: the jaxpr of the call.
      found: its contractions.
      given: the observers, in addition to the calibrators of the plan.
      weight: how much rows count, for those without a weight of their own.
    """
    items = {item.address: item for item in found if item.address}
    entries: list[Entry] = []
    places: list[Entry] = []
    looks: set[tuple[Observer, str]] = set()
    checked: set[Any] = set()
    for site, observers in observers_of(function, plan, given):
        specs = site.static_specs()
        for part in observed_parts(site, items[site.address]):
            if part.key in specs:
                own = Calibrated(specs[part.key].calibrator)
                entries.append(Entry.of(part.key, site, own, part, weight))
            for observer in observers:
                if not observer.looks_at(part.about):
                    continue
                entry = Entry.of(f"{part.key}@{observer}", site, observer, part, weight)
                looks.add((observer, site.path))
                if isinstance(observer, Places):
                    places.append(entry)
                    continue
                entries.append(entry)
                _check_alike(function, entry, checked)
    _check_looks(function, plan, given, looks)
    return dataclasses.replace(_shared(jaxpr, [*entries, *_flagged(entries)]), places=places)


def _flagged(entries: Sequence[Entry]) -> list[Entry]:
    """Returns the entries of the flags of all operands that are observed, one for each weight."""
    parts = dict.fromkeys((x.part, x.site, x.weight) for x in entries)
    return [
        Entry(f"{part.key}{FLAGS}{i}", site, flags, part, weight)
        for i, (part, site, weight) in enumerate(parts)
    ]


def observed_parts(site: Site, item: Found) -> list[Part]:
    """Returns the operands of a site, and its result."""
    family, eqn = item.family, item.eqn
    has_weight = any(operand.role == "weight" for operand in site.operands)
    axes = family.axes(eqn)
    parts = []
    for i, (operand, own) in enumerate(zip(site.operands, axes, strict=True)):
        side = ("lhs", "rhs")[i]
        # In a convolution the features come first; along the other axes the kernel slides.
        summed = own.contracted[:1] if site.op == "conv_general_dilated" else own.contracted
        about = ObservedSite(
            site.path,
            site.op,
            side,
            operand.role,
            has_weight,
            summed,
            own.kept,
            own.batch,
            operand.spec,
            patches=_patches_of(eqn),
            experts=eqn.invars[1].aval.shape[0] if site.op == "ragged_dot" else None,
        )
        parts.append(Part(operand.key, about, _kind_of(eqn.invars[i]), i))
    result = _kind_of(eqn.outvars[0])
    kept = tuple(range(len(result.shape)))
    batch = kept[: len(axes[0].batch)] if site.op == "dot_general" else ()
    weights = [i for i, operand in enumerate(site.operands) if operand.role == "weight"]
    own = Channels.of_result(eqn, weights[0]).own if weights else ()
    about = ObservedSite(
        site.path, site.op, "out", "result", has_weight, (), kept, batch, site.output, own
    )
    return [*parts, Part(site.output_key, about, result, -1)]


def _patches_of(eqn: _compat.Eqn) -> Patches | None:
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
    first: dict[Any, Entry] = {}
    shared = {}
    for entry in entries:
        seen = numbers[entry.site.address]
        place = entry.part.place
        value = seen.result if place < 0 else seen.operands[place]
        others = seen.operands[len(entry.site.operands) :]
        about = dataclasses.replace(entry.part.about, path="")
        who = entry.observer, entry.weight
        same = (seen.inside, entry.site.loops, value, others, *who, about)
        shared[entry.key] = first.setdefault(same, entry).key
    return Entries({entry.key: entry for entry in first.values()}, shared)


def _check_alike(function: str, entry: Entry, checked: set[Any]) -> None:
    """Raises if the three functions of an observer do not return the same kind of statistics."""
    about, kind = dataclasses.replace(entry.part.about, path=""), entry.part.kind
    what = (entry.observer, about, kind.shape, kind.dtype)
    if what in checked:
        return
    checked.add(what)
    empty = jax.eval_shape(entry.empty)
    count = about.experts
    sizes = None if count is None else jax.ShapeDtypeStruct((count,), jnp.int32)
    one = jax.ShapeDtypeStruct((1,) * len(kind.shape), jnp.float32)
    weights = None if entry.weight is None else one
    seen = jax.eval_shape(entry.observe, kind, sizes, weights)
    merged = jax.eval_shape(entry.observer.merge, empty, seen)
    for name, found in (("observe", seen), ("merge", merged)):
        if kinds_of(found) == kinds_of(empty):
            continue
        raise fail(
            function,
            f"`empty` and `{name}` of the observer {str(entry.observer)!r} differ in what they "
            "return.",
            given=f"{kinds_of(empty)} and {kinds_of(found)}, for {entry.part.key!r}",
            expected="one structure, with the same shapes and dtypes",
            fix=f"let `empty` return what `{name}` would return for no values.",
        )


def kinds_of(stats: Any) -> str:
    """Returns statistics as text: their structure, shapes and dtypes."""
    return str(jax.tree.map(lambda x: f"{x.dtype.name}{list(x.shape)}", stats))


def _check_looks(
    function: str, plan: Plan, given: Checked, looks: set[tuple[Observer, str]]
) -> None:
    """Raises if an observer records no operand of the sites that its pattern matches."""
    for pattern, observers in given:
        for observer in observers:
            if any(who == observer and is_for(pattern, plan, path) for who, path in looks):
                continue
            raise fail(
                function,
                f"the observer {str(observer)!r} records no operand of its sites.",
                given=f"observers[{pattern!r}]",
                expected="an operand that its `looks_at` accepts: by default an activation that is "
                "multiplied by a weight; for a calibrator an operand that the plan quantizes",
                fix="name other sites, or leave that observer out.",
            )
