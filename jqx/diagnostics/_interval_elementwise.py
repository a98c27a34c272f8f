"""What becomes of intervals at primitives that compute element by element."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import Eqn
from ._interval_rule import Result, Rule, any_of, dtype_of
from ._intervals import (
    ULPS,
    Bounds,
    Interval,
    corners,
    exactly,
    flushed,
    hull,
    is_integer,
    least,
    limits,
    most,
    roughly,
    rounded,
    times,
)


def _round(eqn: Eqn, low: Any, high: Any) -> Bounds:
    """Ends of a result that is rounded where it is a float."""
    return exactly(low, high) if is_integer(dtype_of(eqn)) else roughly(low, high)


def _between(low: Any, high: Any) -> Rule:
    return lambda eqn, xs: Interval(low, high)


def _rising(f: Callable[[Any], Any], domain: tuple[float, float] = (-math.inf, math.inf)) -> Rule:
    """A function of floats that never falls; beyond its domain it is NaN."""

    def rule(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
        with np.errstate(all="ignore"):
            low, high = (float(f(np.clip(np.float64(x), *domain))) for x in (xs[0].low, xs[0].high))
        return roughly(low, high)

    return rule


def _falling(f: Callable[[Any], Any], domain: tuple[float, float] = (-math.inf, math.inf)) -> Rule:
    def rule(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
        with np.errstate(all="ignore"):
            low, high = (float(f(np.clip(np.float64(x), *domain))) for x in (xs[0].high, xs[0].low))
        return roughly(low, high)

    return rule


def _rsqrt(eqn: Eqn, xs: Sequence[Interval]) -> Result:
    """Of a zero, whose sign is not known, it is infinite."""
    if xs[0].low <= 0 <= xs[0].high:
        return exactly(-math.inf, math.inf)
    return _falling(lambda x: 1 / np.sqrt(x), (0, math.inf))(eqn, xs)


def _stepped(f: Callable[[float], float]) -> Rule:
    """A function of floats that never falls, to whole numbers: of a float, exact."""

    def rule(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
        low, high = (x if math.isinf(x) else f(x) for x in (xs[0].low, xs[0].high))
        return exactly(low, high)

    return rule


def _nearest(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    """Rounding never falls: half of either sign goes to even, or away from zero."""
    even = eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN

    def nearest(x: float) -> float:
        return float(round(x) if even else math.copysign(math.floor(abs(x) + 0.5), x))

    return exactly(*(e if math.isinf(e) else nearest(e) for e in (xs[0].low, xs[0].high)))


def _within(rule: Rule, low: float, high: float) -> Rule:
    """The same, clipped to what the function never leaves."""

    def clipped(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
        found = rule(eqn, xs)
        assert isinstance(found, Bounds)
        ends = rounded(found, dtype_of(eqn))
        return Interval(max(ends.low, low), min(ends.high, high))

    return clipped


def _add(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    (a, b), (c, d) = (x.ends() for x in xs)
    return _round(eqn, least(a + c), most(b + d))


def _sub(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    if eqn.invars[0] is eqn.invars[1]:
        return exactly(0, 0)
    (a, b), (c, d) = (x.ends() for x in xs)
    return _round(eqn, least(a - d), most(b - c))


def _mul(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    if eqn.invars[0] is eqn.invars[1]:
        return _power(eqn, xs[0], 2)
    return _round(eqn, *corners(times, *xs))


def _power(eqn: Eqn, x: Interval, y: int) -> Bounds:
    if y < 0:
        with np.errstate(all="ignore"):
            inner = _power(eqn, x, -y)
            return _round(eqn, *corners(times, Interval(1, 1), _reciprocal(inner.low, inner.high)))
    ends = [raised(x.low, y), raised(x.high, y)]
    return _round(eqn, 0 if y % 2 == 0 and x.low < 0 < x.high else min(ends), max(ends))


def _one_minus_square(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    """What is left of 1 is rounded as 1 and the square are."""
    square = _power(eqn, xs[0], 2)
    low, high = 1 - square.high, 1 - square.low
    if is_integer(dtype_of(eqn)):
        return exactly(low, high)
    return Bounds(low, high, ULPS * max(1, square.high), ULPS * max(1, square.low))


def _polynomial(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    """Of the first operand, by Horner's rule: coefficients from that of the lowest degree."""
    x, *coefficients = (operand.hull_only() for operand in xs)

    def interval(low: Any, high: Any) -> Interval:
        found = _round(eqn, low, high)
        return Interval(low, high) if is_integer(dtype_of(eqn)) else rounded(found, dtype_of(eqn))

    y = coefficients.pop()
    for c in reversed(coefficients):
        product = interval(*corners(times, x, y))
        y = interval(least(product.low + c.low), most(product.high + c.high))
    return y


