"""Finds which channels of a function can be rotated, and what must be rotated with them, by passing
labels of channels through the traced function (`_rotatable.py`).

A rotated value is `x Q`, where `x` is the original. Weights take `Q` at their output axes, and its
inverse where they sum over channels; biases and tables take `Q` too. The root mean square does not
change. A gain after a norm is multiplied into the weights that read it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._compat import Eqn
from ..transforms import Site
from ..transforms._shared import CONTRACTIONS, Address, Call, Channels, contractions, observed_parts
from ._channels import names_of
from ._elements import Elements
from ._every import Every
from ._label_rules import VIEWED, moved
from ._labels import FREE, Array, Known, is_key, narrowed, with_line
from ._reads import Lookup, Read, Table, channels_at, different, read_of_table
from ._rotatable import BlockConstraints, Parameter, Rotatable
from ._rotation_rules import RULES, gathered, product, scaled, stop_at, varies_of
from ._stages import Steps
from ._walk import Walk

_FLAT = {*VIEWED, "convert_element_type", "copy", "stop_gradient"}


class Streams(Walk):
    """Passes labels through a jaxpr.

    Args:
      every: the function.

    Attributes:
      reads: contractions with weights.
      lookups: lookups in parameters.
      gains: labels of gains, and of the channels that they multiply.
      offsets: by leaf, what is added to a gain.
      starts: by leaf, the label of its first element.
      elsewhere: leaves that cannot be changed, and why.
      unseen: leaves that are only partly used, and why that matters.
    """

    def __init__(self, every: Every):
        call = every.call
        self.plan, self._elements, self._once = every.plan, every.elements, every.once
        self.names = names_of(call, every.plan.params)
        self.shapes = [np.shape(leaf) for leaf in call.leaves]
        self.sizes = [int(np.prod(shape)) for shape in self.shapes]
        self.items = {item.address: item for item in contractions(call) if item.address}
        self.constraints = BlockConstraints()
        self.starts: dict[int, int] = {}
        self.reads: list[Read] = []
        self.lookups: list[Lookup] = []
        self.gains: list[tuple[Array, Array]] = []
        self.offsets: dict[int, float] = {}
        self.elsewhere: dict[int, str] = {}
        self.unseen: dict[int, str] = {}
        self._used: dict[int, Array] = {}
        self._summed: set[int] = set()
        self._follow(call)

    def _follow(self, call: Call) -> None:
        places = {path: i for i, path in enumerate(call.paths) if path is not None}
        weights = {places[weight.path] for weight in self.plan.weights}
        given: list[Any] = []
        for place, (name, shape) in enumerate(zip(self.names, self.shapes, strict=True)):
            if name is None:
                given.append(Rotatable.plain(shape))
                continue
            elements = None
            if place not in weights:
                elements = np.arange(self.sizes[place], dtype=np.int32).reshape(shape)
            given.append(Parameter(place, shape, elements))
        self._whole = {id(x) for x in given if isinstance(x, Parameter)}
        for x in self.run(call.jaxpr, [Known(x) for x in call.consts], given):
            if not isinstance(x, Known):
                why = "it is a result of the function"
                self.constraints.stop(self.rotatable(x, "it is returned").labels, why)
        self._find_other_uses()
        self._used.clear()  # as large as the parameters

    def _find_other_uses(self) -> None:
        """Stops rotations that would change a parameter with another use."""
        for place, used in self._used.items():
            if not used.all():  # a call with other shapes may use the rest
                self.unseen.setdefault(place, "a part of it is not used here")
        uses: dict[int, Array] = {}
        for table in different(x.table for x in self.lookups):
            own = uses.setdefault(table.place, np.zeros(self.sizes[table.place], np.int32))
            np.add.at(own, table.elements[()], 1)
        for place, own in uses.items():
            if np.any(own > 1):
                self.elsewhere.setdefault(place, "two different views of it are looked up")
        for place in set(uses) & set(self.starts):
            self.elsewhere.setdefault(place, "rows of it are looked up")
        for place in {x.place for x in self.reads} & set(self.starts):
            self.elsewhere.setdefault(place, "a product with it")
        for place, why in (self.unseen | self.elsewhere).items():
            if place in self.starts:
                labels = np.arange(self.sizes[place], dtype=np.int32) + self.starts[place]
                self.constraints.stop(labels, f"{self.names[place]} has another use: {why}")
        for gains, labels in self.gains:
            place, _ = self.elements_of(gains)
            if place in self.unseen | self.elsewhere or place in self._summed:
                self.constraints.stop(labels, f"its gain {self.names[place]} has another use")

    def elements_of(self, labels: Array) -> tuple[int, Array]:
        """Returns the leaf of some labels, and the numbers of their elements."""
        own = (x for x in self.starts.items() if 0 <= labels.flat[0] - x[1] < self.sizes[x[0]])
        place, start = next(own)
        return place, labels - start

    def rotatable(self, x: Any, use: str) -> Rotatable:
        """Returns a value with labels; each element of a parameter has a label."""
        if isinstance(x, Rotatable):
            return x
        if isinstance(x, Known):
            if is_key(x.value):
                return Rotatable.plain(np.shape(x.value))
            value = np.asarray(x.value)
            if jnp.issubdtype(value.dtype, jnp.inexact) and np.all(value == 0):
                return Rotatable(np.full((1,) * value.ndim, FREE, np.int32), value.shape)
            varies = [
                axis for axis, n in enumerate(value.shape)
                if n > 1 and np.any(value != value.take([0], axis))
            ]  # fmt: skip
            return Rotatable.plain(value.shape, frozenset(varies))
        if x.elements is None:
            self.elsewhere.setdefault(x.place, use)
            return Rotatable.plain(x.shape)
        labels = self._labels(x)
        self._use(x.place, x.elements)
        self._summed.add(x.place)
        found = Rotatable.of(labels, x.shape)
        scaled(self.constraints, found, x.varies, use)
        if x.offset:
            self.constraints.stop(labels, f"{self.names[x.place]} has a constant added")
            return Rotatable.plain(x.shape)
        return found

    def _use(self, place: int, elements: Array) -> None:
        self._used.setdefault(place, np.zeros(self.sizes[place], bool))[elements] = True

    def _labels(self, x: Parameter) -> Array:
        """Returns the labels of the elements of a parameter."""
        if x.place not in self.starts:
            self.starts[x.place] = int(self.constraints.new(1, self.sizes[x.place])[0, 0])
        return x.elements + np.int32(self.starts[x.place])  # type: ignore[operator]

    def evaluate(self, eqn: Eqn, given: list[Any], here: Address, steps: Steps) -> Sequence[Any]:
        """Returns the labels of the results of an equation."""
        name = eqn.primitive.name
        if name in CONTRACTIONS:
            return [self._contraction(eqn, given, here, steps)]
        found = self._of_parameters(eqn, given)
        if found is not None:
            return found
        values = [self.rotatable(x, with_line(eqn)) for x in given]
        if all(x.is_plain for x in values):
            shapes = [v.aval.shape for v in eqn.outvars]
            varies, why = varies_of(eqn, values), next((x.why for x in values if x.why), "")
            return [Rotatable.plain(*x, why) for x in zip(shapes, varies, strict=True)]
        rule = RULES.get(name)
        if rule is None:
            return stop_at(self.constraints, eqn, values)
        return rule(self.constraints, eqn, values, given)

    def _of_parameters(self, eqn: Eqn, given: Sequence[Any]) -> Sequence[Any] | None:
        """Returns the results of views of parameters, of `1 + gain`, and of products with them;
        `None` if the parameters must be treated as other values.
        """
        name, own = eqn.primitive.name, [x for x in given if isinstance(x, Parameter)]
        if len({x.place for x in own}) != 1 or not jnp.issubdtype(
            eqn.outvars[0].aval.dtype, jnp.inexact
        ):
            return None
        x, shape = own[0], eqn.outvars[0].aval.shape
        if (
            name in _FLAT
            and not x.varies
            and len(own) + sum(isinstance(x, Known) for x in given) == len(given)
        ):
            return self._viewed(eqn, given, x)
        if len(own) > 1 or len(given) != 2 or x.elements is None or len(x.shape) != len(shape):
            return None
        (other,) = (y for y in given if not isinstance(y, Parameter))
        if name in ("add", "sub") and isinstance(other, Known) and not x.is_scaled:
            value = np.asarray(other.value)
            is_first = given[0] is x or name == "add"
            if is_first and value.size and np.all(value == value.flat[0]) and value.flat[0]:
                by = float(value.flat[0]) * (1 if name == "add" else -1)
                return [dataclasses.replace(x, shape=shape, offset=x.offset + by)]
        if name == "mul" or (name == "div" and given[0] is x):
            factor = self.rotatable(other, with_line(eqn))
            if factor.is_plain:
                varies = x.varies | factor.varies
                return [dataclasses.replace(x, shape=shape, is_scaled=True, varies=varies)]
            if name == "mul":
                return [self._gained(eqn, factor, x)]
        return None

    def _viewed(self, eqn: Eqn, given: Sequence[Any], x: Parameter) -> Sequence[Any] | None:
        shapes = [v.aval.shape for v in eqn.outvars]
        if eqn.primitive.name not in VIEWED:
            return [x]
        if x.elements is None:
            return [Parameter(x.place, shape, None) for shape in shapes]
        if eqn.primitive.name in ("pad", "dynamic_update_slice"):
            return None
        operands = [
            np.broadcast_to(y.elements, y.shape)  # type: ignore[arg-type]
            if isinstance(y, Parameter)
            else y.value
            for y in given
        ]
        varies = varies_of(eqn, [Rotatable.plain(x.shape, x.varies)]) if x.varies else [x.varies]
        found = zip(moved(eqn, operands), shapes, varies * len(shapes), strict=False)
        return [
            dataclasses.replace(x, elements=narrowed(own), shape=shape, varies=axes)
            for own, shape, axes in found
        ]

    def _gained(self, eqn: Eqn, x: Rotatable, gain: Parameter) -> Rotatable:
        """Returns a value with its channels multiplied by a gain."""
        shape = eqn.outvars[0].aval.shape
        if not x.is_bare:
            why = "two gains, or a gain of squares,"
            self.elsewhere.setdefault(gain.place, with_line(eqn, why))
            return stop_at(self.constraints, eqn, [x], why)[0]
        scaled(self.constraints, x, gain.varies, with_line(eqn, "a factor for each channel,"))
        found = self._labels(gain)
        self._use(gain.place, gain.elements)  # type: ignore[arg-type]
        self.constraints.stop(found, "it is a gain")
        both = np.broadcast_arrays(found, x.labels)
        pairs = np.unique(np.stack([y.ravel() for y in both]), axis=1)
        known = self.offsets.setdefault(gain.place, gain.offset)
        if known != gain.offset:
            why = "a gain with another offset"
            self.elsewhere.setdefault(gain.place, with_line(eqn, why))
            return stop_at(self.constraints, eqn, [x], why)[0]
        self.gains.append((pairs[0], pairs[1]))
        return dataclasses.replace(x, gains=found, shape=shape)

    def _contraction(
        self, eqn: Eqn, given: Sequence[Any], here: Address, steps: Steps
    ) -> Rotatable:
        name, site = eqn.primitive.name, self.plan.site_at(here)
        if site is not None and sum(x.path is not None for x in site.operands) == 1:
            return self._site(site, eqn, given, here, steps)
        if name == "gather":
            return self._gather(eqn, given, here, steps)
        if name == "dot_general" and self._skipped(eqn, given, here, steps):
            return Rotatable.plain(eqn.outvars[0].aval.shape)
        values = [self.rotatable(x, with_line(eqn)) for x in given]
        if name == "dot_general" and not all(x.is_plain for x in values):
            return product(self.constraints, eqn, values)
        return stop_at(self.constraints, eqn, values)[0]

    def _site(
        self, site: Site, eqn: Eqn, given: Sequence[Any], here: Address, steps: Steps
    ) -> Rotatable:
        shape = eqn.outvars[0].aval.shape
        parts = observed_parts(site, self.items[site.address])
        (place,) = (i for i, x in enumerate(site.operands) if x.path is None)
        own, about = site.operands[1 - place], parts[place].about
        x, leaf = self.rotatable(given[place], site.name), given[1 - place]
        if x.is_squared or (about.patches is not None and about.patches.groups > 1):
            self.constraints.stop(x.labels, with_line(eqn, "a square or groups of channels"))
            x = Rotatable.plain(x.shape)
        inputs, order, gains = channels_at(self.constraints, x, about, site.name)
        known = self._elements.get(own.key) if isinstance(leaf, Parameter) else None
        where = leaf.place if isinstance(leaf, Parameter) else -1
        if here not in self._once or known is None:
            none = np.empty(0, np.int32)
            read = Read(site, steps, where, None, inputs, order, none, gains, x, about, why=x.why)
            self.reads.append(read)
            return Rotatable.plain(shape)
        batch, rows = known.shape[len(steps) : -2], known.shape[-2]
        inputs = np.broadcast_to(inputs, (*batch, inputs.shape[-1]))
        gains = None if gains is None else np.broadcast_to(gains, inputs.shape)
        outputs = self.constraints.new(*batch, rows)
        self._use(where, known[steps])
        more = {"steps_of_places": steps, "why": x.why}
        read = Read(site, steps, where, known, inputs, order, outputs, gains, x, about, **more)
        self.reads.append(read)
        if site.op == "ragged_dot":  # a row may go to any of the matrices
            for other in outputs[1:]:
                self.constraints.join(outputs[0], other, with_line(eqn))
            outputs = outputs[0]
        return Rotatable.of(Channels.of_result(eqn, 1 - place).spread(outputs, shape), shape)

    def _skipped(self, eqn: Eqn, given: Sequence[Any], here: Address, steps: Steps) -> bool:
        """Adds a product with a parameter that is not a site of the full plan, such as a table that
        is also the head. Returns whether the equation is one.
        """
        item = self.items.get(here)
        places = [i for i, x in enumerate(given) if isinstance(x, Parameter)]
        if item is None or len(places) != 1:
            return False
        x = self.rotatable(given[1 - places[0]], with_line(eqn))
        read = read_of_table(self.constraints, item, x, given[places[0]], steps)
        if read is not None:
            self.reads.append(read)
        return read is not None

    def _gather(self, eqn: Eqn, given: Sequence[Any], here: Address, steps: Steps) -> Rotatable:
        source, indices = given
        shape, sizes = eqn.outvars[0].aval.shape, eqn.params["slice_sizes"]
        numbers = eqn.params["dimension_numbers"]
        is_table = isinstance(source, Parameter) and len(source.shape) == 2 and not source.varies
        if is_table and not source.offset:
            axes = [i for i, n in enumerate(source.shape) if sizes[i] < n]
            known = source.elements
            if known is None and id(source) in self._whole:
                known = np.arange(self.sizes[source.place], dtype=np.int32).reshape(source.shape)
            plain = axes == [0] and not numbers.operand_batching_dims and here in self.items
            if plain and known is not None:
                labels = self.constraints.new(source.shape[1])
                self._use(source.place, known)
                table = Table(source.place, Elements.of(known), labels)
                self.lookups.append(Lookup(here, steps, table, labels))
                out = np.broadcast_to(labels, (1,) * (len(shape) - 1) + labels.shape)
                columns = numbers.offset_dims[-1]  # in a vmap an axis of size 1 is before it
                return Rotatable.of(np.moveaxis(out, -1, columns), shape)
        return gathered(self.constraints, eqn, self.rotatable(source, with_line(eqn)), indices)

    def stopped(self, eqn: Eqn, given: Sequence[Any], reason: str = "") -> list[Any]:
        """Stops rotations of the operands of an equation that is not entered."""
        values = [self.rotatable(x, with_line(eqn)) for x in given]
        return list(stop_at(self.constraints, eqn, values, reason))

    def joined(self, values: Sequence[Any], reason: str) -> Any:
        """Joins the labels of the results of branches."""
        each = [self.rotatable(x, reason) for x in values]
        return self._one(each, [x.labels for x in each], reason)

    def _one(self, each: Sequence[Rotatable], labels: Sequence[Array], reason: str) -> Rotatable:
        if not all(x.is_bare for x in each):
            for own in labels:
                self.constraints.stop(own, f"{reason} after a gain")
        found = labels[0]
        for own in labels[1:]:
            found = self.constraints.join(found, own, reason)
        if all(x.is_plain for x in each):
            return Rotatable.plain(each[0].shape)
        return Rotatable.of(found, each[0].shape)

    def stacked(self, rows: Sequence[Any]) -> Any:
        """Stacks the labels of the results of steps."""
        each = [self.rotatable(x, "a result of a scan") for x in rows]
        whole = (len(rows), *each[0].shape)
        if all(x.is_plain for x in each):
            return Rotatable.plain(whole)
        if not all(x.is_bare for x in each):
            for x in each:
                self.constraints.stop(x.labels, "a result of a scan after a gain")
        shape = np.broadcast_shapes(*(x.labels.shape for x in each))
        return Rotatable.of(np.stack([np.broadcast_to(x.labels, shape) for x in each]), whole)

    def empty(self, shape: Sequence[int]) -> Any:
        """Returns a result of a scan without steps."""
        return Rotatable.plain(shape)

    def step_of(self, x: Any, i: int) -> Any:
        """Returns the labels in a step."""

        def part(own: Array | None) -> Array | None:
            return None if own is None else own[i if own.shape[0] > 1 else 0]

        axes = frozenset(axis - 1 for axis in x.varies if axis)
        if isinstance(x, Parameter):
            return dataclasses.replace(x, shape=x.shape[1:], elements=part(x.elements), varies=axes)
        labels: Any = part(x.labels)
        if x.is_plain:
            return Rotatable.plain(x.shape[1:], axes)
        own = Rotatable.of(labels, x.shape[1:], part(x.gains))
        return dataclasses.replace(own, is_squared=x.is_squared and not own.is_plain)

    def is_parameter(self, x: Any) -> bool:
        """Whether a value is a parameter."""
        return isinstance(x, Parameter)
