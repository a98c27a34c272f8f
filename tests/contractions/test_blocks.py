"""Scales in blocks along contracted axes, and operands of every number format.

Pairs of formats are held against float64 within Higham's bound on a float32 sum. Where both
operands are integers and scales are powers of two, float32 holds every sum exactly, in any order:
there results are compared bit by bit.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import numerics
from jqx._src.contractions.blocks import HowTo
from jqx._src.contractions.dimensions import Dimensions
from jqx._src.contractions.exact import integer

from ..arrays import on_device
from ..oracles.contractions import MATRICES, contraction, dots, dtypes, gamma
from ..oracles.numerics import as_float64, as_int64, assert_floats
from ..tensor.tensors import random_codes, tensor
from .blocks import (
    BLOCK_FORMATS,
    FLOATS,
    FORMATS,
    PER_32,
    SHARINGS,
    block_sums,
    code_numbers,
    magnitudes,
    operand,
    real_values,
    scales,
    spread,
)

PAIRS = [
    pair for pair in itertools.product([*FLOATS, *FORMATS], repeat=2) if not set(pair) <= {*FLOATS}
]


def allowed(lhs, rhs, numbers, products):
    """The error of a float32 sum of products, of sums for two zero points, and 12 roundings more:
    of the scales, of the corrections, and of the sums over blocks that the products do not count.
    """
    return gamma(products + 12) * contraction(magnitudes(lhs), magnitudes(rhs), numbers)


@jax.jit
def multiply(lhs, rhs):
    return jqx.dot_general(lhs, rhs, MATRICES, preferred_element_type=jnp.float32)


FEW = ("per channel", "32 and a tail of 4")
NEAR = [pair for pair in PAIRS if {"float32", "int8"} & {*pair}]


def off_limits(sharing, pairs):
    """The pairs whose product is wrong: by how many times what is allowed, or with what error.

    The products are one compiled program.
    """
    k, left, right = SHARINGS[sharing]
    cases, wrong, seen = {}, {}, set()
    for pair in pairs:
        shared = [
            None if name in FLOATS else side.of(FORMATS[name]["qtype"])
            for name, side in zip(pair, (left, right), strict=True)
        ]
        if (*pair, *shared) in seen:
            continue
        seen.add((*pair, *shared))
        cases[pair] = operand(pair[0], (4, k), 1, shared[0]), operand(pair[1], (k, 6), 0, shared[1])

    @jax.jit
    def products(cases):
        found = {}
        for pair, operands in cases.items():
            try:
                found[pair] = multiply(*operands)
            except (TypeError, ValueError) as error:
                wrong[pair] = str(error).partition("\n")[0]
        return found

    for pair, result in products(cases).items():
        lhs, rhs = cases[pair]
        expected = real_values(lhs) @ real_values(rhs)
        assert result.shape == expected.shape and result.dtype == jnp.float32
        error = np.abs(as_float64(result) - expected) / allowed(lhs, rhs, MATRICES, k)
        if not np.all(error <= 1):
            wrong[pair] = float(np.max(error))
    return wrong


@pytest.mark.parametrize(
    "sharing",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in SHARINGS],
)
def test_a_pair_of_formats_gives_the_product_of_its_real_values(sharing):
    """Each format beside float32 and beside int8."""
    assert off_limits(sharing, NEAR[FEW.index(sharing) :: 2] if sharing in FEW else NEAR) == {}


@pytest.mark.slow
@pytest.mark.parametrize("sharing", FEW)
def test_the_other_pairs_give_the_product_of_their_real_values(sharing):
    """Those that the default run has in the other way to share a scale."""
    assert off_limits(sharing, NEAR[1 - FEW.index(sharing) :: 2]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("sharing", FEW)
def test_every_other_pair_of_formats_gives_the_product_of_its_real_values(sharing):
    assert off_limits(sharing, [pair for pair in PAIRS if pair not in NEAR]) == {}


def powers(rng, shape, low=0, high=2):
    return np.ldexp(1.0, rng.integers(low, high, shape))


def integers(rng, qtype, shape, sizes, zero_point=True):
    """Random codes and zero points, with a power of two for each block."""
    entries = [-(-n // size) for n, size in zip(shape, sizes, strict=True)]
    zero = random_codes(rng, qtype, entries) if zero_point else None
    blocks = [
        (n, m, size) for n, m, size in zip(shape, entries, sizes, strict=True) if n % size and m > 1
    ]
    return tensor(
        random_codes(rng, qtype, shape), qtype, powers(rng, entries), zero, blocks=tuple(blocks)
    )


def exact(lhs, rhs, numbers):
    """The contraction in int64, which float32 must hold in any order of its sums."""
    values = [as_int64(real_values(q)) for q in (lhs, rhs)]
    assert contraction(*map(np.abs, values), numbers).max() < 2**24
    return contraction(*values, numbers)


INTEGER_BLOCKS = {
    "blocks of 32": (192, 32, 32),
    "blocks on the left": (192, 32, 192),
    "blocks on the right": (192, 192, 32),
    "blocks of 32 and of 64": (192, 32, 64),
    "blocks of 32 and of 48": (192, 32, 48),
    "blocks of 3 and of 4": (24, 3, 4),
    "a tail of 4": (100, 32, 32),
    "a tail of 4 on the left": (100, 32, 100),
    "a tail of 4 beside blocks of 25": (100, 32, 25),
    "two tails": (100, 32, 48),
    "a tail of 32 beside blocks of 32": (96, 64, 32),
    "a block larger than half": (48, 40, 16),
}


@pytest.mark.many
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("qtypes", [("int8", "int8"), ("uint8", "int4"), ("int4", "uint8")])
def test_integers_in_blocks_are_multiplied_exactly(qtypes, zero_point):
    """However the contracted axis lies in blocks, in one compiled program."""
    pairs = []
    for k, left, right in INTEGER_BLOCKS.values():
        rng = np.random.default_rng([k, left, right, zero_point])
        lhs = integers(rng, qtypes[0], (3, k), (1, left), zero_point)
        pairs.append((lhs, integers(rng, qtypes[1], (k, 5), (right, 1), zero_point)))
    products = jax.jit(lambda pairs: [multiply(*pair) for pair in pairs])(pairs)
    for blocks, pair, product in zip(INTEGER_BLOCKS, pairs, products, strict=True):
        expected = np.float32(exact(*pair, MATRICES))
        np.testing.assert_array_equal(product, expected, err_msg=blocks, strict=True)


def test_each_block_has_an_exact_int32_accumulator_of_its_own():
    """All other scales are zero; codes are the largest of their formats."""
    codes = np.where(np.arange(192) % 3, 255, 0) * np.ones((3, 1), int)
    for block in range(6):
        chosen = np.float32(np.arange(6) == block)
        lhs = tensor(codes, "uint8", np.ones((1, 1)), np.full((1, 1), 255))
        rhs = tensor(-np.ones((192, 5)) * 128, "int8", chosen[:, None])
        run = slice(32 * block, 32 * block + 32)
        expected = ((codes - 255)[:, run].sum(1) * -128)[:, None] * np.ones(5)
        assert_floats(multiply(lhs, rhs), expected, np.float32)


def test_blocks_of_integers_are_contracted_as_bytes():
    rng = np.random.default_rng(0)
    lhs = integers(rng, "uint8", (3, 100), (1, 32))
    rhs = integers(rng, "int4", (100, 5), (32, 1))
    assert [dtypes(dot.invars) + dtypes(dot.outvars) for dot in dots(multiply, lhs, rhs)] == [
        ["int8", "int8", "int32"]
    ] * 2  # the full blocks, and the tail


@pytest.mark.parametrize("axis", [0, 1])
def test_packed_codes_in_blocks_are_those_unpacked(axis):
    rng = np.random.default_rng(1)
    w = integers(rng, "int4", (100, 6), (32, 1))
    x = on_device(rng.integers(-8, 9, (3, 100)).astype(np.float32))
    both = [x, integers(rng, "int8", (3, 100), (1, 100))]

    @jax.jit
    def products(both, w):
        packed = w.pack(axis)
        return [(multiply(lhs, packed), multiply(packed.unpack().T, lhs.T)) for lhs in both]

    for lhs, (product, turned) in zip(both, products(both, w), strict=True):
        assert_floats(product, exact(lhs, w, MATRICES), np.float32)
        assert_floats(turned, exact(lhs, w, MATRICES).T, np.float32)


LAYOUTS = {
    "right transposed": ((3, 64), (5, 64), (((1,), (1,)), ((), ()))),
    "heads": ((3, 64), (64, 2, 5), (((1,), (0,)), ((), ()))),
    "batch": ((2, 3, 64), (2, 64, 5), (((2,), (1,)), ((0,), (0,)))),
    "batch axes anywhere": ((64, 2, 3), (5, 64, 2), (((0,), (1,)), ((1,), (2,)))),
    "two contracted axes": ((3, 4, 16), (4, 16, 5), (((1, 2), (0, 1)), ((), ()))),
    "two contracted axes, crossed": ((16, 3, 4), (4, 5, 16), (((0, 2), (2, 0)), ((), ()))),
    "batch and two contracted axes": (
        (2, 4, 3, 16),
        (2, 4, 16, 5),
        (((1, 3), (1, 2)), ((0,), (0,))),
    ),
    "everything contracted": ((4, 16), (4, 16), (((0, 1), (0, 1)), ((), ()))),
    "negative axes": ((2, 3, 64), (2, 64, 5), (((-1,), (-2,)), ((0,), (0,)))),
}


def in_groups(rng, qtype, shape, contracted, size):
    """Random codes with a power of two for each group of a contraction, which `per_group` finds."""
    contracted = {axis % len(shape) for axis in contracted}
    axes = [axis for axis in range(len(shape)) if axis not in contracted]
    groups = jqx.per_group(size).resolve(len(shape), axes).groups(shape)
    return integers(rng, qtype, shape, groups.sizes)


@pytest.mark.many
@pytest.mark.parametrize("sizes", [(16, None), (None, 32), (8, 8), (32, 16)])
def test_groups_follow_the_contraction_in_every_layout(sizes):
    """`None` stands for a float operand. All layouts are one compiled program."""
    pairs = []
    for *shapes, numbers in LAYOUTS.values():
        rng = np.random.default_rng([len(shapes[0]), len(shapes[1]), sizes[0] or 0])
        pairs.append(
            [
                on_device(rng.integers(-8, 9, shape).astype(np.float32))
                if size is None
                else in_groups(rng, "int8", shape, contracted, size)
                for shape, contracted, size in zip(shapes, numbers[0], sizes, strict=True)
            ]
        )
    every = [numbers for *_, numbers in LAYOUTS.values()]

    @jax.jit
    def contracted(pairs):
        return [jqx.dot_general(*pair, of) for pair, of in zip(pairs, every, strict=True)]

    found = contracted(pairs)
    for layout, pair, numbers, result in zip(LAYOUTS, pairs, every, found, strict=True):
        expected = np.float32(exact(*pair, numbers))
        np.testing.assert_array_equal(result, expected, err_msg=layout, strict=True)


def test_blocks_of_two_contracted_axes_differ_on_both_sides():
    rng = np.random.default_rng(2)
    lhs = integers(rng, "int8", (3, 4, 16), (1, 2, 8))
    rhs = integers(rng, "int8", (4, 16, 5), (4, 4, 1))
    numbers = LAYOUTS["two contracted axes"][2]
    assert_floats(jqx.dot_general(lhs, rhs, numbers), exact(lhs, rhs, numbers), np.float32)


@pytest.mark.parametrize("qtype", [jnp.int8, numerics.mxfp4, numerics.nvfp4, numerics.nf4])
def test_jitted_and_vmapped_contractions_are_those_of_a_loop(qtype):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, 3, 64)).astype(np.float32)
    w = rng.normal(size=(2, 64, 5)).astype(np.float32)
    size = getattr(qtype, "size", 32)
    q = jqx.QTensor.quantize(w, jqx.QSpec(qtype, jqx.per_block({0: 1, 1: size, 2: 1})))
    if isinstance(q.scale, jqx.QTensor):  # its scale has one float for all: nothing to map over
        wide = jnp.broadcast_to(q.scale.scale, (2, 1, 1))
        scale = jqx.QTensor(q.scale.values, wide, qtype=q.scale.qtype)
        q = jqx.QTensor(q.values, scale, qtype=qtype)
    expected = np.stack([real_values(x[i]) @ real_values(q[i]) for i in range(2)])
    bound = np.stack([allowed(x[i], q[i], MATRICES, 64) for i in range(2)])
    first = q[0]
    eager = jqx.dot_general(x[0], first, MATRICES, preferred_element_type=jnp.float32)
    assert np.all(np.abs(as_float64(eager) - expected[0]) <= bound[0])

    @jax.jit
    def products(x, q, first):
        loop = jnp.stack([multiply(x[i], q[i]) for i in range(2)])
        return (loop, jax.vmap(multiply)(x, q)), jax.vmap(multiply, (0, None))(x, first)

    results, shared = products(x, q, first)
    for result in results:
        assert np.all(np.abs(as_float64(result) - expected) <= bound)
    one = as_float64(x) @ real_values(q[0])
    assert np.all(np.abs(as_float64(shared) - one)[0] <= bound[0])


def with_scale(q, scale):
    return jqx.QTensor(q.values, scale, q.zero_point, qtype=q.qtype, blocks=q.blocks)


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("k, size", [(16, 4), (10, 4)], ids=["blocks", "a tail"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_of_a_weight_in_blocks_are_those_of_its_real_values(side, k, size, zero_point):
    """Small integers and powers of two: every sum is exact."""
    rng = np.random.default_rng([k, size, zero_point])
    w = integers(rng, "int4", (k, 2), (size, 1), zero_point)
    x = rng.integers(-2, 3, (3, k)).astype(np.float32)
    g = rng.integers(-1, 2, (3, 2)).astype(np.float32)

    def loss(x, scale):
        q = with_scale(w, scale)
        y = multiply(x, q) if side == "right" else multiply(q.T, x.T).T
        return (y * g).sum()

    dx, dscale = jax.jit(jax.grad(loss, (0, 1)))(x, w.scale)
    numbers, zero = code_numbers(w)
    assert_floats(dx, g @ real_values(w).T, np.float32)
    of_elements = (as_float64(x).T @ g) * (numbers - zero)
    starts = np.arange(0, k, size)
    assert_floats(dscale, np.add.reduceat(of_elements, starts, 0), np.float32)


@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (16, 4)])
def test_gradients_of_both_scales_of_integers_in_blocks(sizes):
    rng = np.random.default_rng([4, *sizes])
    lhs = integers(rng, "int4", (3, 16), (1, sizes[0]))
    rhs = integers(rng, "int4", (16, 2), (sizes[1], 1))
    g = rng.integers(-1, 2, (3, 2)).astype(np.float32)

    def loss(left, right):
        return (multiply(with_scale(lhs, left), with_scale(rhs, right)) * g).sum()

    dleft, dright = jax.jit(jax.grad(loss, (0, 1)))(lhs.scale, rhs.scale)
    (a, za), (b, zb) = code_numbers(lhs), code_numbers(rhs)
    of_left = (g @ real_values(rhs).T) * (a - za)
    of_right = (real_values(lhs).T @ g) * (b - zb)
    assert_floats(dleft, block_sums(of_left, lhs.scale.shape), np.float32)
    assert_floats(dright, block_sums(of_right, rhs.scale.shape), np.float32)


@pytest.mark.parametrize("name", ["e4m3", "nf4", "int3"])
def test_gradients_through_blocks_of_other_formats_are_near_the_float64_ones(name):
    """As many terms as rows or columns and products, and 12 roundings around them."""
    rng = np.random.default_rng(5)
    w = operand(name, (192, 6), 0, PER_32)
    x, g = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 192), (3, 6)))
    loss = lambda x, scale: (multiply(x, with_scale(w, scale)) * g).sum()  # noqa: E731
    dx, dscale = jax.jit(jax.grad(loss, (0, 1)))(x, w.scale)
    numbers, _ = code_numbers(w)
    expected = as_float64(g) @ real_values(w).T
    sizes = np.abs(as_float64(g)) @ np.abs(real_values(w)).T
    assert np.all(np.abs(as_float64(dx) - expected) <= gamma(6 + 12) * sizes)
    of_elements, sizes = (
        block_sums((f(x).T @ f(g)) * f(numbers), w.scale.shape)
        for f in (as_float64, lambda v: np.abs(as_float64(v)))
    )
    assert np.all(np.abs(as_float64(dscale) - of_elements) <= gamma(32 + 3 + 12) * sizes)


def test_nan_in_the_scale_of_a_block_spoils_its_own_column_alone():
    w = integers(np.random.default_rng(6), "int8", (64, 3), (32, 1), zero_point=False)
    w = with_scale(w, w.scale.at[1, 2].set(jnp.nan))
    y = np.asarray(multiply(jnp.ones((2, 64)), w))
    assert np.isfinite(y[:, :2]).all() and np.isnan(y[:, 2]).all()


def test_a_block_format_without_a_contracted_block_is_one_block():
    """An axis as long as a block."""
    forms = [FORMATS[name]["qtype"] for name in BLOCK_FORMATS]
    xs = [np.ones((2, form.size), np.float32) for form in forms]

    @jax.jit
    def products(xs, ws):
        specs = [jqx.QSpec(form, jqx.per_block({0: form.size, 1: 1})) for form in forms]
        ws = [jqx.QTensor.quantize(w, spec) for w, spec in zip(ws, specs, strict=True)]
        return ws, [multiply(x, w) for x, w in zip(xs, ws, strict=True)]

    normal = [np.random.default_rng(7).normal(size=(form.size, 3)) for form in forms]
    ws, results = products(xs, [w.astype(np.float32) for w in normal])
    for x, w, result in zip(xs, ws, results, strict=True):
        assert w.scale.shape == (1, 3)
        error = np.abs(as_float64(result) - real_values(x) @ real_values(w))
        assert np.all(error <= allowed(x, w, MATRICES, x.shape[1]))


def test_the_bound_of_an_int32_counts_the_products_of_a_block():
    """More products than one accumulator holds: each block has its own, and is not split."""
    k = 2**18
    lhs = tensor(np.full((1, k), -128), "int8")
    blocks = tensor(np.full((k, 1), -128), "int8", np.full((4, 1), 2.0**-10))
    whole = tensor(np.full((k, 1), -128), "int8", np.full((1, 1), 2.0**-10))
    for rhs, lengths in [(blocks, [k // 4]), (whole, [131071, 131071, 2])]:
        how = HowTo.of(lhs, rhs, Dimensions.of(MATRICES, 2, 2))
        found = dots(functools.partial(integer.compute, how=how), lhs, rhs)
        assert [dot.invars[1].aval.shape[-2] for dot in found] == lengths
        assert_floats(multiply(lhs, rhs), np.full((1, 1), k * 2.0**4), np.float32)


def test_scales_differ_from_block_to_block_in_these_tests():
    """Else a scale that is applied at the wrong place would go unseen."""
    w = operand("int8", (192, 6), 0, PER_32)
    assert len(np.unique(scales(w))) == w.scale.size
    assert spread(w.scale, w).shape == w.shape
