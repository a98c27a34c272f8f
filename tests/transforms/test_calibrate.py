"""What calibration observes, the scales that come of it, and which scales a transform takes."""

import contextlib
import importlib.util
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import calibrators
from jqx._src.transforms import calibrate
from jqx.calibrators import Affine
from jqx.presets import w4a16, w8a8, w8a8_dynamic, w8a16

from ..arrays import assert_same
from ..models.transforms import (
    MODELS,
    eighths,
    jitted,
    jitted_params,
    mlp,
    mlp_params,
    normal,
    plan_of,
    product,
    relative,
)

X = normal(3, 7, 16)
PARAMS = mlp_params()
PLAN = plan_of(mlp, w8a8(), PARAMS, X)
FIRST, SECOND = "w:dot_general:lhs", "v:dot_general:lhs"
OUTPUT = jqx.Policy([jqx.Rule("w", output=jqx.QSpec(jnp.int8))])


def observed(f, plan, *args):
    return jqx.calibrate(f, plan)(*args)[1]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_calibration_returns_the_float_result(model, wrap):
    f, make = MODELS[model]
    params = make()
    out, _ = wrap(jqx.calibrate(f, plan_of(f, w8a8(), params, X)))(params, X)
    assert jnp.array_equal(out, wrap(f)(params, X))


def test_statistics_and_scales_are_those_of_each_operand():
    stats = observed(mlp, PLAN, PARAMS, X)
    hidden = jax.nn.relu(X @ PARAMS["w"] + PARAMS["b"][None])
    assert set(stats) == {FIRST, SECOND}
    assert stats[FIRST].largest == jnp.abs(X).max()
    assert stats[SECOND].largest == jnp.abs(hidden).max()
    scale = np.asarray(jqx.affines(PLAN, stats)[FIRST].scale)
    np.testing.assert_array_equal(scale, [[np.abs(np.asarray(X)).max() / np.float32(127)]])


def test_statistics_of_a_helper_called_twice_are_kept_apart():
    params = jitted_params()
    plan = plan_of(jitted, w8a8(), params, X)
    _, stats = jax.jit(jqx.calibrate(jitted, plan))(params, X)
    assert set(stats) == {f"{name}:dot_general:lhs" for name in ("w", "b", "v")}


def test_statistics_of_tied_sites_are_numbered():
    def f(w, x):
        return (x @ w) @ w

    plan = plan_of(f, w8a8(), jnp.eye(2), jnp.ones((1, 2)))
    stats = observed(f, plan, jnp.eye(2) * 3, jnp.ones((1, 2)))
    assert float(stats[":dot_general:lhs"].largest[0, 0]) == 1.0
    assert float(stats[":dot_general#1:lhs"].largest[0, 0]) == 3.0


@pytest.mark.parametrize("calibrator", [calibrators.absmax, calibrators.minmax], ids=str)
def test_merged_shards_equal_one_pass(calibrator):
    plan = plan_of(mlp, w8a8("w", activation={"calibrator": calibrator}), PARAMS, X)
    observe = jax.jit(jqx.calibrate(mlp, plan))
    everything, a, b, c = (observe(PARAMS, x)[1] for x in (X, X[:2], X[2:3], X[3:]))
    merge = partial(jqx.merge_stats, plan)
    left, right = merge(merge(a, b), c), merge(a, merge(b, c))
    assert_same(left, right)
    for merged in (left, right):
        assert_same(jqx.affines(plan, merged), jqx.affines(plan, everything))


def test_an_output_spec_is_observed_too():
    stats = observed(mlp, plan_of(mlp, OUTPUT, PARAMS, X), PARAMS, X)
    assert list(stats) == ["w:dot_general:out"]
    assert stats["w:dot_general:out"].largest == jnp.abs(X @ PARAMS["w"]).max()


