"""Interval arithmetic: bounds of all elements of an array, and the array itself if it is known.

Bounds of integers are exact Python integers. Bounds of floats are float64, widened by the possible
rounding error of the dtype of a result. Every interval includes NaN.

Source: R. E. Moore, "Interval Analysis", 1966.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._compat import Eqn
from ..tensor import QTensor

ULPS = 4
"""Maximum error of a function such as `tanh`, in units of the last place."""


@dataclasses.dataclass(frozen=True, eq=False)
class Interval:
    """Bounds of all elements of an array.

    Attributes:
      low: the minimum of an element.
      high: the maximum.
      value: the array, if it is known.
      codes: the quantized array, if it is a weight of the plan.
      about: for `x < n` and `x + n` with a number `n`: the primitive, `x`, `n` and the equation.
    """

    low: Any
    high: Any
    value: Any = None
    codes: QTensor | None = None
    about: tuple[Any, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether all elements are known; the sign of a float zero is not."""
        one = self.low == self.high and (isinstance(self.low, int) or self.low != 0)
        return self.value is not None or one

    @property
    def largest(self) -> Any:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))

    def hull_only(self) -> "Interval":
        """Returns the interval of any part of the array."""
        return Interval(self.low, self.high)

    def with_zero(self) -> "Interval":
        """Returns the interval of any part of the array, with zeros added."""
        return Interval(min(self.low, 0), max(self.high, 0))

    def holds(self, other: "Interval") -> bool:
        """Returns whether this interval contains another."""
        if self.value is not None and self.value is not other.value:
            return False
        return self.low <= other.low and other.high <= self.high


ANY = Interval(-math.inf, math.inf)


class Bounds(NamedTuple):
    """Bounds of a result in exact arithmetic, and the rounding error that may move them: a number
    of units in the last place, and of which magnitude.
    """

    low: Any
    high: Any
    low_error: Any = 0
    high_error: Any = 0


Result = Bounds | Interval | list[Interval]
Rule = Callable[[Eqn, Sequence[Interval]], Result]
"""From an equation and the intervals of its operands to bounds that are still to be rounded, or to
final intervals. The caller checks whether an integer dtype holds them.
"""


def roughly(low: Any, high: Any) -> Bounds:
    """Returns the bounds of a result that is rounded once."""
    return Bounds(low, high, ULPS * abs(low), ULPS * abs(high))


def is_integer(dtype: Any) -> bool:
    """Returns whether bounds of a dtype are integers; also for booleans."""
    return dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)


def limits(dtype: Any) -> tuple[Any, Any]:
    """Returns the range of a dtype."""
    if dtype == jnp.bool_:
        return 0, 1
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return int(info.min), int(info.max)
    return -math.inf, math.inf


def dtype_of(eqn: Eqn) -> Any:
    """Returns the dtype of the first result."""
    return eqn.outvars[0].aval.dtype


def any_of(eqn: Eqn, xs: Sequence[Interval] = ()) -> list[Interval]:
    """Returns the full range of each result's dtype, for example for random bits."""
    return [anything(v.aval) for v in eqn.outvars]


def anything(aval: Any) -> Interval:
    """Returns the interval of an array of which only the dtype is known."""
    return Interval(*limits(aval.dtype))


def of_value(x: Any) -> Interval:
    """Returns the interval of a known array."""
    if not (is_integer(x.dtype) or jnp.issubdtype(x.dtype, jnp.floating)):
        return ANY  # complex, or a random key
    values = wide(x)
    if not is_integer(x.dtype):
        values = values[~np.isnan(values)]
    if not values.size:
        return Interval(0, 0, x)
    ends = Interval(least(values), most(values))
    ends = ends if is_integer(x.dtype) else flushed(ends.low, ends.high, x.dtype)
    return dataclasses.replace(ends, value=x)


def wide(x: Any) -> np.ndarray:
    """Returns an array in a dtype in which its sums and products are exact, or in float64."""
    x = np.asarray(x)
    if not is_integer(x.dtype):
        return x.astype(np.float64)
    return x.astype(np.int64 if x.dtype.itemsize < 4 or x.dtype == np.int32 else object)


def least(*xs: Any) -> Any:
    """Returns the minimum of arrays and numbers; minus infinity if there is a NaN."""
    found = [x.min() if isinstance(x, np.ndarray) else x for x in xs]
    return -math.inf if any(x != x for x in found) else _plain(min(found))


