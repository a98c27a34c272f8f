"""What is measured of weights whose errors are known, and what `report` makes of a plan: planted
faults, totals that are sums, and every way to show it.
"""

import dataclasses
import importlib
import io
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jqx
from jqx import numerics
from jqx._src.diagnostics.report import WeightError, bits_of, measure, sqnr
from jqx.calibrators import fixed, minmax

from ..arrays import normal, on_device
from ..strategies import law
from ..tensor.tensors import CASES, NV4, made, quantized_case, spec, spread_out

INT8 = spec(jnp.int8, jqx.per_axis(0))


def quantized(x, spec):
    return jqx.QTensor.quantize(on_device(x), spec)


def test_every_field_of_a_weight_whose_errors_are_known():
    x = np.array([[127.0, 0.25, -4.0], [254.0, 1.0, 0.0]], np.float32)  # scales 1 and 2
    error = measure(x, quantized(x, INT8), "block/w")
    assert error == WeightError(
        path="block/w",
        scheme="int8 per_axis(0)",
        bits=(6 * 8 + 2 * 32) / 6,
        bytes_before=24,
        bytes_after=6 + 8,
        low=-4.0,
        high=254.0,
        clipped=0.0,
        dead=0,
        sqnr=10 * math.log10((x.astype(np.float64) ** 2).sum() / (0.25**2 + 1.0)),
        size=6,
    )


def test_an_exact_weight_has_infinite_sqnr_and_noise_alone_minus_infinite():
    x = np.array([[1.0, -127.0]], np.float32)
    assert [measure(y, quantized(x, INT8)).sqnr for y in (x, 0 * x)] == [math.inf, -math.inf]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_make_the_sqnr_nan_and_infinities_are_clipped(value):
    x = np.array([[1.0, -127.0], [value, 2.0]], np.float32)
    error = measure(x, quantized(x, spec(jnp.int8, calibrator=fixed(-127.0, 127.0))))
    assert math.isnan(error.sqnr)
    assert error.clipped == (0 if np.isnan(value) else 1 / 4)
    assert math.isnan(error.low) == math.isnan(error.high) == np.isnan(value)


def test_an_empty_weight_has_no_range_and_no_faults():
    x = np.zeros((0, 3), np.float32)
    error = measure(x, quantized(x, spec(jnp.int8)))
    assert (error.clipped, error.dead, error.sqnr, error.bits) == (0, 0, math.inf, 0)
    assert math.isnan(error.low) and math.isnan(error.high)


def test_an_outlier_beyond_a_fixed_range_is_clipped_and_one_within_half_a_step_is_not():
    x = np.array([1.0, -127.0, 127.5, 128.0, -129.0, 5.0, 0.0, 300.0], np.float32)
    fit = quantized(x, spec(jnp.int8, calibrator=fixed(-127.0, 127.0)))
    assert measure(x, fit).clipped == 3 / 8  # codes end at -128 and 127


def test_a_zero_point_moves_the_range():
    q = dataclasses.replace(
        quantized(np.zeros(4, np.float32), spec(jnp.uint8, symmetric=False, calibrator=minmax)),
        scale=jnp.array([2.0]),
        zero_point=jnp.array([10], jnp.uint8),
    )  # numbers from -20 to 490
    x = np.array([-21.0, -21.5, 491.0, 491.5], np.float32)
    assert measure(x, q).clipped == 2 / 4


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_ranges_found_from_the_weight_clip_nothing_but_by_the_rule_of_mx(name, seed):
    shape, _, coarser = CASES[name]
    q = quantized_case(name, seed)
    clipped = measure(spread_out(shape, seed), q).clipped
    assert clipped == 0 or coarser is not None or name == "mx in blocks"


def test_a_power_of_two_scale_clips_what_the_specification_says():
    x = np.array([[7.5, 6.5, 3.0, -7.25, 1.0]], np.float32)  # scale 1: numbers end at 6, steps of 2
    block = numerics.Block(jnp.float4_e2m1fn, 5, "mx4")
    assert measure(x, quantized(x, spec(block, jqx.per_block({0: 1, 1: 5})))).clipped == 2 / 5


