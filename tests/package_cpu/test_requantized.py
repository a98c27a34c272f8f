"""Codes of sums, by jqx-cpu and by the integer arithmetic of jqx."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src import package_cpu
from jqx._src.contractions.kernels_cpu import plain_sums

from ..arrays import normal

package = pytest.importorskip("jqx_cpu")

LAST = (((1,), (0,)), ((), ()))
SHAPES = ((1, 128, 300), (7, 300, 130), (100, 128, 256))
OUTPUTS = ((jnp.int8, 3), (jnp.uint8, 128))


def cases():
    """Rows, a weight and what makes codes: symmetric or not, with and without a bias."""
    rng, found = np.random.default_rng(0), []
    for shape, rounding in itertools.product(SHAPES, jqx.tflite.FixedPointRounding):
        for (qtype, zero_point), has_more in itertools.product(OUTPUTS, (False, True)):
            m, k, n = shape
            x = jqx.QTensor.quantize(normal(1, m, k), jqx.QSpec(jnp.int8, symmetric=not has_more))
            spec = jqx.QSpec(jnp.int8, jqx.per_axis(1))
            w = jqx.pack_for(jqx.QTensor.quantize(normal(2, k, n), spec), "cpu")
            bias = jnp.asarray(rng.integers(-9999, 9999, n), jnp.int32) if has_more else None
            scale = 0.2 if has_more else 2.0**-20  # the latter is a shift to the left
            output = jqx.tflite.Requantization.of(
                x.scale,
                w.scale,
                scale,
                qtype=qtype,
                zero_point=zero_point,
                bias=bias,
                rounding=rounding,
                low=zero_point if has_more else None,
            )
            found.append((x, w, output))
    return found


def requantized(x, w, output):
    return jqx.dot_general(x, w, LAST, output=output)


def test_codes_are_those_of_integer_arithmetic():
    given = cases()
    assert {c.cpu.name for each in given for c in jqx.formulations(requantized)(*each)} == {
        "package_requantized"
    }
    found = jax.jit(lambda every: [requantized(*each).values for each in every])(given)

    @jax.jit
    def expected(every):
        return [jqx.tflite.requantize(jnp.int32(sums), output).values for sums, output in every]

    def sums_of(x, w):
        zero = 0 if x.zero_point is None else np.asarray(x.zero_point, np.int64)
        left = np.asarray(x.values, np.int64) - zero
        return (left @ np.asarray(w.unpack().values, np.int64)).astype(np.int32)

    codes = expected([(sums_of(x, w), output) for x, w, output in given])
    for a, b in zip(found, codes, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
    assert all(len(np.unique(each)) > 20 for each in codes[1::2])


def test_a_zero_point_of_each_row_is_left_to_xla():
    x, w, output = cases()[-4]
    own = jnp.arange(x.shape[0], dtype=jnp.int8)[:, None]
    output = jqx.tflite.Requantization(
        output.multiplier, output.shift, jnp.ones(own.shape), own, qtype=jnp.int8
    )
    (chosen,) = jqx.formulations(requantized)(x, w, output)
    assert chosen.cpu.name == "package_sums"
    found = requantized(x, w, output).values
    plain = requantized(x, w.unpack(), output).values
    np.testing.assert_array_equal(found, plain, strict=True)


def test_one_of_a_stack_and_rows_that_are_mapped():
    x, w, output = cases()[-1]
    one = requantized(x, w, output).values
    stack = jax.tree.map(lambda *each: jnp.stack(each), *[w] * 3)
    scan = jax.jit(lambda w: lax.scan(lambda i, w: (i, requantized(x, w, output).values), 0, w)[1])
    np.testing.assert_array_equal(scan(stack), jnp.stack([one] * 3), strict=True)
    mapped = jax.tree.map(lambda each: jnp.stack([each] * 3), x)
    many = jax.jit(jax.vmap(lambda x: requantized(x, w, output).values))(mapped)
    np.testing.assert_array_equal(many, jnp.stack([one] * 3), strict=True)


def test_formulations_of_users_come_first():
    x, w, output = cases()[-1]
    mine = jqx.extend.Formulation(
        "sums_of_mine",
        "an example",
        ("cpu",),
        lambda case: True,
        lambda lhs, rhs, how: plain_sums(lhs, rhs, how),
        op="dot_general:int32",
    )
    with jqx.extend.using(mine):
        (chosen,) = jqx.formulations(requantized)(x, w, output)
        assert chosen.cpu.name == "sums_of_mine"


def test_a_wrong_parameter_is_an_error_of_xla():
    codes, factor = jnp.zeros((1, 4, 64), jnp.int8), jnp.zeros((1, 3), jnp.int32)
    none = jnp.zeros((0,), jnp.int32)
    given = [codes, codes, none, none, factor, factor, none, none, none]
    options = {"low": np.int32(-128), "high": np.int32(127), "is_single": False}

    def call(*given, dtype=jnp.int8, **changes):
        result = jax.ShapeDtypeStruct((1, 4, 4), dtype)
        return package_cpu.call("requantized_product", result, *given, **(options | changes))

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"s32\[batch, n or 1\].*\[1, 3\]"):
        call(*given)
    given[4] = given[5] = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="low and high are codes"):
        call(*given, high=np.int32(128))
    with pytest.raises(jax.errors.JaxRuntimeError, match="s8 or u8"):
        call(*given, dtype=jnp.int32)
    given[5] = none
    with pytest.raises(jax.errors.JaxRuntimeError, match="a factor is missing"):
        call(*given)
