"""Calibrators whose range is read off a few numbers, beside NumPy: absmax, minmax, fixed, rms."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx.calibrators import absmax, fixed, minmax, rms

from ..arrays import on_device
from ..oracles.calibrators import (
    BLOCKED,
    affine,
    blocks,
    draw,
    extremes,
    magnitude,
    ordinary_floats,
    positive_floats,
)
from ..oracles.calibrators import SHAPE as BLOCKED_SHAPE
from ..oracles.numerics import assert_codes, assert_floats

law = settings(max_examples=30, deadline=None)

SHAPE = (2, 3, 4)
INTEGERS = ["int2", "int4", "int8", "int16"]
FORMATS = [
    *[(qtype, True) for qtype in INTEGERS],
    *[(qtype, False) for qtype in [*INTEGERS, "uint2", "uint4", "uint8", "uint16"]],
]
AXES = [(), (1,), (0, 2), (-1,), (0, 1, 2)]
values = st.one_of(
    hnp.arrays(np.float32, SHAPE, elements=ordinary_floats),
    hnp.arrays(np.float32, SHAPE, elements=positive_floats),
    hnp.arrays(np.float32, SHAPE, elements=positive_floats).map(np.negative),
)
CASES = list(itertools.product(AXES, FORMATS))


def specs_of(calibrator):
    for axes, (qtype, symmetric) in CASES:
        granularity = jqx.per_axis(*axes) if axes else jqx.per_tensor()
        yield jqx.QSpec(qtype, granularity, symmetric, calibrator)


@jax.jit
def observed_and_decided(x):
    found = {}
    for calibrator in (absmax, minmax):
        stats = [(spec, calibrator.observe(x, spec)) for spec in specs_of(calibrator)]
        found[str(calibrator)] = [(each, calibrator.affine(each, spec)) for spec, each in stats]
    return found


@law
@given(values)
def test_the_extremes_are_the_extreme_codes(x):
    """Scale and zero point are those of NumPy's float32 arithmetic, bit by bit."""
    for name, results in observed_and_decided(x).items():
        for (axes, (qtype, symmetric)), (stats, found) in zip(CASES, results, strict=True):
            if name == "absmax":
                high = magnitude(x, axes)
                low = -high
                assert_floats(stats.largest, high, np.float32)
            else:
                low, high = extremes(x, axes)
                assert_floats(stats.low, low, np.float32)
                assert_floats(stats.high, high, np.float32)
            scale, zero_point = affine(low, high, qtype, symmetric)
            assert_floats(found.scale, scale, np.float32)
            if symmetric:
                assert found.zero_point is None
            else:
                assert_codes(found.zero_point, zero_point, qtype)


def test_without_jit_the_scale_is_the_same():
    x = np.float32([[3, -7.7, 1e-3], [0, 2, 5]])
    for qtype, symmetric in (("int4", True), ("uint8", False)):
        spec = jqx.QSpec(qtype, jqx.per_axis(0), symmetric)
        m = magnitude(x, (0,))
        found = absmax.affine(absmax.observe(x, spec), spec)
        assert_floats(found.scale, affine(-m, m, qtype, symmetric)[0], np.float32)


@pytest.mark.parametrize("c", [-3.0, 0.7, -1e-30, 1e30])
def test_a_constant_and_zero_are_the_ends_of_the_codes(c):
    """Symmetric it is the largest code. Otherwise a positive range begins at zero, and a negative
    one ends there.
    """
    x, size = jnp.full((2, 3), c), np.abs(np.float32(c))
    for qtype, largest in [("int2", 1), ("int4", 7), ("int8", 127)]:
        q = jqx.QTensor.quantize(x, jqx.QSpec(qtype))
        assert_codes(q.values, np.full((2, 3), np.sign(c) * largest, np.int64), qtype)
        assert_floats(q.scale, np.full((1, 1), size / np.float32(largest)), "float32")
    for qtype, low, high in [("int4", -8, 7), ("uint8", 0, 255)]:
        q = jqx.QTensor.quantize(x, jqx.QSpec(qtype, symmetric=False, calibrator=minmax))
        assert_codes(q.values, np.full((2, 3), high if c > 0 else low), qtype)
        assert_codes(q.zero_point, np.full((1, 1), low if c > 0 else high), qtype)
        assert_floats(q.scale, np.full((1, 1), size / np.float32(high - low)), np.float32)


@pytest.mark.parametrize("low, high", [(-1.5, 4.0), (1.0, 3.0), (-3.0, -1.0), (-2.0, 2.0)])
def test_a_fixed_range_is_the_given_one_for_every_scale(low, high):
    specs = [
        jqx.QSpec(qtype, granularity, symmetric, fixed(low, high))
        for granularity, _ in BLOCKED
        for qtype, symmetric in [("int8", True), ("uint4", False)]
    ]

    @jax.jit
    def both(x):
        shapes = [spec.granularity.scale_shape(BLOCKED_SHAPE) for spec in specs]
        empties = [spec.calibrator.empty(shape) for spec, shape in zip(specs, shapes, strict=True)]
        return [
            (spec.calibrator.fit(x, spec), spec.calibrator.affine(empty, spec))
            for spec, empty in zip(specs, empties, strict=True)
        ]

    for spec, pair in zip(specs, both(draw(BLOCKED_SHAPE)), strict=True):
        scale, zero = affine(np.float32(low), np.float32(high), spec.qtype, spec.symmetric)
        for found in pair:
            assert found.scale.shape == spec.granularity.scale_shape(BLOCKED_SHAPE)
            assert (np.asarray(found.scale) == scale).all()
            assert spec.symmetric or (np.int64(found.zero_point) == zero).all()


def test_the_range_of_rms_is_the_multiple_of_the_root_mean_square():
    """To the rounding of float32 sums of up to 42 squares. A tail has fewer elements."""
    x = np.random.default_rng(0).normal(size=BLOCKED_SHAPE).astype(np.float32)
    specs = [jqx.QSpec(jnp.int8, granularity, calibrator=rms(2.5)) for granularity, _ in BLOCKED]
    fitted = jax.jit(lambda x: [spec.calibrator.fit(x, spec) for spec in specs])(x)
    for (_, sizes), found in zip(BLOCKED, fitted, strict=True):
        for place, block in blocks(x, sizes):
            expected = 2.5 * np.sqrt(np.mean(np.square(np.float64(block)))) / 127
            np.testing.assert_allclose(found.scale[place], expected, rtol=3e-6)


def test_rms_weights_batches_by_their_elements_and_leaves_nan_out():
    spec = jqx.QSpec(jnp.int8, calibrator=rms(127.0))
    parts = [spec.calibrator.observe(on_device(x), spec) for x in ([3.0], [1.0, 1.0, 1.0])]
    scale = spec.calibrator.affine(spec.calibrator.merge(*parts), spec).scale
    np.testing.assert_allclose(scale, [np.sqrt(3)], rtol=1e-6)
    stats = spec.calibrator.observe(jnp.array([jnp.nan, 2.0]), spec)
    assert (stats.squares[0], stats.elements[0]) == (4, 1)
    both_signs = jqx.QSpec(jnp.uint8, symmetric=False, calibrator=rms(1.0))
    found = both_signs.calibrator.fit(jnp.full((4,), 3.0), both_signs)
    np.testing.assert_allclose(found.scale, [6 / 255], rtol=1e-6)
    assert found.zero_point[0] == 128
