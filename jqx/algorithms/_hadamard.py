"""Hadamard matrices: orthogonal, with entries 1 and -1. They spread a value over all channels."""

import functools
import math

import numpy as np

from .._errors import fail
from ._labels import Array

_MOST = 64
"""Larger rotations are Kronecker products of two smaller ones."""


def is_order(n: int) -> bool:
    """Whether a Hadamard matrix of a size is available."""
    return _made(n) is not None


@functools.cache
def hadamard(n: int) -> Array:
    """Returns a Hadamard matrix, entries 1 and -1, int8 [n, n].

    Sizes are a power of two times one of these: 1; `q + 1` for a prime power `q = 4 k + 3`;
    `2 (q + 1)` for a prime power `q = 4 k + 1`; sizes that four circulant matrices give.

    Raises:
      ValueError: no Hadamard matrix of that size exists, or none is available.

    Source: Sylvester 1867; Paley 1933; Goethals and Seidel 1967.
    """
    found = _made(n)
    if found is None:
        raise fail(
            "algorithms.rotate",
            "no Hadamard matrix of that size is available.",
            given=f"{n}",
            expected="1, 2, or a multiple of 4 such as 12, 20, 28, 36 times a power of two",
            fix="rotate blocks of channels: block=64.",
        )
    assert found is not None
    return found


def orthogonal(n: int) -> Array:
    """Returns a Hadamard matrix divided by the square root of its size, float64 [n, n]."""
    return hadamard(n) / np.sqrt(n)


