"""TFLite's requantization in NumPy int64 and Python integers, written from its sources.

Names and statements follow tflite/kernels/internal/quantization_util.cc, common.cc and
reference/requantize.h, and gemmlowp's fixedpoint/fixedpoint.h.
"""

import math
from typing import Any

import numpy as np

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def int32(x: Any) -> np.ndarray:
    """The low 32 bits, as C++ narrows an int64; held in int64."""
    return np.asarray(x, np.int64).astype(np.int32).astype(np.int64)


def quantize_multiplier(real_multiplier: float) -> tuple[int, int]:
    """QuantizeMultiplier, of one double."""
    if real_multiplier == 0.0:
        return 0, 0
    q, shift = math.frexp(real_multiplier)
    magnitude = math.floor(abs(q) * 2**31 + 0.5)  # TfLiteRound: halves away from zero
    q_fixed = magnitude if q > 0 else -magnitude
    if q_fixed == 2**31:
        q_fixed //= 2
        shift += 1
    if shift < -31:
        return 0, 0
    return q_fixed, shift


def saturating_rounding_doubling_high_mul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    overflow = (a == b) & (a == INT32_MIN)
    ab = a * b
    nudged = ab + np.where(ab >= 0, 1 << 30, 1 - (1 << 30))
    truncated = np.where(nudged >= 0, nudged >> 31, -(-nudged >> 31))  # as C++ divides
    return np.where(overflow, INT32_MAX, truncated)


def rounding_divide_by_pot(x: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    mask = (np.int64(1) << exponent) - 1
    threshold = (mask >> 1) + (x < 0)
    return (x >> exponent) + ((x & mask) > threshold)


def double_rounding(x: Any, quantized_multiplier: Any, shift: Any) -> np.ndarray:
    """MultiplyByQuantizedMultiplier, as it is built by default."""
    x, m, shift = (np.asarray(v, np.int64) for v in (x, quantized_multiplier, shift))
    left = int32(x * (np.int64(1) << np.maximum(shift, 0)))
    high = saturating_rounding_doubling_high_mul(left, m)
    return rounding_divide_by_pot(high, np.maximum(-shift, 0))


def single_rounding(x: Any, quantized_multiplier: Any, shift: Any) -> np.ndarray:
    """MultiplyByQuantizedMultiplier, built with TFLITE_SINGLE_ROUNDING."""
    x, m, shift = (np.asarray(v, np.int64) for v in (x, quantized_multiplier, shift))
    total_shift = 31 - shift
    return int32((x * m + (np.int64(1) << (total_shift - 1))) >> total_shift)


MULTIPLY = {"double": double_rounding, "single": single_rounding}


def requantize(
    accumulator: Any,
    factor: Any,
    zero_point: Any,
    low: int,
    high: int,
    bias: Any = 0,
    rounding: str = "double",
) -> np.ndarray:
    """Codes as int64; `factor`, in float64, and the others broadcast to the accumulators."""
    pairs = [quantize_multiplier(float(f)) for f in np.ravel(factor)]
    multiplier, shift = (np.reshape(v, np.shape(factor)) for v in zip(*pairs, strict=True))
    x = int32(np.asarray(accumulator, np.int64) + bias)
    y = int32(MULTIPLY[rounding](x, multiplier, shift) + zero_point)
    return np.clip(y, low, high)
