"""Scales and zero points in NumPy: float32 arithmetic, each step rounded once, as documented.

XLA on CPU flushes subnormals, NumPy does not: values are drawn so that no scale is one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ..numerics.oracles import code_range

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
    """The scale, float32, and the zero point, int64 or `None`, that cover `[low, high]` and 0."""
    q_low, q_high = code_range(qtype)
    with np.errstate(all="ignore"):
        if symmetric:
            scale = np.maximum(np.abs(low), np.abs(high)) / np.float32(q_high)
            return np.where(scale == 0, np.float32(1), scale), None
        low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
        scale = (high - low) / np.float32(q_high - q_low)
        scale = np.where(scale == 0, np.float32(1), scale)
        offset = np.rint(np.float32(q_low) - low / scale)
        zero = np.clip(np.where(np.isnan(offset), 0, offset), q_low, q_high)
    assert scale.dtype == offset.dtype == np.float32
    return scale, zero.astype(np.int64)
