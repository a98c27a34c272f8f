"""Derivatives of products by arrays and scales, against those of the real values in float64.

Digits have the derivative of the product that they stand for, a sum of floats within Higham's
bound. Where codes are small integers and scales are powers of two, every sum is exact.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import numerics
from jqx._src.contractions.dot_general import dot_gradients

from ..arrays import on_device
from ..oracles.contractions import MATRICES, Layout, chosen, gamma
from ..oracles.numerics import as_float64, assert_floats
from .blocks import block_sums, code_numbers, integers_in_blocks, real_values, scales, weight

K, N = 128, 160
ROWS = Layout((3, K), (K, N), MATRICES)
TRANSPOSED = Layout((3, K), (N, K), (((1,), (1,)), ((), ())))
WEIGHTS = {"digits": weight("int8", ROWS), "block_digits": weight("int8", ROWS, 32)}
formulations = pytest.mark.parametrize("name", WEIGHTS)


def product(x, name="digits"):
    return jqx.matmul(x, WEIGHTS[name])


def with_scale(q, scale):
    return dataclasses.replace(q, scale=scale)


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_near(result, expected, bound):
    assert result.shape == expected.shape and result.dtype == jnp.float32
    assert np.all(np.abs(as_float64(result) - expected) <= bound)


class Case(NamedTuple):
    """A weight beside floats, and who computes the product on CPU."""

    layout: Layout
    qtype: Any
    size: int | None
    zero_point: bool
    name: str
    swap: bool = False


SMALL, SMALL_BLOCKS = Layout((29, 33), (33, 6), MATRICES), Layout((3, 192), (192, 6), MATRICES)
CASES = {
    "digits": Case(ROWS, "uint8", None, True, "digits"),
    "digits turned": Case(TRANSPOSED, "int8", None, False, "digits"),
    "block_digits": Case(ROWS, "int8", 32, True, "block_digits"),
    "tiles": Case(ROWS, numerics.nf4, None, False, "tiles"),
    "tiles in blocks": Case(TRANSPOSED, "uint8", 32, True, "tiles"),
    "small": Case(SMALL, "uint8", None, True, "convert_wide"),
    "small, left": Case(SMALL, "uint8", None, True, "convert_wide", swap=True),
    "e4m3 in blocks": Case(SMALL_BLOCKS, jnp.float8_e4m3fn, 32, False, "convert_wide"),
    "nf4 in blocks": Case(SMALL_BLOCKS, numerics.nf4, 32, False, "convert_wide"),
    "int3 in blocks": Case(SMALL_BLOCKS, numerics.int3, 32, False, "convert_wide"),
}


@pytest.mark.many
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_derivatives_are_near_those_of_the_real_values(case):
    """Sums over columns, rows or products, and 12 roundings around them; 6 in a small one."""
    layout, roundings = case.layout, 6 if case.layout == SMALL else 12
    pack = layout.numbers[0][1][0] if case.name == "tiles" and case.size is None else None
    w = weight(case.qtype, layout, case.size, case.zero_point, pack=pack)
    (m, k), n = layout.lhs, w.size // layout.products
    x, dx, g = normal(0, (m, k)), normal(1, (m, k)), normal(2, (m, n))
    dscale = normal(3, w.scale.shape)

    def f(x, scale):
        q = with_scale(w, scale)
        return jqx.matmul(q.T, x.T).T if case.swap else jqx.dot_general(x, q, layout.numbers)

    assert chosen(f, x, w.scale)[0][0] == case.name

    @jax.jit
    def derivatives(x, scale):
        y, pull = jax.vjp(f, x, scale)
        return f(x, scale), y, pull(g), jax.jvp(f, (x, scale), (dx, dscale))

    y, value, (of_x, of_scale), (primal, tangent) = derivatives(x, w.scale)
    np.testing.assert_array_equal(value, y)
    np.testing.assert_array_equal(primal, y)
    axis = layout.numbers[0][1][0]
    real, number, spread = (
        np.moveaxis(v, axis, 0)
        for v in (real_values(w), np.subtract(*code_numbers(w)), scales(with_scale(w, dscale)))
    )
    # What the bound is relative to: small products sum a code and its zero point apart.
    codes = (
        np.moveaxis(sum(map(np.abs, code_numbers(w))), axis, 0)
        if layout == SMALL
        else np.abs(number)
    )
    sizes = codes * np.abs(np.moveaxis(scales(w), axis, 0))
    x, dx, g = (as_float64(v) for v in (x, dx, g))
    size = np.abs
    assert_near(of_x, g @ real.T, gamma(n + roundings) * (size(g) @ sizes.T))
    shape = np.moveaxis(np.empty(w.scale.shape), axis, 0).shape
    expected = block_sums((x.T @ g) * number, shape)
    bound = gamma((case.size or k) + m + roundings) * block_sums(
        (size(x).T @ size(g)) * codes, shape
    )
    assert_near(np.moveaxis(of_scale, axis, 0), expected, bound)
    expected = dx @ real + x @ (number * spread)
    bound = size(dx) @ sizes + size(x) @ (codes * size(spread))
    assert_near(tangent, expected, gamma(2 * k + 12) * bound)


EXACT = {  # products, elements of a block, zero point, dtype of the array
    "channels": (4, 4, False, "float32"),
    "channels, zero points": (4, 4, True, "float32"),
    "bfloat16": (4, 4, False, "bfloat16"),
    "bfloat16, zero points": (4, 4, True, "bfloat16"),
    "blocks": (16, 4, False, "float32"),
    "blocks, zero points": (16, 4, True, "float32"),
    "a tail": (10, 4, False, "float32"),
    "a tail, zero points": (10, 4, True, "float32"),
}


@pytest.mark.parametrize("k, size, zero_point, dtype", EXACT.values(), ids=EXACT)
def test_gradients_of_a_small_weight_are_those_of_its_real_values(k, size, zero_point, dtype):
    """On the right and on the left, eagerly and jitted. Small integers and powers of two: every sum
    is exact, also the cotangents in bfloat16.
    """
    rng = np.random.default_rng([k, size, zero_point])
    w = integers_in_blocks(rng, "int4", (k, 2), (size, 1), zero_point).astype(jnp.dtype(dtype))
    x, g = rng.integers(-2, 3, (3, k)).astype(np.float32), rng.integers(-1, 2, (3, 2))

    def loss(x, scale, side):
        q = with_scale(w, scale)
        y = jqx.matmul(x, q) if side == "right" else jqx.matmul(q.T, x.T).T
        return (y.astype(jnp.float32) * g.astype(np.float32)).sum()

    of_elements = (x.T @ g) * np.subtract(*code_numbers(w))
    expected = g @ real_values(w).T, np.add.reduceat(of_elements, np.arange(0, k, size), 0)
    gradient = jax.grad(loss, (0, 1))
    forms = (
        (gradient, jax.jit(gradient, static_argnums=2))
        if k == 4
        else (jax.jit(gradient, static_argnums=2),)
    )
    for side in ("right", "left"):
        for form in forms:
            of_x, of_scale = form(on_device(x, dtype), w.scale, side)
            assert_floats(of_x, expected[0], dtype)
            assert_floats(of_scale, expected[1], np.float32)


@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (16, 4), (16, 16)])
def test_gradients_of_both_scales_of_small_integers(sizes):
    rng = np.random.default_rng([4, *sizes])
    lhs = integers_in_blocks(rng, "int4", (3, 16), (1, sizes[0]))
    rhs = integers_in_blocks(rng, "uint4", (16, 2), (sizes[1], 1))
    g = rng.integers(-1, 2, (3, 2)).astype(np.float32)

    def loss(left, right):
        return (jqx.matmul(with_scale(lhs, left), with_scale(rhs, right)) * g).sum()

    of_left, of_right = jax.jit(jax.grad(loss, (0, 1)))(lhs.scale, rhs.scale)
    left = (g @ real_values(rhs).T) * np.subtract(*code_numbers(lhs))
    right = (real_values(lhs).T @ g) * np.subtract(*code_numbers(rhs))
    assert_floats(of_left, block_sums(left, lhs.scale.shape), np.float32)
    assert_floats(of_right, block_sums(right, rhs.scale.shape), np.float32)


@pytest.mark.parametrize("name", ["digits", "block_digits"])
def test_derivatives_compose(name):
    """Forward, linearized, mapped and in a loop: all are linear in the tangent, as floats are."""
    w = WEIGHTS[name]
    x, dx = normal(0, (2, 3, K)), normal(1, (2, 3, K))
    real = real_values(w)
    bound = gamma(2 * K + N + 12) * (np.abs(as_float64(dx)) @ np.abs(real))
    expected = as_float64(dx) @ real

    @jax.jit
    def forms(x, dx):
        each = functools.partial(product, name=name)
        linear = jax.linearize(each, x[0])[1]
        mapped = jax.vmap(lambda x, dx: jax.jvp(each, (x,), (dx,))[1])(x, dx)
        looped = lax.map(lambda pair: jax.jvp(each, pair[:1], pair[1:])[1], (x, dx))
        return linear(dx[0]), linear(dx[1]), mapped, looped

    first, second, mapped, looped = forms(x, dx)
    for result in (jnp.stack([first, second]), mapped, looped):
        assert_near(result, expected, bound)


@pytest.mark.parametrize("name", ["digits", "block_digits"])
def test_gradients_compose(name):
    """A gradient mapped over rows, and one of a scan over layers that uses a weight in each."""
    w, g = WEIGHTS[name], normal(1, (3, N))
    real = real_values(w)
    x = normal(0, (3, K))
    layers = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), w)
    factors = jnp.array([1.0, -3.0])

    @jax.jit
    def forms(x, layers):
        of_row = jax.grad(lambda row, g: (jqx.matmul(row, w) * g).sum())

        def loss(x):
            step = lambda y, layer: (y + layer[1] * jqx.matmul(x, layer[0]), None)  # noqa: E731
            return (lax.scan(step, jnp.zeros((3, N)), (layers, factors))[0] * g).sum()

        return jax.vmap(of_row)(x, g), jax.grad(loss)(x)

    mapped, looped = forms(x, layers)
    expected = as_float64(g) @ real.T
    bound = gamma(N + 16) * (np.abs(as_float64(g)) @ np.abs(real).T)
    assert_near(mapped, expected, bound)
    assert_near(looped, -2 * expected, 4 * bound)


def test_gradients_of_the_scales_of_two_integer_operands_are_near_those_in_float64():
    """Of a product with zero points, in which a row of ones is added."""
    lhs = weight("int8", Layout((), (5, K), TRANSPOSED.numbers), zero_point=True)
    rhs = weight("uint8", ROWS, zero_point=True)
    g = normal(0, (5, N))
    assert chosen(jqx.matmul, lhs, rhs) == [("integer_shaped", "integer")]

    def loss(left, right):
        return (jqx.matmul(with_scale(lhs, left), with_scale(rhs, right)) * g).sum()

    of_left, of_right = jax.jit(jax.grad(loss, (0, 1)))(lhs.scale, rhs.scale)
    total = np.subtract(*code_numbers(lhs)) @ np.subtract(*code_numbers(rhs))
    left, right = as_float64(lhs.scale), as_float64(rhs.scale)
    for result, terms, axis in ((of_left, g * total * right, 1), (of_right, g * total * left, 0)):
        expected, size = terms.sum(axis, keepdims=True), np.abs(terms).sum(axis, keepdims=True)
        assert_near(result, expected, gamma(N + 4) * size)


def test_a_qtensor_is_differentiated_by_its_scale_and_refused_as_a_whole():
    """JAX says that integers have no derivative, and what to pass; `allow_int` gives empty ones in
    the structure of the QTensor.
    """
    x, w = jnp.ones((3, K)), weight("uint8", ROWS, zero_point=True)
    loss = lambda w: jqx.matmul(x, w).sum()  # noqa: E731
    with pytest.raises(TypeError, match=r"real- or complex-valued .* uint8.* set allow_int"):
        jax.grad(loss)(w)
    gradient = jax.jit(jax.grad(loss, allow_int=True))(w)
    assert jax.tree.structure(gradient) == jax.tree.structure(w)
    assert gradient.values.dtype == gradient.zero_point.dtype == jax.dtypes.float0
    expected = 3 * np.subtract(*code_numbers(w)).sum(0, keepdims=True)
    assert_floats(gradient.scale, expected, np.float32)


@formulations
def test_sixteen_bit_gradients_have_the_dtypes_of_what_they_are_of(name):
    w, x = WEIGHTS[name].astype(jnp.bfloat16), jnp.ones((3, K), jnp.bfloat16)

    def loss(x, scale):
        return jqx.matmul(x, with_scale(w, scale)).astype(jnp.float32).sum()

    of_x, of_scale = jax.eval_shape(jax.grad(loss, (0, 1)), x, w.scale)
    assert (of_x.shape, of_x.dtype) == (x.shape, x.dtype)
    assert (of_scale.shape, of_scale.dtype) == (w.scale.shape, w.scale.dtype)


LAYOUTS_OF_JAX = {  # shapes of both operands, dimension numbers
    "matrices": ((3, 4), (4, 5), (((1,), (0,)), ((), ()))),
    "both transposed": ((4, 3), (5, 4), (((0,), (1,)), ((), ()))),
    "no free axis": ((4,), (4,), (((0,), (0,)), ((), ()))),
    "no contracted axis": ((2, 3), (4,), (((), ()), ((), ()))),
    "batch": ((2, 3, 4), (5, 2, 4), (((2,), (2,)), ((0,), (1,)))),
    "two batch axes out of order": ((2, 3, 4, 6), (3, 2, 6, 5), (((3,), (2,)), ((0, 1), (1, 0)))),
    "two contracted axes out of order": ((4, 3, 6), (6, 5, 4), (((0, 2), (2, 0)), ((), ()))),
    "contracted axes that cross": ((3, 4, 6), (4, 5, 6), (((2, 1), (2, 0)), ((), ()))),
    "three axes in a ring": ((2, 3, 4, 7), (4, 2, 3), (((0, 1, 2), (1, 2, 0)), ((), ()))),
}


@pytest.mark.many
@pytest.mark.parametrize("left, right, numbers", LAYOUTS_OF_JAX.values(), ids=LAYOUTS_OF_JAX)
def test_the_backward_pass_is_that_of_jax_in_every_layout(left, right, numbers):
    """Of numbers that bfloat16 holds, in sums that float32 holds."""
    rng = np.random.default_rng(0)
    x, w = (on_device(rng.integers(-8, 9, shape), jnp.float32) for shape in (left, right))
    y, pull = jax.vjp(lambda x, w: lax.dot_general(x, w, numbers), x, w)
    g = on_device(rng.integers(-8, 9, y.shape), jnp.float32)
    for dtype in (jnp.float32, jnp.bfloat16):
        for result, expected in zip(dot_gradients(x, w, numbers, g, dtype), pull(g), strict=True):
            np.testing.assert_array_equal(result, expected, strict=True)