def most(*xs: Any) -> Any:
    """Returns the maximum of arrays and numbers; infinity if there is a NaN."""
    found = [x.max() if isinstance(x, np.ndarray) else x for x in xs]
    return math.inf if any(x != x for x in found) else _plain(max(found))


def _plain(x: Any) -> Any:
    return x.item() if isinstance(x, np.generic) else x


def times(a: Any, b: Any) -> Any:
    """Returns a product, 0 if a factor is 0: infinite bounds mean unbounded finite numbers."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    with np.errstate(all="ignore"):
        product = np.multiply(a, b)
        return np.where((np.equal(a, 0)) | (np.equal(b, 0)), 0, product)[()]


def corners(f: Callable[[Any, Any], Any], a: Interval, b: Interval) -> tuple[Any, Any]:
    """Returns the bounds of a function of two arrays that is monotone in each of them."""
    values = [f(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return least(*values), most(*values)


def hull(parts: Iterable[Interval]) -> Interval:
    """Returns the interval of a value that is one of several."""
    first, *rest = parts
    if all(part is first for part in rest):
        return first
    low, high = min(x.low for x in (first, *rest)), max(x.high for x in (first, *rest))
    same = first.value is not None and all(part.value is first.value for part in rest)
    return Interval(low, high, first.value, first.codes) if same else Interval(low, high)


def summed(x: Interval, count: int) -> Bounds:
    """Returns the bounds of a sum of `count` elements."""
    ends = times(count, x.low), times(count, x.high)
    return _with_errors(*ends, x, count, times(count, x.largest))


def _with_errors(low: Any, high: Any, term: Interval, count: int, size: Any) -> Bounds:
    """Returns the bounds of a sum whose terms have a bounded total magnitude. Each term may be
    rounded as often as there are terms. If all terms have one sign, so does the sum.
    """
    if term.low >= 0 or term.high <= 0:
        return Bounds(low, high, times(count, abs(low)), times(count, abs(high)))
    return Bounds(low, high, times(count, size), times(count, size))


def sum_of_products(
    lhs: Interval,
    rhs: Interval,
    axes: tuple[Sequence[int], Sequence[int]],
    sizes: Sequence[int],
) -> Bounds:
    """Returns the bounds of a contraction, the widest of all its results.

    With a known operand `w`, each result has its own bounds, which are attained:

        high  =  sum max(w low, w high)  =  high sum max(w, 0) + low sum min(w, 0)

    Args:
      lhs: left operand.
      rhs: right operand.
      axes: contracted axes of each operand.
      sizes: number of elements along each of them that are summed; blocks are separate sums.
    """
    count = math.prod(sizes)
    term = Interval(*corners(times, lhs, rhs))
    if lhs.value is None and rhs.value is None:
        return summed(term, count)
    known, other, contracted = (lhs, rhs, axes[0]) if rhs.value is None else (rhs, lhs, axes[1])
    w = wide(known.value)
    if w.size == 0 or count == 0:
        return Bounds(0, 0)
    up = _block_sums(np.maximum(w, 0), contracted, sizes)
    down = _block_sums(np.minimum(w, 0), contracted, sizes)
    if is_integer(np.asarray(known.value).dtype) and isinstance(other.low, int):
        up, down = up.astype(object), down.astype(object)
    low = least(times(up, other.low) + times(down, other.high))
    high = most(times(up, other.high) + times(down, other.low))
    return _with_errors(low, high, term, count, times(most(up - down), other.largest))


def _block_sums(w: np.ndarray, axes: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    for axis, size in zip(axes, sizes, strict=True):
        w = np.add.reduceat(w, np.arange(0, w.shape[axis], size), axis)
    return w


def rounded(bounds: Bounds, dtype: Any) -> Interval:
    """Returns the interval of a float result with a dtype."""
    info = jnp.finfo(dtype)
    eps, largest = float(info.eps), float(info.max)
    with np.errstate(all="ignore"):
        low = float(least(bounds.low - times(eps, bounds.low_error)))
        high = float(most(bounds.high + times(eps, bounds.high_error)))
    return flushed(
        -math.inf if low < -largest else low, math.inf if high > largest else high, dtype
    )


def flushed(low: float, high: float, dtype: Any) -> Interval:
    """Returns the interval of floats, in which hardware may flush subnormal numbers to 0."""
    tiny = float(jnp.finfo(dtype).tiny)
    return Interval(0.0 if 0 < low < tiny else low, 0.0 if -tiny < high < 0 else high)
