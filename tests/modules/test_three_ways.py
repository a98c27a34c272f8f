"""One network of each library, quantized in three ways and by plain transforms: equal numbers."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jqx
import jqx.linen
import jqx.nnx
from jqx._src.modules.quantized_function import Mode

from ..linen.networks import WAYS
from .libraries import LIBRARIES, POLICIES, images, named

W8A8 = POLICIES["w8a8"]
EVERY = [
    pytest.param(library, way, name, marks=[pytest.mark.slow] if name != "w8a8" else [])
    for library in LIBRARIES
    for way in WAYS
    for name in POLICIES
]
each = pytest.mark.parametrize(("library", "way", "name"), EVERY)


def assert_equal(a, b):
    """Leaves at the same paths, of equal bits."""
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype
        assert (a[key] == b[key]).all(), key


@functools.cache
def transformed(library, name):
    """The float network, its parameters, and what the transforms find on two batches."""
    f, params = LIBRARIES[library].float_network, LIBRARIES[library].params()
    plan = jqx.make_plan(f, POLICIES[name])(params, images())
    observe = jqx.calibrate(f, plan)
    stats = jqx.merge_stats(plan, *(observe(params, images(i))[1] for i in (1, 2)))
    return f, params, plan, stats


def calibrated(library, way, name):
    """A model with the statistics of two batches."""
    f, params, _, _ = transformed(library, name)
    model = LIBRARIES[library](way, POLICIES[name], Mode.CALIBRATE)
    for seed in (1, 2):
        assert (model(images(seed)) == f(params, images(seed))).all()
    return model


@each
def test_parameters_and_float_are_those_of_the_float_model(library, way, name):
    f, params, _, _ = transformed(library, name)
    model = LIBRARIES[library](way, POLICIES[name], Mode.FLOAT)
    assert_equal(model.leaves("params"), named(params))
    assert (model(images()) == f(params, images())).all()
    for mode in Mode if library == "linen" else ():
        made = model.module(mode).init(jax.random.key(0), images())
        assert_equal(named(made), named(model.variables))


@each
def test_statistics_are_those_of_the_transforms(library, way, name):
    stats = transformed(library, name)[-1]
    assert_equal(calibrated(library, way, name).leaves("quant_stats"), named(dict(stats)))


@each
def test_simulate_with_statistics(library, way, name):
    f, params, plan, stats = transformed(library, name)
    expected = jqx.simulate(f, plan, jqx.affines(plan, stats))(params, images(3))
    model = calibrated(library, way, name)
    model.mode = Mode.SIMULATE
    assert (model(images(3)) == expected).all()
    if plan.static_specs():
        model.change("fix_scales", images(4))
        assert (model(images(3)) == expected).all()
        assert not model.leaves("quant_stats")


@each
def test_gradients_with_dynamic_scales(library, way, name):
    f, params, _, _ = transformed(library, name)
    model = LIBRARIES[library](way, POLICIES[name], Mode.SIMULATE, "dynamic")
    expected = jqx.simulate(f, POLICIES[name], "dynamic")
    gradients = jax.grad(lambda p, x: (expected(p, x) ** 2).sum())(params, images())
    assert_equal(named(model.gradients(images())), named(gradients))


@each
def test_convert(library, way, name):
    f, params, plan, stats = transformed(library, name)
    affines, weights = jqx.affines(plan, stats), jqx.quantize_params(params, plan)
    expected = jqx.convert(f, plan, affines)(weights, images(3))
    model = calibrated(library, way, name)
    model.change("convert", images())
    assert_equal(model.leaves("params", "qparams"), named(weights))
    assert_equal(model.leaves("quant_scales"), named(affines))
    assert not model.leaves("quant_stats")
    model.mode = Mode.CONVERT
    assert (model(images(3)) == expected).all()
    # Two compilers' orders of the float sums behind the integer products: 2^-18 of the largest.
    compiled = model.compiled(images(3))
    assert jnp.abs(expected - compiled).max() <= 2.0**-18 * jnp.abs(expected).max()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_forgotten_calibration_is_an_error_that_names_the_sites(library, way):
    model = LIBRARIES[library](way, W8A8, Mode.SIMULATE)
    leaves = "params", "qparams", "quant_stats", "quant_scales"
    before = model.leaves(*leaves)
    site = "kernel:conv_general_dilated:lhs"
    if way == "whole":
        site = f"conv/{site}, hidden/kernel:dot_general:lhs"
        assert len(model.plan(images()).sites) == 3
    match = f"(?s)have no scale.*{{}}, without .*{re.escape(site)}.*fix.*dynamic"
    for mode in (Mode.SIMULATE, Mode.CONVERT):
        model.mode = mode
        with pytest.raises(ValueError, match=match.format(mode)):
            model(images())
        for name in ("convert", "fix_scales", "learn_scales"):
            with pytest.raises(ValueError, match=match.format(f"a call of {name}")):
                model.change(name, images())
    assert_equal(model.leaves(*leaves), before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_dynamic_scales_are_those_of_the_values_of_the_call(library, way):
    f, params, plan, _ = transformed(library, "w8a8")
    model = LIBRARIES[library](way, W8A8, Mode.SIMULATE, "dynamic")
    expected = jqx.simulate(f, W8A8, "dynamic")(params, images())
    assert (model(images()) == expected).all()
    stats = jqx.calibrate(f, plan)(params, images())[1]
    affines = jqx.affines(plan, stats) if way == "whole" else "dynamic"
    expected = jqx.convert(f, plan, affines)(jqx.quantize_params(params, plan), images())
    model.change("convert", images())
    other = LIBRARIES[library](way, W8A8, Mode.SIMULATE)
    other.change("convert", images(), scales="dynamic")
    assert (model(images()) == expected).all() and (other(images()) == expected).all()
    assert model(2 * images()).shape == (4, 3)


@pytest.mark.parametrize("library", LIBRARIES)
def test_scales_are_checked(library):
    with pytest.raises(ValueError, match=r"(?s)`scales` is unknown.*'batch'.*fix"):
        LIBRARIES[library]("layers", W8A8, Mode.SIMULATE, "batch")(images())
    model = LIBRARIES[library]("whole", W8A8, Mode.SIMULATE)
    with pytest.raises(ValueError, match=r"(?s)fix_scales: `scales` is unknown"):
        model.change("fix_scales", images(), scales="static")
