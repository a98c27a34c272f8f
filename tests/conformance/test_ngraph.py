"""nGraph v0 Quantize and Dequantize against the reference kernels' vectors."""

import jax.numpy as jnp
import pytest

import jqx

from .forms import FORMS, evaluate, selected
from .golden_io import DTYPES, load, mismatches

SHARDS = 4


def _rank_restored(parameter, axes):
    return parameter if axes else parameter.reshape(())


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("form", FORMS)
def test_quantize_gives_every_specified_code(form, shard):
    cases = selected(list(load("ngraph_quantize")), lambda c: c["attrs"]["input_type"] == "f64")
    wrong = {}
    for case, arrays in cases[shard::SHARDS]:
        attrs = case["attrs"]

        def f(x, scale, zero_point, attrs=attrs):
            return jqx.quantize(
                x,
                scale,
                zero_point,
                qtype=DTYPES[attrs["type"]],
                axes=attrs["axes"],
                round_mode=jqx.RoundMode(attrs["round_mode"]),
            )

        operands = (
            arrays["x"],
            _rank_restored(arrays["scale"], attrs["axes"]),
            _rank_restored(arrays["zero_point"], attrs["axes"]),
        )
        wrong[case["id"]] = mismatches(evaluate(form, f, operands), arrays)
    assert {k: v for k, v in wrong.items() if v} == {}


@pytest.mark.parametrize("form", FORMS)
def test_dequantize_gives_every_specified_value(form):
    cases = selected(list(load("ngraph_dequantize")), lambda c: c["attrs"]["type"] == "f64")
    wrong = {}
    for case, arrays in cases:
        axes = case["attrs"]["axes"]

        def f(q, scale, zero_point, axes=axes):
            return jqx.dequantize(q, scale, zero_point, axes=axes)

        operands = (
            arrays["x"],
            _rank_restored(arrays["scale"], axes),
            _rank_restored(arrays["zero_point"], axes),
        )
        wrong[case["id"]] = mismatches(evaluate(form, f, operands), arrays)
    assert {k: v for k, v in wrong.items() if v} == {}


def test_permuted_and_negative_axes_mean_the_same():
    x = jnp.linspace(-3, 3, 24).reshape(2, 3, 4)
    scale = jnp.linspace(0.1, 0.5, 8).reshape(2, 4)
    expected = jqx.quantize(x, scale, qtype=jnp.int8, axes=(0, 2))
    for axes in [(2, 0), (-1, 0), (0, -1), (-3, -1), (2, 0, -1)]:
        assert (jqx.quantize(x, scale, qtype=jnp.int8, axes=axes) == expected).all()
