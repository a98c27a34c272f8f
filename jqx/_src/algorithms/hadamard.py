"""Hadamard matrices: orthogonal, with entries 1 and -1. They spread a value over all channels."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ..errors import fail
from ..transforms.channel_map import ChannelMap
from .labels import Array

_MOST = 64
"""Larger rotations are Kronecker products of two smaller ones."""


@functools.cache
def hadamard(n: int) -> Array:
    """Returns a Hadamard matrix, entries 1 and -1, int8 [n, n].

    Sizes are a power of two times one of these: 1; `q + 1` for a prime power `q = 4 k + 3`;
    `2 (q + 1)` for a prime power `q = 4 k + 1`; sizes that four circulant matrices give.

    Raises:
      ValueError: no Hadamard matrix of that size exists, or none is available.

    Source: Sylvester 1867; Paley 1933; Goethals and Seidel 1967.
    """
    matrix = _made(n)
    if matrix is None:
        problem = f"no Hadamard matrix of size {n} is available."
        raise fail("algorithms.rotate", problem, fix="rotate blocks of channels: block=64.")
    return matrix


def is_order(n: int) -> bool:
    """Whether a Hadamard matrix of a size is available."""
    return _made(n) is not None


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
        matrix = make(n)
        if matrix is not None:
            return matrix
    smaller = _made(n // 2)
    return None if smaller is None else np.kron(_made(2), smaller)  # type: ignore[arg-type]


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
    positive, negative = np.array([[1, 1], [1, -1]]), np.array([[1, -1], [-1, -1]])
    result = np.kron(s, positive) + np.kron(np.eye(n // 2, dtype=np.int8), negative)
    return result.astype(np.int8)


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
    n, product = len(a), np.convolve(a, b) % p
    for k in range(len(product) - 1, n - 1, -1):
        product[k - n : k] = (product[k - n : k] + product[k] * tail) % p
    return product[:n]


def _irreducible(p: int, n: int) -> Array:
    """Returns the tail of a polynomial of degree n that has no divisor but itself."""
    if n == 1:
        return np.zeros(1, int)
    q = p**n
    for code in range(1, q):
        tail = np.array([code // p**k % p for k in range(n)])
        x = np.eye(n, dtype=int)[1]
        powers, power = set(), np.eye(n, dtype=int)[0]
        for _ in range(q - 1):  # irreducible if its root generates all elements but 0
            power = _times(power, x, tail, p)
            powers.add(tuple(power))
        if len(powers) == q - 1 and tuple(np.zeros(n, int)) not in powers:
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
    size, repeats = (n // 12, 3) if n % 12 == 0 and n // 12 in _SETS else (n // 4, 1)
    if size not in _SETS:
        return None
    unit, sets = _SETS[size]
    a, b, c, d = (_circulant(_row(size, unit, bits)) for bits in sets)
    turned = np.eye(repeats, dtype=np.int8)[::-1]
    steps = [_circulant(row) for row in np.eye(repeats, dtype=np.int8)]

    def spread(*matrices: Array) -> Array:
        return sum(np.kron(x, step) for x, step in zip(matrices, steps, strict=False))  # type: ignore

    flip = np.kron(np.eye(size, dtype=np.int8)[::-1], turned)
    a, b, c, d = spread(a, b, c), spread(-b, a, d), spread(-c, -d, a), spread(-d, c, -b)
    bt, ct, dt = (x.T @ flip for x in (b, c, d))
    b, c, d = (x @ flip for x in (b, c, d))
    return np.block([[a, b, c, d], [-b, a, dt, -ct], [-c, -dt, a, bt], [-d, ct, -bt, a]])


def _row(n: int, unit: int, bits: int) -> Array:
    """Returns the first row of a circulant matrix, with -1 on some orbits."""
    left, row, orbit_index = set(range(1, n)), np.ones(n, np.int8), 0
    while left:
        orbit, x = {min(left)}, min(left) * unit % n
        while x not in orbit:
            orbit.add(x)
            x = x * unit % n
        left -= orbit
        row[list(orbit)] = -1 if bits >> orbit_index & 1 else 1
        orbit_index += 1
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
    available = [pair for pair in pairs if is_order(pair[0]) and is_order(pair[1])]
    return available[-1] if available else (n,) if is_order(n) else ()


def largest_block(n: int) -> int:
    """Returns the largest divisor of a number of channels for which there is a rotation."""
    return next(size for size in range(n, 0, -1) if n % size == 0 and factors_of(size))


# Random orthogonal matrices, float64 on the host: Hadamard matrices where available.


@dataclasses.dataclass(frozen=True)
class Orthogonal:
    """A matrix `Q`: signs, then a Kronecker product of matrices for each block of as many channels
    as it has rows.

    Attributes:
      signs: signs of all channels, 1 or -1.
      factors: square matrices.
    """

    signs: Array
    factors: tuple[Array, ...]

    @classmethod
    def hadamard(cls, count: int, sizes: Sequence[int], seed: int) -> "Orthogonal":
        """Returns a product of Hadamard matrices of some sizes, with random signs."""
        return cls(signs_of(count, seed), tuple(map(orthogonal, sizes)))

    @classmethod
    def any(cls, count: int, seed: int) -> "Orthogonal":
        """Returns a matrix that mixes all channels; random if no Hadamard matrix is available."""
        if sizes := factors_of(count):
            return cls.hadamard(count, sizes, seed)
        q, r = np.linalg.qr(np.random.default_rng((seed, count)).normal(size=(count, count)))
        return cls(np.ones(count), (q * np.sign(np.diag(r)),))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of its factors."""
        return tuple(map(len, self.factors))

    def times(self, x: Array) -> Array:
        """Returns `x Q` along the last axis of an array, for each block of channels."""
        parts = x.reshape(*x.shape[:-1], -1, len(self.signs)) * self.signs
        blocks = parts.reshape(*x.shape[:-1], -1, *self.sizes)
        for i, factor in enumerate(self.factors):
            axis = i - len(self.factors)
            blocks = np.moveaxis(np.moveaxis(blocks, axis, -1) @ factor, -1, axis)
        return blocks.reshape(x.shape)

    def map(self, shape: Sequence[int], loops: Sequence[int]) -> ChannelMap:
        """Returns the rotation of a value at a site, in each step of the loops around it.

        Args:
          shape: [*batch, channels] of the value.
          loops: lengths of the loops.
        """
        return ChannelMap(
            scale=_float(np.broadcast_to(self._repeated(shape[-1]), (*loops, *shape))),
            factors=tuple(_steps(x, loops) for x in self.factors),
        )

    def inverse(self, gain: Array, loops: Sequence[int]) -> tuple[ChannelMap, ChannelMap]:
        """Returns a map that rotates a value back, and one that multiplies it by a gain after that.

        Args:
          gain: [*loops, *batch, channels].
          loops: lengths of the loops.
        """
        back = ChannelMap(factors=tuple(_steps(x.T, loops) for x in self.factors))
        return back, ChannelMap(scale=_float(gain * self._repeated(gain.shape[-1])))

    def _repeated(self, count: int) -> Array:
        return np.tile(self.signs, count // len(self.signs))


def signs_of(count: int, seed: int) -> Array:
    """Returns random signs for a number of channels."""
    return np.random.default_rng((seed, count)).choice(np.array([-1.0, 1.0]), count)


def _steps(x: Array, loops: Sequence[int]) -> "jnp.ndarray":
    return _float(np.broadcast_to(x, (*loops, *x.shape)))


def _float(x: Array) -> "jnp.ndarray":
    return jnp.asarray(x, jnp.float32)
