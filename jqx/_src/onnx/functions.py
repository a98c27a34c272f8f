"""Primitives that ONNX has no operation for, as functions of other primitives."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from ..compat import Eqn
from .primitives import refuse

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The function of each primitive, by its name: of an equation and its operands."""

HELD = {"composite": ("jaxpr", "call_jaxpr")}
"""Primitives that are written as a function that they hold, where plans have no sites, and what
versions of JAX call it.
"""


def _function(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the function of primitives."""

    def register(f: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS.update(dict.fromkeys(names, f))
        return f

    return register


def function_of(eqn: Eqn) -> Callable[..., list[Any]] | None:
    """Returns the function that an equation is written as, of its operands; `None` if it is none.
    Keys of random numbers are their data there.
    """
    if any(map(compat.is_key, (*eqn.invars, *eqn.outvars))):
        function = _of_keys
    elif eqn.primitive.name in FUNCTIONS:
        function = FUNCTIONS[eqn.primitive.name]
    else:
        return None

    def called(*xs: Any) -> list[Any]:
        with compat.equation_context(eqn):  # for the line in an error
            results = function(eqn, *xs)
        return results if isinstance(results, list) else [results]

    return called


# Special functions of floats, in float32 at least.


def _in_float(*dtypes: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Has a function computed in float32, and in float64 if it is among the dtypes."""

    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        def computed(eqn: Eqn, *xs: jax.Array) -> jax.Array:
            dtype = xs[0].dtype
            if dtype == np.float64 and "float64" not in dtypes:
                raise refuse(eqn, "of float64 has no form in ONNX")
            wide = jnp.promote_types(dtype, np.float32)
            return f(*(x.astype(wide) for x in xs)).astype(dtype)

        return computed

    return wrap


_ERF_INV = (
    (
        *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
        *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
    ),
    (
        *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
        *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
    ),
)
"""The polynomials of the middle and of the tails, from the highest power (Giles 2012)."""


@_function("erf_inv")
@_in_float()
def _erf_inv(x: jax.Array) -> jax.Array:
    w = -jnp.log1p(-x * x)
    middle = w < 5
    t = jnp.where(middle, w - 2.5, jnp.sqrt(jnp.maximum(w, 5)) - 3)
    p = functools.reduce(lambda p, c: jnp.where(middle, *c) + p * t, zip(*_ERF_INV, strict=True), 0)
    return jnp.where(jnp.abs(x) == 1, x * jnp.inf, p * x)


_LANCZOS = (
    *(0.99999999999980993, 676.520368121885099, -1259.13921672240287, 771.323428777653077),
    *(-176.615029162140599, 12.5073432786869048, -0.138571095265720116, 9.98436957801957086e-6),
    1.50563273514931156e-7,
)
"""The coefficients for g = 7, of the gamma function."""


def _lanczos(z: jax.Array, power: int = 1) -> jax.Array:
    """Returns the series of the gamma function of `z + 1`; with 2 its derivative times -1."""
    first, *rest = _LANCZOS
    start = jnp.full_like(z, first if power == 1 else 0)
    return sum((c / (z + i) ** power for i, c in enumerate(rest, 1)), start)


@_function("lgamma")
@_in_float("float64")
def _lgamma(x: jax.Array) -> jax.Array:
    """By the reflection of numbers below 1/2; infinite at integers up to 0."""
    small = x < 0.5
    z = jnp.where(small, -x, x - 1)
    log_t = math.log(7.5) + jnp.log1p(z / 7.5)
    y = (z + 0.5 - (z + 7.5) / log_t) * log_t + math.log(2 * math.pi) / 2 + jnp.log(_lanczos(z))
    part = jnp.abs(x) - jnp.floor(jnp.abs(x))
    sine = jnp.sin(math.pi * jnp.where(part > 0.5, 1 - part, part))
    y = jnp.where(small, math.log(math.pi) - jnp.log(sine) - y, y)
    return jnp.where(jnp.isinf(x) | (small & (sine == 0)), jnp.inf, y)


@_function("digamma")
@_in_float("float64")
def _digamma(x: jax.Array) -> jax.Array:
    """By the reflection of numbers below 1/2; NaN at integers up to 0."""
    small = x < 0.5
    z = jnp.where(small, -x, x - 1)
    y = math.log(7.5) + jnp.log1p(z / 7.5) - _lanczos(z, 2) / _lanczos(z) - 7 / (z + 7.5)
    part = x - jnp.floor(x + 0.5)
    y = jnp.where(small, y - math.pi / jnp.tan(math.pi * part), y)
    return jnp.where((x <= 0) & (x == jnp.floor(x)), jnp.nan, y)


def _is_negative(x: jax.Array) -> jax.Array:
    """Whether the sign of a number is negative, also that of zero."""
    return (x < 0) | (1 / x < 0)


@_function("atan2")
@_in_float()
def _atan2(y: jax.Array, x: jax.Array) -> jax.Array:
    """The angle between 0 and 45 degrees, mirrored to where it belongs."""
    a, b = jnp.abs(x), jnp.abs(y)
    low, high = jnp.minimum(a, b), jnp.maximum(a, b)
    angle = jnp.arctan(jnp.where(low == high, (high != 0).astype(x.dtype), low / high))
    angle = jnp.where(jnp.isnan(x + y) & ~jnp.isinf(high), jnp.nan, angle)
    angle = jnp.where(b > a, math.pi / 2 - angle, angle)
    angle = jnp.where(_is_negative(x), math.pi - angle, angle)
    angle = jnp.where(_is_negative(y), -angle, angle)
    return jnp.where(jnp.isnan(x) | jnp.isnan(y), jnp.nan, angle)


# Orders, and bits of integers.


@_function("lt_to", "le_to", "eq_to")
def _total_order(eqn: Eqn, x: jax.Array, y: jax.Array) -> jax.Array:
    """NaN is above all numbers, and equal to itself; 0 and -0 are equal."""
    if eqn.primitive.name == "eq_to":
        return (x == y) | ((x != x) & (y != y))
    if eqn.primitive.name == "le_to":
        return (x <= y) | (y != y)
    return (x < y) | ((x == x) & (y != y))


@_function("population_count", "clz")
def _count(eqn: Eqn, x: jax.Array) -> jax.Array:
    """The ones among the bits; of all but the leading zeros for `clz`."""
    bits = jnp.iinfo(x.dtype).bits
    places = [lax.shift_right_logical(x, jnp.full_like(x, i)) for i in range(bits)]
    if eqn.primitive.name == "clz":
        return sum(((p == 0).astype(x.dtype) for p in places), jnp.zeros_like(x))
    return sum((p & jnp.ones_like(x) for p in places), jnp.zeros_like(x))


@_function("nextafter")
def _nextafter(eqn: Eqn, x: jax.Array, y: jax.Array) -> jax.Array:
    if x.dtype != np.float32:
        raise refuse(eqn, f"of {x.dtype.name} has no form in ONNX")
    bits = lax.bitcast_convert_type(x, jnp.int32)
    away = (x < y) == (x > 0)
    bits = jnp.where(x == 0, 1, bits + jnp.where(away, 1, -1))
    moved = lax.bitcast_convert_type(bits, jnp.float32)
    moved = jnp.where((x == 0) & (y < 0), -moved, moved)
    return jnp.where(x == y, y, jnp.where(jnp.isnan(x) | jnp.isnan(y), jnp.nan, moved))


# Scans and updates.


def _log_add_exp(x: jax.Array, y: jax.Array) -> jax.Array:
    high = jnp.maximum(x, y)
    safe = jnp.where(jnp.isinf(high), 0, high)
    return safe + jnp.log(jnp.exp(x - safe) + jnp.exp(y - safe))


_SCANS = {
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumlogsumexp": _log_add_exp,
}


@_function(*_SCANS)
def _scan(eqn: Eqn, x: jax.Array) -> jax.Array:
    axis = eqn.params["axis"]
    if not isinstance(x.shape[axis], int):
        raise refuse(eqn, "over an open size has no form in ONNX")
    combine = _SCANS[eqn.primitive.name]
    return lax.associative_scan(combine, x, reverse=eqn.params["reverse"], axis=axis)


@_function("scatter-sub")
def _scatter_sub(eqn: Eqn, x: jax.Array, index: jax.Array, update: jax.Array) -> jax.Array:
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    options = {name: eqn.params[name] for name in names}
    numbers = options.pop("dimension_numbers")
    return lax.scatter_add(x, index, -update, numbers, **options)


@_function("approx_top_k")
def _approx_top_k(eqn: Eqn, x: jax.Array) -> list[jax.Array]:
    """The exact ones."""
    p = eqn.params
    if not p["aggregate_to_topk"]:
        raise refuse(eqn, "that is not aggregated has no form in ONNX")
    rows = jnp.moveaxis(x, p["reduction_dimension"], -1)
    values, places = lax.top_k(rows if p["is_max_k"] else -rows, p["k"])
    values = values if p["is_max_k"] else -values
    return [jnp.moveaxis(y, -1, p["reduction_dimension"]) for y in (values, places)]


# Random numbers.

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


@_function("threefry2x32")
def _threefry(eqn: Eqn, *operands: jax.Array) -> list[jax.Array]:
    """Twenty rounds of additions, rotations and exclusive ors (Salmon et al. 2011)."""
    a, b, x, y = jnp.broadcast_arrays(*operands)
    keys = a, b, a ^ b ^ np.uint32(0x1BD11BDA)
    x, y = x + a, y + b
    for i in range(5):
        for n in _ROTATIONS[i % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(n)) | (y >> np.uint32(32 - n)))
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return [x, y]