@pytest.mark.parametrize("policy", [w8a8_dynamic(), w8a16(), w4a16(block=8)], ids=str)
def test_what_has_no_static_scale_observes_nothing_and_needs_no_scale(policy):
    plan = plan_of(mlp, policy, PARAMS, X)
    assert observed(mlp, plan, PARAMS, X) == jqx.affines(plan, {}) == {}
    assert jqx.convert(mlp, plan)(PARAMS, X).shape == (7, 5)
    assert jqx.convert(mlp, plan, {})(PARAMS, X).shape == (7, 5)


def test_quantized_parameters_are_dequantized():
    q = jqx.quantize_params(PARAMS, PLAN)
    real = jqx.dequantize_params(q)
    assert jnp.array_equal(jqx.calibrate(mlp, PLAN)(q, X)[0], mlp(real, X))


def test_activations_beside_a_weight_that_is_quantized_already():
    def f(p, x):
        return jnp.tanh(x @ p["w"])

    params, x = {"w": jqx.QTensor.quantize(jnp.ones((32, 16)), "int8")}, 3 * jnp.ones((4, 32))
    plan = jqx.make_plan(f, jqx.Policy([jqx.Rule("w", activation="int8")]))(params, x / 3)
    out, stats = jqx.calibrate(f, plan)(params, x)
    assert out.shape == (4, 16)
    (affine,) = jqx.affines(plan, stats).values()
    assert affine.scale == jqx.QTensor.quantize(x, "int8").scale


# Many batches.

BATCHES = [eighths(seed, rows, 16) for seed, rows in enumerate((7, 7, 3))]
EXACT = {"w": eighths(3, 16, 24), "b": eighths(4, 24), "v": eighths(5, 5, 24)}
WIDER = {**EXACT, "v": jnp.ones((6, 24))}


def between(x, w, y, v):
    return (x @ w + y) @ v


def activated(params, x):
    return params["activation"](x @ params["w"]) @ params["w"].T


