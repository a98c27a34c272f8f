"""Number formats by name, as tables of all their numbers in NumPy."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqx import RoundMode

from ..numerics.tables import Table, minifloat_table, table_of

NF4 = (  # Dettmers et al., arXiv:2305.14314, appendix E
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@functools.cache
def jitted(f: Any, **options: Any) -> Any:
    """A function of jqx with these options: one program for each shape, which is found again."""
    return jax.jit(functools.partial(f, **options))


@functools.cache
def table_named(name: str) -> Table:
    """The table of a format, in which NaN stays NaN."""
    if name == "nf4":
        return Table(np.float32(NF4).astype(np.float64), np.arange(1, 16) % 2 == 0)
    if found := re.fullmatch(r"float(\d)_e(\d)m(\d)(\w*)", name):
        bits, e, m, suffix = found.groups()
        table = minifloat_table(int(e), int(m), suffix if bits == "8" else "finite")
        return dataclasses.replace(table, nan=np.nan)
    if name == "ternary":
        return table_of([-1, 0, 1], nan=np.nan)
    unsigned, bits, narrow = re.fullmatch(r"(u?)int(\d)(_narrow)?", name).groups()
    count = 2 ** int(bits)
    low = 0 if unsigned else -count // 2 + bool(narrow)
    return table_of(np.arange(low, count if unsigned else count // 2), nan=np.nan)


def numbers(name: str) -> np.ndarray:
    """The finite numbers of a format in increasing order."""
    return table_named(name).numbers


def nearest_number(y: np.ndarray, name: str) -> np.ndarray:
    """The nearest number of a format, ties to the even one, saturated; NaN stays NaN."""
    return table_named(name).rounded(y, RoundMode.NEAREST_TOWARD_EVEN)


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
    return float(numbers(name)[-1])


def stored(qtype: Any) -> Any:
    """The dtype of arrays of codes of a format that is named by a dtype or a `QType`."""
    return getattr(qtype, "storage", None) or jnp.dtype(qtype)
