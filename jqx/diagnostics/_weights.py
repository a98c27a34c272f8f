"""The effect of quantization on one weight: size, range, clipping, dead groups, noise.

A number is clipped if it is outside the range of its group by more than half of the outermost step:
then its error is larger than that of rounding alone. So the largest number of a group, which
determines its scale, is not clipped, whichever way the scale was rounded.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._added import added
from .._checks import as_real, check_instance
from .._errors import fail
from ..numerics import QType, format_of
from ..numerics._shared import RoundMode
from ..tensor import QTensor
from ..tensor._shared import permuted_axis, taken

_CHUNK = 1 << 20
"""Number of elements that are summed in float64 at a time."""

_ULPS = 2.0**-20
"""Upper bound of the float32 error of a quotient and a sum, relative to the largest number."""


@dataclasses.dataclass(frozen=True)
class WeightError:
    """The effect of quantization on one weight.

    Attributes:
      path: path of the weight.
      scheme: its format, and which elements share a scale.
      bits: bits per weight, including scales and zero points, if codes are packed.
      bytes_before: bytes of the float array.
      bytes_after: bytes of the QTensor in its current layout; an unpacked int4 code takes one byte.
      low: the smallest of the float values; NaN if one is NaN or there are none.
      high: the largest of them, or NaN as in `low`.
      clipped: share of the elements that are outside the range of their group by more than half a
        step; infinities count, NaN does not.
      dead: number of groups that dequantize to zeros: their scale is 0, or all their codes.
      sqnr: signal-to-noise ratio, `10 log10(sum x**2 / sum (x - q)**2)`, in decibels; inf if the
        two are equal, -inf if there is only noise, NaN if `x` or `q` are not all finite.
      size: number of elements; 0 if a file of an older release does not say.
    """

    path: str
    scheme: str
    bits: float
    bytes_before: int
    bytes_after: int
    low: float
    high: float
    clipped: float
    dead: int
    sqnr: float
    size: int = added(0)

    @property
    def bytes_packed(self) -> int:
        """Bytes with codes packed, as `jqx.save` writes them."""
        return math.ceil(round(self.bits * self.size) / 8) if self.size else self.bytes_after


def measure(x: ArrayLike, q: QTensor, path: str = "") -> WeightError:
    """Returns the effect of quantization on a weight.

    Args:
      x: the float array, of the shape of `q`.
      q: the quantized array.
      path: path of the weight, stored in the result.

    Raises:
      TypeError: if `x` is not floating point, or `q` is not a QTensor.
      ValueError: if their shapes differ.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> from jqx.diagnostics._shared import measure
      >>> x = jnp.array([[1.0, -127.0], [0.0, 0.0]])
      >>> error = measure(x, jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_axis(0))), "w")
      >>> error.scheme, error.bits, error.dead, error.sqnr
      ('int8 per_axis(0)', 24.0, 1, inf)
    """
    x = as_real("report", "x", x)
    check_instance("report", "q", q, QTensor, fix="pass QTensor.quantize(x, spec).")
    if x.shape != q.shape:
        raise fail(
            "report",
            "`x` and `q` have different shapes.",
            given=f"x.shape == {x.shape}, q.shape == {q.shape}",
            expected="equal shapes",
            fix="pass the array that q was made from.",
        )
    clipped, dead = _count(x, q, *limits_of(format_of(q.qtype)))
    values = np.asarray(x)
    return WeightError(
        path=path,
        scheme=scheme_of(q),
        bits=bits_of(q) / x.size if x.size else 0.0,
        bytes_before=x.nbytes,
        bytes_after=q.nbytes,
        low=float(values.min()) if x.size else math.nan,
        high=float(values.max()) if x.size else math.nan,
        clipped=_total(clipped) / max(x.size, 1),
        dead=_total(dead) if x.size else 0,
        sqnr=sqnr(values, np.asarray(q.dequantize())),
        size=x.size,
    )


def _total(counts: jax.Array) -> int:
    return int(np.asarray(counts).sum(dtype=np.int64))


def scheme_of(q: QTensor) -> str:
    """Returns the format of a QTensor, which elements share a scale, and if it has zero points."""
    asymmetric = "" if q.zero_point is None else " asymmetric"
    asymmetric += "" if q.offset is None else " with offsets"
    asymmetric += "" if q.order is None else " permuted"
    return f"{format_of(q.qtype).name} {q.groups}{asymmetric}"


def bits_of(q: QTensor) -> int:
    """Returns the total bits of a QTensor with all codes packed."""
    bits = format_of(q.qtype).bits
    total = bits * q.size
    for part in (q.scale, q.offset, q.order):
        if part is not None:
            total += bits_of(part) if isinstance(part, QTensor) else 8 * part.nbytes
    return total if q.zero_point is None else total + bits * q.zero_point.size


def sqnr(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the SQNR of `y` for `x` in decibels; see `WeightError`. Sums are float64."""
    signal = noise = 0.0
    x, y = x.reshape(-1), y.reshape(-1)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, x.size, _CHUNK):
            a = x[start : start + _CHUNK].astype(np.float64)
            b = a - y[start : start + _CHUNK].astype(np.float64)
            signal, noise = signal + float(a @ a), noise + float(b @ b)
    if not math.isfinite(signal + noise):
        return math.nan
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def limits_of(form: QType) -> tuple[float, float]:
    """Returns the range of a format, extended by half of its outermost steps and a few units in the
    last place of float32: rounding a zero point at a tie leaves a number just at half a step.
    """
    slack = _ULPS * max(abs(form.low), abs(form.high))
    if form.uniform:
        return form.low - 0.5 - slack, form.high + 0.5 + slack
    ends = np.array([form.low, form.high], np.float32)
    inside = jnp.asarray(np.nextafter(ends, ends[::-1]))
    above = float(form.round(inside[:1], RoundMode.UP)[0])
    below = float(form.round(inside[1:], RoundMode.DOWN)[0])
    halves = (above - form.low) / 2, (form.high - below) / 2
    return form.low - halves[0] - slack, form.high + halves[1] + slack


@partial(jax.jit, static_argnames=("low", "high"))
def _count(x: jax.Array, q: QTensor, low: float, high: float) -> tuple[Any, Any]:
    """Returns how many elements of each group are clipped, and which groups are dead."""
    groups, y = q.groups, in_steps(x, q)
    outside = groups.join((y < low) | (y > high)).astype(jnp.int32)
    return groups.reduce(jnp.sum, outside, 0), groups.largest_magnitude(q.dequantize()) == 0


def in_steps(x: jax.Array, q: QTensor) -> jax.Array:
    """Returns an array in steps of the scale of a QTensor, relative to its offset and zero point;
    in the order of its values, split into groups.
    """
    groups, scale, offset = q.groups, q.real_scale(), q.real_offset()
    wide = jnp.dtype(jnp.float64 if jnp.float64 in (x.dtype, scale.dtype) else jnp.float32)
    axis = None if q.order is None else permuted_axis(q.order)
    if q.order is not None and axis is not None:
        x = taken(x, q.order, axis)
    y = groups.split(x).astype(wide)
    if offset is not None:
        y -= groups.split_scale(offset).astype(wide)
    y /= groups.split_scale(scale).astype(wide)
    return y if q.zero_point is None else y + groups.split_scale(q.zero_point).astype(wide)
