"""Convolutions against NumPy: of every layout, window, group, number format and granularity, two or
three of those at a time; of any window; and of windows that reach beyond the image.

The last are exact whatever XLA makes of padding, of an image smaller than the window, and of few or
many channels.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jqx
from jqx._src.contractions.conv_general_dilated import window_of

from ..oracles.contractions import UNIT, as_elsewhere, gamma
from ..oracles.numerics import as_float64, assert_floats
from ..strategies import law
from ..tensor.tensors import random_codes, tensor
from .convolutions import (
    FORMATS,
    GROUPS,
    INTEGERS,
    LAYOUTS,
    NHWC,
    OF_IMAGES,
    OF_KERNELS,
    PADDINGS,
    STEPS,
    TAPS,
    convolution,
    covering,
    is_possible,
    powers,
    uniform,
)

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


EXACT = {"left": INTEGERS, "right": INTEGERS}
LARGE = {
    "padding": ["SAME", "pairs"],
    "steps": ["plain", "strides"],
    "groups": ["one", "two", "of the batch"],
    "taps": ["window"],
    "size": ["large"],
    "of_image": ["tensor"],
    "left": ["float32", "bfloat16"],
    "right": ["int8", "int4 with zero points, packed", "mxfp8"],
}
"""Kernels of 2**14 elements beside an array: on CPU they are converted in slices."""


def is_possible_of_reals(case):
    """All but two operands of integers, which the exact cases have."""
    return is_possible(case) and not case.has_integers


@functools.cache
def cases_of(name):
    """The cases of a group: every two of its choices occur together, or every three."""
    if name == "reals":
        return covering(2, is_possible_of_reals, **{**TABLES, "left": NEAR, "right": NEAR})
    if name == "large kernels":
        return covering(2, is_possible, **{**TABLES, **LARGE})
    return covering(3 if "three" in name else 2, is_possible, **TABLES, **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", ["integers", "reals", "large kernels", "integers, any three"])
def test_choices_are_convolved_together(name, part, monkeypatch):
    """Integers exactly, and all others as near as float32 allows. What fails bears its case."""
    for case in cases_of(name)[part::PARTS]:
        try:
            if name.startswith("integers"):
                check_exact(case, monkeypatch)
            else:
                check_near(case)
        except Exception as failure:
            failure.add_note(str(case))
            raise


class Window(NamedTuple):
    """A convolution of integers; `zeros` says which operands have zero points."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    padding: Any = "SAME"
    zeros: tuple[bool, bool] = (False, False)
    formats: tuple[str, str] = ("int8", "int8")
    window_strides: tuple[int, int] = (1, 1)
    lhs_dilation: tuple[int, int] | None = None
    rhs_dilation: tuple[int, int] | None = None
    feature_group_count: int = 1
    batch_group_count: int = 1

    @property
    def options(self) -> dict[str, Any]:
        names = ("padding", *self._fields[5:])
        return {name: getattr(self, name) for name in names} | {"dimension_numbers": NHWC}

    def operands(self, rng: np.random.Generator) -> tuple[Any, Any, np.ndarray]:
        """Codes of the whole range, scales of 1 for each image and output, and the result."""
        batch = self.image[0] if self.batch_group_count == 1 else 1
        pair, numbers = [], []
        for shape, form, has_zero, scale in zip(
            (self.image, self.kernel),
            self.formats,
            self.zeros,
            ((batch, 1, 1, 1), (1, 1, 1, self.kernel[3])),
            strict=True,
        ):
            codes = random_codes(rng, form, shape)
            zero = random_codes(rng, form, scale) if has_zero else None
            pair.append(tensor(codes, form, np.ones(scale), zero))
            numbers.append(codes - (0 if zero is None else zero))
        return *pair, convolution(*numbers, **self.options)

    def convolve(self, lhs: Any, rhs: Any) -> jax.Array:
        return jqx.conv_general_dilated(lhs, rhs, **self.options)


