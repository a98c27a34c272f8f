"""The window of a convolution: any strides, padding and dilations, as lax takes them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jqx
from jqx._src.contractions.conv import window_of

from ..oracles.numerics import assert_floats
from ..strategies import law
from ..tensor.tensors import random_codes, reals, tensor
from .convolutions import NHWC, convolution

PADDINGS = st.sampled_from(["SAME", "SAME_LOWER", "VALID", "same"]) | st.tuples(
    *[st.tuples(st.integers(-1, 3), st.integers(-1, 3))] * 2
)
STEPS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def windows(draw):
    """Shapes of an image and of a kernel, and how the one is moved over the other."""
    padding = draw(PADDINGS)
    image = 2, draw(st.integers(2, 6)), draw(st.integers(2, 6)), 2
    outputs, groups = draw(st.sampled_from([(3, 1), (4, 2)]))
    kernel = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 // groups, outputs
    options = {
        "window_strides": draw(STEPS),
        "padding": padding,
        "lhs_dilation": None if isinstance(padding, str) else draw(st.none() | STEPS),
        "rhs_dilation": draw(st.none() | STEPS),
        "feature_group_count": groups,
    }
    return image, kernel, options


@settings(law, max_examples=40)
@given(window=windows())
def test_the_shape_is_that_of_lax_where_anything_is_left(window):
    image, kernel, options = window
    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (image, kernel)]
    theirs = functools.partial(lax.conv_general_dilated, dimension_numbers=NHWC, **options)
    expected = jax.eval_shape(theirs, *floats).shape
    if 0 in expected:
        return
    ours = functools.partial(jqx.conv_general_dilated, dimension_numbers=NHWC, **options)
    x, w = (tensor(np.zeros(shape), "uint8") for shape in (image, kernel))
    for pair in [(x, w), (floats[0], w), (x, floats[1]), floats]:
        assert jax.eval_shape(ours, *pair).shape == expected


@settings(law, max_examples=300)
@given(
    window=windows(),
    groups=st.sampled_from([(1, 1)] * 4 + [(2, 1), (1, 2), (2, 2), (0, 1), (3, 1), (1, -1)]),
    pads=st.integers(-9, 2),
)
def test_the_shape_is_known_without_lax_wherever_lax_takes_the_arguments(window, groups, pads):
    """Of arguments that it refuses nothing is known, so that its own error is raised."""
    image, kernel, options = window
    options["feature_group_count"], options["batch_group_count"] = groups
    if not isinstance(options["padding"], str):
        options["padding"] = ((pads, 1), options["padding"][1])
    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (image, kernel)]
    theirs = functools.partial(lax.conv_general_dilated, dimension_numbers=NHWC, **options)
    try:
        expected = jax.eval_shape(theirs, *floats).shape
    except (ValueError, TypeError, AssertionError):
        expected = None
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    found = window_of(*floats, *(options[name] for name in names), NHWC, *groups, None)
    assert found.result_shape(image, kernel) == expected


def test_a_convolution_is_traced_without_another_trace_of_its_shape(monkeypatch):
    x, w = tensor(np.zeros((1, 4, 4, 2)), "uint8"), tensor(np.zeros((3, 3, 2, 4)), "uint8")
    calls = []
    asked = jax.eval_shape
    monkeypatch.setattr(jax, "eval_shape", lambda *args: calls.append(args) or asked(*args))
    trace = jax.make_jaxpr(
        lambda x, w: jqx.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
    )
    trace(x, w)
    assert not calls


def check_window(window):
    """Zero points other than 0: what is put around and between the elements must be those."""
    image, kernel, options = window
    padding = options["padding"]
    if isinstance(padding, str):
        options = {**options, "padding": padding.upper()}
    rng = np.random.default_rng([*image, *kernel])
    zero = np.array([[[[3]]], [[[250]]]])
    x = tensor(random_codes(rng, "uint8", image), "uint8", np.ones((2, 1, 1, 1)), zero)
    w = tensor(random_codes(rng, "int4", kernel), "int4", None, [[[[-5]]]])
    expected = convolution(reals(x), reals(w), **options)
    if expected.size:
        y = jqx.conv_general_dilated(x, w, dimension_numbers=NHWC, **options)
        assert_floats(y, expected, np.float32)


@settings(law, max_examples=15)
@given(window=windows())
def test_any_window_is_moved_over_the_image(window):
    check_window(window)


@pytest.mark.slow
@settings(law, max_examples=200)
@given(window=windows())
def test_many_windows_are_moved_over_the_image(window):
    check_window(window)


X, W = (tensor(np.zeros(shape), "int8") for shape in ((2, 6, 6, 3), (3, 3, 3, 4)))
FRACTIONS = {
    "strides": {"window_strides": (1.5, 1)},
    "padding": {"padding": ((1.5, 1), (1, 1))},
    "dilation of the image": {"lhs_dilation": (1.5, 1)},
    "dilation of the kernel": {"rhs_dilation": (1.5, 1)},
    "groups": {"feature_group_count": 1.5},
    "groups of the batch": {"batch_group_count": 1.5},
}
LENGTHS = {
    "strides": {"window_strides": (1,)},
    "padding": {"padding": ((1, 1),)},
    "dilation of the image": {"lhs_dilation": (2,)},
    "dilation of the kernel": {"rhs_dilation": (2,)},
    "dilation of the kernel, SAME": {"rhs_dilation": (2,), "padding": "SAME"},
}


def with_options(x, options):
    options = {"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), **options}
    return jqx.conv_general_dilated(x, W, dimension_numbers=NHWC, **options)


@pytest.mark.parametrize("options", FRACTIONS.values(), ids=FRACTIONS)
def test_fractions_are_refused(options):
    for x in (X, jnp.zeros(X.shape)):
        with pytest.raises((TypeError, ValueError)):
            with_options(x, options)


@pytest.mark.parametrize("options", LENGTHS.values(), ids=LENGTHS)
def test_arguments_without_an_entry_for_each_spatial_axis_are_refused(options):
    for x in (X, jnp.zeros(X.shape)):
        with pytest.raises((TypeError, ValueError)) as refusal:
            with_options(x, options)
        assert "zip()" not in str(refusal.value)


def test_padding_by_name_is_refused_for_a_transposed_convolution_as_by_lax():
    """Which of both sizes the result is to have, of the image or of the one with holes?"""
    for x in (X, jnp.zeros(X.shape)):
        with pytest.raises(ValueError):
            with_options(x, {"padding": "SAME", "lhs_dilation": (2, 2)})
