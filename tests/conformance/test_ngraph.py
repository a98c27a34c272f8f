"""nGraph v0 Quantize and Dequantize against the reference kernels' vectors."""

import jax.numpy as jnp
import pytest

import jqx

from .forms import FORMS, evaluate, selected
from .golden_io import DTYPES, differing, load


def _rank_restored(parameter, axes):
    return parameter if axes else parameter.reshape(())


def _quantize(attrs):
    return lambda x, scale, zero_point: jqx.quantize(
        x,
        scale,
        zero_point,
        qtype=DTYPES[attrs["type"]],
        axes=attrs["axes"],
        round_mode=jqx.RoundMode(attrs["round_mode"]),
    )


def _dequantize(attrs):
    return lambda q, scale, zero_point: jqx.dequantize(q, scale, zero_point, axes=attrs["axes"])


def _wrong(form, op, cases):
    """The cases that differ, and in how many elements."""
    operands = []
    for case, arrays in cases:
        axes = case["attrs"]["axes"]
        parameters = [_rank_restored(arrays[name], axes) for name in ("scale", "zero_point")]
        operands.append((arrays["x"], *parameters))
    results = evaluate(form, [op(case["attrs"]) for case, _ in cases], operands)
    return differing(results, cases)


@pytest.mark.parametrize("form", FORMS)
def test_quantize_gives_every_specified_code(form):
    cases = selected(list(load("ngraph_quantize")), lambda c: c["attrs"]["input_type"] == "f64")
    assert _wrong(form, _quantize, cases) == {}


@pytest.mark.parametrize("form", FORMS)
def test_dequantize_gives_every_specified_value(form):
    cases = selected(list(load("ngraph_dequantize")), lambda c: c["attrs"]["type"] == "f64")
    assert _wrong(form, _dequantize, cases) == {}


def test_permuted_and_negative_axes_mean_the_same():
    x = jnp.linspace(-3, 3, 24).reshape(2, 3, 4)
    scale = jnp.linspace(0.1, 0.5, 8).reshape(2, 4)
    expected = jqx.quantize(x, scale, qtype=jnp.int8, axes=(0, 2))
    for axes in [(2, 0), (-1, 0), (0, -1), (-3, -1), (2, 0, -1)]:
        assert (jqx.quantize(x, scale, qtype=jnp.int8, axes=axes) == expected).all()
