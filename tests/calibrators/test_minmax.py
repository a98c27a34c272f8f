import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx.calibrators import absmax, minmax

from ..oracles.calibrators import affine, decide, extremes, ordinary_floats, positive_floats
from ..oracles.numerics import assert_codes, assert_floats

law = settings(max_examples=30, deadline=None)

SHAPE = (2, 3, 4)
FORMATS = [
    *[(qtype, False) for qtype in ("int2", "int4", "int8", "int16")],
    *[(qtype, False) for qtype in ("uint2", "uint4", "uint8", "uint16")],
    *[(qtype, True) for qtype in ("int4", "int8")],
]
values = st.one_of(
    hnp.arrays(np.float32, SHAPE, elements=ordinary_floats),
    hnp.arrays(np.float32, SHAPE, elements=positive_floats),
    hnp.arrays(np.float32, SHAPE, elements=positive_floats).map(np.negative),
)


def granularity(axes):
    return jqx.per_axis(*axes) if axes else jqx.per_tensor()


CASES = list(itertools.product([(), (1,), (0, 2), (-1,)], FORMATS))


@jax.jit
def observed_and_decided(x):
    specs = [jqx.QSpec(qtype, granularity(axes), symmetric) for axes, (qtype, symmetric) in CASES]
    stats = [minmax.observe(x, spec) for spec in specs]
    return stats, [minmax.affine(each, spec) for each, spec in zip(stats, specs, strict=True)]


@law
@given(values)
def test_the_extremes_are_the_extreme_codes(x):
    """Scale and zero point are those of NumPy's float32 arithmetic, bit by bit."""
    for (axes, (qtype, symmetric)), stats, found in zip(
        CASES, *observed_and_decided(x), strict=True
    ):
        low, high = extremes(x, axes)
        assert_floats(stats.low, low, np.float32)
        assert_floats(stats.high, high, np.float32)
        low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
        scale, zero_point = affine(low, high, qtype, symmetric)
        assert_floats(found.scale, scale, np.float32)
        if symmetric:
            assert found.zero_point is None
        else:
            assert_codes(found.zero_point, zero_point, qtype)


@law
@given(values)
def test_a_symmetric_range_is_that_of_absmax(x):
    by_minmax, by_absmax = (
        decide(x, jqx.QSpec(jnp.int8, jqx.per_axis(1), calibrator=calibrator))
        for calibrator in (minmax, absmax)
    )
    assert by_minmax.zero_point is by_absmax.zero_point is None
    np.testing.assert_array_equal(by_minmax.scale, by_absmax.scale, strict=True)


@pytest.mark.parametrize("qtype, low, high", [("int4", -8, 7), ("uint8", 0, 255)])
@pytest.mark.parametrize("c", [-3.0, 0.7, -1e-30, 1e30])
def test_a_constant_and_zero_are_the_two_ends(qtype, low, high, c):
    """A positive range begins at zero and a negative one ends there."""
    spec = jqx.QSpec(qtype, symmetric=False, calibrator=minmax)
    q = jqx.QTensor.quantize(jnp.full((2, 3), c), spec)
    assert_codes(q.values, np.full((2, 3), high if c > 0 else low), qtype)
    assert_codes(q.zero_point, np.full((1, 1), low if c > 0 else high), qtype)
    step = np.abs(np.float32(c)) / np.float32(high - low)
    assert_floats(q.scale, np.full((1, 1), step), np.float32)


def test_the_empty_statistics_are_an_empty_range():
    stats = minmax.empty((1, 3))
    assert_floats(stats.low, np.full((1, 3), np.inf), np.float32)
    assert_floats(stats.high, np.full((1, 3), -np.inf), np.float32)
    assert stats.observed == 0
    assert_floats(stats.nans, np.zeros((1, 3)), np.int32)


def test_it_prints_as_it_is_written():
    assert str(minmax) == "minmax"
