"""One network quantized in three ways and by the plain transforms: equal numbers."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path

import jqx
import jqx.nnx
from jqx.nnx import Mode

from .networks import POLICIES, WAYS, Net, float_network, images, params

SLOW = ("w8a8_dynamic", "w4a16", "fp8")

pytestmark = [
    pytest.mark.parametrize("way", WAYS),
    pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in POLICIES],
    ),
]

OWN = r"conv_general_dilated/|dot_general/|quant_stats/|quant_scales/"


def leaves_of(model, *kinds):
    """Leaves of variables by path; what a contraction or a model holds counts as its layer's."""
    flat = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Any(*kinds))):
        before = "/".join(map(str, path))
        for inside, leaf in tree_leaves_with_path(variable.get_value()):
            within = keystr(inside, simple=True, separator="/")
            flat[re.sub(OWN, "", f"{before}/{within}".strip("/"))] = leaf
    return flat


def named(tree):
    """Leaves of nested dicts or of entries by key, by path."""
    return {
        keystr(path, simple=True, separator="/"): leaf for path, leaf in tree_leaves_with_path(tree)
    }


def assert_equal(a, b):
    """Leaves at the same paths, of equal bits."""
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype
        assert (a[key] == b[key]).all(), key


def statistics(name):
    plan = jqx.make_plan(float_network, POLICIES[name])(params(), images())
    observe = jqx.calibrate(float_network, plan)
    return plan, jqx.merge_stats(plan, *(observe(params(), images(i))[1] for i in (1, 2)))


def calibrated(way, name):
    """A model with the statistics of two batches."""
    model = WAYS[way](POLICIES[name], Mode.CALIBRATE)
    for seed in (1, 2):
        assert (model(images(seed)) == float_network(params(), images(seed))).all()
    return model


def test_parameters_and_float_are_those_of_the_float_module(way, name):
    model = WAYS[way](POLICIES[name], Mode.FLOAT)
    assert_equal(leaves_of(model, nnx.Param), named(params()))
    assert (model(images()) == Net(nnx.Rngs(0))(images())).all()


def test_statistics_are_those_of_the_transforms(way, name):
    _, expected = statistics(name)
    assert_equal(leaves_of(calibrated(way, name), jqx.nnx.Stat), named(dict(expected)))


def test_simulate_with_statistics(way, name):
    plan, stats = statistics(name)
    expected = jqx.simulate(float_network, plan, jqx.affines(plan, stats))(params(), images(3))
    model = calibrated(way, name)
    model.set_attributes(mode=Mode.SIMULATE)
    assert (model(images(3)) == expected).all()
    if plan.static_specs():
        jqx.nnx.fix_scales(model, images(4))
        assert (model(images(3)) == expected).all()
        assert not leaves_of(model, jqx.nnx.Stat)


def test_gradients_with_dynamic_scales(way, name):
    model = WAYS[way](POLICIES[name], Mode.SIMULATE, "dynamic")
    expected = jqx.simulate(float_network, POLICIES[name], "dynamic")
    got = nnx.grad(lambda model, x: (model(x) ** 2).sum())(model, images())
    want = jax.grad(lambda p, x: (expected(p, x) ** 2).sum())(params(), images())
    assert_equal(named(nnx.to_pure_dict(got)), named(want))


def test_convert(way, name):
    plan, stats = statistics(name)
    affines = jqx.affines(plan, stats)
    quantized = jqx.quantize_params(params(), plan)
    expected = jqx.convert(float_network, plan, affines)(quantized, images(3))
    model = calibrated(way, name)
    jqx.nnx.convert(model, images())
    assert_equal(leaves_of(model, nnx.Param, jqx.nnx.QParam), named(quantized))
    assert_equal(leaves_of(model, jqx.nnx.Scale), named(affines))
    assert not leaves_of(model, jqx.nnx.Stat)
    assert (model(images(3)) == expected).all()
    again = nnx.jit(lambda model, x: model(x))(model, images(3))
    # Two compilers' orders of the float sums behind the integer products: 2^-18 of the largest.
    assert jnp.abs(expected - again).max() <= 2.0**-18 * jnp.abs(expected).max()
