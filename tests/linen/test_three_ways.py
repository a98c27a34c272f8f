"""One network quantized in three ways and by the plain transforms: equal numbers."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import tree_leaves_with_path

import jqx
import jqx.linen
from jqx.linen import Mode
from jqx.modules._shared import nest, overlay

from .networks import POLICIES, WAYS, float_network, images, variables

pytestmark = [
    pytest.mark.parametrize("way", WAYS),
    pytest.mark.parametrize("name", POLICIES),
]


def entries(tree):
    """Leaves by path; the scope of an injected contraction is left out."""
    return {
        tuple(p for p in map(str, path) if "General" not in p): leaf
        for path, leaf in tree_leaves_with_path(tree)
    }


def assert_equal(a, b):
    """Leaves at the same paths, of equal bits."""
    a, b = entries(a), entries(b)
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype
        assert (a[key] == b[key]).all(), key


@functools.cache
def plan_of(name):
    return jqx.make_plan(float_network, POLICIES[name])(variables()["params"], images())


@functools.cache
def statistics_of(name):
    """Of two batches, by the transforms."""
    plan = plan_of(name)
    batches = [
        jqx.calibrate(float_network, plan)(variables()["params"], images(i))[1] for i in (1, 2)
    ]
    return jqx.merge_stats(plan, *batches)


@functools.cache
def affines_of(name):
    return plan_of(name), jqx.affines(plan_of(name), statistics_of(name))


@functools.cache
def calibrated(way, name):
    """Variables with the statistics of two batches."""
    module, known = WAYS[way](POLICIES[name], Mode.CALIBRATE), variables()
    for seed in (1, 2):
        out, new = module.apply(known, images(seed), mutable=["quant_stats"])
        assert (out == float_network(known["params"], images(seed))).all()
        known = {**known, **new}
    return known


def test_init_and_float_are_those_of_the_float_module(way, name):
    module = WAYS[way](POLICIES[name], Mode.FLOAT)
    for mode in Mode:
        made = WAYS[way](POLICIES[name], mode).init(jax.random.key(0), images())
        assert_equal(made, variables())
    out = module.apply(variables(), images())
    assert (out == float_network(variables()["params"], images())).all()


@pytest.mark.many
def test_statistics_are_those_of_the_transforms(way, name):
    expected = nest(statistics_of(name))
    assert_equal(calibrated(way, name).get("quant_stats", {}), expected)


@pytest.mark.many
def test_simulate_with_statistics(way, name):
    plan, affines = affines_of(name)
    expected = jqx.simulate(float_network, plan, affines)
    module, known = WAYS[way](POLICIES[name], Mode.SIMULATE), calibrated(way, name)
    assert (module.apply(known, images(3)) == expected(known["params"], images(3))).all()


@pytest.mark.many
def test_gradients_with_dynamic_scales(way, name):
    module = WAYS[way](POLICIES[name], Mode.SIMULATE, "dynamic")
    expected = jqx.simulate(float_network, POLICIES[name], "dynamic")
    params, x = variables()["params"], images()
    got = jax.grad(lambda p, x: (module.apply({"params": p}, x) ** 2).sum(), (0, 1))(params, x)
    assert_equal(got, jax.grad(lambda p, x: (expected(p, x) ** 2).sum(), (0, 1))(params, x))


@pytest.mark.many
def test_convert(way, name):
    plan, affines = affines_of(name)
    expected = jqx.quantize_params(variables()["params"], plan)
    module, known = WAYS[way](POLICIES[name], Mode.CONVERT), calibrated(way, name)
    converted = jqx.linen.convert(module, known, images())
    assert "quant_stats" not in converted
    weights = overlay(converted["params"], converted.get("qparams", {}))
    assert_equal(weights, expected)
    assert_equal(converted.get("quant_scales", {}), nest(affines))
    out = module.apply(converted, images(3))
    assert (out == jqx.convert(float_network, plan, affines)(expected, images(3))).all()
    again = jax.jit(module.apply)(converted, images(3))
    assert jnp.abs(out - again).max() <= 2.0**-18 * jnp.abs(out).max()
