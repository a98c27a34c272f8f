"""Contractions and lookups: where the channels of a value meet a weight."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..observers import ObservedSite
from ..transforms import Operand, Site
from ..transforms._shared import CONTRACTIONS, Address
from ._elements import Elements
from ._label_rules import channels_of
from ._labels import Array
from ._rotatable import BlockConstraints, Parameter, Rotatable
from ._stages import Steps


@dataclasses.dataclass(frozen=True)
class Read:
    """A contraction of a rotated value with a weight, in one step of the scans around it.

    Attributes:
      site: the site, of the plan of everything that may be a site.
      steps: the numbers of the steps.
      place: the index of the leaf of its weight; -1 if it is not a leaf.
      places: which elements of the leaf its matrices hold, over all steps; `None` if the leaf has
        another use, or is not a plain matrix.
      inputs: labels of channels, [*batch, channels], in the order of the axes of the operand.
      order: their positions in the order in which the site sums; `None` if that is the same.
      outputs: labels of rows, [*batch, rows]; empty if it cannot take rotations.
      gains: labels of the gains of channels, [*batch, channels], 0 if there is none; or `None`.
      value: identifies the operand: contractions of one value have the same object.
      about: what observers get to know about the operand.
      steps_of_places: the numbers of the steps that `places` depend on.
      is_site: whether it is a site of the full plan; otherwise its weight is also looked up.
      why: why its operand is not rotated, if known.
    """

    site: Site
    steps: Steps
    place: int
    places: Elements | None
    inputs: Array
    order: Array | None
    outputs: Array
    gains: Array | None
    value: object
    about: ObservedSite
    steps_of_places: Steps = ()
    is_site: bool = True
    why: str = ""

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
        found = self.summed
        return found if self.order is None else found[..., self.order]

    @property
    def summed(self) -> Array:
        """The same, with channels in the order in which the site sums over them."""
        assert self.places is not None
        return self.places[self.steps_of_places]

    @property
    def channels(self) -> int:
        """The number of channels; for a convolution, those of one group."""
        assert self.places is not None
        patches = self.about.patches
        return self.places.shape[-1] // (1 if patches is None else math.prod(patches.kernel))


@dataclasses.dataclass(frozen=True)
class Table:
    """A parameter whose rows are looked up.

    Attributes:
      place: the index of the leaf.
      elements: the numbers of its elements, [rows, columns].
      labels: labels of its columns.
    """

    place: int
    elements: Elements
    labels: Array


def different(tables: Iterable[Table]) -> list[Table]:
    """Returns one table of each set of tables that are the same view of one leaf."""
    found: list[Table] = []
    for x in tables:
        if not any(x.place == y.place and x.elements.equals(y.elements) for y in found):
            found.append(x)
    return found


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A lookup of rows of a parameter.

    Attributes:
      address: the address of the lookup.
      steps: the numbers of the steps of scans around it.
      table: the parameter.
      made: labels of the result.
    """

    address: Address
    steps: Steps
    table: Table
    made: Array

    @property
    def place(self) -> int:
        """The index of the leaf of the parameter."""
        return self.table.place

    @property
    def labels(self) -> Array:
        """Labels of what is rotated if the table cannot take a rotation."""
        return self.made


class Channels(NamedTuple):
    """Channels that a site sums over: labels, their order, and labels of gains, as in `Read`."""

    inputs: Array
    order: Array | None
    gains: Array | None


def channels_at(
    constraints: BlockConstraints, x: Rotatable, about: ObservedSite, name: str
) -> Channels:
    """Returns the channels that a site sums over."""
    if about.patches is not None:
        own = {about.patches.axes.lhs_spec[1]}
        about = dataclasses.replace(about, patches=None, contracted=(*own,))
    else:
        own = {*about.contracted, *about.batch}
    labels, gains = x.labels, x.gains
    for axis in (axis for axis in range(len(x.shape)) if axis not in own):
        first = labels[(slice(None),) * axis + (slice(1),)]
        for i in range(1, labels.shape[axis]):
            other = labels[(slice(None),) * axis + (slice(i, i + 1),)]
            first = constraints.join(first, other, f"rows that {name} multiplies differ")
        labels = first
        if gains is not None and gains.shape[axis] > 1:
            constraints.stop(labels, f"the gains of rows that {name} multiplies differ")
            gains = gains[(slice(None),) * axis + (slice(1),)]
    axes, order = sorted(about.contracted), None
    if axes != [*about.contracted]:
        sizes = [x.shape[axis] for axis in about.contracted]
        numbers = np.arange(math.prod(sizes)).reshape(sizes)
        order = numbers.transpose(np.argsort(about.contracted)).reshape(-1)
        about = dataclasses.replace(about, contracted=tuple(axes))
    inputs = channels_of(labels, x.shape, about)
    constraints.cut_runs(inputs, f"the channels that {name} sums over")
    return Channels(inputs, order, None if gains is None else channels_of(gains, x.shape, about))


def read_of_table(
    constraints: BlockConstraints, item: Any, x: Rotatable, leaf: Parameter, steps: Steps
) -> Read | None:
    """Returns the product of a value and a parameter, such as a table that is also the head; `None`
    if the parameter is not a plain matrix.
    """
    places = [i for i, origin in enumerate(item.origins) if origin is not None]
    if leaf.elements is None or leaf.is_scaled or leaf.offset or x.is_squared or len(places) != 1:
        return None
    axes = CONTRACTIONS[item.eqn.primitive.name].axes(item.eqn)
    own, other = axes[1 - places[0]], axes[places[0]]
    if other.batch:
        return None
    operands = tuple(
        Operand(role, None, "", item.path if role == "weight" else None)
        for role in (("weight", "activation") if places[0] == 0 else ("activation", "weight"))
    )
    at = item.address, item.path, item.scope, item.op
    site = Site(*at, operands, None, "", 0, item.loops, (), (), None)
    about = ObservedSite(
        item.path, item.op, "lhs", "activation", True, own.contracted, own.kept, own.batch, None
    )
    inputs, order, gains = channels_at(constraints, x, about, item.path)
    whole = np.broadcast_to(leaf.elements, leaf.shape).transpose(*other.kept, *other.contracted)
    known = Elements.of(whole.reshape(-1, inputs.shape[-1]))
    own = inputs, order, np.empty(0, np.int32), gains
    return Read(site, steps, leaf.place, known, *own, x, about, is_site=False, why=x.why)