def test_dead_groups_are_those_of_scale_zero_or_of_zero_codes_alone():
    x = np.array([[0.0] * 4, [1.0, 2.0, 3.0, 4.0], [0.25, -0.25, 0.0, 0.0]], np.float32)
    q = quantized(x, spec(jnp.int8, jqx.per_axis(0), calibrator=fixed(-127.0, 127.0)))
    assert measure(x, q).dead == 2
    planted = dataclasses.replace(q, scale=on_device(np.array([[1.0], [0.0], [0.25]], np.float32)))
    error = measure(x, dataclasses.replace(planted, values=jnp.ones_like(q.values)))
    assert error.dead == 1 and error.clipped == 4 / 12  # of scale 0, all but zeros are out of range


def test_a_tail_counts_its_own_elements_alone():
    x = np.array([[1.0, 2.0, 3.0, 4.0, 100.0]], np.float32)
    tail = jqx.per_block({0: 1, 1: 4}, tail=True)
    narrow = spec(jnp.int8, tail, calibrator=fixed(-127.0, -1.0))  # zeros that fill up are no codes
    assert measure(x, quantized(x, narrow)).clipped == 0
    assert measure(x * 0, quantized(x * 0, spec(jnp.int8, tail))).dead == 2


def test_bits_count_packed_codes_and_every_scale():
    q = quantized(np.ones((64, 64), np.float32), spec(jnp.int4, jqx.per_block({0: 32, 1: 1})))
    error = measure(np.ones((64, 64), np.float32), q)
    assert (error.bits, error.bytes_after) == (5.0, 64 * 64 + 2 * 64 * 4)  # a byte each, unpacked
    packed = measure(np.ones((64, 64), np.float32), q.pack())
    assert (packed.bits, packed.bytes_after) == (5.0, 64 * 32 + 2 * 64 * 4)


def test_bits_of_nested_scales_and_zero_points():
    x = spread_out((4, 8))
    nested = quantized(x, spec(NV4, jqx.per_block({0: 1, 1: 4})))
    assert bits_of(nested) == 4 * 32 + 8 * 8 + 32
    pointed = quantized(x, spec(jnp.uint4, jqx.per_axis(0), False, calibrator=minmax))
    assert bits_of(pointed) == 4 * 32 + 32 * 4 + 4 * 4


@pytest.mark.parametrize("name", CASES)
def test_a_weight_in_the_format_already_is_exact(name):
    q, real = made(name)
    error = measure(real, q)
    assert error.sqnr == math.inf and error.clipped == 0
    assert measure(real, q.pack() if numerics.format_of(q.qtype).bits < 8 else q).sqnr == math.inf


@law
@given(st.integers(-8, 8), st.integers(0, 2**32 - 1))
def test_sqnr_does_not_change_with_a_power_of_two(power, seed):
    x = spread_out((4, 8), seed)
    y = np.round(x)
    assert sqnr(x * np.float32(2.0**power), y * np.float32(2.0**power)) == sqnr(x, y)


def test_long_sums_are_those_of_float64():
    x = np.random.default_rng(0).normal(size=(3, 1 << 20)).astype(np.float32)
    y = x + np.float32(2.0**-10)
    noise = ((x.astype(np.float64) - y) ** 2).sum()
    want = 10 * math.log10((x.astype(np.float64) ** 2).sum() / noise)
    # the order of 3 * 2**20 positive float64 terms: relative error below 3 * 2**20 * 2**-53 each
    assert abs(sqnr(x, y) - want) < 20 * 3 * 2.0**20 * 2.0**-53


def test_another_shape_or_kind_is_refused():
    q = quantized(np.ones((2, 3), np.float32), INT8)
    with pytest.raises(ValueError, match="`x` and `q` have different shapes"):
        measure(np.ones((3, 2), np.float32), q)
    with pytest.raises(TypeError, match="`q` is not a QTensor"):
        measure(np.ones(3, np.float32), np.ones(3))
    with pytest.raises(TypeError, match="must be a floating point number"):
        measure(np.ones((2, 3), np.int32), q)


W8 = jqx.presets.w8a16()


def f(p, x):
    return jnp.tanh(x @ p["a"] + p["bias"][None]) @ p["b"]


def params():
    a, b = normal(0, 2, 16, 16)
    return {"a": a, "b": b, "bias": jnp.zeros(16)}


def plan_of(p, policy=W8):
    return jqx.make_plan(f, policy)(p, jnp.ones((2, 16)))


