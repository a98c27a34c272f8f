"""`lax.conv_general_dilated` in NumPy, written without JAX."""

import math
from collections.abc import Sequence

import numpy as np

NHWC = ("NHWC", "HWIO", "NHWC")


def convolution(
    lhs: np.ndarray,
    rhs: np.ndarray,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: tuple[str, str, str] = NHWC,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
) -> np.ndarray:
    """`lax.conv_general_dilated` of NumPy arrays, in their own arithmetic: a sum over the taps."""
    of_lhs, of_rhs, of_result = dimension_numbers
    names = [name for name in of_rhs if name not in "OI"]
    rank, groups, batches = len(names), feature_group_count, batch_group_count
    x = lhs.transpose([of_lhs.index(name) for name in ["N", "C", *names]])
    kernel = rhs.transpose([of_rhs.index(name) for name in ["O", "I", *names]])
    outputs, inputs, *taps = kernel.shape
    apart = rhs_dilation or (1,) * rank
    reach = [(n - 1) * d + 1 for n, d in zip(taps, apart, strict=True)]
    pairs = pads_of(padding, x.shape[2:], reach, window_strides)
    for axis, step, pair in zip(
        range(2, rank + 2), lhs_dilation or (1,) * rank, pairs, strict=True
    ):
        x = _padded(x, axis, step, *pair)
    size = [
        max(0, (n - r) // s + 1) for n, r, s in zip(x.shape[2:], reach, window_strides, strict=True)
    ]
    x = x.reshape(batches, len(x) // batches, groups, inputs, *x.shape[2:])
    kernel = kernel.reshape(batches, groups, outputs // (batches * groups), inputs, *taps)
    total = np.zeros((x.shape[1], *kernel.shape[:3], *size), np.result_type(lhs, rhs))
    for place in np.ndindex(*taps):
        seen = [
            slice(i * d, i * d + n * s, s)
            for i, d, n, s in zip(place, apart, size, window_strides, strict=True)
        ]
        total += np.einsum("bngi...,bgoi->nbgo...", x[(..., *seen)], kernel[(..., *place)])
    y = total.reshape(x.shape[1], outputs, *size)
    return y.transpose([["N", "C", *names].index(name) for name in of_result])


def pads_of(
    padding: str | Sequence[tuple[int, int]],
    image: Sequence[int],
    reach: Sequence[int],
    strides: Sequence[int],
) -> Sequence[tuple[int, int]]:
    """What "SAME" stands for: as many results as strides begin in the image, the odd zero last."""
    if not isinstance(padding, str):
        return padding
    if padding == "VALID":
        return [(0, 0)] * len(image)
    pairs = []
    for n, r, s in zip(image, reach, strides, strict=True):
        zeros = max((math.ceil(n / s) - 1) * s + r - n, 0)
        half = zeros // 2
        pairs.append((half, zeros - half) if padding == "SAME" else (zeros - half, half))
    return pairs


def _padded(x: np.ndarray, axis: int, step: int, low: int, high: int) -> np.ndarray:
    """Zeros between the elements of an axis, and around it; fewer than none cut it."""
    x = np.moveaxis(x, axis, 0)
    wide = np.zeros((max(0, (len(x) - 1) * step + 1), *x.shape[1:]), x.dtype)
    wide[::step] = x
    wide = np.pad(wide, [(max(low, 0), max(high, 0))] + [(0, 0)] * (x.ndim - 1))
    return np.moveaxis(wide[max(-low, 0) : len(wide) - max(-high, 0)], 0, axis)
