"""`einsum` on every kind of pattern, any of its operands quantized.

Most values here are small integers with powers of two as scales. float32 holds every sum of them
exactly, in any order, so results are compared bit by bit.
"""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jqx
from jqx import numerics
from jqx._src.contractions.einsum import einsum

from ..arrays import on_device
from ..oracles.contractions import dots, dtypes, gamma
from ..oracles.numerics import as_float64, as_int64, assert_floats, nearest
from ..oracles.refusals import assert_refused
from ..strategies import law
from ..tensor.tensors import differences, kept, random_codes, reals, tensor
from .blocks import magnitudes, real_values


def small(rng, shape, axes=(), zero_point=True):
    """A QTensor of at most 12 in magnitude, exact in float32 as a factor of four."""
    scale = np.ldexp(1.0, rng.integers(0, 2, kept(shape, axes)))
    zero = rng.integers(-3, 4, scale.shape) if zero_point else None
    return tensor(rng.integers(-3, 4, shape), "int8", scale, zero)


def floats(rng, shape):
    return on_device(rng.integers(-3, 4, shape).astype(np.float32))


def assert_exact(result, subscripts, *operands):
    """Asserts that a result is NumPy's, in float64, of the real operands."""
    expected = np.einsum(subscripts, *map(reals, operands))
    assert_floats(result, np.asarray(expected), np.float32)


def assert_all_exact(cases):
    """As `assert_exact`, of many subscripts and operands, whose results are one program."""
    all_subscripts = [subscripts for subscripts, _ in cases]

    @jax.jit
    def results(operands):
        return [einsum(terms, *xs) for terms, xs in zip(all_subscripts, operands, strict=True)]

    computed = results([xs for _, xs in cases])
    for i, ((subscripts, xs), result) in enumerate(zip(cases, computed, strict=True)):
        expected = np.asarray(np.einsum(subscripts.replace("λ", "l"), *map(reals, xs)))
        case = f"case {i}: {subscripts} of {xs}"
        np.testing.assert_array_equal(result, expected.astype(np.float32), case, strict=True)


PATTERNS = {
    "matrix product": ("ij,jk->ik", (2, 3), (3, 4)),
    "result left out": ("ij,jk", (2, 3), (3, 4)),
    "result in the order of the alphabet": ("kj,ji", (2, 3), (3, 4)),
    "result left out behind an ellipsis": ("i...j,jk", (2, 5, 3), (3, 4)),
    "nothing left": ("ij,ij->", (2, 3), (2, 3)),
    "transposed result": ("ij,jk->ki", (2, 3), (3, 4)),
    "batch": ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
    "batch axes anywhere": ("jbi,kjb->ikb", (4, 2, 3), (5, 4, 2)),
    "elementwise": ("ij,ji->ij", (2, 3), (3, 2)),
    "outer": ("i,jk->jik", (2,), (3, 4)),
    "view": ("ijk->kij", (2, 3, 4)),
    "copy": ("ij", (2, 3)),
    "total": ("ij->", (2, 3)),
    "sum over one axis": ("ijk->ki", (2, 3, 4)),
    "sum over an axis of one operand": ("ij,jk->k", (2, 3), (3, 4)),
    "sum over axes of both operands": ("ij,k->", (2, 3), (4,)),
    "diagonal": ("ii->i", (3, 3)),
    "trace": ("ii", (3, 3)),
    "diagonal of outer axes": ("iji->ji", (3, 2, 3)),
    "diagonal behind an axis": ("jii->ij", (2, 3, 3)),
    "diagonal of axes apart": ("jiki->jik", (2, 3, 4, 3)),
    "diagonal of three axes": ("iii->i", (3, 3, 3)),
    "two diagonals": ("ijji->ij", (2, 3, 3, 2)),
    "diagonal and product": ("iij,jk->ik", (3, 3, 2), (2, 4)),
    "ellipsis": ("...ij,...jk->...ik", (2, 3, 4), (2, 4, 5)),
    "ellipses of different length": ("...ij,...jk->...ik", (2, 3, 4), (5, 2, 4, 3)),
    "ellipsis in the middle": ("i...j,j->...i", (2, 5, 3, 4), (4,)),
    "ellipsis of one operand": ("...i,ij->j...", (2, 3, 4), (4, 5)),
    "ellipsis of nothing": ("...i,i...->...", (4,), (4,)),
    "ellipses alone": ("...,...", (2, 3), (3,)),
    "ellipsis that stretches": ("...i,...i->...", (2, 1, 4), (3, 4)),
    "axis that stretches": ("ij,jk->ik", (2, 1), (3, 4)),
    "axis that stretches and stays": ("ij,ij->ij", (2, 1), (1, 3)),
    "axis of size 1": ("ij,jk->ik", (2, 1), (1, 4)),
    "axis of size 1 that is summed": ("ij->i", (2, 1)),
    "scalar": ("ij,->ij", (2, 3), ()),
    "scalars": (",->", (), ()),
    "one scalar": ("->", ()),
    "empty axis": ("ij,jk->ik", (2, 0), (0, 4)),
    "empty result": ("ij,jk->ik", (0, 3), (3, 4)),
    "spaces": (" i j, j k -> i k ", (2, 3), (3, 4)),
    "capitals and other letters": ("iJ,Jλ->iλ", (2, 3), (3, 4)),
    "three operands": ("ij,jk,kl->il", (2, 3), (3, 4), (4, 2)),
    "one label for three": ("i,i,i->i", (3,), (1,), (3,)),
    "sum over three": ("bi,bi,ci->c", (2, 3), (2, 3), (4, 3)),
    "four operands": ("i,ij,jk,k", (2,), (2, 3), (3, 2), (2,)),
}


