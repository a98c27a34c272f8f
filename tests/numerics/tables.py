"""Number formats as NumPy tables of all their numbers, and rounding to a table, without jqx.

Float32 subnormals are left out of every grid: XLA on CPU flushes them to zero.
"""

import dataclasses
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from jqx import RoundMode
from jqx.extend import QType

GRID = 2048  # one length for all formats: op by op, each operation is then compiled once
TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Table:
    """The finite numbers of a format, increasing, and what becomes of everything else.

    Attributes:
      numbers: float64; where values overflow, the first and the last are one step too large.
      upper_is_even: of each gap between neighbours, whether a tie to even goes up.
      beyond: what the first and last number stand for; `None` where values saturate.
      nan: what NaN becomes.
    """

    numbers: np.ndarray
    upper_is_even: np.ndarray
    beyond: float | None = None
    nan: float = np.nan

    def __post_init__(self) -> None:
        assert np.all(np.diff(self.numbers) > 0)
        a, b = self.numbers[:-1], self.numbers[1:]
        exact = [(Fraction(low) + Fraction(high)) / 2 for low, high in zip(a, b, strict=True)]
        assert [Fraction(m) for m in self.middles] == exact  # so float64 decides every tie

    @property
    def middles(self) -> np.ndarray:
        return (self.numbers[:-1] + self.numbers[1:]) / 2

    def rounded(self, y: np.ndarray, mode: RoundMode) -> np.ndarray:
        """Rounds float32 or float64 values, as float64."""
        with np.errstate(invalid="ignore"):
            wide = np.asarray(y).astype(np.float64)
        v = np.clip(wide, self.numbers[0], self.numbers[-1])
        gap = np.clip(np.searchsorted(self.numbers, v) - 1, 0, len(self.numbers) - 2)
        below, above = self.numbers[gap], self.numbers[gap + 1]
        up = _goes_up(v, below, above, self.middles[gap], self.upper_is_even[gap], mode)
        r = np.where(v == below, below, np.where(up | (v == above), above, below))
        if self.beyond is not None:
            r = np.where((gap == 0) & (r == below), -self.beyond, r)
            r = np.where((gap == len(self.numbers) - 2) & (r == above), self.beyond, r)
        return np.where(np.isnan(y), self.nan, r)


def _goes_up(
    y: np.ndarray,
    below: np.ndarray,
    above: np.ndarray,
    middle: np.ndarray,
    even: np.ndarray,
    mode: RoundMode,
) -> np.ndarray:
    """Whether `y`, strictly between two neighbours, goes to the upper one."""
    match mode.name:
        case "UP":
            return np.ones(y.shape, bool)
        case "DOWN":
            return np.zeros(y.shape, bool)
        case "TOWARD_INFINITY":
            return y >= 0
        case "TOWARD_ZERO":  # neither end of a gap across zero lies toward it: the nearest
            across = (below < 0) & (above > 0)
            return np.where(across, y >= middle, y < 0)
    tie = {
        "NEAREST_UPWARD": np.ones(y.shape, bool),
        "NEAREST_DOWNWARD": np.zeros(y.shape, bool),
        "NEAREST_TOWARD_EVEN": even,
        "NEAREST_TOWARD_INFINITY": np.abs(above) >= np.abs(below),
        "NEAREST_TOWARD_ZERO": np.abs(above) < np.abs(below),
    }[mode.name]
    return (y > middle) | ((y == middle) & tie)


def minifloat_numbers(e: int, m: int, specials: str, bias: int | None = None) -> np.ndarray:
    """The number of each code, as float64: sign, then `e` exponent and `m` mantissa bits.

    `specials` is the suffix of the name: "" as in IEEE 754, "fn", "fnuz", or "finite".
    """
    if bias is None:
        bias = 2 ** (e - 1) - 1 + (specials == "fnuz")
    numbers = []
    for code in range(2 ** (1 + e + m)):
        negative, size = divmod(code, 2 ** (e + m))
        exponent, mantissa = divmod(size, 2**m)
        if exponent == 0:
            number = np.ldexp(float(mantissa), 1 - bias - m)
        else:
            number = np.ldexp(float(2**m + mantissa), exponent - bias - m)
        if specials == "" and exponent == 2**e - 1:
            number = np.nan if mantissa else np.inf
        if specials == "fn" and size == 2 ** (e + m) - 1:
            number = np.nan
        if specials == "fnuz" and negative and size == 0:
            number = np.nan
        numbers.append(-number if negative else number)
    return np.array(numbers)