def test_totals_are_sums_of_what_lies_there():
    p = params()
    plan = plan_of(p)
    report = jqx.report(plan, p)
    assert [w.path for w in report.weights] == ["a", "b"]
    assert report.bytes_before == sum(x.nbytes for x in jax.tree.leaves(p))
    quantized = jqx.quantize_params(p, plan)
    assert report.bytes_after == sum(
        x.nbytes for x in jax.tree.leaves(quantized, is_leaf=lambda x: isinstance(x, jqx.QTensor))
    )
    assert report.kept == p["bias"].nbytes
    assert (report.sites, report.skipped, report.macs) == (2, 0, 1.0)
    assert report.weights[0].bits == 8 + 32 / 16 and report.faults == ()


def test_a_dead_scale_and_a_clipped_weight_are_faults():
    p = params()
    p["a"] = p["a"].at[:, 3].set(0.0)
    narrow = jqx.calibrators.fixed(-0.5, 0.5)
    rules = [jqx.Rule("b", weight=jqx.QSpec(jnp.int8, calibrator=narrow)), *W8.rules]
    report = jqx.report(plan_of(p, jqx.Policy(rules)), p)
    first, second = report.faults
    assert (first.path, first.dead, first.clipped) == ("a", 1, 0.0)
    assert second.path == "b" and second.dead == 0
    outside = float((jnp.abs(p["b"]) > 0.5 * 127.5 / 127).mean())
    assert abs(second.clipped - outside) < 0.01 and second.sqnr < first.sqnr


def test_a_site_left_in_float_is_counted():
    report = jqx.report(plan_of(params(), jqx.Policy([jqx.Rule("b"), *W8.rules])), params())
    assert (report.sites, report.skipped, report.macs) == (1, 1, 0.5)
    assert "1 of 2 contractions quantized, 50.0 %" in str(report)


def test_it_is_shown_as_text_markdown_html_rich_and_json():
    report = jqx.report(plan_of(params()), params())
    assert len(str(report).splitlines()) == 2 + 2 + 1
    assert report.to_markdown().count("\n| ") == 3
    assert "<tr><th" in report._repr_html_() and "int8 per_axis(1)" in report._repr_html_()
    data = json.loads(json.dumps(report.to_dict()))
    assert data["weights"][0]["path"] == "a" and data["bytes_after"] == report.bytes_after
    console = importlib.import_module("rich.console").Console(width=200, file=io.StringIO())
    console.print(report)
    assert "per_axis(1)" in console.file.getvalue()


def test_several_arguments_of_parameters():
    def g(p, x, q):
        return (x @ p) @ q

    p, q, x = params()["a"], params()["b"], jnp.ones((2, 16))
    plan = jqx.make_plan(g, W8, params=(0, 2))(p, x, q)
    assert [w.path for w in jqx.report(plan, (p, q)).weights] == ["0", "2"]


def test_plans_and_parameters_without_values_are_refused():
    p = params()
    plan = plan_of(p)
    with pytest.raises(ValueError, match="have no values"):
        jqx.report(plan, jax.eval_shape(lambda: p))
    with pytest.raises(ValueError, match="quantized already"):
        jqx.report(plan, jqx.quantize_params(p, plan))
    with pytest.raises(TypeError, match="plan"):
        jqx.report(W8, p)


def test_it_is_of_the_scales_that_are_given():
    w = jnp.linspace(-1, 1, 64).reshape(8, 8)
    plan = jqx.make_plan(lambda w, x: x @ w, jqx.presets.w8a16())(w, w)
    coarse = {plan.weights[0].key: jqx.calibrators.Affine(jnp.full((1, 8), 0.1))}
    report, plain = jqx.report(plan, w, coarse).weights[0], jqx.report(plan, w).weights[0]
    assert report.sqnr < 30 < 40 < plain.sqnr


def test_a_function_without_parameters_has_a_report():
    rule = jqx.Rule(".*", activation="int8:tensor:dynamic", optional=True)
    plan = jqx.make_plan(lambda p, x: x @ x.T, jqx.Policy([rule]))({}, jnp.ones((2, 3)))
    report = jqx.report(plan, {})
    assert (report.bytes_before, report.bytes_after) == (0, 0)
    assert "0 bytes of parameters become 0; 1 of 1 contractions" in str(report)
    assert "0 bytes" in report._repr_html_()
