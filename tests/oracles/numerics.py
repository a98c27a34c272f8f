"""The specified results in NumPy, written from the specification's tables and without jqx."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

SIGNIFICANDS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}


def code_range(qtype: Any) -> tuple[int, int]:
    """The smallest and largest code of an integer format, from its name."""
    name = jnp.dtype(qtype).name
    bits = int(name.removeprefix("u").removeprefix("int"))
    return (0, 2**bits - 1) if name.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def rounded(q: np.ndarray, mode: str) -> np.ndarray:
    """Rounds by nGraph's attribute string, as the table of SEMANTICS section 1 has it."""
    with np.errstate(invalid="ignore"):
        t = np.trunc(q)
        d = q - t
        a = np.abs(d)
        leave = {
            "ROUND_NEAREST_TOWARD_INFINITY": a >= 0.5,
            "ROUND_NEAREST_TOWARD_ZERO": a > 0.5,
            "ROUND_NEAREST_UPWARD": (a > 0.5) | (d == 0.5),
            "ROUND_NEAREST_DOWNWARD": (a > 0.5) | (d == -0.5),
            "ROUND_NEAREST_TOWARD_EVEN": (a > 0.5) | ((a == 0.5) & (t % 2 != 0)),
            "ROUND_TOWARD_INFINITY": a > 0,
            "ROUND_TOWARD_ZERO": np.zeros_like(a, bool),
            "ROUND_UP": d > 0,
            "ROUND_DOWN": d < 0,
        }[mode]
        return np.where(leave, t + np.sign(d), t)


def saturated(r: np.ndarray, zero_point: Any, qtype: Any) -> np.ndarray:
    """`r + zero_point` in int64, clipped to the range of `qtype`; NaN gives 0."""
    low, high = code_range(qtype)
    nan = np.isnan(r)
    r = np.clip(np.where(nan, 0, r).astype(np.float64), -(2.0**40), 2.0**40).astype(np.int64)
    return np.where(nan, 0, np.clip(r + as_int64(zero_point), low, high))


def quantized(
    x: np.ndarray, scale: Any, zero_point: Any, qtype: Any, mode: str = "ROUND_NEAREST_TOWARD_EVEN"
) -> np.ndarray:
    """nGraph Quantize as int64 codes; `scale` and `zero_point` broadcast to `x`."""
    wide = np.float64 if x.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        quotient = x.astype(wide) / np.asarray(scale).astype(wide)
    return saturated(rounded(quotient, mode), zero_point, qtype)


def nearest(v: np.ndarray, dtype: Any) -> np.ndarray:
    """Rounds float64 values once, half to even, to the significand of `dtype`.

    Correct in the normal range and for overflow.
    """
    v = np.asarray(v, np.float64)
    dtype = jnp.dtype(dtype)
    bits = SIGNIFICANDS[dtype.name]
    mantissa, exponent = np.frexp(v)
    result = np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits)
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.where(np.abs(result) > largest, np.copysign(np.inf, result), result)


def as_int64(codes: Any) -> np.ndarray:
    """Integers of any format as int64."""
    return np.asarray(codes).astype(np.int64)


def as_float64(x: Any) -> np.ndarray:
    """Floats of any format as float64."""
    return np.asarray(x).astype(np.float64)


def codes_of(values: Any, qtype: Any) -> np.ndarray:
    """An array of `qtype` that holds these in-range integers."""
    return np.asarray(values).astype(jnp.dtype(qtype))


def assert_codes(result: jax.Array, expected: np.ndarray, qtype: Any) -> None:
    """Asserts dtype, shape and every code."""
    assert result.dtype == jnp.dtype(qtype)
    np.testing.assert_array_equal(as_int64(result), expected, strict=True)


def assert_floats(result: jax.Array, expected: np.ndarray, dtype: Any) -> None:
    """Asserts dtype, shape and every value; NaN equals NaN, and -0.0 equals 0.0."""
    assert result.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(as_float64(result), as_float64(expected), strict=True)
