"""Functions from module systems, whose weights are put on a grid of a known step by hand.

Steps are powers of two: a product with codes, scaled after, is that with the rounded weights, bit
by bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..arrays import assert_same, on_device

STEP = 2.0**-6
WEIGHT = jqx.QSpec(
    jnp.int8, jqx.per_channel(), calibrator=jqx.calibrators.fixed(-127 * STEP, 127 * STEP)
)
POLICY = jqx.Policy([jqx.Rule(weight=WEIGHT)])


def rounded(w):
    """Weights on their grid."""
    w = np.asarray(w)
    return on_device(np.clip(np.round(w / STEP), -128, 127) * STEP, w.dtype)


def by_hand(params, paths):
    """Parameters of which those on the paths are rounded; a key `value` at the end is an nnx
    variable's.
    """

    def leaf(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        return rounded(x) if name in paths else x

    return jax.tree_util.tree_map_with_path(leaf, params)


def axes_of(plan):
    """The axes along which each weight of a plan has scales of its own."""
    return {weight.path: getattr(weight.spec.granularity, "axes", ()) for weight in plan.weights}


def cases(table, slow=()):
    """The names of a table, those in `slow` with the slow tests."""
    assert set(slow) <= set(table)
    marks = {name: [pytest.mark.slow] if name in slow else [] for name in table}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in marks.items()])


def assert_transformed(f, plan, params, expected, *args, wrap=jax.jit):
    """Simulated, and converted with quantized parameters, a function returns what is expected."""
    q = jqx.quantize_params(params, plan)
    assert_same(wrap(jqx.convert(f, plan, "dynamic"))(q, *args), expected)
    assert_same(wrap(jqx.simulate(f, plan, "dynamic"))(params, *args), expected)


def assert_quantized(f, axes, params, *args, wrap=jax.jit, roundings=0):
    """`axes` names the weights of `f`; simulated and converted, it is `f` of rounded ones: three
    results of one compiled program. Converted, up to so many roundings of the largest result.
    """
    plan = jqx.make_plan(f, POLICY)(params, *args)
    assert axes_of(plan) == axes
    on_grid = by_hand(params, axes)
    assert len(axes) == sum(
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(on_grid), strict=True)
    )

    def run(params, on_grid, *args):
        converted = jqx.convert(f, plan)(jqx.quantize_params(params, plan), *args)
        return f(on_grid, *args), converted, jqx.simulate(f, plan)(params, *args)

    expected, converted, simulated = wrap(run)(params, on_grid, *args)
    assert_same(simulated, expected)
    if not roundings:
        assert_same(converted, expected)
        return plan
    assert jax.tree.structure(converted) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (converted, expected)), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=roundings * 2.0**-24 * np.abs(b).max(initial=0)
        )
    return plan
