"""A histogram of the values of a weight on its quantization grid."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..._checks import check_instance
from ..._errors import fail
from ...numerics import format_of
from ...tensor import QTensor
from .._colors import ACCENT, COLORS
from .._schemes import short_scheme
from .._weights import in_steps, limits_of, scheme_of
from ._canvas import SMALL, axes_for, tidy, titled

_MOST = 200_000
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
    check_instance(
        "diagnostics.plots.histogram", "q", q, QTensor, fix="pass QTensor.quantize(x, spec)."
    )
    if np.shape(x) != q.shape:
        raise fail(
            "diagnostics.plots.histogram",
            "`x` and `q` have different shapes.",
            given=f"shapes {np.shape(x)} and {q.shape}",
            expected="equal shapes",
            fix="pass the array that q was made from.",
        )
    values = _some(in_steps(jnp.asarray(x), q))
    grid = np.unique(_some(in_steps(q.dequantize(), q)).round(4))
    form = format_of(q.qtype)
    figure, axis = axes_for("diagnostics.plots.histogram", ax, 8, 3.6)
    axis.hist(values, bins=bins, color=COLORS[4])
    count = "values" if values.size == q.size else f"{values.size:,} of {q.size:,} values"
    handles: list[Any] = [Patch(color=COLORS[4], label=count)]
    few = len(grid) <= 64
    codes = [axis.axvline(x, color="black", lw=0.6, alpha=0.6) for x in (grid if few else [])]
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
    codes_in_use = "" if few else f"; {len(grid)} codes are in use"
    axis.set_xlabel(f"weight / scale{codes_in_use}", fontsize=SMALL)
    axis.set_ylabel("values", fontsize=SMALL)
    tidy(axis, "y")
    axis.tick_params(labelsize=SMALL)
    titled(axis, short_scheme(scheme_of(q)) if title is None else title, handles)
    return figure


def _some(x: Any) -> np.ndarray:
    """Returns finite values of an array, evenly spread, at most as many as are drawn."""
    values = np.asarray(x, np.float32).ravel()
    values = values[:: max(1, -(-values.size // _MOST))]
    return values[np.isfinite(values)]
