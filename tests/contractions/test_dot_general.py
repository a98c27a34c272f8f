"""`dot_general`, `matmul` and `@`: dimension numbers and broadcasting, dtypes, values that are not
finite, and what is refused.

Most values here are small integers with powers of two as scales. float32 holds every sum of them
exactly, in any order, so results are compared bit by bit.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jqx
from jqx import numerics
from jqx._src.contractions.problem import Dimensions

from ..arrays import on_device
from ..oracles.contractions import (
    LARGE,
    LAYOUTS,
    MATRICES,
    Layout,
    chosen,
    contraction,
    dots,
    dtypes,
    equations_of,
    exact_tensor,
    small_integers,
)
from ..oracles.numerics import as_float64, assert_floats, nearest
from ..oracles.refusals import assert_refused
from ..tensor.tensors import reals, tensor
from .blocks import SIDES, pair_of, real_values, weight

multiply = functools.partial(jqx.dot_general, dimension_numbers=MATRICES)


@functools.partial(jax.jit, static_argnames=("numbers", "dtype"))
def contract(lhs, rhs, numbers, dtype=None):
    return jqx.dot_general(lhs, rhs, numbers, preferred_element_type=dtype)


product = jax.jit(jqx.matmul)
sides = pytest.mark.parametrize("formats", SIDES.values(), ids=SIDES)


@st.composite
def numbered(draw):
    """Shapes and dimension numbers: each axis is batched, contracted or free, in any order.

    All sizes differ, or two axes could be mistaken for each other unseen.
    """
    sizes = list(draw(st.permutations([1, 2, 3, 4, 5])))
    batch, contracting = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    shared = [sizes.pop() for _ in range(batch + contracting)]
    split = draw(st.integers(0, len(sizes)))
    sides = []
    for free in (sizes[:split], sizes[split:]):
        shape = draw(st.permutations([*shared, *free]))
        sides.append((tuple(shape), [shape.index(size) for size in shared]))
    (left, left_axes), (right, right_axes) = sides
    numbers = (
        (tuple(left_axes[batch:]), tuple(right_axes[batch:])),
        (tuple(left_axes[:batch]), tuple(right_axes[:batch])),
    )
    return left, right, numbers


NUMBERED = st.tuples(
    numbered(), st.sampled_from([("int4", "uint8"), (None, "uint4"), ("int8", None)])
)


@settings(max_examples=4, deadline=None)
@given(st.lists(NUMBERED, min_size=10, max_size=10))
def test_every_axis_that_is_kept_may_have_its_own_scale_and_zero_point(cases):
    """Small integers and powers of two: the sums are exact in any order. In one program."""
    layouts = [Layout(*case) for case, _ in cases]
    pairs = [pair_of(layout, cases[i][1]) for i, layout in enumerate(layouts)]

    @jax.jit
    def run(pairs):
        return [
            jqx.dot_general(*pair, layout.numbers)
            for pair, layout in zip(pairs, layouts, strict=True)
        ]

    for pair, layout, result in zip(pairs, layouts, run(pairs), strict=True):
        assert_floats(result, contraction(*map(reals, pair), layout.numbers), np.float32)


def test_dimension_numbers_may_be_lists_and_numpy_integers():
    rng = np.random.default_rng(2)
    lhs, rhs = exact_tensor(rng, "int8", (3, 4), (0,)), exact_tensor(rng, "int8", (4, 5), (1,))
    expected = jqx.dot_general(lhs, rhs, (((1,), (0,)), ((), ())))
    for numbers in (([[1], [0]], [[], []]), ((np.array([1]), [np.int64(0)]), ((), ()))):
        np.testing.assert_array_equal(jqx.dot_general(lhs, rhs, numbers), expected)


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_out_of_range_is_refused(axis):
    q = jqx.QTensor.quantize(jnp.ones((3, 4)), jqx.QSpec(jnp.int8))
    with pytest.raises(TypeError, match=r"axis .* of `dimension_numbers` is out of range"):
        jqx.dot_general(jnp.ones((3, 4)), q, (((axis,), (1,)), ((), ())))


@st.composite
def any_numbers(draw):
    """Shapes of few sizes, and dimension numbers that seldom fit."""
    shapes = [tuple(draw(st.lists(st.integers(0, 2), max_size=3))) for _ in range(2)]
    lc, lb, rc, rb = (
        draw(st.lists(st.integers(0, len(shape) - 1), max_size=2)) if shape else []
        for shape in shapes
        for _ in range(2)
    )
    return *shapes, ((tuple(lc), tuple(rc)), (tuple(lb), tuple(rb)))


@settings(max_examples=200, deadline=None)
@given(any_numbers())
def test_shapes_fit_where_lax_says_so_and_the_result_has_the_shape_that_lax_says(case):
    left, right, numbers = case
    dimensions = Dimensions.of(numbers, len(left), len(right))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (left, right)]
    try:
        expected = jax.eval_shape(lambda a, b: jax.lax.dot_general(a, b, numbers), *shapes).shape
    except TypeError:
        expected = None
    assert dimensions.fits(left, right) == (expected is not None)
    if expected is not None:
        assert dimensions.result_shape(left, right) == expected


def test_shapes_that_fit_are_not_evaluated(monkeypatch):
    q = jqx.QTensor.quantize(jnp.ones((4, 2)), jqx.QSpec(jnp.int8))
    monkeypatch.setattr(jax, "eval_shape", lambda *args: 1 / 0)
    jax.make_jaxpr(jqx.matmul)(jnp.ones((3, 4)), q)


LEFT = [(4,), (3, 4), (1, 4), (2, 3, 4), (1, 3, 4), (5, 1, 3, 4), (5, 2, 1, 4)]


RIGHT = [(4,), (4, 6), (4, 1), (2, 4, 6), (1, 4, 6), (5, 2, 4, 6), (1, 1, 4, 6), (2, 4, 1)]


def shapes_only(shape, quantized, zero_point=False):
    """The shapes and dtypes of an operand."""
    if not quantized:
        return jax.ShapeDtypeStruct(shape, jnp.float32)
    codes = jax.ShapeDtypeStruct(shape, jnp.int8)
    scale = jax.ShapeDtypeStruct((1,) * len(shape), jnp.float32)
    zero = jax.ShapeDtypeStruct(scale.shape, jnp.int8) if zero_point else None
    return jax.eval_shape(lambda *leaves: jqx.QTensor(*leaves, qtype=jnp.int8), codes, scale, zero)


@pytest.mark.parametrize("left", LEFT, ids=str)
def test_the_shape_of_matmul_is_that_of_numpy_for_all_ranks(left):
    for right in RIGHT:
        expected = np.matmul(np.zeros(left), np.zeros(right)).shape
        for is_quantized in itertools.product((True, False), repeat=2):
            if not any(is_quantized) and len(left) != len(right):
                continue  # jnp.matmul, to which they go, promotes ranks: an error in these tests
            pair = [shapes_only(*side) for side in zip((left, right), is_quantized, strict=True)]
            assert jax.eval_shape(jqx.matmul, *pair).shape == expected, (right, is_quantized)


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
def test_matmul_is_that_of_the_real_matrices(left, right):
    """Integers and floats, with a scale and a zero point for each row or column."""
    rng = np.random.default_rng(len(left) + 5 * len(right))
    lhs = exact_tensor(rng, "uint8", left, last_kept(left, "left"))
    rhs = exact_tensor(rng, "int4", right, last_kept(right, "right"))
    x, y = (on_device(small_integers(rng, shape)) for shape in (left, right))
    for pair in [(lhs, rhs), (x, rhs), (lhs, y)]:
        assert_floats(product(*pair), np.matmul(*map(reals, pair)), np.float32)


@pytest.mark.parametrize("left, right", [((2, 3, 4), (2, 4, 6)), ((5, 1, 3, 4), (2, 4, 6))])
def test_every_leading_axis_may_have_its_own_scale(left, right):
    rng = np.random.default_rng(0)
    lhs = exact_tensor(rng, "int8", left, range(len(left) - 1))
    batches = exact_tensor(rng, "int8", left, (0,))
    x = on_device(small_integers(rng, left))
    for axes in ((0, 2), (0,)):
        rhs = exact_tensor(rng, "uint4", right, axes)
        for operand in (lhs, batches, x):
            assert_floats(product(operand, rhs), np.matmul(reals(operand), reals(rhs)), np.float32)


def test_a_matrix_on_the_right_of_a_batch_is_not_repeated():
    """The leading axes stay free axes of one dot, on CPU and elsewhere: nothing is broadcast."""
    x, w = jnp.zeros((8, 3, 4)), tensor(np.zeros((4, 6)), "int8")
    shapes = [[v.aval.shape for v in dot.invars] for dot in dots(jqx.matmul, x, w)]
    assert shapes == [[(8, 3, 4), (4, 6)]] * 2


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
    floats = [v.aval for eqn in jaxpr.eqns for v in eqn.outvars if v.aval.dtype == jnp.float32]
    assert {aval.size for aval in floats} <= {1, 9 * 3 * 6}


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


@sides
def test_eager_and_vmapped_contractions_are_those_of_the_jitted_one(formats):
    layout = LAYOUTS["batch"]
    lhs, rhs = pair_of(layout, formats)
    expected = contraction(reals(lhs), reals(rhs), layout.numbers)
    assert_floats(jqx.dot_general(lhs, rhs, layout.numbers), expected, np.float32)
    assert_floats(jax.jit(jax.vmap(multiply))(lhs, rhs), expected, np.float32)
    if isinstance(rhs, jqx.QTensor):
        expected = contraction(reals(lhs), reals(rhs[0]), (((2,), (0,)), ((), ())))
        shared = jax.jit(jax.vmap(multiply, in_axes=(0, None)))
        assert_floats(shared(lhs, rhs[0]), expected, np.float32)
    if formats == SIDES["integers"]:  # columns, as matrices of one along a new second axis
        columns = jax.jit(jax.vmap(multiply, in_axes=(None, 1), out_axes=1))
        mapped = columns(lhs[0], rhs[0][:, :, None])
        assert_floats(mapped[..., 0], reals(lhs[0]) @ reals(rhs[0]), np.float32)


@pytest.mark.slow
def test_mapped_digits_are_those_of_a_loop():
    layout = Layout((3, 5, 128), (128, 160), MATRICES)
    w = weight("uint8", layout, zero_point=True)
    x = np.random.default_rng(0).normal(size=layout.lhs).astype(np.float32)
    loop = np.stack([jqx.matmul(row, w) for row in x])
    mapped = jax.jit(jax.vmap(jqx.matmul, (0, None)))(x, w)
    np.testing.assert_array_equal(mapped, loop)
    turned = jax.tree.map(lambda leaf: leaf[::-1], w)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), w, turned)
    mapped = jax.jit(jax.vmap(jqx.matmul, (None, 0)))(x[0], stacked)
    np.testing.assert_array_equal(mapped, np.stack([loop[0], jqx.matmul(x[0], turned)]))


ROWS = Layout((16, 136), (136, 128), MATRICES)
WIDE_SUMS = Layout((3, 65), (65, 5), MATRICES)
SIXTEEN = {  # layout, format and zero point of the weight, dtype, whether the weight is on the left
    "small": (WIDE_SUMS, "uint8", True, ("bfloat16", "float16"), False),
    "small, left": (WIDE_SUMS, "uint8", True, ("bfloat16", "float16"), True),
    "tiles": (ROWS, jnp.float8_e4m3fn, False, ("bfloat16",), False),
    "tiles, turned": (LARGE["both transposed"], jnp.float8_e4m3fn, False, ("bfloat16",), False),
    "tiles, one row": (LARGE["one row"], jnp.float8_e4m3fn, False, ("float16",), False),
}


@pytest.mark.parametrize("layout, qtype, zero, dtypes, swap", SIXTEEN.values(), ids=SIXTEEN)
def test_sixteen_bit_activations_accumulate_in_float32_and_round_once(
    layout, qtype, zero, dtypes, swap
):
    """Integers: the float32 sum is exact, so that the result is its nearest 16-bit float."""
    for dtype in dtypes:
        w = weight(qtype, layout, zero_point=zero, small=True, dtype=jnp.dtype(dtype))
        # of more bits than 16-bit floats have
        x = on_device(small_integers(np.random.default_rng(0), layout.lhs) * 31, dtype)
        pair = (w, x) if swap else (x, w)
        numbers = layout.swapped if swap else layout.numbers
        expected = contraction(*map(real_values, pair), numbers)
        assert np.any(nearest(expected, dtype) != expected), "no rounding to be seen"
        assert_floats(contract(*pair, numbers), nearest(expected, dtype), dtype)
        assert_floats(contract(*pair, numbers, jnp.float32), expected, np.float32)


@pytest.mark.parametrize("dtype, size", [("bfloat16", None), ("float16", 32)])
def test_sixteen_bit_activations_are_split_into_digits_as_float32(dtype, size):
    layout = Layout((2, 128), (128, 160), MATRICES)
    w = weight("int8", layout, size=size)
    x = on_device(np.random.default_rng(0).normal(size=layout.lhs), dtype)
    assert "digits" in chosen(jqx.matmul, x.astype(jnp.float32), w)[0][0]
    wide = product(x.astype(jnp.float32), w)
    narrow = product(x, w.astype(jnp.dtype(dtype)))
    assert_floats(narrow, nearest(as_float64(wide), dtype), dtype)


def test_a_float64_product_is_computed_in_float64():
    with jax.enable_x64(True):
        for layout in (Layout((2, 3), (3, 4), MATRICES), ROWS):
            w = weight("int8", layout, small=True, dtype=jnp.float64)
            rng = np.random.default_rng(0)
            x = on_device(small_integers(rng, layout.lhs), jnp.float64) + 2.0**-40
            expected = real_values(x) @ real_values(w)
            assert np.any(np.float32(expected) != expected)
            assert_floats(product(x, w), expected, np.float64)


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
        converted = [
            e for e in equations_of(jqx.matmul, *pair) if e.outvars[0].aval.shape == weight
        ]
        names = [e.primitive.name for e in converted if e.outvars[0].aval.dtype == jnp.dtype(dtype)]
        on_cpu = ["sub", "mul"] if dtype == "float32" else []
        assert sorted({*names, *on_cpu}) == sorted({"convert_element_type", *on_cpu})


def test_codes_are_multiplied_in_sixteen_bits_where_these_hold_them():
    """Scales come after; where they are in blocks they come first, in float32."""
    x = jax.ShapeDtypeStruct(ROWS.lhs, jnp.bfloat16)
    for qtype, size, dtype in [
        (jnp.float8_e4m3fn, None, "bfloat16"),
        (jnp.float8_e4m3fn, 8, "float32"),
        (numerics.nf4, None, "float32"),
    ]:
        w = weight(qtype, ROWS, size, dtype=jnp.bfloat16)
        on_cpu = dots(jqx.matmul, x, w)[0]
        assert dtypes((*on_cpu.invars, *on_cpu.outvars)) == [dtype, dtype, "float32"]


def test_codes_wider_than_bytes_are_contracted_in_float32():
    w = tensor([[1001], [-3]], "int16", dtype=jnp.bfloat16)
    y = jqx.matmul(jnp.ones((1, 2), jnp.bfloat16), w, preferred_element_type=jnp.float32)
    assert_floats(y, np.array([[998]]), np.float32)


def test_every_two_numbers_of_8_bit_floats_are_multiplied():
    """One product in each sum: bfloat16 holds the numbers, float32 what they give."""
    codes = np.arange(256, dtype=np.uint8)
    x, w = (
        on_device(numbers[np.isfinite(numbers.astype(np.float32))])
        for numbers in (codes.view(jnp.float8_e4m3fn), codes.view(jnp.float8_e5m2))
    )
    x = jqx.QTensor(jnp.tile(x, 65)[:, None], jnp.ones((1, 1)), qtype=x.dtype)
    w = jqx.QTensor(w[None], jnp.ones((1, 1)), qtype=w.dtype)
    assert chosen(jqx.matmul, x, w)[0][0] == "float8_tiles"
    assert_floats(product(x, w), real_values(x) @ real_values(w), np.float32)


FLOATS = ("float32", "bfloat16", "float16")


@sides
def test_the_result_has_the_promoted_dtype_of_the_real_operands_or_the_preferred_one(formats):
    for dtypes_of_pair in itertools.product(FLOATS, repeat=2):
        pair = [
            jnp.zeros(shape, dtype)
            if qtype is None
            else tensor(np.zeros(shape), qtype, dtype=jnp.dtype(dtype))
            for shape, qtype, dtype in zip(((3, 4), (4, 5)), formats, dtypes_of_pair, strict=True)
        ]
        with jax.numpy_dtype_promotion("standard"):
            promoted = jnp.promote_types(*dtypes_of_pair)
            assert jax.eval_shape(multiply, *pair).dtype == promoted
    lhs, rhs = pair_of(LAYOUTS["matrices"], formats)
    expected = contraction(reals(lhs), reals(rhs), MATRICES)
    for dtype in FLOATS:
        result = contract(lhs, rhs, MATRICES, jnp.dtype(dtype))
        assert_floats(result, nearest(expected, dtype), dtype)
    f = functools.partial(jqx.matmul, preferred_element_type=jnp.bfloat16)
    assert jax.eval_shape(f, lhs, rhs[None]).dtype == jnp.bfloat16


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


def test_two_arrays_are_left_to_jnp_matmul():
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(2, 3, 4)).astype("f"), rng.normal(size=(2, 4, 5)).astype("f")
    np.testing.assert_array_equal(jqx.matmul(x, y), jnp.matmul(x, y))
    narrow = jqx.matmul(x, y, preferred_element_type=jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16


def test_precision_reaches_the_contraction_of_floats():
    """Also that of every tile."""
    f = functools.partial(jqx.matmul, precision="highest")
    small = jnp.ones((3, 4)), tensor(np.zeros((4, 5)), "int8")
    tiled = [(jnp.ones(ROWS.lhs), weight(q, ROWS)) for q in (numerics.nf4, jnp.float8_e4m3fn)]
    for pair in (small, *tiled):
        precisions = {dot.params["precision"] for dot in dots(f, *pair)}
        assert precisions == {(lax.Precision.HIGHEST,) * 2}


SPOILED = {
    "convert_wide": (Layout((3, 5), (5, 4), MATRICES), "int8", None, True),
    "digits": (Layout((3, 128), (128, 160), MATRICES), "int8", None, False),
    "block_digits": (Layout((3, 128), (128, 160), MATRICES), "int8", 32, False),
    "tiles": (ROWS, numerics.nf4, None, False),
}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(value):
    for name, (layout, qtype, size, zero_point) in SPOILED.items():
        w = weight(qtype, layout, size, zero_point)
        x = np.random.default_rng(1).normal(size=layout.lhs).astype(np.float32)
        spoilt = x.copy()
        spoilt[1, 3] = value
        assert chosen(jqx.matmul, x, w)[0][0] == name
        y, result = np.asarray(product(x, w)), np.asarray(product(spoilt, w))
        assert np.isfinite(y).all() and not np.isfinite(result[1]).any()
        assert np.isnan(result[1]).all() or "digits" not in name
        np.testing.assert_array_equal(np.delete(result, 1, 0), np.delete(y, 1, 0))


def test_a_scale_that_is_not_finite_spoils_its_own_column_alone():
    for layout, size in [(LARGE["one row"], None), (Layout((2, 64), (64, 3), MATRICES), 32)]:
        w = weight("int8", layout, size)
        w = dataclasses.replace(w, scale=w.scale.at[-1, 2].set(jnp.nan))
        y = np.asarray(product(jnp.ones(layout.lhs), w))
        assert np.isfinite(np.delete(y, 2, 1)).all() and np.isnan(y[:, 2]).all()


def test_a_scale_along_a_contracted_axis_of_size_1_is_accepted():
    w = jqx.QTensor.quantize(jnp.ones((1, 5)), jqx.QSpec(jnp.int8, jqx.per_axis(0, 1)))
    x = jqx.QTensor.quantize(jnp.ones((3, 1)), jqx.QSpec(jnp.int8, jqx.per_axis(0, 1)))
    assert_floats(contract(x, w, MATRICES), nearest(reals(x) * reals(w), np.float32), np.float32)


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


@pytest.mark.parametrize("axes", [(0,), (0, 1)])
@pytest.mark.parametrize("other", ["float32", "int8"])
def test_a_scale_that_varies_along_a_contracted_axis_is_refused(other, axes):
    w = exact_tensor(np.random.default_rng(3), "int8", (4, 5), axes, zero_point=False)
    x = jnp.ones((3, 4)) if other == "float32" else tensor(np.ones((3, 4)), "int8")
    facts = ("contracted axis", "quantize with jqx.per_")
    right = (*facts, "`rhs`", "(4, 5)", f"scale {w.scale.shape}")
    left = (*facts, "`lhs`", "(5, 4)", f"scale {w.T.scale.shape}")
    assert_refused(multiply, (x, w), ValueError, "dot_general", *right)
    assert_refused(jqx.matmul, (x, w), ValueError, "dot_general", *right)
    assert_refused(jqx.matmul, (x[None], w), ValueError, "dot_general", "`rhs`")
    assert_refused(multiply, (w.T, x.T), ValueError, "dot_general", *left)


def test_operands_of_other_dtypes_and_without_axes_are_refused():
    """It is not known what the integers of an array stand for."""
    w, x = tensor(np.zeros((4, 4)), "int8"), jnp.zeros((4, 4))
    for dtype in ("int8", "int32", "bool"):
        for name, pair in [("`lhs`", (x.astype(dtype), w)), ("`rhs`", (w, x.astype(dtype)))]:
            facts = name, dtype, "floating point"
            assert_refused(multiply, pair, TypeError, "dot_general", *facts)
    for dtype, fact in [(jnp.int32, "int32"), ("int9", "int9")]:
        f = functools.partial(multiply, preferred_element_type=dtype)
        for operand in (x, w):
            facts = "preferred_element_type", fact
            assert_refused(f, (operand, w), TypeError, "dot_general", *facts)
    for pair in [(w, jnp.float32(2)), (jnp.float32(2), w)]:
        assert_refused(jqx.matmul, pair, ValueError, "matmul", "no axis", "()", "(4, 4)")


def test_sizes_that_do_not_fit_are_refused():
    w, stack = tensor(np.zeros((4, 5)), "int8"), tensor(np.zeros((3, 4, 5)), "int8")
    for x in (jnp.zeros((3, 6)), tensor(np.zeros((3, 6)), "int8"), jnp.zeros((3,))):
        with pytest.raises(TypeError):
            jqx.matmul(x, w)
        if x.ndim == 2:
            with pytest.raises(TypeError, match="same shape"):
                jqx.dot_general(x, w, MATRICES)
    for x in (jnp.zeros((2, 3, 4)), tensor(np.zeros((2, 3, 4)), "int8")):
        with pytest.raises(ValueError):
            jqx.matmul(x, stack)