def masks(count):
    """Ways to quantize one operand or more: the first, the last, or all."""
    positions = range(count)
    return {
        tuple(i in quantized for i in positions)
        for quantized in (positions[:1], positions[-1:], positions)
    }


def operands(shapes, mask):
    rng = np.random.default_rng([len(shapes), *map(len, shapes), *mask])
    return [
        small(rng, s) if quantized else floats(rng, s)
        for s, quantized in zip(shapes, mask, strict=True)
    ]


@pytest.mark.many
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_every_kind_of_pattern_is_contracted(pattern):
    """As NumPy has it: each operand is quantized, or some are."""
    subscripts, *shapes = pattern
    assert_all_exact([(subscripts, operands(shapes, mask)) for mask in masks(len(shapes))])


SIZES = {"a": 2, "b": 3, "c": 2, "d": 3}
DOTS = (2, 3)


@st.composite
def random_operands(draw, output):
    """A term, its shape, and the axes that have their own scale; `None` for an array."""
    labels = draw(st.lists(st.sampled_from(sorted(SIZES)), max_size=3))
    dots = draw(st.sampled_from([None, (), DOTS[1:], DOTS]))
    at = draw(st.integers(0, len(labels)))
    axes = [*labels[:at], *(dots or ()), *labels[at:]]
    stretches = [axes.count(axis) == 1 and draw(st.integers(0, 5)) == 0 for axis in axes]
    shape = tuple(
        1 if stretch else SIZES.get(axis, axis)
        for axis, stretch in zip(axes, stretches, strict=True)
    )
    stay = [i for i, axis in enumerate(axes) if axis in DOTS or axis in output]
    scaled_axes = (
        draw(st.none() | st.sets(st.sampled_from(stay))) if stay else draw(st.none() | st.just(()))
    )
    term = "".join([*labels[:at], *([] if dots is None else ["..."]), *labels[at:]])
    return term, shape, scaled_axes


@st.composite
def cases(draw):
    """Subscripts and operands: a scale stays constant along every label that is summed."""
    output_labels = draw(st.permutations(sorted(SIZES)))[: draw(st.integers(0, len(SIZES)))]
    drawn = draw(st.lists(random_operands(output_labels), min_size=1, max_size=4))
    terms = [term for term, _, _ in drawn]
    output = ["..."] * any("..." in term for term in terms)
    output += [label for label in output_labels if any(label in term for term in terms)]
    rng, zero_point = np.random.default_rng(draw(st.integers(0, 99))), draw(st.booleans())
    xs = [
        floats(rng, shape) if scaled_axes is None else small(rng, shape, scaled_axes, zero_point)
        for _, shape, scaled_axes in drawn
    ]
    return f"{','.join(terms)}->{''.join(output)}", xs


at_once = st.lists(cases(), min_size=5, max_size=5)