MATRIX = eighths(0, 4, 4)
LEAVES = {"w": MATRIX, "activation": jax.nn.relu}
SEVERAL = {
    "merged": (mlp, 0, EXACT, iter(BATCHES), (EXACT, jnp.concatenate(BATCHES)), 3),
    "parameters anywhere": (
        between,
        (1, 3),
        (MATRIX, MATRIX[:, :2]),
        [(MATRIX, MATRIX[:1])],
        (MATRIX, MATRIX, MATRIX[:1], MATRIX[:, :2]),
        1,
    ),
    "leaves that are no arrays": (activated, 0, LEAVES, [MATRIX, MATRIX], (LEAVES, MATRIX), 2),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_batches_one_after_another_are_all_at_once(name):
    f, argnums, params, batches, args, count = SEVERAL[name]
    plan = jqx.make_plan(f, w8a8(), params=argnums)(*args)
    stats = jqx.calibrate_batches(f, plan, params, batches, progress=False)
    expected = observed(f, plan, *args)
    assert stats.keys() == expected.keys() and len(stats) > 1
    for key in expected:
        np.testing.assert_array_equal(stats[key].largest, expected[key].largest)
        assert int(stats[key].observed) == count


# Bars are on standard error, where that is a terminal; and nothing depends on them.


def make_terminal(monkeypatch):
    """Makes a terminal of what `capsys` has put in the place of standard error."""
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def advanced():
    """What a bar of three is moved on by."""
    with calibrate.advancing("count", "item", 3, True) as advance:
        advance()
        advance(2)
    return [*calibrate.with_bar("go through", "item", (1, 2))]


def test_a_terminal_is_shown_how_far_it_is(monkeypatch, capsys):
    make_terminal(monkeypatch)
    assert advanced() == [1, 2]
    shown = capsys.readouterr().err
    assert "count: 100%" in shown and "3/3" in shown
    assert "go through" not in shown  # it took no second
    jqx.calibrate_batches(mlp, PLAN, EXACT, BATCHES)
    assert "3/3" in capsys.readouterr().err
    jqx.diagnostics.sensitivity(mlp, PLAN)(EXACT, BATCHES[0])
    assert "sensitivity: 100%" in capsys.readouterr().err
    estimate = {"estimate": "hessian", "samples": 3}
    jqx.diagnostics.sensitivity(mlp, PLAN, **estimate)(EXACT, BATCHES[0], BATCHES[1])
    assert "6/6" in capsys.readouterr().err


def test_nothing_is_shown_where_there_is_no_terminal(capsys):
    assert advanced() == [1, 2]
    calibrate.tell(calibrate.progress_bar("count", "item"), "a line")
    assert jqx.calibrate_batches(mlp, PLAN, EXACT, BATCHES[:1])
    assert capsys.readouterr() == ("", "")


def test_nothing_is_shown_where_it_is_not_asked_for(monkeypatch, capsys):
    make_terminal(monkeypatch)
    with calibrate.advancing("count", "item", 3, False) as advance:
        advance()
    jqx.calibrate_batches(mlp, PLAN, EXACT, BATCHES[:1], progress=False)
    assert capsys.readouterr() == ("", "")


def test_tqdm_need_not_be_there(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert calibrate.progress_bar("count", "item") is None
    assert advanced() == [1, 2]
    assert capsys.readouterr() == ("", "")


# A static scale comes from a calibration, or is asked for from the values at hand; never else.

STATIC = {"activations": w8a8(), "results": OUTPUT + jqx.Policy([jqx.Rule(output="int8")])}
TRANSFORMS = {
    "convert": jqx.convert,
    "simulate": jqx.simulate,
    "simulate on integers": partial(jqx.simulate, backward=jnp.float32),
    "compare": jqx.compare,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("static", STATIC)
@pytest.mark.parametrize("by", ["plan", "policy"])
def test_a_forgotten_calibration_is_an_error_that_names_the_sites(transform, static, by):
    plan = plan_of(mlp, STATIC[static], PARAMS, X)
    with pytest.raises(ValueError, match="no scale") as error:
        TRANSFORMS[transform](mlp, plan if by == "plan" else STATIC[static])(PARAMS, X)
    text = str(error.value)
    assert text.startswith(f"jqx.{transform.split()[0]}: ")
    assert all(key in text for key in plan.static_specs()) and len(plan.static_specs()) == 2
    assert "calibrate_batches" in text and 'affines="dynamic"' in text


@pytest.mark.parametrize("transform", [jqx.convert, jqx.simulate])
def test_the_same_holds_under_jit_and_for_shapes(transform):
    f = transform(mlp, PLAN)
    mapped = jax.vmap(f, (None, 0))
    for call in (jax.jit(f), partial(jax.eval_shape, f), lambda p, x: mapped(p, x[None])):
        with pytest.raises(ValueError, match="no scale"):
            call(PARAMS, X)


def test_rows_of_other_batches_do_not_change_a_row_under_calibrated_scales():
    affines = jqx.affines(PLAN, observed(mlp, PLAN, PARAMS, X))
    run = jax.jit(jqx.convert(mlp, PLAN, affines))
    large = X.at[1:].multiply(100.0)
    assert (run(PARAMS, X)[0] == run(PARAMS, large)[0]).all()
    dynamic = jax.jit(jqx.convert(mlp, PLAN, "dynamic"))
    assert not (dynamic(PARAMS, X)[0] == dynamic(PARAMS, large)[0]).all()


@pytest.mark.parametrize("static", STATIC)
def test_dynamic_computes_scales_from_the_values_of_the_call(static):
    plan = plan_of(mlp, STATIC[static], PARAMS, X)
    for transform in (jqx.convert, jqx.simulate):
        out = jax.jit(transform(mlp, plan, "dynamic"))(PARAMS, X)
        assert relative(out, mlp(PARAMS, X)) < 0.02  # a largest value of 4 in steps of 1 / 32
    assert jqx.compare(mlp, plan, "dynamic")(PARAMS, X).sites


def test_what_computes_nothing_needs_no_scales():
    assert len(jqx.explain(mlp, PARAMS, X, plan=PLAN).sites) == 2


@pytest.mark.parametrize("split", [False, True])
def test_scales_of_weights_are_those_that_they_are_quantized_with(split):
    def scanned(p, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])[0] @ p["head"]

    params = {"layers": normal(0, 3, 16, 16), "head": normal(1, 16, 8)}
    policy = w8a16("head") + w4a16("layers", block=8)
    policy = w8a16("layers[0]") + policy if split else policy
    plan = plan_of(scanned, policy, params, X)
    scales = jqx.affines(plan, {}, params)
    assert set(scales) == {weight.key for weight in plan.weights}
    expected = jqx.quantize_params(params, plan)
    assert_same(jqx.quantize_params(params, plan, scales), expected)
    assert jqx.affines(plan, {}) == {}


FLAGS = {"nans": jax.debug_nans, "infs": jax.debug_infs}
FAST = [
    *(calibrators.absmax, calibrators.minmax, calibrators.rms(3.0)),
    *(calibrators.delayed, calibrators.fixed(-3, 3)),
]
SLOW = [calibrators.percentile, calibrators.mse, calibrators.hqq]


@pytest.mark.many
@pytest.mark.parametrize(
    "calibrator",
    [*FAST, *(pytest.param(calibrator, marks=pytest.mark.slow) for calibrator in SLOW)],
    ids=str,
)
def test_flags_that_stop_at_nan_and_infinity_stop_nothing_where_the_data_are_clean(calibrator):
    def f(w, x):
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x @ w[0], w)[0]

    w, x = normal(0, 2, 8, 8), normal(1, 5, 8)
    symmetric = calibrator not in (calibrators.minmax, calibrators.percentile)
    spec = jqx.QSpec(jnp.int8, symmetric=symmetric, calibrator=calibrator)
    weight = jqx.QSpec(jnp.int4, jqx.per_group(3, tail=True))
    policy = jqx.Policy([jqx.Rule(weight=weight, activation=spec, output=spec)])
    plan = jqx.make_plan(f, policy)(w, x)
    with contextlib.ExitStack() as stack:
        for flag in FLAGS.values():
            stack.enter_context(flag(True))
        stats = observed(f, plan, w, x)
        affines = jqx.affines(plan, jqx.merge_stats(plan, stats, stats))
        jqx.simulate(f, plan, affines)(w, x)
        jqx.convert(f, plan, affines)(jqx.quantize_params(w, plan), x)


# What is refused.


def batches(f=mlp, plan=PLAN, params=None, data=()):
    return jqx.calibrate_batches(f, plan, params or {}, data, progress=False)


def empty_stats():
    return {
        key: spec.calibrator.empty(spec.granularity.scale_shape((7, 16)))
        for key, spec in PLAN.static_specs().items()
    }


def with_a_foreign_entry():
    stats = empty_stats()
    return jqx.merge_stats(PLAN, stats, {**stats, "other": stats[FIRST]})


MISTAKES = {
    "never observed": (
        lambda: jqx.affines(PLAN, empty_stats()),
        ValueError,
        rf"never observed(.|\n)*{FIRST}",
    ),
    "statistics without an entry": (
        lambda: jqx.affines(PLAN, {FIRST: empty_stats()[FIRST]}),
        ValueError,
        "`stats` does not have the entries",
    ),
    "statistics with another entry": (
        with_a_foreign_entry,
        ValueError,
        "`b` does not have the entries",
    ),
    "other parameters": (
        lambda: jqx.calibrate(mlp, PLAN)(WIDER, X),
        ValueError,
        r"parameter v: float32\[6, 24\](.|\n)*float32\[5, 24\]",
    ),
    "another function": (
        lambda: jqx.calibrate(lambda p, x: mlp(p, x) @ p["v"], PLAN)(PARAMS, X),
        ValueError,
        "another function",
    ),
    "no function": (partial(batches, 3), TypeError, "`f` is not a function"),
    "batches of other parameters": (
        partial(batches, params=WIDER, data=BATCHES),
        ValueError,
        "made for another function",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_fit_a_calibration_is_refused(name):
    call, error, fact = MISTAKES[name]
    with pytest.raises(error, match=fact):
        call()


@pytest.mark.parametrize("affines", ["calibrated", 1.0, [("a", 1)]], ids=str)
@pytest.mark.parametrize("transform", ["convert", "simulate", "compare"])
def test_other_values_of_affines_are_refused(transform, affines):
    with pytest.raises(TypeError, match="`affines` is not a dict of scales"):
        TRANSFORMS[transform](mlp, PLAN, affines)(PARAMS, X)


@pytest.mark.parametrize("transform", [jqx.simulate, jqx.convert])
def test_affines_must_fit_the_plan(transform):
    for key, fact in ((FIRST, f"missing: {SECOND}"), ("nothing", "unknown: nothing")):
        with pytest.raises(ValueError, match=fact):
            transform(mlp, PLAN, {key: Affine(jnp.ones((1, 1)))})(PARAMS, X)


EYE, ONES = jnp.eye(16), jnp.ones((2, 16))
PRODUCT = plan_of(product, w8a8(), EYE, ONES)
SCALE, ZERO = jnp.full((1, 1), 0.02), jnp.zeros((1, 1), jnp.int8)
NO_FLOATS, NO_PAIR = "not an array of floats", "not a scale and zero point"
NO_CODES, NO_AXES = "codes of int8", "does not have the axes"
WRONG = {
    "a number": (Affine(0.02, None), TypeError, NO_FLOATS),
    "a list": (Affine([[0.02]], None), TypeError, NO_FLOATS),
    "None": (Affine(None, None), TypeError, NO_FLOATS),
    "int32": (Affine(jnp.ones((1, 1), jnp.int32), None), TypeError, NO_FLOATS),
    "bool": (Affine(np.ones((1, 1), bool), None), TypeError, NO_FLOATS),
    "an array": (SCALE, TypeError, NO_PAIR),
    "a dict": ({"scale": SCALE}, TypeError, NO_PAIR),
    "one part": ((SCALE,), TypeError, NO_PAIR),
    "a zero point of int32": (Affine(SCALE, ZERO.astype(jnp.int32)), TypeError, NO_CODES),
    "a zero point of floats": (Affine(SCALE, SCALE), TypeError, NO_CODES),
    "a zero point that is a number": (Affine(SCALE, 0), TypeError, NO_CODES),
    "a zero point of another shape": (
        Affine(SCALE, jnp.zeros((1, 3), jnp.int8)),
        ValueError,
        "`zero_point` does not fit `scale`",
    ),
    "too few axes": (Affine(SCALE[0], None), ValueError, NO_AXES),
    "no axes": (Affine(jnp.float32(0.02), None), ValueError, NO_AXES),
    "a scale per contracted index": (
        Affine(jnp.full((1, 16), 0.02), None),
        ValueError,
        "varies along a contracted axis",
    ),
    "a scale of another size": (Affine(jnp.full((1, 3), 0.02), None), ValueError, "does not fit"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_entry_of_affines_that_does_not_fit_is_refused_alike_by_every_transform(name):
    affine, error, words = WRONG[name]
    texts = []
    for transform in (jqx.simulate, jqx.convert):
        with pytest.raises(error, match=words) as info:
            transform(product, PRODUCT, {":dot_general:lhs": affine})(EYE, ONES)
        assert "fix: " in str(info.value)
        texts.append(str(info.value).replace(f"jqx.{transform.__name__}", "jqx.f"))
    if "size" not in name:
        assert texts[0] == texts[1]


def test_scales_of_tokens_and_pairs_are_taken():
    for affine in ((SCALE, None), Affine(jnp.full((2, 1), 0.02), ZERO), Affine(SCALE, ZERO)):
        for transform in (jqx.simulate, jqx.convert):
            out = transform(product, PRODUCT, {":dot_general:lhs": affine})(EYE, ONES)
            np.testing.assert_allclose(out, ONES, rtol=1e-2)
