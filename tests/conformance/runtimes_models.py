"""The integer arithmetic of each runtime in NumPy float32, written from its sources without jqx.

`quantize(x, scale, zero_point, low, high)` gives codes, `parameters(x, low, high, symmetric)` the
scale and zero point of each row; `low` and `high` are the smallest and largest code.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

F = np.float32
EPS, TINY = np.finfo(F).eps, np.finfo(F).tiny

Parameters = tuple[np.ndarray, Any]


def away(v: np.ndarray) -> np.ndarray:
    """Rounds to nearest, halves away from zero, exactly."""
    with np.errstate(invalid="ignore"):
        t = np.trunc(v)
        d = v - t
    return np.where(np.abs(d) >= 0.5, t + np.sign(d), t).astype(v.dtype)


def _saturated(v: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.nan_to_num(np.clip(v, low, high), nan=0).astype(np.int32)


def _ranges(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Smallest and largest of each row, then both with zero."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    return low, high, np.minimum(low, F(0)), np.maximum(high, F(0))


def ngraph_quantize(x, s, z, low, high):
    """With the round mode NEAREST_TOWARD_INFINITY."""
    return _saturated(away(x / s) + F(z), low, high)


def onnx_quantize(x, s, z, low, high):
    return _saturated(np.rint(x / s) + F(z), low, high)


def onednn_quantize(x, s, z, low, high):
    return _saturated(np.rint(x / s + F(z)), low, high)


def onednn_runtime_quantize(x, s, z, low, high):
    return _saturated(np.rint(x * (F(1) / s) + F(z)), low, high)


def tflite_quantize(x, s, z, low, high):
    return _saturated(away((x / s).astype(np.float64)) + np.float64(z), low, high)


def torchao_quantize(x, s, z, low, high):
    return _saturated(np.rint(x * (F(1) / s)) + F(z), low, high)


def _sum_rounded(x_low, s, low, high, rounding):
    return np.clip(rounding((F(low) - x_low / s).astype(F)), low, high)


def _quotient_rounded(x_low, s, low, high):
    return np.clip(F(low) - np.rint(x_low / s), low, high)


def onnx_parameters(x, low, high, symmetric) -> Parameters:
    a, b, a0, b0 = _ranges(x)
    if symmetric:
        s = np.maximum(np.abs(a), np.abs(b)) / F(high)
        return np.where(s < TINY, F(1), s), 0
    s = np.where(b0 == a0, F(1), (b0 - a0) / F(high - low))
    return s, _sum_rounded(a0, s, low, high, np.rint)


def openvino_parameters(x, low, high, symmetric) -> Parameters:
    a, b, a0, b0 = _ranges(x)
    s = (
        np.where(np.abs(a) >= b, np.abs(a), -b) / F(-low)
        if symmetric
        else (b0 - a0) / F(high - low)
    )
    s = np.where(np.abs(s) < EPS, EPS, s)
    return s, 0 if symmetric else _quotient_rounded(a0, s, low, high)


def tflite_parameters(x, low, high, symmetric) -> Parameters:
    a, b, a0, b0 = _ranges(x)
    largest = np.maximum(np.abs(a), np.abs(b))
    s = largest / F(high) if symmetric else (b0 - a0) / F(high - low)
    s = np.where(s == 0, F(1), s)
    return s, 0 if symmetric else _sum_rounded(a0, s, low, high, away)


def torchao_parameters(x, low, high, symmetric) -> Parameters:
    _, _, a0, b0 = _ranges(x)
    half = F((high - low) / 2)
    s = np.maximum(-a0, b0) / half if symmetric else (b0 - a0) / F(high - low)
    s = np.maximum(s, F(EPS))
    return s, 0 if symmetric else _quotient_rounded(a0, s, low, high)


def qwix_parameters(x, low, high, symmetric) -> Parameters:
    a, b, a0, b0 = _ranges(x)
    if symmetric:
        s = np.maximum(np.abs(a), np.abs(b)) * (F(1) / F(high + 0.5))
    else:
        s = (b0 - a0) * (F(1) / F(high - low))
    s = np.where(s < np.sqrt(TINY), F(1), s).astype(F)
    return s, 0 if symmetric else _sum_rounded(a0, s, low, high, np.rint)


class Model(NamedTuple):
    """A runtime: how it quantizes, and how it finds scales, where it does."""

    quantize: Callable[..., np.ndarray]
    parameters: Callable[..., Parameters] | None = None


MODELS = {
    "ngraph": Model(ngraph_quantize),
    "onnx": Model(onnx_quantize, onnx_parameters),
    "openvino": Model(onednn_quantize, openvino_parameters),
    "onednn": Model(onednn_quantize),
    "onednn_runtime": Model(onednn_runtime_quantize),
    "tflite": Model(tflite_quantize, tflite_parameters),
    "torchao": Model(torchao_quantize, torchao_parameters),
    "qwix": Model(onednn_runtime_quantize, qwix_parameters),  # on XLA; as written it is x / s + z
}
