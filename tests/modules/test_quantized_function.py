"""A function of a quantized module is traced once, whatever is asked of it."""

import jax.numpy as jnp
import pytest

import jqx
from jqx._src.modules.quantized_function import Mode, QuantizedFunction, Search

POLICIES = {"static": jqx.presets.w8a8(), "dynamic": jqx.presets.w8a8_dynamic()}
X = jnp.ones((2, 4))


def counted(policy, **options):
    """A function of two products, and how often it was traced."""
    traces = []

    def function(params, x, name):
        traces.append(name)
        return x @ params["a"] @ params["b"]

    known = {"policy": policy, "args": (X, "static"), "kwargs": {}, "stats": {}, "scales": {}}
    return QuantizedFunction(function, caller="test", **{**known, **options}), traces


def params():
    return {"a": jnp.eye(4), "b": jnp.eye(4)}


@pytest.mark.parametrize("name", POLICIES)
def test_a_conversion_and_its_result_are_one_trace(name):
    call, traces = counted(POLICIES[name], dynamic=True)
    scales = call.find_scales(params(), Search.SCALES)
    call = call.with_scales(scales)
    codes = call.quantize(params())
    call(codes, Mode.CONVERT)
    call(params(), Mode.SIMULATE)
    assert len(traces) == 1


def test_a_calibration_is_one_trace():
    call, traces = counted(POLICIES["static"])
    _, stats = call.observe(params())
    again, more = counted(POLICIES["static"], stats=stats)
    again.observe(params())
    assert (len(traces), len(more)) == (1, 1)


def test_arguments_of_other_types_are_traced_again():
    call, traces = counted(POLICIES["dynamic"])
    call.plan(params())
    call.plan({"a": jnp.ones((4, 6)), "b": jnp.ones((6, 4))})
    assert len(traces) == 2
