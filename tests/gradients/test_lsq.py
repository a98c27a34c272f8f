"""LSQ against the paper's equations 1 to 3, in float64, element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.gradients import LearnedStep, lsq

from ..oracles.refusals import assert_refused
from .points import RANGES, SCALES, case, positions

UNSCALED = LearnedStep(gradient_scale=False)
# An error of rounding is v - round(v) with |v| < 2**8 in float32, from four operations on v; codes
# of at most 250 multiply it, after a division by the number of steps, 255 at most.
ROUNDINGS = 2.0**8 * 8 * 2.0**-24 * 4


def paper(v, qmin, qmax):
    """Returns d v_hat / d v and d v_hat / d s, `v` being in steps."""
    inside = (v >= qmin) & (v <= qmax)
    ds = np.where(v < qmin, qmin, np.where(v > qmax, qmax, np.rint(v) - v))
    return inside.astype(float), ds


@pytest.mark.many
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("qmin, qmax", RANGES)
def test_the_rule_is_that_of_the_paper(qmin, qmax, scale, dtype):
    with jax.enable_x64(dtype == np.float64):
        v, x, low, high, cotangent = case(qmin, qmax, scale, dtype)
        dx, dlow, dhigh = UNSCALED.bwd(x, low, high, qmax - qmin + 1, cotangent)
    assert dx.dtype == dlow.dtype == dhigh.dtype == dtype
    passes, ds = paper(v, qmin, qmax)
    np.testing.assert_array_equal(dx, passes * cotangent)
    got = qmin * np.float64(dlow) + qmax * np.float64(dhigh)
    atol = ROUNDINGS * 4 if dtype == np.float32 else 1e-9
    np.testing.assert_allclose(got, ds * cotangent, rtol=1e-6, atol=atol)
    inside = passes == 1
    np.testing.assert_allclose(dlow[inside], -dhigh[inside], atol=1e-12)
    np.testing.assert_array_equal(dlow[v > qmax], 0)
    np.testing.assert_array_equal(dhigh[v < qmin], 0)


@pytest.mark.parametrize("zero_point", [0, 3, 8])
def test_the_scale_sees_the_rounding_of_the_forward_pass_ties_included(zero_point):
    """ds = (y - x) / s inside: with one scale an element, autodiff gives each its own."""
    v = positions(-zero_point, 15 - zero_point, 0.25)
    x, s = np.float32(v * 0.25), np.full(v.shape, 0.25, np.float32)
    z = np.full(v.shape, zero_point, jnp.uint4)

    def forward(s):
        return jqx.quantize_dequantize(x, s, z, qtype=jnp.uint4, axes=0, gradient=UNSCALED)

    y, vjp = jax.vjp(forward, s)
    inside = (v >= -zero_point) & (v <= 15 - zero_point)
    expected = np.where(inside, (np.asarray(y) - x) / s, np.asarray(y) / s)
    np.testing.assert_allclose(vjp(np.ones_like(y))[0], expected, rtol=1e-6, atol=ROUNDINGS)


def test_limits_see_the_rounding_of_fake_quantize_ties_included():
    """dlow = (x - y) / (high - low) inside, where a limit is input and output limit at once."""
    x = np.float32(np.arange(-8, 8.25, 0.25))
    low, high = np.full(x.shape, -7.5, np.float32), np.full(x.shape, 7.5, np.float32)

    def forward(low, high):
        return jqx.fake_quantize(x, low, high, low, high, levels=16, gradient=UNSCALED)

    y, vjp = jax.vjp(forward, low, high)
    dlow, dhigh = vjp(np.ones_like(y))
    share = np.where(np.abs(x) <= 7.5, (x - np.asarray(y)) / 15, 0)
    np.testing.assert_allclose(dlow, share + (x < -7.5), atol=1e-6)
    np.testing.assert_allclose(dhigh, -share + (x > 7.5), atol=1e-6)


def test_ds_is_the_derivative_of_the_expression_whose_rounding_is_a_constant_offset():
    """s * (clip(v / s) + c), where c is what the rounding added, by central differences."""
    v, s, qmin, qmax = positions(-8, 7, 0.3) * 0.3, 0.3, -8, 7
    v = v[(np.abs(v / s - qmin) > 1e-3) & (np.abs(v / s - qmax) > 1e-3)]
    clipped = np.clip(v / s, qmin, qmax)
    c = np.rint(clipped) - clipped
    h = 2.0**-20
    ends = [(s + d) * (np.clip(v / (s + d), qmin, qmax) + c) for d in (h, -h)]
    expected = np.sum(ends[0] - ends[1]) / (2 * h)
    with jax.enable_x64(True):
        got = jax.grad(
            lambda s: jqx.quantize_dequantize(v, s, qtype=jnp.int4, gradient=UNSCALED).sum()
        )(np.float64(s))
    # Rounding: 4096 terms below 3 in 2**-53 over h; truncation: the expression is linear in s.
    np.testing.assert_allclose(got, expected, atol=4096 * 3 * 2.0**-53 / h)


@pytest.mark.many
@pytest.mark.parametrize(
    "axes, shape, n", [((), (), 24), (0, (2,), 12), ((0, 2), (2, 4), 3), ((0, 1, 2), (2, 3, 4), 1)]
)
@pytest.mark.parametrize("qtype, z, qp", [("int4", None, 7), ("uint4", 3, 12), ("uint4", 15, 1)])
def test_the_gradient_scale_counts_the_elements_that_share_a_scale(axes, shape, n, qtype, z, qp):
    x = np.random.default_rng(2).normal(size=(2, 3, 4)).astype(np.float32)
    scale = np.full(shape, 0.1, np.float32)
    zero_point = None if z is None else np.full(shape, z, jnp.dtype(qtype))

    def gradients(gradient):
        def loss(x, s):
            y = jqx.quantize_dequantize(x, s, zero_point, qtype=qtype, axes=axes, gradient=gradient)
            return y.sum()

        return jax.grad(loss, (0, 1))(x, scale)

    (dx, ds), (plain_dx, plain_ds) = gradients(lsq), gradients(UNSCALED)
    np.testing.assert_array_equal(dx, plain_dx)
    np.testing.assert_allclose(ds, plain_ds / np.sqrt(n * qp), rtol=1e-5, atol=1e-7)
    assert np.any(plain_ds != 0)


def test_no_elements_have_no_gradient():
    f = jax.grad(
        lambda s: jqx.quantize_dequantize(
            np.zeros((0, 3), np.float32), s, qtype=jnp.int8, axes=1, gradient=lsq
        ).sum()
    )
    np.testing.assert_array_equal(f(np.ones(3, np.float32)), np.zeros(3))
    dx, dlow, dhigh = lsq.bwd(*[jnp.zeros((0, 3))] * 3, 4, jnp.zeros((0, 3)))
    assert dx.shape == dlow.shape == dhigh.shape == (0, 3)


def test_a_gradient_scale_that_is_no_bool_is_refused():
    assert_refused(
        lambda: LearnedStep(gradient_scale=0.1), (), TypeError, "LearnedStep", "gradient_scale"
    )


def test_learned_step_is_a_value():
    assert lsq == LearnedStep() != UNSCALED
    assert lsq.uniform_only
