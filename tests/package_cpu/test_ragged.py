"""Rows in groups, by jqx-cpu and one group after another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqx
from jqx._src import package_cpu

from ..arrays import normal

package = pytest.importorskip("jqx_cpu")

SPECS = (
    jqx.QSpec(jnp.int8, jqx.per_axis(0, 2)),
    jqx.QSpec(jnp.uint8, jqx.per_axis(0, 2), symmetric=False),
    jqx.QSpec(jnp.int8, jqx.per_block({0: 1, 1: 32, 2: 1})),
    jqx.QSpec(jnp.int4, jqx.per_block({0: 1, 1: 64, 2: 1})),
    jqx.QSpec(jnp.uint4, jqx.per_block({0: 1, 1: 32, 2: 1}), symmetric=False),
    jqx.QSpec(jnp.int2, jqx.per_block({0: 1, 1: 64, 2: 1})),
    jqx.QSpec(jqx.numerics.nf4, jqx.per_block({0: 1, 1: 32, 2: 1})),
    jqx.QSpec(jnp.float8_e4m3fn, jqx.per_axis(0, 2)),
)
EPS = np.finfo(np.float32).eps


def experts(spec, groups=5, k=128, n=130):
    return jqx.pack_for(jqx.QTensor.quantize(normal(1, groups, k, n), spec), "cpu")


def in_groups(sizes, m):
    """The rows of each group, as slices."""
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), m)
    return [slice(start, stop) for start, stop in zip((0, *ends[:-1]), ends, strict=True)]


SIZES = ([8, 8, 8, 8, 8], [0, 40, 0, 0, 0], [3, -2, 1, 20, 5], [30, 30, 30, 30, 30])


def test_each_group_meets_its_own_matrix():
    x = normal(0, 40, 128)
    codes = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_axis(0), symmetric=False))
    given = [(x, experts(spec)) for spec in SPECS]
    given += [(codes, experts(spec)) for spec in SPECS[:2]]
    for lhs, q in given:
        (chosen,) = jqx.formulations(jqx.ragged_dot)(lhs, q, jnp.array(SIZES[0]))
        assert chosen.cpu.name == "ragged_package"
    run = jax.jit(
        lambda every, sizes: [[jqx.ragged_dot(*each, s) for s in sizes] for each in every]
    )
    found = run(given, [jnp.array(sizes) for sizes in SIZES])
    for (lhs, q), each in zip(given, found, strict=True):
        real = lhs.dequantize() if isinstance(lhs, jqx.QTensor) else lhs
        rows, matrices = (np.asarray(a, np.float64) for a in (real, q.dequantize()))
        # Digits are half a unit of 24 bits wrong relative to the largest; then at most four runs or
        # groups of exact sums, three digits each, are scaled and summed in floats.
        largest = np.abs(rows).max(axis=1, keepdims=True)
        for sizes, y in zip(SIZES, each, strict=True):
            expected, bound = np.zeros((2, *y.shape))
            for matrix, own in zip(matrices, in_groups(sizes, len(rows)), strict=True):
                expected[own] = rows[own] @ matrix
                bound[own] = largest[own] * np.abs(matrix).sum(axis=0)
            assert (np.abs(y - expected) <= 8 * EPS * bound).all()


def test_a_not_finite_row_stays_in_its_place():
    x = normal(0, 40, 128).at[9, 3].set(jnp.nan).at[39, 0].set(jnp.inf)
    for spec in (SPECS[0], SPECS[3]):
        y = jqx.ragged_dot(x, experts(spec), jnp.array(SIZES[2]))
        assert np.isnan(y[9]).all() and np.isfinite(np.delete(y, 9, 0)).all()
        assert (y[29:] == 0).all()


def test_groups_are_mapped_and_differentiated():
    x, q = normal(0, 3, 40, 128), experts(SPECS[3])
    sizes = jnp.array(SIZES[:3])
    expected = jnp.stack([jqx.ragged_dot(x[i], q, sizes[i]) for i in range(3)])
    np.testing.assert_array_equal(
        jax.vmap(lambda x, s: jqx.ragged_dot(x, q, s))(x, sizes), expected
    )

    def squares(f, w):
        return jax.grad(lambda x: jnp.sum(f(x, w, sizes[0]) ** 2))(x[0])

    found, plain = squares(jqx.ragged_dot, q), squares(jax.lax.ragged_dot, q.dequantize())
    # Two products of sums of 128 and 130 floats, in another order.
    slopes = 2 * np.abs(np.asarray(expected[0])) @ np.abs(q.dequantize()).max(0).T
    assert (np.abs(found - plain) <= 2 * 260 * EPS * slopes).all()


def test_a_partitioned_program_has_the_plain_form():
    x, q = normal(0, 40, 128), experts(SPECS[0])
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    put = jax.device_put(x, NamedSharding(mesh, P("x")))
    f, sizes = jax.jit(jqx.ragged_dot), jnp.array(SIZES[0])
    assert package_cpu.NAME in f.lower(x, q, sizes).as_text()
    assert package_cpu.NAME not in f.lower(put, q, sizes).as_text()


def test_sizes_beyond_32_bits_and_the_precision():
    x, q = normal(0, 40, 128), experts(SPECS[0])
    sizes = jnp.array([2**32 - 1, 8, 8, 8, 8], jnp.uint32)
    whole = jqx.ragged_dot(x, q, jnp.array([40, 0, 0, 0, 0]))
    np.testing.assert_array_equal(jqx.ragged_dot(x, q, sizes), whole)
    f = jax.jit(lambda x, q, sizes: jqx.ragged_dot(x, q, sizes, precision="default"))
    assert "digits = 2 : i32" in f.lower(x, q, sizes).as_text()


def test_wrong_sizes_are_an_error_of_xla():
    x, w = jnp.zeros((1, 4, 64), jnp.int8), jnp.zeros((3, 8, 64), jnp.int8)
    none, zero = jnp.zeros((0,)), jnp.zeros((0,), jnp.int32)
    options = {"low": np.float32(0), "high": np.float32(0)}
    result = jax.ShapeDtypeStruct((1, 4, 8), jnp.int32)

    def call(step, sizes, x=x):
        given = x, w, none, zero, none, zero, step, sizes
        return package_cpu.call("product", result, *given, **options)

    assert (call(zero, jnp.array([1, 2, 1])) == 0).all()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"sizes are s32\[groups\].*\[2\]"):
        call(zero, jnp.array([1, 2]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="groups have no step"):
        call(jnp.array([0]), jnp.array([1, 2, 1]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="read by one batch"):
        call(zero, jnp.array([1, 2, 1]), jnp.zeros((2, 4, 64), jnp.int8))
