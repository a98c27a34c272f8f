"""Where the channels of a value meet a weight: contractions and lookups."""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from ..observers import ObservedSite
from ..transforms._shared import CONTRACTIONS, Address, Operand, Site
from ._channels import Table
from ._elements import Elements
from ._label_rules import channels_of
from ._labels import Array
from ._stages import Steps
from ._turns import Parameter, Turned, Turns


@dataclasses.dataclass(frozen=True)
class Read:
    """A contraction of a rotated value with a weight, in one step of the scans around it.

    Attributes:
      site: the site, of the plan of all that may be one.
      steps: the numbers of the steps.
      place: which leaf its weight is; -1 where it is none.
      places: which elements of it its matrices are, of all steps; `None` where it has another use,
        or is no plain matrix.
      inputs: labels of channels, [*batch, channels], in the order of the axes of the operand.
      order: their places in the order in which the site sums; `None` where it is that one.
      outputs: labels of rows, [*batch, rows]; where it cannot take rotations none.
      gains: labels of the gains of channels, [*batch, channels], 0 where there is none; or `None`.
      value: what stands for the operand: contractions of one value have the same object.
      about: what an observer is told of the operand.
      steps_of_places: the numbers of the steps by which `places` go.
      is_site: whether it is one of the plan of all; else its weight is looked up, too.
      why: its operand is not rotated, as far as it is known.
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
        """Where it is."""
        return self.site.address

    @property
    def labels(self) -> Array:
        """Labels of what is turned back where its weight cannot take a rotation."""
        return self.inputs

    @property
    def elements(self) -> Array:
        """Numbers of elements of its matrices, [*batch, rows, channels]; made anew."""
        found = self.summed
        return found if self.order is None else found[..., self.order]

    @property
    def summed(self) -> Array:
        """The same, channels in the order in which the site sums over them."""
        assert self.places is not None
        return self.places[self.steps_of_places]

    @property
    def channels(self) -> int:
        """How many channels there are, of all groups of a convolution one's."""
        assert self.places is not None
        patches = self.about.patches
        return self.places.shape[-1] // (1 if patches is None else math.prod(patches.kernel))


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A lookup of rows of a parameter.

    Attributes:
      address: where it is.
      steps: the numbers of the steps of scans around it.
      table: the parameter.
      made: labels of what is looked up.
    """

    address: Address
    steps: Steps
    table: Table
    made: Array

    @property
    def place(self) -> int:
        """Which leaf the parameter is."""
        return self.table.place

    @property
    def labels(self) -> Array:
        """Labels of what is rotated where the table cannot take a rotation."""
        return self.made


class Channels(NamedTuple):
    """Channels that a site sums over: labels, their order, and labels of gains, as `Read`."""

    inputs: Array
    order: Array | None
    gains: Array | None


def channels_at(turns: Turns, x: Turned, about: ObservedSite, name: str) -> Channels:
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
            first = turns.join(first, other, f"rows that {name} multiplies differ")
        labels = first
        if gains is not None and gains.shape[axis] > 1:
            turns.stop(labels, f"the gains of rows that {name} multiplies differ")
            gains = gains[(slice(None),) * axis + (slice(1),)]
    axes, order = sorted(about.contracted), None
    if axes != [*about.contracted]:
        sizes = [x.shape[axis] for axis in about.contracted]
        numbers = np.arange(math.prod(sizes)).reshape(sizes)
        order = numbers.transpose(np.argsort(about.contracted)).reshape(-1)
        about = dataclasses.replace(about, contracted=tuple(axes))
    inputs = channels_of(labels, x.shape, about)
    turns.cut_runs(inputs, f"the channels that {name} sums over")
    return Channels(inputs, order, None if gains is None else channels_of(gains, x.shape, about))


def read_of_table(turns: Turns, item: Any, x: Turned, leaf: Parameter, steps: Steps) -> Read | None:
    """Returns the product of a value and a parameter, such as a table that is the head, too; `None`
    where the parameter is no plain matrix.
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
    inputs, order, gains = channels_at(turns, x, about, item.path)
    whole = np.broadcast_to(leaf.elements, leaf.shape).transpose(*other.kept, *other.contracted)
    known = Elements.of(whole.reshape(-1, inputs.shape[-1]))
    own = inputs, order, np.empty(0, np.int32), gains
    return Read(site, steps, leaf.place, known, *own, x, about, is_site=False, why=x.why)
