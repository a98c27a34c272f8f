"""Rows in groups beside stacks of matrices: kernels, step by step, against a loop over groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import numerics

from ..arrays import normal, on_device
from .stepwise import on

K, N, EXPERTS = 128, 32, 5
SIZES = {
    "some": (40, [5, 0, 19, 3, 7]),
    "one": (1, [0, 0, 0, 1, 0]),
    "fewer rows than groups": (3, [1, 0, 0, 0, 2]),
    "too many": (20, [9, 9, 9, 9, 9]),
    "all of one": (200, [0, 200, 0, 0, 0]),
}
FORMATS = {
    "int8": (jnp.int8, {0: 1, 1: 32, 2: 1}),
    "int4": (jnp.int4, {0: 1, 1: 32, 2: 1}),
    "nf4": (numerics.nf4, {0: 1, 1: 64, 2: 1}),
    "mxfp4": (numerics.mxfp4, {0: 1, 1: 32, 2: 1}),
    "fp8, blocks of both axes": (jnp.float8_e4m3fn, {0: 1, 1: 64, 2: 16}),
    "one scale for all matrices": (jnp.int8, {1: 32}),
}


def matrices(name, target):
    qtype, blocks = FORMATS[name]
    spec = jqx.QSpec(qtype, jqx.per_block(blocks))
    return jqx.QTensor.quantize(normal(1, EXPERTS, K, N), spec).pack_for(target)


def looped(x, w, sizes):
    y, start = np.zeros((len(x), w.shape[2])), 0
    for matrix, size in zip(w, sizes, strict=True):
        y[start : start + size] = x[start : start + size] @ matrix
        start += size
    return y


def assert_sums(found, x, w, sizes):
    """Checks products to K roundings of the sum of sizes, and one of each number and scale."""
    rows, real = np.float64(x), np.float64(w)
    bound = (K + 4) * 2.0**-24 * looped(np.abs(rows), np.abs(real), sizes) + 1e-30
    assert (np.abs(np.float64(found) - looped(rows, real, sizes)) <= bound).all()


@pytest.mark.many
@pytest.mark.parametrize("target", ["tpu", "gpu"])
@pytest.mark.parametrize("name", SIZES)
def test_rows_meet_the_matrix_of_their_group(target, name):
    m, sizes = SIZES[name]
    x, w = normal(0, m, K), matrices("int8", target)
    codes = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_axis(0)))
    with on(target):
        product = jax.jit(lambda *args: jqx.ragged_dot(*args))
        found = [product(rows, w, jnp.asarray(sizes)) for rows in (x, codes)]
        chosen = [jqx.formulations(jqx.ragged_dot)(r, w, jnp.asarray(sizes)) for r in (x, codes)]
    assert all("ragged_kernel" in one.cpu.name for (one,) in chosen)
    for rows, y in zip((x, codes.dequantize()), found, strict=True):
        assert_sums(y, rows, w.dequantize(), sizes)


@pytest.mark.many("target")
@pytest.mark.parametrize("target", ["tpu", "gpu"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_where_it_lies(target, name):
    m, sizes = SIZES["some"]
    x, w = normal(0, m, K), matrices(name, target)
    with on(target):
        found = jax.jit(lambda *args: jqx.ragged_dot(*args))(x, w, jnp.asarray(sizes))
    assert_sums(found, x, w.dequantize(), sizes)


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_kernels_quantize_the_rows_of_experts_in_a_converted_function(target):
    m, sizes = SIZES["some"]
    x, w, sizes = normal(0, m, K), normal(1, EXPERTS, K, N), jnp.asarray(sizes)

    def f(w, x, sizes):
        return jax.lax.ragged_dot(x, w, sizes)

    spec = jqx.QSpec(jnp.int8, jqx.per_block({0: 1, 1: 32, 2: 1}))
    rule = jqx.Rule(weight=spec, activation=jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True))
    plan = jqx.make_plan(f, jqx.Policy([rule]))(w, x, sizes)
    run, q = jqx.convert(f, plan), jqx.quantize_params(w, plan)
    plain = jax.jit(run)(q, x, sizes)
    with on(target):
        (chosen,) = jqx.formulations(run)(q.pack_for(target), x, sizes)
        found = jax.jit(lambda *args: run(*args))(q.pack_for(target), x, sizes)
    assert "ragged_kernel_quantizing" in chosen.cpu.name
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_derivatives_are_those_of_the_plain_form(target):
    m, sizes = SIZES["some"]
    x, w, sizes = normal(0, m, K), matrices("int8", target), jnp.asarray(sizes)

    def loss(x, scale, plain):
        q = jqx.QTensor(w.values, scale, qtype=w.qtype, layout=None if plain else w.layout)
        return jnp.sum(jnp.sin(jqx.ragged_dot(x, q, sizes)))

    with on(target):
        found = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, w.scale, False)
    expected = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, w.scale, True)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_nan_stays_in_its_row(target):
    m, sizes = SIZES["some"]
    x, w = normal(0, m, K).at[3, 4].set(jnp.nan), matrices("int4", target)
    with on(target):
        found = jax.jit(lambda *args: jqx.ragged_dot(*args))(x, w, on_device(sizes, np.int32))
    expected = np.zeros((m, N), bool)
    expected[3] = True
    np.testing.assert_array_equal(np.isnan(found), expected)


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_it_is_mapped_over_rows_and_sizes(target):
    m, sizes = SIZES["some"]
    x, w, other = normal(0, 2, m, K), matrices("int8", target), [0, 0, m, 0, 0]
    with on(target):
        mapped = jax.vmap(lambda x, sizes: jqx.ragged_dot(x, w, sizes))
        found = jax.jit(mapped)(x, jnp.asarray([sizes, other]))
    for rows, own, y in zip(x, (sizes, other), found, strict=True):
        assert_sums(y, rows, w.dequantize(), own)
