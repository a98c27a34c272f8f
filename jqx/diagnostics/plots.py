"""Pictures of what quantization does. Each function returns a `matplotlib.figure.Figure` and shows
nothing; `figure.savefig("name.png")` writes it. Needs matplotlib, of the extra `examples`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from .._checks import check_instance, require_that
from ..numerics import format_of
from ..tensor import QTensor
from ._comparison import Comparison
from ._report import Report
from ._search import Assignment
from ._weights import in_steps

_MOST = 200_000
"""How many values of an array are drawn."""


def histogram(x: Any, q: QTensor, *, title: str = "", bins: int = 160) -> Figure:
    """Draws how the values of a weight lie on the grid that they are rounded to.

    Args:
      x: the float array.
      q: what became of it.
      title: of the picture.
      bins: of the histogram.

    Returns:
      A figure: the distribution of `x / scale` (+ zero point), each value in units of the scale of
      its own group, and the codes in use as lines.

    Raises:
      TypeError: `q` is no QTensor.
      ValueError: the shapes differ.

    Example:
      >>> import jqx, jax
      >>> from jqx.diagnostics import plots
      >>> x = jax.random.normal(jax.random.key(0), (64, 64))
      >>> plots.histogram(x, jqx.QTensor.quantize(x, jqx.QSpec("int4", jqx.per_axis(1)))).axes[0]
      <Axes: title={'center': 'int4'}, xlabel='weight / scale', ylabel='values'>
    """
    check_instance("plots.histogram", "q", q, QTensor, mend="pass QTensor.quantize(x, spec).")
    require_that(
        np.shape(x) == q.shape,
        error=ValueError,
        function="plots.histogram",
        problem="`x` and `q` have different shapes.",
        given=f"shapes {np.shape(x)} and {q.shape}",
        expected="equal shapes",
        mend="pass the array that q was made of.",
    )
    values = _some(in_steps(jnp.asarray(x), q))
    grid = np.unique(_some(in_steps(q.dequantize(), q)).round(4))
    form = format_of(q.qtype)
    figure, axis = _axis(8, 3.6)
    axis.hist(values, bins=bins, color="tab:blue", alpha=0.7)
    for code in grid if len(grid) <= 64 else []:
        axis.axvline(code, color="black", lw=0.5, alpha=0.5)
    for end in (form.low, form.high):
        if values.min(initial=0) <= end <= values.max(initial=0):
            axis.axvline(end, color="tab:red", lw=1.0)
    lines = "the lines are the codes" if len(grid) <= 64 else f"{len(grid)} codes are in use"
    axis.set(title=title or form.name, xlabel="weight / scale", ylabel="values")
    axis.text(0.99, 0.95, lines, transform=axis.transAxes, ha="right", va="top", fontsize=8)
    return figure


def ranges(arrays: Mapping[str, Any], *, title: str = "range of each weight") -> Figure:
    """Draws the distribution of several arrays side by side.

    Args:
      arrays: by name, such as weights by path.
      title: of the picture.

    Returns:
      A figure with a box for each array: quartiles, whiskers from the 1st to the 99th percentile,
      and the smallest and largest value as points: an outlier is a point far from its whisker.

    Example:
      >>> import jax
      >>> from jqx.diagnostics import plots
      >>> w = jax.random.normal(jax.random.key(0), (64, 64))
      >>> len(plots.ranges({"a": w, "b": 2 * w}).axes[0].get_xticklabels())
      2
    """
    _check_some("plots.ranges", arrays)
    figure, axis = _axis(max(4, 0.35 * len(arrays) + 2), 4)
    boxes = []
    for name, x in arrays.items():
        values = np.asarray(x, np.float32).ravel()
        q1, median, q3, low, high = np.percentile(values, [25, 50, 75, 1, 99])
        fliers = [values.min(), values.max()]
        stats = {"label": name, "med": median, "q1": q1, "q3": q3}
        boxes.append(stats | {"whislo": low, "whishi": high, "fliers": fliers})
    axis.bxp(boxes, flierprops={"marker": ".", "markersize": 4})
    axis.tick_params(axis="x", rotation=90, labelsize=7)
    axis.set(title=title, ylabel="value")
    return figure


def sqnr_bars(found: Comparison | Report, *, title: str = "signal to noise") -> Figure:
    """Draws the signal-to-noise ratio of each row of a comparison, or of each weight of a report.

    Args:
      found: from `compare`, whose bars are the error of a site alone, with a line for the error
        that has gathered up to it; or from `report`.
      title: of the picture.

    Example:
      >>> import jqx, jax
      >>> from jqx.diagnostics import plots
      >>> w = jax.random.normal(jax.random.key(0), (16, 16))
      >>> found = jqx.compare(lambda w, x: x @ w, jqx.presets.w8a8_dynamic())(w, w)
      >>> plots.sqnr_bars(found).axes[0].get_ylabel()
      'SQNR, dB'
    """
    check_instance("plots.sqnr_bars", "found", found, (Comparison, Report), mend="pass one.")
    _check_some("plots.sqnr_bars", found.sites if isinstance(found, Comparison) else found.weights)
    if isinstance(found, Comparison):
        names, bars = zip(*((row.name, row.local_sqnr) for row in found.sites), strict=True)
    else:
        names, bars = zip(*((row.path, row.sqnr) for row in found.weights), strict=True)
    figure, axis = _axis(max(4, 0.3 * len(names) + 2), 4)
    places = np.arange(len(names))
    axis.bar(places, _drawn(bars))
    if isinstance(found, Comparison):
        gathered = _drawn([row.sqnr for row in found.sites])
        axis.plot(places, gathered, "k.-", lw=0.8, label="gathered up to here")
        axis.legend(fontsize=8)
    axis.set_xticks(places, names, rotation=90, fontsize=7)
    axis.set(title=title, ylabel="SQNR, dB")
    return figure


def heat_map(found: Mapping[str, Comparison], *, title: str = "SQNR of each site, dB") -> Figure:
    """Draws the error of each site alone under several schemes.

    Args:
      found: comparisons of one function, by the name of the scheme.
      title: of the picture.

    Raises:
      ValueError: there is none, or they have different sites.

    Example:
      >>> import jqx, jax
      >>> from jqx.diagnostics import plots
      >>> w, f = jax.random.normal(jax.random.key(0), (16, 16)), lambda w, x: x @ w
      >>> ways = {"w8a16": jqx.presets.w8a16(), "w4a16": jqx.presets.w4a16(block=8)}
      >>> found = {name: jqx.compare(f, policy)(w, w) for name, policy in ways.items()}
      >>> [label.get_text() for label in plots.heat_map(found).axes[0].get_yticklabels()]
      ['w8a16', 'w4a16']
    """
    _check_some("plots.heat_map", found)
    names = [[row.name for row in comparison.sites] for comparison in found.values()]
    require_that(
        all(own == names[0] for own in names),
        error=ValueError,
        function="plots.heat_map",
        problem="the comparisons have different sites.",
        given=f"{', '.join(str(len(own)) for own in names)} sites",
        expected="the same sites in each",
        mend="compare one function under policies that quantize the same contractions.",
    )
    values = np.array([_drawn([row.local_sqnr for row in c.sites]) for c in found.values()])
    figure, axis = _axis(max(5, 0.3 * len(names[0]) + 3), 0.5 * len(found) + 2.5)
    image = axis.imshow(values, aspect="auto", cmap="RdYlGn")
    axis.set_xticks(np.arange(len(names[0])), names[0], rotation=90, fontsize=7)
    axis.set_yticks(np.arange(len(found)), list(found))
    axis.set(title=title)
    figure.colorbar(image, ax=axis, label="dB")
    return figure


def front(found: Assignment, *, title: str = "error against bytes") -> Figure:
    """Draws the best assignments of `search` beside one scheme on all weights.

    Args:
      found: from `search`.
      title: of the picture.

    Returns:
      A figure of the metric against bytes, both logarithmic: the front (predicted), the assignment
      and each candidate on all weights (measured).

    Example:
      >>> import jqx, jax
      >>> from jqx.diagnostics import Bytes, plots, search
      >>> w, f = jax.random.normal(jax.random.key(0), (16, 16)), lambda w, x: x @ w
      >>> ways = {f"int{n}": jqx.presets.w8a16(weight={"qtype": f"int{n}"}) for n in (8, 4)}
      >>> plots.front(search(f, ways["int8"], ways, Bytes(400))(w, w)).axes[0].get_xlabel()
      'bytes of the weights'
    """
    check_instance("plots.front", "found", found, Assignment, mend="pass what search returns.")
    figure, axis = _axis(6, 4)
    points = [point for point in found.front if point.error > 0]
    axis.plot([p.bytes for p in points], [p.error for p in points], "-", label="front, predicted")
    axis.plot([found.bytes], [found.measured], "o", label="assignment")
    for name, (size, error) in found.uniform.items():
        axis.plot([size], [error], "kx")
        axis.annotate(name, (size, error), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axis.set(
        title=title, xlabel="bytes of the weights", ylabel="metric", xscale="log", yscale="log"
    )
    axis.legend(fontsize=8)
    return figure


def _axis(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _some(x: Any) -> np.ndarray:
    """Returns finite values of an array, evenly spread, no more than are drawn."""
    values = np.asarray(x, np.float32).ravel()
    values = values[:: max(1, -(-values.size // _MOST))]
    return values[np.isfinite(values)]


def _drawn(values: Sequence[float]) -> np.ndarray:
    """Returns values with infinite ones, of exact results, at the largest other one."""
    array = np.array(values, float)
    finite = array[np.isfinite(array)]
    return np.where(np.isposinf(array), finite.max(initial=0), array)


def _check_some(function: str, given: Any) -> None:
    require_that(
        len(given) > 0,
        error=ValueError,
        function=function,
        problem="there is nothing to draw.",
        given="nothing",
        expected="one or more",
        mend="pass something.",
    )
