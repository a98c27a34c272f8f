"""A strip of thin bars: a number for each weight or site, in the order of the model."""

import math
from collections.abc import Sequence

from ._page import note, text

_MOST = 400
"""Number of bars in a strip; if there are more numbers, each bar is the lowest of several."""

_BAD = 0.05
"""Share of the bars that are highlighted as the lowest."""


def strip(
    names: Sequence[str], values: Sequence[float], line: Sequence[float] | None = None
) -> str:
    """Returns a picture of numbers in decibels, in order from the left.

    Args:
      names: name of each number.
      values: the numbers; an infinite one is as high as the picture, NaN leaves a gap.
      line: other numbers, drawn as a line.
    """
    known = [x for x in (*values, *(line or ())) if math.isfinite(x)]
    if len(values) < 2 or not known:
        return ""
    top = 1.08 * max(*known, 1.0)
    step = -(-len(values) // _MOST)
    chunks = [range(i, min(i + step, len(values))) for i in range(0, len(values), step)]
    lowest = [min(chunk, key=lambda i: _rank(values[i])) for chunk in chunks]
    ranked = sorted((i for i in lowest if not math.isnan(values[i])), key=values.__getitem__)
    bad = set(ranked[: max(1, int(_BAD * len(ranked)))]) if len(ranked) > 5 else set()
    rects = "".join(
        f'<rect x="{x + 0.08}" y="{100 - _height(values[i], top):.2f}" width="0.84" '
        f'height="{_height(values[i], top):.2f}"{" class=bad" if i in bad else ""}>'
        f"<title>{text(names[i])}: {_label(values[i])}</title></rect>"
        for x, i in enumerate(lowest)
    )
    if line is not None:
        points = " ".join(
            f"{x + 0.5},{100 - _height(line[i], top):.2f}"
            for x, i in enumerate(lowest)
            if not math.isnan(line[i])
        )
        rects += f'<polyline points="{points}"/>'
    apart = _apart(top)
    marks = [apart * i for i in range(1, int(top / apart) + 1)]
    grid = "".join(
        f'<hr style="bottom:{100 * y / top:.2f}%">'
        f'<em style="top:{100 - 100 * y / top:.2f}%">{y:g} dB</em>'
        for y in marks
    )
    picture = (
        f'<div class="strip">{grid}<svg viewBox="0 0 {len(chunks)} 100" '
        f'preserveAspectRatio="none" role="img" aria-label="in the order of the model">'
        f"{rects}</svg></div>"
    )
    several = f" Each bar is the lowest of {step}." if step > 1 else ""
    lowest_note = " The lowest have another colour." if bad else ""
    return picture + note(f"In the order of the model, from left to right.{several}{lowest_note}")


def _rank(x: float) -> float:
    return math.inf if math.isnan(x) else x


def _height(x: float, top: float) -> float:
    return 0.0 if math.isnan(x) else 100 * min(1.0, max(0.0, x / top))


def _label(x: float) -> str:
    if math.isnan(x):
        return "not a number"
    return "exact" if x == math.inf else f"{x:.1f} dB"


def _apart(top: float) -> float:
    """Returns the distance of grid lines such that there are three to six."""
    return next(x for x in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1e9) if top / x < 6)