def raised(x: Any, y: int) -> Any:
    """Returns a power, infinite where a float cannot hold it."""
    try:
        return x**y
    except OverflowError:
        return math.inf if x > 0 or y % 2 == 0 else -math.inf


def _reciprocal(low: Any, high: Any) -> Interval:
    """Ends of `1 / x`; of a zero, whose sign is not known, anything."""
    if low <= 0 <= high:
        return Interval(-math.inf, math.inf)
    lower, upper = (1 / end if math.isfinite(end) else 0.0 for end in (high, low))
    return Interval(lower, upper)


def _div(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    a, b = xs
    if not is_integer(dtype_of(eqn)):
        return roughly(*corners(times, a.hull_only(), _reciprocal(b.low, b.high)))
    if b.low <= 0 <= b.high:  # by zero: -1
        low, high = limits(dtype_of(eqn))
        return exactly(max(-max(a.largest, 1), low), min(max(a.largest, 1), high))

    def divided(x: int, y: int) -> int:
        return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)

    return exactly(*corners(divided, a.hull_only(), b.hull_only()))


def _rem(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    a, b = xs
    most_left = b.largest - 1 if is_integer(dtype_of(eqn)) else b.largest
    if b.low <= 0 <= b.high and is_integer(dtype_of(eqn)):
        most_left = max(most_left, a.largest)
    bound = min(a.largest, most_left)
    return _round(eqn, -bound if a.low < 0 else 0, bound if a.high > 0 else 0)


def _pow(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    x, y = xs
    if x.low < 0:
        return exactly(*limits(dtype_of(eqn)))
    with np.errstate(all="ignore"):
        ends = [np.float_power(p, q) for p in (x.low, x.high) for q in (y.low, y.high)]
    ends += [1.0] if x.low <= 1 <= x.high or y.low <= 0 <= y.high else []
    return roughly(least(*ends), most(*ends))


def _abs(eqn: Eqn, xs: Sequence[Interval]) -> Bounds:
    (x,) = xs
    return exactly(0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high)), x.largest)


