"""Random matrices of codes as kernels read them, and what they are multiplied out in float64."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..arrays import on_device

TABLE = tuple(np.sort(np.random.default_rng(7).normal(size=16)).astype(np.float32).tolist())


@dataclasses.dataclass(frozen=True)
class Case:
    """A product [m, k] x [k, n] with a scale for each group of `size` along k.

    Attributes:
      codes: their dtype.
      scale: dtype of the scales; uint8 are exponents.
      x: dtype of the rows.
      zero: whether there are zero points.
      looked_up: whether codes are places in a table.
    """

    m: int
    k: int
    n: int
    size: int
    codes: str = "int8"
    scale: str = "float32"
    x: str = "bfloat16"
    zero: bool = False
    looked_up: bool = False

    def __str__(self) -> str:
        more = "-zero" * self.zero + "-table" * self.looked_up
        head = f"{self.m}x{self.k}x{self.n}-{self.size}"
        return f"{head}-{self.codes}-{self.scale}-{self.x}{more}"


def made(case: Case) -> tuple[Any, ...]:
    """Returns x, codes, scale and zero points or `None`, on the device."""
    rng = np.random.default_rng(case.k + case.n)
    x = jnp.asarray(rng.normal(size=(case.m, case.k)), case.x)
    groups = case.k // case.size
    codes = integers_of(rng, case.codes, (case.k, case.n))
    if case.scale == "uint8":
        scale = on_device(rng.integers(120, 134, (groups, case.n)).astype(np.uint8))
    else:
        scale = jnp.asarray(rng.uniform(0.5, 2.0, (groups, case.n)), case.scale)
    zero = integers_of(rng, case.codes, (groups, case.n)) if case.zero else None
    return x, codes, scale, zero


def integers_of(rng: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Returns codes of any kind: all integers of a dtype, or 8-bit floats."""
    if dtype.startswith("float"):
        return jnp.asarray(rng.normal(size=shape) * 4, dtype)
    info = jnp.iinfo(dtype)
    return jnp.asarray(rng.integers(int(info.min), int(info.max) + 1, shape), dtype)


def real_weight(case: Case, codes: Any, scale: Any, zero: Any) -> np.ndarray:
    """Returns the weight, float64, each element rounded once to float32 and then as rows are."""
    numbers = np.asarray(codes.astype(jnp.float32))
    if case.looked_up:
        numbers = np.asarray(TABLE, np.float32)[np.asarray(codes.astype(jnp.int32))]
    if zero is not None:
        numbers = numbers - np.repeat(np.asarray(zero.astype(jnp.float32)), case.size, 0)
    factors = np.asarray(scale).astype(np.float32)
    if case.scale == "uint8":
        factors = np.exp2(factors - 127).astype(np.float32)
    real = numbers * np.repeat(factors, case.size, 0)
    return np.asarray(jnp.asarray(real).astype(case.x).astype(jnp.float32)).astype(np.float64)


def assert_sums(found: Any, x: Any, real: np.ndarray) -> None:
    """Checks a product to the rounding of a float32 sum: K rounding errors of the sum of sizes."""
    rows = np.asarray(x.astype(jnp.float32)).astype(np.float64)
    bound = (rows.shape[1] + 2) * 2.0**-24 * (np.abs(rows) @ np.abs(real)) + 1e-30
    error = np.abs(np.asarray(found, np.float64) - rows @ real)
    assert (error <= bound).all(), float((error / bound).max())
