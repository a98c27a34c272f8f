"""Finds which channels of a function can be rotated, and what must be rotated with them, by passing
labels of channels through the traced function (`rotatable.py`).

A rotated value is `x Q`, where `x` is the original. Weights take `Q` at their output axes, and its
inverse where they sum over channels; biases and tables take `Q` too. The root mean square does not
change. A gain after a norm is multiplied into the weights that read it.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..compat import Eqn
from ..statistics.statistics import ObservedSite
from ..transforms.channel_map import Channels
from ..transforms.plan import Operand, Site
from ..transforms.rules import CONTRACTIONS
from ..transforms.stats import observed_parts
from ..transforms.views import Address
from .grids import Elements, Every
from .labels import (
    FREE,
    VIEWED,
    Array,
    ChannelDomain,
    Known,
    Parameter,
    channels_of,
    is_key,
    is_lookup_of_rows,
    looked_up,
    row_of,
    with_line,
)
from .rotatable import (
    RULES,
    BlockConstraints,
    Rotatable,
    gathered,
    product,
    scaled,
    stop_at,
    varies_of,
)
from .stages import Steps

# Contractions and lookups: where the channels of a value meet a weight.


@dataclasses.dataclass(frozen=True)
class Read:
    """A contraction of a rotated value with a weight, in one step of the scans around it.

    Attributes:
      site: the site, of the plan of everything that may be a site.
      steps: the numbers of the steps.
      leaf_index: the index of the leaf of its weight; -1 if it is not a leaf.
      element_ids: which elements of the leaf its matrices hold, over all steps; `None` if the leaf
        has another use, or is not a plain matrix.
      inputs: labels of channels, [*batch, channels], in the order of the axes of the operand.
      order: their positions in the order in which the site sums; `None` if that is the same.
      outputs: labels of rows, [*batch, rows]; empty if it cannot take rotations.
      gains: labels of the gains of channels, [*batch, channels], 0 if there is none; or `None`.
      value: identifies the operand: contractions of one value have the same object.
      observed_site: what observers get to know about the operand.
      weight_steps: the numbers of the steps that `element_ids` depend on.
      is_site: whether it is a site of the full plan; otherwise its weight is also looked up.
      reason: why its operand is not rotated, if known.
    """

    site: Site
    steps: Steps
    leaf_index: int
    element_ids: Elements | None
    inputs: Array
    order: Array | None
    outputs: Array
    gains: Array | None
    value: object
    observed_site: ObservedSite
    weight_steps: Steps = ()
    is_site: bool = True
    reason: str = ""

    @property
    def address(self) -> Address:
        """The address of the contraction."""
        return self.site.address

    @property
    def labels(self) -> Array:
        """Labels of what is rotated back if its weight cannot take a rotation."""
        return self.inputs

    @property
    def elements(self) -> Array:
        """Numbers of elements of its matrices, [*batch, rows, channels]; computed at each call."""
        numbers = self.summed
        return numbers if self.order is None else numbers[..., self.order]

    @property
    def summed(self) -> Array:
        """The same, with channels in the order in which the site sums over them."""
        assert self.element_ids is not None
        return self.element_ids[self.weight_steps]

    @property
    def channels(self) -> int:
        """The number of channels; for a convolution, those of one group."""
        assert self.element_ids is not None
        patches = self.observed_site.patches
        return self.element_ids.shape[-1] // (1 if patches is None else math.prod(patches.kernel))


@dataclasses.dataclass(frozen=True)
class Table:
    """A parameter whose rows are looked up.

    Attributes:
      leaf_index: the index of the leaf.
      elements: the numbers of its elements, [rows, columns].
      labels: labels of its columns.
    """

    leaf_index: int
    elements: Elements
    labels: Array


def different(tables: Iterable[Table]) -> list[Table]:
    """Returns one table of each set of tables that are the same view of one leaf."""
    distinct: list[Table] = []
    for x in tables:
        if not any(
            x.leaf_index == y.leaf_index and x.elements.equals(y.elements) for y in distinct
        ):
            distinct.append(x)
    return distinct


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A lookup of rows of a parameter.

    Attributes:
      address: the address of the lookup.
      steps: the numbers of the steps of scans around it.
      table: the parameter.
      result_labels: labels of the result.
    """

    address: Address
    steps: Steps
    table: Table
    result_labels: Array

    @property
    def leaf_index(self) -> int:
        """The index of the leaf of the parameter."""
        return self.table.leaf_index

    @property
    def labels(self) -> Array:
        """Labels of what is rotated if the table cannot take a rotation."""
        return self.result_labels


