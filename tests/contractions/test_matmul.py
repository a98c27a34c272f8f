"""`matmul` and `@`: NumPy's broadcasting, with either operand quantized."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..arrays import on_device
from ..oracles.contractions import MATRICES, Layout, chosen, dots, exact_tensor, small_integers
from ..oracles.numerics import assert_floats
from ..oracles.refusals import assert_refused
from ..tensor.tensors import reals, tensor
from .blocks import weight

LEFT = [(4,), (3, 4), (1, 4), (2, 3, 4), (1, 3, 4), (5, 1, 3, 4), (5, 2, 1, 4)]
RIGHT = [(4,), (4, 6), (4, 1), (2, 4, 6), (1, 4, 6), (5, 2, 4, 6), (1, 1, 4, 6), (2, 4, 1)]
SHAPES = list(itertools.product(LEFT, RIGHT))
product = jax.jit(jqx.matmul)


def shapes_only(shape, quantized, zero_point=False):
    """The shapes and dtypes of an operand."""
    if not quantized:
        return jax.ShapeDtypeStruct(shape, jnp.float32)
    codes = jax.ShapeDtypeStruct(shape, jnp.int8)
    scale = jax.ShapeDtypeStruct((1,) * len(shape), jnp.float32)
    zero = jax.ShapeDtypeStruct(scale.shape, jnp.int8) if zero_point else None
    return jax.eval_shape(lambda *leaves: jqx.QTensor(*leaves, qtype=jnp.int8), codes, scale, zero)


@pytest.mark.parametrize("left", LEFT, ids=str)
def test_the_shape_is_that_of_numpy_for_all_ranks(left):
    for right in RIGHT:
        expected = np.matmul(np.zeros(left), np.zeros(right)).shape
        for sides in [(True, True), (True, False), (False, True), (False, False)]:
            if not any(sides) and len(left) != len(right):
                continue  # jnp.matmul, to which they go, promotes ranks: an error in these tests
            pair = [shapes_only(s, q, q) for s, q in zip((left, right), sides, strict=True)]
            assert jax.eval_shape(jqx.matmul, *pair).shape == expected, (right, sides)


def last_kept(shape, side):
    """The axis of a matrix that its product keeps."""
    return () if len(shape) == 1 else (len(shape) - (2 if side == "left" else 1),)


BROADCAST = [
    ((4,), (4,)),
    ((4,), (4, 6)),
    ((3, 4), (4,)),
    ((4,), (2, 4, 6)),
    ((2, 3, 4), (4,)),
    ((3, 4), (2, 4, 6)),
    ((2, 3, 4), (4, 6)),
    ((2, 3, 4), (1, 4, 6)),
    ((5, 1, 3, 4), (2, 4, 6)),
    ((0, 3, 4), (1, 4, 6)),
]


@pytest.mark.many
@pytest.mark.parametrize("left, right", BROADCAST, ids=str)
def test_the_result_is_that_of_the_real_matrices(left, right):
    """Integer and weight-only, with a scale and a zero point for each row or column."""
    rng = np.random.default_rng(len(left) + 5 * len(right))
    lhs = exact_tensor(rng, "uint8", left, last_kept(left, "left"))
    rhs = exact_tensor(rng, "int4", right, last_kept(right, "right"))
    x, y = (on_device(small_integers(rng, shape)) for shape in (left, right))
    for pair in [(lhs, rhs), (x, rhs), (lhs, y)]:
        expected = np.matmul(reals(pair[0]), reals(pair[1]))
        assert_floats(product(*pair), expected, np.float32)


@pytest.mark.parametrize("left, right", [((2, 3, 4), (2, 4, 6)), ((5, 1, 3, 4), (2, 4, 6))])
def test_every_leading_axis_may_have_its_own_scale(left, right):
    rng = np.random.default_rng(0)
    lhs = exact_tensor(rng, "int8", left, range(len(left) - 1))
    rhs = exact_tensor(rng, "uint4", right, (0, 2))
    x = on_device(small_integers(rng, left))
    for operand in (lhs, x):
        assert_floats(product(operand, rhs), np.matmul(reals(operand), reals(rhs)), np.float32)


def test_a_matrix_on_the_right_of_a_batch_is_not_repeated():
    """The leading axes stay free axes of one dot, on CPU and elsewhere: nothing is broadcast."""
    x, w = jnp.zeros((8, 3, 4)), tensor(np.zeros((4, 6)), "int8")
    found = [[v.aval.shape for v in dot.invars] for dot in dots(jqx.matmul, x, w)]
    assert found == [[(8, 3, 4), (4, 6)]] * 2


def test_leading_axes_beside_a_large_matrix_are_rows():
    """Blocks of 64 take up to 8 rows as digits."""
    w = jax.eval_shape(lambda: weight("int8", Layout((), (128, 160), MATRICES), 64))
    for shape, name in [((2, 4, 128), "block_digits"), ((3, 3, 128), "tiles")]:
        ((cpu, _),) = chosen(jqx.matmul, jax.ShapeDtypeStruct(shape, jnp.float32), w)
        assert cpu == name


def test_a_shared_scale_is_not_repeated_for_a_batch():
    """The codes of the smaller operand are; every other array stays as small as it was."""
    lhs, rhs = tensor(np.zeros((3, 4)), "int8"), tensor(np.zeros((9, 4, 6)), "int8")
    jaxpr = jax.make_jaxpr(jqx.matmul)(lhs, rhs)
    made = [v.aval for eqn in jaxpr.eqns for v in eqn.outvars if v.aval.dtype == jnp.float32]
    assert {aval.size for aval in made} <= {1, 9 * 3 * 6}


def test_the_operator_takes_a_qtensor_on_either_side():
    rng = np.random.default_rng(1)
    q, r = exact_tensor(rng, "int8", (3, 4), (0,)), exact_tensor(rng, "uint8", (4, 5), (1,))
    x, y = small_integers(rng, (2, 4)), small_integers(rng, (4, 2))
    for result, expected in [
        (q @ r, reals(q) @ reals(r)),
        (r.T @ q.T, (reals(q) @ reals(r)).T),
        (q @ y, reals(q) @ y),
        (q @ on_device(y), reals(q) @ y),
        (jax.jit(lambda q, y: q @ y)(q, y), reals(q) @ y),
        (x @ r, x @ reals(r)),
        (on_device(x) @ r, x @ reals(r)),
        (jax.jit(lambda x, r: x @ r)(x, r), x @ reals(r)),
    ]:
        assert isinstance(result, jax.Array)
        assert_floats(result, expected, np.float32)


def test_numpy_on_the_left_of_a_stack_is_one_product_not_one_for_each_element():
    """NumPy would otherwise take the QTensor for a scalar object."""
    rng = np.random.default_rng(2)
    w = exact_tensor(rng, "int8", (2, 4, 5), (0, 2))
    x = small_integers(rng, (2, 3, 4))
    assert_floats(x @ w, x @ reals(w), np.float32)


def test_two_arrays_are_left_to_jnp_matmul():
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(2, 3, 4)).astype("f"), rng.normal(size=(2, 4, 5)).astype("f")
    np.testing.assert_array_equal(jqx.matmul(x, y), jnp.matmul(x, y))
    narrow = jqx.matmul(x, y, preferred_element_type=jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16


@pytest.mark.parametrize("left, right", [((3, 4), (4, 5)), ((3, 4), (2, 4, 5))], ids=str)
def test_preferred_element_type_is_the_dtype_of_the_result(left, right):
    f = functools.partial(jqx.matmul, preferred_element_type=jnp.bfloat16)
    for sides in [(True, True), (True, False), (False, True)]:
        pair = [shapes_only(s, q) for s, q in zip((left, right), sides, strict=True)]
        assert jax.eval_shape(f, *pair).dtype == jnp.bfloat16


def test_an_operand_without_axes_is_refused():
    q, number = tensor(np.zeros((2, 2)), "int8"), jnp.float32(2)
    for pair in [(q, number), (number, q)]:
        assert_refused(jqx.matmul, pair, ValueError, "matmul", "no axis", "()", "(2, 2)")


def test_leading_axes_that_do_not_broadcast_are_refused():
    q = tensor(np.zeros((3, 4, 5)), "int8")
    for x in (jnp.zeros((2, 3, 4)), tensor(np.zeros((2, 3, 4)), "int8")):
        with pytest.raises(ValueError):
            jqx.matmul(x, q)


def test_sizes_that_do_not_fit_are_refused():
    q = tensor(np.zeros((4, 5)), "int8")
    for x in (jnp.zeros((3,)), jnp.zeros((3, 6)), tensor(np.zeros((3, 6)), "int8")):
        with pytest.raises(TypeError):
            jqx.matmul(x, q)


@pytest.mark.parametrize("left, right", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5))], ids=str)
def test_a_scale_along_the_contracted_axis_is_refused(left, right):
    rng = np.random.default_rng(4)
    w = exact_tensor(rng, "int8", right, (0,))
    assert_refused(jqx.matmul, (jnp.ones(left), w), ValueError, "dot_general", "`rhs`", "(4, 1)")
