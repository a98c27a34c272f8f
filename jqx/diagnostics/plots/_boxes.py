"""Box plots of the magnitudes in each tensor."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...tensor import QTensor
from .._colors import ACCENT, COLORS
from .._names import in_model_order
from ._canvas import SMALL, axes_for, check_some, tidy, titled
from ._rows import Rows, height_of


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
    height = height_of(len(names))
    figure, axis = axes_for("diagnostics.plots.ranges", ax, 8, height + 1.3)
    rows = Rows(axis, labels, None if ax else 72 * height / len(names))
    low, first, q1, median, q3, last, high = np.array(boxes, float).T
    places = np.arange(len(names))
    thick = min(1.4, 0.12 * rows.points)
    whiskers = axis.hlines(
        places, first, last, color="#505050", lw=thick, label="1st to 99th percentile"
    )
    box = axis.barh(
        places, q3 - q1, left=q1, height=0.62, color=COLORS[4], label="middle half (quartiles)"
    )
    (middle,) = axis.plot(
        median,
        places,
        "|",
        color="black",
        markersize=min(7.0, 0.6 * rows.points),
        mew=1.2,
        label="median",
    )
    size = max(1.5, min(4.0, 0.35 * rows.points))
    points = axis.plot(
        np.concatenate([low, high]),
        np.concatenate([places, places]),
        "o",
        color=ACCENT,
        markersize=size,
        mew=0,
        label="smallest and largest",
    )
    tidy(axis)
    axis.set_xlabel("value", fontsize=SMALL)
    count = f"{len(names)} weights" if len(names) > 1 else "one weight"
    handles = [box, whiskers, middle, *points]
    titled(axis, f"range of {count}" if title is None else title, handles)
    return figure
