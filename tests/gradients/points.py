"""Positions on and around the levels of a quantizer, for comparison with the papers' formulas."""

import numpy as np

RANGES = [(-2, 1), (0, 3), (-1, 1), (-8, 7), (-3, 12), (-5, 250), (-128, 127)]
"""Smallest and largest code, the zero point already subtracted: 2 bits, 8 bits, odd, asymmetric."""

SCALES = [0.25, 0.3]
"""A power of two, for which ties are exact, and one that is none, for which they are left out."""


def positions(qmin, qmax, scale):
    """Returns float64 values in steps: levels, both limits, between and (where exact) on ties.

    Repeated up to one length, so that each operation compiles once for all ranges.
    """
    v = np.arange(qmin - 3, qmax + 3, 0.125)
    off_ties = v[v % 1 != 0.5]
    v = v if np.log2(scale) % 1 == 0 else np.concatenate([off_ties, off_ties + 0.49])
    near = np.array([qmin, qmax], float)
    return np.resize(np.concatenate([v, near - 0.01, near + 0.01, [-1e6, 1e6]]), 4096)


def case(qmin, qmax, scale, dtype=np.float32):
    """Returns positions in steps (float64) and, in `dtype`, x, low, high and a cotangent."""
    v = positions(qmin, qmax, scale)
    s = dtype(scale)
    x = (v * np.float64(s)).astype(dtype)
    low, high = (np.array([q * s], dtype) for q in (qmin, qmax))
    cotangent = np.random.default_rng(0).normal(size=v.shape).astype(dtype)
    return v, x, low, high, cotangent
