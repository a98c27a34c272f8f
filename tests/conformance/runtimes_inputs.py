"""Inputs on which integer arithmetic of runtimes differs: ties, their neighbours, extreme ranges.

Subnormals are left out: XLA on CPU flushes them to zero.
"""

import numpy as np

F = np.float32
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
