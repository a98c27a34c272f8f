"""Convolutions of every layout, window, group, number format and granularity, two or three of those
at a time.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

from ..oracles.contractions import as_elsewhere, gamma
from ..oracles.numerics import as_float64, assert_floats
from .conv_cases import (
    FORMATS,
    GROUPS,
    INTEGERS,
    LAYOUTS,
    OF_IMAGES,
    OF_KERNELS,
    PADDINGS,
    STEPS,
    TAPS,
    covering,
    is_possible,
    powers,
    uniform,
)
from .convolutions import convolution

pytestmark = pytest.mark.slow

TABLES = {
    "layout": LAYOUTS,
    "padding": PADDINGS,
    "steps": STEPS,
    "groups": GROUPS,
    "taps": TAPS,
    "size": ["small"],
    "of_image": OF_IMAGES,
    "of_kernel": OF_KERNELS,
}
NEAR = [name for name in FORMATS if name not in ("uint8", "int4 with zero points, packed")]
PARTS = 8


def forms(case, monkeypatch):
    """The convolution jitted, for CPU, and for all other platforms where integers have another."""
    yield jax.jit(lambda *pair: case.convolve(*pair))
    if case.groups.startswith("depthwise"):
        with monkeypatch.context() as patch:
            as_elsewhere(patch)
            yield jax.jit(lambda *pair: case.convolve(*pair))


def check_exact(case, monkeypatch):
    """Any codes, and those that give the largest sums, of which float32 still holds every bit."""
    ends = [("any", "any"), *itertools.product(("lowest", "highest"), repeat=2)]
    pairs = [tuple(case.operands(powers, end)) for end in ends]
    expected = [convolution(lhs.real, rhs.real, **case.options) for lhs, rhs in pairs]
    assert max(np.abs(y).max() for y in expected) < 2**24
    for form in forms(case, monkeypatch):
        for (lhs, rhs), y in zip(pairs, expected, strict=True):
            assert_floats(form(lhs.value, rhs.value), y, np.float32)


def check_near(case):
    """Within the roundings of the products, of each real value, of the int32 sum and of both
    scales after it (6 allow for any form); beside bfloat16, also those of kernel, sum and result.

    Each is relative to the sum of magnitudes: Higham (3.5). A matrix product, which a kernel of one
    tap is, sums codes and zero points apart.
    """
    lhs, rhs = case.operands(uniform)
    expected = convolution(lhs.real, rhs.real, **case.options)
    relative = gamma(case.products + 6)
    if "bfloat16" in case:
        relative += (1 + 2.0**-8) ** 3 - 1
    sizes = [x.apart if case.taps == "one" else np.abs(x.real) for x in (lhs, rhs)]
    allowed = relative * convolution(*sizes, **case.options)
    y = jax.jit(case.convolve)(lhs.value, rhs.value)
    assert y.dtype == ("bfloat16" if "bfloat16" in case else "float32")
    assert y.shape == expected.shape
    assert np.all(np.abs(as_float64(y) - expected) <= allowed)


@functools.cache
def exact_cases(strength):
    return covering(strength, is_possible, **TABLES, left=INTEGERS, right=INTEGERS)


@functools.cache
def near_cases(strength):
    """All but two operands of integers, which the exact cases have."""

    def possible(case):
        return is_possible(case) and not case.has_integers

    return covering(strength, possible, **TABLES, left=NEAR, right=NEAR)


@functools.cache
def large_cases(strength):
    """Kernels of 2**14 elements beside an array: on CPU they are converted in slices."""
    tables = {
        **TABLES,
        "padding": ["SAME", "pairs"],
        "steps": ["plain", "strides"],
        "groups": ["one", "two", "of the batch"],
        "taps": ["window"],
        "size": ["large"],
        "of_image": ["tensor"],
        "left": ["float32", "bfloat16"],
        "right": ["int8", "int4 with zero points, packed", "mxfp8"],
    }
    return covering(strength, is_possible, **tables)


def each(cases, part, check, *args):
    """Checks a share of the cases; what fails bears its case."""
    for some in cases[part::PARTS]:
        try:
            check(some, *args)
        except Exception as failure:
            failure.add_note(str(some))
            raise


@pytest.mark.parametrize("part", range(PARTS))
def test_integers_are_convolved_exactly(part, monkeypatch):
    """Any two choices of the tables of `convolutions` occur together."""
    each(exact_cases(2), part, check_exact, monkeypatch)


@pytest.mark.parametrize("part", range(PARTS))
def test_real_values_are_convolved_as_near_as_float32_allows(part):
    each(near_cases(2), part, check_near)


@pytest.mark.parametrize("part", range(PARTS))
def test_large_kernels_are_convolved_as_near_as_float32_allows(part):
    each(large_cases(2), part, check_near)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_any_three_choices_are_convolved_together(part, monkeypatch):
    each(exact_cases(3), part, check_exact, monkeypatch)
