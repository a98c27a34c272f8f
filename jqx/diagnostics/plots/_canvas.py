"""Axes to draw in, and legends above them."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from ..._checks import check_instance
from ..._errors import fail

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


def check_some(function: str, given: Any) -> None:
    """Checks that there is something to draw."""
    if not len(given) > 0:
        raise fail(
            function,
            "there is nothing to draw.",
            given="nothing",
            expected="one or more",
            fix="pass one or more items.",
        )


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
    each = max(widths)
    return max(1, min(len(names), int(width // each)))
