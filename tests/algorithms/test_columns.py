"""The loop of GPTQ against a float64 model of it, column by column."""

import dataclasses

import numpy as np
import pytest

import jqx
from jqx._src.algorithms.columns import round_columns
from jqx._src.algorithms.matrices import Drift, Matrix, carried_over, damped, factor, order_of
from jqx.calibrators import Affine

from ..arrays import on_device

K, N, BLOCK = 96, 24, 32
INT4 = jqx.QSpec("int4", jqx.per_axis(1))


def problem(seed, count=K):
    """Inputs of channels that are far from alike, and a matrix [columns, rows]."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(count, count)) * np.exp(rng.normal(size=count))
    inputs = rng.normal(size=(4 * count, count)) @ mix
    return inputs, np.float32(rng.normal(size=(count, N)))


def oracle(w, upper, carried, rounded):
    """The columns just before they are rounded, where they are rounded as given; float64."""
    left, before = np.float64(w), np.zeros(w.shape)
    for i in range(len(left)):
        before[i] = left[i]
        error = (left[i] - rounded[i]) / upper[i, i]
        left[i + 1 :] -= np.outer(upper[i, i + 1 :], error)
        left[i + 1 :] += np.outer(carried[i, i + 1 :], before[i])
    return before


def run(w, upper, carried=None, affine=None, group=None, spec=INT4, **options):
    arrays = [on_device(x, np.float32) if x is not None else None for x in (w, upper, carried)]
    return round_columns(*arrays, affine, group, spec=spec, size=BLOCK, **options)


def test_a_loss_is_that_of_the_product_with_quantized_inputs_against_the_float_one():
    rng = np.random.default_rng(5)
    exact, own, w, q = (rng.normal(size=shape) for shape in ((40, 6), (40, 6), (3, 6), (3, 6)))
    drift = Drift((exact - own).T @ own, (exact - own).T @ (exact - own))
    numbers = np.arange(18, dtype=np.int32).reshape(3, 6)
    matrix = Matrix(("w",), (), (), numbers, own.T @ own, 40, drift)
    lost = ((exact @ w.T - own @ q.T) ** 2).sum(0)
    np.testing.assert_allclose(matrix.losses(w, q)[0], lost, rtol=1e-12)
    alone = dataclasses.replace(matrix, drift=None)
    np.testing.assert_allclose(alone.losses(w, q)[0], ((own @ (w - q).T) ** 2).sum(0), rtol=1e-12)


@pytest.mark.parametrize("strength", [0.0, 0.25])
def test_each_column_is_what_a_float64_model_has_before_it_is_rounded(strength):
    inputs, w = problem(0)
    upper = factor(inputs.T @ inputs, 0.01).upper
    drift = 0.1 * np.random.default_rng(1).normal(size=inputs.shape)
    carried = carried_over(upper, drift.T @ inputs, strength)
    scale = np.abs(w).max(0) / 7
    affine = Affine(on_device(scale[None]), None)
    found = run(w, upper, carried, affine, on_device(np.zeros(K, np.int32)))
    expected = oracle(w, upper, carried, np.float64(found.rounded))
    assert np.max(np.abs(expected - found.unrounded) / np.abs(w).max(0)) < 1e-5
    codes = np.clip(np.rint(np.asarray(found.unrounded) / scale), -8, 7)
    # The scale is rounded to float32, and so is its product with a code.
    np.testing.assert_allclose(found.rounded, codes * scale, rtol=2.0**-23)


def test_columns_that_are_given_are_taken():
    inputs, w = problem(2)
    upper = factor(inputs.T @ inputs, 0.01).upper
    given = np.float32(np.rint(w * 4) / 4)
    affine = Affine(on_device(np.ones((1, N), np.float32)), None)
    group = on_device(np.zeros(K, np.int32))
    found = run(w, upper, None, affine, group, targets=on_device(given))
    np.testing.assert_array_equal(found.rounded, given)
    expected = oracle(w, upper, np.zeros((K, K)), np.float64(given))
    assert np.max(np.abs(expected - found.unrounded) / np.abs(w).max(0)) < 1e-5


def test_scales_of_dynamic_groups_are_those_of_corrected_columns():
    inputs, w = problem(3)
    upper = factor(inputs.T @ inputs, 0.01).upper
    found = run(w, upper)
    first = np.asarray(found.unrounded).reshape(K // BLOCK, BLOCK, N)
    # A group is corrected for all before it when its scale is found, not yet inside of itself.
    left = np.float64(w)
    for group in range(K // BLOCK):
        own = slice(group * BLOCK, (group + 1) * BLOCK)
        largest = np.abs(left[own]).max(0)
        # As near as columns are to those of a float64 model.
        far = np.abs(np.asarray(found.scale)[group] * 7 - largest)
        assert np.all(far < 1e-5 * np.abs(w).max(0))
        for i in range(own.start, own.stop):
            error = (left[i] - np.asarray(found.rounded)[i]) / upper[i, i]
            left[i + 1 :] -= np.outer(upper[i, i + 1 :], error)
    assert first.shape == (3, BLOCK, N)


def test_the_factor_is_that_of_the_inverse():
    inputs, _ = problem(4)
    hessian = inputs.T @ inputs
    hessian[5] = hessian[:, 5] = 0
    found = factor(hessian, 0.01)
    assert found.damping == 0.01 and np.array_equal(found.upper, np.triu(found.upper))
    inverse = found.upper.T @ found.upper
    assert np.abs(inverse @ damped(hessian, 0.01) - np.eye(K)).max() < 1e-9
    assert inverse[5, 5] == pytest.approx(1) and np.count_nonzero(inverse[5]) == 1


def test_damping_grows_until_it_helps_and_no_further():
    hessian = np.eye(4)
    hessian[0, 1] = hessian[1, 0] = 1.04  # eigenvalues 2.04 and -.04
    assert factor(hessian, 0.01).damping == pytest.approx(0.1)
    hessian[2, 2] = np.nan
    assert factor(hessian, 0.01) is None
    assert factor(np.zeros((4, 4)), 0.01).upper == pytest.approx(np.eye(4))


@pytest.mark.parametrize("order", ["given", "activation", "groups"])
def test_an_order_is_a_permutation_of_the_columns(order):
    rng = np.random.default_rng(5)
    hessian, group = np.diag(rng.permutation(20) + 1.0), np.arange(20) // 8
    found = order_of(hessian, group, order)
    weight = np.diagonal(hessian)[found]
    assert sorted(found) == list(range(20))
    if order == "given":
        assert list(found) == list(range(20))
    elif order == "activation":
        assert list(weight) == sorted(weight, reverse=True)
    else:
        runs = group[found]
        assert list(runs[::8]) in ([0, 1, 2], [1, 0, 2])  # the smaller group last
        assert weight[:8].max() > weight[8:16].max()
        assert all(list(part) == sorted(part, reverse=True) for part in np.split(weight, [8, 16]))
