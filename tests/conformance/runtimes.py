"""The arithmetic of each runtime in NumPy float32, written from its sources without jqx, and inputs
on which runtimes differ: ties, their neighbours, extreme ranges. Subnormals are left out, since XLA
on CPU flushes them to zero.

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
SPECIAL = [0, 0.5, 0.49999997, 1, 1.5, 127.5, 128.5, 1e-30, 1e30, 1.1754944e-38, 3.4028235e38]
SPECIAL += [2.5, 254.5, 255.5, 8388609, 16777217, 2147483648, 2147483904, np.inf]
SPECIAL = np.array([*SPECIAL, *(-v for v in SPECIAL)], F)
SCALES = [F(v) for v in (1, 0.1, 0.0078431377, 1 / 3, 3, 0.02, 1.17e-3, 7e-8, 1e-20, 1e20, 123.456)]
SCALES += [F(2.0**-10)]


def elements(seed: int, n: int, scale: np.float32) -> np.ndarray:
    """Values over the range of codes: random, ties, neighbours of ties, all exponents, special."""
    rng = np.random.default_rng(seed)
    quarter = n // 4
    inside = (rng.normal(size=quarter) * 100).astype(F) * scale
    ties = ((rng.integers(-300, 300, quarter).astype(F) + F(0.5)) * scale).astype(F)
    toward = rng.choice(np.array([-np.inf, np.inf], F), quarter)
    near = np.nextafter(ties, toward).astype(F)
    wide = (
        rng.normal(size=n - 3 * quarter) * 2.0 ** rng.integers(-25, 25, n - 3 * quarter)
    ).astype(F)
    x = np.concatenate([inside, ties, near, wide.astype(F) * scale]).astype(F)
    return np.concatenate([np.where(np.abs(x) < 1.2e-38, F(0), x), SPECIAL])


def rows(seed: int, n: int = 240, width: int = 400) -> np.ndarray:
    """Rows of finite range: one sided, constant, tiny, huge, with outliers, full of ties."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, width)).astype(F) * (2.0 ** rng.integers(-12, 12, (n, 1))).astype(F)
    kind = np.arange(n) % 12
    x[kind == 1] = np.abs(x[kind == 1])
    x[kind == 2] = -np.abs(x[kind == 2])
    x[kind == 3] = x[kind == 3][:, :1]
    x[kind == 4] = 0
    x[kind == 5] *= (2.0 ** -rng.integers(8, 100, ((kind == 5).sum(), 1))).astype(F)
    x[kind == 6] *= F(1e25)
    x[kind == 7, 3] *= F(1e4)
    half_steps = (kind == 8) | (kind == 9)
    m = half_steps.sum()
    step = (2.0 ** rng.integers(-12, 6, (m, 1))).astype(F)
    step = step * rng.choice(np.array([1, 0.1, 1 / 3, 0.0123], F), (m, 1))
    x[half_steps] = ((rng.integers(-256, 256, (m, width)) / 2).astype(F) * step).astype(F)
    x[kind == 10] = _symmetric_ties(rng, (kind == 10).sum(), width)
    x[kind == 11] = _zero_point_ties(rng, (kind == 11).sum(), width)
    near = np.pad(_near_zero_point_ties(8), ((0, 0), (0, width - 8)))  # zeros change no range
    x = np.concatenate([x, near[:: max(1, 4000 // n)]])
    with np.errstate(over="ignore"):
        return x[np.isfinite(x.max(1) - x.min(1))]


def _symmetric_ties(rng: np.random.Generator, n: int, width: int) -> np.ndarray:
    """Halves of a step, and a largest magnitude of 127.5 steps."""
    step = (2.0 ** rng.integers(-12, 6, (n, 1))).astype(F)
    x = (rng.integers(-254, 255, (n, width)) / 2).astype(F) * step
    x[:, 0] = 127.5 * step[:, 0]
    return x


def _zero_point_ties(rng: np.random.Generator, n: int, width: int) -> np.ndarray:
    """Ranges of 255 steps whose zero point is half-way between two codes."""
    step = (2.0 ** rng.integers(-12, 6, (n, 1))).astype(F)
    x = rng.integers(-150, 106, (n, width)).astype(F) / 2 * step
    low = rng.integers(-254, 0, n).astype(F) + F(0.5)
    x[:, 0], x[:, 1] = low * step[:, 0], (low + 255) * step[:, 0]
    return np.clip(x, x[:, :1], x[:, 1:2])


def _near_zero_point_ties(width: int) -> np.ndarray:
    """Ranges whose zero point is a few places of a float from half-way."""
    k = np.arange(255, dtype=F)[:, None] + F(0.5)
    near = [k]
    for toward in (0, np.inf):
        v = k
        for _ in range(3):
            v = np.nextafter(v, F(toward))
            near.append(v)
    low = -np.concatenate(near)
    x = np.linspace(0, 1, width, dtype=F) * F(255) + low
    x[:, :1], x[:, -1:] = low, low + F(255)
    x = np.clip(x, low, x[:, -1:])
    return np.concatenate([x * step for step in (F(1), F(2.0**-9), F(0.1), F(1 / 3))])