@settings(law, max_examples=8)
@given(at_once)
def test_any_pattern_of_one_to_four_operands_is_contracted(cases):
    assert_all_exact(cases)


@pytest.mark.slow
@settings(law, max_examples=80)
@given(at_once)
def test_many_patterns_are_contracted(cases):
    assert_all_exact(cases)


FULL = {
    "int8": {"qtype": jnp.int8},
    "uint8": {"qtype": jnp.uint8, "symmetric": False, "calibrator": jqx.calibrators.minmax},
    "nf4": {"qtype": numerics.nf4},
    "e4m3": {"qtype": jnp.float8_e4m3fn},
}


PAIRS = list(itertools.product(["float32", *FULL], repeat=2))


@pytest.mark.many
@pytest.mark.parametrize(
    "names", [pytest.param(p, marks=[pytest.mark.slow] * ("int8" not in p)) for p in PAIRS]
)
def test_real_values_are_contracted_as_near_as_float32_allows(names):
    """Three operands: sums of 33 and of 6 products, in whichever order, and 12 roundings more for
    each of scales and zero points. Each rounds relative to the sum of magnitudes: Higham (3.5).
    """
    rng = np.random.default_rng(len(names[0]) + 10 * len(names[1]))
    w, x, y = (
        on_device(rng.normal(size=shape), jnp.float32) for shape in ((4, 5, 33), (33, 6), (6, 7))
    )
    xs = [w, x, y]
    for position, name, axis in [(0, names[0], 1), (1, names[1], 1)]:
        if name in FULL:
            spec = jqx.QSpec(granularity=jqx.per_axis(axis), **FULL[name])
            xs[position] = jqx.QTensor.quantize(xs[position], spec)
    subscripts = "bij,jk,kl->bil"
    expected = np.einsum(subscripts, *map(real_values, xs))
    allowed = gamma(33 + 12 + 6 + 12) * np.einsum(subscripts, *map(magnitudes, xs))
    result = jax.jit(functools.partial(einsum, subscripts))(*xs)
    assert result.dtype == jnp.float32
    assert np.all(np.abs(as_float64(result) - expected) <= allowed)


FOLDED = {
    "attention values, a scale for each token": (
        "bht,bthd->bhd",
        (2, 3, 5),
        (2, 5, 3, 4),
        (0, 1, 2),
    ),
    "another result": ("bht,bthd->dbh", (2, 3, 5), (2, 5, 3, 4), (0, 1, 2)),
    "a vector": ("t,td->d", (5,), (5, 4), (0,)),
    "two summed labels": ("st,std->d", (3, 5), (3, 5, 4), (1,)),
    "a label of the scale that stays": ("bt,tb->b", (2, 5), (5, 2), (0, 1)),
    "elementwise and sum": ("td,td->d", (5, 4), (5, 4), (0, 1)),
    "a sum of the array first": ("sbt,td->bd", (3, 2, 5), (5, 4), (0,)),
}


@pytest.mark.parametrize("case", FOLDED.values(), ids=FOLDED)
def test_an_array_takes_a_scale_that_varies_along_a_summed_label(case):
    """The zero point has an entry for each scale, one for all, or there is none."""
    subscripts, shape, of_q, axes = case
    rng = np.random.default_rng(len(subscripts))
    x, q = floats(rng, shape), small(rng, of_q, axes)
    one_zero = tensor(as_int64(q.values), "int8", q.scale, np.full((1,) * q.ndim, 2))
    no_zero = tensor(as_int64(q.values), "int8", q.scale)
    left, right, result = (*subscripts.partition("->")[0].split(","), subscripts.partition("->")[2])
    turned = f"{right},{left}->{result}"
    cases = [(subscripts, [x, operand]) for operand in (q, one_zero, no_zero)]
    assert_all_exact([*cases, *((turned, [operand, x]) for operand in (q, one_zero, no_zero))])