def assert_exact(window: Window, y: jax.Array, expected: np.ndarray) -> None:
    """Of 8 bits, int32 rounded once to float32; each sum of digits of 16 bits is rounded, too."""
    assert y.shape == expected.shape, window
    allowed = np.where(np.abs(expected) <= 2**24, 0, UNIT * np.abs(expected))
    if "int16" in window.formats:
        allowed = 8 * UNIT * np.max(np.abs(expected), initial=0)
    assert np.all(np.abs(as_float64(y) - expected) <= allowed), window


PADDINGS_OF_WINDOWS = st.sampled_from(["SAME", "SAME_LOWER", "VALID", "same"]) | st.tuples(
    *[st.tuples(st.integers(-1, 3), st.integers(-1, 3))] * 2
)
PAIRS_OF_STEPS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def windows(draw):
    """Small images and kernels, and how the one is moved over the other. Zero points are other than
    0: what is put around and between the elements must be those.
    """
    padding = draw(PADDINGS_OF_WINDOWS)
    outputs, groups = draw(st.sampled_from([(3, 1), (4, 2)]))
    return Window(
        (2, draw(st.integers(2, 6)), draw(st.integers(2, 6)), 2),
        (draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 // groups, outputs),
        padding,
        (True, True),
        ("uint8", "int4"),
        draw(PAIRS_OF_STEPS),
        None if isinstance(padding, str) else draw(st.none() | PAIRS_OF_STEPS),
        draw(st.none() | PAIRS_OF_STEPS),
        groups,
    )


def shape_of_lax(window):
    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in window[:2]]
    of_lax = functools.partial(lax.conv_general_dilated, **window.options)
    return floats, jax.eval_shape(of_lax, *floats).shape


@settings(law, max_examples=40)
@given(window=windows())
def test_the_shape_is_that_of_lax_where_anything_is_left(window):
    floats, expected = shape_of_lax(window)
    if 0 in expected:
        return
    x, w = (tensor(np.zeros(shape), "uint8") for shape in window[:2])
    for pair in [(x, w), (floats[0], w), (x, floats[1]), floats]:
        assert jax.eval_shape(window.convolve, *pair).shape == expected


@settings(law, max_examples=300)
@given(
    window=windows(),
    groups=st.sampled_from([(1, 1)] * 4 + [(2, 1), (1, 2), (2, 2), (0, 1), (3, 1), (1, -1)]),
    pads=st.integers(-9, 2),
)
def test_the_shape_is_known_without_lax_wherever_lax_takes_the_arguments(window, groups, pads):
    """Of arguments that it refuses nothing is known, so that its own error is raised."""
    window = window._replace(feature_group_count=groups[0], batch_group_count=groups[1])
    if not isinstance(window.padding, str):
        window = window._replace(padding=((pads, 1), window.padding[1]))
    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in window[:2]]
    try:
        _, expected = shape_of_lax(window)
    except (ValueError, TypeError, AssertionError):
        expected = None
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    parsed = window_of(*floats, *(window.options[name] for name in names), NHWC, *groups, None)
    assert parsed.result_shape(window.image, window.kernel) == expected


def check_window(window):
    lhs, rhs, expected = window.operands(np.random.default_rng([*window.image, *window.kernel]))
    if expected.size:
        assert_exact(window, window.convolve(lhs, rhs), expected)


@settings(law, max_examples=15)
@given(window=windows())
def test_any_window_is_moved_over_the_image(window):
    check_window(window)


@pytest.mark.slow
@settings(law, max_examples=200)
@given(window=windows())
def test_many_windows_are_moved_over_the_image(window):
    check_window(window)


