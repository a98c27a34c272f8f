"""Scales and zero points in NumPy: float32 arithmetic, each step rounded once, as documented.

XLA on CPU flushes subnormals, NumPy does not: values are drawn so that no scale is one.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

import jqx
from jqx._src.numerics.lookup import name_of_qtype

from .formats import largest, nearest_number
from .numerics import code_range, saturated

positive_floats = st.floats(2.0**-20, 2.0**20, width=32)
ordinary_floats = st.one_of(positive_floats, positive_floats.map(lambda v: -v), st.just(0.0))


def reduced(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """The axes along which a scale is shared, where `axes` have their own."""
    return tuple(i for i in range(len(shape)) if i not in {axis % len(shape) for axis in axes})


def extremes(x: np.ndarray, axes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and largest value of each scale, in float32; NaN where there is one."""
    shared = reduced(x.shape, axes)
    x = x.astype(np.float32)
    low = np.min(x, axis=shared, keepdims=True, initial=np.inf)
    return low, np.max(x, axis=shared, keepdims=True, initial=-np.inf)


def magnitude(x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """The largest magnitude of each scale, in float32; NaN where there is one."""
    shared = reduced(x.shape, axes)
    return np.max(np.abs(x.astype(np.float32)), axis=shared, keepdims=True, initial=0)


def affine(
    low: np.ndarray, high: np.ndarray, qtype: Any, symmetric: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """The scale, in the dtype of the range, and the zero point, int64 or `None`, that cover
    `[low, high]` and 0. Floats of 16 bits are computed in float32.
    """
    dtype = low.dtype
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32).type
    low, high = low.astype(wide), high.astype(wide)
    q_low, q_high = code_range(qtype)
    with np.errstate(all="ignore"):
        if symmetric:
            scale = np.maximum(np.abs(low), np.abs(high)) / wide(q_high)
        else:
            low, high = np.minimum(low, wide(0)), np.maximum(high, wide(0))
            scale = (high - low) / wide(q_high - q_low)
        scale = np.asarray(scale.astype(dtype))
        scale = np.where(scale == 0, dtype.type(1), scale)
        if symmetric:
            return scale, None
        return scale, saturated(np.rint(wide(q_low) - low / scale.astype(wide)), 0, qtype)


SHAPE = (7, 6)
BLOCKED = [
    (jqx.per_tensor(), (7, 6)),
    (jqx.per_axis(1), (7, 1)),
    (jqx.per_axis(0, 1), (1, 1)),
    (jqx.per_block({0: 3, 1: 1}, tail=True), (3, 1)),
    (jqx.per_block({0: 4, 1: 4}, tail=True), (4, 4)),
    (jqx.per_block({-1: 2}), (7, 2)),
]
"""Granularities of an array of `SHAPE`, and the sizes of their blocks."""


def blocks(x: np.ndarray, sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """The place of each block in the scale, and its elements; the last ones may be smaller."""
    counts = [max(1, -(-n // b)) for n, b in zip(x.shape, sizes, strict=True)]
    for place in itertools.product(*map(range, counts)):
        cut = tuple(slice(i * b, (i + 1) * b) for i, b in zip(place, sizes, strict=True))
        yield place, x[cut]


def dequantized(x: np.ndarray, low: Any, high: Any, qtype: Any, symmetric: bool) -> np.ndarray:
    """What quantizing to the grid of a range gives back, in float64; scales as in `affine`."""
    name = name_of_qtype(qtype)
    if name == "nf4" or name.startswith("float8"):
        most = np.maximum(np.abs(low), np.abs(high)).astype(np.float32)
        scale = np.float64(most / np.float32(largest(name))) if most > 0 else 1.0
        return nearest_number(x / np.float32(scale), name) * scale
    scale, zero = affine(np.float32(low), np.float32(high), qtype, symmetric)
    zero = 0 if zero is None else zero
    codes = np.clip(np.rint(x / scale) + zero, *code_range(qtype))
    return (codes - zero).astype(np.float64) * np.float64(scale)


def range_of(affine: Any, qtype: Any) -> float:
    """The largest magnitude that a symmetric scale covers."""
    return np.asarray(affine.scale).item() * jqx.numerics.format_of(qtype).high


@functools.partial(jax.jit, static_argnums=1)
def fit(x: jax.Array, spec: jqx.QSpec) -> jqx.calibrators.Affine:
    """The scale that a calibrator finds for an array at hand."""
    return spec.calibrator.fit(x, spec)


@functools.partial(jax.jit, static_argnums=1)
def decide(x: jax.Array, spec: jqx.QSpec) -> jqx.calibrators.Affine:
    """The scale that a calibrator decides from what it observed."""
    return spec.calibrator.affine(spec.calibrator.observe(x, spec), spec)


@functools.partial(jax.jit, static_argnums=(1, 2))
def quantized(x: jax.Array, find: Any, spec: jqx.QSpec) -> jax.Array:
    """What the scale that `find` finds for an array gives back."""
    return jqx.QTensor.quantize(x, spec, find(x, spec)).dequantize()


def draw(shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Values with heavy tails."""
    return np.random.default_rng(seed).standard_t(3, size=shape).astype(np.float32)
