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
    assert (np.abs(found - plain) <= 600 * EPS * np.abs(plain).max()).all()


def test_codes_in_a_scan_find_their_weight():
    stack = jax.tree.map(lambda *x: jnp.stack(x), *[weight(SPECS[1])] * 3)
    x = codes(3)

    @jax.jit
    def run(x, stack):
        return lax.scan(lambda c, q: (c, PRODUCT(x, q)), None, stack)[1]

    np.testing.assert_array_equal(run(x, stack)[1], jax.jit(PRODUCT)(x, weight(SPECS[1])))


@pytest.mark.parametrize("precision", ["default", "bfloat16", lax.Precision.DEFAULT])
def test_two_digits_where_the_default_precision_is_told(precision):
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
        assert (np.abs(exact - left @ right) < error.max() / 20).all()
    assert "digits = 2 : i32" in f.lower(x, q).as_text()
    assert "digits = 3 : i32" in jax.jit(PRODUCT).lower(x, q).as_text()