class SummedChannels(NamedTuple):
    """Channels that a site sums over: labels, their order, and labels of gains, as in `Read`."""

    inputs: Array
    order: Array | None
    gains: Array | None


def channels_at(
    constraints: BlockConstraints, x: Rotatable, observed_site: ObservedSite, name: str
) -> SummedChannels:
    """Returns the channels that a site sums over."""
    if observed_site.patches is not None:
        channel_axes = {observed_site.patches.axes.lhs_spec[1]}
        observed_site = dataclasses.replace(
            observed_site, patches=None, contracted=(*channel_axes,)
        )
    else:
        channel_axes = {*observed_site.contracted, *observed_site.batch}
    labels, gains = x.labels, x.gains
    for axis in (axis for axis in range(len(x.shape)) if axis not in channel_axes):
        joined = labels[(slice(None),) * axis + (slice(1),)]
        for i in range(1, labels.shape[axis]):
            following = labels[(slice(None),) * axis + (slice(i, i + 1),)]
            joined = constraints.join(joined, following, f"rows that {name} multiplies differ")
        labels = joined
        if gains is not None and gains.shape[axis] > 1:
            constraints.stop(labels, f"the gains of rows that {name} multiplies differ")
            gains = gains[(slice(None),) * axis + (slice(1),)]
    axes, order = sorted(observed_site.contracted), None
    if axes != [*observed_site.contracted]:
        sizes = [x.shape[axis] for axis in observed_site.contracted]
        numbers = np.arange(math.prod(sizes)).reshape(sizes)
        order = numbers.transpose(np.argsort(observed_site.contracted)).reshape(-1)
        observed_site = dataclasses.replace(observed_site, contracted=tuple(axes))
    inputs = channels_of(labels, x.shape, observed_site)
    constraints.cut_runs(inputs, f"the channels that {name} sums over")
    return SummedChannels(
        inputs, order, None if gains is None else channels_of(gains, x.shape, observed_site)
    )


def read_of_table(
    constraints: BlockConstraints, item: Any, x: Rotatable, leaf: Parameter, steps: Steps
) -> Read | None:
    """Returns the product of a value and a parameter, such as a table that is also the head; `None`
    if the parameter is not a plain matrix.
    """
    argnums = [i for i, origin in enumerate(item.origins) if origin is not None]
    if leaf.elements is None or leaf.is_scaled or leaf.offset or x.is_squared or len(argnums) != 1:
        return None
    argnum = argnums[0]
    both_axes = CONTRACTIONS[item.eqn.primitive.name].axes(item.eqn)
    axes, weight_axes = both_axes[1 - argnum], both_axes[argnum]
    if weight_axes.batch:
        return None
    roles = ("weight", "activation") if argnum == 0 else ("activation", "weight")
    operands = tuple(
        Operand(role, None, "", item.path if role == "weight" else None) for role in roles
    )
    address = item.address, item.path, item.scope, item.op
    site = Site(*address, operands, None, "", 0, item.loops, (), (), None)
    observed_site = ObservedSite(
        item.path, item.op, "lhs", "activation", True, axes.contracted, axes.kept, axes.batch, None
    )
    inputs, order, gains = channels_at(constraints, x, observed_site, item.path)
    numbers = np.broadcast_to(leaf.elements, leaf.shape)
    numbers = numbers.transpose(*weight_axes.kept, *weight_axes.contracted)
    element_ids = Elements.of(numbers.reshape(-1, inputs.shape[-1]))
    where, empty = (site, steps, leaf.leaf_index, element_ids), np.empty(0, np.int32)
    options: dict[str, Any] = {"is_site": False, "reason": x.reason}
    return Read(*where, inputs, order, empty, gains, x, observed_site, **options)


