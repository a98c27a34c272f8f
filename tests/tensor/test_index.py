"""Every kind of index against `jnp`: what it takes, of the same shape and values; what it refuses,
refused in four parts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..arrays import on_device

SHAPES = [(4, 6), (4, 0), (0, 3), (0,), (5,), (2, 3, 4)]
OF_ARRAYS = [(0,), (4,), (5,), (4, 0), (0, 3), (0, 0), (4, 6), (2, 3), (0, 6), (4, 0, 0)]
DTYPES = ["bool", "int8", "uint8", "int32", "uint32", "float32", "bfloat16", "complex64", "O", "U1"]
ONES = np.ones(4, bool)
INDICES = {
    "()": (),
    "None": None,
    "...": ...,
    "an integer": -1,
    "a NumPy integer": np.int8(-1),
    "a JAX integer": jnp.int32(1),
    "a slice of NumPy integers": slice(np.int32(0), np.int64(2)),
    "a slice of JAX integers": slice(jnp.int32(0), jnp.int32(2)),
    "a slice of floats": slice(0.0, 2),
    "a slice of arrays": slice(jnp.ones(2), None),
    "a slice without a step": slice(0, 2, 0),
    "empty after all": (..., np.empty(0, np.int32)),
    "empty twice": (np.empty(0, np.int32), np.empty(0, np.int32)),
    "empty floats beside": (slice(None), np.empty(0)),
    "an empty mask beside": (slice(None), np.empty(0, bool)),
    "an empty mask before": (np.empty((4, 0), bool), None),
    "a mask and None": (ONES, None),
    "a mask and an integer": (ONES, 0),
    "a float": 1.0,
    "text": "a",
    "a range": range(0),
    "an object": object(),
    **{
        f"{dtype}{shape}": np.zeros(shape, jnp.bfloat16 if dtype == "bfloat16" else dtype)
        for dtype in DTYPES
        for shape in OF_ARRAYS
    },
    **{f"jnp.bool{shape}": jnp.zeros(shape, bool) for shape in OF_ARRAYS},
    **{f"True{shape}": np.ones(shape, bool) for shape in OF_ARRAYS},
}
REFUSED = (TypeError, ValueError, IndexError)


def granularities(shape):
    blocks = jqx.per_block({-1: 2}, tail=True)
    return [jqx.per_tensor(), jqx.per_axis(0), *([blocks] if shape[-1] else [])]


@pytest.mark.many
@pytest.mark.parametrize("shape", SHAPES)
def test_an_index_takes_what_jnp_takes(shape):
    x = on_device(np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape))
    qs = [jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, own)) for own in granularities(shape)]
    for name, index in INDICES.items():
        try:
            want = jax.eval_shape(lambda x, index=index: x[index], x).shape
        except (*REFUSED, OverflowError):
            for q in qs:
                with pytest.raises(REFUSED) as info:
                    q[index]
                assert "fix: " in str(info.value), name
            continue
        for found in jax.eval_shape(lambda qs, index=index: [q[index] for q in qs], qs):
            assert found.shape == want, name


@jax.jit
def taken(q, x):
    return [(q[index].dequantize(), x[index]) for index in TAKES.values()]


TAKES = {
    "a mask and None": (ONES, None),
    "an array before an integer": (np.array([1, -1]), 0),
    "a slice and a mask": (slice(1, 3), np.array([True, False, False, True, True, False])),
    "a mask of both": np.arange(24).reshape(4, 6) % 5 == 0,
    "bytes": np.array([[-1, 2]], np.int8),
}


def test_an_index_takes_the_values_that_jnp_takes():
    x = on_device(np.arange(1, 25, dtype=np.float32).reshape(4, 6))
    for granularity in granularities(x.shape):
        q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, granularity))
        for found, want in taken(q, q.dequantize()):
            np.testing.assert_array_equal(found, want)


def test_lists_are_indices_as_in_numpy():
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    q = jqx.QTensor.quantize(on_device(x), jqx.QSpec(jnp.int8, jqx.per_axis(0)))
    lists = ([], [[]], [1, -1], [[0, 1], [1, 0]], [True, False, False, True], ([0, 1], [2, 3]))
    for index in lists:
        assert q[index].shape == x[index].shape
    for index in ([[0], [0, 1]], [1.0], [None], ["a"], [object()]):
        with pytest.raises(TypeError, match="given: "):
            q[index]
