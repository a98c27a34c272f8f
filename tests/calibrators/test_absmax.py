import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

import jqx
from jqx.calibrators import absmax

from ..oracles.calibrators import affine, magnitude, ordinary_floats
from ..oracles.numerics import assert_codes, assert_floats

law = settings(max_examples=30, deadline=None)

SHAPE = (2, 3, 4)
FORMATS = [
    *[(qtype, True) for qtype in ("int2", "int4", "int8", "int16")],
    *[(qtype, False) for qtype in ("int4", "int8", "int16", "uint2", "uint4", "uint8", "uint16")],
]
values = hnp.arrays(np.float32, SHAPE, elements=ordinary_floats)


def granularity(axes):
    return jqx.per_axis(*axes) if axes else jqx.per_tensor()


CASES = list(itertools.product([(), (1,), (0, 2), (-1,), (0, 1, 2)], FORMATS))


@jax.jit
def observed_and_decided(x):
    specs = [jqx.QSpec(qtype, granularity(axes), symmetric) for axes, (qtype, symmetric) in CASES]
    stats = [absmax.observe(x, spec) for spec in specs]
    return stats, [absmax.affine(each, spec) for each, spec in zip(stats, specs, strict=True)]


@law
@given(values)
def test_the_largest_magnitude_is_the_largest_code(x):
    """Scale and zero point are those of NumPy's float32 arithmetic, bit by bit."""
    for (axes, (qtype, symmetric)), stats, found in zip(
        CASES, *observed_and_decided(x), strict=True
    ):
        m = magnitude(x, axes)
        assert_floats(stats.largest, m, np.float32)
        scale, zero_point = affine(-m, m, qtype, symmetric)
        assert_floats(found.scale, scale, np.float32)
        if symmetric:
            assert found.zero_point is None
        else:
            assert_codes(found.zero_point, zero_point, qtype)


def test_without_jit_the_scale_is_the_same():
    x = np.float32([[3, -7.7, 1e-3], [0, 2, 5]])
    for qtype, symmetric in (FORMATS[1], FORMATS[-2]):
        spec = jqx.QSpec(qtype, jqx.per_axis(0), symmetric)
        m = magnitude(x, (0,))
        found = absmax.affine(absmax.observe(x, spec), spec)
        assert_floats(found.scale, affine(-m, m, qtype, symmetric)[0], np.float32)


@pytest.mark.parametrize("qtype, largest", [("int2", 1), ("int4", 7), ("int8", 127)])
@pytest.mark.parametrize("c", [-3.0, 0.7, 1e-30, 1e30])
def test_a_constant_becomes_the_largest_code(qtype, largest, c):
    q = jqx.QTensor.quantize(jnp.full((2, 3), c), jqx.QSpec(qtype))
    assert_codes(q.values, np.full((2, 3), np.sign(c) * largest, np.int64), qtype)
    assert_floats(q.scale, np.full((1, 1), np.abs(np.float32(c)) / np.float32(largest)), "float32")


def test_the_sign_and_the_place_of_the_largest_value_do_not_matter():
    x = np.float32([[1, -8, 3], [2, 0, 8]])
    largest = absmax.observe(x, jqx.QSpec(jnp.int8)).largest
    for other in (-x, x.T, x[::-1]):
        np.testing.assert_array_equal(
            absmax.observe(other, jqx.QSpec(jnp.int8)).largest, largest, strict=True
        )


def test_the_empty_statistics_are_of_magnitude_zero():
    stats = absmax.empty((1, 3))
    assert_floats(stats.largest, np.zeros((1, 3)), np.float32)
    assert stats.observed == 0
    assert_floats(stats.nans, np.zeros((1, 3)), np.int32)


def test_a_scalar_is_observed_as_any_array_is():
    spec = jqx.QSpec(jnp.int8)
    stats = jax.jit(lambda x: absmax.observe(x, spec))(jnp.float32(-127))
    assert_floats(absmax.affine(stats, spec).scale, np.array(1.0), np.float32)


def test_it_prints_as_it_is_written():
    assert str(absmax) == "absmax"