@_function("iota_2x32_shape")
def _numbered(eqn: Eqn) -> list[jax.Array]:
    """The place of each element among all, in two words; the first is 0 below 2**32 elements."""
    shape = eqn.params["shape"]
    place = jnp.zeros(shape, jnp.uint32)
    for axis, n in enumerate(shape):
        step = lax.broadcasted_iota(jnp.uint32, shape, axis)
        place = place * jnp.asarray(n).astype(jnp.uint32) + step
    return [jnp.zeros(shape, jnp.uint32), place]


def _of_keys(eqn: Eqn, *operands: Any) -> list[Any]:
    """Evaluates an equation of keys, which are their data, on axes after all others."""
    name = eqn.primitive.name
    if name in ("random_wrap", "random_unwrap"):
        return list(operands)
    if name.startswith("random_"):
        return [_drawn(eqn, *operands)]
    axes = [-1 if compat.is_key(x) else None for x in eqn.invars]
    out = [-1 if compat.is_key(x) else None for x in eqn.outvars]
    if set(axes) == {None} or (None in out and len(out) > 1):
        raise refuse(eqn, "of keys of random numbers has no form in ONNX")
    return jax.vmap(lambda *xs: compat.bind(eqn, xs), tuple(axes), out)(*operands)


def _drawn(eqn: Eqn, *operands: Any) -> jax.Array:
    """Evaluates an equation of random numbers by the functions of its generator, for each key."""
    name, p = eqn.primitive.name.removeprefix("random_"), eqn.params
    draws = compat.generator_of(eqn)
    functions = {
        "seed": draws.seed,
        "fold_in": draws.fold_in,
        "split": lambda key: draws.split(key, p["shape"]),
        "bits": lambda key: draws.random_bits(key, p["bit_width"], p["shape"]),
    }
    if name not in functions:
        raise refuse(eqn, "has no rule for ONNX")
    shape: Sequence[Any] = jnp.broadcast_shapes(*(x.aval.shape for x in eqn.invars))
    key_shape = (*shape, *draws.key_shape)
    full = [key_shape if compat.is_key(x) else shape for x in eqn.invars]
    xs = [jnp.broadcast_to(x, n) for x, n in zip(operands, full, strict=True)]
    one = functions[name]
    for _ in shape:
        one = jax.vmap(one)
    return one(*xs)
