"""Codes beside packed weights and weights in groups, and floats of less precision, by jqx-cpu."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx

from ..arrays import normal

package = pytest.importorskip("jqx_cpu")

SPECS = (
    jqx.QSpec(jnp.int4, jqx.per_axis(1)),
    jqx.QSpec(jnp.int4, jqx.per_block({0: 32, 1: 1})),
    jqx.QSpec(jnp.uint4, jqx.per_block({0: 64, 1: 1}), symmetric=False),
    jqx.QSpec(jnp.int8, jqx.per_block({0: 64, 1: 1})),
    jqx.QSpec(jnp.uint8, jqx.per_block({0: 128, 1: 1}), symmetric=False),
    jqx.QSpec(jnp.int2, jqx.per_block({0: 128, 1: 1})),
)
ROWS = (1, 3, 8, 47, 70)
EPS = np.finfo(np.float32).eps
PRODUCT = jqx.matmul


def weight(spec, k=256, n=130):
    return jqx.pack_for(jqx.QTensor.quantize(normal(1, k, n), spec), "cpu")


def codes(m, k=256):
    return jqx.QTensor.quantize(normal(m, m, k), jqx.QSpec(jnp.int8, jqx.per_axis(0)))


def real(*operands):
    return (np.asarray(x.dequantize() if hasattr(x, "qtype") else x, np.float64) for x in operands)


def test_codes_meet_weights_in_groups():
    given = [(codes(m), weight(spec)) for m in ROWS for spec in SPECS]
    for pair in given:
        (chosen,) = jqx.formulations(PRODUCT)(*pair)
        assert chosen.cpu.name == "package_groups", pair
    found = jax.jit(lambda every: [PRODUCT(*pair) for pair in every])(given)
    for (x, q), y in zip(given, found, strict=True):
        left, right = real(x, q)
        # Sums of codes are exact; those of at most 16 runs, and scales, are rounded.
        bound = np.abs(left) @ np.abs(right)
        assert (np.abs(y - left @ right) <= 32 * EPS * bound).all()


def test_long_sums_do_not_wrap_around():
    """One group of more products than 32 bits hold, of codes, of floats, and of rows in groups."""
    k = 140_000
    x = jqx.QTensor(jnp.full((2, k), 127, jnp.int8), jnp.ones((2, 1)), None, qtype=jnp.int8)
    codes_of_weight = jnp.full((1, 8, k), 127, jnp.int8)
    w = jqx.QTensor(codes_of_weight[0], jnp.ones((8, 1)), None, qtype=jnp.int8)
    experts = jqx.QTensor(codes_of_weight, jnp.ones((1, 8, 1)), None, qtype=jnp.int8)
    experts = experts.transpose(0, 2, 1).pack_for("cpu")
    rows, sizes = x.dequantize(), jnp.array([2])
    found = [jqx.einsum("mk,nk->mn", each, w) for each in (x, rows)]
    found += [jqx.ragged_dot(each, experts, sizes) for each in (x, rows)]
    for y in found:  # exact runs, summed in float32: at most 2,200 of them
        assert (np.abs(y - 127.0**2 * k) <= 2200 * EPS * 127.0**2 * k).all()


def test_codes_with_scales_of_powers_of_two_are_exact():
    x = jqx.QTensor(codes(9).values, jnp.full((9, 1), 0.25), None, qtype=jnp.int8)
    for spec in SPECS[:2]:
        q = weight(spec)
        q = jqx.QTensor.quantize(
            jnp.round(normal(2, 256, 130)), spec, jqx.calibrators.Affine(jnp.ones(q.scale.shape))
        )
        y = PRODUCT(x, jqx.pack_for(q, "cpu"))
        left, right = real(x, q)
        np.testing.assert_array_equal(y, left @ right)


def test_their_derivative_is_that_of_the_plain_form():
    q, m = weight(SPECS[1]), 8

    def squares(scale, q):
        x = codes(m)
        return jnp.sum(PRODUCT(jqx.QTensor(x.values, scale, None, qtype=x.qtype), q) ** 2)

    scale = codes(m).scale
    found, plain = (jax.grad(squares)(scale, each) for each in (q, q.dequantize()))
    left, right = real(codes(m), q)
    terms = (2 * np.abs(left @ right) * (np.abs(left) @ np.abs(right))).sum(1) / scale.ravel()
    # A sum over 256 products and one over 130 columns, each in another order.
    assert (np.abs(found - plain).ravel() <= 2 * 386 * EPS * terms).all()


def test_rows_of_one_scale_each_are_mapped():
    x = normal(0, 3, 4, 256)
    for spec in (SPECS[1], jqx.QSpec(jnp.int8, jqx.per_axis(1))):
        q = weight(spec)
        for activation in (jqx.QSpec(jnp.int8), jqx.QSpec(jnp.int8, symmetric=False)):
            f = lambda x, s=activation, q=q: PRODUCT(jqx.QTensor.quantize(x, s), q)  # noqa: E731
            alone = jnp.stack([jax.jit(f)(each) for each in x])
            np.testing.assert_array_equal(jax.jit(jax.vmap(f))(x), alone)


def test_codes_in_a_scan_find_their_weight():
    stack = jax.tree.map(lambda *x: jnp.stack(x), *[weight(SPECS[1])] * 3)
    x = codes(3)

    @jax.jit
    def run(x, stack):
        return lax.scan(lambda c, q: (c, PRODUCT(x, q)), None, stack)[1]

    np.testing.assert_array_equal(run(x, stack)[1], jax.jit(PRODUCT)(x, weight(SPECS[1])))


@pytest.mark.parametrize("precision", ["default", "bfloat16", lax.Precision.DEFAULT])
def test_default_precision_takes_two_digits(precision):
    for m in (3, 70):
        x, q = normal(m, m, 256), weight(SPECS[1])
        f = jax.jit(lambda x, q: jqx.matmul(x, q, precision=precision))
        y, exact = f(x, q), jax.jit(PRODUCT)(x, q)
        left, right = real(x, q)
        step = np.abs(left).max(axis=1, keepdims=True) / 32600
        error = np.abs(y - left @ right)
        # Each number is half a step wrong at most, and floats are summed.
        rounded = 32 * EPS * (np.abs(left) @ np.abs(right))
        assert (error <= (step / 2) * np.abs(right).sum(0) + rounded).all()
        # Three digits have 8 bits more.
        assert (
            np.abs(exact - left @ right) <= step / 2 / 256 * np.abs(right).sum(0) + rounded
        ).all()
    assert "digits = 2 : i32" in f.lower(x, q).as_text()
    assert "digits = 3 : i32" in jax.jit(PRODUCT).lower(x, q).as_text()
