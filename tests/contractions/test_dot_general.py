"""`dot_general` on every layout: integer, weight-only on either side, and its types and refusals.

Most values here are small integers with powers of two as scales. float32 holds every sum of them
exactly, in any order, so results are compared bit by bit.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jqx

from ..arrays import on_device
from ..oracles.contractions import (
    LAYOUTS,
    MATRICES,
    NEGATIVE,
    contraction,
    dots,
    dtypes,
    equations_of,
    exact_tensor,
    gamma,
    small_integers,
)
from ..oracles.numerics import as_float64, assert_floats, nearest
from ..oracles.refusals import assert_refused
from ..tensor.tensors import differences, kept, random_codes, reals, tensor

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
multiply = functools.partial(jqx.dot_general, dimension_numbers=MATRICES)


@functools.partial(jax.jit, static_argnames=("numbers", "dtype"))
def contract(lhs, rhs, numbers, dtype=None):
    return jqx.dot_general(lhs, rhs, numbers, preferred_element_type=dtype)


def kept_axes(shape, contracting):
    return [i for i in range(len(shape)) if i not in {axis % len(shape) for axis in contracting}]


def operands(layout, formats, zero_point=True, own_scales=True):
    """Operands of a layout; a format of `None` stands for a float array."""
    *shapes, (contracting, _) = layout
    rng = np.random.default_rng(len(shapes[0]) + 7 * len(shapes[1]))
    for shape, qtype, contracted in zip(shapes, formats, contracting, strict=True):
        if qtype is None:
            yield on_device(small_integers(rng, shape))
        else:
            axes = kept_axes(shape, contracted) if own_scales else ()
            yield exact_tensor(rng, qtype, shape, axes, zero_point)


FORMATS = {
    "integer": ("uint8", "int4"),
    "weight on the right": (None, "uint4"),
    "weight on the left": ("uint8", None),
}


@pytest.mark.many
@layouts
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_the_result_is_that_of_the_real_operands(layout, formats):
    """With zero points, and a scale for each index of every axis that is kept."""
    lhs, rhs = operands(layout, formats)
    expected = contraction(reals(lhs), reals(rhs), layout[2])
    assert_floats(contract(lhs, rhs, layout[2]), expected, np.float32)


@pytest.mark.parametrize("zero_point, own_scales", [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_zero_points_and_scales_may_be_left_out(formats, zero_point, own_scales):
    layout = LAYOUTS["batch axes anywhere"]
    lhs, rhs = operands(layout, formats, zero_point, own_scales)
    expected = contraction(reals(lhs), reals(rhs), layout[2])
    assert_floats(contract(lhs, rhs, layout[2]), expected, np.float32)


def test_one_zero_point_may_serve_many_scales():
    rng = np.random.default_rng(0)
    w = exact_tensor(rng, "uint8", (4, 5), (1,), zero_point=False)
    w = jqx.QTensor(w.values, w.scale, jnp.full((1, 1), 7, jnp.uint8), qtype=jnp.uint8)
    for x in (on_device(small_integers(rng, (3, 4))), exact_tensor(rng, "int8", (3, 4), (0,))):
        expected = contraction(reals(x), reals(w), MATRICES)
        assert_floats(contract(x, w, MATRICES), expected, np.float32)


@pytest.mark.many
@layouts
def test_operands_with_swapped_axes_give_the_same(layout):
    """Whatever their last two axes are: contracted, batched, or both of them kept."""
    lhs, rhs = operands(layout, FORMATS["integer"], own_scales=False)
    packed = [q if q.ndim < 2 else jqx.pack_for(q, "cpu") for q in (lhs, rhs)]
    assert all(q.layout.swapped for q in packed if q.ndim > 1)
    expected = contraction(reals(lhs), reals(rhs), layout.numbers)
    assert_floats(contract(*packed, layout.numbers), expected, np.float32)


@pytest.mark.parametrize("layout", [LAYOUTS[n] for n in LAYOUTS if n != NEGATIVE])
def test_the_shape_is_that_of_lax_dot_general(layout):
    """Which has no negative axes: those are ours."""
    *shapes, numbers = layout
    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    expected = jax.eval_shape(
        functools.partial(lax.dot_general, dimension_numbers=numbers), *floats
    )
    for formats in FORMATS.values():
        lhs, rhs = operands(layout, formats)
        f = functools.partial(jqx.dot_general, dimension_numbers=numbers)
        result = jax.eval_shape(f, lhs, rhs)
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_eager_and_vmapped_contractions_are_those_of_the_jitted_one(formats):
    layout = LAYOUTS["batch"]
    lhs, rhs = operands(layout, formats)
    expected = contraction(reals(lhs), reals(rhs), layout[2])
    assert_floats(jqx.dot_general(lhs, rhs, layout[2]), expected, np.float32)
    mapped = jax.jit(jax.vmap(multiply))(lhs, rhs)
    assert_floats(mapped, expected, np.float32)
    if isinstance(rhs, jqx.QTensor):
        first = jax.vmap(multiply, in_axes=(0, None))
        expected = contraction(reals(lhs), reals(rhs[0]), (((2,), (0,)), ((), ())))
        assert_floats(jax.jit(first)(lhs, rhs[0]), expected, np.float32)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("qtype, zero_point", [("int8", False), ("uint8", True), ("int16", True)])
def test_a_weight_only_product_is_as_near_as_float32_allows(side, qtype, zero_point):
    """Sums of 33 products, and of 33 activations for the zero point; 4 more roundings after.

    Each rounds relative to the sum of magnitudes, |x| (|code| + |zero point|) scale: Higham (3.5).
    """
    rng = np.random.default_rng([len(side), len(qtype), zero_point])
    shape, axes = ((33, 6), (1,)) if side == "right" else ((6, 33), (0,))
    scale = rng.uniform(0.001, 0.1, kept(shape, axes))
    zero = random_codes(rng, qtype, scale.shape) if zero_point else None
    w = tensor(random_codes(rng, qtype, shape), qtype, scale, zero)
    x = rng.normal(size=(7, 33) if side == "right" else (33, 7)).astype(np.float32)
    codes = np.abs(as_float64(w.values)) + (0 if zero is None else np.abs(zero))
    magnitude = codes * as_float64(w.scale)
    order = (lambda a, b: (a, b)) if side == "right" else (lambda a, b: (b, a))
    y = as_float64(contract(*order(on_device(x), w), MATRICES))
    expected = contraction(*order(as_float64(x), reals(w)), MATRICES)
    allowed = gamma(33 + 4) * contraction(*order(np.abs(as_float64(x)), magnitude), MATRICES)
    assert np.all(np.abs(y - expected) <= allowed)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("side", ["left", "right"])
def test_sixteen_bit_activations_accumulate_in_float32_and_round_once(dtype, side):
    """Integers: the float32 sum is exact, so that the result is its nearest 16-bit float."""
    rng = np.random.default_rng(1)
    shape, axes = ((9, 5), (1,)) if side == "right" else ((5, 9), (0,))
    w = exact_tensor(rng, "uint8", shape, axes, dtype=dtype)
    x = small_integers(rng, (3, 9) if side == "right" else (9, 3))
    pair = (on_device(x, dtype), w) if side == "right" else (w, on_device(x, dtype))
    expected = contraction(reals(pair[0]), reals(pair[1]), MATRICES)
    assert np.any(nearest(expected, dtype) != expected), "no rounding to be seen"
    assert_floats(contract(*pair, MATRICES), nearest(expected, dtype), dtype)
    assert_floats(contract(*pair, MATRICES, jnp.float32), expected, np.float32)


@pytest.mark.parametrize("qtype", ["int2", "int4", "int8", "uint8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weight_only_contracts_codes_in_the_dtype_of_the_activations(qtype, dtype):
    """One dot, of the codes themselves: the scale is not multiplied into the weight first. On CPU
    one more, of float32, and of codes times a power of two.
    """
    w = tensor(np.zeros((4, 5)), qtype, np.ones((1, 5)), np.zeros((1, 1)), dtype=dtype)
    x = jnp.zeros((3, 4), dtype)
    for pair, transposed in [((x, w), False), ((w.T, x.T), True)]:
        kinds = [dtypes((*dot.invars, *dot.outvars)) for dot in dots(jqx.matmul, *pair)]
        expected = [[of, of, "float32"] for of in (dtype, "float32")]
        assert sorted(kinds) == sorted(expected)
        weight = (5, 4) if transposed else (4, 5)
        made = [e for e in equations_of(jqx.matmul, *pair) if e.outvars[0].aval.shape == weight]
        names = [e.primitive.name for e in made if e.outvars[0].aval.dtype == jnp.dtype(dtype)]
        on_cpu = ["sub", "mul"] if dtype == "float32" else []
        assert sorted({*names, *on_cpu}) == sorted({"convert_element_type", *on_cpu})


def test_codes_wider_than_bytes_are_contracted_in_float32():
    w = tensor([[1001], [-3]], "int16", dtype=jnp.bfloat16)
    y = jqx.matmul(jnp.ones((1, 2), jnp.bfloat16), w, preferred_element_type=jnp.float32)
    assert_floats(y, np.array([[998]]), np.float32)


@pytest.mark.parametrize("left", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("right", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_the_result_has_the_promoted_dtype_of_the_real_operands(formats, left, right):
    shapes = ((3, 4), (4, 5))
    pair = [
        jnp.zeros(shape, dtype)
        if qtype is None
        else tensor(np.zeros(shape), qtype, dtype=jnp.dtype(dtype))
        for shape, qtype, dtype in zip(shapes, formats, (left, right), strict=True)
    ]

    with jax.numpy_dtype_promotion("standard"):
        assert jax.eval_shape(multiply, *pair).dtype == jnp.promote_types(left, right)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_preferred_element_type_is_the_dtype_of_the_result(formats, dtype):
    lhs, rhs = operands(LAYOUTS["matrices"], formats)
    expected = contraction(reals(lhs), reals(rhs), MATRICES)
    result = contract(lhs, rhs, MATRICES, jnp.dtype(dtype))
    assert_floats(result, nearest(expected, dtype), dtype)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_two_arrays_are_left_to_lax(dtype):
    rng = np.random.default_rng(2)
    lhs, rhs = (rng.integers(-8, 8, shape).astype(dtype) for shape in ((3, 4), (4, 5)))
    options = {"precision": lax.Precision.HIGHEST, "preferred_element_type": None}
    if dtype == "int8":
        options["preferred_element_type"] = jnp.int32
    result = jqx.dot_general(lhs, rhs, MATRICES, **options)
    expected = lax.dot_general(lhs, rhs, MATRICES, **options)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)


def test_precision_reaches_the_contraction_of_floats():
    x, w = jnp.ones((3, 4)), tensor(np.zeros((4, 5)), "int8")
    highest = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    for dot in dots(functools.partial(jqx.matmul, precision="highest"), x, w):
        assert dot.params["precision"] == highest


@pytest.mark.parametrize("axes", [(0,), (0, 1)])
@pytest.mark.parametrize("other", ["float32", "int8"])
def test_a_scale_that_varies_along_a_contracted_axis_is_refused(other, axes):
    rng = np.random.default_rng(3)
    w = exact_tensor(rng, "int8", (4, 5), axes, zero_point=False)
    x = jnp.ones((3, 4)) if other == "float32" else tensor(np.ones((3, 4)), "int8")

    facts = ("contracted axis", "quantize with jqx.per_")
    facts_right = (*facts, "`rhs`", "(4, 5)", f"scale {w.scale.shape}")
    facts_left = (*facts, "`lhs`", "(5, 4)", f"scale {w.T.scale.shape}")
    assert_refused(multiply, (x, w), ValueError, "dot_general", *facts_right)
    assert_refused(multiply, (w.T, x.T), ValueError, "dot_general", *facts_left)


def test_a_scale_along_a_contracted_axis_of_size_1_is_accepted():
    w = jqx.QTensor.quantize(jnp.ones((1, 5)), jqx.QSpec(jnp.int8, jqx.per_axis(0, 1)))
    x = jqx.QTensor.quantize(jnp.ones((3, 1)), jqx.QSpec(jnp.int8, jqx.per_axis(0, 1)))
    assert_floats(contract(x, w, MATRICES), nearest(reals(x) * reals(w), np.float32), np.float32)


def test_a_batch_axis_may_have_its_own_scale():
    rng = np.random.default_rng(4)
    lhs = exact_tensor(rng, "int8", (2, 3, 4), (0,))
    rhs = exact_tensor(rng, "uint8", (2, 4, 5), (0,))
    numbers = LAYOUTS["batch"][2]
    expected = contraction(reals(lhs), reals(rhs), numbers)
    assert_floats(contract(lhs, rhs, numbers), expected, np.float32)


@pytest.mark.parametrize("dtype", ["int8", "int32", "bool"])
def test_an_integer_array_beside_a_qtensor_is_refused(dtype):
    """It is not known what its integers stand for."""
    w, x = tensor(np.zeros((4, 4)), "int8"), jnp.zeros((4, 4), dtype)

    assert_refused(multiply, (x, w), TypeError, "dot_general", "`lhs`", dtype, "floating point")
    assert_refused(multiply, (w, x), TypeError, "dot_general", "`rhs`", dtype, "floating point")


@pytest.mark.parametrize("dtype, fact", [(jnp.int32, "int32"), ("int9", "int9")])
def test_a_preferred_element_type_that_is_no_float_is_refused(dtype, fact):
    w = tensor(np.zeros((4, 4)), "int8")

    f = functools.partial(multiply, preferred_element_type=dtype)
    for x in (jnp.zeros((4, 4)), w):
        assert_refused(f, (x, w), TypeError, "dot_general", "preferred_element_type", fact)


def test_sizes_that_do_not_fit_are_refused():
    w = tensor(np.zeros((4, 5)), "int8")
    for x in (jnp.zeros((3, 6)), tensor(np.zeros((3, 6)), "int8")):
        with pytest.raises(TypeError, match="same shape"):
            jqx.dot_general(x, w, MATRICES)


def test_nan_and_infinite_activations_spoil_their_own_row_alone():
    w = tensor([[1, 2], [3, -4]], "int8", [[1, 2]], [[0, 1]])
    x = jnp.array([[1.0, 1], [np.nan, 1], [np.inf, 1]])
    y = np.asarray(contract(x, w, MATRICES))
    np.testing.assert_array_equal(y[0], [4, -8])
    assert not np.isfinite(y[1:]).any()


def loss(numbers, cotangent, qtype, x, codes, scale, zero):
    w = jqx.QTensor(codes, scale, zero, qtype=qtype, dtype=x.dtype)
    y = jqx.dot_general(x, w, numbers)
    return (y.astype(jnp.float32) * cotangent).sum()


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_a_weight_only_product_is_that_of_the_dequantized_one(dtype, zero_point):
    """Small integers and powers of two: every sum is exact, also the cotangents in bfloat16."""
    rng = np.random.default_rng(5)
    x = rng.integers(-2, 3, (3, 4)).astype(np.float32)
    w = exact_tensor(rng, "int4", (4, 2), (1,), zero_point)
    scale = np.float32([[0.5, 2]])
    g = rng.integers(-1, 2, (3, 2)).astype(np.float32)
    gradient = jax.grad(functools.partial(loss, MATRICES, g, jnp.int4), argnums=(0, 2))
    args = (on_device(x, dtype), w.values, scale, w.zero_point)
    d = differences(w)
    dx, dscale = g @ (d * scale).T, (g * (x @ d)).sum(0, keepdims=True)
    for form in (gradient, jax.jit(gradient)):
        of_x, of_scale = form(*args)
        assert_floats(of_x, dx, dtype)
        assert_floats(of_scale, dscale, np.float32)


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_are_as_near_the_float64_ones_as_float32_allows(side):
    """Contractions over 29 rows, 33 terms or 6 columns, and 6 roundings around them."""
    rng = np.random.default_rng(6)
    codes, zero = random_codes(rng, "uint8", (33, 6)), random_codes(rng, "uint8", (1, 6))
    x, g = (rng.normal(size=shape).astype(np.float32) for shape in ((29, 33), (29, 6)))
    scale = rng.uniform(0.001, 0.1, (1, 6)).astype(np.float32)
    as_right = side == "right"

    def f(x, scale):
        q = jqx.QTensor(
            on_device(codes, jnp.uint8), scale, on_device(zero, jnp.uint8), qtype=jnp.uint8
        )
        y = jqx.matmul(x, q) if as_right else jqx.matmul(q.T, x.T).T
        return (y * g).sum()

    of_x, of_scale = jax.jit(jax.grad(f, (0, 1)))(x, scale)
    x, g, scale = (as_float64(v) for v in (x, g, scale))
    difference, magnitude = codes - zero, codes + zero
    dx, dscale = (g * scale) @ difference.T, (g * (x @ difference)).sum(0, keepdims=True)
    sizes = np.abs(g * scale) @ magnitude.T, (np.abs(g) * (np.abs(x) @ magnitude)).sum(0)
    assert np.all(np.abs(of_x - dx) <= gamma(6 + 6) * sizes[0])
    assert np.all(np.abs(of_scale - dscale) <= gamma(29 + 33 + 6) * sizes[1])


def test_a_qtensor_is_differentiated_as_a_whole():
    """The gradient has its structure: real for the scale, empty (float0) for integers."""
    w = tensor([[1, 2], [3, -4]], "int8", [[1, 2]], [[0, 1]])
    x = jnp.array([[1.0, 10]])
    gradient = jax.grad(lambda w: jqx.matmul(x, w).sum(), allow_int=True)(w)
    assert jax.tree.structure(gradient) == jax.tree.structure(w)
    assert_floats(gradient.scale, np.array([[31, -49]]), np.float32)
    assert gradient.values.dtype == gradient.zero_point.dtype == jax.dtypes.float0


def test_a_float64_product_is_computed_in_float64():
    with jax.enable_x64(True):
        w = tensor([[1], [-1]], "int8", dtype=jnp.float64)
        x = jnp.array([[1 + 2.0**-40, 1]])
        assert_floats(jqx.matmul(x, w), np.array([[2.0**-40]]), np.float64)


def test_ml_dtypes_arrays_are_operands_as_jax_arrays_are():
    w = tensor([[1], [-1]], "int8", dtype=jnp.bfloat16)
    x = np.array([[3, 1]], ml_dtypes.bfloat16)
    assert_floats(jqx.dot_general(x, w, MATRICES), np.array([[2]]), "bfloat16")


@pytest.mark.parametrize("left", [(3, 0), (0, 4), (0, 0)])
def test_a_sum_of_nothing_is_zero_whoever_shares_the_scales(left):
    """Of an axis without elements there is no scale either."""
    k = left[1]
    x, q = jnp.ones(left), jqx.QTensor.zeros((k, 5), jqx.QSpec(jnp.int8, jqx.per_axis(1)))
    rows = jqx.QTensor.zeros(left, jqx.QSpec(jnp.int8, jqx.per_axis(0)))
    empty = jqx.QTensor.zeros((k, 0), jqx.QSpec(jnp.int8, jqx.per_axis(1)))
    for y in (jqx.matmul(x, q), jqx.matmul(rows, q), jqx.einsum("ik,kn->in", rows, q)):
        np.testing.assert_array_equal(y, np.zeros((left[0], 5), np.float32))
    assert jqx.matmul(x, empty).shape == jqx.matmul(rows, empty).shape == (left[0], 0)
    y = jqx.ragged_dot(x, q[None], jnp.array([left[0]]))
    np.testing.assert_array_equal(y, np.zeros((left[0], 5), np.float32))