_FLAT = {*VIEWED, "convert_element_type", "copy", "stop_gradient"}


class Streams(ChannelDomain):
    """Labels of channels that one matrix rotates.

    Attributes:
      reads: contractions with weights.
      lookups: lookups in parameters.
      gains: labels of gains, and of the channels that they multiply.
      offsets: by leaf, what is added to a gain.
      starts: by leaf, the label of its first element.
      unseen: leaves that are only partly used, and why that matters.
    """

    def __init__(self, traced: Every):
        super().__init__(traced)
        self.constraints = BlockConstraints()
        self.starts: dict[int, int] = {}
        self.reads: list[Read] = []
        self.lookups: list[Lookup] = []
        self.gains: list[tuple[Array, Array]] = []
        self.offsets: dict[int, float] = {}
        self.unseen: dict[int, str] = {}
        self._summed: set[int] = set()
        self.follow(traced.call)
        self._find_other_uses()
        self._used.clear()  # as large as the parameters

    def argument(self, shape: tuple[int, ...]) -> Rotatable:
        return Rotatable.plain(shape)

    def stop(self, x: Rotatable, reason: str) -> None:
        self.constraints.stop(x.labels, reason)

    def _find_other_uses(self) -> None:
        """Stops rotations that would change a parameter with another use."""
        for leaf_index in self.partly_used():
            self.unseen.setdefault(leaf_index, "a part of it is not used here")
        uses: dict[int, Array] = {}
        for table in different(x.table for x in self.lookups):
            counts = uses.setdefault(
                table.leaf_index, np.zeros(self.sizes[table.leaf_index], np.int32)
            )
            np.add.at(counts, table.elements[()], 1)
        for leaf_index, counts in uses.items():
            if np.any(counts > 1):
                self.elsewhere.setdefault(leaf_index, "two different views of it are looked up")
        for leaf_index in set(uses) & set(self.starts):
            self.elsewhere.setdefault(leaf_index, "rows of it are looked up")
        for leaf_index in {x.leaf_index for x in self.reads} & set(self.starts):
            self.elsewhere.setdefault(leaf_index, "a product with it")
        for leaf_index, reason in (self.unseen | self.elsewhere).items():
            if leaf_index in self.starts:
                labels = np.arange(self.sizes[leaf_index], dtype=np.int32) + self.starts[leaf_index]
                self.constraints.stop(labels, f"{self.names[leaf_index]} has another use: {reason}")
        for gains, labels in self.gains:
            leaf_index, _ = self.elements_of(gains)
            if leaf_index in self.unseen | self.elsewhere or leaf_index in self._summed:
                self.constraints.stop(labels, f"its gain {self.names[leaf_index]} has another use")

    def elements_of(self, labels: Array) -> tuple[int, Array]:
        """Returns the leaf of some labels, and the numbers of their elements."""
        matching = (x for x in self.starts.items() if 0 <= labels.flat[0] - x[1] < self.sizes[x[0]])
        leaf_index, start = next(matching)
        return leaf_index, labels - start

    def labelled(self, x: Any, use: str) -> Rotatable:
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
            self.elsewhere.setdefault(x.leaf_index, use)
            return Rotatable.plain(x.shape)
        labels = self._labels(x)
        self.use(x.leaf_index, x.elements)
        self._summed.add(x.leaf_index)
        result = Rotatable.of(labels, x.shape)
        scaled(self.constraints, result, x.varies, use)
        if x.offset:
            self.constraints.stop(labels, f"{self.names[x.leaf_index]} has a constant added")
            return Rotatable.plain(x.shape)
        return result

    def _labels(self, x: Parameter) -> Array:
        """Returns the labels of the elements of a parameter."""
        if x.leaf_index not in self.starts:
            self.starts[x.leaf_index] = int(self.constraints.new(1, self.sizes[x.leaf_index])[0, 0])
        return x.elements + np.int32(self.starts[x.leaf_index])  # type: ignore[operator]

    def results(self, eqn: Eqn, inputs: list[Any], address: Address, steps: Steps) -> Sequence[Any]:
        """Returns the labels of the results of an equation."""
        name = eqn.primitive.name
        if name in CONTRACTIONS:
            return [self._contraction(eqn, inputs, address, steps)]
        results = self._of_parameters(eqn, inputs)
        if results is not None:
            return results
        values = [self.labelled(x, with_line(eqn)) for x in inputs]
        if all(x.is_plain for x in values):
            shapes, varies = [v.aval.shape for v in eqn.outvars], varies_of(eqn, values)
            reason = next((x.reason for x in values if x.reason), "")
            return [Rotatable.plain(*x, reason) for x in zip(shapes, varies, strict=True)]
        rule = RULES.get(name)
        if rule is None:
            return stop_at(self.constraints, eqn, values)
        return rule(self.constraints, eqn, values, inputs)

    def _of_parameters(self, eqn: Eqn, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Returns the results of views of parameters, of `1 + gain`, and of products with them;
        `None` if the parameters must be treated as other values.
        """
        name, parameters = eqn.primitive.name, [x for x in inputs if isinstance(x, Parameter)]
        if len({x.leaf_index for x in parameters}) != 1 or not jnp.issubdtype(
            eqn.outvars[0].aval.dtype, jnp.inexact
        ):
            return None
        x, shape = parameters[0], eqn.outvars[0].aval.shape
        if (
            name in _FLAT
            and not x.varies
            and len(parameters) + sum(isinstance(x, Known) for x in inputs) == len(inputs)
        ):
            return self._viewed(eqn, inputs, x)
        if (
            len(parameters) > 1
            or len(inputs) != 2
            or x.elements is None
            or len(x.shape) != len(shape)
        ):
            return None
        (operand,) = (y for y in inputs if not isinstance(y, Parameter))
        if name in ("add", "sub") and isinstance(operand, Known) and not x.is_scaled:
            value = np.asarray(operand.value)
            is_first = inputs[0] is x or name == "add"
            if is_first and value.size and np.all(value == value.flat[0]) and value.flat[0]:
                change = float(value.flat[0]) * (1 if name == "add" else -1)
                return [dataclasses.replace(x, shape=shape, offset=x.offset + change)]
        if name == "mul" or (name == "div" and inputs[0] is x):
            factor = self.labelled(operand, with_line(eqn))
            if factor.is_plain:
                varies = x.varies | factor.varies
                return [dataclasses.replace(x, shape=shape, is_scaled=True, varies=varies)]
            if name == "mul":
                return [self._gained(eqn, factor, x)]
        return None

    def _viewed(self, eqn: Eqn, inputs: Sequence[Any], x: Parameter) -> Sequence[Any] | None:
        if eqn.primitive.name not in VIEWED:
            return [x]
        views = self.viewed(eqn, inputs, x)
        if views is None or not x.varies:
            return views
        varies = varies_of(eqn, [Rotatable.plain(x.shape, x.varies)])
        return [
            dataclasses.replace(view, varies=axes) for view, axes in zip(views, varies, strict=True)
        ]

    def _gained(self, eqn: Eqn, x: Rotatable, gain: Parameter) -> Rotatable:
        """Returns a value with its channels multiplied by a gain."""
        shape = eqn.outvars[0].aval.shape
        if not x.is_bare:
            reason = "two gains, or a gain of squares,"
            self.elsewhere.setdefault(gain.leaf_index, with_line(eqn, reason))
            return stop_at(self.constraints, eqn, [x], reason)[0]
        scaled(self.constraints, x, gain.varies, with_line(eqn, "a factor for each channel,"))
        gain_labels = self._labels(gain)
        self.use(gain.leaf_index, gain.elements)  # type: ignore[arg-type]
        self.constraints.stop(gain_labels, "it is a gain")
        aligned = np.broadcast_arrays(gain_labels, x.labels)
        pairs = np.unique(np.stack([y.ravel() for y in aligned]), axis=1)
        offset = self.offsets.setdefault(gain.leaf_index, gain.offset)
        if offset != gain.offset:
            reason = "a gain with another offset"
            self.elsewhere.setdefault(gain.leaf_index, with_line(eqn, reason))
            return stop_at(self.constraints, eqn, [x], reason)[0]
        self.gains.append((pairs[0], pairs[1]))
        return dataclasses.replace(x, gains=gain_labels, shape=shape)

    def _contraction(
        self, eqn: Eqn, inputs: Sequence[Any], address: Address, steps: Steps
    ) -> Rotatable:
        name, site = eqn.primitive.name, self.site_at(address)
        if site is not None:
            return self._site(site, eqn, inputs, address, steps)
        if name == "gather":
            return self._gather(eqn, inputs, address, steps)
        if name == "dot_general" and self._skipped(eqn, inputs, address, steps):
            return Rotatable.plain(eqn.outvars[0].aval.shape)
        values = [self.labelled(x, with_line(eqn)) for x in inputs]
        if name == "dot_general" and not all(x.is_plain for x in values):
            return product(self.constraints, eqn, values)
        return stop_at(self.constraints, eqn, values)[0]

    def _site(
        self, site: Site, eqn: Eqn, operands: Sequence[Any], address: Address, steps: Steps
    ) -> Rotatable:
        shape = eqn.outvars[0].aval.shape
        parts = observed_parts(site, self.items[site.address])
        (argnum,) = (i for i, x in enumerate(site.operands) if x.path is None)
        weight_operand, observed_site = site.operands[1 - argnum], parts[argnum].observed
        x, leaf = self.labelled(operands[argnum], site.name), operands[1 - argnum]
        if x.is_squared or (observed_site.patches is not None and observed_site.patches.groups > 1):
            self.constraints.stop(x.labels, with_line(eqn, "a square or groups of channels"))
            x = Rotatable.plain(x.shape)
        inputs, order, gains = channels_at(self.constraints, x, observed_site, site.name)
        weight_ids = self._elements.get(weight_operand.key) if isinstance(leaf, Parameter) else None
        where = leaf.leaf_index if isinstance(leaf, Parameter) else -1
        weight_steps, outputs = (), np.empty(0, np.int32)
        if address not in self._once:
            weight_ids = None
        if weight_ids is not None:
            batch, rows = weight_ids.shape[len(steps) : -2], weight_ids.shape[-2]
            inputs = np.broadcast_to(inputs, (*batch, inputs.shape[-1]))
            gains = None if gains is None else np.broadcast_to(gains, inputs.shape)
            weight_steps, outputs = steps, self.constraints.new(*batch, rows)
            self.use(where, weight_ids[steps])
        fields = site, steps, where, weight_ids, inputs, order, outputs, gains, x, observed_site
        self.reads.append(Read(*fields, weight_steps, reason=x.reason))
        if weight_ids is None:
            return Rotatable.plain(shape)
        if site.op == "ragged_dot":  # a row may go to any of the matrices
            for row_labels in outputs[1:]:
                self.constraints.join(outputs[0], row_labels, with_line(eqn))
            outputs = outputs[0]
        return Rotatable.of(Channels.of_result(eqn, 1 - argnum).spread(outputs, shape), shape)

    def _skipped(self, eqn: Eqn, operands: Sequence[Any], address: Address, steps: Steps) -> bool:
        """Adds a product with a parameter that is not a site of the full plan, such as a table that
        is also the head. Returns whether the equation is one.
        """
        item = self.items.get(address)
        parameter_argnums = [i for i, x in enumerate(operands) if isinstance(x, Parameter)]
        if item is None or len(parameter_argnums) != 1:
            return False
        x = self.labelled(operands[1 - parameter_argnums[0]], with_line(eqn))
        read = read_of_table(self.constraints, item, x, operands[parameter_argnums[0]], steps)
        if read is not None:
            self.reads.append(read)
        return read is not None

    def _gather(self, eqn: Eqn, inputs: Sequence[Any], address: Address, steps: Steps) -> Rotatable:
        source, indices = inputs
        is_table = isinstance(source, Parameter) and not source.varies and not source.offset
        if is_table and is_lookup_of_rows(eqn) and address in self.items:
            table_ids = source.elements
            if table_ids is None and self.is_whole(source):
                table_ids = self.numbers(source.leaf_index)
            if table_ids is not None:
                labels = self.constraints.new(source.shape[1])
                self.use(source.leaf_index, table_ids)
                table = Table(source.leaf_index, Elements.of(table_ids), labels)
                self.lookups.append(Lookup(address, steps, table, labels))
                return Rotatable.of(looked_up(eqn, labels), eqn.outvars[0].aval.shape)
        return gathered(self.constraints, eqn, self.labelled(source, with_line(eqn)), indices)

    def stopped(self, eqn: Eqn, inputs: Sequence[Any], reason: str = "") -> list[Any]:
        """Stops rotations of the operands of an equation that is not entered."""
        values = [self.labelled(x, with_line(eqn)) for x in inputs]
        return list(stop_at(self.constraints, eqn, values, reason))

    def joined(self, values: Sequence[Any], reason: str) -> Any:
        """Joins the labels of the results of branches."""
        rotatables = [self.labelled(x, reason) for x in values]
        return self._one(rotatables, [x.labels for x in rotatables], reason)

    def _one(self, values: Sequence[Rotatable], labels: Sequence[Array], reason: str) -> Rotatable:
        if not all(x.is_bare for x in values):
            for part_labels in labels:
                self.constraints.stop(part_labels, f"{reason} after a gain")
        joined = labels[0]
        for part_labels in labels[1:]:
            joined = self.constraints.join(joined, part_labels, reason)
        if all(x.is_plain for x in values):
            return Rotatable.plain(values[0].shape)
        return Rotatable.of(joined, values[0].shape)

    def stacked(self, rows: Sequence[Any]) -> Any:
        """Stacks the labels of the results of steps."""
        values = [self.labelled(x, "a result of a scan") for x in rows]
        full_shape = (len(rows), *values[0].shape)
        if all(x.is_plain for x in values):
            return Rotatable.plain(full_shape)
        if not all(x.is_bare for x in values):
            for x in values:
                self.constraints.stop(x.labels, "a result of a scan after a gain")
        shape = np.broadcast_shapes(*(x.labels.shape for x in values))
        return Rotatable.of(
            np.stack([np.broadcast_to(x.labels, shape) for x in values]), full_shape
        )

    def empty(self, shape: Sequence[int]) -> Any:
        """Returns a result of a scan without steps."""
        return Rotatable.plain(shape)

    def step_of(self, x: Any, i: int) -> Any:
        """Returns the labels in a step."""
        if isinstance(x, Parameter):
            return x.step_of(i)
        if x.is_plain:
            return Rotatable.plain(x.shape[1:], frozenset(axis - 1 for axis in x.varies if axis))
        gains = None if x.gains is None else row_of(x.gains, i)
        result = Rotatable.of(row_of(x.labels, i), x.shape[1:], gains)
        return dataclasses.replace(result, is_squared=x.is_squared and not result.is_plain)