def minifloat_table(
    e: int, m: int, specials: str, bias: int | None = None, saturate: bool = True
) -> Table:
    """The table of a minifloat; of a non-saturating one with a step more at either end.

    Even is the number with the even last place. Without mantissa bits each power of two is the
    last place itself: both neighbours are odd, and IEEE 754-2019, 4.3.1, takes the larger.
    """
    numbers = minifloat_numbers(e, m, specials, bias)
    sizes = numbers[: 2 ** (e + m)]
    sizes = sizes[np.isfinite(sizes)]
    if not saturate:
        exponent = np.frexp(sizes[-1])[1] - 1
        step = max(2.0 ** (exponent - m), numbers[1])  # no finer than that of subnormal numbers
        sizes = np.append(sizes, sizes[-1] + step)
    up = np.arange(1, len(sizes)) % 2 == 0 if m else np.arange(1, len(sizes)) > 1
    return Table(
        np.concatenate([-sizes[:0:-1], sizes]),
        np.concatenate([~up[::-1], up]),
        beyond=None if saturate else (np.inf if specials == "" else np.nan),
        nan=0.0 if specials == "finite" else np.nan,
    )


def table_of(numbers: Any, nan: float) -> Table:
    """The table of an integer format or a codebook: numbers of even place are even."""
    numbers = np.asarray(numbers, np.float64)
    place = np.arange(len(numbers)) - (numbers[0] if numbers[0] % 2 in (0, 1) else 0)
    return Table(numbers, place[1:] % 2 == 0, nan=nan)


def grid(numbers: np.ndarray, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Every number, every midpoint, both neighbours of each; extremes, then random floats."""
    kind = np.dtype(dtype).type
    numbers = np.asarray(numbers, np.float64)
    exact = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2]).astype(kind)
    near = [np.nextafter(exact, kind(to)) for to in (-np.inf, np.inf)]
    extremes = [0.0, TINY, 1e-30, 1e-7, 1e7, 1e30, float(np.finfo(np.float32).max), np.inf, np.nan]
    extremes = np.array([*extremes, *(-v for v in extremes)], kind)
    rng = np.random.default_rng(seed)
    spread = (rng.uniform(-1.3, 1.3, 200) * numbers[-1]).astype(kind)
    bits = rng.integers(0, 2**32, GRID, dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaN
        bits = bits.astype(kind)
    every = np.concatenate([exact, *near, extremes, spread, bits])
    normal = (every == 0) | ~(np.abs(every) < TINY)
    every = every[normal]
    assert len(exact) * 3 + len(extremes) <= GRID
    return every[:GRID]


def assert_same_numbers(result: Any, expected: Any) -> None:
    """Asserts equal values and equal signs, of zero too; NaN equals NaN of either sign."""
    result, expected = np.asarray(result), np.asarray(expected)
    np.testing.assert_array_equal(result.astype(np.float64), expected, strict=True)
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(result)[is_number], np.signbit(expected)[is_number])


def every_way(qtype: QType, y: jax.Array, mode: RoundMode) -> dict[str, jax.Array]:
    """What a format makes of values, in each way to ask for it."""
    codes = qtype.encode(y, mode)
    return {
        "round": qtype.round(y, mode),
        "encode": codes,
        "decode": qtype.decode(codes),
        "to_bits": qtype.to_bits(codes),
        "encode_bits": qtype.encode_bits(y, mode),
    }


def assert_conforms(
    qtype: QType, actual: dict[str, jax.Array], y: np.ndarray, expected: np.ndarray
) -> None:
    """Asserts that `every_way` found the expected numbers, in the promised dtypes and shapes.

    What is rounded to zero may be zero of either sign, but the same one in each way.
    """
    assert actual["round"].dtype == y.dtype
    assert actual["encode"].dtype == qtype.storage
    assert actual["decode"].dtype == np.float32
    assert actual["to_bits"].dtype == actual["encode_bits"].dtype == np.uint8
    rounded = np.asarray(actual["round"]).astype(np.float64)
    np.testing.assert_array_equal(rounded, expected, strict=True)
    assert_same_numbers(actual["decode"], rounded)
    np.testing.assert_array_equal(actual["encode_bits"], actual["to_bits"], strict=True)
    assert np.all(np.asarray(actual["to_bits"]) < 2**qtype.bits)
