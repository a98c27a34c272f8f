"""Horizontal rows, the first at the top, with names that stay readable for any number of rows."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from .._names import Group, cut, groups_of, shortened, within
from ._canvas import SMALL

_ROW = 0.21
"""Height of a row in inches, if there are few."""

_TALLEST = 15.0
"""Height of all rows in inches, if there are many."""

_READABLE = 6.5
"""Minimum distance of labels in points."""


def height_of(count: int) -> float:
    """Returns the height of `count` rows in inches."""
    return max(2, min(count * _ROW, _TALLEST))


class Rows:
    """Names at the left of horizontal rows.

    If there is room, each row has its name, without the part that it shares with the row above.
    Otherwise each group of rows has a name, or every n-th row. The part that all names share is
    next to the axis.

    Attributes:
      names: names without the parts that all share.
      groups: consecutive rows that belong together, such as layers.
      points: height of a row.
      each: whether every row has a label.
      size: font size of labels, in points.
      thick: thickness of bars, in rows: they touch if rows are thin.
      edges: arguments for the edges of bars, so that these show no seams.
    """

    def __init__(
        self,
        axis: Axes,
        names: Sequence[str],
        points: float | None = None,
        *,
        grouped: bool = True,
    ) -> None:
        self._axis = axis
        self.names, self._shared = shortened([name or "(argument)" for name in names])
        alone = [Group("", i, i + 1) for i in range(len(names))]
        self.groups = groups_of(self.names) if grouped else alone
        own = 72 * axis.bbox.height / axis.figure.dpi / len(names)
        self.points = own if points is None else points
        self.each = self.points >= _READABLE
        self.size = max(5.5, min(SMALL, 0.85 * self.points)) if self.each else 7.0
        self.thick = 0.8 if self.points > 2.5 else 1.0
        self.edges: dict[str, Any] = {"snap": False, "antialiased": self.points > 2.5}
        self._label()

    def within(self, place: int) -> str:
        """Returns the name of a row in its group."""
        group = next(x for x in self.groups if x.start <= place < x.stop)
        return within(self.names[place], group.name) if _several(group) else self.names[place]

    def _label(self) -> None:
        axis, count = self._axis, len(self.names)
        note = ""
        if self.each:
            places, texts = list(range(count)), self._dittos()
        elif len(self.groups) <= 0.6 * count:
            chosen = self._fitting()
            places = [(group.start + group.stop - 1) / 2 for group in chosen]
            texts = [group.name if _several(group) else self.names[group.start] for group in chosen]
            note = f"{count} rows in groups"
        else:
            step = int(-(-_READABLE // self.points))
            places = list(range(0, count, step))
            texts = [self.names[i] for i in range(0, count, step)]
            note = f"{count} rows, one of {step} with its name"
        axis.set_yticks(places, list(map(cut, texts)), fontsize=self.size)
        axis.tick_params(axis="y", length=0 if self.each else 2)
        axis.set_ylim(count - 0.4, -0.6)
        beside = "; ".join(filter(None, [self._shared, note]))
        if beside:
            axis.set_ylabel(beside, fontsize=SMALL, color="#6a6a6a")
        several = [group for group in self.groups if _several(group)]
        for group in several[::2] if len(several) > 1 else []:
            axis.axhspan(
                group.start - 0.5, group.stop - 0.5, color="#8a8a8a", alpha=0.13, lw=0, zorder=-1
            )

    def _dittos(self) -> list[str]:
        """Returns the name of each row; in a group, only the first one in full."""
        texts = list(self.names)
        for group in self.groups:
            for i in range(group.start + 1, group.stop):
                texts[i] = within(self.names[i], group.name)
        return texts

    def _fitting(self) -> list[Group]:
        """Returns groups whose names do not overlap, large groups first."""
        chosen: list[Group] = []
        for group in sorted(self.groups, key=lambda group: group.start - group.stop):
            middle = group.start + group.stop
            if all(abs(middle - x.start - x.stop) / 2 * self.points > self.size for x in chosen):
                chosen.append(group)
        return sorted(chosen, key=lambda group: group.start)


def _several(group: Group) -> bool:
    return group.stop - group.start > 1
