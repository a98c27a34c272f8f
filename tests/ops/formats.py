"""Number formats in NumPy, as tables of all their numbers, written without jqx.

Minifloats are read from ml_dtypes, or from their definition where it has no such dtype.
"""

import functools
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..oracles.numerics import code_range

NF4 = (  # Dettmers et al., arXiv:2305.14314, appendix E
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)

MINIFLOATS = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8_e3m4": ml_dtypes.float8_e3m4,
    "float6_e2m3fn": ml_dtypes.float6_e2m3fn,
    "float6_e3m2fn": ml_dtypes.float6_e3m2fn,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
}


@functools.cache
def numbers(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The finite numbers of a format in increasing order, and which of two neighbours is even."""
    if name == "nf4":
        table = np.float32(NF4).astype(np.float64)
        return table, np.arange(16) % 2 == 0
    if name in MINIFLOATS:
        kind = MINIFLOATS[name]
        sizes = np.arange(2 ** (ml_dtypes.finfo(kind).bits - 1), dtype=np.uint8)
        sizes = sizes.view(kind).astype(np.float64)
        sizes = sizes[np.isfinite(sizes)]
        even = np.arange(len(sizes)) % 2 == 0
        return np.concatenate([-sizes[:0:-1], sizes]), np.concatenate([even[:0:-1], even])
    low, high = integer_range(name)
    table = np.arange(low, high + 1, dtype=np.float64)
    return table, table % 2 == 0


def integer_range(name: str) -> tuple[int, int]:
    """The smallest and largest number of an integer format; those of ternary are -1 and 1."""
    if name == "ternary":
        return -1, 1
    if name.endswith("_narrow"):
        high = integer_range(name.removesuffix("_narrow"))[1]
        return -high, high
    if name in ("int3", "int5", "int6", "int7", "uint3", "uint5", "uint6", "uint7"):
        bits = int(name[-1])
        return (0, 2**bits - 1) if name[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return code_range(name)


def nearest_number(y: np.ndarray, name: str) -> np.ndarray:
    """The nearest number of a format, ties to the even one, saturated; NaN stays NaN."""
    table, even = numbers(name)
    y = np.asarray(y, np.float64)
    upper = np.clip(np.searchsorted(table, y), 1, len(table) - 1)
    below, above = table[upper - 1], table[upper]
    up = (y - below > above - y) | ((y - below == above - y) & even[upper])
    return np.where(np.isnan(y), np.nan, np.where(up, above, below))


def quotient(x: np.ndarray, scale: Any) -> np.ndarray:
    """`x / scale` in float32, one rounding; 0 for 0 / 0."""
    with np.errstate(all="ignore"):
        y = np.asarray(x, np.float32) / np.asarray(scale, np.float32)
    return np.where((np.asarray(x) == 0) & ~np.isnan(scale), np.float32(0), y)


def product(values: np.ndarray, scale: Any) -> np.ndarray:
    """`values * scale` rounded once to float32; numbers of 8 bits times a float32 fit float64."""
    with np.errstate(all="ignore"):
        return (np.asarray(values, np.float64) * np.asarray(scale, np.float64)).astype(np.float32)


def largest(name: str) -> float:
    """The largest number of a format."""
    return float(numbers(name)[0][-1])


def stored(qtype: Any) -> Any:
    """The dtype of arrays of codes of a format that is named by a dtype or a `QType`."""
    return getattr(qtype, "storage", None) or jnp.dtype(qtype)
