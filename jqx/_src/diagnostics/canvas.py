"""Axes to draw in, and legends above them."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from ..checks import check_instance
from ..errors import fail
from .page import Group, cut, groups_of, shortened, within

SMALL = 8.0
"""Font size in points of text other than titles."""

_LINE = 15.0
"""Height in points of a line of a legend."""


class Picture(Figure):
    """A figure that a notebook shows as a picture, even if pyplot was never imported."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", bbox_inches="tight")
        return out.getvalue()


def axes_for(function: str, ax: Axes | None, width: float, height: float) -> tuple[Figure, Axes]:
    """Returns axes and their figure: the given ones, or new ones of a size in inches."""
    if ax is None:
        figure = Picture(figsize=(width, height), layout="constrained")
        return figure, figure.subplots()
    fix = "pass axes, such as figure.subplots(), or leave ax= out."
    check_instance(function, "ax", ax, Axes, fix=fix)
    figure: Any = ax.figure
    return figure if isinstance(figure, Figure) else figure.figure, ax


def check_some(function: str, items: Any) -> None:
    """Checks that there is something to draw."""
    if len(items) == 0:
        raise fail(function, "there is nothing to draw.", fix="pass one or more items.")


def tidy(axis: Axes, grid: str = "x") -> None:
    """Draws thin grid lines, and a frame only at the bottom and on the left."""
    axis.set_axisbelow(True)
    axis.grid(axis=grid, color="#8a8a8a", alpha=0.3, lw=0.6)  # pyright: ignore
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="x", labelsize=SMALL)


def titled(axis: Axes, title: str, handles: Sequence[Any] = (), lift: float = 0.0) -> None:
    """Sets the title, and a legend of labelled artists between it and the axes.

    Args:
      axis: the axes.
      title: text at the top.
      handles: artists for the legend.
      lift: height in points of tick labels at the top.
    """
    named = [handle for handle in handles if handle is not None]
    if not named:
        axis.set_title(title, fontsize=10, y=1.0, pad=6 + lift, loc="left")
        return
    names = [str(handle.get_label()) for handle in named]
    root = axis.get_figure(root=True)
    if isinstance(root, Figure) and root.get_layout_engine() is not None:
        axis.set_title(title, fontsize=10, loc="left")
        root.draw_without_rendering()  # long names at the left make axes narrower
    columns = _columns(names, 72 * axis.bbox.width / axis.figure.dpi)
    rows = -(-len(names) // columns)
    axis.legend(
        named,
        names,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        bbox_transform=axis.transAxes
        + ScaledTranslation(0, (2 + lift) / 72, axis.figure.dpi_scale_trans),  # pyright: ignore
        borderaxespad=0.0,
        borderpad=0.2,
        ncols=columns,
        fontsize=SMALL,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.4,
    )
    axis.set_title(title, fontsize=10, y=1.0, pad=8 + lift + _LINE * rows, loc="left")


def _columns(names: Sequence[str], width: float) -> int:
    """Returns the number of columns of a legend that fit a width in points."""
    widths = [(0.58 * len(name) + 3.9) * SMALL for name in names]
    if sum(widths) <= width:
        return len(names)
    widest = max(widths)
    return max(1, min(len(names), int(width // widest)))


# Horizontal rows, the first at the top, with names that stay readable for any number of rows.

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
        single_rows = [Group("", i, i + 1) for i in range(len(names))]
        self.groups = groups_of(self.names) if grouped else single_rows
        row_points = 72 * axis.bbox.height / axis.figure.dpi / len(names)
        self.points = row_points if points is None else points
        self.each = self.points >= _READABLE
        self.size = max(5.5, min(SMALL, 0.85 * self.points)) if self.each else 7.0
        self.thick = 0.8 if self.points > 2.5 else 1.0
        self.edges: dict[str, Any] = {"snap": False, "antialiased": self.points > 2.5}
        self._label()

    def within(self, row: int) -> str:
        """Returns the name of a row in its group."""
        group = next(x for x in self.groups if x.start <= row < x.stop)
        return within(self.names[row], group.name) if _several(group) else self.names[row]

    def _label(self) -> None:
        axis, count = self._axis, len(self.names)
        note = ""
        if self.each:
            positions, texts = list(range(count)), list(self.names)
            for group in self.groups:  # only the first name of a group in full
                for i in range(group.start + 1, group.stop):
                    texts[i] = within(self.names[i], group.name)
        elif len(self.groups) <= 0.6 * count:
            groups: list[Group] = []  # whose names do not overlap, large groups first
            for group in sorted(self.groups, key=lambda group: group.start - group.stop):
                middle = group.start + group.stop
                if all(
                    abs(middle - x.start - x.stop) / 2 * self.points > self.size for x in groups
                ):
                    groups.append(group)
            groups.sort(key=lambda group: group.start)
            positions = [(group.start + group.stop - 1) / 2 for group in groups]
            texts = [group.name if _several(group) else self.names[group.start] for group in groups]
            note = f"{count} rows in groups"
        else:
            step = int(-(-_READABLE // self.points))
            positions = list(range(0, count, step))
            texts = [self.names[i] for i in range(0, count, step)]
            note = f"{count} rows, one of {step} with its name"
        axis.set_yticks(positions, list(map(cut, texts)), fontsize=self.size)
        axis.tick_params(axis="y", length=0 if self.each else 2)
        axis.set_ylim(count - 0.4, -0.6)
        label = "; ".join(filter(None, [self._shared, note]))
        if label:
            axis.set_ylabel(label, fontsize=SMALL, color="#6a6a6a")
        several = [group for group in self.groups if _several(group)]
        for group in several[::2] if len(several) > 1 else []:
            axis.axhspan(
                group.start - 0.5, group.stop - 0.5, color="#8a8a8a", alpha=0.13, lw=0, zorder=-1
            )


def _several(group: Group) -> bool:
    return group.stop - group.start > 1