@functools.cache
def _made(n: int) -> Array | None:
    if n in (1, 2):
        return np.array([[1, 1], [1, -1]], np.int8)[:n, :n]
    if n < 1 or n % 4:
        return None
    for make in (_first_kind, _second_kind, _four_circulants):
        found = make(n)
        if found is not None:
            return found
    half = _made(n // 2)
    return None if half is None else np.kron(_made(2), half)  # type: ignore[arg-type]


def _first_kind(n: int) -> Array | None:
    """Paley's first construction, for a prime power n - 1 = 4 k + 3."""
    q = _residues(n - 1)
    if q is None or n % 4:
        return None
    s = np.zeros((n, n), np.int8)
    s[0, 1:], s[1:, 0], s[1:, 1:] = 1, -1, q
    return s + np.eye(n, dtype=np.int8)


def _second_kind(n: int) -> Array | None:
    """Paley's second construction, for a prime power n / 2 - 1 = 4 k + 1."""
    q = _residues(n // 2 - 1) if n // 2 % 4 == 2 else None
    if q is None:
        return None
    s = np.zeros((n // 2, n // 2), np.int8)
    s[0, 1:], s[1:, 0], s[1:, 1:] = 1, 1, q
    one, two = np.array([[1, 1], [1, -1]], np.int8), np.array([[1, -1], [-1, -1]], np.int8)
    return np.kron(s, one) + np.kron(np.eye(n // 2, dtype=np.int8), two)


def _residues(q: int) -> Array | None:
    """Returns the matrix of `x(a - b)` in the field of q elements, where `x` is 1 for squares and
    -1 for others; `None` if there is no field of odd size q.
    """
    p = next((p for p in range(3, q + 1, 2) if q % p == 0), 0)
    power = round(math.log(q, p)) if p else 0
    if not p or p**power != q or any(p % d == 0 for d in range(3, math.isqrt(p) + 1, 2)):
        return None
    # Elements are polynomials, stored as digits; products are taken modulo an irreducible one.
    digits = np.array([[i // p**k % p for k in range(power)] for i in range(q)])
    weights = p ** np.arange(power)
    tail = _irreducible(p, power)
    squares = {int(_times(x, x, tail, p) @ weights) for x in digits[1:]}
    difference = (digits[:, None] - digits[None]) % p @ weights
    kind = np.array([0] + [1 if i in squares else -1 for i in range(1, q)], np.int8)
    return kind[difference]


def _times(a: Array, b: Array, tail: Array, p: int) -> Array:
    """Returns the product of polynomials modulo `x^n = tail`, lowest digit first."""
    n, found = len(a), np.convolve(a, b) % p
    for k in range(len(found) - 1, n - 1, -1):
        found[k - n : k] = (found[k - n : k] + found[k] * tail) % p
    return found[:n]


def _irreducible(p: int, n: int) -> Array:
    """Returns the tail of a polynomial of degree n that has no divisor but itself."""
    if n == 1:
        return np.zeros(1, int)
    q = p**n
    for code in range(1, q):
        tail = np.array([code // p**k % p for k in range(n)])
        x = np.eye(n, dtype=int)[1]
        seen, power = set(), np.eye(n, dtype=int)[0]
        for _ in range(q - 1):  # irreducible if its root generates all elements but 0
            power = _times(power, x, tail, p)
            seen.add(tuple(power))
        if len(seen) == q - 1 and tuple(np.zeros(n, int)) not in seen:
            return tail
    raise AssertionError(f"no field of {q} elements")


_SETS = {
    13: (12, (44, 24, 42, 33)),
    23: (22, (752, 671, 794, 1162)),
    29: (28, (2964, 13377, 14668, 14694)),
    43: (7, (29, 44, 69, 11)),
}
"""For some sizes, four symmetric circulant matrices with entries 1 and -1, whose squares add up to
four times the identity. Stored as a generator of a group of units, and for each matrix bits that
say which orbits have -1 in its first row, in the order of their least elements. Found by search.
"""


def _four_circulants(n: int) -> Array | None:
    """Williamson's construction from four symmetric circulant matrices, in the array of Goethals
    and Seidel; if n / 4 is three times their size, spread as by Cooper and Wallis.
    """
    size, times = (n // 12, 3) if n % 12 == 0 and n // 12 in _SETS else (n // 4, 1)
    if size not in _SETS:
        return None
    unit, sets = _SETS[size]
    a, b, c, d = (_circulant(_row(size, unit, bits)) for bits in sets)
    turned = np.eye(times, dtype=np.int8)[::-1]
    steps = [_circulant(row) for row in np.eye(times, dtype=np.int8)]

    def spread(*own: Array) -> Array:
        return sum(np.kron(x, step) for x, step in zip(own, steps, strict=False))  # type: ignore

    flip = np.kron(np.eye(size, dtype=np.int8)[::-1], turned)
    a, b, c, d = spread(a, b, c), spread(-b, a, d), spread(-c, -d, a), spread(-d, c, -b)
    bt, ct, dt = (x.T @ flip for x in (b, c, d))
    b, c, d = (x @ flip for x in (b, c, d))
    return np.block([[a, b, c, d], [-b, a, dt, -ct], [-c, -dt, a, bt], [-d, ct, -bt, a]])


def _row(n: int, unit: int, bits: int) -> Array:
    """Returns the first row of a circulant matrix, with -1 on some orbits."""
    left, row, place = set(range(1, n)), np.ones(n, np.int8), 0
    while left:
        orbit, x = {min(left)}, min(left) * unit % n
        while x not in orbit:
            orbit.add(x)
            x = x * unit % n
        left -= orbit
        row[list(orbit)] = -1 if bits >> place & 1 else 1
        place += 1
    return row


def _circulant(row: Array) -> Array:
    n = len(row)
    return row[(np.arange(n)[None] - np.arange(n)[:, None]) % n]


@functools.cache
def factors_of(n: int) -> tuple[int, ...]:
    """Returns the sizes of Hadamard matrices whose Kronecker product has size n: one, or two that
    are as close to each other as possible; empty if there is no such matrix.
    """
    if n <= _MOST and is_order(n):
        return (n,)
    pairs = [(a, n // a) for a in range(2, math.isqrt(n) + 1) if n % a == 0]
    known = [pair for pair in pairs if is_order(pair[0]) and is_order(pair[1])]
    return known[-1] if known else (n,) if is_order(n) else ()


def largest_block(n: int) -> int:
    """Returns the largest divisor of a number of channels for which there is a rotation."""
    return next(size for size in range(n, 0, -1) if n % size == 0 and factors_of(size))