TWO = ((2, 1), (1, 2))
BEYOND = [
    Window((2, 2, 2, 512), (3, 3, 512, 64)),
    Window((2, 1, 1, 128), (3, 3, 128, 128)),
    Window((1, 3, 3, 64), (7, 7, 64, 64)),
    Window((2, 3, 3, 128), (5, 5, 128, 16), zeros=(False, True)),
    Window((1, 1, 3, 64), (3, 2, 64, 64), formats=("int8", "int4"), zeros=(False, True)),
    Window((2, 2, 2, 64), (3, 3, 64, 32), formats=("uint8", "int8"), zeros=(True, False)),
    Window((1, 4, 5, 32), (5, 7, 32, 64), window_strides=(1, 2), formats=("int8", "uint8")),
    Window((2, 1, 5, 128), (2, 3, 128, 16), TWO, lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
    Window((1, 5, 5, 64), (2, 2, 32, 64), TWO, window_strides=(3, 1), feature_group_count=2),
    Window((4, 2, 2, 64), (3, 3, 64, 16), batch_group_count=2),
    Window((2, 2, 2, 16), (3, 3, 1, 32), feature_group_count=16),
    Window((1, 4, 2, 17), (5, 6, 17, 16), formats=("int16", "uint8"), zeros=(True, False)),
    Window((1, 2, 2, 1), (3, 3, 1, 1)),
]
"""All but the last two were wrong where XLA folded padding into them."""


def test_a_window_beyond_the_image_sums_exactly():
    rng = np.random.default_rng(0)
    cases = [window.operands(rng) for window in BEYOND]

    @jax.jit
    def convolved(pairs):
        return [window.convolve(*pair) for window, pair in zip(BEYOND, pairs, strict=True)]

    results = convolved([pair for *pair, _ in cases])
    for window, y, (*_, expected) in zip(BEYOND, results, cases, strict=True):
        assert_exact(window, y, expected)
    for window, (lhs, rhs, expected) in list(zip(BEYOND, cases, strict=True))[:3]:
        assert_exact(window, window.convolve(lhs, rhs), expected)


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


def at_random(rng: np.random.Generator) -> Window:
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
    return Window(
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
def sweep() -> list[Window]:
    rng = np.random.default_rng(2)
    return [at_random(rng) for _ in range(160)]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_any_window_over_any_small_image_sums_exactly(part):
    rng = np.random.default_rng(part)
    for i, window in enumerate(sweep()[part::4]):
        lhs, rhs, expected = window.operands(rng)
        assert_exact(window, jax.jit(window.convolve)(lhs, rhs), expected)
        if i % 4 == 0:
            assert_exact(window, window.convolve(lhs, rhs), expected)


def test_a_convolution_is_traced_without_another_trace_of_its_shape(monkeypatch):
    x, w = tensor(np.zeros((1, 4, 4, 2)), "uint8"), tensor(np.zeros((3, 3, 2, 4)), "uint8")
    monkeypatch.setattr(jax, "eval_shape", lambda *args: 1 / 0)
    jax.make_jaxpr(Window(x.shape, w.shape).convolve)(x, w)


X, W = (tensor(np.zeros(shape), "int8") for shape in ((2, 6, 6, 3), (3, 3, 3, 4)))
NOT_WINDOWS = {
    "strides of fractions": {"window_strides": (1.5, 1)},
    "padding of fractions": {"padding": ((1.5, 1), (1, 1))},
    "dilation of the image by fractions": {"lhs_dilation": (1.5, 1)},
    "dilation of the kernel by fractions": {"rhs_dilation": (1.5, 1)},
    "a fraction of groups": {"feature_group_count": 1.5},
    "a fraction of groups of the batch": {"batch_group_count": 1.5},
    "strides of one axis": {"window_strides": (1,)},
    "padding of one axis": {"padding": ((1, 1),)},
    "dilation of one axis of the image": {"lhs_dilation": (2,)},
    "dilation of one axis of the kernel": {"rhs_dilation": (2,)},
    "dilation of one axis, SAME": {"rhs_dilation": (2,), "padding": "SAME"},
    # Which of both sizes is the result to have, of the image or of the one with holes?
    "a transposed convolution, SAME": {"padding": "SAME", "lhs_dilation": (2, 2)},
}


@pytest.mark.parametrize("options", NOT_WINDOWS.values(), ids=NOT_WINDOWS)
def test_what_is_no_window_is_refused(options):
    options = {"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), **options}
    for x in (X, jnp.zeros(X.shape)):
        with pytest.raises((TypeError, ValueError)) as refusal:
            jqx.conv_general_dilated(x, W, dimension_numbers=NHWC, **options)
        assert "zip()" not in str(refusal.value)
