"""Codebooks: a sorted table of up to 256 numbers; a code is an index into the table. `Squares` has
a formula in place of its table.

Source of nf4: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv:2305.14314,
appendix E.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import check_fields, check_instance, flag, whole
from ..compat import explicit_sharding
from ..errors import fail
from .exact import RoundMode, round_to_integer
from .qtype import QType


@dataclasses.dataclass(frozen=True)
class Codebook(QType):
    """A table of numbers. Each real number is rounded to an entry, by default to the nearest one.

    The round mode decides as for integers, also for ties between two neighbours; the even neighbour
    is the one with the even index. Between two entries of opposite sign, toward zero means to the
    nearer entry. Values beyond the ends become the first or last entry; NaN becomes the entry 0, or
    the one nearest to 0.

    Attributes:
      entries: 2 to 256 finite numbers, strictly increasing; each is rounded to float32.
      label: the name of the format.

    Raises:
      TypeError: `entries` does not hold numbers, or `label` is not a string.
      ValueError: there are too few or too many entries, or they do not increase.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> thirds = jqx.numerics.Codebook((-1.0, -1 / 3, 1 / 3, 1.0), "thirds")
      >>> jqx.quantize(jnp.array([-0.9, 0.1, 5.0]), 1.0, qtype=thirds)
      Array([0, 2, 3], dtype=uint8)
    """

    entries: tuple[float, ...]
    label: str = "codebook"

    def __post_init__(self) -> None:
        name = "numerics.Codebook"
        check_instance(name, "label", self.label, str, fix="pass a name, such as 'mine'.")
        check_instance(name, "entries", self.entries, Iterable, fix="pass a tuple of numbers.")
        numbers: tuple[Any, ...] = (None,)  # an array without axes cannot be iterated over
        if getattr(self.entries, "shape", None) != ():
            numbers = tuple(self.entries)
        if not all(isinstance(entry, (int, float, np.integer, np.floating)) for entry in numbers):
            kinds = sorted({type(entry).__name__ for entry in numbers})
            problem = f"`entries` must hold numbers, not {', '.join(kinds)}."
            raise fail(name, problem, fix="pass a tuple of floats.", error=TypeError)
        with np.errstate(over="ignore"):
            entries = tuple(float(np.float32(min(max(e, -1e39), 1e39))) for e in numbers)
        increasing = all(a < b for a, b in itertools.pairwise(entries))
        if not (2 <= len(entries) <= 256 and increasing and all(map(math.isfinite, entries))):
            problem = f"`entries` is not a table of increasing numbers: {len(entries)} entries"
            problem += "." if increasing else " that do not increase."
            fix = "pass 2 to 256 finite numbers, sorted and without duplicates."
            raise fail(name, problem, fix=fix)
        object.__setattr__(self, "entries", entries)

    @property
    def name(self) -> str:
        return self.label

    @property
    def bits(self) -> int:
        return (len(self.entries) - 1).bit_length()

    @property
    def storage(self) -> jnp.dtype:
        return jnp.dtype(jnp.uint8)

    @property
    def low(self) -> float:
        return self.entries[0]

    @property
    def high(self) -> float:
        return self.entries[-1]

    @property
    def levels(self) -> int:
        return len(self.entries)

    @property
    def code_range(self) -> tuple[int, int]:
        return 0, len(self.entries) - 1

    def round(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        return self.decode(self.encode(y, mode)).astype(y.dtype)

    def encode(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        cuts = _cuts(self.entries, mode, y.dtype.name)
        nan = jnp.uint8(np.argmin(np.abs(self.entries)))
        return jnp.where(jnp.isnan(y), nan, _count_below(y, cuts))

    def decode(self, codes: jax.Array) -> jax.Array:
        table = jnp.asarray(np.asarray(self.entries, np.float32))
        indices = codes.astype(jnp.int32)
        return table.at[indices].get(
            mode="clip", wrap_negative_indices=False, out_sharding=explicit_sharding(codes)
        )


def _count_below(y: jax.Array, thresholds: tuple[np.floating, ...]) -> jax.Array:
    """Returns how many of the increasing thresholds are below `y`, as uint8."""
    if len(thresholds) > 15:
        above = (y > threshold for threshold in thresholds)
        return sum((a.astype(jnp.uint8) for a in above), jnp.zeros(y.shape, jnp.uint8))
    # Binary search; the bits found so far select the next threshold.
    levels = len(thresholds).bit_length()
    table = [*thresholds, *[y.dtype.type(np.inf)] * (2**levels - 1 - len(thresholds))]
    code, bits = jnp.zeros(y.shape, jnp.int32), []
    for level in range(levels):
        step = 2 ** (levels - level - 1)
        choices = [jnp.asarray(t) for t in table[step - 1 :: 2 * step]]
        for bit in reversed(bits):
            pairs = zip(choices[::2], choices[1::2], strict=True)
            choices = [jnp.where(bit, b, a) for a, b in pairs]
        bits.append(y > choices[0])
        code = code + jnp.where(bits[-1], step, 0)
    return code.astype(jnp.uint8)


@functools.cache
def _cuts(entries: tuple[float, ...], mode: RoundMode, dtype: str) -> tuple[np.floating, ...]:
    """Returns the threshold between each pair of neighbouring entries of a table; a number above
    the threshold is rounded up.
    """
    kind, thresholds = np.dtype(dtype).type, []
    for code, (low, high) in enumerate(itertools.pairwise(entries)):
        cut, goes_up = _cut(code, low, high, mode)
        # XLA flushes subnormals: the largest number below zero is a normal one.
        below_zero = cut == 0 and goes_up
        largest = -np.finfo(kind).tiny if below_zero else _largest_below(cut, goes_up, kind)
        thresholds.append(largest)
    return tuple(thresholds)


def _cut(code: int, low: float, high: float, mode: RoundMode) -> tuple[Fraction, bool]:
    """Returns the exact threshold after entry `code`, and whether the threshold rounds up."""
    a, b = Fraction(low), Fraction(high)
    middle = (a + b) / 2
    match mode:
        case RoundMode.UP:
            return a, False
        case RoundMode.DOWN:
            return b, True
        case RoundMode.TOWARD_INFINITY:  # across zero, the threshold is 0: each side goes outward
            return (a, False) if a >= 0 else (b, True) if b <= 0 else (Fraction(0), True)
        case RoundMode.TOWARD_ZERO:
            return (b, True) if a >= 0 else (a, False) if b <= 0 else (middle, True)
        case RoundMode.NEAREST_UPWARD:
            return middle, True
        case RoundMode.NEAREST_DOWNWARD:
            return middle, False
        case RoundMode.NEAREST_TOWARD_EVEN:
            return middle, code % 2 == 1
        case RoundMode.NEAREST_TOWARD_INFINITY:
            return middle, b >= -a
        case RoundMode.NEAREST_TOWARD_ZERO:
            return middle, b < -a


def _largest_below(cut: Fraction, exclusive: bool, kind: type) -> np.floating:
    """Returns the largest float that is not above the cut, or that is below it if `exclusive`."""

    def beyond(value: np.floating) -> bool:
        exact = Fraction(float(value))
        return exact > cut or (exclusive and exact == cut)

    bound = kind(float(cut))
    while beyond(bound):
        bound = np.nextafter(bound, kind(-np.inf))
    while not beyond(following := np.nextafter(bound, kind(np.inf))):
        bound = following
    return bound


nf4: Codebook = Codebook(
    (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "nf4",
)

binary: Codebook = Codebook((-1.0, 1.0), "binary")


@dataclasses.dataclass(frozen=True)
class Squares(QType):
    """Squares of evenly spaced numbers, with their sign: fine near zero, coarse near 1.

    With a sign, code `k` is `sign(k) * (k / n)**2`, `n = 2**(bits - 1) - 1`. Without one, it is
    `((k + 1) / 2**bits)**2`: there is no zero, so it is a format of second moments, whose square
    root divides an update. The round mode applies to the square root. NaN becomes the number
    nearest to zero.

    Attributes:
      bits: 2 to 8.
      signed: whether there are negative numbers, and zero.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: `bits` is not from 2 to 8.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> squares = jqx.numerics.Squares(4, signed=False)
      >>> jqx.quantize_dequantize(jnp.array([0.0, 0.25, 1.0]), 1.0, qtype=squares)
      Array([0.00390625, 0.25      , 1.        ], dtype=float32)
    """

    bits: int = 8  # type: ignore[assignment]
    signed: bool = True  # type: ignore[assignment]

    def __post_init__(self) -> None:
        fix = "pass for example Squares(8)."
        check_fields("numerics.Squares", self, fix, bits=whole(2, 8), signed=flag())

    @property
    def name(self) -> str:
        return f"{'' if self.signed else 'u'}squares{self.bits}"

    @property
    def storage(self) -> jnp.dtype:
        return jnp.dtype(jnp.int8 if self.signed else jnp.uint8)

    @property
    def low(self) -> float:
        return -1.0 if self.signed else 4.0**-self.bits

    @property
    def high(self) -> float:
        return 1.0

    @property
    def levels(self) -> int:
        return 2**self.bits - self.signed

    @property
    def code_range(self) -> tuple[int, int]:
        return (-self._steps, self._steps) if self.signed else (0, self._steps - 1)

    @property
    def _steps(self) -> int:
        """The number of equal steps from 0 to the root of 1."""
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits

    def round(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        return self.decode(self.encode(y, mode)).astype(y.dtype)

    def encode(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        root = jnp.sign(y) * jnp.sqrt(jnp.abs(y)) * np.asarray(self._steps, y.dtype)
        steps = round_to_integer(jnp.where(jnp.isnan(y), np.zeros((), y.dtype), root), mode)
        low, high = (np.asarray(code, y.dtype) for code in self.code_range)
        return jnp.clip(steps - np.asarray(not self.signed, y.dtype), low, high).astype(
            self.storage
        )

    def decode(self, codes: jax.Array) -> jax.Array:
        steps = codes.astype(jnp.float32) + np.float32(not self.signed)
        return steps * jnp.abs(steps) * np.float32(1 / self._steps**2)