def test_an_array_takes_scales_in_blocks_of_other_labels():
    """Values of attention with a scale for each token and block of channels, also a short block."""
    rng = np.random.default_rng(3)
    cases = []
    for subscripts, shape, of_q, sizes in [
        ("bht,bthd->bhd", (2, 3, 5), (2, 5, 3, 4), {0: 1, 1: 1, 2: 1, 3: 2}),
        ("bht,bthd->hdb", (2, 3, 5), (2, 5, 3, 6), {1: 1, 3: 4}),
        ("bhd,bthd->bht", (2, 3, 4), (2, 6, 3, 4), {1: 3, 2: 1, 3: 1}),
        ("bt,btd->bd", (4, 5), (4, 5, 6), {0: 2, 1: 1, 2: 3}),
        ("t,tde->ed", (5,), (5, 4, 6), {0: 1, 1: 2, 2: 3}),
        ("rt,td->rd", (9, 5), (5, 6), {0: 1, 1: 2}),  # one block after another
        ("rt,tde->erd", (40, 5), (5, 4, 6), {0: 1, 1: 2, 2: 3}),
        ("td->d", None, (5, 4), {0: 1, 1: 2}),
    ]:
        scale = [-(-n // sizes.get(axis, n)) for axis, n in enumerate(of_q)]
        affine = np.ldexp(np.float32(1), rng.integers(0, 2, scale)), rng.integers(-3, 4, scale)
        spec = jqx.QSpec("int8", jqx.per_block(sizes, tail=True), symmetric=False)
        affine = jqx.calibrators.Affine(on_device(affine[0]), on_device(affine[1], jnp.int8))
        q = jqx.QTensor.quantize(floats(rng, of_q), spec, affine)
        cases.append((subscripts, [q] if shape is None else [floats(rng, shape), q]))
    results = jax.jit(lambda: [einsum(subscripts, *xs) for subscripts, xs in cases])()
    for (subscripts, xs), result in zip(cases, results, strict=True):
        real = [x.dequantize() if isinstance(x, jqx.QTensor) else x for x in xs]
        expected = np.einsum(subscripts, *map(as_float64, real))
        assert_floats(result, expected, np.float32)


def test_a_sum_of_one_operand_takes_any_scale_for_each_index():
    rng = np.random.default_rng(0)
    cases = [
        ("td->d", (5, 4), (0,)),
        ("td->d", (5, 4), (0, 1)),
        ("td->", (5, 4), (0,)),
        ("ii", (4, 4), (0,)),
    ]
    assert_all_exact([(subscripts, [small(rng, *of)]) for subscripts, *of in cases])


def test_a_scale_that_no_operand_can_take_is_refused():
    rng = np.random.default_rng(1)
    x, q, scaled_along_both = (
        floats(rng, (5,)),
        small(rng, (5, 4), (0,)),
        small(rng, (5, 4), (0, 1)),
    )
    f = functools.partial(einsum, "t,td->d")
    facts = "contracted axis", "(5, 4)"
    assert_refused(f, (x, scaled_along_both), ValueError, "dot_general", *facts)
    assert_refused(f, (small(rng, (5,)), q), ValueError, "dot_general", *facts)


def test_operands_stay_quantized_until_they_are_contracted():
    """Neither a diagonal nor a sum makes an array of floats of the size of a QTensor."""
    rng = np.random.default_rng(2)
    for subscripts, left, right in [
        ("iij,jk->ik", (7, 7, 5), (5, 4)),
        ("ijk,k->i", (3, 5, 7), (7,)),
        ("ij,j,->i", (3, 50), (50,)),
    ]:
        q, r = small(rng, left, (0,)), small(rng, right)
        scalars = [small(rng, ())] * (subscripts.count(",") - 1)
        f = functools.partial(einsum, subscripts)
        shapes = re.findall(r"f32\[([\d,]*)\]", str(jax.make_jaxpr(f)(q, r, *scalars)))
        assert shapes
        sizes = [math.prod(map(int, shape.split(","))) if shape else 1 for shape in shapes]
        assert max(sizes) < q.size, (subscripts, shapes)


def test_integers_are_contracted_as_integers():
    rng = np.random.default_rng(3)
    q, r = small(rng, (2, 3, 4)), small(rng, (4, 5))
    for contraction in dots(functools.partial(einsum, "bij,jk->bik"), q, r):
        assert dtypes(contraction.invars) == ["int8", "int8"]
    for contraction in dots(functools.partial(einsum, "bij->b"), q):
        assert dtypes(contraction.invars) == ["int8", "int8"]


def test_operands_may_be_laid_out_in_any_way():
    rng = np.random.default_rng(4)
    x = floats(rng, (3, 4))
    q = tensor(rng.integers(-3, 4, (4, 4)), "int4", np.ldexp(1.0, rng.integers(0, 2, (1, 4))))
    products = [("ij,jk->ik", x), ("ij,jk->ki", x), ("ij,jj->ij", x), ("ij,jk->i", x), ("ij->ji",)]

    @jax.jit
    def results(tensors):
        return [[einsum(*of, laid_out) for of in products] for laid_out in tensors]

    for of_layout in results([q.pack(0), q.pack(1), q.pack_for("cpu"), q.pack_for("gpu")]):
        for result, (subscripts, *xs) in zip(of_layout, products, strict=True):
            assert_exact(result, subscripts, *xs, q)


def test_lists_of_labels_say_what_a_string_says():
    rng = np.random.default_rng(5)
    x, q = floats(rng, (2, 3, 4)), small(rng, (4, 5), (1,))
    product = np.einsum("bij,jk->bik", x, reals(q))
    for args in [
        (x, [0, 1, 2], q, [2, 3]),
        (x, (0, 1, 2), q, (2, 3), (0, 1, 3)),
        (x, [..., 7], q, [7, 9]),
        (x, ["x", "y", "z"], q, ["z", "zz"], ["x", "y", "zz"]),
        (x, "abc", q, "cd"),
    ]:
        assert_floats(einsum(*args), product, np.float32)
    assert_floats(einsum(q, [1, 0]), reals(q).T, np.float32)
    assert_floats(einsum(x, [..., 2], q, [2, 3], [3, ...]), np.moveaxis(product, -1, 0), np.float32)


def test_an_ellipsis_that_the_result_leaves_out_is_summed_as_in_jax():
    q = small(np.random.default_rng(6), (2, 3, 4), (2,))
    assert_floats(einsum("...i->i", q), reals(q).sum((0, 1)), np.float32)


ORDERS = [
    "auto",
    "optimal",
    "greedy",
    "dp",
    True,
    False,
    [(0, 1), (0, 2), (0, 1)],
    [(2, 3), (1, 2), (0, 1)],
]


def test_the_order_of_contraction_changes_nothing():
    rng = np.random.default_rng(7)
    xs = [
        floats(rng, (2,)),
        small(rng, (2, 3), (0,)),
        small(rng, (3, 2), (0, 1)),
        floats(rng, (2,)),
    ]

    @jax.jit
    def in_orders(xs):
        return [einsum("i,ij,jk,k->jk", *xs, optimize=order) for order in ORDERS]

    expected = np.einsum("i,ij,jk,k->jk", *map(reals, xs)).astype(np.float32)
    for order, result in zip(ORDERS, in_orders(xs), strict=True):
        np.testing.assert_array_equal(result, expected, str(order), strict=True)


def test_a_path_of_jax_is_an_order():
    rng = np.random.default_rng(8)
    for subscripts, shapes in [("ij->ji", [(2, 3)]), ("ij,jk->ik", [(2, 3), (3, 4)])]:
        xs = [small(rng, shape) for shape in shapes]
        path, _ = jnp.einsum_path(subscripts, *map(np.zeros, shapes))
        assert_exact(einsum(subscripts, *xs, optimize=path), subscripts, *xs)


def test_a_good_order_is_found():
    """The large operand is contracted last, with what is left of the others."""
    rng = np.random.default_rng(9)
    xs = [small(rng, (64, 64)), small(rng, (64, 64)), small(rng, (64, 1))]
    contractions = dots(functools.partial(einsum, "ij,jk,kl->il"), *xs)
    assert sum(v.aval.shape == (64, 64) for eqn in contractions for v in eqn.outvars) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_dtype_is_that_of_the_operands_or_the_one_preferred(dtype):
    rng = np.random.default_rng(10)
    x = on_device(rng.integers(-3, 4, (3, 50)), dtype)
    q = tensor(random_codes(rng, "int8", (50, 4)), "int8", dtype=jnp.dtype(dtype))
    expected = as_float64(x) @ reals(q)
    all_subscripts = ["ij,jk->ik", "ij,jk->ki"]

    def of(x, q, wider):
        return [
            einsum(subscripts, x, q, preferred_element_type=wider) for subscripts in all_subscripts
        ]

    results = [jax.jit(functools.partial(of, wider=wider))(x, q) for wider in (None, jnp.float32)]
    for result, narrow, wide in zip([expected, expected.T], *results, strict=True):
        assert_floats(narrow, nearest(result, dtype), dtype)
        assert_floats(wide, result, np.float32)
    for subscripts, *xs in [
        ("ij->ji", q),
        ("ij->", q),
        ("ij,jk,->ik", x, q, 2.0),
        ("i,ij,jk", np.asarray(x)[:, 0], x, q),
    ]:
        f = functools.partial(einsum, subscripts)
        assert jax.eval_shape(f, *xs).dtype == jnp.dtype(dtype)
        narrow = functools.partial(f, preferred_element_type=jnp.bfloat16)
        assert jax.eval_shape(narrow, *xs).dtype == jnp.bfloat16


def test_an_array_is_summed_in_the_dtype_preferred():
    """256 + 1 is no bfloat16."""
    x = on_device([[256], [1]], jnp.bfloat16)
    q = tensor([[1]], "int8", dtype=jnp.bfloat16)
    y = einsum("ij,jk->k", x, q, preferred_element_type=jnp.float32)
    assert_floats(y, np.array([257]), np.float32)


def test_a_dequantized_view_is_rounded_once():
    q = tensor([[127]], "int8", [[1 + 2.0**-20]], dtype=jnp.bfloat16)
    exact = nearest(127 * (1 + 2.0**-20) * np.ones((1, 1)), np.float32)
    assert_floats(einsum("ij->ji", q, preferred_element_type=jnp.float32), exact, np.float32)


def test_folded_scales_are_rounded_once():
    """Neither their product with the array, nor the sum before its zero point, is a bfloat16."""
    p = on_device([1 + 2.0**-7, 1], jnp.bfloat16)
    v = tensor([[100], [-100]], "int8", [[1 + 2.0**-7], [1]], [[1], [1]], dtype=jnp.bfloat16)
    expected = nearest(as_float64(p) @ reals(v), "bfloat16")
    assert_floats(einsum("t,td->d", p, v), expected, "bfloat16")


def test_arrays_alone_are_left_to_jnp_einsum():
    x, y = jnp.arange(6).reshape(2, 3), jnp.arange(12).reshape(3, 4)
    result = einsum("ij,jk", x, y, preferred_element_type=jnp.int32, precision="highest")
    assert result.dtype == jnp.int32
    np.testing.assert_array_equal(result, np.einsum("ij,jk", x, y))
    np.testing.assert_array_equal(einsum(x, [0, 1], y, [1, 2], optimize=False), result)


def test_precision_reaches_every_contraction_of_floats():
    rng = np.random.default_rng(11)
    xs = [floats(rng, (2, 3)), floats(rng, (3, 4)), small(rng, (4, 5))]
    f = functools.partial(einsum, "ij,jk,kl->il", precision="highest", optimize=[(0, 1), (0, 1)])
    precisions = [eqn.params["precision"] for eqn in dots(f, *xs)]
    assert len(precisions) >= 2 and set(precisions) == {(jax.lax.Precision.HIGHEST,) * 2}


def test_it_is_the_same_under_jit_and_vmap():
    rng = np.random.default_rng(12)
    p, v = floats(rng, (2, 3, 5)), small(rng, (2, 5, 3, 4), (0, 1, 2))
    f = functools.partial(einsum, "ht,thd->hd")
    assert_exact(jax.jit(jax.vmap(f))(p, v), "bht,bthd->bhd", p, v)
    assert_exact(jax.jit(jax.vmap(f, in_axes=(0, None)))(p, v[0]), "bht,thd->bhd", p, v[0])


@pytest.mark.parametrize("subscripts", ["bt,td->bd", "bd,td->bt"])
def test_the_gradient_is_that_of_the_dequantized_contraction(subscripts):
    """Of the array and of the scale, in a sum over tokens, whose scales are folded, and in one over
    features.
    """
    rng = np.random.default_rng(13)
    term, result = subscripts.split(",")[0], subscripts[-2:]
    n = {"b": 2, "t": 5, "d": 4}
    x = rng.integers(-3, 4, [n[label] for label in term]).astype(np.float32)
    g = rng.integers(-3, 4, [n[label] for label in result]).astype(np.float32)
    q = small(rng, (5, 4), (0,))

    def loss(x, scale):
        return (einsum(subscripts, x, dataclasses.replace(q, scale=scale)) * g).sum()

    of_x, of_scale = jax.jit(jax.grad(loss, (0, 1)))(x, q.scale)
    assert_floats(of_x, np.einsum(f"{result},td->{term}", g, reals(q)), np.float32)
    of_q = np.einsum(f"{result},{term}->td", g, x) * differences(q)
    assert_floats(of_scale, of_q.sum(1, keepdims=True), np.float32)


Q = tensor(np.ones((3, 4)), "int8")
X = on_device(np.ones((4, 5)), np.float32)
MALFORMED = {
    "two arrows": ("ij,jk->i->k", "several arrows"),
    "half an arrow": ("ij,jk-ik", "'-'"),
    "two dots": ("..ij,jk", "'.'"),
    "two ellipses": ("...i...,jk", "'.'"),
    "punctuation": ("i;j,jk", "';'"),
    "a term too many": ("ij,jk,k", "2 operands", "'ij,jk,k'"),
    "a term too few": ("ij", "2 operands", "'ij'"),
    "a label too many": ("ijk,kl", "operand 0", "rank 2", "'ijk'"),
    "a label too few": ("ij,j", "operand 1", "rank 2", "'j'"),
    "too many beside an ellipsis": ("...ijk,kl", "operand 0", "rank 2"),
    "a result of nothing": ("ij,jk->iz", "'z'", "no operand"),
    "a result twice": ("ij,jk->ii", "'i'", "twice"),
    "a term as result": ("ij,jk->i,k", "','"),
    "sizes": ("ij,ik->jk", "'i'", "3 and 4", "operand 1"),
    "sizes of a diagonal": ("ii,jk->ij", "'i'", "3 and 4", "operand 0"),
}


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED)
def test_malformed_subscripts_are_refused(case):
    subscripts, *facts = case
    f = functools.partial(einsum, subscripts)
    assert_refused(f, (Q, X), ValueError, "einsum", *facts)


def test_sizes_under_an_ellipsis_must_fit():
    stack = jnp.ones((2, 4, 4))
    f = functools.partial(einsum, "...j,...jk")
    assert_refused(f, (Q, stack), ValueError, "einsum", "'...'", "3 and 2", "operand 1")


def test_an_axis_of_size_1_has_no_diagonal_with_a_longer_one():
    q = tensor(np.ones((1, 3)), "int8")
    f = functools.partial(einsum, "ii->i")
    assert_refused(f, (q,), ValueError, "einsum", "'i'", "1 and 3", "operand 0")


def test_malformed_lists_of_labels_are_refused():
    for args, error, fact in [
        ((0, 1), TypeError, "int"),
        (([0, 1], 5), TypeError, "int"),
        (([[0], [1]],), TypeError, "list"),
        (([..., ..., 1],), ValueError, "`...`"),
        ((["a", 1],), TypeError, "'int', 'str'"),
        (([0, 1], [0, 2]), ValueError, "no operand has"),
    ]:
        with pytest.raises(error, match=r"^jqx\.einsum: ") as refusal:
            einsum(Q, *args)
        assert fact in str(refusal.value)


def test_wrong_types_are_refused():
    f = functools.partial(einsum, "ij,jk")
    ints = jnp.ones((4, 5), jnp.int8)
    assert_refused(f, (Q, ints), TypeError, "einsum", "operands[1]", "int8", "floating point")
    narrow = functools.partial(f, preferred_element_type=jnp.int32)
    assert_refused(narrow, (Q, X), TypeError, "einsum", "preferred_element_type", "int32")


@pytest.mark.parametrize(
    "optimize",
    [
        "best",
        3,
        [(0, 1)],
        [(0, 1), (0, 2)],
        [(0, 1, 2)],
        [(0, 0), (0, 1)],
        [(0, 3), (0, 1)],
        [{}, {}],
    ],
    ids=str,
)
def test_an_order_that_is_none_is_refused(optimize):
    f = functools.partial(einsum, "ij,jk,k", optimize=optimize)
    facts = "`optimize`", "einsum_path"
    assert_refused(f, (Q, X, jnp.ones(5)), ValueError, "einsum", *facts)
