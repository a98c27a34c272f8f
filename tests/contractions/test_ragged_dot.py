"""`ragged_dot`: what a loop over groups gives in NumPy, where operands are quantized or not.

Where codes are small and scales are powers of two, float32 holds every sum exactly, in any order:
there results are compared bit by bit.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jqx
from jqx._src.contractions.ragged_dot import ragged_dot

from ..arrays import on_device
from ..oracles.contractions import dots, dtypes, exact_tensor, gamma, small_integers
from ..oracles.numerics import as_float64, assert_floats, code_range, nearest
from ..oracles.refusals import assert_refused
from ..strategies import law
from ..tensor.tensors import differences, random_codes, reals, spread_out, tensor
from .blocks import FORMATS, in_format, magnitudes, real_values

compute = jax.jit(ragged_dot, static_argnames=("precision", "preferred_element_type"))


def ragged(lhs, rhs, sizes):
    """The result in NumPy, in the arithmetic of the operands: a slice of rows for each group."""
    y = np.zeros((len(lhs), rhs.shape[2]), np.result_type(lhs, rhs))
    start = 0
    for matrix, size in zip(rhs, np.maximum(sizes, 0), strict=True):
        y[start : start + size] = lhs[start : start + size] @ matrix
        start += size
    return y


SOME = np.array([5, 0, 9, 3])
"""Sizes of four groups, which leave 3 of 20 rows over; tiles have 8 rows."""


@pytest.mark.parametrize(
    "m, lengths, groups",
    [(20, (0, 1, 7, 8, 9, 18, 21), 3), (3, (0, 1, 2), 5), (1100, (0, 1, 512, 587, 1101), 2)],
    ids=["tiles of 8 rows", "fewer rows than groups", "tiles of 512 rows"],
)
def test_all_sizes_of_groups_give_what_lax_gives(m, lengths, groups):
    """Also those that sum to less than the rows, and to more."""
    rng = np.random.default_rng(m)
    x, w = small_integers(rng, (m, 2)), exact_tensor(rng, "int8", (groups, 2, 3), (0, 2))
    all_sizes = np.array(list(itertools.product(lengths, repeat=groups)), np.int32)
    real = reals(w).astype(np.float32)
    expected = np.stack([ragged(x, real, sizes) for sizes in all_sizes])
    for f in (lambda sizes: ragged_dot(x, w, sizes), lambda sizes: lax.ragged_dot(x, real, sizes)):
        assert_floats(jax.jit(functools.partial(lax.map, f))(all_sizes), expected, np.float32)


@pytest.mark.parametrize("dtype", ["int8", "uint32"])
def test_sizes_are_integers_of_any_dtype(dtype):
    """Their sum need not fit; a size beyond the rows, or a negative one, does no harm."""
    rng = np.random.default_rng(0)
    x, w = small_integers(rng, (300, 2)), exact_tensor(rng, "int8", (4, 2, 3), (0,))
    low, high = (max(n, -(2**30)) for n in code_range(dtype))
    for sizes in ([100, 100, 0, 90], [0, 27, high, high], [3, low, 2, low]):
        assert_floats(compute(x, w, np.array(sizes, dtype)), ragged(x, reals(w), sizes), "float32")
    assert_floats(ragged_dot(x, w, [1, 2, 0, 3]), ragged(x, reals(w), [1, 2, 0, 3]), "float32")


INTEGERS = [("int8", "int8"), ("uint8", "int8"), ("uint8", "int4"), ("int16", "uint8")]


@law
@given(st.sampled_from(INTEGERS), st.booleans(), st.integers(0, 2**32 - 1))
def test_integers_are_multiplied_exactly(qtypes, extreme, seed):
    """int32 sums equal those of int64; then they are rounded to float32, once.

    All but the first pair have zero points.
    """
    rng = np.random.default_rng(seed)
    shapes = (20, 60), (4, 60, 3)
    scales = [np.ldexp(1.0, rng.integers(-4, 5, shape)) for shape in [(20, 1), (4, 1, 3)]]

    def draw(qtype, shape):
        return rng.choice(code_range(qtype), shape) if extreme else random_codes(rng, qtype, shape)

    lhs, rhs = (
        tensor(
            draw(qtype, shape), qtype, s, None if qtypes == INTEGERS[0] else draw(qtype, s.shape)
        )
        for qtype, shape, s in zip(qtypes, shapes, scales, strict=True)
    )
    sizes = rng.multinomial(rng.integers(0, 21), np.ones(4) / 4)
    total = ragged(differences(lhs), differences(rhs), sizes)
    assert total.dtype == np.int64 and np.abs(total).max() < 2**31
    scale = ragged(scales[0], scales[1], sizes)
    assert_floats(compute(lhs, rhs, sizes), nearest(total, np.float32) * scale, np.float32)


def test_a_sum_beyond_int32_is_split():
    """33,100 products of 255 by 255, in two exact parts: 3 roundings, of each and of the sum."""
    k = 33_100
    lhs = tensor(np.full((2, k), 255), "uint8", zero_point=[[0]])
    rhs = tensor(np.full((2, k, 1), 255), "uint8", zero_point=np.full((1, 1, 1), 0))
    expected = np.float64(k * 255**2) * np.ones((2, 1))
    error = np.abs(as_float64(compute(lhs, rhs, np.array([1, 1]))) - expected)
    assert np.all(error <= gamma(3) * expected)


K = 100
GRANULARITIES = {
    "per tensor": jqx.per_tensor(),
    "per column": jqx.per_axis(2),
    "per group and column": jqx.per_axis(0, 2),
    "blocks with a tail": jqx.per_block({0: 1, 1: 32, 2: 1}, tail=True),
    "blocks for all groups": jqx.per_block({1: 25, 2: 1}),
    "blocks of groups and columns": jqx.per_block({0: 2, 1: 25, 2: 3}),
    "blocks of groups with a tail": jqx.per_block({0: 3, 2: 1}, tail=True),
}
ROWS = [jqx.per_tensor(), jqx.per_axis(0), jqx.per_block({0: 8, 1: 32}, tail=True)]


def quantized(shape, granularity, name="int8 asymmetric", pack=None):
    return in_format(np.random.default_rng(len(shape)), name, shape, granularity, pack)


def assert_near(result, lhs, rhs, sizes):
    """Asserts that a result is as near as float32 allows: of k products, of two zero points, and
    12 roundings more, relative to the largest of a row, as its digits are.
    """
    expected = ragged(real_values(lhs), real_values(rhs), sizes)
    size = magnitudes(lhs).max(1, keepdims=True) * np.ones(lhs.shape)
    bound = gamma(lhs.shape[1] + 12) * ragged(size, magnitudes(rhs), sizes)
    assert result.shape == expected.shape and result.dtype == jnp.float32
    assert np.all(np.abs(as_float64(result) - expected) <= bound)


def assert_all_near(pairs):
    """As `assert_near`, of operands by name, whose products are one compiled program."""
    results = jax.jit(lambda pairs: {name: ragged_dot(*pair, SOME) for name, pair in pairs.items()})
    for name, result in results(pairs).items():
        assert_near(result, *pairs[name], SOME)


def test_scales_of_matrices_are_shared_in_any_way():
    array, rows = on_device(spread_out((20, K))), quantized((20, K), jqx.per_axis(0))
    beside_array = ("blocks with a tail", "blocks of groups and columns")
    assert_all_near(
        {
            name: (array if name in beside_array else rows, quantized((4, K, 6), granularity))
            for name, granularity in GRANULARITIES.items()
        }
    )


def test_scales_of_rows_are_shared_in_any_way_beside_an_array():
    w = on_device(spread_out((4, K, 6), 1))
    assert_all_near(
        {str(granularity): (quantized((20, K), granularity), w) for granularity in ROWS}
    )


@pytest.mark.many
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_an_operand(name):
    block = getattr(FORMATS[name]["qtype"], "size", 32)
    pack = 1 if name.endswith("packed") else None
    w = quantized((4, 64, 6), jqx.per_block({0: 1, 1: block, 2: 1}), name, pack=pack)
    x = on_device(spread_out((20, 64), 1))
    assert_near(compute(x, w, SOME), x, w, SOME)
    if name in ("int4 packed", "e4m3", "nvfp4"):
        x = quantized((20, 64), jqx.per_block({0: 1, 1: block}), name, pack=pack)
        assert_near(compute(x, w, SOME), x, w, SOME)


@pytest.mark.parametrize("name", ["int8 asymmetric", "int4 packed", "e4m3", "mxfp4"])
def test_large_matrices_are_contracted_as_dot_general_does(name):
    granularity = jqx.per_block({0: 1, 1: 32, 2: 1}) if name == "mxfp4" else jqx.per_axis(0, 2)
    w = quantized((3, 128, 128), granularity, name, pack=1 if name.endswith("packed") else None)
    x, sizes = on_device(spread_out((20, 128), 1)), np.array([9, 0, 10])
    assert_near(compute(x, w, sizes), x, w, sizes)
    (contraction,) = jqx.formulations(ragged_dot)(x, w, sizes)
    (of_one,) = jqx.formulations(jqx.matmul)(x[:8], w[0])
    assert contraction == of_one._replace(times=3 + 17 // 8)
    assert contraction.cpu.name in ("digits", "tiles")


def test_a_tile_is_one_product_of_bytes_or_at_the_precision_asked_for():
    w, best = quantized((4, 32, 6), jqx.per_axis(0)), lax.Precision.HIGHEST
    f = functools.partial(ragged_dot, precision=best)
    (dot,) = dots(f, quantized((20, 32), jqx.per_axis(0)), w, SOME)
    assert dtypes(dot.invars) + dtypes(dot.outvars) == ["int8", "int8", "int32"]
    for dot in dots(f, jnp.ones((20, 32)), w, SOME):
        assert dot.params["precision"] == (best, best)


def test_tiles_have_about_as_many_rows_as_groups():
    """A tile for each group that may have rows, and one for each so many rows more."""
    for m, g, tiles in [(3, 5, 3), (64, 16, 16 + 48 // 8), (512, 16, 16 + 496 // 32), (1100, 2, 4)]:
        x, w = jnp.zeros((m, 2)), tensor(np.zeros((g, 2, 2)), "int8")
        (contraction,) = jqx.formulations(ragged_dot)(x, w, np.zeros(g, np.int32))
        assert contraction.times == tiles


def test_packed_and_swapped_codes_are_those_laid_out_plainly():
    """Packed along `k` they are among the formats."""

    def of_forms(x, w):
        turned = w.transpose(0, 2, 1).pack(2).transpose(0, 2, 1)
        pairs = [(x, w), (x, w.pack(0)), (x.pack(0), w.pack(2)), (x.T.pack(1).T, turned)]
        return [ragged_dot(*pair, SOME) for pair in pairs]

    x = quantized((20, 32), jqx.per_axis(0), "int4 packed")
    w = quantized((4, 32, 6), jqx.per_axis(0, 2), "int4 packed")
    plain, *packed = jax.jit(of_forms)(x, w)
    for result in packed:
        assert_floats(result, plain, np.float32)
    assert_near(plain, x, w, SOME)


def test_it_maps_over_rows_and_matrices_and_sizes():
    rng = np.random.default_rng(3)
    w = exact_tensor(rng, "int8", (2, 4, 3, 5), (0, 1, 3))
    x, sizes = exact_tensor(rng, "int4", (2, 20, 3), (0, 1)), np.stack([SOME, SOME[::-1]])
    expected = [ragged(reals(x[i]), reals(w[i]), sizes[i]) for i in range(2)]
    rows = small_integers(rng, (2, 20, 3))

    @jax.jit
    def mapped(x, w, sizes, rows):
        shared = jax.vmap(ragged_dot, (0, None, None))(rows, w[0], SOME)
        return jax.vmap(ragged_dot)(x, w, sizes), shared

    of_each, shared = mapped(x, w, sizes, rows)
    assert_floats(of_each, np.stack(expected), "float32")
    assert_floats(shared, np.stack([ragged(x, reals(w)[0], SOME) for x in rows]), "float32")


def test_it_runs_on_the_shards_of_a_mesh():
    mesh = jax.make_mesh((1,), ("group",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x = quantized((4, 128, 128), jqx.per_axis(0)), on_device(spread_out((20, 128)))
    for rows, matrices in [("group", "group"), (None, "group")]:
        specs = (P(rows), P(matrices), P(matrices))
        f = jax.shard_map(ragged_dot, mesh=mesh, in_specs=specs, out_specs=P("group"))
        assert_near(jax.jit(f)(x, w, SOME), x, w, SOME)


@pytest.mark.parametrize("zero_point", [False, True])
def test_the_gradient_is_that_of_the_real_values(zero_point):
    """Small integers and powers of two: every sum is exact. Rows of no group have none."""
    rng = np.random.default_rng(5)
    x = rng.integers(-2, 3, (20, 4)).astype(np.float32)
    w = exact_tensor(rng, "int4", (4, 4, 3), (0, 2), zero_point)
    g = rng.integers(-1, 2, (20, 3)).astype(np.float32)

    def loss(x, scale):
        return (ragged_dot(x, dataclasses.replace(w, scale=scale), SOME) * g).sum()

    d = differences(w)
    dx = ragged(g, (d * as_float64(w.scale)).transpose(0, 2, 1), SOME)
    per_row = [np.eye(4)[i] for i in np.repeat(range(4), SOME)] + [np.zeros(4)] * 3
    dscale = np.einsum("me,mn,mk,ekn->en", per_row, g, x, d)[:, None]
    of_x, of_scale = jax.jit(jax.grad(loss, (0, 1)))(x, w.scale)
    assert_floats(of_x, dx, np.float32)
    assert_floats(of_scale, dscale, np.float32)


def test_the_gradient_beside_quantized_rows_is_that_of_the_real_values():
    """Of the scales of both, where both are quantized; of matrices, where they are floats."""
    rng = np.random.default_rng(6)
    x, w = (exact_tensor(rng, "int4", *args) for args in [((20, 4), (0,)), ((4, 4, 3), (0,))])
    g = rng.integers(-1, 2, (20, 3)).astype(np.float32)
    real = on_device(reals(w), jnp.float32)

    def loss(f, of_x, of_w, real):
        q = dataclasses.replace(x, scale=of_x)
        of_codes = f(q, dataclasses.replace(w, scale=of_w), SOME)
        return ((of_codes + f(q, real, SOME)) * g).sum()

    def dense(x, w, sizes):
        w = w.dequantize() if isinstance(w, jqx.QTensor) else w
        return lax.ragged_dot(x.dequantize(), w, sizes)

    @jax.jit
    def gradients(*args):
        return [jax.grad(functools.partial(loss, f), (0, 1, 2))(*args) for f in (ragged_dot, dense)]

    ours, theirs = gradients(x.scale, w.scale, real)
    for of_ours, of_theirs in zip(ours, theirs, strict=True):
        assert np.any(as_float64(of_theirs) != 0)
        assert_floats(of_ours, of_theirs, np.float32)


def test_nan_and_infinity_stay_in_their_group():
    rng = np.random.default_rng(7)
    x, w = small_integers(rng, (20, 4)), exact_tensor(rng, "int8", (4, 4, 3), (0, 2))
    scale, d = np.asarray(w.scale).copy(), differences(w)
    spoilt = [1, 7, 14, 15, 16]  # of group 0, of group 2, and all of group 3
    expected = ragged(x, d * scale, SOME)
    expected[spoilt] = np.nan
    x[1], x[7], x[18] = np.nan, np.inf, np.nan  # the last one is of no group
    scale[1], scale[3] = np.nan, np.inf  # group 1 has no rows
    y = np.array(compute(x, dataclasses.replace(w, scale=scale), SOME))
    assert not np.isfinite(y[spoilt]).any()
    y[spoilt] = np.nan
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("quantized_rows", [False, True])
def test_gradients_are_not_spoilt_by_rows_of_other_groups(quantized_rows):
    """Nor by rows of none, where groups sum to less than the rows, or to more."""
    rng = np.random.default_rng(8)
    q, w = exact_tensor(rng, "int8", (20, 4), (0,)), exact_tensor(rng, "int8", (4, 4, 3), (0, 2))

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(factors, scale, sizes):
        rows = dataclasses.replace(q, scale=factors)
        rows = rows if quantized_rows else rows.dequantize()
        return ragged_dot(rows, dataclasses.replace(w, scale=scale), sizes).sum()

    for row, sizes, group in [(5, [5, 0, 9, 0], 2), (13, [5, 0, 9, 0], 2), (19, [20, 0, 5, 0], 0)]:
        spoilt, clean = q.scale.at[row].set(np.nan), np.delete(range(4), group)
        _, of_scale = map(np.asarray, gradients(spoilt, w.scale, np.array(sizes)))
        assert np.isfinite(of_scale[clean]).all() and np.isnan(of_scale[group]).all()
        of_rows, _ = gradients(q.scale, w.scale.at[group].set(np.nan), np.array(sizes))
        of_group = np.repeat(range(4), sizes)[:20] == group
        np.testing.assert_array_equal(np.isnan(of_rows)[: len(of_group), 0], of_group)
        assert np.isfinite(of_rows[len(of_group) :]).all()
    if not quantized_rows:
        _, of_scale = gradients(q.scale * np.nan, w.scale, np.zeros(4, int))
        np.testing.assert_array_equal(of_scale, np.zeros(w.scale.shape))


@pytest.mark.parametrize(
    "name, pack",
    [
        ("int8", None),
        ("int4 packed", 1),
        pytest.param("int4 packed", None, marks=pytest.mark.slow),
        pytest.param("e4m3", None, marks=pytest.mark.slow),
    ],
)
def test_no_float_copy_of_all_matrices_is_held(name, pack):
    """Temporary memory of the compiled function and its gradient, beside that of float matrices;
    each of them is a sixteenth of it.
    """
    weight, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(16, 256, 256), (64, 256)])
    spec = jqx.QSpec(granularity=jqx.per_axis(0, 2), **FORMATS[name])
    w = jax.eval_shape(functools.partial(jqx.QTensor.quantize, spec=spec, pack=pack), weight)

    def loss(x, scale, w, sizes):
        return (ragged_dot(x, dataclasses.replace(w, scale=scale), sizes) ** 2).sum()

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1)))
    compiled = gradient.lower(x, w.scale, w, np.full((16,), 4)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < weight.size * 4 / 4


def test_the_dtype_is_the_promoted_one_or_that_asked_for():
    w = exact_tensor(np.random.default_rng(8), "int8", (4, 3, 5), (0,), zero_point=False)
    x = np.float32(np.arange(60).reshape(20, 3) % 7)
    expected = ragged(x, reals(w), SOME)
    halves = on_device(x, jnp.bfloat16), w.astype(jnp.bfloat16)
    for y in (compute(*halves, SOME), compute(x, w, SOME, preferred_element_type=jnp.bfloat16)):
        assert_floats(y, nearest(expected, "bfloat16"), "bfloat16")


def test_arrays_go_to_lax():
    x, w = jnp.ones((20, 3), jnp.int8), jnp.ones((4, 3, 5), jnp.int8)
    for options in ({}, {"preferred_element_type": jnp.int32}, {"precision": "highest"}):
        ours, theirs = (
            jax.make_jaxpr(functools.partial(f, **options))(x, w, SOME)
            for f in (ragged_dot, lax.ragged_dot)
        )
        assert str(ours) == str(theirs)


@pytest.mark.parametrize("m, g, k, n", [(0, 4, 3, 5), (6, 0, 3, 5), (6, 2, 0, 5), (6, 2, 3, 0)])
def test_nothing_gives_zeros(m, g, k, n):
    w, sizes = tensor(np.ones((g, k, n)), "int8"), np.ones((g,), np.int32)
    expected = ragged(np.ones((m, k)), reals(w), sizes)
    assert_floats(compute(jnp.ones((m, k)), w, sizes), expected, np.float32)


def test_bad_operands_are_refused():
    w, x = tensor(np.zeros((4, 3, 5)), "int8"), jnp.ones((20, 3))
    for *operands, facts in [
        (x[None], w, SOME, ("rank", "(1, 20, 3)", "(m, k)")),
        (x, w[0], SOME, ("rank", "(3, 5)", "(g, k, n)")),
        (x, w, SOME[None], ("rank", "(1, 4)", "(g,)")),
        (x[:, :2], w, SOME, ("contracted", "(20, 2)", "(4, 3, 5)")),
        (x, w, SOME[:3], ("group sizes", "(3,)", "(4, 3, 5)")),
    ]:
        assert_refused(ragged_dot, operands, ValueError, "ragged_dot", *facts)
    for sizes in (SOME.astype(np.float32), SOME.astype(bool)):
        facts = "`group_sizes`", "integers", sizes.dtype.name
        assert_refused(ragged_dot, (x, w, sizes), TypeError, "ragged_dot", *facts)
    integers = jnp.ones((20, 3), jnp.int8), jnp.ones((4, 3, 5), jnp.int8)
    q = tensor(np.zeros((20, 3)), "int8")
    for operands, name in [((integers[0], w), "`lhs`"), ((q, integers[1]), "`rhs`")]:
        facts = name, "int8", "floating point"
        assert_refused(ragged_dot, (*operands, SOME), TypeError, "ragged_dot", *facts)
    experts = tensor(np.zeros((4, 3, 5)), "int8", np.ones((1, 3, 1)))
    rows = tensor(np.zeros((20, 3)), "int8", np.ones((20, 3)))
    for operands, name in [((x, experts), "`rhs`"), ((rows, w), "`lhs`")]:
        facts = name, "scale", "contracted axis", "(1,)"
        assert_refused(ragged_dot, (*operands, SOME), ValueError, "ragged_dot", *facts)


def test_bad_options_are_refused():
    w, x = tensor(np.zeros((4, 3, 5)), "int8"), jnp.ones((20, 3))
    for dtype in ("int32", "int9"):
        f = functools.partial(ragged_dot, preferred_element_type=dtype)
        facts = "preferred_element_type", dtype
        assert_refused(f, (x, w, SOME), TypeError, "ragged_dot", *facts)
    f = functools.partial(ragged_dot, group_offset=jnp.array([1]))
    for rhs in (w, jnp.ones((4, 3, 5))):
        assert_refused(f, (x, rhs, SOME), NotImplementedError, "ragged_dot", "`group_offset`")
