"""Bars of weights and sites: signal-to-noise ratio, and cost of quantization."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..._checks import check_instance
from .._colors import ACCENT, COLORS, OTHERS
from .._comparison import Comparison
from .._names import cut, in_model_order, shortened
from .._report import Report
from .._schemes import short_scheme
from .._sensitivity import Sensitivities
from .._table import decibels
from ._canvas import SMALL, axes_for, check_some, tidy, titled
from ._rows import Rows, height_of

_WORST = 6
"""Number of bars with their value next to them, if there is no room for all."""

_MOST = 50
"""Number of costs with separate bars."""


def sqnr_bars(
    found: Comparison | Report, *, title: str | None = None, ax: Axes | None = None
) -> Figure:
    """Draws the signal-to-noise ratio of each site of a comparison, or of each weight of a report.

    Args:
      found: from `compare`: bars of the error of each site alone, with a line for the error
        accumulated up to it; or from `report`.
      title: title of the picture; `None` names its contents and the format.
      ax: axes to draw in; `None` makes a figure whose height grows with the bars, up to a limit.

    Returns:
      The figure: a bar for each row, the first at the top, in the order of the model. Colours show
      formats. Exact results have hatched bars. Results that are not a number have no bar, and a
      note. If there is no room for all names, layers and the worst rows are named.

    Raises:
      TypeError: if `found` is neither, or `ax` is not axes.
      ValueError: if there are no rows.

    Example:
      >>> import jqx, jax
      >>> from jqx.diagnostics import plots
      >>> w = jax.random.normal(jax.random.key(0), (16, 16))
      >>> found = jqx.compare(lambda w, x: x @ w, jqx.presets.w8a8_dynamic())(w, w)
      >>> plots.sqnr_bars(found).axes[0].get_xlabel()
      'SQNR, dB'
    """
    check_instance(
        "diagnostics.plots.sqnr_bars", "found", found, (Comparison, Report), fix="pass either."
    )
    given = _bars_of(found)
    check_some("diagnostics.plots.sqnr_bars", given)
    rows = [given[i] for i in in_model_order([row.name for row in given])]
    values = [row.value for row in rows]
    schemes = [row.scheme for row in rows]

    height = height_of(len(rows))
    figure, axis = axes_for("diagnostics.plots.sqnr_bars", ax, 8, height + 1.3)
    labels = Rows(axis, [row.name for row in rows], None if ax else 72 * height / len(rows))
    known = sorted(set(schemes), key=lambda scheme: (-schemes.count(scheme), scheme))
    colors = {scheme: COLORS[i] if i < len(COLORS) else OTHERS for i, scheme in enumerate(known)}
    drawn = _drawn(values)
    fills = [colors[x] for x in schemes]
    bars = axis.barh(range(len(rows)), drawn, color=fills, height=labels.thick, **labels.edges)
    for bar, value in zip(bars, values, strict=True):
        bar.set_hatch("////" if value == math.inf else "")
        bar.set_edgecolor("white" if value == math.inf else "none")
    handles: list[Any] = _schemes(known, schemes, colors) if len(known) > 1 else []
    if isinstance(found, Comparison):
        handles = handles or [Patch(color=COLORS[0], label="this site alone")]
        gathered = _drawn([row.gathered for row in rows])
        handles += axis.plot(
            gathered,
            range(len(rows)),
            "-o",
            color="black",
            markersize=max(1.0, min(3.5, 0.3 * labels.points)),
            lw=0.8,
            label="with all before it",
        )
    if any(value == math.inf for value in values):
        handles.append(Patch(facecolor=OTHERS, edgecolor="white", hatch="////", label="exact"))
    _values(axis, labels, values)
    tidy(axis)
    axis.set_xlabel("SQNR, dB", fontsize=SMALL)
    what = "site" if isinstance(found, Comparison) else "weight"
    plural = f"{len(rows)} {what}s" if len(rows) > 1 else f"one {what}"
    formats = f", {known[0]}" if len(known) == 1 and known[0] else ""
    titled(axis, f"SQNR of {plural}{formats}" if title is None else title, handles)
    return figure


def sensitivity_bars(
    found: Sensitivities, *, title: str | None = None, ax: Axes | None = None
) -> Figure:
    """Draws the cost of quantizing each weight, the worst at the top.

    Args:
      found: from `sensitivity`.
      title: title of the picture; `None` names the estimate.
      ax: axes to draw in; `None` makes a figure whose height grows with the bars.

    Returns:
      The figure: a bar for each of the worst 50, with its share of all costs. The share of all
      others together has no bar, which would make the others short.

    Raises:
      TypeError: if `found` is not a result of `sensitivity`, or `ax` is not axes.
      ValueError: if there are no rows.

    Example:
      >>> import jqx, jax
      >>> from jqx.diagnostics import plots, sensitivity
      >>> w, f = jax.random.normal(jax.random.key(0), (16, 16)), lambda w, x: x @ w
      >>> found = sensitivity(f, jqx.presets.w8a16(), estimate="weight_error")(w, w)
      >>> plots.sensitivity_bars(found).axes[0].get_title(loc="left")
      'cost of quantizing each weight (weight_error)'
    """
    fix = "pass the result of diagnostics.sensitivity."
    check_instance("diagnostics.plots.sensitivity_bars", "found", found, Sensitivities, fix=fix)
    check_some("diagnostics.plots.sensitivity_bars", found.ranked)
    ranked = found.ranked[:_MOST] if len(found.ranked) > _MOST + 1 else found.ranked
    rest = found.ranked[len(ranked) :]
    names, shared = shortened([row.name for row in ranked])
    costs = [row.cost for row in ranked]
    if rest:
        names.append(f"{len(rest)} others, together")
        costs.append(sum(row.cost for row in rest))
    height = height_of(len(names))
    figure, axis = axes_for("diagnostics.plots.sensitivity_bars", ax, 8, height + 1.1)
    labels = Rows(axis, names, None if ax else 72 * height / len(names), grouped=False)
    axis.barh(range(len(ranked)), costs[: len(ranked)], height=labels.thick, **labels.edges)
    whole = sum(row.cost for row in found.ranked if row.cost > 0) or 1.0
    for place, cost in enumerate(costs if labels.each else costs[:1]):
        _at_right(axis, place, f"{100 * cost / whole:.1f} %", labels.size)
    if shared:
        axis.set_ylabel(shared, fontsize=SMALL, color="#6a6a6a")
    tidy(axis)
    axis.set_xlabel("cost, in units of the metric; at the right the share of all", fontsize=SMALL)
    text = f"cost of quantizing each weight ({found.estimate})"
    if found.everything is not None:
        text += f"; all of them: {found.everything:.3g}"
    titled(axis, text if title is None else title)
    return figure


class _Bar(NamedTuple):
    """A bar: its name, its length, the format, and the position of the line."""

    name: str
    value: float
    scheme: str
    gathered: float


def _bars_of(found: Comparison | Report) -> list[_Bar]:
    """Returns the bars of a comparison, or of a report, which has no line."""
    if isinstance(found, Comparison):
        return [_Bar(x.name, x.local_sqnr, short_scheme(x.scheme), x.sqnr) for x in found.sites]
    return [_Bar(x.path, x.sqnr, short_scheme(x.scheme), math.nan) for x in found.weights]


def _schemes(known: Sequence[str], schemes: Sequence[str], colors: dict[str, str]) -> list[Any]:
    """Returns the legend of formats."""
    own = known if len(known) <= len(COLORS) + 1 else known[: len(COLORS)]
    handles = [Patch(color=colors[x], label=f"{x} ({schemes.count(x)})") for x in own]
    if rest := len(known) - len(own):
        count = sum(scheme not in own for scheme in schemes)
        handles.append(Patch(color=OTHERS, label=f"{rest} other formats ({count})"))
    return handles


def _values(axis: Axes, labels: Rows, values: Sequence[float]) -> None:
    """Writes values at the right of the rows: all if there is room, otherwise the worst with their
    names.
    """
    places: Sequence[int] = range(len(values))
    if not labels.each:
        ranked = sorted(places, key=lambda i: (not math.isnan(values[i]), values[i]))
        places = [i for i in ranked if values[i] != math.inf][:_WORST]
    taken: list[int] = []
    for place in places:
        if any(abs(place - other) * labels.points < labels.size for other in taken):
            continue
        taken.append(place)
        text = "not a number" if math.isnan(values[place]) else decibels(values[place])
        if labels.each:
            _at_right(axis, place, text, labels.size)
        else:
            _at_right(axis, place, f"{text}  {cut(labels.within(place), 26)}", 6.5, ACCENT)


def _at_right(axis: Axes, place: float, text: str, size: float, color: str = "#404040") -> None:
    axis.annotate(
        text,
        (1.0, place),
        xycoords=axis.get_yaxis_transform(),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=size,
        color=color,
        annotation_clip=False,
    )


def _drawn(values: Sequence[float]) -> np.ndarray:
    """Returns values to draw: infinite values, of exact results, become the largest other value, or
    one if there is none; no signal becomes the smallest value.
    """
    array = np.array(values, float)
    finite = array[np.isfinite(array)]
    exact = finite.max(initial=0.0) or 1.0
    return np.where(
        array == np.inf, exact, np.where(array == -np.inf, finite.min(initial=0), array)
    )
