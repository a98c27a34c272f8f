"""The best assignments of a search: error against bytes."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..._checks import check_instance
from .._assignment import Assignment
from .._colors import ACCENT, COLORS
from ._canvas import SMALL, axes_for, tidy, titled


def front(found: Assignment, *, title: str | None = None, ax: Axes | None = None) -> Figure:
    """Draws the best assignments of `search`, and one scheme on all weights for comparison.

    Args:
      found: from `search`.
      title: title of the picture; `None` names its contents.
      ax: axes to draw in; `None` makes a figure.

    Returns:
      The figure of the metric against bytes, both logarithmic: the front (predicted), the
      assignment, and each candidate on all weights (measured).

    Raises:
      TypeError: if `found` is not a result of `search`, or `ax` is not axes.

    Example:
      >>> import jqx, jax
      >>> from jqx.diagnostics import Bytes, plots, search
      >>> w, f = jax.random.normal(jax.random.key(0), (16, 16)), lambda w, x: x @ w
      >>> ways = {f"int{n}": jqx.presets.w8a16(weight={"qtype": f"int{n}"}) for n in (8, 4)}
      >>> plots.front(search(f, ways["int8"], ways, Bytes(400))(w, w)).axes[0].get_xlabel()
      'bytes of the weights'
    """
    check_instance("plots.front", "found", found, Assignment, mend="pass the result of search.")
    figure, axis = axes_for("plots.front", ax, 7, 4.4)
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
    label = "one scheme for all, measured"
    for name, (size, error) in found.uniform.items():
        mark = axis.plot([size], [error], "x", color="black", mew=1.6, label=label)
        handles += mark if label else []
        label = ""
        axis.annotate(
            name, (size, error), xytext=(5, 5), textcoords="offset points", fontsize=SMALL
        )
    axis.set(xscale="log", yscale="log")
    axis.set_xlabel("bytes of the weights", fontsize=SMALL)
    axis.set_ylabel("metric", fontsize=SMALL)
    tidy(axis, "both")
    axis.tick_params(which="both", labelsize=SMALL)
    titled(axis, "error against bytes" if title is None else title, handles)
    return figure
