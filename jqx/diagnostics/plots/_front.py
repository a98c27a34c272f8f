"""The best assignments of a search: error against bytes."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ..._checks import check_instance
from .._assignment import Assignment
from .._budgets import Error, bytes_of
from .._colors import ACCENT, COLORS
from .._table import size
from ._canvas import SMALL, axes_for, tidy, titled

_DENSE, _SPARSE = (1, 1.5, 2, 3, 4, 6, 8), (1, 2, 5)
"""Ticks of a decade, where the axis has less than a decade, and more."""


def front(found: Assignment, *, title: str | None = None, ax: Axes | None = None) -> Figure:
    """Draws the best assignments of `search`, and one scheme on all weights for comparison.

    Args:
      found: from `search`.
      title: title of the picture; `None` names its contents.
      ax: axes to draw in; `None` makes a figure.

    Returns:
      The figure of the metric against bytes, both logarithmic: the front (predicted), the
      assignment, the budget, and each candidate on all weights (measured). Numbers below the axis
      are bytes and bits per weight, both with scales.

    Raises:
      TypeError: if `found` is not a result of `search`, or `ax` is not axes.

    Example:
      >>> import jqx, jax
      >>> from jqx.diagnostics import Bytes, plots, search
      >>> w, f = jax.random.normal(jax.random.key(0), (16, 16)), lambda w, x: x @ w
      >>> ways = {f"int{n}": jqx.presets.w8a16(weight={"qtype": f"int{n}"}) for n in (8, 4)}
      >>> plots.front(search(f, ways["int8"], ways, Bytes(400))(w, w)).axes[0].get_xlabel()
      'bytes of the weights, and bits a weight, with scales'
    """
    check_instance(
        "diagnostics.plots.front", "found", found, Assignment, fix="pass the result of search."
    )
    figure, axis = axes_for("diagnostics.plots.front", ax, 7, 4.4)
    points = [point for point in found.front if point.error > 0]
    handles = axis.plot(
        [p.bytes for p in points],
        [p.error for p in points],
        "-",
        color=COLORS[0],
        label="best mixtures, predicted",
    )
    handles += axis.plot(
        [found.bytes],
        [found.measured],
        "o",
        color=ACCENT,
        markersize=8,
        label="the one found, measured",
    )
    if isinstance(found.budget, Error):
        handles.append(axis.axhline(found.budget.limit, color=ACCENT, lw=1, ls="--"))
    elif found.budget is not None:
        most = bytes_of(found.budget, 8 * found.bytes / found.bits)
        handles.append(axis.axvline(most, color=ACCENT, lw=1, ls="--"))
    if found.budget is not None:
        handles[-1].set_label("the budget")
    label = "one scheme for all, measured"
    for name, (count, error) in found.uniform.items():
        mark = axis.plot([count], [error], "x", color="black", mew=1.6, label=label)
        handles += mark if label else []
        label = ""
        axis.annotate(
            name, (count, error), xytext=(5, 5), textcoords="offset points", fontsize=SMALL
        )
    axis.set(xscale="log", yscale="log")
    axis.margins(0.07, 0.09)
    _label_sizes(axis, found.bits / found.bytes)
    axis.set_xlabel("bytes of the weights, and bits a weight, with scales", fontsize=SMALL)
    axis.set_ylabel("metric", fontsize=SMALL)
    tidy(axis, "both")
    axis.tick_params(which="both", labelsize=SMALL)
    titled(axis, "error against bytes" if title is None else title, handles)
    return figure


def _label_sizes(axis: Axes, bits: float) -> None:
    """Labels the axis of bytes with units, and with bits per weight: `bits` for each byte."""
    low, high = axis.get_xlim()
    decade = _DENSE if high < 10 * low else _SPARSE
    axis.xaxis.set_major_locator(LogLocator(subs=decade, numticks=50))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{size(x)}\n{x * bits:.2g}"))
