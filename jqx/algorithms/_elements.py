"""Which elements of a weight a site multiplies by: their numbers, stored as a few integers if a
formula describes them.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..observers import places
from ..transforms import Plan
from ..transforms._shared import Call, Entry, contractions, observed_parts, places_of
from ._grids import Group

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Elements:
    """Numbers of elements, int32, that can be indexed like an array.

    Attributes:
      shape: [*steps, *batch, rows, columns].
      first: the number of the first element.
      strides: the increment of numbers along each axis; `None` if increments are not constant.
      table: the numbers, if increments are not constant.
    """

    shape: tuple[int, ...]
    first: int
    strides: tuple[int, ...] | None
    table: Array | None = None

    @classmethod
    def of(cls, numbers: Array) -> "Elements":
        """Returns numbers as a formula, if there is one. There is one for views of a weight."""
        numbers, shape = np.asarray(numbers), np.shape(numbers)
        if not numbers.size:
            return cls(shape, 0, (0,) * len(shape))
        origin = numbers[(0,) * len(shape)]
        strides = []
        for axis, size in enumerate(shape):
            second = (0,) * axis + (min(1, size - 1),) + (0,) * (len(shape) - axis - 1)
            strides.append(int(numbers[second] - origin))
        found = cls(shape, int(origin), tuple(strides))
        # Part by part, so that the whole array is not built a second time.
        even = all(
            np.array_equal(part, found[here])
            for here, part in zip(
                np.ndindex(shape[:-2]), numbers.reshape(-1, *shape[-2:]), strict=True
            )
        )
        return found if even else cls(shape, 0, None, np.array(numbers, np.int32))

    def equals(self, other: "Elements") -> bool:
        """Whether others are the same numbers in the same order."""
        same = (self.shape, self.first, self.strides) == (other.shape, other.first, other.strides)
        return same and np.array_equal(self.table, other.table)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """The bytes that it holds."""
        return 0 if self.table is None else self.table.nbytes

    def __getitem__(self, index: tuple[int, ...]) -> Array:
        """Returns the numbers at an index of the first axes."""
        if self.strides is None:
            assert self.table is not None
            return self.table[index]
        known = len(index)
        start = self.first + sum(i * by for i, by in zip(index, self.strides, strict=False))
        found = np.full(self.shape[known:], start, np.int32)
        for axis in range(known, len(self.shape)):
            own = np.arange(self.shape[axis], dtype=np.int32) * np.int32(self.strides[axis])
            found += own.reshape([-1 if i == axis else 1 for i in range(known, len(self.shape))])
        return found


def elements_of_sites(plan: Plan, call: Call, groups: Sequence[Group]) -> dict[str, Elements]:
    """Returns which elements of its group each site multiplies by, by the key of its operand. They
    are computed site by site, from shapes alone.
    """
    items = {item.address: item for item in contractions(call) if item.address}
    of_path: dict[str | None, Group] = {path: group for group in groups for path in group.sizes}
    entries = [
        Entry(part.key, site, places, part)
        for site in plan.sites
        for part in observed_parts(site, items[site.address])
        if places.looks_at(part.about)
    ]
    known, found = places_of(plan, call, entries), {}
    for entry in entries:
        if entry.key in known:
            group = of_path[entry.site.operands[entry.part.place].path]
            own = np.asarray(known[entry.key]())
            numbers = group.numbers(plan.weights_in(entry.site), own)
            found[entry.key] = Elements.of(numbers)
    return found
