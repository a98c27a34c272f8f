"""Integers of any dtype, however large, as indices, starts and sizes: clamped, never wrapped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from .arrays import on_device

TABLE = jqx.QTensor.quantize(on_device(np.arange(1.0, 7.0), jnp.float32), jqx.QSpec("int8"))
REAL = np.asarray(TABLE.dequantize())
EXTREME = (-1, -7, 5, 6, 200, 2**32 - 3, 2**32, 2**32 + 1, 2**40, -(2**40), 2**63)


def held(dtype):
    """The numbers that a dtype holds."""
    info = np.iinfo(dtype)
    return np.array([v for v in EXTREME if info.min <= v <= info.max], dtype)


def clamped(v):
    return REAL[min(max(v if v >= 0 else v + 6, 0), 5)]


TAKEN = {
    "clip": lambda v: REAL[min(max(v, 0), 5)],
    "wrap": lambda v: REAL[v % 6],
    "fill": lambda v: REAL[v] if -6 <= v < 6 else np.nan,
}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64", "uint64"])
def test_indices_are_never_wrapped(dtype):
    places = held(dtype)
    known = [int(v) for v in places]
    np.testing.assert_array_equal(TABLE[places].dequantize(), [clamped(v) for v in known])
    for mode, expected in TAKEN.items():
        found = jqx.take(TABLE, places, 0, mode=mode)
        np.testing.assert_array_equal(found, [expected(v) for v in known], mode)


def test_indices_of_64_bits_are_never_wrapped_where_jax_has_them():
    with jax.enable_x64(True):
        for dtype in ("int64", "uint64"):
            places = held(dtype)
            known = [int(v) for v in places]
            x = on_device(places)
            np.testing.assert_array_equal(TABLE[x].dequantize(), [clamped(v) for v in known])
            np.testing.assert_array_equal(
                jqx.take(TABLE, x, 0, mode="clip"), [TAKEN["clip"](v) for v in known]
            )


def test_starts_and_sizes_of_groups_are_never_wrapped():
    for start in (2**40, np.array(2**40), np.array(2**63, np.uint64), np.uint32(2**32 - 1)):
        part = jqx.dynamic_slice(TABLE, (start,), (2,))
        np.testing.assert_array_equal(part.dequantize(), REAL[4:])
    experts = jqx.QTensor.quantize(on_device(np.ones((3, 4, 5)), jnp.float32), jqx.QSpec("int8"))
    x = on_device(np.ones((300, 4)), jnp.float32)
    for sizes in (
        np.array([200, 100, 50], np.uint8),
        np.array([2, -5, 2**40]),
        on_device([2**32 - 1, 3, 4], np.uint32),
    ):
        np.testing.assert_array_equal(jqx.ragged_dot(x, experts, sizes), np.full((300, 5), 4.0))
