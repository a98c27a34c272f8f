"""Finds which channels of a function can be scaled, and what must be scaled with them, by passing
labels of channels through the traced function, as `places` does with numbers of elements.

A value is labelled if each of its channels may be multiplied by a positive factor. Producers, such
as the output axis of a weight, the gain of a norm or a bias, create labels. Sites compensate for
the factor where they sum over channels.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.tree_util import keystr

from .._compat import Eqn
from ..observers import ObservedSite
from ..transforms import Plan, Site
from ..transforms._shared import CONTRACTIONS, Address, Call, Channels, contractions, observed_parts
from ._elements import Elements
from ._label_rules import VIEWED, channels_of, evaluated, gathered, moved, product
from ._labels import FIXED, Array, Known, Labelled, Labels, Leaf, Value, step_of, with_line
from ._stages import Steps
from ._walk import Walk


@dataclasses.dataclass(frozen=True)
class Visit:
    """A site in one step of the scans around it.

    Attributes:
      site: the site, of the plan of everything that may be a site.
      steps: the numbers of the steps.
      place: the index of the leaf of its weight.
      places: which elements of its weight its matrices hold, over all steps.
      inputs: labels of channels, [*batch, channels].
      outputs: labels of rows, [*batch, rows].
      about: what observers get to know about the operand that is not a weight.
      shape: shape of that operand.
      why: why its inputs are fixed, if they are.
    """

    site: Site
    steps: Steps
    place: int
    places: Elements
    inputs: Array
    outputs: Array
    about: ObservedSite
    shape: tuple[int, ...]
    why: str

    @property
    def elements(self) -> Array:
        """Numbers of elements of its matrices, [*batch, rows, channels]; computed at each call."""
        return self.places[self.steps]


class Follower(Walk):
    """Passes labels through a jaxpr.

    Args:
      plan: a plan in which all contractions with weights are sites.
      elements: which elements of its leaf each site multiplies by, by the key of its operand.
      once: addresses of sites whose matrices no other site multiplies by.
      call: the traced function.
      fixed: labels that are known to have no factor, independent of the choices at products of two
        values that may both have one, and why.

    Attributes:
      made: by leaf, the label of each of its elements, flat; 0 for elements that are not read. An
        element has one label, however often and wherever it is read. Weights of sites have none.
      visits: the sites in all steps whose weight no other operation uses.
      refused: the other sites, likewise. Not even their own channels may be scaled.
      elsewhere: leaves that cannot be scaled, and why.
    """

    def __init__(
        self,
        plan: Plan,
        elements: Mapping[str, Elements],
        once: set[Address],
        call: Call,
        fixed: "tuple[Array, dict[int, str]] | None" = None,
    ):
        self.plan: Plan = plan
        self._elements, self._once = elements, once
        self._places = {path: i for i, path in enumerate(call.paths) if path is not None}
        self._weights = {self._places[weight.path] for weight in plan.weights}
        self.shapes: list[tuple[int, ...]] = [np.shape(leaf) for leaf in call.leaves]
        self.sizes: list[int] = [math.prod(shape) for shape in self.shapes]
        self.names: list[str | None] = names_of(call, plan.params)
        self._items = {item.address: item for item in contractions(call) if item.address}
        self.labels: Labels = Labels(fixed)
        self.made: dict[int, Array] = {}
        self.visits: list[Visit] = []
        self.refused: list[Visit] = []
        self.elsewhere: dict[int, str] = {}
        self._used: dict[int, Array] = {}
        self._alone: set[int] = set()

    def follow(self, call: Call) -> None:
        """Follows a whole call."""
        given: list[Value] = []
        for place, (leaf, name) in enumerate(zip(call.leaves, self.names, strict=True)):
            if name is None:
                given.append(Labelled.fixed(np.shape(leaf), "it is an argument"))
            elif place in self._weights:
                given.append(Leaf(place, np.shape(leaf), None))
            else:
                shape = np.shape(leaf)
                numbers = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
                given.append(Leaf(place, shape, numbers))
        consts = [Known(x) for x in call.consts]
        for x in self.run(call.jaxpr, consts, given):
            if not isinstance(x, Known):
                self.labels.stop(
                    self.labelled(x, "it is returned"), "it is a result of the function"
                )
        every = self.visits
        self.refused = [visit for visit in every if visit.place in self.elsewhere]
        self.visits = [visit for visit in every if visit.place not in self.elsewhere]
        for place, used in self._used.items():
            if not used.all():  # a call with other shapes may use the rest
                self.elsewhere.setdefault(place, "a part of it is not used here")
        for visit in every:
            if visit.place in self.elsewhere:
                reason = f"its weight has another use: {self.elsewhere[visit.place]}"
                self.labels.stop_labels(visit.inputs, reason)
                self.labels.stop_labels(visit.outputs, reason)
        for place, labels in self.made.items():
            if place in self.elsewhere:
                self.labels.stop_labels(labels, f"it has another use: {self.elsewhere[place]}")

    def evaluate(
        self, eqn: Eqn, given: list[Value], here: Address, steps: Steps
    ) -> Sequence[Value]:
        """Returns the labels of the results of an equation."""
        name = eqn.primitive.name
        if name in CONTRACTIONS:
            return [self._contraction(eqn, given, here, steps)]
        if name in VIEWED and all(isinstance(x, (Leaf, Known)) for x in given):
            found = self._view_of_leaf(eqn, given)
            if found is not None:
                return found
        return evaluated(self.labels, eqn, [self.labelled(x, with_line(eqn)) for x in given], given)

    def labelled(self, x: Value, use: str) -> Labelled:
        """Returns a value with labels; each element of a parameter has its own."""
        if isinstance(x, Labelled):
            return x
        if isinstance(x, Known):
            return Labelled.fixed(np.shape(x.value), label=x.label)
        if x.elements is None:
            self.elsewhere.setdefault(x.place, use)
            return Labelled.fixed(x.shape)
        labels = self._labels_of(x.place)
        if x.place not in self._alone:
            self._alone.add(x.place)
            own = labels == FIXED
            labels[own] = self.labels.new(int(own.sum()))
        self._use(x.place, x.elements)
        return self.labels.made(labels[x.elements], x.shape)

    def _labels_of(self, place: int) -> Array:
        """Returns the label of each element of a leaf, 0 for those that have none yet."""
        return self.made.setdefault(place, np.zeros(self.sizes[place], np.int32))

    def _columns(self, x: Leaf, elements: Array) -> Array:
        """Returns the labels of the columns of a parameter whose rows are looked up."""
        labels = self._labels_of(x.place)
        known = labels[elements]
        self._use(x.place, elements)
        if len(known) and np.all(known[0] > FIXED) and np.all(known == known[:1]):
            return known[0]
        columns = self.labels.new(x.shape[1])
        labels[elements] = np.where(known > FIXED, known, columns)
        self.labels.join(labels[elements], columns, "rows of it are looked up")
        return columns

    def _use(self, place: int, elements: Array) -> None:
        self._used.setdefault(place, np.zeros(self.sizes[place], bool))[elements] = True

    def _view_of_leaf(self, eqn: Eqn, given: Sequence[Value]) -> list[Value] | None:
        leaves = [x for x in given if isinstance(x, Leaf)]
        first = leaves[0]
        if len({x.place for x in leaves}) > 1:
            return None
        shapes = [v.aval.shape for v in eqn.outvars]
        if first.elements is None:
            return [Leaf(first.place, shape, None) for shape in shapes]
        if eqn.primitive.name in ("pad", "dynamic_update_slice"):
            return None
        operands = [x.elements if isinstance(x, Leaf) else x.value for x in given]  # type: ignore
        return [Leaf(first.place, x.shape, x) for x in moved(eqn, operands)]

    def stopped(self, eqn: Eqn, given: Sequence[Value], reason: str = "") -> list[Value]:
        """Fixes the operands of an equation that is not entered."""
        values = [self.labelled(x, with_line(eqn)) for x in given]
        return list(self.labels.stop_at(eqn, values, reason))

    def joined(self, values: Sequence[Value], reason: str) -> Value:
        """Joins the labels of the results of branches."""
        first, *others = (self.labelled(x, reason) for x in values)
        labels = first.labels
        for x in others:
            labels = self.labels.join(labels, x.labels, reason)
        return Labelled.of(labels, first.shape)

    def stacked(self, rows: Sequence[Value]) -> Value:
        """Stacks the labels of the results of steps."""
        each = [self.labelled(x, "a result of a scan") for x in rows]
        shape = np.broadcast_shapes(*(x.labels.shape for x in each))
        labels = np.stack([np.broadcast_to(x.labels, shape) for x in each])
        return Labelled.of(labels, (len(rows), *each[0].shape))

    def empty(self, shape: Sequence[int]) -> Value:
        """Returns a result of a scan without steps."""
        return Labelled.fixed(shape)

    def step_of(self, x: Leaf | Labelled, i: int) -> Value:
        """Returns the labels in a step."""
        return step_of(x, i)

    def is_parameter(self, x: Value) -> bool:
        """Whether a value is a parameter."""
        return isinstance(x, Leaf)

    def _contraction(
        self, eqn: Eqn, given: Sequence[Value], here: Address, steps: Steps
    ) -> Labelled:
        name, site = eqn.primitive.name, self.plan.site_at(here)
        if site is not None and sum(x.path is not None for x in site.operands) == 1:
            return self._site(site, eqn, given, here, steps)
        if name == "gather":
            return self._gather(eqn, given)
        where = with_line(eqn)
        leaves = [x for x in given if isinstance(x, Leaf)]
        self.elsewhere |= {x.place: where for x in leaves}
        given = [Labelled.fixed(x.shape) if isinstance(x, Leaf) else x for x in given]
        values = [self.labelled(x, where) for x in given]
        if name == "dot_general" and not leaves and not all(x.is_fixed for x in values):
            return product(self.labels, eqn, values)
        found = self.labels.stop_at(eqn, values)[0]
        why = "; ".join(dict.fromkeys(x.why for x in values if x.why))
        return dataclasses.replace(found, why=why or found.why)

    def _site(
        self, site: Site, eqn: Eqn, given: Sequence[Value], here: Address, steps: Steps
    ) -> Labelled:
        parts = observed_parts(site, self._items[site.address])
        (place,) = (i for i, x in enumerate(site.operands) if x.path is None)
        own = site.operands[1 - place]
        x = self.labelled(given[place], site.name)
        leaf, known = given[1 - place], self._elements.get(own.key)
        if here not in self._once or known is None or not isinstance(leaf, Leaf):
            why = f"the weight of {site.name} has another use, or is not a plain matrix"
            self.labels.stop(x, why)
            return Labelled.fixed(eqn.outvars[0].aval.shape, why)
        elements = known[steps]
        inputs = self._channels(x, parts[place].about, site.name)
        batch, rows, columns = elements.shape[:-2], *elements.shape[-2:]
        inputs = np.broadcast_to(inputs, (*batch, columns))
        outputs = self.labels.new(math.prod((*batch, rows))).reshape(*batch, rows)
        self._use(leaf.place, elements)
        own = parts[place].about, x.shape, x.why
        self.visits.append(Visit(site, steps, leaf.place, known, inputs, outputs, *own))
        if site.op == "ragged_dot":  # a row may go to any of the matrices
            for other in outputs[1:]:
                self.labels.join_labels(outputs[0], other)
            outputs = outputs[0]
        shape = eqn.outvars[0].aval.shape
        return self.labels.made(Channels.of_result(eqn, 1 - place).spread(outputs, shape), shape)

    def _channels(self, x: Labelled, about: Any, name: str) -> Array:
        """Returns labels of the channels that a site sums over, [*batch, channels]."""
        labels = x.labels
        reason = f"the rows that {name} multiplies differ in their channels"
        axes = range(len(x.shape))
        if about.patches is not None:
            own = {about.patches.axes.lhs_spec[1]}
        else:
            own = {*about.contracted, *about.batch}
        labels = self._even(labels, [axis for axis in axes if axis not in own], reason)
        return channels_of(labels, x.shape, about)

    def _even(self, labels: Array, axes: Sequence[int], reason: str) -> Array:
        """Returns labels that are constant along axes, after joining those that are not."""
        for axis in axes:
            first = labels[(slice(None),) * axis + (slice(1),)]
            for i in range(1, labels.shape[axis]):
                other = labels[(slice(None),) * axis + (slice(i, i + 1),)]
                if not np.array_equal(first, other):
                    first = self.labels.join(first, other, reason)
            labels = first
        return labels

    def _gather(self, eqn: Eqn, given: Sequence[Value]) -> Labelled:
        source, indices = given
        shape, sizes = eqn.outvars[0].aval.shape, eqn.params["slice_sizes"]
        numbers = eqn.params["dimension_numbers"]
        if isinstance(source, Leaf) and source.elements is not None:
            axes = [i for i, n in enumerate(source.shape) if sizes[i] < n]
            if axes == [0] and len(source.shape) == 2 and not numbers.operand_batching_dims:
                labels = self._columns(source, source.elements)
                out = np.broadcast_to(labels, (1,) * (len(shape) - 1) + labels.shape)
                columns = numbers.offset_dims[-1]  # in a vmap an axis of size 1 is before it
                return self.labels.made(np.moveaxis(out, -1, columns), shape)
        return gathered(self.labels, eqn, self.labelled(source, with_line(eqn)), indices)


def followed_through(*args: Any) -> Follower:
    """Returns a `Follower` that has followed a call, with the same arguments. It repeats passes
    until it is known which operand of each product takes a factor and which must not.
    """
    fixed = None
    while True:
        follower = Follower(*args, fixed=fixed)
        follower.follow(args[-1])
        before, fixed = fixed, follower.labels.fixed()
        known = before is not None and np.array_equal(before[0], fixed[0])
        if known or not follower.labels.has_choices:
            return follower


def names_of(call: Call, params: int | tuple[int, ...]) -> list[str | None]:
    """Returns for each leaf its name among the parameters, whether weights of a plan can have it or
    not; `None` if it is not a parameter.
    """
    positions, found = (params,) if isinstance(params, int) else params, []
    for (kind, place, *keys), path in zip(call.keys, call.paths, strict=True):
        inside = kind.idx == 0 and place.idx in positions
        own = keystr(tuple(keys), simple=True, separator="/")
        found.append(path if path is not None else own if inside else None)
    return found
