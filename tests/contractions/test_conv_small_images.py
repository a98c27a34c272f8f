"""Integer convolutions whose window reaches beyond the image, against int64: exact, whatever XLA
makes of padding, of an image smaller than the window, and of few or many channels.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import jqx

from ..oracles.contractions import UNIT, gamma
from ..oracles.numerics import as_float64
from ..tensor.tensors import random_codes, tensor
from .convolutions import NHWC, convolution


class Small(NamedTuple):
    """A convolution of integers; `zeros` says which operands have zero points."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    padding: Any = "SAME"
    zeros: tuple[bool, bool] = (False, False)
    formats: tuple[str, str] = ("int8", "int8")
    strides: tuple[int, int] = (1, 1)
    lhs_dilation: tuple[int, int] = (1, 1)
    rhs_dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    batch_groups: int = 1

    @property
    def options(self) -> dict[str, Any]:
        return {
            "padding": self.padding,
            "lhs_dilation": self.lhs_dilation,
            "rhs_dilation": self.rhs_dilation,
            "dimension_numbers": NHWC,
            "feature_group_count": self.groups,
            "batch_group_count": self.batch_groups,
        }

    def operands(self, rng: np.random.Generator) -> tuple[Any, Any, np.ndarray]:
        """Codes of the whole range, scales of 1, and the result in int64."""
        scales = (1, 1, 1, 1), (1, 1, 1, self.kernel[3])
        pair, numbers = [], []
        for shape, form, has_zero, entries in zip(
            (self.image, self.kernel), self.formats, self.zeros, scales, strict=True
        ):
            codes = random_codes(rng, form, shape)
            zero = random_codes(rng, form, entries) if has_zero else None
            pair.append(tensor(codes, form, np.ones(entries), zero))
            numbers.append(codes - (0 if zero is None else zero))
        lhs, rhs = numbers
        return *pair, convolution(lhs, rhs, self.strides, **self.options)

    def convolve(self, lhs: Any, rhs: Any) -> jax.Array:
        return jqx.conv_general_dilated(lhs, rhs, self.strides, **self.options)


def assert_exact(small: Small, y: jax.Array, expected: np.ndarray) -> None:
    """Of 8 bits, int32 rounded once to float32; each sum of digits of 16 bits is rounded, too."""
    assert y.shape == expected.shape, small
    allowed = UNIT * np.abs(expected)
    if "int16" in small.formats:
        allowed = 8 * UNIT * np.max(np.abs(expected), initial=0)
    assert np.all(np.abs(as_float64(y) - expected) <= allowed), small


TWO = ((2, 1), (1, 2))
FEW = [
    Small((2, 2, 2, 512), (3, 3, 512, 64)),
    Small((2, 1, 1, 128), (3, 3, 128, 128)),
    Small((1, 3, 3, 64), (7, 7, 64, 64)),
    Small((2, 3, 3, 128), (5, 5, 128, 16), zeros=(False, True)),
    Small((1, 1, 3, 64), (3, 2, 64, 64), formats=("int8", "int4"), zeros=(False, True)),
    Small((2, 2, 2, 64), (3, 3, 64, 32), formats=("uint8", "int8"), zeros=(True, False)),
    Small((1, 4, 5, 32), (5, 7, 32, 64), strides=(1, 2), formats=("int8", "uint8")),
    Small((2, 1, 5, 128), (2, 3, 128, 16), TWO, lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
    Small((1, 5, 5, 64), (2, 2, 32, 64), TWO, strides=(3, 1), groups=2),
    Small((4, 2, 2, 64), (3, 3, 64, 16), batch_groups=2),
    Small((2, 2, 2, 16), (3, 3, 1, 32), groups=16),
    Small((1, 4, 2, 17), (5, 6, 17, 16), formats=("int16", "uint8"), zeros=(True, False)),
    Small((1, 2, 2, 1), (3, 3, 1, 1)),
]
"""All but the last two were wrong where XLA folded padding into them."""


def test_a_window_beyond_the_image_sums_exactly():
    rng = np.random.default_rng(0)
    cases = [small.operands(rng) for small in FEW]

    @jax.jit
    def every(pairs):
        return [small.convolve(*pair) for small, pair in zip(FEW, pairs, strict=True)]

    results = every([pair for *pair, _ in cases])
    for small, y, (*_, expected) in zip(FEW, results, cases, strict=True):
        assert_exact(small, y, expected)
    for small, (lhs, rhs, expected) in list(zip(FEW, cases, strict=True))[:3]:
        assert_exact(small, small.convolve(lhs, rhs), expected)


def test_converted_and_simulated_functions_sum_as_floats_do():
    rng = np.random.default_rng(1)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 2, 2, 64), (3, 3, 64, 32)))

    def f(w, x):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)

    plan = jqx.make_plan(f, jqx.presets.w8a8())(w, x)
    _, stats = jqx.calibrate(f, plan)(w, x)
    affines = jqx.affines(plan, stats)
    expected = as_float64(jax.jit(jqx.simulate(f, plan, affines))(w, x))
    converted = jax.jit(jqx.convert(f, plan, affines))(jqx.quantize_params(w, plan), x)
    simulated = jax.jit(jqx.simulate(f, plan, affines, backward=np.float32))(w, x)
    allowed = gamma(64 * 9 + 6) * np.max(convolution(np.abs(x), np.abs(w), (1, 1), "SAME"))
    for y in (converted, simulated):
        assert np.max(np.abs(as_float64(y) - expected)) <= allowed


def at_random(rng: np.random.Generator) -> Small:
    """Any convolution of an image of up to 5 x 5 by up to 7 x 7 taps."""
    pick = lambda items: items[rng.integers(len(items))]  # noqa: E731
    pairs = lambda items: (int(pick(items)), int(pick(items)))  # noqa: E731
    channels = pick([1, 3, 8, 16, 17, 32, 64, 64, 128, 128, 512])
    groups = pick([g for g in (1, 1, 1, 2, channels) if channels % g == 0])
    batch_groups = 2 if groups == 1 and pick(range(6)) == 0 else 1
    outputs = max(1, pick([1, 4, 16, 64, 128]) // (groups * batch_groups)) * groups * batch_groups
    taps = pairs(range(1, 8))
    padding: Any = tuple((int(rng.integers(n + 1)), int(rng.integers(n + 1))) for n in taps)
    holes = pairs([1, 1, 2])
    if pick(range(3)) == 0:
        padding, holes = pick(["SAME", "SAME_LOWER"]), (1, 1)
    return Small(
        (pick([1, 2]) * batch_groups, *pairs(range(1, 6)), channels),
        (*taps, channels // groups, outputs),
        padding,
        (bool(pick([0, 1])), bool(pick([0, 1]))),
        (pick(["int8", "int8", "uint8", "int4", "int16"]), pick(["int8", "uint8", "int4"])),
        pairs([1, 1, 2, 3]),
        holes,
        pairs([1, 1, 2]),
        groups,
        batch_groups,
    )


@functools.cache
def sweep() -> list[Small]:
    rng = np.random.default_rng(2)
    return [at_random(rng) for _ in range(160)]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_any_window_over_any_small_image_sums_exactly(part):
    rng = np.random.default_rng(part)
    for i, small in enumerate(sweep()[part::4]):
        lhs, rhs, expected = small.operands(rng)
        assert_exact(small, jax.jit(small.convolve)(lhs, rhs), expected)
        if i % 4 == 0:
            assert_exact(small, small.convolve(lhs, rhs), expected)
