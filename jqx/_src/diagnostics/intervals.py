"""Interval arithmetic: bounds of all elements of an array, and the array itself if it is known.

Bounds of integers are exact Python integers. Bounds of floats are float64, widened by the possible
rounding error of the dtype of a result. Every interval includes NaN.

Source: R. E. Moore, "Interval Analysis", 1966.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import QTensor
from ..compat import Eqn

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
      origin: for `x < n` and `x + n` with a number `n`: the primitive, `x`, `n` and the equation.
    """

    low: Any
    high: Any
    value: Any = None
    codes: QTensor | None = None
    origin: tuple[Any, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether all elements are known; the sign of a float zero is not."""
        single = self.low == self.high and (isinstance(self.low, int) or self.low != 0)
        return self.value is not None or single

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

    def holds(self, part: "Interval") -> bool:
        """Returns whether this interval contains another."""
        if self.value is not None and self.value is not part.value:
            return False
        return self.low <= part.low and part.high <= self.high


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
    minima = [x.min() if isinstance(x, np.ndarray) else x for x in xs]
    return -math.inf if any(x != x for x in minima) else _plain(min(minima))


def most(*xs: Any) -> Any:
    """Returns the maximum of arrays and numbers; infinity if there is a NaN."""
    maxima = [x.max() if isinstance(x, np.ndarray) else x for x in xs]
    return math.inf if any(x != x for x in maxima) else _plain(max(maxima))


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
    part0, *others = parts
    if all(part is part0 for part in others):
        return part0
    low, high = min(x.low for x in (part0, *others)), max(x.high for x in (part0, *others))
    same = part0.value is not None and all(part.value is part0.value for part in others)
    return Interval(low, high, part0.value, part0.codes) if same else Interval(low, high)


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
    weight, activation, contracted = (
        (lhs, rhs, axes[0]) if rhs.value is None else (rhs, lhs, axes[1])
    )
    w = wide(weight.value)
    if w.size == 0 or count == 0:
        return Bounds(0, 0)
    up = _block_sums(np.maximum(w, 0), contracted, sizes)
    down = _block_sums(np.minimum(w, 0), contracted, sizes)
    if is_integer(np.asarray(weight.value).dtype) and isinstance(activation.low, int):
        up, down = up.astype(object), down.astype(object)
    low = least(times(up, activation.low) + times(down, activation.high))
    high = most(times(up, activation.high) + times(down, activation.low))
    return _with_errors(low, high, term, count, times(most(up - down), activation.largest))


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


# Intervals of the results of elementwise primitives.

_LINE = (-math.inf, math.inf)


def _round(eqn: Eqn, low: Any, high: Any) -> Bounds:
    """Bounds of a result, which is rounded if it is a float."""
    return Bounds(low, high) if is_integer(dtype_of(eqn)) else roughly(low, high)


def _between(low: Any, high: Any) -> Rule:
    return lambda eqn, xs: Interval(low, high)


def _monotone(
    f: Callable[[Any], Any],
    domain: tuple[float, float] = _LINE,
    image: tuple[float, float] = _LINE,
) -> Rule:
    """A monotone function of floats; outside its domain it is NaN."""

    def rule(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
        with np.errstate(all="ignore"):
            ends = [float(f(np.clip(np.float64(x), *domain))) for x in (xs[0].low, xs[0].high)]
        result = rounded(roughly(min(ends), max(ends)), dtype_of(eqn))
        return Interval(max(result.low, image[0]), min(result.high, image[1]))

    return rule


def _rsqrt(eqn: Eqn, xs: Sequence[Interval]) -> Result:
    """The result is infinite for a zero, whose sign is unknown."""
    if xs[0].low <= 0 <= xs[0].high:
        return any_of(eqn)
    return _monotone(lambda x: 1 / np.sqrt(x), (0, math.inf))(eqn, xs)


def _stepped(low: Callable[[Any], Any], high: Callable[[Any], Any] | None = None) -> Rule:
    """Increasing functions to whole numbers: a result is at least `low` of the minimum, and at most
    `high` of the maximum.
    """

    def rule(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
        pairs = (low, xs[0].low), (high or low, xs[0].high)
        return Bounds(*(x if math.isinf(x) else f(x) for f, x in pairs))

    return rule


def _add(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    a, b = xs
    return _round(eqn, least(a.low + b.low), most(a.high + b.high))


def _sub(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    a, b = xs
    return _round(eqn, least(a.low - b.high), most(a.high - b.low))


def _mul(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    if eqn.invars[0] is eqn.invars[1]:
        return _power(eqn, xs[0], 2)
    return _round(eqn, *corners(times, *xs))


def _power(eqn: Eqn, x: Interval, y: int) -> Bounds:
    if y < 0:
        inner = _power(eqn, x, -y)
        return _round(eqn, *_reciprocal(inner.low, inner.high))
    ends = [_raised(x.low, y), _raised(x.high, y)]
    return _round(eqn, 0 if y % 2 == 0 and x.low < 0 < x.high else min(ends), max(ends))


def _raised(x: Any, y: int) -> Any:
    """Returns a power, infinite if a float cannot hold it."""
    with np.errstate(all="ignore"):
        return x**y if isinstance(x, int) else float(np.float_power(x, y))


def _one_minus_square(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    """`1 - x**2`, rounded as 1 and the square are. (jax 0.12: the derivative of `tanh`.)"""
    square = _power(eqn, xs[0], 2)
    low, high = 1 - square.high, 1 - square.low
    if is_integer(dtype_of(eqn)):
        return Bounds(low, high)
    return Bounds(low, high, ULPS * max(1, square.high), ULPS * max(1, square.low))


def _reciprocal(low: Any, high: Any) -> tuple[float, float]:
    """Bounds of `1 / x`; unbounded for a zero, whose sign is unknown."""
    if low <= 0 <= high:
        return _LINE
    return 1 / high, 1 / low


def _div(eqn: Eqn, xs: Sequence[Interval]) -> Result:
    a, b = xs
    if not is_integer(dtype_of(eqn)):
        return roughly(*corners(times, a, Interval(*_reciprocal(b.low, b.high))))
    if b.low <= 0 <= b.high:
        return any_of(eqn)
    return Bounds(*corners(_divided, a, b))


def _divided(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _rem(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    """The result has the sign of the first operand and is smaller than the second; an integer by
    zero is unchanged.
    """
    a, b = xs
    left = b.largest - is_integer(dtype_of(eqn))
    bound = a.largest if b.low <= 0 <= b.high else min(a.largest, left)
    return _round(eqn, -bound if a.low < 0 else 0, bound if a.high > 0 else 0)


def _pow(eqn: Eqn, xs: Sequence[Interval]) -> Result:
    x, y = xs
    if x.low < 0:
        return any_of(eqn)
    with np.errstate(all="ignore"):
        ends = [np.float_power(p, q) for p in (x.low, x.high) for q in (y.low, y.high)]
    ends += [1.0] if x.low <= 1 <= x.high or y.low <= 0 <= y.high else []
    return roughly(least(*ends), most(*ends))


def _abs(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    (x,) = xs
    return Bounds(0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high)), x.largest)


def _extreme(f: Callable[[Any, Any], Any]) -> Rule:
    return lambda eqn, xs: Interval(f(xs[0].low, xs[1].low), f(xs[0].high, xs[1].high))


def _clamp(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    a, x, b = xs
    return Interval(min(max(x.low, a.low), b.low), min(max(x.high, a.high), b.high))


def _select(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    which, *cases = xs
    return hull([x.hull_only() for x in cases[which.low : which.high + 1]])


def _compared(always: Callable[..., bool], never: Callable[..., bool]) -> Rule:
    """A comparison, from conditions under which it holds for all, or for no, integers."""

    def rule(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
        if not is_integer(eqn.invars[0].aval.dtype):
            return Interval(0, 1)  # a NaN is neither less nor more
        return Interval(int(always(*xs)), int(not never(*xs)))

    return rule


def _apart(a: Interval, b: Interval) -> bool:
    return a.high < b.low or b.high < a.low


def _one(a: Interval, b: Interval) -> bool:
    return a.low == a.high == b.low == b.high


def _bitwise(eqn: Eqn, xs: Sequence[Interval]) -> Result:
    a, b = xs
    name = eqn.primitive.name
    if dtype_of(eqn) == jnp.bool_ and name != "xor":
        f = operator.and_ if name == "and" else operator.or_
        return Interval(f(a.low, b.low), f(a.high, b.high))
    if min(a.low, b.low) < 0:
        return any_of(eqn)
    return Interval(0, 2 ** max(a.high, b.high).bit_length() - 1)


def _not(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    low, high = limits(dtype_of(eqn))
    return Interval(low + high - xs[0].high, low + high - xs[0].low)


def _shift(eqn: Eqn, xs: Sequence[Interval]) -> Result:
    x, n = xs
    name = eqn.primitive.name
    if n.low < 0 or n.high >= 64 or (x.low < 0 and name == "shift_right_logical"):
        return any_of(eqn)
    f = operator.lshift if name == "shift_left" else operator.rshift
    return Bounds(*corners(f, x, n))


def _convert(eqn: Eqn, xs: Sequence[Interval]) -> Result:
    (x,), dtype, source = xs, dtype_of(eqn), eqn.invars[0].aval.dtype
    if dtype == jnp.bool_:
        return Interval(0, 1)
    if is_integer(dtype):
        return Bounds(*(e if math.isinf(e) else math.trunc(e) for e in (x.low, x.high)))
    reals = [is_integer(t) or jnp.issubdtype(t, jnp.floating) for t in (source, dtype)]
    if not all(reals):
        return any_of(eqn)
    with np.errstate(all="ignore"):  # rounding is monotone
        low, high = (float(np.asarray(e, np.float64).astype(dtype)) for e in (x.low, x.high))
    low, high = -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high
    return flushed(low, high, dtype)


# Intervals of sums, contractions, lookups and views; and the rules of all primitives that hold no
# functions, by name. Primitives without a rule are unknown.


def _same(eqn: Eqn, xs: Sequence[Interval]) -> list[Interval]:
    return list(xs)


def _each(eqn: Eqn, xs: Sequence[Interval]) -> list[Interval]:
    """Elements of each operand, in any order."""
    return [x.hull_only() for x in xs]


def _first(eqn: Eqn, xs: Sequence[Interval]) -> list[Interval]:
    """Parts of the first operand, in any order; other operands are indices."""
    return [xs[0].hull_only() for _ in eqn.outvars]


def _among(*argnums: int) -> Rule:
    """Elements of some of the operands."""
    return lambda eqn, xs: hull([xs[i].hull_only() for i in argnums])


def _size(eqn: Eqn, axes: Sequence[int]) -> int:
    return math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)


def _cumsum(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    (x,) = xs
    total = summed(x, max(_size(eqn, (eqn.params["axis"],)), 1))
    return total._replace(low=min(x.low, total.low), high=max(x.high, total.high))


def _index(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    return Interval(0, max(_size(eqn, eqn.params["axes"]) - 1, 0))


def _top_k(eqn: Eqn, xs: Sequence[Interval]) -> list[Interval]:
    axis = eqn.params.get("axis", -1)
    return [xs[0].hull_only(), Interval(0, _size(eqn, (axis,)) - 1)]


def _window_sum(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    x = _with_gaps(xs[0], eqn.params["padding"], eqn.params["base_dilation"])
    return summed(x, math.prod(eqn.params["window_dimensions"]))


def _with_gaps(x: Interval, padding: Sequence[Sequence[int]], dilation: Sequence[int]) -> Interval:
    """Returns the interval that windows read, with zeros if an array is padded or dilated."""
    gaps = any(map(any, padding)) or any(n != 1 for n in dilation)
    return x.with_zero() if gaps else x.hull_only()


def _gather(eqn: Eqn, xs: Sequence[Interval]) -> Result:
    table, index = xs
    elements = table.hull_only()
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return elements
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    ends = [shape[axis] - sizes[axis] for axis in eqn.params["dimension_numbers"].start_index_map]
    if index.low >= 0 and index.high <= min(ends, default=0):
        return elements
    fill = eqn.params["fill_value"]
    if fill is None and is_integer(dtype_of(eqn)):
        return any_of(eqn)
    return elements if fill is None or fill != fill else hull([elements, Interval(fill, fill)])


def _scatter_add(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    """All updates may go to one element."""
    table, _, updates = xs
    total = summed(updates, math.prod(eqn.invars[1].aval.shape[:-1]))
    low, high = table.low + min(total.low, 0), table.high + max(total.high, 0)
    return Bounds(low, high, total.low_error + abs(low), total.high_error + abs(high))


def contract(eqn: Eqn, lhs: Interval, rhs: Interval, sizes: Sequence[int] | None = None) -> Bounds:
    """Returns the bounds of a contraction: sums over all of its axes, or over blocks of `sizes`.

    Zeros are also read if an image is padded or dilated, in rows that belong to no group, and if
    each group sums a part of a ragged contraction.
    """
    p = eqn.params
    if eqn.primitive.name == "conv_general_dilated":
        lhs = _with_gaps(lhs, p["padding"], p["lhs_dilation"])
        _, *axes = p["dimension_numbers"].rhs_spec
        axes = (axes, axes)  # the image is read through the kernel
    elif "ragged_dot_dimension_numbers" in p:
        lhs = lhs.with_zero()
        axes, _ = p["ragged_dot_dimension_numbers"].dot_dimension_numbers
    else:
        axes, _ = p["dimension_numbers"]
    shape = eqn.invars[1].aval.shape
    sizes = [shape[axis] for axis in axes[1]] if sizes is None else sizes
    return sum_of_products(lhs, rhs, axes, sizes)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "add_any"), _add),
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "rem": _rem,
    "neg": lambda eqn, xs: Bounds(-xs[0].high, -xs[0].low),
    "abs": _abs,
    "max": _extreme(max),
    "min": _extreme(min),
    "clamp": _clamp,
    "select_n": _select,
    "sign": lambda eqn, xs: Bounds(*((e > 0) - (e < 0) for e in (xs[0].low, xs[0].high))),
    "floor": _stepped(math.floor),
    "ceil": _stepped(math.ceil),
    "round": _stepped(lambda x: math.ceil(x - 0.5), lambda x: math.floor(x + 0.5)),  # any ties
    "square": lambda eqn, xs: _power(eqn, xs[0], 2),
    "one_minus_square": _one_minus_square,
    "integer_pow": lambda eqn, xs: _power(eqn, xs[0], eqn.params["y"]),
    "pow": _pow,
    "sqrt": _monotone(np.sqrt, (0, math.inf)),
    "rsqrt": _rsqrt,
    "exp": _monotone(np.exp),
    "exp2": _monotone(np.exp2),
    "expm1": _monotone(np.expm1, image=(-1.0, math.inf)),
    "log": _monotone(np.log, (0, math.inf)),
    "log1p": _monotone(np.log1p, (-1, math.inf)),
    "tanh": _monotone(np.tanh, image=(-1.0, 1.0)),
    "logistic": _monotone(lambda x: 1 / (1 + np.exp(-x)), image=(0.0, 1.0)),
    "erf": _monotone(math.erf, image=(-1.0, 1.0)),
    "erfc": _monotone(math.erfc, image=(0.0, 2.0)),
    **dict.fromkeys(("sin", "cos"), _between(-1.0, 1.0)),
    "is_finite": _between(0, 1),
    "eq": _compared(_one, _apart),
    "ne": _compared(_apart, _one),
    "lt": _compared(lambda a, b: a.high < b.low, lambda a, b: a.low >= b.high),
    "le": _compared(lambda a, b: a.high <= b.low, lambda a, b: a.low > b.high),
    "gt": _compared(lambda a, b: a.low > b.high, lambda a, b: a.high <= b.low),
    "ge": _compared(lambda a, b: a.low >= b.high, lambda a, b: a.high < b.low),
    **dict.fromkeys(("and", "or", "xor"), _bitwise),
    "not": _not,
    **dict.fromkeys(("shift_left", "shift_right_arithmetic", "shift_right_logical"), _shift),
    "convert_element_type": _convert,
    "reduce_sum": lambda eqn, xs: summed(xs[0], _size(eqn, eqn.params["axes"])),
    "cumsum": _cumsum,
    **dict.fromkeys(("argmax", "argmin"), _index),
    "top_k": _top_k,
    "reduce_window_sum": _window_sum,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-min", "scatter-max"), _among(0, 2)),
    "scatter-add": _scatter_add,
    **dict.fromkeys(("dynamic_update_slice", "pad"), _among(0, 1)),
    **dict.fromkeys(
        ("dot_general", "ragged_dot_general", "conv_general_dilated"),
        lambda eqn, xs: contract(eqn, xs[0], xs[1]),
    ),
    **dict.fromkeys(
        "copy device_put name optimization_barrier pcast pvary reshard sharding_constraint "
        "stop_gradient".split(),
        _same,
    ),
    **dict.fromkeys(("concatenate", "stack"), lambda eqn, xs: hull(_each(eqn, xs))),
    **dict.fromkeys("sort all_gather all_to_all ppermute pmax".split(), _each),
    **dict.fromkeys(
        "broadcast_in_dim dynamic_slice reshape rev slice split squeeze tile transpose unstack "
        "reduce_max reduce_min cummax reduce_window_max".split(),
        _first,
    ),
    **dict.fromkeys(
        "random_bits random_seed random_wrap random_unwrap random_fold_in random_split "
        "bitcast_convert_type erf_inv nextafter axis_index reduce_and reduce_or "
        "debug_print debug_callback pure_callback".split(),
        any_of,
    ),
}
