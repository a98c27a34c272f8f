"""Reading back how contractions are computed, and the derivatives of those that round an operand.

Derivatives are held against float64: digits have the derivative of the product that they stand for,
a sum of floats within Higham's bound.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import numerics
from jqx._src.contractions.formulation import FORMULATIONS

from ..oracles.contractions import MATRICES, Layout, chosen, gamma
from ..oracles.numerics import as_float64, assert_floats
from .blocks import block_sums, code_numbers, real_values, scales, weight

K, N = 128, 160
ROWS = Layout((3, K), (K, N), MATRICES)
TURNED = Layout((3, K), (N, K), (((1,), (1,)), ((), ())))
DIGITS = ("digits", "convert")
X = jax.ShapeDtypeStruct((3, K), jnp.float32)


WEIGHTS = {"digits": weight("int8", ROWS), "block_digits": weight("int8", ROWS, 32)}


def product(x, name="digits"):
    return jqx.matmul(x, WEIGHTS[name])


def test_each_formulation_has_a_name_of_its_own_and_a_reason():
    for name, formulation in FORMULATIONS.items():
        assert formulation.name == name and name.isidentifier() and "_else_" not in name
        assert len(formulation.reason.split()) >= 5


def test_what_rounds_an_operand_has_the_derivative_of_what_does_not():
    linear = {f.name for f in FORMULATIONS.values() if f.linear is not None}
    rounding = {
        "digits",
        "block_digits",
        "package_floats",
        "package_decoded",
        "kernel_tpu",
        "kernel_gpu",
    }
    assert linear == rounding | {"dequantize"}
    assert {f.name for f in FORMULATIONS.values() if f.needs_linear} == linear - {"dequantize"}


def test_a_contraction_tells_its_operands_its_result_and_both_formulations():
    (found,) = jqx.formulations(product)(X)
    assert found.operands == ("f32[3,128]", "i8[128,160]", "f32[1,160]")
    assert (found.result, found.times) == ("f32[3,160]", 1)
    assert found.cpu is FORMULATIONS["digits"] and found.elsewhere is FORMULATIONS["convert"]
    first, cpu, elsewhere = str(found).split("\n")
    assert first == "f32[3,128] x i8[128,160] x f32[1,160] -> f32[3,160]"
    assert cpu == f"  cpu: digits: {found.cpu.reason}"
    assert elsewhere == f"  elsewhere: convert: {found.elsewhere.reason}"


def test_one_formulation_for_all_platforms_is_listed_once():
    w = weight("int8", Layout((3, 4), (4, 5), MATRICES))
    (found,) = jqx.formulations(jqx.matmul)(w.T, w)
    assert found.cpu == found.elsewhere
    assert str(found).split("\n")[1:] == [f"  integer: {found.cpu.reason}"]


def test_contractions_are_listed_in_order_and_those_of_arrays_left_out():
    def f(x, *, scale):
        y = product(x, "block_digits") * scale
        return product(jnp.tanh(y @ y.T @ x))

    names = [c.cpu.name for c in jqx.formulations(f)(X, scale=2.0)]
    assert names == ["block_digits", "digits"]
    assert jqx.formulations(lambda x: jqx.matmul(x, x.T))(X) == []


def scanned(x, times):
    return lax.scan(lambda y, _: (y + product(x).sum(), None), 0.0, None, length=times)[0]


def nested(x):
    body = lambda y, _: (y + scanned(x, 5), None)  # noqa: E731
    return lax.scan(body, 0.0, None, length=3)[0] + product(x).sum()


TIMES = {
    "scan": (functools.partial(scanned, times=7), [7]),
    "nested scans": (nested, [15, 1]),
    "map": (lambda x: lax.map(product, x), [3]),
    "jit in jit": (jax.jit(lambda x: jax.jit(product)(x)), [1]),
    "scan in jit": (jax.jit(lambda x: jax.jit(scanned, static_argnums=1)(x, 4)), [4]),
    "vmap": (jax.vmap(product), [1]),
    "checkpoint": (jax.checkpoint(product), [1]),
    "cond": (lambda x: lax.cond(True, product, lambda x: 2 * product(x), x), [1, 1]),
    "while": (lambda x: lax.while_loop(lambda y: True, lambda y: product(x).sum(), 0.0), [1]),
}


@pytest.mark.parametrize("f, times", TIMES.values(), ids=TIMES)
def test_contractions_are_found_wherever_they_stand(f, times):
    found = jqx.formulations(f)(X)
    assert [c.cpu.name for c in found] == ["digits"] * len(times)
    assert [c.times for c in found] == times
    assert all((f" ({c.times} times)" in str(c)) == (c.times > 1) for c in found)


def test_functions_of_users_that_have_a_name_like_ours_are_looked_into():
    @jax.jit
    def jqx_model(x):
        return product(x)

    assert chosen(jqx_model, X) == [DIGITS]


def test_what_a_function_raises_when_traced_is_raised():
    with pytest.raises(TypeError, match="same shape"):
        jqx.formulations(product)(jax.ShapeDtypeStruct((3, 5), jnp.float32))


class Case(NamedTuple):
    """A weight beside floats: its layout, format, how scales are shared, and who is chosen."""

    layout: Layout
    qtype: Any
    size: int | None
    zero_point: bool
    name: str

    def weight(self) -> jqx.QTensor:
        pack = self.layout.numbers[0][1][0] if self.qtype is numerics.nf4 else None
        return weight(self.qtype, self.layout, self.size, self.zero_point, pack=pack)


CASES = {
    "digits": Case(ROWS, "uint8", None, True, "digits"),
    "digits turned": Case(TURNED, "int8", None, False, "digits"),
    "block_digits": Case(ROWS, "int8", 32, True, "block_digits"),
    "tiles": Case(ROWS, numerics.nf4, None, False, "tiles"),
    "tiles in blocks": Case(TURNED, "uint8", 32, True, "tiles"),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def with_scale(q, scale):
    return jqx.QTensor(
        q.values, scale, q.zero_point, qtype=q.qtype, blocks=q.blocks, layout=q.layout
    )


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.many
@cases
def test_derivatives_are_near_those_of_the_real_values(case):
    """Sums over columns, rows or products, and 12 roundings around them."""
    w = case.weight()
    x, dx, g = normal(0, (3, K)), normal(1, (3, K)), normal(2, (3, N))
    dscale = normal(3, w.scale.shape)

    def f(x, scale):
        return jqx.dot_general(x, with_scale(w, scale), case.layout.numbers)

    assert chosen(f, x, w.scale) == [(case.name, "convert")]

    @jax.jit
    def derivatives(x, scale):
        y, pull = jax.vjp(f, x, scale)
        return f(x, scale), y, pull(g), jax.jvp(f, (x, scale), (dx, dscale))

    y, value, (of_x, of_scale), (primal, tangent) = derivatives(x, w.scale)
    np.testing.assert_array_equal(value, y)
    np.testing.assert_array_equal(primal, y)
    axis = case.layout.numbers[0][1][0]
    real, number, spread = (
        np.moveaxis(v, axis, 0)
        for v in (real_values(w), np.subtract(*code_numbers(w)), scales(with_scale(w, dscale)))
    )
    x, dx, g = (as_float64(v) for v in (x, dx, g))
    size = np.abs
    assert_near(of_x, g @ real.T, gamma(N + 12) * (size(g) @ size(real).T))
    shape = np.moveaxis(np.empty(w.scale.shape), axis, 0).shape
    expected = block_sums((x.T @ g) * number, shape)
    bound = block_sums((size(x).T @ size(g)) * size(number), shape)
    assert_near(np.moveaxis(of_scale, axis, 0), expected, gamma(K + 3 + 12) * bound)
    expected = dx @ real + x @ (number * spread)
    bound = size(dx) @ size(real) + size(x) @ size(number * spread)
    assert_near(tangent, expected, gamma(2 * K + 12) * bound)


def assert_near(result, expected, bound):
    assert result.shape == expected.shape and result.dtype == jnp.float32
    assert np.all(np.abs(as_float64(result) - expected) <= bound)


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
    lhs = weight("int8", Layout((), (5, K), TURNED.numbers), zero_point=True)
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
    """JAX says that integers have no derivative, and what to pass; `allow_int` gives empty ones."""
    x, w = jnp.ones((3, K)), WEIGHTS["digits"]
    loss = lambda w: jqx.matmul(x, w).sum()  # noqa: E731
    with pytest.raises(TypeError, match=r"real- or complex-valued .* int8.* set allow_int"):
        jax.grad(loss)(w)
    gradient = jax.jit(jax.grad(loss, allow_int=True))(w)
    assert gradient.values.dtype == jax.dtypes.float0
    numbers, _ = code_numbers(w)
    assert_floats(gradient.scale, 3 * numbers.sum(0, keepdims=True), np.float32)


@pytest.mark.parametrize("name", ["digits", "block_digits"])
def test_sixteen_bit_gradients_have_the_dtypes_of_what_they_are_of(name):
    w = WEIGHTS[name].astype(jnp.bfloat16)
    x = jnp.ones((3, K), jnp.bfloat16)
    loss = lambda x, scale: (  # noqa: E731
        jqx.matmul(x, jqx.QTensor(w.values, scale, qtype=w.qtype, dtype=w.dtype))
        .astype(jnp.float32)
        .sum()
    )
    of_x, of_scale = jax.eval_shape(jax.grad(loss, (0, 1)), x, w.scale)
    assert (of_x.shape, of_x.dtype) == (x.shape, x.dtype)
    assert (of_scale.shape, of_scale.dtype) == (w.scale.shape, w.scale.dtype)
