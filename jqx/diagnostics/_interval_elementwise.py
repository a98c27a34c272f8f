"""Intervals of the results of elementwise primitives."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._compat import Eqn
from ._intervals import (
    ULPS,
    Bounds,
    Interval,
    Result,
    Rule,
    any_of,
    corners,
    dtype_of,
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
        found = rounded(roughly(min(ends), max(ends)), dtype_of(eqn))
        return Interval(max(found.low, image[0]), min(found.high, image[1]))

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
    (x,), dtype, before = xs, dtype_of(eqn), eqn.invars[0].aval.dtype
    if dtype == jnp.bool_:
        return Interval(0, 1)
    if is_integer(dtype):
        return Bounds(*(e if math.isinf(e) else math.trunc(e) for e in (x.low, x.high)))
    reals = [is_integer(t) or jnp.issubdtype(t, jnp.floating) for t in (before, dtype)]
    if not all(reals):
        return any_of(eqn)
    with np.errstate(all="ignore"):  # rounding is monotone
        low, high = (float(np.asarray(e, np.float64).astype(dtype)) for e in (x.low, x.high))
    low, high = -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high
    return flushed(low, high, dtype)


ELEMENTWISE: dict[str, Rule] = {
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
}
