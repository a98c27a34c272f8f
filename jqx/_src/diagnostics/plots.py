"""Pictures of the effects of quantization: bars, boxes, a heat map, a histogram, a front."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ... import QTensor
from ...numerics import format_of
from ..checks import check_instance
from ..errors import fail
from ..table import decibels, size
from .compare import Comparison
from .report import (
    ACCENT,
    COLORS,
    OTHERS,
    Group,
    Report,
    color_of,
    cut,
    groups_of,
    in_model_order,
    in_steps,
    limits_of,
    scheme_of,
    short_scheme,
    shortened,
    within,
)
from .search import Assignment, Error, bytes_of
from .sensitivity import Sensitivities

# Axes to draw in, and legends above them.


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


def titled(
    axis: Axes, title: str, xlabel: str, handles: Sequence[Any] = (), grid: Any = "x"
) -> None:
    """Sets the title, the label of the x-axis and thin grid lines, and leaves a frame only at the
    bottom and on the left. A legend of labelled artists is between the title and the axes.
    """
    axis.set_axisbelow(True)
    axis.grid(axis=grid, color="#8a8a8a", alpha=0.3, lw=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="x", which="both", labelsize=SMALL)
    axis.set_xlabel(xlabel, fontsize=SMALL)
    if handles:
        above = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.3}
        axis.legend(handles=handles, ncols=2, fontsize=SMALL, frameon=False, **above)
    rows = -(-len(handles) // 2)
    axis.set_title(title, fontsize=10, loc="left", pad=8 + _LINE * rows)


# Horizontal rows, the first at the top, with names that stay readable for any number of rows.

_ROW = 0.21
"""Height of a row in inches, if there are few."""

_TALLEST = 15.0
"""Height of all rows in inches, if there are many."""

_READABLE = 6.5
"""Minimum distance of labels in points."""


class Rows:
    """Axes with names at the left of horizontal rows.

    If there is room, each row has its name, without the part that it shares with the row above.
    Otherwise each group of rows has a name, or every n-th row. The part that all names share is
    next to the axis.

    Attributes:
      figure: the figure.
      axis: the axes.
      height: height of all rows in inches, in a figure of their own.
      names: names without the parts that all share.
      groups: consecutive rows that belong together, such as layers.
      points: height of a row.
      each: whether every row has a label.
      size: font size of labels, in points.
      bars: arguments for bars: they touch and show no seams if rows are thin.
    """

    def __init__(
        self,
        function: str,
        names: Sequence[str],
        ax: Axes | None,
        *,
        margin: float = 1.3,
        width: float = 8.0,
        grouped: bool = True,
    ) -> None:
        self.height = max(2.0, min(len(names) * _ROW, _TALLEST))
        self.figure, self.axis = axes_for(function, ax, width, self.height + margin)
        inches = self.height if ax is None else ax.bbox.height / ax.figure.dpi
        self.points = 72 * inches / len(names)
        self.names, self._shared = shortened([name or "(argument)" for name in names])
        single_rows = [Group("", i, i + 1) for i in range(len(names))]
        self.groups = groups_of(self.names) if grouped else single_rows
        self.each = self.points >= _READABLE
        self.size = max(5.5, min(SMALL, 0.85 * self.points)) if self.each else 7.0
        is_thin = self.points <= 2.5
        self.bars: dict[str, Any] = {"height": 1.0 if is_thin else 0.8, "snap": False}
        self.bars["antialiased"] = not is_thin
        self._label()

    def within(self, row: int) -> str:
        """Returns the name of a row in its group."""
        group = next(x for x in self.groups if x.start <= row < x.stop)
        return within(self.names[row], group.name) if _several(group) else self.names[row]

    def _label(self) -> None:
        axis, count = self.axis, len(self.names)
        note = ""
        if self.each:
            positions, texts = list(range(count)), list(self.names)
            for group in self.groups:  # only the first name of a group in full
                for i in range(group.start + 1, group.stop):
                    texts[i] = within(self.names[i], group.name)
        elif len(self.groups) <= 0.6 * count:
            positions, texts = [], []
            for group in self.groups:
                middle = (group.start + group.stop - 1) / 2
                if not positions or (middle - positions[-1]) * self.points > self.size:
                    positions.append(middle)
                    texts.append(group.name if _several(group) else self.names[group.start])
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


_WORST = 6
"""Number of bars with their value next to them, if there is no room for all."""

_MOST_BARS = 50
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
    name = "diagnostics.plots.sqnr_bars"
    check_instance(name, "found", found, (Comparison, Report), fix="pass either.")
    if isinstance(found, Comparison):
        noun = "site"
        items = [(x.name, x.local_sqnr, short_scheme(x.scheme), x.sqnr) for x in found.sites]
    else:
        noun = "weight"
        items = [(x.path, x.sqnr, short_scheme(x.scheme), math.nan) for x in found.weights]
    check_some(name, items)
    order = in_model_order([row[0] for row in items])
    names, values, schemes, gathered = zip(*(items[i] for i in order), strict=True)
    labels = Rows(name, names, ax)
    axis = labels.axis
    formats = sorted(set(schemes), key=lambda scheme: (-schemes.count(scheme), scheme))
    colors = {scheme: color_of(i) for i, scheme in enumerate(formats)}
    fills = [colors[x] for x in schemes]
    bars = axis.barh(range(len(names)), _drawn(values), color=fills, **labels.bars)
    for bar, value in zip(bars, values, strict=True):
        bar.set_hatch("////" if value == math.inf else "")
        bar.set_edgecolor("white" if value == math.inf else "none")
    handles: list[Any] = _schemes(formats, schemes, colors) if len(formats) > 1 else []
    if isinstance(found, Comparison):
        handles = handles or [Patch(color=COLORS[0], label="this site alone")]
        handles += axis.plot(
            _drawn(gathered),
            range(len(names)),
            "-o",
            color="black",
            markersize=max(1.0, min(3.5, 0.3 * labels.points)),
            lw=0.8,
            label="with all before it",
        )
    if any(value == math.inf for value in values):
        handles.append(Patch(facecolor=OTHERS, edgecolor="white", hatch="////", label="exact"))
    _values(axis, labels, values)
    if title is None:
        plural = f"{len(names)} {noun}s" if len(names) > 1 else f"one {noun}"
        suffix = f", {formats[0]}" if len(formats) == 1 and formats[0] else ""
        title = f"SQNR of {plural}{suffix}"
    titled(axis, title, "SQNR, dB", handles)
    return labels.figure


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
    ranked = found.ranked[:_MOST_BARS] if len(found.ranked) > _MOST_BARS + 1 else found.ranked
    others = found.ranked[len(ranked) :]
    names, shared = shortened([row.name for row in ranked])
    costs = [row.cost for row in ranked]
    if others:
        names.append(f"{len(others)} others, together")
        costs.append(sum(row.cost for row in others))
    labels = Rows("diagnostics.plots.sensitivity_bars", names, ax, margin=1.1, grouped=False)
    axis = labels.axis
    axis.barh(range(len(ranked)), costs[: len(ranked)], **labels.bars)
    total = sum(row.cost for row in found.ranked if row.cost > 0) or 1.0
    for row, cost in enumerate(costs if labels.each else costs[:1]):
        _at_right(axis, row, f"{100 * cost / total:.1f} %", labels.size)
    if shared:
        axis.set_ylabel(shared, fontsize=SMALL, color="#6a6a6a")
    if title is None:
        title = f"cost of quantizing each weight ({found.estimate})"
        if found.everything is not None:
            title += f"; all of them: {found.everything:.3g}"
    titled(axis, title, "cost, in units of the metric; at the right the share of all")
    return labels.figure


def _schemes(formats: Sequence[str], schemes: Sequence[str], colors: dict[str, str]) -> list[Any]:
    """Returns the legend of formats."""
    listed = formats if len(formats) <= len(COLORS) + 1 else formats[: len(COLORS)]
    handles = [Patch(color=colors[x], label=f"{x} ({schemes.count(x)})") for x in listed]
    if unlisted := len(formats) - len(listed):
        count = sum(scheme not in listed for scheme in schemes)
        handles.append(Patch(color=OTHERS, label=f"{unlisted} other formats ({count})"))
    return handles


def _values(axis: Axes, labels: Rows, values: Sequence[float]) -> None:
    """Writes values at the right of the rows: all if there is room, otherwise the worst with their
    names.
    """
    positions: Sequence[int] = range(len(values))
    if not labels.each:
        ranked = sorted(positions, key=lambda i: (not math.isnan(values[i]), values[i]))
        positions = [i for i in ranked if values[i] != math.inf][:_WORST]
    taken: list[int] = []
    for row in positions:
        if any(abs(row - labelled_row) * labels.points < labels.size for labelled_row in taken):
            continue
        taken.append(row)
        text = "not a number" if math.isnan(values[row]) else decibels(values[row])
        if labels.each:
            _at_right(axis, row, text, labels.size)
        else:
            _at_right(axis, row, f"{text}  {cut(labels.within(row), 26)}", 6.5, ACCENT)


def _at_right(axis: Axes, row: float, text: str, size: float, color: str = "#404040") -> None:
    axis.annotate(
        text,
        (1.0, row),
        xycoords=axis.get_yaxis_transform(),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=size,
        color=color,
        annotation_clip=False,
    )


def _drawn(values: Any) -> np.ndarray:
    """Returns values to draw: infinite values, of exact results, become the largest other value, or
    one if there is none; no signal becomes the smallest value.
    """
    array = np.array(values, float)
    finite = array[np.isfinite(array)]
    exact = finite.max(initial=0.0) or 1.0
    return np.where(
        array == np.inf, exact, np.where(array == -np.inf, finite.min(initial=0), array)
    )


# Box plots of the magnitudes in each tensor.


def ranges(
    arrays: Mapping[str, Any], *, title: str | None = None, ax: Axes | None = None
) -> Figure:
    """Draws the distribution of several arrays, one below the other.

    Args:
      arrays: arrays by name, such as weights by path; QTensors are dequantized. Each is read when
        it is drawn.
      title: title of the picture; `None` names its contents.
      ax: axes to draw in; `None` makes a figure whose height grows with the arrays, up to a limit.

    Returns:
      The figure, with a box for each array, the first at the top: quartiles, whiskers from the 1st
      to the 99th percentile, and the smallest and largest value as points. An outlier is a point
      far from its whisker. Only finite values count; the name shows how many are not.

    Raises:
      TypeError: if `ax` is not axes.
      ValueError: if there are no arrays.

    Example:
      >>> import jax
      >>> from jqx.diagnostics import plots
      >>> w = jax.random.normal(jax.random.key(0), (64, 64))
      >>> [x.get_text() for x in plots.ranges({"a": w, "b": 2 * w}).axes[0].get_yticklabels()]
      ['a', 'b']
    """
    check_some("diagnostics.plots.ranges", arrays)
    names = list(arrays)
    names = [names[i] for i in in_model_order(names)]
    labels, boxes = [], []
    for name in names:
        x = arrays[name]
        values = np.asarray(x.dequantize() if isinstance(x, QTensor) else x, np.float32).ravel()
        finite = values[np.isfinite(values)]
        left_out = values.size - finite.size
        labels.append(f"{name} ({left_out:,} not finite)" if left_out else name)
        boxes.append(
            np.percentile(finite, [0, 1, 25, 50, 75, 99, 100]) if finite.size else [np.nan] * 7
        )
    rows = Rows("diagnostics.plots.ranges", labels, ax)
    axis = rows.axis
    low, percentile_1, q1, median, q3, percentile_99, high = np.array(boxes, float).T
    positions = np.arange(len(names))
    thick = min(1.4, 0.12 * rows.points)
    whiskers = axis.hlines(
        positions,
        percentile_1,
        percentile_99,
        color="#505050",
        lw=thick,
        label="1st to 99th percentile",
    )
    box = axis.barh(
        positions, q3 - q1, left=q1, height=0.62, color=COLORS[4], label="middle half (quartiles)"
    )
    (middle,) = axis.plot(
        median,
        positions,
        "|",
        color="black",
        markersize=min(7.0, 0.6 * rows.points),
        mew=1.2,
        label="median",
    )
    size = max(1.5, min(4.0, 0.35 * rows.points))
    points = axis.plot(
        np.concatenate([low, high]),
        np.concatenate([positions, positions]),
        "o",
        color=ACCENT,
        markersize=size,
        mew=0,
        label="smallest and largest",
    )
    count = f"{len(names)} weights" if len(names) > 1 else "one weight"
    handles = [box, whiskers, middle, *points]
    titled(axis, f"range of {count}" if title is None else title, "value", handles)
    return rows.figure


# The best assignments of a search: error against bytes.

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
    name = "diagnostics.plots.front"
    check_instance(name, "found", found, Assignment, fix="pass the result of search.")
    figure, axis = axes_for(name, ax, 7, 4.4)
    points = [point for point in found.front if point.error > 0]
    x, y = [point.bytes for point in points], [point.error for point in points]
    handles = axis.plot(x, y, "-", color=COLORS[0], label="best mixtures, predicted")
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
        budget_bytes = bytes_of(found.budget, 8 * found.bytes / found.bits)
        handles.append(axis.axvline(budget_bytes, color=ACCENT, lw=1, ls="--"))
    if found.budget is not None:
        handles[-1].set_label("the budget")
    x, y = zip(*found.uniform.values(), strict=True)
    label = "one scheme for all, measured"
    handles += axis.plot(x, y, "x", color="black", mew=1.6, label=label)
    offset: Any = {"xytext": (5, 5), "textcoords": "offset points"}
    for name, point in found.uniform.items():
        axis.annotate(name, point, fontsize=SMALL, **offset)
    axis.set(xscale="log", yscale="log")
    axis.margins(0.07, 0.09)
    low, high = axis.get_xlim()
    axis.xaxis.set_major_locator(
        LogLocator(subs=_DENSE if high < 10 * low else _SPARSE, numticks=50)
    )
    axis.xaxis.set_minor_formatter(NullFormatter())
    bits = found.bits / found.bytes
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{size(x)}\n{x * bits:.2g}"))
    axis.set_ylabel("metric", fontsize=SMALL)
    axis.tick_params(axis="y", which="both", labelsize=SMALL)
    xlabel = "bytes of the weights, and bits a weight, with scales"
    titled(axis, "error against bytes" if title is None else title, xlabel, handles, "both")
    return figure


# A heat map: the error of each site under several schemes.

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
    name = "diagnostics.plots.heat_map"
    check_some(name, found)
    names = [[row.name for row in comparison.sites] for comparison in found.values()]
    if not all(sites == names[0] for sites in names):
        counts = ", ".join(str(len(x)) for x in names)
        fix = "compare one function under policies that quantize the same contractions."
        raise fail(name, f"the comparisons have different sites, {counts}.", fix=fix)
    check_some(name, names[0])
    order = in_model_order(names[0])
    values = np.array([[c.sites[i].local_sqnr for c in found.values()] for i in order], float)
    width = max(2.0, min(_CELL * len(found), 12))
    rows = Rows(name, [names[0][i] for i in order], ax, margin=1.0, width=width + 3.6)
    axis = rows.axis
    axis.set_facecolor("#d8d8d8")
    drawn = np.ma.masked_invalid(_drawn(values))
    image = axis.imshow(drawn, aspect="auto", cmap="viridis")
    across = 72 * (axis.bbox.width / axis.figure.dpi if ax else width) / len(found)
    if rows.each and across >= _NUMBER:
        bright = np.asarray(image.norm(drawn))
        for (i, j), value in np.ndenumerate(values):
            if not np.isnan(value):
                color = "black" if bright[i, j] > 0.55 else "white"
                text = axis.text(j, i, decibels(value), color=color, ha="center", va="center")
                text.set_fontsize(min(SMALL, rows.size))
    for i, j in np.argwhere(np.isnan(values)):
        cell = Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="////", lw=0)
        axis.add_patch(cell)
    longest = max(map(len, map(str, found))) * 0.6 * SMALL
    slanted = {"rotation": 40, "ha": "left", "rotation_mode": "anchor"} if longest > across else {}
    axis.set_xticks(range(len(found)), list(found), fontsize=SMALL, **slanted)
    axis.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axis.spines[:].set_visible(False)
    axis.set_ylim(len(order) - 0.5, -0.5)
    shrink = min(1.0, 4.0 / rows.height)
    bar = rows.figure.colorbar(image, ax=axis, shrink=shrink, anchor=(0, 1), pad=0.02)
    bar.set_label("SQNR, dB", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    bar.outline.set_visible(False)  # pyright: ignore
    if np.isnan(values).any():
        never = Patch(facecolor="#d8d8d8", hatch="////", label="never ran, or not a number")
        below = {"loc": "upper left", "bbox_to_anchor": (0.0, 0.0)}
        axis.legend(handles=[never], fontsize=SMALL, frameon=False, **below)
    axis.set_title(
        "SQNR of each site alone, dB" if title is None else title, fontsize=10, loc="left"
    )
    return rows.figure


# A histogram of the values of a weight on its quantization grid.

_MOST_VALUES = 200_000
"""Maximum number of values of an array that are drawn."""


def histogram(
    x: Any, q: QTensor, *, title: str | None = None, bins: int = 160, ax: Axes | None = None
) -> Figure:
    """Draws the distribution of the values of a weight on its quantization grid.

    Args:
      x: the float array.
      q: the quantized array.
      title: title of the picture; `None` names the format.
      bins: bins of the histogram.
      ax: axes to draw in; `None` makes a figure.

    Returns:
      The figure: the distribution of `x / scale` (+ zero point), with each value in units of the
      scale of its group; the codes in use as lines; and the limits of the format if values reach
      them. Values are clipped as `report` counts them: half a step beyond the limits, or more.

    Raises:
      TypeError: if `q` is not a QTensor, or `ax` is not axes.
      ValueError: if the shapes differ.

    Example:
      >>> import jqx, jax
      >>> from jqx.diagnostics import plots
      >>> x = jax.random.normal(jax.random.key(0), (64, 64))
      >>> q = jqx.QTensor.quantize(x, jqx.QSpec("int4", jqx.per_axis(1)))
      >>> plots.histogram(x, q).axes[0].get_title(loc="left")
      'int4 per_axis(1)'
    """
    name = "diagnostics.plots.histogram"
    check_instance(name, "q", q, QTensor, fix="pass QTensor.quantize(x, spec).")
    if np.shape(x) != q.shape:
        problem = f"`x` and `q` have different shapes: {np.shape(x)} and {q.shape}."
        raise fail(name, problem, fix="pass the array that q was made from.")
    values = _some(in_steps(jnp.asarray(x), q))
    grid = np.unique(_some(in_steps(q.dequantize(), q)).round(4))
    form = format_of(q.qtype)
    figure, axis = axes_for(name, ax, 8, 3.6)
    axis.hist(values, bins=bins, color=COLORS[4])
    count = "values" if values.size == q.size else f"{values.size:,} of {q.size:,} values"
    handles: list[Any] = [Patch(color=COLORS[4], label=count)]
    listed = len(grid) <= 64
    codes = [axis.axvline(x, color="black", lw=0.6, alpha=0.6) for x in (grid if listed else [])]
    if codes:
        codes[0].set_label(f"the {len(grid)} codes in use")
        handles.append(codes[0])
    ends = [x for x in (form.low, form.high) if values.min(initial=0) <= x <= values.max(initial=0)]
    lines = [axis.axvline(x, color=ACCENT, lw=1.2, ls="--") for x in ends]
    if lines:
        low, high = limits_of(form)
        clipped = 100 * float(np.mean((values < low) | (values > high)))
        share = f"{clipped:.2g} % of values are" if clipped else "no value is"
        lines[0].set_label(f"ends of {form.name}: {share} clipped")
        handles.append(lines[0])
    codes_in_use = "" if listed else f"; {len(grid)} codes are in use"
    axis.set_ylabel("values", fontsize=SMALL)
    axis.tick_params(axis="y", labelsize=SMALL)
    title = short_scheme(scheme_of(q)) if title is None else title
    titled(axis, title, f"weight / scale{codes_in_use}", handles, "y")
    return figure


def _some(x: Any) -> np.ndarray:
    """Returns finite values of an array, evenly spread, at most as many as are drawn."""
    values = np.asarray(x, np.float32).ravel()
    values = values[:: max(1, -(-values.size // _MOST_VALUES))]
    return values[np.isfinite(values)]
