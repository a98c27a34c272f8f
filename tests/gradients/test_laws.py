"""What holds for every estimator: transforms, degenerate ranges, NaN, dtypes, both ops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.gradients import estimators
from jqx._src.gradients.estimators import check_estimator
from jqx.extend import Surrogate
from jqx.gradients import (
    LearnedStep,
    StochasticRounding,
    lsq,
    lsq_plus,
    pact,
    parq,
    ste,
    ste_unclipped,
    stochastic,
)

pytestmark = pytest.mark.slow

ESTIMATORS = [
    ste,
    ste_unclipped,
    lsq,
    LearnedStep(gradient_scale=False),
    lsq_plus,
    pact,
    stochastic,
    StochasticRounding((0,)),
    parq(0.0),
    parq(0.5),
]
KEY = jax.random.key(12)
every = pytest.mark.parametrize("gradient", ESTIMATORS, ids=str)
# Two compilations of one expression may contract a product and a sum: a few roundings of values
# and cotangents below 16, summed over 20 elements.
ROUNDINGS = 20 * 16 * 2.0**-22


def key_for(gradient):
    return KEY if isinstance(gradient, Surrogate) and gradient.needs_key else None


def pull(gradient, x, low, high, levels):
    """Returns what a surrogate gives, or `None`, and the gradients of a sum by x and the limits."""
    if not isinstance(gradient, Surrogate):
        return None, gradient.bwd(x, low, high, levels, np.ones_like(x))
    key = key_for(gradient)
    y, vjp = jax.vjp(lambda *operands: gradient.surrogate(*operands, levels, key), x, low, high)
    return y, vjp(np.ones_like(x))


def affine(gradient):
    """Returns y and the gradients by x and scale."""

    def loss(x, scale, cotangent, key):
        y = jqx.quantize_dequantize(x, scale, qtype=jnp.int4, axes=0, gradient=gradient, key=key)
        return (y * cotangent).sum(), y

    return jax.grad(loss, (0, 1), has_aux=True)


def limits(gradient):
    """Returns y and the gradients by x and the four limits."""

    def loss(x, low, cotangent, key):
        ends = (low[:, None], low[:, None] + 3, low[:, None] - 1, low[:, None] + 4)
        y = jqx.fake_quantize(x, *ends, levels=6, gradient=gradient, key=key)
        return (y * cotangent).sum(), y

    return jax.grad(loss, (0, 1), has_aux=True)


OPS = pytest.mark.parametrize("op", [affine, limits])


def of_every(op):
    """Returns what an op returns for each estimator, in one program."""

    @jax.jit
    def results(x, low, cotangent, key):
        return {
            str(gradient): op(gradient)(
                x, low, cotangent, None if key_for(gradient) is None else key
            )
            for gradient in ESTIMATORS
        }

    return results


def operands(seed):
    rng = np.random.default_rng(seed)
    x, cotangent = (rng.normal(size=(4, 5)).astype(np.float32) * 3 for _ in range(2))
    return x, rng.uniform(0.1, 0.6, 4).astype(np.float32), cotangent


def assert_close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ROUNDINGS), a, b)


@OPS
@every
def test_jit_does_not_change_the_result(op, gradient):
    f = op(gradient)
    arguments = (*operands(13), key_for(gradient))
    eager = f(*arguments)
    assert_close(jax.jit(f)(*arguments), eager)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(eager))
    assert np.any(np.asarray(eager[0][0]) != 0)


@OPS
def test_vmap_and_scan_are_a_stack_of_calls(op):
    f = of_every(op)
    stacked = [np.stack(v) for v in zip(*(operands(seed) for seed in range(3)), strict=True)]
    stacked.append(jax.random.split(KEY, 3))
    calls = [f(*(v[i] for v in stacked)) for i in range(3)]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *calls)
    assert len(expected) == len(ESTIMATORS)
    assert_close(jax.jit(jax.vmap(f))(*stacked), expected)
    _, scanned = jax.lax.scan(lambda _, arguments: (None, f(*arguments)), None, tuple(stacked))
    assert_close(scanned, expected)


@OPS
def test_vmap_over_x_alone_is_a_stack_of_calls(op):
    f = of_every(op)
    _, scale, cotangent = operands(14)
    xs = np.stack([operands(seed)[0] for seed in range(3)])
    mapped = jax.vmap(f, (0, None, None, None))(xs, scale, cotangent, KEY)
    calls = [f(x, scale, cotangent, KEY) for x in xs]
    assert_close(mapped, jax.tree.map(lambda *leaves: np.stack(leaves), *calls))


@every
def test_a_degenerate_range_has_finite_results(gradient):
    x = np.float32([[-2, -1e-8, 0, 0.3, 1, 40]])
    low = np.float32([[0.3]])
    with np.errstate(all="raise"):
        for at in (low, 0 * low, -low):
            y, got = pull(gradient, x, at, at, 16)
            assert y is None or np.array_equal(y, np.full_like(x, at))
            assert all(np.all(np.isfinite(g)) for g in got)
    (dx, ds), y = affine(gradient)(x, np.zeros(1, np.float32), np.ones_like(x), key_for(gradient))
    assert np.all(np.isfinite(dx)) and np.all(np.isfinite(ds)) and np.all(np.isfinite(y))


@every
def test_a_nan_gets_no_gradient_and_gives_the_others_theirs(gradient):
    x, low, high = np.float32([[np.nan, 0.3, -9, 9]]), np.float32([[-1]]), np.float32([[1.5]])

    def gradients(x):
        dx, dlow, dhigh = pull(gradient, x, low, high, 16)[1]
        return dx, dlow.sum(), dhigh.sum()

    dx, dlow, dhigh = gradients(x)
    assert dx[0, 0] == 0 and np.all(np.isfinite(dx))
    assert np.all(np.isfinite(dlow)) and np.all(np.isfinite(dhigh))
    level = gradients(np.where(np.isnan(x), np.float32(0), x))
    np.testing.assert_array_equal(dx[0, 1:], level[0][0, 1:])
    np.testing.assert_allclose((dlow, dhigh), level[1:], rtol=1e-6)


@every
def test_infinities_are_clipped(gradient):
    x, low, high = np.float32([[-np.inf, np.inf]]), np.float32([[-1]]), np.float32([[1.5]])
    y, got = pull(gradient, x, low, high, 6)
    assert y is None or np.array_equal(y, [[-1, 1.5]])
    assert all(np.all(np.isfinite(g)) for g in got)
    np.testing.assert_array_equal(got[0], np.full_like(x, gradient == ste_unclipped))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_every_dtype_comes_back(dtype):
    with jax.enable_x64(dtype == "float64"):
        x, scale, cotangent = (v.astype(jnp.dtype(dtype)) for v in operands(15))
        for op in (affine, limits):
            for name, ((dx, ds), y) in of_every(op)(x, scale, cotangent, KEY).items():
                assert dx.dtype == ds.dtype == y.dtype == jnp.dtype(dtype), name
                results = [np.asarray(v, np.float64) for v in (dx, ds, y)]
                assert all(np.all(np.isfinite(v)) for v in results), name


@every
def test_only_a_surrogate_changes_what_is_computed_forward(gradient):
    x, scale, _ = operands(16)
    y = jqx.quantize_dequantize(
        x, scale, qtype=jnp.int4, axes=0, gradient=gradient, key=key_for(gradient)
    )
    plain = jqx.quantize_dequantize(x, scale, qtype=jnp.int4, axes=0)
    if not isinstance(gradient, Surrogate):
        np.testing.assert_array_equal(y, plain)
    step = scale[:, None] * (1 + 1e-5)
    assert np.all(np.abs(np.asarray(y) - np.asarray(plain)) <= step)


@every
def test_it_is_an_estimator_and_says_which_formats_it_is_for(gradient):
    check_estimator("caller", gradient)
    if gradient in (ste, ste_unclipped, pact):
        check_estimator("caller", gradient, uniform=False)
    else:
        with pytest.raises(ValueError, match="only for evenly spaced levels"):
            check_estimator("caller", gradient, uniform=False)


@every
def test_a_key_is_asked_for_exactly_where_it_is_used(gradient):
    wrong = KEY if key_for(gradient) is None else None
    with pytest.raises(ValueError, match="key"):
        jqx.quantize_dequantize(
            np.zeros(2, np.float32), 1.0, qtype=jnp.int8, gradient=gradient, key=wrong
        )


@every
def test_two_equal_calls_share_a_trace(gradient):
    """A value that is equal and hashes alike is one static argument."""
    assert gradient == eval(repr(gradient), vars(estimators))
    assert hash(gradient) == hash(eval(repr(gradient), vars(estimators)))