def _cos(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    return Interval(-1.0, 1.0)


def _extreme(f: Callable[[Any, Any], Any]) -> Rule:
    return lambda eqn, xs: Interval(f(xs[0].low, xs[1].low), f(xs[0].high, xs[1].high))


def _clamp(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    a, x, b = xs
    return Interval(min(max(x.low, a.low), b.low), min(max(x.high, a.high), b.high))


def _select(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    which, *cases = xs
    return hull([x.hull_only() for x in cases[which.low : which.high + 1]])


def _compared(holds: Callable[[Interval, Interval], bool | None]) -> Rule:
    def rule(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
        if not all(is_integer(v.aval.dtype) for v in eqn.invars):
            return Interval(0, 1)  # a NaN is neither less nor more
        found = holds(*xs)
        return Interval(0, 1) if found is None else Interval(int(found), int(found))

    return rule


def _less(a: Interval, b: Interval) -> bool | None:
    return True if a.high < b.low else False if a.low >= b.high else None


def _at_most(a: Interval, b: Interval) -> bool | None:
    return True if a.high <= b.low else False if a.low > b.high else None


def _and(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    a, b = xs
    if dtype_of(eqn) == jnp.bool_:
        return Interval(a.low & b.low, a.high & b.high)
    highs = [x.high for x in xs if x.low >= 0]
    return Interval(0, min(highs)) if highs else Interval(*limits(dtype_of(eqn)))


def _or(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    if dtype_of(eqn) == jnp.bool_ and eqn.primitive.name == "or":
        return Interval(xs[0].low | xs[1].low, xs[0].high | xs[1].high)
    if min(x.low for x in xs) < 0:
        return Interval(*limits(dtype_of(eqn)))
    return Interval(0, 2 ** max(x.high for x in xs).bit_length() - 1)


def _not(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    low, high = limits(dtype_of(eqn))
    return Interval(low + high - xs[0].high, low + high - xs[0].low)


def _shift_left(eqn: Eqn, xs: Sequence[Interval]) -> Bounds | Interval:
    x, n = xs
    if n.low < 0 or n.high >= 64:
        return Interval(*limits(dtype_of(eqn)))
    return exactly(*corners(lambda a, b: a << b, x.hull_only(), n.hull_only()))


def _shift_right(eqn: Eqn, xs: Sequence[Interval]) -> Interval:
    x, n = xs
    bits = jnp.iinfo(dtype_of(eqn)).bits
    low, high = max(n.low, 0), bits if n.low < 0 else min(n.high, bits)
    if x.low < 0 and eqn.primitive.name == "shift_right_logical":
        x, top = Interval(0, 2**bits - 1), limits(dtype_of(eqn))
        if low == 0:
            return Interval(*top)
    return Interval(*corners(lambda a, b: a >> b, x.hull_only(), Interval(low, high)))


def _convert(eqn: Eqn, xs: Sequence[Interval]) -> Result:
    (x,), dtype = xs, dtype_of(eqn)
    before = eqn.invars[0].aval.dtype
    if dtype == jnp.bool_:
        never, always = x.low > 0 or x.high < 0, x.low == x.high == 0
        return Interval(int(never), int(not always))
    if is_integer(dtype):
        if is_integer(before):
            return exactly(x.low, x.high)
        return exactly(*(e if math.isinf(e) else math.trunc(e) for e in (x.low, x.high)))
    if not (is_integer(before) or jnp.issubdtype(before, jnp.floating)) or not jnp.issubdtype(
        dtype, jnp.floating
    ):
        return any_of(eqn, xs)
    with np.errstate(all="ignore"):  # rounding never falls
        low, high = (float(np.asarray(e, np.float64).astype(dtype)) for e in (x.low, x.high))
    low, high = -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high
    return flushed(low, high, dtype)


def _sign(x: float) -> float:
    return (x > 0) - (x < 0)


ELEMENTWISE: dict[str, Rule] = {
    "add": _add,
    "add_any": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "rem": _rem,
    "neg": lambda eqn, xs: exactly(-xs[0].high, -xs[0].low),
    "abs": _abs,
    "max": _extreme(max),
    "min": _extreme(min),
    "clamp": _clamp,
    "select_n": _select,
    "sign": _stepped(_sign),
    "floor": _stepped(math.floor),
    "ceil": _stepped(math.ceil),
    "round": _nearest,
    "square": lambda eqn, xs: _power(eqn, xs[0], 2),
    "one_minus_square": _one_minus_square,
    "polynomial": _polynomial,
    "integer_pow": lambda eqn, xs: _power(eqn, xs[0], eqn.params["y"]),
    "pow": _pow,
    "sqrt": _rising(np.sqrt, (0, math.inf)),
    "rsqrt": _rsqrt,
    "exp": _rising(np.exp),
    "exp2": _rising(np.exp2),
    "expm1": _within(_rising(np.expm1), -1.0, math.inf),
    "log": _rising(np.log, (0, math.inf)),
    "log2": _rising(np.log2, (0, math.inf)),
    "log1p": _rising(np.log1p, (-1, math.inf)),
    "tanh": _within(_rising(np.tanh), -1.0, 1.0),
    "logistic": _within(_rising(lambda x: 1 / (1 + np.exp(-x))), 0.0, 1.0),
    "erf": _within(_rising(math.erf), -1.0, 1.0),
    "erfc": _within(_falling(math.erfc), 0.0, 2.0),
    "sin": _cos,
    "cos": _cos,
    "is_finite": _between(0, 1),
    "eq": _compared(lambda a, b: False if a.high < b.low or b.high < a.low else None),
    "ne": _compared(lambda a, b: True if a.high < b.low or b.high < a.low else None),
    "lt": _compared(_less),
    "le": _compared(_at_most),
    "gt": _compared(lambda a, b: _less(b, a)),
    "ge": _compared(lambda a, b: _at_most(b, a)),
    "and": _and,
    "or": _or,
    "xor": _or,
    "not": _not,
    "shift_left": _shift_left,
    "shift_right_arithmetic": _shift_right,
    "shift_right_logical": _shift_right,
    "convert_element_type": _convert,
    "reduce_precision": lambda eqn, xs: Bounds(
        xs[0].low,
        xs[0].high,
        *(
            times(abs(e), 2.0 ** -eqn.params["mantissa_bits"] / jnp.finfo(dtype_of(eqn)).eps)
            for e in (xs[0].low, xs[0].high)
        ),
    ),
}
