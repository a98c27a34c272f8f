"""A heat map: the error of each site under several schemes."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ..._errors import fail
from .._comparison import Comparison
from .._names import in_model_order
from .._table import decibels
from ._canvas import SMALL, axes_for, check_some, titled
from ._rows import Rows, height_of

_CELL = 0.8
"""Width of a column in inches."""

_NUMBER = 25.0
"""Font size of a number in points."""


def heat_map(
    found: Mapping[str, Comparison], *, title: str | None = None, ax: Axes | None = None
) -> Figure:
    """Draws the error of each site alone under several schemes.

    Args:
      found: comparisons of one function, by the name of the scheme.
      title: title of the picture; `None` names its contents.
      ax: axes to draw in; `None` makes a figure whose size grows with the sites and schemes, up to
        a limit.

    Returns:
      The figure: a row for each site, the first at the top, and a column for each scheme; dark is
      bad. Cells show their number if it fits, and `exact` if there is no error. They are hatched if
      a site never ran, or a result is not a number.

    Raises:
      TypeError: if `ax` is not axes.
      ValueError: if there are no comparisons, or they have different sites.

    Example:
      >>> import jqx, jax
      >>> from jqx.diagnostics import plots
      >>> w, f = jax.random.normal(jax.random.key(0), (16, 16)), lambda w, x: x @ w
      >>> ways = {"w8a16": jqx.presets.w8a16(), "w4a16": jqx.presets.w4a16(block=8)}
      >>> found = {name: jqx.compare(f, policy)(w, w) for name, policy in ways.items()}
      >>> [label.get_text() for label in plots.heat_map(found).axes[0].get_xticklabels()]
      ['w8a16', 'w4a16']
    """
    check_some("diagnostics.plots.heat_map", found)
    names = [[row.name for row in comparison.sites] for comparison in found.values()]
    if not all(own == names[0] for own in names):
        raise fail(
            "diagnostics.plots.heat_map",
            "the comparisons have different sites.",
            given=f"{', '.join(str(len(own)) for own in names)} sites",
            expected="the same sites in each",
            fix="compare one function under policies that quantize the same contractions.",
        )
    check_some("diagnostics.plots.heat_map", names[0])
    order = in_model_order(names[0])
    values = np.array([[c.sites[i].local_sqnr for c in found.values()] for i in order], float)
    finite = values[np.isfinite(values)]
    ends = (finite.min(initial=np.inf), finite.max(initial=-np.inf)) if finite.size else (0, 1)
    drawn = np.clip(values, *ends)

    height, width = height_of(len(order)), max(2.0, min(_CELL * len(found), 12))
    figure, axis = axes_for("diagnostics.plots.heat_map", ax, width + 3.6, height + 1.0)
    axis.set_facecolor("#d8d8d8")
    image = axis.imshow(np.ma.masked_invalid(drawn), aspect="auto", cmap="viridis")
    rows = Rows(axis, [names[0][i] for i in order], None if ax else 72 * height / len(order))
    across = 72 * (axis.bbox.width / axis.figure.dpi if ax else width) / len(found)
    if rows.each and across >= _NUMBER:
        _numbers(axis, values, drawn, ends, min(SMALL, rows.size))
    for i, j in np.argwhere(np.isnan(values)):
        cell = Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="////", lw=0)
        axis.add_patch(cell)
    longest = max(map(len, map(str, found))) * 0.6 * SMALL
    slanted = longest > across
    axis.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, labelsize=SMALL)
    axis.set_xticks(range(len(found)), list(found))
    if slanted:
        for label in axis.get_xticklabels():
            label.set(rotation=40, ha="left", rotation_mode="anchor")
    axis.tick_params(axis="both", length=0)
    axis.spines[:].set_visible(False)
    axis.set_ylim(len(order) - 0.5, -0.5)
    bar = figure.colorbar(image, ax=axis, shrink=min(1.0, 4.0 / height), anchor=(0, 1), pad=0.02)
    bar.set_label("SQNR, dB", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    bar.outline.set_visible(False)  # pyright: ignore
    lift = 0.65 * longest + SMALL if slanted else 2 * SMALL
    never = Patch(facecolor="#d8d8d8", hatch="////", label="never ran, or not a number")
    handles = [never] if np.isnan(values).any() else []
    titled(axis, "SQNR of each site alone, dB" if title is None else title, handles, lift)
    return figure


def _numbers(
    axis: Axes, values: np.ndarray, drawn: np.ndarray, ends: tuple[float, float], size: float
) -> None:
    """Writes numbers into cells: light on dark, dark on light."""
    for (i, j), value in np.ndenumerate(values):
        bright = (drawn[i, j] - ends[0]) / ((ends[1] - ends[0]) or 1.0)
        if np.isnan(value):
            continue
        color = "black" if bright > 0.55 else "white"
        axis.text(j, i, decibels(value), ha="center", va="center", color=color, fontsize=size)
